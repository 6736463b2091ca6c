"""Embedding gradients and gated value embeddings in plain PyTorch."""

from torch import Tensor


def accumulate(grad: Tensor, token_ids: Tensor, rows: Tensor) -> Tensor:
    """grad (V, D) plus each of rows (..., D), added to the row of its token (...)."""
    return grad.index_add(0, token_ids.flatten(), rows.flatten(0, -2).to(grad.dtype))


def add_gated_rows(v: Tensor, gate: Tensor, rows: Tensor) -> Tensor:
    """v (..., K, D) plus embedding rows (..., K·D) times gate (..., K)."""
    return v + gate.unsqueeze(-1) * rows.to(v.dtype).view(v.shape)
