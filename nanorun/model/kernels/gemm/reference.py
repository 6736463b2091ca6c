"""The epilogues in plain PyTorch. `acc` is a·bᵀ; `c` and `x0` have its shape, all other operands are single numbers."""

from torch import Tensor


def plain(acc: Tensor) -> Tensor:
    return acc


def scaled(acc: Tensor, a_scale: Tensor, b_scale: Tensor) -> Tensor:
    return acc * (a_scale * b_scale)


def squared(acc: Tensor, factor: Tensor) -> Tensor:
    return (acc * factor).clamp_min(0) * (acc * factor)


def residual(acc: Tensor, c: Tensor) -> Tensor:
    return acc + c


def scaled_residual(acc: Tensor, c: Tensor, a_scale: Tensor, b_scale: Tensor) -> Tensor:
    return acc * (a_scale * b_scale) + c


def mixed_residual(
    acc: Tensor, c: Tensor, x0: Tensor, a_scale: Tensor, b_scale: Tensor, lambda_: Tensor, mu: Tensor
) -> Tensor:
    return lambda_ * (acc * (a_scale * b_scale) + c) + mu * x0
