"""Muon: orthogonalized momentum, for the matrices inside the blocks.

A gradient's few large singular values drown its many small ones, yet the rare directions are worth learning too.
Muon replaces the momentum by (nearly) its polar factor, so that every direction moves equally far. One update, for a
stack of matrices of one shape:

    momentum         running mean of the gradients; with Nesterov momentum the newest gradient counts once more
    orthogonalize    all singular values become (nearly) 1; see below
    NorMuon          a matrix with orthonormal columns can still have long and short rows. Divide each row by the root
                     of its second moment (running mean of its mean square), then restore the matrix's Frobenius norm.
                     Rows in a tall or square matrix, columns in a wide one.
    scale            × √max(1, rows/cols), so that a layer that widens moves its outputs as far as one that does not
    weight decay     cautious: only entries that the update moves towards zero as well

All matrices of one shape are updated by one call of one compiled graph. The hyperparameters are 0-D tensors: the graph
reads their values when it runs, so a schedule never triggers a recompilation.

**Orthogonalization.** Write a matrix as U·S·Vᵀ. Its polar factor U·Vᵀ is the nearest matrix whose singular values are
all 1. A singular value decomposition computes it exactly and slowly. The two fast methods never factor anything. An odd
polynomial a·x + b·x³ + c·x⁵ of a matrix, evaluated as a·X + (b·A + c·A²)·X with A = X·Xᵀ, acts on each singular value
by itself and leaves U and V unchanged. So a few polynomials that push every number in (0, 1] towards 1 orthogonalize a
matrix with nothing but GEMMs, which GPUs do best.

    newton_schulz   One polynomial, five times. Singular values end between 0.68 and 1.21 if they began above
                    0.002 of the matrix's Frobenius norm.
    polar_express   A different polynomial each step, each optimal for what the previous one left over
                    (https://arxiv.org/abs/2505.16932). They end between 0.858 and 1.142 if they began above
                    0.0012 of the norm.

Smaller ones stay below 1: each method multiplies a vanishing singular value by about 970 (Polar Express) or 480
(Newton–Schulz). For an optimizer, near 1 is near enough.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from nanorun.config import OptimConfig
from nanorun.optim.groups import HyperparameterBuffer, ParameterGroup
from nanorun.optim.schedules import ScheduledHyperparameters

MIN_SECOND_MOMENT = 1e-10  # keeps a row that never moved from being scaled up
POLYNOMIALS = {
    "newton_schulz": ((3.4445, -4.7750, 2.0315),) * 5,
    "polar_express": (
        (8.156554524902461, -22.48329292557795, 15.878769915207462),
        (4.042929935166739, -2.808917465908714, 0.5000178451051316),
        (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
        (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
        (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
    ),
}
# The polynomials of Polar Express grow fast above 1, so rounding to bf16, by up to 0.4% an entry, must not push a
# singular value above it: the norm is divided by this much more.
MARGINS = {"newton_schulz": 1.0, "polar_express": 1.02}


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


def orthogonalize(x: Tensor, method: str, dtype: torch.dtype | None = None) -> Tensor:
    """Nearly orthogonal matrices (..., rows, cols), in the dtype of x. The GEMMs run in `dtype`, by default x's."""
    is_tall = x.size(-2) > x.size(-1)
    # No singular value exceeds the Frobenius norm. A matrix of zeros stays zeros.
    norm: Tensor = torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True)
    y = (x / (norm * MARGINS[method]).clamp_min(torch.finfo(x.dtype).tiny)).to(dtype or x.dtype)
    if is_tall:  # so that A is the smaller of the two Gram matrices
        y = y.mT
    for a, b, c in POLYNOMIALS[method]:
        gram = y @ y.mT
        y = a * y + (b * gram + c * (gram @ gram)) @ y
    if is_tall:
        y = y.mT
    return y.to(x.dtype)


def matmul_dtype(matrix: Tensor) -> torch.dtype | None:
    """The dtype of the GEMMs: 16 bits on a GPU, whose rounding does not matter here."""
    if not matrix.is_cuda:
        return None
    return torch.bfloat16 if torch.cuda.get_device_capability(matrix.device)[0] >= 8 else torch.float16


class MuonGroup:
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
