"""Rotary position embedding and QK norm for FP8 layers: in place, with a gradient in e5m2."""

from typing import Any

import torch
from torch import Tensor

from nanorun.model.kernels import fp8
from nanorun.model.kernels.gemm.kernel import gemm_fp8
from nanorun.model.kernels.language import tl, triton
from nanorun.model.kernels.rope_norm.kernel import launch_forward, table_and_constants

# For each program of the kernel that also writes a transpose: 222 µs on an H200 for 65,536 tokens of a d12; 64: 269.
TILE_TOKENS = 32
SLOTS = 64
AMAX_NUMEL = 4_096  # elements of a gradient that a program of the amax kernel reads


@triton.jit
def _sampled_amax(x, tokens, stride, WIDTH: tl.constexpr, NUMEL: tl.constexpr):
    element = tl.program_id(0) * NUMEL + tl.arange(0, NUMEL)
    token = element // WIDTH * stride
    at = token.to(tl.int64) * WIDTH + element % WIDTH
    return tl.max(tl.abs(tl.load(x + at, mask=token < tokens, other=0.0).to(tl.float32)), 0)


@triton.jit(do_not_specialize=["stride"])
def _qkv_amax_kernel(
    dq, dk, dv, amax, tokens, stride, headroom, Q: tl.constexpr, KV: tl.constexpr, NUMEL: tl.constexpr
):
    """The amax of (N, Q) and of two (N, KV), of every `stride`-th token, in one launch."""
    which = tl.program_id(1)
    if which == 0:
        value = _sampled_amax(dq, tokens, stride, Q, NUMEL)
    elif which == 1:
        value = _sampled_amax(dk, tokens, stride, KV, NUMEL)
    else:
        value = _sampled_amax(dv, tokens, stride, KV, NUMEL)
    tl.atomic_max(amax + which, value * headroom, sem="relaxed")


@triton.jit
def _rope_norm_backward_fp8_kernel(
    rotated,
    inv_rms,
    cos,
    sin,
    dq,
    dk,
    dv,
    max_inv_rms,
    amax,
    reach,
    out,
    out_t,
    scale,
    tokens,
    padded,
    table,
    gain,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    TOKENS: tl.constexpr,
    SLOTS: tl.constexpr,
    FP8_MAX: tl.constexpr,
):
    qk_amax = tl.maximum(tl.load(amax), tl.load(amax + 1))
    largest_inv_rms = tl.max(tl.load(max_inv_rms + tl.arange(0, SLOTS)), 0)
    bound = tl.maximum(qk_amax * largest_inv_rms * reach, tl.load(amax + 2))
    scale_value, inv_scale = fp8.power_of_two_scale(bound, FP8_MAX)
    head = tl.program_id(0) % (HEADS + 2 * KV_HEADS)
    token = tl.program_id(0) // (HEADS + 2 * KV_HEADS) * TOKENS + tl.arange(0, TOKENS)
    half = tl.arange(0, DIM // 2)
    inside = (token < tokens)[:, None]
    row = token.to(tl.int64)[:, None]
    if head >= HEADS + KV_HEADS:
        of = dv + row * (KV_HEADS * DIM) + (head - HEADS - KV_HEADS) * DIM + half[None, :]
        dxa = tl.load(of, mask=inside, other=0.0).to(tl.float32)
        dxb = tl.load(of + DIM // 2, mask=inside, other=0.0).to(tl.float32)
    else:
        if head < HEADS:
            of = dq + row * (HEADS * DIM) + head * DIM + half[None, :]
        else:
            of = dk + row * (KV_HEADS * DIM) + (head - HEADS) * DIM + half[None, :]
        da = tl.load(of, mask=inside, other=0.0).to(tl.float32)
        db = tl.load(of + DIM // 2, mask=inside, other=0.0).to(tl.float32)
        at = row * ((HEADS + 2 * KV_HEADS) * DIM) + head * DIM + half[None, :]
        ya = tl.load(rotated + at, mask=inside, other=0.0).to(tl.float32)
        yb = tl.load(rotated + at + DIM // 2, mask=inside, other=0.0).to(tl.float32)
        inverse = tl.load(inv_rms + row * (HEADS + KV_HEADS) + head, mask=inside, other=0.0)
        angle = (token % table)[:, None] * (DIM // 2) + half[None, :]
        c = tl.load(cos + angle, mask=inside, other=0.0).to(tl.float32)
        s = tl.load(sin + angle, mask=inside, other=0.0).to(tl.float32)
        shared = (tl.sum(da * ya + db * yb, 1) / (DIM * gain * gain))[:, None]
        dra = gain * inverse * (da - ya * shared)
        drb = gain * inverse * (db - yb * shared)
        dxa, dxb = dra * c - drb * s, drb * c + dra * s
    columns: tl.constexpr = (HEADS + 2 * KV_HEADS) * DIM
    first = head * DIM + half
    fp8.store_with_transpose(dxa * inv_scale, token, first, out, out_t, tokens, columns, padded, padded)
    fp8.store_with_transpose(
        dxb * inv_scale, token, first + DIM // 2, out, out_t, tokens, columns, padded, padded
    )
    if tl.program_id(0) == 0:
        tl.store(scale, scale_value)


@torch.library.custom_op("nanorun::gemm_rope_norm", mutates_args=())
def gemm_rope_norm(
    n: Tensor,
    w: Tensor,
    n_scale: Tensor,
    w_scale: Tensor,
    dtype: torch.dtype,
    pingpong: bool,
    cos: Tensor,
    sin: Tensor,
    gate: Tensor | None,
    value_table: Tensor | None,
    token_ids: Tensor | None,
    heads: int,
    kv_heads: int,
    gain: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """qkv = n·wᵀ, (N, (H + 2K)·head_dim) in `dtype`, of n (N, D) and w in FP8, in which q and k are then rotated and
    normed, and v + gate·value_table[token_ids] replaces v; and what `rope_norm_inplace` returns. One operator, so that
    the compiler need not find out that no copy is needed."""
    qkv = gemm_fp8(n, w, n_scale, w_scale, dtype, pingpong)
    return qkv, *rope_norm_inplace(qkv, cos, sin, gate, value_table, token_ids, heads, kv_heads, gain)


def _empty_gemm_rope_norm(
    n: Tensor, w: Tensor, n_scale: Tensor, w_scale: Tensor, dtype: torch.dtype, *others: Any
) -> tuple[Tensor, ...]:
    *_, heads, kv_heads, _ = others
    return n.new_empty(n.shape[0], w.shape[0], dtype=dtype), *_empty_inv_rms(n, heads + kv_heads)


gemm_rope_norm.register_fake(_empty_gemm_rope_norm)


def rope_norm_inplace(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    gate: Tensor | None,
    value_table: Tensor | None,
    token_ids: Tensor | None,
    heads: int,
    kv_heads: int,
    gain: float,
) -> tuple[Tensor, Tensor]:
    """Rotates and norms the queries and keys of (N, (H + 2K)·D) qkv; with gate (N, K), adds each token's row of
    value_table (V, K·D) times the gate to v. Returns the inverse RMS of each head, (N, H + K), and slots whose maximum
    is the largest of them."""
    inv_rms, max_inv_rms = _empty_inv_rms(qkv, heads + kv_heads)
    launch_forward(
        *(qkv, cos, sin, qkv, qkv, inv_rms, max_inv_rms.zero_()),
        *(gate, value_table, token_ids, heads, kv_heads, gain),
    )
    return inv_rms, max_inv_rms


def _empty_inv_rms(x: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    inv_rms = x.new_empty(x.shape[0], heads, dtype=torch.float32)
    return inv_rms, x.new_empty(SLOTS, dtype=torch.float32)


@torch.library.custom_op("nanorun::rope_norm_backward_fp8", mutates_args=())
def backward_fp8(
    rotated: Tensor,
    inv_rms: Tensor,
    cos: Tensor,
    sin: Tensor,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    max_inv_rms: Tensor,
    heads: int,
    kv_heads: int,
    gain: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradient of the GEMM's output qkv, (N, (H + 2K)·D) in e5m2, with its transpose and scale, from those of the
    rotated and normed q and k and of v. `rotated` is qkv as `rope_norm_inplace` left it, `inv_rms` and `max_inv_rms`
    what it returned. The package docstring has the formula and the bound of the scale."""
    head_dim = rotated.size(-1) // (heads + 2 * kv_heads)
    tokens = rotated.shape[0]
    out, out_t, scale = fp8.empty_with_transpose(rotated, fp8.E5M2)
    amax = rotated.new_zeros(3, dtype=torch.float32)  # of dq, dk and dv
    stride, width = fp8.amax_stride(tokens), heads * head_dim
    _qkv_amax_kernel[(triton.cdiv(triton.cdiv(tokens, stride) * width, AMAX_NUMEL), 3)](
        dq,
        dk,
        dv,
        amax,
        tokens,
        stride,
        fp8.amax_headroom(stride),
        Q=width,
        KV=kv_heads * head_dim,
        NUMEL=AMAX_NUMEL,
        num_warps=8,
    )
    _rope_norm_backward_fp8_kernel[((heads + 2 * kv_heads) * triton.cdiv(tokens, TILE_TOKENS),)](
        rotated,
        inv_rms,
        cos,
        sin,
        dq,
        dk,
        dv,
        max_inv_rms,
        amax,
        gain * head_dim**0.5,
        out,
        out_t,
        scale,
        tokens,
        out_t.shape[1],
        *table_and_constants(rotated, cos, gain)[:2],
        HEADS=heads,
        KV_HEADS=kv_heads,
        DIM=head_dim,
        TOKENS=TILE_TOKENS,
        SLOTS=max_inv_rms.numel(),
        FP8_MAX=fp8.FP8_MAX[fp8.E5M2],
        num_warps=4,
    )
    return out, out_t, scale


backward_fp8.register_fake(lambda rotated, *others: fp8.empty_with_transpose(rotated, fp8.E5M2))
