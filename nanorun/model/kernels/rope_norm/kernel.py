"""Rotary position embedding and QK norm, forward and backward."""

from typing import Any, cast

import torch
from torch import Tensor

from nanorun.config import NORM_EPSILON
from nanorun.model.kernels import opaque_to_dynamo
from nanorun.model.kernels.language import tl, triton

TOKENS = 32  # of one head, for each program; heads first, so that concurrent programs read whole rows


def is_supported_head_dim(head_dim: int) -> bool:
    """Triton's ranges are powers of two."""
    return head_dim >= 16 and head_dim & (head_dim - 1) == 0


@opaque_to_dynamo
def rope_norm(
    qkv: Tensor, cos: Tensor, sin: Tensor, heads: int, kv_heads: int, gain: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The same as `reference.rope_norm`, with one kernel each for forward and backward."""
    return cast(tuple[Tensor, Tensor, Tensor], _RopeNorm.apply(qkv, cos, sin, heads, kv_heads, gain))


class _RopeNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, qkv: Tensor, cos: Tensor, sin: Tensor, heads: int, kv_heads: int, gain: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.save_for_backward(qkv, cos, sin)
        ctx.heads, ctx.kv_heads, ctx.gain = heads, kv_heads, gain
        q, k = rope_norm_forward(qkv, cos, sin, heads, kv_heads, gain)
        head_dim = qkv.size(-1) // (heads + 2 * kv_heads)
        return q, k, qkv[..., (heads + kv_heads) * head_dim :].unflatten(-1, (kv_heads, head_dim))

    @staticmethod
    def backward(ctx: Any, dq: Tensor, dk: Tensor, dv: Tensor) -> tuple[Tensor | None, ...]:
        qkv, cos, sin = ctx.saved_tensors
        grads = (dq.contiguous(), dk.contiguous(), dv.contiguous())
        dqkv = rope_norm_backward(qkv, cos, sin, *grads, ctx.heads, ctx.kv_heads, ctx.gain)
        return dqkv, None, None, None, None, None


@triton.jit
def _rope_norm_kernel(
    qkv,
    cos,
    sin,
    q,
    k,
    inv_rms,
    max_inv_rms,
    gate,
    value_table,
    token_ids,
    tokens,
    table,
    gain,
    eps,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    TOKENS: tl.constexpr,
    SLOTS: tl.constexpr,  # 0: q and k are separate tensors; else they are rotated in place
    HAS_VALUES: tl.constexpr,
):
    programs: tl.constexpr = HEADS + 2 * KV_HEADS if HAS_VALUES else HEADS + KV_HEADS
    head = tl.program_id(0) % programs
    token = tl.program_id(0) // programs * TOKENS + tl.arange(0, TOKENS)
    half = tl.arange(0, DIM // 2)
    inside = (token < tokens)[:, None]
    row = token.to(tl.int64)[:, None]
    at = row * ((HEADS + 2 * KV_HEADS) * DIM) + head * DIM + half[None, :]
    a = tl.load(qkv + at, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(qkv + at + DIM // 2, mask=inside, other=0.0).to(tl.float32)
    if HAS_VALUES:  # noqa: SIM102, the first is decided at compile time
        if head >= HEADS + KV_HEADS:
            kv = head - HEADS - KV_HEADS
            gate_value = tl.load(gate + row * KV_HEADS + kv, mask=inside, other=0.0).to(tl.float32)
            token_id = tl.load(token_ids + row, mask=inside, other=0).to(tl.int64)
            of = value_table + token_id * (KV_HEADS * DIM) + kv * DIM + half[None, :]
            a += gate_value * tl.load(of, mask=inside, other=0.0).to(qkv.dtype.element_ty).to(tl.float32)
            of += DIM // 2
            b += gate_value * tl.load(of, mask=inside, other=0.0).to(qkv.dtype.element_ty).to(tl.float32)
            tl.store(qkv + at, a.to(qkv.dtype.element_ty), mask=inside)
            tl.store(qkv + at + DIM // 2, b.to(qkv.dtype.element_ty), mask=inside)
            return
    angle = (token % table)[:, None] * (DIM // 2) + half[None, :]
    c = tl.load(cos + angle, mask=inside, other=0.0).to(tl.float32)
    s = tl.load(sin + angle, mask=inside, other=0.0).to(tl.float32)
    ra = a * c + b * s
    rb = b * c - a * s
    inverse = tl.rsqrt(tl.sum(ra * ra + rb * rb, 1) / DIM + eps)
    scale = gain * inverse[:, None]
    if SLOTS > 0:
        slot = tl.program_id(0) % SLOTS
        tl.atomic_max(max_inv_rms + slot, tl.max(tl.where(token < tokens, inverse, 0.0), 0))
        tl.store(inv_rms + token.to(tl.int64) * (HEADS + KV_HEADS) + head, inverse, mask=token < tokens)
        to = qkv + at
    elif head < HEADS:
        to = q + row * (HEADS * DIM) + head * DIM + half[None, :]
    else:
        to = k + row * (KV_HEADS * DIM) + (head - HEADS) * DIM + half[None, :]
    tl.store(to, (ra * scale).to(qkv.dtype.element_ty), mask=inside)
    tl.store(to + DIM // 2, (rb * scale).to(qkv.dtype.element_ty), mask=inside)


@triton.jit
def _rope_norm_backward_kernel(
    qkv,
    cos,
    sin,
    dq,
    dk,
    dv,
    dqkv,
    tokens,
    table,
    gain,
    eps,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    TOKENS: tl.constexpr,
):
    head = tl.program_id(0) % (HEADS + 2 * KV_HEADS)
    token = tl.program_id(0) // (HEADS + 2 * KV_HEADS) * TOKENS + tl.arange(0, TOKENS)
    half = tl.arange(0, DIM // 2)
    inside = (token < tokens)[:, None]
    row = token.to(tl.int64)[:, None]
    at = row * ((HEADS + 2 * KV_HEADS) * DIM) + head * DIM + half[None, :]
    if head >= HEADS + KV_HEADS:
        of = dv + row * (KV_HEADS * DIM) + (head - HEADS - KV_HEADS) * DIM + half[None, :]
        tl.store(dqkv + at, tl.load(of, mask=inside), mask=inside)
        tl.store(dqkv + at + DIM // 2, tl.load(of + DIM // 2, mask=inside), mask=inside)
    else:
        if head < HEADS:
            of = dq + row * (HEADS * DIM) + head * DIM + half[None, :]
        else:
            of = dk + row * (KV_HEADS * DIM) + (head - HEADS) * DIM + half[None, :]
        da = tl.load(of, mask=inside, other=0.0).to(tl.float32)
        db = tl.load(of + DIM // 2, mask=inside, other=0.0).to(tl.float32)
        a = tl.load(qkv + at, mask=inside, other=0.0).to(tl.float32)
        b = tl.load(qkv + at + DIM // 2, mask=inside, other=0.0).to(tl.float32)
        angle = (token % table)[:, None] * (DIM // 2) + half[None, :]
        c = tl.load(cos + angle, mask=inside, other=0.0).to(tl.float32)
        s = tl.load(sin + angle, mask=inside, other=0.0).to(tl.float32)
        ra = a * c + b * s
        rb = b * c - a * s
        inverse = tl.rsqrt(tl.sum(ra * ra + rb * rb, 1) / DIM + eps)[:, None]
        shared = (tl.sum(da * ra + db * rb, 1) / DIM)[:, None] * inverse * inverse
        dra = gain * inverse * (da - ra * shared)
        drb = gain * inverse * (db - rb * shared)
        tl.store(dqkv + at, (dra * c - drb * s).to(dqkv.dtype.element_ty), mask=inside)
        tl.store(dqkv + at + DIM // 2, (drb * c + dra * s).to(dqkv.dtype.element_ty), mask=inside)


@torch.library.custom_op("nanorun::rope_norm_forward", mutates_args=())
def rope_norm_forward(
    qkv: Tensor, cos: Tensor, sin: Tensor, heads: int, kv_heads: int, gain: float
) -> tuple[Tensor, Tensor]:
    """Queries and keys, each in a tensor of its own."""
    q, k = _empty_q_and_k(qkv, heads, kv_heads)
    nothing = cos.new_empty(0, dtype=torch.float32)
    launch_forward(qkv, cos, sin, q, k, nothing, nothing, None, None, None, heads, kv_heads, gain)
    return q, k


def _empty_q_and_k(qkv: Tensor, heads: int, kv_heads: int) -> tuple[Tensor, Tensor]:
    head_dim = qkv.size(-1) // (heads + 2 * kv_heads)
    q, k = (qkv.new_empty(*qkv.shape[:-1], n, head_dim) for n in (heads, kv_heads))
    return q, k


rope_norm_forward.register_fake(
    lambda qkv, cos, sin, heads, kv_heads, gain: _empty_q_and_k(qkv, heads, kv_heads)
)


def launch_forward(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    q: Tensor,
    k: Tensor,
    inv_rms: Tensor,
    max_inv_rms: Tensor,
    gate: Tensor | None,
    value_table: Tensor | None,
    token_ids: Tensor | None,
    heads: int,
    kv_heads: int,
    gain: float,
) -> None:
    tokens, head_dim = qkv.numel() // qkv.size(-1), qkv.size(-1) // (heads + 2 * kv_heads)
    programs = heads + kv_heads if gate is None else heads + 2 * kv_heads
    _rope_norm_kernel[(programs * triton.cdiv(tokens, TOKENS),)](
        qkv,
        cos,
        sin,
        q,
        k,
        inv_rms,
        max_inv_rms,
        qkv if gate is None else gate.contiguous(),
        qkv if value_table is None else value_table,
        qkv if token_ids is None else token_ids.contiguous(),
        tokens,
        *table_and_constants(qkv, cos, gain),
        heads,
        kv_heads,
        head_dim,
        TOKENS,
        SLOTS=max_inv_rms.numel(),
        HAS_VALUES=gate is not None,
        num_warps=4,
    )


@torch.library.custom_op("nanorun::rope_norm_backward", mutates_args=())
def rope_norm_backward(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    heads: int,
    kv_heads: int,
    gain: float,
) -> Tensor:
    head_dim = qkv.size(-1) // (heads + 2 * kv_heads)
    dqkv = torch.empty_like(qkv)
    tokens = dq.numel() // (heads * head_dim)
    _rope_norm_backward_kernel[((heads + 2 * kv_heads) * triton.cdiv(tokens, TOKENS),)](
        qkv,
        cos,
        sin,
        dq,
        dk,
        dv,
        dqkv,
        tokens,
        *table_and_constants(qkv, cos, gain),
        heads,
        kv_heads,
        head_dim,
        TOKENS,
        num_warps=4,
    )
    return dqkv


rope_norm_backward.register_fake(lambda qkv, *others: torch.empty_like(qkv))


def table_and_constants(qkv: Tensor, cos: Tensor, gain: float) -> tuple[int, float, float]:
    """Rows of the cos and sin tables (one per position, or one per token), and two constants."""
    assert qkv.is_contiguous()
    assert cos.is_contiguous()
    return cos.numel() // cos.size(-1), gain, NORM_EPSILON
