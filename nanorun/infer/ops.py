"""What a decode step is made of, and the one place where a faster kernel may take its part.

A step at small batch is bound by the number of kernels it launches and the bytes it reads, so what a kernel
may fuse is named here as one operation: a norm goes with the matrix behind it, ReLU² and the residual with
the matrix before them, and attention reads the cache where it lies. `PLAIN` is the definition of each in
torch, for any device and dtype: the truth that kernels are compared with. `choose` is asked once, when an
engine is built.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from nanorun.infer.weights import Matrix
from nanorun.model.gpt import norm

# Shapes: N rows, H heads, K kv heads, D head dimension, L length of a ring, S slots.


@dataclass(frozen=True)
class Ops:
    name: str
    norm_linear: Callable[[Tensor, Matrix], Tensor]  # norm(x) Wᵀ
    norm_linear_relu2: Callable[[Tensor, Matrix], Tensor]  # relu(norm(x) Wᵀ)²
    linear_add: Callable[[Tensor, Matrix, Tensor], Tensor]  # residual + x Wᵀ
    decode_attention: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, int, int], Tensor]


def linear(x: Tensor, matrix: Matrix) -> Tensor:
    if matrix.scale is None:
        return F.linear(x, matrix.weight)
    return F.linear(x, matrix.weight.to(x.dtype)) * matrix.scale.to(x.dtype)


def _norm_linear(x: Tensor, matrix: Matrix) -> Tensor:
    return linear(norm(x), matrix)


def _norm_linear_relu2(x: Tensor, matrix: Matrix) -> Tensor:
    return F.relu(linear(norm(x), matrix)).square()


def _linear_add(x: Tensor, matrix: Matrix, residual: Tensor) -> Tensor:
    return residual + linear(x, matrix)


def decode_attention(
    q_nhd: Tensor, k_skld: Tensor, v_skld: Tensor, slots: Tensor, lengths: Tensor, window: int, longest: int
) -> Tensor:
    """One query a row over its slot: row n is the newest of `lengths[n]` tokens of slot `slots[n]`.

    No length is more than `longest`, which lets this version leave out the part of the cache that no row
    has reached. Several rows may be of one slot: each sees what its own length lets it see.
    """
    ring, kv_heads = k_skld.size(2), k_skld.size(1)
    reached = min(ring, longest)
    k, v = k_skld[:, :, :reached][slots], v_skld[:, :, :reached][slots]  # (N, K, reached, D)
    index = torch.arange(reached, device=q_nhd.device)
    age = (lengths[:, None] - 1 - index) % ring  # how many tokens before the newest this key is
    seen = age < lengths.clamp(max=window)[:, None]
    grouped = q_nhd.unflatten(1, (kv_heads, -1))  # heads that share a key are queries of one head
    return F.scaled_dot_product_attention(grouped, k, v, attn_mask=seen[:, None, None]).flatten(1, 2)


PLAIN = Ops("plain", _norm_linear, _norm_linear_relu2, _linear_add, decode_attention)


def choose(device: torch.device) -> Ops:
    """The fastest there is for this device."""
    return PLAIN
