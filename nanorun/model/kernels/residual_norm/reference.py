"""The residual stream and its norm in plain PyTorch, differentiable by autograd."""

import torch.nn.functional as F
from torch import Tensor

from nanorun.config import NORM_EPSILON


def residual_norm(
    x: Tensor, y: Tensor | None, x0: Tensor | None, lambda_: Tensor | None, mu: Tensor | None
) -> tuple[Tensor, Tensor]:
    """s = λ·(x + y) + μ·x0 of (N, D), with as many of its terms as there are, and the RMS norm of s."""
    s = x if y is None else x + y
    if x0 is not None and lambda_ is not None and mu is not None:
        s = lambda_.to(x.dtype) * s + mu.to(x.dtype) * x0
    return s, F.rms_norm(s, (s.shape[-1],), eps=NORM_EPSILON)
