"""Rotary positions and the norm of queries and keys, in one pass, straight from the fused q/k/v matmul on a GPU.

A compiler makes several kernels of this: one rotates, one sums squares for the norm, and in the backward pass
the three gradients are written apart and then copied side by side for the matmul. Here one program takes a
few tokens of one head, holds both halves of the head in registers, and reads and writes each number once.
Backward, it writes all of dq, dk and dv into the one tensor that the matmul reads.

    r = rotate(x)        a head's channels (i, i + half) turned by the position's angle
    y = gain·r·s         s = (mean(r²) + eps)^-½
    dr = gain·s·(dy - r·s²·mean(dy·r))        dx = rotate back(dr)

The values are not changed: they come back as a view. `reference` is the same in plain PyTorch, and the truth. For
layers in eight bits the forward kernel works in place, and adds to values (rope_norm8.py).
Shapes: N tokens (B·T), H heads, K kv heads, D head dimension; qkv is (N, (H + 2K)·D).
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from nanorun.config import NORM_EPSILON
from nanorun.model.kernels import whole

try:
    import triton
    import triton.language as tl
except ImportError:  # a CPU build of torch has no Triton
    triton = None

TOKENS = 32  # of one head, for each program; heads first, so that what runs at the same time reads whole rows


def fits(head_dim: int) -> bool:
    """Triton's ranges are powers of two."""
    return head_dim >= 16 and head_dim & (head_dim - 1) == 0


def reference(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    heads: int,
    kv_heads: int,
    gain: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """(B, T, (H + 2K)·D) to q (B, T, H, D), k and v (B, T, K, D). cos and sin: (T, D/2) or (B, T, D/2)."""
    head_dim = qkv.size(-1) // (heads + 2 * kv_heads)
    q, k, v = qkv.unflatten(-1, (-1, head_dim)).split([heads, kv_heads, kv_heads], dim=-2)
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)

    def turned(x: Tensor) -> Tensor:
        a, b = x.chunk(2, dim=-1)
        r = torch.cat([a * cos + b * sin, b * cos - a * sin], dim=-1)
        return F.rms_norm(r, (head_dim,), eps=NORM_EPSILON) * gain

    return turned(q), turned(k), v


@whole
def rope_norm(
    qkv: Tensor, cos: Tensor, sin: Tensor, heads: int, kv_heads: int, gain: float
) -> tuple[Tensor, Tensor, Tensor]:
    """What `reference` returns, by one kernel each way."""
    result: tuple[Tensor, Tensor, Tensor] = _RopeNorm.apply(qkv, cos, sin, heads, kv_heads, gain)
    return result


class _RopeNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, qkv: Tensor, cos: Tensor, sin: Tensor, heads: int, kv_heads: int, gain: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.save_for_backward(qkv, cos, sin)
        ctx.heads, ctx.kv_heads, ctx.gain = heads, kv_heads, gain
        q, k = _forward(qkv, cos, sin, heads, kv_heads, gain)
        head_dim = qkv.size(-1) // (heads + 2 * kv_heads)
        return q, k, qkv[..., (heads + kv_heads) * head_dim :].unflatten(-1, (kv_heads, head_dim))

    @staticmethod
    def backward(ctx: Any, dq: Tensor, dk: Tensor, dv: Tensor) -> tuple[Tensor | None, ...]:
        qkv, cos, sin = ctx.saved_tensors
        dqkv = _backward(
            qkv,
            cos,
            sin,
            dq.contiguous(),
            dk.contiguous(),
            dv.contiguous(),
            ctx.heads,
            ctx.kv_heads,
            ctx.gain,
        )
        return dqkv, None, None, None, None, None


if triton is not None:

    @triton.jit
    def _forward_kernel(
        qkv,
        cos,
        sin,
        q,
        k,
        inverses,
        steepest,
        gate,
        values,
        words,
        tokens,
        table,
        gain,
        eps,
        HEADS: tl.constexpr,
        KV_HEADS: tl.constexpr,
        DIM: tl.constexpr,
        TOKENS: tl.constexpr,
        SLOTS: tl.constexpr,  # 0: q and k are tensors of their own; else they are turned in place
        VALUES: tl.constexpr,
    ):
        turned: tl.constexpr = HEADS + 2 * KV_HEADS if VALUES else HEADS + KV_HEADS
        head = tl.program_id(0) % turned
        token = tl.program_id(0) // turned * TOKENS + tl.arange(0, TOKENS)
        half = tl.arange(0, DIM // 2)
        inside = (token < tokens)[:, None]
        row = token.to(tl.int64)[:, None]
        at = row * ((HEADS + 2 * KV_HEADS) * DIM) + head * DIM + half[None, :]
        a = tl.load(qkv + at, mask=inside, other=0.0).to(tl.float32)
        b = tl.load(qkv + at + DIM // 2, mask=inside, other=0.0).to(tl.float32)
        if VALUES:  # noqa: SIM102, since the first is decided when it is compiled
            if head >= HEADS + KV_HEADS:
                kv = head - HEADS - KV_HEADS
                share = tl.load(gate + row * KV_HEADS + kv, mask=inside, other=0.0).to(tl.float32)
                word = tl.load(words + row, mask=inside, other=0).to(tl.int64)
                of = values + word * (KV_HEADS * DIM) + kv * DIM + half[None, :]
                a += share * tl.load(of, mask=inside, other=0.0).to(qkv.dtype.element_ty).to(tl.float32)
                of += DIM // 2
                b += share * tl.load(of, mask=inside, other=0.0).to(qkv.dtype.element_ty).to(tl.float32)
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
            tl.atomic_max(steepest + slot, tl.max(tl.where(token < tokens, inverse, 0.0), 0))
            tl.store(inverses + token.to(tl.int64) * (HEADS + KV_HEADS) + head, inverse, mask=token < tokens)
            to = qkv + at
        elif head < HEADS:
            to = q + row * (HEADS * DIM) + head * DIM + half[None, :]
        else:
            to = k + row * (KV_HEADS * DIM) + (head - HEADS) * DIM + half[None, :]
        tl.store(to, (ra * scale).to(qkv.dtype.element_ty), mask=inside)
        tl.store(to + DIM // 2, (rb * scale).to(qkv.dtype.element_ty), mask=inside)

    @triton.jit
    def _backward_kernel(
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
def _forward(
    qkv: Tensor, cos: Tensor, sin: Tensor, heads: int, kv_heads: int, gain: float
) -> tuple[Tensor, Tensor]:
    """Queries and keys, each a tensor of its own."""
    q, k = _room(qkv, heads, kv_heads)
    nothing = cos.new_empty(0, dtype=torch.float32)
    launch_forward(qkv, cos, sin, q, k, nothing, nothing, None, None, None, heads, kv_heads, gain)
    return q, k


@_forward.register_fake
def _(qkv: Tensor, cos: Tensor, sin: Tensor, heads: int, kv_heads: int, gain: float) -> tuple[Tensor, Tensor]:
    return _room(qkv, heads, kv_heads)


def _room(qkv: Tensor, heads: int, kv_heads: int) -> tuple[Tensor, Tensor]:
    head_dim = qkv.size(-1) // (heads + 2 * kv_heads)
    q, k = (qkv.new_empty(*qkv.shape[:-1], n, head_dim) for n in (heads, kv_heads))
    return q, k


def launch_forward(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    q: Tensor,
    k: Tensor,
    inverses: Tensor,
    steepest: Tensor,
    gate: Tensor | None,
    values: Tensor | None,
    words: Tensor | None,
    heads: int,
    kv_heads: int,
    gain: float,
) -> None:
    tokens, head_dim = qkv.numel() // qkv.size(-1), qkv.size(-1) // (heads + 2 * kv_heads)
    turned = heads + kv_heads if gate is None else heads + 2 * kv_heads
    _forward_kernel[(turned * triton.cdiv(tokens, TOKENS),)](
        qkv,
        cos,
        sin,
        q,
        k,
        inverses,
        steepest,
        qkv if gate is None else gate.contiguous(),
        qkv if values is None else values,
        qkv if words is None else words.contiguous(),
        tokens,
        *sizes(qkv, cos, gain),
        heads,
        kv_heads,
        head_dim,
        TOKENS,
        SLOTS=steepest.numel(),
        VALUES=gate is not None,
        num_warps=4,
    )


@torch.library.custom_op("nanorun::rope_norm_backward", mutates_args=())
def _backward(
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
    _backward_kernel[((heads + 2 * kv_heads) * triton.cdiv(tokens, TOKENS),)](
        qkv,
        cos,
        sin,
        dq,
        dk,
        dv,
        dqkv,
        tokens,
        *sizes(qkv, cos, gain),
        heads,
        kv_heads,
        head_dim,
        TOKENS,
        num_warps=4,
    )
    return dqkv


@_backward.register_fake
def _(
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
    return torch.empty_like(qkv)


def sizes(qkv: Tensor, cos: Tensor, gain: float) -> tuple[int, float, float]:
    """How many rows the tables of angles have (each position's, or each token's own), and two constants."""
    assert qkv.is_contiguous()
    assert cos.is_contiguous()
    return cos.numel() // cos.size(-1), gain, NORM_EPSILON
