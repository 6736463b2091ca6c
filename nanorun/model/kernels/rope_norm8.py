"""Rotary positions and the norm of queries and keys for layers in eight bits: in place, and back from there.

What rope_norm.py computes, by its kernel, but queries and keys are turned where they lie, so that attention and the
backward pass keep one tensor: with y and s there is no need of x,

    dr = gain·s·(dy - y·mean(dy·y)/gain²)

and a layer with embeddings of values adds them on the same way, times their gate. The backward kernel then writes
e5m2, as it is and transposed (fp8.py). Its scale must be known before: |dx| ≤ gain·s·√D·max|dy| for queries and keys,
with the steepest s of all tokens and heads, which the forward kernel finds on its way. It stands in a few slots
whose maximum is meant, since a maximum does not depend on the order of what is written. The largest dy is that of
every eighth token, with as much to spare as fp8.py says.

`rope_norm.reference` is the truth here, too, and shapes are as there.
"""

from typing import Any

import torch
from torch import Tensor

from nanorun.model.kernels import fp8, products, rope_norm

try:
    import triton
    import triton.language as tl
except ImportError:  # a CPU build of torch has no Triton
    triton = None

# Where what is written is transposed, too: 222 µs on an H200 for 65,536 tokens of a d12, and 269 with 64.
TILE_TOKENS = 32
SLOTS = 64
MEASURED = 4_096  # numbers at a time, of gradients whose largest is wanted

if triton is not None:

    @triton.jit
    def _largest(x, tokens, every, WIDTH: tl.constexpr, AT_ONCE: tl.constexpr):
        number = tl.program_id(0) * AT_ONCE + tl.arange(0, AT_ONCE)
        token = number // WIDTH * every
        at = token.to(tl.int64) * WIDTH + number % WIDTH
        return tl.max(tl.abs(tl.load(x + at, mask=token < tokens, other=0.0).to(tl.float32)), 0)

    @triton.jit(do_not_specialize=["every"])
    def _largest_kernel(
        dq, dk, dv, largest, tokens, every, spare, Q: tl.constexpr, KV: tl.constexpr, AT_ONCE: tl.constexpr
    ):
        """The largest entries of (N, Q) and two (N, KV) by one launch, of every so-manieth token, with a reserve."""
        which = tl.program_id(1)
        if which == 0:
            found = _largest(dq, tokens, every, Q, AT_ONCE)
        elif which == 1:
            found = _largest(dk, tokens, every, KV, AT_ONCE)
        else:
            found = _largest(dv, tokens, every, KV, AT_ONCE)
        tl.atomic_max(largest + which, found * spare, sem="relaxed")

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
        if tl.program_id(0) == 0:
            tl.store(unit, size)


@torch.library.custom_op("nanorun::fp8_turned_heads", mutates_args=())
def turned_heads(
    n: Tensor,
    w: Tensor,
    n_unit: Tensor,
    w_unit: Tensor,
    dtype: torch.dtype,
    pingpong: bool,
    cos: Tensor,
    sin: Tensor,
    gate: Tensor | None,
    table: Tensor | None,
    words: Tensor | None,
    heads: int,
    kv_heads: int,
    gain: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """n·wᵀ of (N, D) and ((H + 2K)·head_dim, D) in eight bits, and what `turn_in_place` does to it. One
    operator, so that no compiler has to find out that nothing needs to be copied."""
    qkv = products.product8(n, w, n_unit, w_unit, dtype, pingpong)
    return qkv, *turn_in_place(qkv, cos, sin, gate, table, words, heads, kv_heads, gain)


@turned_heads.register_fake
def _(
    n: Tensor, w: Tensor, n_unit: Tensor, w_unit: Tensor, dtype: torch.dtype, *others: Any
) -> tuple[Tensor, ...]:
    *_, heads, kv_heads, _ = others
    qkv = n.new_empty(n.shape[0], w.shape[0], dtype=dtype)
    return qkv, *scales_of(qkv, heads, kv_heads)


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
    rope_norm.launch_forward(
        qkv, cos, sin, qkv, qkv, inverses, steepest.zero_(), gate, values, words, heads, kv_heads, gain
    )
    return inverses, steepest


def scales_of(qkv: Tensor, heads: int, kv_heads: int) -> tuple[Tensor, Tensor]:
    """Room for what `turn_in_place` returns."""
    inverses = qkv.new_empty(qkv.shape[0], heads + kv_heads, dtype=torch.float32)
    return inverses, qkv.new_empty(SLOTS, dtype=torch.float32)


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
    every, width = fp8.every(tokens), heads * head_dim
    _largest_kernel[(triton.cdiv(triton.cdiv(tokens, every) * width, MEASURED), 3)](
        dq,
        dk,
        dv,
        largest,
        tokens,
        every,
        fp8.spare(every),
        Q=width,
        KV=kv_heads * head_dim,
        AT_ONCE=MEASURED,
        num_warps=8,
    )
    _backward_fp8_kernel[((heads + 2 * kv_heads) * triton.cdiv(tokens, TILE_TOKENS),)](
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
        *rope_norm.sizes(turned, cos, gain)[:2],
        HEADS=heads,
        KV_HEADS=kv_heads,
        DIM=head_dim,
        TOKENS=TILE_TOKENS,
        SLOTS=steepest.numel(),
        MOST=fp8.MOST[fp8.E5M2],
        num_warps=4,
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
