"""Rotary positions and the norm of queries and keys, in one pass, straight from the fused q/k/v matmul on a GPU.

A compiler makes several kernels of this: one rotates, one sums squares for the norm, and in the backward pass
the three gradients are written apart and then copied side by side for the matmul. Here one program takes a
few tokens of one head, holds both halves of the head in registers, and reads and writes each number once.
Backward, it writes all of dq, dk and dv into the one tensor that the matmul reads.

    r = rotate(x)        a head's channels (i, i + half) turned by the position's angle
    y = gain·r·s         s = (mean(r²) + eps)^-½
    dr = gain·s·(dy - r·s²·mean(dy·r))        dx = rotate back(dr)

For layers in eight bits (layers8.py) queries and keys are turned where they lie, so that attention and the backward
pass keep one tensor: with y and s there is no need of x,

    dr = gain·s·(dy - y·mean(dy·y)/gain²)

and a layer with embeddings of values adds them on the same way, times their gate. The backward kernel then writes
e5m2, as it is and transposed (fp8.py). Its scale must be known before: |dx| ≤ gain·s·√D·max|dy| for queries and keys,
with the steepest s of all tokens and heads, which the forward kernel finds on its way. It stands in a few slots
whose maximum is meant, since a maximum does not depend on the order of what is written.

Otherwise values are not changed: they come back as a view. `reference` is the same in plain PyTorch, and the truth.
Shapes: N tokens (B·T), H heads, K kv heads, D head dimension; qkv is (N, (H + 2K)·D).
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from nanorun.config import NORM_EPSILON
from nanorun.model.kernels import fp8, whole

try:
    import triton
    import triton.language as tl
except ImportError:  # a CPU build of torch has no Triton
    triton = None

TOKENS = 16  # of one head, for each program
TILE_TOKENS = 32  # where what is written is transposed, too: 117 µs on an H200 at d12, with 64 124
SLOTS = 64
MEASURED = 16_384  # numbers at a time, of gradients whose largest is wanted


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
        token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
        head = tl.program_id(1)
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
            slot = (tl.program_id(0) + head * tl.num_programs(0)) % SLOTS
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
        token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
        head = tl.program_id(1)
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

    @triton.jit
    def _largest_kernel(dq, dk, dv, largest, q_size, k_size, v_size, AT_ONCE: tl.constexpr):
        """The largest entries of three tensors by one launch."""
        at = tl.program_id(0).to(tl.int64) * AT_ONCE + tl.arange(0, AT_ONCE)
        which = tl.program_id(1)
        if which == 0:
            found = tl.load(dq + at, mask=at < q_size, other=0.0)
        elif which == 1:
            found = tl.load(dk + at, mask=at < k_size, other=0.0)
        else:
            found = tl.load(dv + at, mask=at < v_size, other=0.0)
        tl.atomic_max(largest + which, tl.max(tl.abs(found.to(tl.float32)), 0), sem="relaxed")

    @triton.jit
    def _backward_fp8_kernel(
        turned,
        inverses,
        cos,
        sin,
        dq,
        dk,
        dv,
        steepest,
        largest,
        reach,
        out,
        out_t,
        unit,
        tokens,
        padded,
        table,
        gain,
        HEADS: tl.constexpr,
        KV_HEADS: tl.constexpr,
        DIM: tl.constexpr,
        TOKENS: tl.constexpr,
        SLOTS: tl.constexpr,
        MOST: tl.constexpr,
    ):
        queries_keys = tl.maximum(tl.load(largest), tl.load(largest + 1))
        bound = tl.maximum(queries_keys * fp8.largest_of(steepest, SLOTS) * reach, tl.load(largest + 2))
        size, scale = fp8.power_of_two(bound, MOST)
        token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
        head = tl.program_id(1)
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
            ya = tl.load(turned + at, mask=inside, other=0.0).to(tl.float32)
            yb = tl.load(turned + at + DIM // 2, mask=inside, other=0.0).to(tl.float32)
            inverse = tl.load(inverses + row * (HEADS + KV_HEADS) + head, mask=inside, other=0.0)
            angle = (token % table)[:, None] * (DIM // 2) + half[None, :]
            c = tl.load(cos + angle, mask=inside, other=0.0).to(tl.float32)
            s = tl.load(sin + angle, mask=inside, other=0.0).to(tl.float32)
            shared = (tl.sum(da * ya + db * yb, 1) / (DIM * gain * gain))[:, None]
            dra = gain * inverse * (da - ya * shared)
            drb = gain * inverse * (db - yb * shared)
            dxa, dxb = dra * c - drb * s, drb * c + dra * s
        columns: tl.constexpr = (HEADS + 2 * KV_HEADS) * DIM
        first = head * DIM + half
        fp8.store_both(dxa * scale, token, first, out, out_t, tokens, columns, padded, padded)
        fp8.store_both(dxb * scale, token, first + DIM // 2, out, out_t, tokens, columns, padded, padded)
        if tl.program_id(0) + head == 0:
            tl.store(unit, size)


@torch.library.custom_op("nanorun::rope_norm_forward", mutates_args=())
def _forward(
    qkv: Tensor, cos: Tensor, sin: Tensor, heads: int, kv_heads: int, gain: float
) -> tuple[Tensor, Tensor]:
    """Queries and keys, each a tensor of its own."""
    q, k = _room(qkv, heads, kv_heads)
    nothing = cos.new_empty(0, dtype=torch.float32)
    _launch_forward(qkv, cos, sin, q, k, nothing, nothing, None, None, None, heads, kv_heads, gain)
    return q, k


@_forward.register_fake
def _(qkv: Tensor, cos: Tensor, sin: Tensor, heads: int, kv_heads: int, gain: float) -> tuple[Tensor, Tensor]:
    return _room(qkv, heads, kv_heads)


def _room(qkv: Tensor, heads: int, kv_heads: int) -> tuple[Tensor, Tensor]:
    head_dim = qkv.size(-1) // (heads + 2 * kv_heads)
    q, k = (qkv.new_empty(*qkv.shape[:-1], n, head_dim) for n in (heads, kv_heads))
    return q, k


def turn_in_place(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    gate: Tensor | None,
    values: Tensor | None,
    words: Tensor | None,
    heads: int,
    kv_heads: int,
    gain: float,
) -> tuple[Tensor, Tensor]:
    """In (N, (H + 2K)·D) qkv: queries and keys are turned and normed; with gate (N, K), each word's row of values
    (V, K·D) times it is added to v. Returns what each head was multiplied by, (N, H + K), and slots of the largest."""
    inverses, steepest = scales_of(qkv, heads, kv_heads)
    _launch_forward(
        qkv, cos, sin, qkv, qkv, inverses, steepest.zero_(), gate, values, words, heads, kv_heads, gain
    )
    return inverses, steepest


def scales_of(qkv: Tensor, heads: int, kv_heads: int) -> tuple[Tensor, Tensor]:
    """Room for what `turn_in_place` returns."""
    inverses = qkv.new_empty(qkv.shape[0], heads + kv_heads, dtype=torch.float32)
    return inverses, qkv.new_empty(SLOTS, dtype=torch.float32)


def _launch_forward(
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
    _forward_kernel[(triton.cdiv(tokens, TOKENS), turned)](
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
        *_shape(qkv, cos, gain),
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
    _backward_kernel[(triton.cdiv(tokens, TOKENS), heads + 2 * kv_heads)](
        qkv,
        cos,
        sin,
        dq,
        dk,
        dv,
        dqkv,
        tokens,
        *_shape(qkv, cos, gain),
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


@torch.library.custom_op("nanorun::rope_norm_backward_fp8", mutates_args=())
def backward_fp8(
    turned: Tensor,
    inverses: Tensor,
    cos: Tensor,
    sin: Tensor,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    steepest: Tensor,
    heads: int,
    kv_heads: int,
    gain: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradient of (N, (H + 2K)·D) qkv in e5m2, its transpose and the unit, from what `turn_in_place` made of it."""
    head_dim = turned.size(-1) // (heads + 2 * kv_heads)
    tokens = turned.shape[0]
    out, out_t, unit = fp8.both_ways(turned, fp8.E5M2)
    largest = turned.new_zeros(3, dtype=torch.float32)
    programs = triton.cdiv(max(gradient.numel() for gradient in (dq, dk, dv)), MEASURED)
    _largest_kernel[(programs, 3)](
        dq, dk, dv, largest, dq.numel(), dk.numel(), dv.numel(), MEASURED, num_warps=8
    )
    _backward_fp8_kernel[(triton.cdiv(tokens, TILE_TOKENS), heads + 2 * kv_heads)](
        turned,
        inverses,
        cos,
        sin,
        dq,
        dk,
        dv,
        steepest,
        largest,
        gain * head_dim**0.5,
        out,
        out_t,
        unit,
        tokens,
        out_t.shape[1],
        *_shape(turned, cos, gain)[:2],
        HEADS=heads,
        KV_HEADS=kv_heads,
        DIM=head_dim,
        TOKENS=TILE_TOKENS,
        SLOTS=steepest.numel(),
        MOST=fp8.MOST[fp8.E5M2],
        num_warps=8,
    )
    return out, out_t, unit


@backward_fp8.register_fake
def _(
    turned: Tensor,
    inverses: Tensor,
    cos: Tensor,
    sin: Tensor,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    steepest: Tensor,
    heads: int,
    kv_heads: int,
    gain: float,
) -> tuple[Tensor, Tensor, Tensor]:
    return fp8.both_ways(turned, fp8.E5M2)


def _shape(qkv: Tensor, cos: Tensor, gain: float) -> tuple[int, float, float]:
    """How many rows the tables of angles have (each position's, or each token's own), and two constants."""
    assert qkv.is_contiguous()
    assert cos.is_contiguous()
    return cos.numel() // cos.size(-1), gain, NORM_EPSILON
