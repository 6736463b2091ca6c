# mypy: disallow-untyped-defs=False
"""Attention of one new token for each row, over a cache that is a ring.

`rope_cache_attention` takes the raw query, key and value of the token and does all that happens to them:
the value embedding through its gate, rotary positions, norms, this token's place in the cache, and
attention over the window. A program has one row, one kv head and one **split** of the window; the splits'
results are added up by `attention_out`, which is also the output projection, or by `combine`.

- **No running maximum.** Queries and keys are normed and scaled by `gain`, so a score is at most
  gain²·√head_dim (16 for 1.2 and 128): exp of it is far from fp32's end. Softmax is then a plain ratio of
  sums, and splits are added without looking at each other's maximum.
- **The new token** is never read back from the cache: split 0 has its key and value in registers and
  writes them for later steps, and no split waits for another.
- **The grid does not depend on lengths**: there is a fixed number of splits, and each row's keys are
  divided evenly among them on the device, in whole blocks. One that gets none writes zeros.
- With one query a kv head, products are taken on ordinary cores, each thread keeping its own sums over
  its own keys until the end; with more (grouped queries) on tensor cores.

Caches are (slots, K, L, D) with position p at p % L; L is at least the window, so the new token
overwrites a position that nobody sees any more. `positions` is where the new token is (length - 1). A row of
qkv is H·D queries, K·D keys, K·D values and, on layers with a value embedding, K gates before the sigmoid.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from nanorun.infer.frozen import Matrix
from nanorun.infer.kernels.language import dot_dtype, jit, let_next_start, tl, triton, wait_for_previous
from nanorun.infer.kernels.linear import EPS, Tile, store_residual

MOST_SCORE = 60.0  # e^60 · 2^17 keys is still far inside fp32 and bf16


@dataclass(frozen=True)
class Heads:
    heads: int
    kv_heads: int
    head_dim: int
    gain: float  # on queries and keys, after their norm

    @property
    def group(self) -> int:
        return self.heads // self.kv_heads


@dataclass(frozen=True)
class Split:
    """How a window is cut; what a sweep varies."""

    splits: int = 1
    keys: int = 64  # per block
    warps: int = 4
    stages: int = 3
    preload: bool = False  # the first block is loaded before the wait for the kernel ahead
    dots: bool = False  # tensor cores even with one query a kv head


# ---- the truth


def plain_rotated(x_bhd: Tensor, cos: Tensor, sin: Tensor, gain: float) -> Tensor:
    """Rotary, norm, gain. The tables are (positions, D/2) and indexed already: (B, D/2)."""
    cos, sin = cos[:, None].to(x_bhd.dtype), sin[:, None].to(x_bhd.dtype)
    a, b = x_bhd.chunk(2, dim=-1)
    turned = torch.cat([a * cos + b * sin, b * cos - a * sin], dim=-1)
    return turned * torch.rsqrt(turned.square().mean(-1, keepdim=True) + EPS) * gain


def plain_rope_cache_attention(
    qkv: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
    positions: Tensor,
    cos: Tensor,
    sin: Tensor,
    heads: Heads,
    window: int,
    tokens: Tensor | None = None,
    value_embedding: Tensor | None = None,
) -> Tensor:
    """(B, H·D), in qkv's dtype; the caches get the new key and value."""
    batch, length = qkv.size(0), k_cache.size(2)
    query_dim, kv_dim = heads.heads * heads.head_dim, heads.kv_heads * heads.head_dim
    q = qkv[:, :query_dim].view(batch, heads.heads, heads.head_dim)
    k = qkv[:, query_dim : query_dim + kv_dim].view(batch, heads.kv_heads, heads.head_dim)
    v = qkv[:, query_dim + kv_dim : query_dim + 2 * kv_dim].view(batch, heads.kv_heads, heads.head_dim)
    if value_embedding is not None and tokens is not None:
        gates = qkv[:, query_dim + 2 * kv_dim : query_dim + 2 * kv_dim + heads.kv_heads]
        v = v + 3 * torch.sigmoid(gates)[..., None] * value_embedding[tokens].to(v.dtype).view_as(v)
    q = plain_rotated(q, cos[positions], sin[positions], heads.gain)
    k = plain_rotated(k, cos[positions], sin[positions], heads.gain)
    outs = []
    for row in range(batch):
        slot, position = int(slots[row]), int(positions[row])
        k_cache[slot, :, position % length] = k[row].to(k_cache.dtype)
        v_cache[slot, :, position % length] = v[row].to(v_cache.dtype)
        seen = torch.arange(max(0, position + 1 - window), position + 1, device=qkv.device) % length
        keys = k_cache[slot, :, seen].to(q.dtype).repeat_interleave(heads.group, 0)  # (H, n, D)
        values = v_cache[slot, :, seen].to(q.dtype).repeat_interleave(heads.group, 0)
        scores = (keys @ q[row, :, :, None]).squeeze(-1) / heads.head_dim**0.5
        outs.append((scores.softmax(-1)[:, None] @ values).view(query_dim))
    return torch.stack(outs)


# ---- the kernels


@jit
def rotated(x, at, partner, sign, cos, sin, gain, HEAD_DIM: tl.constexpr, EPS: tl.constexpr):
    """Rotary, norm and gain of heads (rows, D), as fp32; `partner` is the other channel of each pair."""
    turned = tl.load(x + at).to(tl.float32) * cos + sign * tl.load(x + partner).to(tl.float32) * sin
    return turned * (tl.rsqrt(tl.sum(turned * turned, 1) / HEAD_DIM + EPS) * gain)[:, None]


@jit
def first_row(tile, g):
    return tl.sum(tl.where(g[:, None] == 0, tile, 0.0), 0)


@jit
def attend_block(query, k, v, live, total, acc, DOTS: tl.constexpr, DTYPE: tl.constexpr):
    """Adds one block of keys (n, D) and values to the sums."""
    if DOTS:
        scores = tl.dot(query.to(DTYPE), tl.trans(k.to(DTYPE)), input_precision="ieee")
        p = tl.where(live[None, :], tl.exp2(scores), 0.0)
        total += tl.sum(p, 1)
        acc = tl.dot(p.to(DTYPE), v.to(DTYPE), acc, input_precision="ieee")
    else:
        p = tl.where(live, tl.exp2(tl.sum(query * k.to(tl.float32), 1)), 0.0)
        total += p
        acc += p[:, None] * v.to(tl.float32)
    return total, acc


@jit
def _rope_cache_attention(
    qkv,
    k_cache,
    v_cache,
    slots,
    positions,
    tokens,
    value_embedding,
    cos_table,
    sin_table,
    out,
    totals,
    qkv_stride,
    value_stride,
    gain,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    EPS: tl.constexpr,
    WINDOW: tl.constexpr,
    LENGTH: tl.constexpr,
    VALUES: tl.constexpr,
    SPLITS: tl.constexpr,
    KEYS: tl.constexpr,
    STAGES: tl.constexpr,
    PRELOAD: tl.constexpr,
    DOTS: tl.constexpr,
    DTYPE: tl.constexpr,
    PDL: tl.constexpr,
):
    let_next_start(PDL)
    GROUP: tl.constexpr = HEADS // KV_HEADS
    HALF: tl.constexpr = HEAD_DIM // 2
    row = tl.program_id(0) // KV_HEADS
    head = tl.program_id(0) % KV_HEADS
    split = tl.program_id(1)
    n = tl.arange(0, KEYS)
    d = tl.arange(0, HEAD_DIM)
    # What belongs to the new token is (16, D): the group's queries, and copies in the rows they leave over.
    # Sixteen is what tensor cores take, and a tile of that shape gives a thread the same 8 channels as a
    # block of keys does, so that no layout has to change inside the loop.
    g = tl.arange(0, 16)
    own = d[None, :] + tl.zeros([16, 1], tl.int32)
    other = (d + HALF) % HEAD_DIM
    other = tl.max_contiguous(tl.multiple_of(other, HALF), HALF)[None, :] + tl.zeros([16, 1], tl.int32)
    angle = tl.max_contiguous(tl.multiple_of(d % HALF, HALF), HALF)[None, :] + tl.zeros([16, 1], tl.int32)
    sign = tl.where(own < HALF, 1.0, -1.0)  # the pair (i, i + half): a·cos + b·sin, b·cos - a·sin

    # this split's share of the positions in the cache that the row sees
    slot = tl.load(slots + row).to(tl.int64)
    position = tl.load(positions + row).to(tl.int32)
    first = tl.maximum(position + 1 - WINDOW, 0)
    share = tl.cdiv(tl.cdiv(position - first, SPLITS), KEYS) * KEYS
    start = first + split * share
    stop = tl.minimum(start + share, position)
    k_cache += (slot * KV_HEADS + head) * (LENGTH * HEAD_DIM)
    v_cache += (slot * KV_HEADS + head) * (LENGTH * HEAD_DIM)
    if PRELOAD:
        at = start + n
        where = (at % LENGTH)[:, None] * HEAD_DIM + d[None, :]
        k_first = tl.load(k_cache + where, mask=at[:, None] < stop, other=0.0)
        v_first = tl.load(v_cache + where, mask=at[:, None] < stop, other=0.0)
    cos = tl.load(cos_table + position * HALF + angle).to(tl.float32)
    sin = tl.load(sin_table + position * HALF + angle).to(tl.float32)
    if VALUES:
        token = tl.load(tokens + row).to(tl.int64)
        embedded = tl.load(value_embedding + token * value_stride + head * HEAD_DIM + own).to(tl.float32)
    wait_for_previous(PDL)

    qkv += row * qkv_stride
    query_heads = head * GROUP + tl.minimum(g, GROUP - 1)
    from_head = query_heads[:, None] * HEAD_DIM
    query = rotated(qkv, from_head + own, from_head + other, sign, cos, sin, gain, HEAD_DIM, EPS)
    query *= 1.4426950408889634 / HEAD_DIM**0.5  # scores in powers of two
    new_key = qkv + (HEADS + head) * HEAD_DIM
    key = rotated(new_key, own, other, sign, cos, sin, gain, HEAD_DIM, EPS).to(k_cache.dtype.element_ty)
    value = tl.load(qkv + (HEADS + KV_HEADS + head) * HEAD_DIM + own).to(tl.float32)
    if VALUES:
        gate = tl.load(qkv + (HEADS + 2 * KV_HEADS) * HEAD_DIM + head).to(tl.float32)
        value += 3.0 / (1.0 + tl.exp(-gate)) * embedded
    value = value.to(v_cache.dtype.element_ty)
    mine = (position % LENGTH) * HEAD_DIM + own
    writes = (g[:, None] == 0) & (split == 0)
    tl.store(k_cache + mine, key, mask=writes)
    tl.store(v_cache + mine, value, mask=writes)
    p_new = tl.where(split == 0, tl.exp2(tl.sum(query * key.to(tl.float32), 1)), 0.0)
    new = p_new[:, None] * value.to(tl.float32)

    if DOTS:
        total, acc = p_new, new
    else:
        query = first_row(query, g)[None, :]
        total = tl.zeros([KEYS], tl.float32)
        acc = tl.zeros([KEYS, HEAD_DIM], tl.float32)
    if PRELOAD:
        total, acc = attend_block(query, k_first, v_first, start + n < stop, total, acc, DOTS, DTYPE)
        start += KEYS
    for block in tl.range(start, stop, KEYS, num_stages=STAGES):
        at = block + n
        where = (at % LENGTH)[:, None] * HEAD_DIM + d[None, :]
        k = tl.load(k_cache + where, mask=at[:, None] < stop, other=0.0)
        v = tl.load(v_cache + where, mask=at[:, None] < stop, other=0.0)
        total, acc = attend_block(query, k, v, at < stop, total, acc, DOTS, DTYPE)

    place = (row * HEADS + query_heads) * SPLITS + split
    if DOTS:
        if SPLITS == 1:
            acc = acc / total[:, None]
        else:
            tl.store(totals + place, total, mask=g < GROUP)
        to = out + place[:, None] * HEAD_DIM + own
        tl.store(to, acc.to(out.dtype.element_ty), mask=g[:, None] < GROUP)
    else:
        place = (row * HEADS + head) * SPLITS + split
        one_total = tl.sum(total, 0) + tl.max(p_new, 0)  # all copies of p_new are the same
        one_acc = tl.sum(acc, 0) + first_row(new, g)
        if SPLITS == 1:
            one_acc = one_acc / one_total
        else:
            tl.store(totals + place, one_total)
        tl.store(out + place * HEAD_DIM + d, one_acc.to(out.dtype.element_ty))


@jit
def combined(partial, totals, h, real, SPLITS: tl.constexpr, HEAD_DIM: tl.constexpr):
    """The attention of heads h from their splits' sums: (heads, D).

    With heads as the first dimension Triton spreads them over threads, and a thread has its channels of
    every split: nothing crosses between threads.
    """
    place = h[:, None, None] * SPLITS + tl.arange(0, SPLITS)[None, :, None]
    d = tl.arange(0, HEAD_DIM)[None, None, :]
    acc = tl.load(partial + place * HEAD_DIM + d, mask=real[:, None, None], other=0.0).to(tl.float32)
    total = tl.load(totals + h * SPLITS, mask=real, other=1.0)
    for split in tl.static_range(1, SPLITS):
        total += tl.load(totals + h * SPLITS + split, mask=real, other=0.0)
    return tl.sum(acc, 1) / total[:, None]


@jit
def _attention_out(
    partial,
    totals,
    w,
    scales,
    x,
    out,
    rows,
    B: tl.constexpr,
    HEADS: tl.constexpr,
    HEADS_PADDED: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    SPLITS: tl.constexpr,
    SCALED: tl.constexpr,
    ROWS: tl.constexpr,
    PDL: tl.constexpr,
):
    let_next_start(PDL)
    r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    h = tl.arange(0, HEADS_PADDED)
    real = h < HEADS
    d = tl.arange(0, HEAD_DIM)
    at = r[None, :, None] * (HEADS * HEAD_DIM) + h[:, None, None] * HEAD_DIM + d[None, None, :]
    weight = tl.load(w + at, mask=(r < rows)[None, :, None] & real[:, None, None], other=0.0)
    wait_for_previous(PDL)
    for b in tl.static_range(B):
        mixed = combined(partial, totals, b * HEADS + h, real, SPLITS, HEAD_DIM)
        y = tl.sum(tl.sum(weight.to(tl.float32) * mixed[:, None, :], 2), 0)
        if SCALED:
            y *= tl.load(scales + r, mask=r < rows, other=0.0)
        store_residual(y, x, x, x, out, b * rows + r, r < rows, 1.0, 0.0, False, False)


@jit
def _combine(
    partial,
    totals,
    out,
    HEADS: tl.constexpr,
    HEADS_PADDED: tl.constexpr,
    SPLITS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PDL: tl.constexpr,
):
    let_next_start(PDL)
    wait_for_previous(PDL)
    h = tl.arange(0, HEADS_PADDED)
    index = tl.program_id(0) * HEADS + h
    mixed = combined(partial, totals, index, h < HEADS, SPLITS, HEAD_DIM)
    at = index[:, None] * HEAD_DIM + tl.arange(0, HEAD_DIM)[None, :]
    tl.store(out + at, mixed.to(out.dtype.element_ty), mask=(h < HEADS)[:, None])


# ---- what the step calls


def rope_cache_attention(
    qkv: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
    positions: Tensor,
    cos: Tensor,
    sin: Tensor,
    heads: Heads,
    window: int,
    out: Tensor,
    totals: Tensor | None = None,
    tokens: Tensor | None = None,
    value_embedding: Tensor | None = None,
    *,
    split: Split,
    pdl: bool = False,
) -> None:
    """With one split, `out` (B, H, D) is attention; else (B, H, splits, D) sums over `totals` (B, H, splits)."""
    length = k_cache.size(2)
    if window > length:
        raise ValueError(f"a window of {window} needs a cache at least as long, and this has {length} places")
    if heads.gain**2 * heads.head_dim**0.5 > MOST_SCORE:
        raise ValueError(
            f"a gain of {heads.gain} lets scores grow past exp's range without a running maximum"
        )
    dots = split.dots or heads.group > 1
    if dots and split.keys < 16:
        raise ValueError(f"tensor cores take blocks of 16 keys at least, not {split.keys}")
    if heads.group > 16:
        raise ValueError(f"{heads.group} queries a kv head are more than the 16 that one program takes")
    _rope_cache_attention[(qkv.size(0) * heads.kv_heads, split.splits)](
        qkv, k_cache, v_cache, slots, positions, tokens, value_embedding, cos, sin, out, totals,
        qkv.stride(0), 0 if value_embedding is None else value_embedding.stride(0), heads.gain,
        HEADS=heads.heads, KV_HEADS=heads.kv_heads, HEAD_DIM=heads.head_dim, EPS=EPS, WINDOW=window,
        LENGTH=length, VALUES=value_embedding is not None, SPLITS=split.splits, KEYS=split.keys,
        STAGES=split.stages, PRELOAD=split.preload, DOTS=dots, DTYPE=dot_dtype(k_cache.dtype), PDL=pdl,
        num_warps=split.warps, launch_pdl=pdl,
    )  # fmt: skip


def attention_out(
    partial: Tensor, totals: Tensor, matrix: Matrix, x: Tensor, out: Tensor, *, tile: Tile, pdl: bool = False
) -> Tensor:
    """out = x + attention · Wᵀ, attention added up from its splits' sums."""
    batch, heads, splits, head_dim = partial.shape
    rows = matrix.weight.size(0)
    _attention_out[(triton.cdiv(rows, tile.rows),)](
        partial, totals, matrix.weight, matrix.scale, x, out, rows,
        B=batch, HEADS=heads, HEADS_PADDED=triton.next_power_of_2(heads), HEAD_DIM=head_dim, SPLITS=splits,
        SCALED=matrix.scale is not None, ROWS=tile.rows, PDL=pdl, num_warps=tile.warps, launch_pdl=pdl,
    )  # fmt: skip
    return out


def combine(partial: Tensor, totals: Tensor, out: Tensor, *, pdl: bool = False) -> Tensor:
    """Attention (B, H·D) from its splits' sums."""
    batch, heads, splits, head_dim = partial.shape
    _combine[(batch,)](
        partial, totals, out, HEADS=heads, HEADS_PADDED=triton.next_power_of_2(heads), SPLITS=splits,
        HEAD_DIM=head_dim, PDL=pdl, num_warps=4, launch_pdl=pdl,
    )  # fmt: skip
    return out
