"""Muon: momentum, made orthogonal, for the matrices inside the blocks.

A gradient's few large singular values drown its many small ones, and yet the rare directions are worth
learning too. Muon replaces the momentum by (nearly) its polar factor, so that every direction moves equally.
One update, for a stack of matrices of one shape:

    momentum     an average of the gradients; with Nesterov's trick the newest gradient counts once more
    orthogonal   `orthogonal.py`
    NorMuon      a matrix of orthonormal columns can still have long and short rows. Divide each row by the
                 root of a running average of its mean square, then give the matrix back its Frobenius norm.
                 Rows in a tall or square matrix, columns in a wide one.
    size         × √max(1, rows/cols), so that a layer that widens moves its outputs as far as one that does not
    decay        towards zero, cautiously: only those entries that the update moves towards zero as well

All matrices of one shape are updated by one call, and one compiled graph. The hyperparameters go in as 0-D
tensors: the graph reads their values when it runs, so a schedule never makes it compile again.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from nanorun.config import OptimConfig
from nanorun.optim.groups import Group, Scalars
from nanorun.optim.orthogonal import ORTHOGONALIZERS, matmul_dtype
from nanorun.optim.schedules import Rates

SMALLEST_MEAN_SQUARE = 1e-10  # a row that never moved is not blown up


def muon_update(
    params: Tensor,  # (N, rows, cols), as are the gradients and the momentum
    grads: Tensor,
    momentum: Tensor,
    second_moment: Tensor | None,  # (N, rows, 1) or (N, 1, cols); None: without NorMuon
    rate: Tensor,
    mix: Tensor,  # how much of the momentum stays
    decay: Tensor,
    beta2: Tensor,
    wanted: Tensor | None = None,  # 0-D; where false, all comes back as it was
    *,
    orthogonalize: str,
    dtype: torch.dtype | None,
    nesterov: bool,
    cautious: bool,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The new parameters, momentum and second moment. A pure function: nothing is changed in place."""
    weights, grads = params.to(momentum.dtype), grads.to(momentum.dtype)
    before = params, momentum, second_moment
    momentum = mix * momentum + (1 - mix) * grads
    update = mix * momentum + (1 - mix) * grads if nesterov else momentum
    update = ORTHOGONALIZERS[orthogonalize](update, dtype=dtype)
    if second_moment is not None:
        update, second_moment = even_out(update, second_moment, beta2)
    update = update * max(1.0, params.size(-2) / params.size(-1)) ** 0.5
    pull = decay * weights
    if cautious:
        pull = pull * (update * weights >= 0)
    after = (weights - rate * (update + pull)).to(params.dtype), momentum, second_moment
    if wanted is None:
        return after
    return (
        torch.where(wanted, after[0], before[0]),
        torch.where(wanted, after[1], before[1]),
        None if after[2] is None or before[2] is None else torch.where(wanted, after[2], before[2]),
    )


def even_out(update: Tensor, second_moment: Tensor, beta2: Tensor) -> tuple[Tensor, Tensor]:
    """NorMuon: rows (columns, if wide) of like size, the matrix as long as before; the new second moment."""
    mean_square = update.square().mean(_shorter(update.shape), keepdim=True)
    second_moment = beta2 * second_moment + (1 - beta2) * mean_square
    inverse = second_moment.clamp_min(SMALLEST_MEAN_SQUARE).reciprocal()
    # The Frobenius norms before and after follow from the mean squares, without another pass over the matrix.
    before = mean_square.sum((-2, -1), keepdim=True)
    after = (mean_square * inverse).sum((-2, -1), keepdim=True)
    restore = before / after.clamp_min(torch.finfo(after.dtype).tiny)
    return update * (inverse * restore).sqrt(), second_moment


def _shorter(shape: torch.Size) -> int:
    """The dimension that is averaged away."""
    return -1 if shape[-2] >= shape[-1] else -2


class MuonStack:
    """Matrices of one shape, and their state as one tensor each."""

    def __init__(self, group: Group, config: OptimConfig, update: Callable[..., Any]) -> None:
        self.group = group
        self.update = update
        self.beta2 = config.beta2
        self.scalars = Scalars(group, 4)
        self.switches: dict[str, Any] = {
            "orthogonalize": config.orthogonalize,
            "dtype": matmul_dtype(group.params[0]),
            "nesterov": config.nesterov,
            "cautious": config.cautious_decay,
        }
        matrix = group.params[0]
        shape = [len(group.params), *matrix.shape]
        self.momentum = matrix.new_zeros(shape, dtype=group.state_dtype, requires_grad=False)
        self.second_moment: Tensor | None = None
        if config.normuon:
            shape[_shorter(matrix.shape)] = 1
            self.second_moment = self.momentum.new_zeros(shape)

    def step(self, grads: list[Tensor], rates: Rates, updates: int, wanted: Tensor | None = None) -> None:
        group = self.group
        params: list[Tensor] = list(group.params)
        rate, decay = group.rate * rates.rate_scale, group.decay * rates.decay_scale
        new, self.momentum, self.second_moment = self.update(
            torch.stack(params),
            torch.stack(grads),
            self.momentum,
            self.second_moment,
            *self.scalars.set(rate, rates.momentum, decay, self.beta2),
            wanted,
            **self.switches,
        )
        torch._foreach_copy_(params, new.unbind())

    def state(self) -> dict[str, Tensor]:
        """Views into the stacks, a matrix each."""
        stacks = {"momentum": self.momentum}
        if self.second_moment is not None:
            stacks["second_moment"] = self.second_moment
        return {
            f"{name}.{kind}": view
            for kind, stack in stacks.items()
            for name, view in zip(self.group.names, stack.unbind(), strict=True)
        }
