"""Orthogonalization: keep a matrix's singular directions and make all singular values (nearly) 1.

Write a matrix as U·S·Vᵀ. Its polar factor U·Vᵀ is the nearest matrix whose singular values are all 1. A singular
value decomposition computes it exactly and slowly. The two fast methods never factor anything. An odd polynomial
a·x + b·x³ + c·x⁵ of a matrix, evaluated as a·X + (b·A + c·A²)·X with A = X·Xᵀ, acts on each singular value by itself
and leaves U and V unchanged. So a few polynomials that push every number in (0, 1] towards 1 orthogonalize a matrix
with nothing but GEMMs, which GPUs do best.

    newton_schulz   One polynomial, five times. Singular values end between 0.68 and 1.21 if they began above
                    0.002 of the matrix's Frobenius norm.
    polar_express   A different polynomial each step, each optimal for what the previous one left over
                    (https://arxiv.org/abs/2505.16932). They end between 0.858 and 1.142 if they began above
                    0.0012 of the norm.

Smaller ones stay below 1: each method multiplies a vanishing singular value by about 970 (Polar Express) or 480
(Newton–Schulz). For an optimizer, near 1 is near enough.
"""

import torch
from torch import Tensor

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
