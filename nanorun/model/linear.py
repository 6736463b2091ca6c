"""Products with weights that are fp32 masters, in the dtype of what they meet.

`Linear` casts its weight at each use, which a compiler fuses into nothing: a micro-step reads 4 bytes a weight
and writes 2. With copies made once after each update (`LowCopy`, behind `cast_once`) it reads the 2 bytes alone;
the gradient goes to the master all the same.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanorun.model.kernels import opaque_to_dynamo


class Linear(nn.Linear):
    """Without bias; the fp32 weight is cast to the activation's dtype, unless there is a copy in it."""

    def __init__(self, inputs: int, outputs: int, copied_as: torch.dtype | None = None) -> None:
        super().__init__(inputs, outputs, bias=False)
        self.low = LowCopy(outputs, inputs, copied_as) if copied_as else None

    def forward(self, x: Tensor) -> Tensor:
        if self.low is not None:
            return self.low(x, self.weight)
        return F.linear(x, self.weight.to(x.dtype))

    def renew(self) -> None:
        if self.low is not None:
            self.low.renew(self.weight)


class LowCopy(nn.Module):
    """A weight, or several stacked, in fewer bits. `renew` after each change of them."""

    rows: Tensor

    def __init__(self, outputs: int, inputs: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.register_buffer("rows", torch.empty(outputs, inputs, dtype=dtype), persistent=False)

    def forward(self, x: Tensor, *weights: Tensor) -> Tensor:
        y = _product(x.flatten(0, -2), self.rows, *weights)
        return y.view(*x.shape[:-1], -1)

    @torch.no_grad()
    def renew(self, *weights: Tensor) -> None:
        for rows, weight in zip(self.rows.split([w.shape[0] for w in weights]), weights, strict=True):
            rows.copy_(weight)


@opaque_to_dynamo
def _product(*arguments: Any) -> Tensor:
    result: Tensor = _Product.apply(*arguments)
    return result


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Tensor, *weights: Tensor) -> Tensor:
        ctx.save_for_backward(x, rows)
        ctx.outputs = [weight.shape[0] for weight in weights]
        return x @ rows.T

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, rows = ctx.saved_tensors
        dweight = (dy.T @ x).float() if x.dtype != torch.float64 else dy.T @ x
        return dy @ rows, None, *dweight.split(ctx.outputs)
