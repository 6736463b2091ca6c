"""Quantization in plain PyTorch."""

import torch
import torch.nn.functional as F
from torch import Tensor

from nanorun.model.kernels.fp8.kernel import FP8_MAX, padded


def quantize(x: Tensor, bound: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """(N, D) in FP8, its transpose and the scale, for entries of at most `bound`."""
    exponent = torch.log2(bound.double() / FP8_MAX[dtype]).ceil()
    scale = torch.where(bound > 0, torch.exp2(exponent), 1.0).float()
    q = (x.float() / scale).half().to(dtype)  # the kernel transposes in fp16, then rounds
    transposed = F.pad(q.float().T, (0, padded(x.shape[0]) - x.shape[0])).to(dtype)
    return q, transposed, scale


def dequantize(q: Tensor, scale: Tensor) -> Tensor:
    return q.double() * scale.double()


def amax_and_row_norm(x: Tensor) -> Tensor:
    """The largest absolute entry of (N, D) and the largest L2 norm of a row."""
    wide = x.float()
    return torch.stack([wide.abs().amax(), torch.linalg.vector_norm(wide, dim=1).amax()])
