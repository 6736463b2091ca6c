"""Rotary position embedding and QK norm in plain PyTorch, differentiable by autograd."""

import torch
import torch.nn.functional as F
from torch import Tensor

from nanorun.config import NORM_EPSILON


def rope_norm(
    qkv: Tensor, cos: Tensor, sin: Tensor, heads: int, kv_heads: int, gain: float
) -> tuple[Tensor, Tensor, Tensor]:
    """(B, T, (H + 2K)·D) to q (B, T, H, D), k and v (B, T, K, D). cos and sin: (T, D/2) or (B, T, D/2)."""
    head_dim = qkv.size(-1) // (heads + 2 * kv_heads)
    q, k, v = qkv.unflatten(-1, (-1, head_dim)).split([heads, kv_heads, kv_heads], dim=-2)
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)

    def rotate_and_norm(x: Tensor) -> Tensor:
        a, b = x.chunk(2, dim=-1)
        rotated = torch.cat([a * cos + b * sin, b * cos - a * sin], dim=-1)
        return F.rms_norm(rotated, (head_dim,), eps=NORM_EPSILON) * gain

    return rotate_and_norm(q), rotate_and_norm(k), v
