"""AdamW, for everything that Muon does not train: embeddings, the head, gates and scalars.

Each entry moves by its first moment (running mean of the gradient) over the root of its second moment (running mean
of the squared gradient), so that all entries move about equally far however large their gradients are. Both moments
start at zero and are corrected for that bias. Weight decay is decoupled: each update also shrinks the weights by
lr·weight_decay, without passing through the moments.

As in `muon.py`, the hyperparameters are 0-D tensors, so that no schedule triggers a recompilation.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from nanorun.optim.groups import HyperparameterBuffer, ParameterGroup
from nanorun.optim.schedules import ScheduledHyperparameters

EPSILON = 1e-10


def adamw_update_(
    params: list[Tensor],
    grads: list[Tensor],
    first_moments: list[Tensor],
    second_moments: list[Tensor],
    lr: Tensor,
    weight_decay: Tensor,
    beta1: Tensor,
    beta2: Tensor,
    bias_correction1: Tensor,  # 1 - beta1^t at the t-th update
    bias_correction2: Tensor,
    apply_update: Tensor | None = None,
) -> None:
    """Updates every parameter of a group in place: compiled, one fused kernel each."""

    def assign(target: Tensor, new: Tensor) -> None:
        target.copy_(new if apply_update is None else torch.where(apply_update, new, target))

    for param, grad, first, second in zip(params, grads, first_moments, second_moments, strict=True):
        weight, grad = param.to(first.dtype), grad.to(first.dtype)
        new_first = beta1 * first + (1 - beta1) * grad
        new_second = beta2 * second + (1 - beta2) * grad.square()
        update = (new_first / bias_correction1) / ((new_second / bias_correction2).sqrt() + EPSILON)
        assign(param, ((1 - lr * weight_decay) * weight - lr * update).to(param.dtype))
        assign(first, new_first)
        assign(second, new_second)


class AdamWGroup:
    """The parameters of a group and their two moments."""

    def __init__(self, group: ParameterGroup, update: Callable[..., Any]) -> None:
        if group.betas is None:
            raise ValueError(f"AdamW needs betas, but the group {group.name} has none")
        self.group, self.betas, self.update = group, group.betas, update
        self.first = [torch.zeros_like(p, dtype=group.state_dtype, requires_grad=False) for p in group.params]
        self.second = [torch.zeros_like(moment) for moment in self.first]
        self.hyperparameters = HyperparameterBuffer(group, 6)

    def step(
        self, grads: list[Tensor], now: ScheduledHyperparameters, updates: int, apply_update: Tensor | None
    ) -> None:
        group, (beta1, beta2) = self.group, self.betas
        tensors = self.hyperparameters.set(
            group.lr * now.lr_scale, group.weight_decay, beta1, beta2, 1 - beta1**updates, 1 - beta2**updates
        )
        self.update(list(group.params), grads, self.first, self.second, *tensors, apply_update)

    def state(self) -> dict[str, list[Tensor]]:
        return {"first_moment": self.first, "second_moment": self.second}
