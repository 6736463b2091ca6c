"""Causal sliding-window attention in plain PyTorch, differentiable by autograd."""

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


def flash_attention(q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
    """Causal attention of (B, T, H, D) over (B, T, K, D); position i attends to the `window` positions up to itself."""
    at = torch.arange(q.size(1), device=q.device)
    mask = (at[None] <= at[:, None]) & (at[None] > at[:, None] - window)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True).transpose(1, 2)
