"""Muon: orthogonalized momentum, for the matrices inside the blocks.

A gradient's few large singular values drown its many small ones, yet the rare directions are worth learning too.
Muon replaces the momentum by (nearly) its polar factor, so that every direction moves equally far. One update, for a
stack of matrices of one shape:

    momentum         running mean of the gradients; with Nesterov momentum the newest gradient counts once more
    orthogonalize    `orthogonal.py`
    NorMuon          a matrix with orthonormal columns can still have long and short rows. Divide each row by the root
                     of its second moment (running mean of its mean square), then restore the matrix's Frobenius norm.
                     Rows in a tall or square matrix, columns in a wide one.
    scale            × √max(1, rows/cols), so that a layer that widens moves its outputs as far as one that does not
    weight decay     cautious: only entries that the update moves towards zero as well

All matrices of one shape are updated by one call of one compiled graph. The hyperparameters are 0-D tensors: the graph
reads their values when it runs, so a schedule never triggers a recompilation.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from nanorun.config import OptimConfig
from nanorun.optim.groups import HyperparameterBuffer, ParameterGroup
from nanorun.optim.orthogonal import matmul_dtype, orthogonalize
from nanorun.optim.schedules import ScheduledHyperparameters

MIN_SECOND_MOMENT = 1e-10  # keeps a row that never moved from being scaled up


def muon_update(
    params: Tensor,  # (N, rows, cols), as are the gradients and the momentum
    grads: Tensor,
    momentum: Tensor,
    second_moment: Tensor | None,  # (N, rows, 1) or (N, 1, cols); None: without NorMuon
    lr: Tensor,
    momentum_beta: Tensor,
    weight_decay: Tensor,
    beta2: Tensor,
    apply_update: Tensor | None = None,  # 0-D bool; where false, everything is returned unchanged
    *,
    method: str,
    dtype: torch.dtype | None,
    nesterov: bool,
    cautious: bool,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The new parameters, momentum and second moment. Pure: changes nothing in place."""
    weights, grads = params.to(momentum.dtype), grads.to(momentum.dtype)
    before = params, momentum, second_moment
    momentum = momentum_beta * momentum + (1 - momentum_beta) * grads
    update = momentum_beta * momentum + (1 - momentum_beta) * grads if nesterov else momentum
    update = orthogonalize(update, method, dtype)
    if second_moment is not None:  # NorMuon
        mean_square = update.square().mean(_shorter_dim(update.shape), keepdim=True)
        second_moment = beta2 * second_moment + (1 - beta2) * mean_square
        inverse = second_moment.clamp_min(MIN_SECOND_MOMENT).reciprocal()
        # The squared Frobenius norms before and after follow from the mean squares, without another pass.
        norm = mean_square.sum((-2, -1), keepdim=True)
        new_norm = (mean_square * inverse).sum((-2, -1), keepdim=True)
        restore = norm / new_norm.clamp_min(torch.finfo(new_norm.dtype).tiny)
        update = update * (inverse * restore).sqrt()
    update = update * max(1.0, params.size(-2) / params.size(-1)) ** 0.5
    decay = weight_decay * weights
    if cautious:
        decay = decay * (update * weights >= 0)
    after = (weights - lr * (update + decay)).to(params.dtype), momentum, second_moment
    if apply_update is None:
        return after
    return (
        torch.where(apply_update, after[0], before[0]),
        torch.where(apply_update, after[1], before[1]),
        None if after[2] is None or before[2] is None else torch.where(apply_update, after[2], before[2]),
    )


def _shorter_dim(shape: torch.Size) -> int:
    return -1 if shape[-2] >= shape[-1] else -2


class MuonUnit:
    """A stack of matrices of one shape. Each kind of state is one stacked tensor."""

    def __init__(self, group: ParameterGroup, config: OptimConfig, update: Callable[..., Any]) -> None:
        matrix = group.params[0]
        self.group, self.update, self.beta2 = group, update, config.beta2
        self.hyperparameters = HyperparameterBuffer(group, 4)
        self.options: dict[str, Any] = {
            "method": config.orthogonalize,
            "dtype": matmul_dtype(matrix),
            "nesterov": config.nesterov,
            "cautious": config.cautious_decay,
        }
        shape = [len(group.params), *matrix.shape]
        self.momentum = matrix.new_zeros(shape, dtype=group.state_dtype, requires_grad=False)
        self.second_moment: Tensor | None = None
        if config.normuon:
            shape[_shorter_dim(matrix.shape)] = 1
            self.second_moment = self.momentum.new_zeros(shape)

    def step(
        self, grads: list[Tensor], now: ScheduledHyperparameters, updates: int, apply_update: Tensor | None
    ) -> None:
        group, params = self.group, list[Tensor](self.group.params)
        lr, weight_decay = group.lr * now.lr_scale, group.weight_decay * now.weight_decay_scale
        new, self.momentum, self.second_moment = self.update(
            torch.stack(params),
            torch.stack(grads),
            self.momentum,
            self.second_moment,
            *self.hyperparameters.set(lr, now.momentum, weight_decay, self.beta2),
            apply_update,
            **self.options,
        )
        torch._foreach_copy_(params, new.unbind())

    def state(self) -> dict[str, tuple[Tensor, ...]]:
        """Views of the stacked tensors, one per matrix."""
        stacks = {"momentum": self.momentum, "second_moment": self.second_moment}
        return {kind: stack.unbind() for kind, stack in stacks.items() if stack is not None}
