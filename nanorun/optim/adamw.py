"""AdamW, for everything that Muon is not for: embeddings, the head, gates and scalars.

Each entry moves by its average gradient over the root of its average squared gradient, so that all entries
move about equally far however large their gradients are. Both averages start at zero and are corrected for
that. The weights also shrink by rate·decay of themselves at each update (decoupled decay), which does not
pass through the averages.

As in `muon.py`, the hyperparameters are 0-D tensors, so that no schedule ever compiles anything again.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from nanorun.optim.groups import Group, Scalars
from nanorun.optim.schedules import Rates

EPSILON = 1e-10


def adamw_update_(
    params: list[Tensor],
    grads: list[Tensor],
    first_moments: list[Tensor],
    second_moments: list[Tensor],
    rate: Tensor,
    decay: Tensor,
    beta1: Tensor,
    beta2: Tensor,
    correction1: Tensor,  # 1 - beta1^t at the t-th update
    correction2: Tensor,
    wanted: Tensor | None = None,
) -> None:
    """One update of every parameter of a group, in place: compiled, one kernel for each."""

    def put(into: Tensor, new: Tensor) -> None:
        into.copy_(new if wanted is None else torch.where(wanted, new, into))

    for param, grad, first, second in zip(params, grads, first_moments, second_moments, strict=True):
        weight, grad = param.to(first.dtype), grad.to(first.dtype)
        new_first = beta1 * first + (1 - beta1) * grad
        new_second = beta2 * second + (1 - beta2) * grad.square()
        update = (new_first / correction1) / ((new_second / correction2).sqrt() + EPSILON)
        put(param, ((1 - rate * decay) * weight - rate * update).to(param.dtype))
        put(first, new_first)
        put(second, new_second)


class AdamWGroup:
    """The parameters of a group and their two moments."""

    def __init__(self, group: Group, update: Callable[..., Any]) -> None:
        if group.betas is None:
            raise ValueError(f"AdamW needs betas, and the group {group.name} has none")
        self.group = group
        self.betas = group.betas
        self.update = update
        self.first = [torch.zeros_like(p, dtype=group.state_dtype, requires_grad=False) for p in group.params]
        self.second = [torch.zeros_like(moment) for moment in self.first]
        self.scalars = Scalars(group, 6)

    def step(self, grads: list[Tensor], rates: Rates, updates: int, wanted: Tensor | None = None) -> None:
        group, (beta1, beta2) = self.group, self.betas
        rate = group.rate * rates.rate_scale
        scalars = self.scalars.set(rate, group.decay, beta1, beta2, 1 - beta1**updates, 1 - beta2**updates)
        self.update(list(group.params), grads, self.first, self.second, *scalars, wanted)

    def state(self) -> dict[str, Tensor]:
        moments = {"first_moment": self.first, "second_moment": self.second}
        return {
            f"{name}.{kind}": moment
            for kind, tensors in moments.items()
            for name, moment in zip(self.group.names, tensors, strict=True)
        }
