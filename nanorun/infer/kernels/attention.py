# mypy: disallow-untyped-defs=False
"""Attention of one new token per row, over a cache that is a ring buffer; split-KV.

`rope_cache_attention` takes the projected query, key and value of the token and does everything that follows: the
value embedding through its gate, rotary position embedding, QK-norm, the write to the cache, and attention over
the window. A program handles one row, one kv head and one **split** of the window; the splits' partial results are
combined by `combine_and_project`, which is also the output projection, or by `combine_splits`.

- **No running maximum.** Queries and keys are normalized and scaled by `gain`, so a score is at most
  gain²·√head_dim (16 for 1.2 and 128): its exp is far from fp32's limit. Softmax is then a plain ratio of sums,
  and splits are added without rescaling to a common maximum.
- **The new token** is never read back from the cache: split 0 has its key and value in registers and writes them
  for later steps, and no split waits for another.
- **The grid does not depend on lengths**: the number of splits is fixed, and each row's keys are divided evenly
  among them on the device, in whole blocks. A split without keys writes zeros.
- With one query per kv head, products are computed on CUDA cores, each thread keeping its own sums over its own
  keys until the end; with more (grouped-query attention) on tensor cores.

Caches are (slots, K, L, D) with position p at p % L; L is at least the window, so the new token overwrites a
position that is no longer visible. `positions` is the position of the new token (length - 1). A row of qkv is H·D
queries, K·D keys, K·D values and, on layers with a value embedding, K gates before the sigmoid.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from nanorun.infer.kernels.language import dot_dtype, grid_dependency_wait, launch_dependents
from nanorun.infer.kernels.linear import EPS, Tile, store_residual
from nanorun.infer.model import Matrix
from nanorun.model.gpt import norm, rotate
from nanorun.model.kernels.language import tl, triton

MAX_GROUP = 16  # queries per kv head
MAX_SCORE = 60.0  # e^60 · 2^17 keys is still far inside the range of fp32 and bf16


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
class KVSplit:
    """How a window is split, and the launch parameters; what a sweep varies."""

    splits: int = 1
    keys: int = 64  # per block
    warps: int = 4
    stages: int = 3
    preload: bool = False  # load the first block before the wait for the previous kernel
    tensor_cores: bool = False  # even with one query per kv head


# ---- reference


def rope_cache_attention_reference(
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
    """(B, H·D), in qkv's dtype; writes the new key and value to the caches."""
    batch, length = qkv.size(0), k_cache.size(2)
    query_dim, kv_dim = heads.heads * heads.head_dim, heads.kv_heads * heads.head_dim
    q = qkv[:, :query_dim].view(batch, heads.heads, heads.head_dim)
    k = qkv[:, query_dim : query_dim + kv_dim].view(batch, heads.kv_heads, heads.head_dim)
    v = qkv[:, query_dim + kv_dim : query_dim + 2 * kv_dim].view(batch, heads.kv_heads, heads.head_dim)
    if value_embedding is not None and tokens is not None:
        gates = qkv[:, query_dim + 2 * kv_dim : query_dim + 2 * kv_dim + heads.kv_heads]
        v = v + 3 * torch.sigmoid(gates)[..., None] * value_embedding[tokens].to(v.dtype).view_as(v)
    rope = cos[positions][:, None].to(q.dtype), sin[positions][:, None].to(q.dtype)
    q, k = norm(rotate(q, rope)) * heads.gain, norm(rotate(k, rope)) * heads.gain
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


@triton.jit
def rotate_and_norm(x, at, partner, sign, cos, sin, gain, HEAD_DIM: tl.constexpr, EPS: tl.constexpr):
    """RoPE, RMSNorm and gain of heads (rows, D), in fp32; `partner` is the other channel of each pair."""
    rotated = tl.load(x + at).to(tl.float32) * cos + sign * tl.load(x + partner).to(tl.float32) * sin
    return rotated * (tl.rsqrt(tl.sum(rotated * rotated, 1) / HEAD_DIM + EPS) * gain)[:, None]


@triton.jit
def first_row(tile, g):
    return tl.sum(tl.where(g[:, None] == 0, tile, 0.0), 0)


@triton.jit
def attend_block(query, k, v, live, denominator, acc, TENSOR_CORES: tl.constexpr, DTYPE: tl.constexpr):
    """Adds one block of keys (n, D) and values to the softmax denominator and the weighted sum of values."""
    if TENSOR_CORES:
        scores = tl.dot(query.to(DTYPE), tl.trans(k.to(DTYPE)), input_precision="ieee")
        p = tl.where(live[None, :], tl.exp2(scores), 0.0)
        denominator += tl.sum(p, 1)
        acc = tl.dot(p.to(DTYPE), v.to(DTYPE), acc, input_precision="ieee")
    else:
        p = tl.where(live, tl.exp2(tl.sum(query * k.to(tl.float32), 1)), 0.0)
        denominator += p
        acc += p[:, None] * v.to(tl.float32)
    return denominator, acc


@triton.jit
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
    denominators,
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
    TENSOR_CORES: tl.constexpr,
    DTYPE: tl.constexpr,
    PDL: tl.constexpr,
):
    launch_dependents(PDL)
    GROUP: tl.constexpr = HEADS // KV_HEADS
    HALF: tl.constexpr = HEAD_DIM // 2
    row = tl.program_id(0) // KV_HEADS
    head = tl.program_id(0) % KV_HEADS
    split = tl.program_id(1)
    n = tl.arange(0, KEYS)
    d = tl.arange(0, HEAD_DIM)
    # Tiles of the new token are (16, D): the group's queries, and copies in the remaining rows. Tensor cores
    # need 16 rows, and a tile of that shape gives a thread the same 8 channels as a block of keys does, so that
    # no layout conversion is needed inside the loop.
    g = tl.arange(0, 16)
    own = d[None, :] + tl.zeros([16, 1], tl.int32)
    other = (d + HALF) % HEAD_DIM
    other = tl.max_contiguous(tl.multiple_of(other, HALF), HALF)[None, :] + tl.zeros([16, 1], tl.int32)
    angle = tl.max_contiguous(tl.multiple_of(d % HALF, HALF), HALF)[None, :] + tl.zeros([16, 1], tl.int32)
    sign = tl.where(own < HALF, 1.0, -1.0)  # the pair (i, i + half): a·cos + b·sin, b·cos - a·sin

    # this split's share of the cached positions in the window
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
    grid_dependency_wait(PDL)

    qkv += row * qkv_stride
    query_heads = head * GROUP + tl.minimum(g, GROUP - 1)
    from_head = query_heads[:, None] * HEAD_DIM
    query = rotate_and_norm(qkv, from_head + own, from_head + other, sign, cos, sin, gain, HEAD_DIM, EPS)
    query *= 1.4426950408889634 / HEAD_DIM**0.5  # exp2 instead of exp
    new_key = qkv + (HEADS + head) * HEAD_DIM
    key = rotate_and_norm(new_key, own, other, sign, cos, sin, gain, HEAD_DIM, EPS).to(
        k_cache.dtype.element_ty
    )
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

    if TENSOR_CORES:
        denominator, acc = p_new, new
    else:
        query = first_row(query, g)[None, :]
        denominator = tl.zeros([KEYS], tl.float32)
        acc = tl.zeros([KEYS, HEAD_DIM], tl.float32)
    if PRELOAD:
        denominator, acc = attend_block(
            query, k_first, v_first, start + n < stop, denominator, acc, TENSOR_CORES, DTYPE
        )
        start += KEYS
    for block in tl.range(start, stop, KEYS, num_stages=STAGES):
        at = block + n
        where = (at % LENGTH)[:, None] * HEAD_DIM + d[None, :]
        k = tl.load(k_cache + where, mask=at[:, None] < stop, other=0.0)
        v = tl.load(v_cache + where, mask=at[:, None] < stop, other=0.0)
        denominator, acc = attend_block(query, k, v, at < stop, denominator, acc, TENSOR_CORES, DTYPE)

    place = (row * HEADS + query_heads) * SPLITS + split
    if TENSOR_CORES:
        if SPLITS == 1:
            acc = acc / denominator[:, None]
        else:
            tl.store(denominators + place, denominator, mask=g < GROUP)
        to = out + place[:, None] * HEAD_DIM + own
        tl.store(to, acc.to(out.dtype.element_ty), mask=g[:, None] < GROUP)
    else:
        place = (row * HEADS + head) * SPLITS + split
        one_denominator = tl.sum(denominator, 0) + tl.max(p_new, 0)  # all copies of p_new are the same
        one_acc = tl.sum(acc, 0) + first_row(new, g)
        if SPLITS == 1:
            one_acc = one_acc / one_denominator
        else:
            tl.store(denominators + place, one_denominator)
        tl.store(out + place * HEAD_DIM + d, one_acc.to(out.dtype.element_ty))


@triton.jit
def combine_heads(partial, denominators, h, real, SPLITS: tl.constexpr, HEAD_DIM: tl.constexpr):
    """The attention output (heads, D) of heads h from the partial sums of their splits.

    With heads as the first dimension Triton distributes them over threads, and a thread has its channels of every
    split: no data is exchanged between threads.
    """
    place = h[:, None, None] * SPLITS + tl.arange(0, SPLITS)[None, :, None]
    d = tl.arange(0, HEAD_DIM)[None, None, :]
    acc = tl.load(partial + place * HEAD_DIM + d, mask=real[:, None, None], other=0.0).to(tl.float32)
    denominator = tl.load(denominators + h * SPLITS, mask=real, other=1.0)
    for split in tl.static_range(1, SPLITS):
        denominator += tl.load(denominators + h * SPLITS + split, mask=real, other=0.0)
    return tl.sum(acc, 1) / denominator[:, None]


@triton.jit
def _combine_and_project(
    partial,
    denominators,
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
    launch_dependents(PDL)
    r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    h = tl.arange(0, HEADS_PADDED)
    real = h < HEADS
    d = tl.arange(0, HEAD_DIM)
    at = r[None, :, None] * (HEADS * HEAD_DIM) + h[:, None, None] * HEAD_DIM + d[None, None, :]
    weight = tl.load(w + at, mask=(r < rows)[None, :, None] & real[:, None, None], other=0.0)
    grid_dependency_wait(PDL)
    for b in tl.static_range(B):
        mixed = combine_heads(partial, denominators, b * HEADS + h, real, SPLITS, HEAD_DIM)
        y = tl.sum(tl.sum(weight.to(tl.float32) * mixed[:, None, :], 2), 0)
        if SCALED:
            y *= tl.load(scales + r, mask=r < rows, other=0.0)
        store_residual(y, x, x, x, out, b * rows + r, r < rows, 1.0, 0.0, False, False)


@triton.jit
def _combine_splits(
    partial,
    denominators,
    out,
    HEADS: tl.constexpr,
    HEADS_PADDED: tl.constexpr,
    SPLITS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PDL: tl.constexpr,
):
    launch_dependents(PDL)
    grid_dependency_wait(PDL)
    h = tl.arange(0, HEADS_PADDED)
    index = tl.program_id(0) * HEADS + h
    mixed = combine_heads(partial, denominators, index, h < HEADS, SPLITS, HEAD_DIM)
    at = index[:, None] * HEAD_DIM + tl.arange(0, HEAD_DIM)[None, :]
    tl.store(out + at, mixed.to(out.dtype.element_ty), mask=(h < HEADS)[:, None])


# ---- launches


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
    denominators: Tensor | None = None,
    tokens: Tensor | None = None,
    value_embedding: Tensor | None = None,
    *,
    split: KVSplit,
    pdl: bool = False,
) -> None:
    """With one split, `out` (B, H, D) is the attention output. With more, it holds partial sums (B, H, splits, D),
    and `denominators` the softmax denominators (B, H, splits)."""
    length = k_cache.size(2)
    if window > length:
        raise ValueError(f"a window of {window} needs a cache of at least that length (got {length})")
    if heads.gain**2 * heads.head_dim**0.5 > MAX_SCORE:
        raise ValueError(
            f"a gain of {heads.gain} lets scores exceed the range of exp without a running maximum"
        )
    tensor_cores = split.tensor_cores or heads.group > 1
    if tensor_cores and split.keys < 16:
        raise ValueError(f"tensor cores need blocks of at least 16 keys (got {split.keys})")
    if heads.group > MAX_GROUP:
        raise ValueError(f"too many queries per kv head: {heads.group} queries (at most {MAX_GROUP})")
    _rope_cache_attention[(qkv.size(0) * heads.kv_heads, split.splits)](
        qkv, k_cache, v_cache, slots, positions, tokens, value_embedding, cos, sin, out, denominators,
        qkv.stride(0), 0 if value_embedding is None else value_embedding.stride(0), heads.gain,
        HEADS=heads.heads, KV_HEADS=heads.kv_heads, HEAD_DIM=heads.head_dim, EPS=EPS, WINDOW=window,
        LENGTH=length, VALUES=value_embedding is not None, SPLITS=split.splits, KEYS=split.keys,
        STAGES=split.stages, PRELOAD=split.preload, TENSOR_CORES=tensor_cores, DTYPE=dot_dtype(k_cache.dtype), PDL=pdl,
        num_warps=split.warps, launch_pdl=pdl,
    )  # fmt: skip


def combine_and_project(
    partial: Tensor,
    denominators: Tensor,
    matrix: Matrix,
    x: Tensor,
    out: Tensor,
    *,
    tile: Tile,
    pdl: bool = False,
) -> Tensor:
    """out = x + attention · Wᵀ, with attention combined from its splits."""
    batch, heads, splits, head_dim = partial.shape
    rows = matrix.weight.size(0)
    _combine_and_project[(triton.cdiv(rows, tile.rows),)](
        partial, denominators, matrix.weight, matrix.scale, x, out, rows,
        B=batch, HEADS=heads, HEADS_PADDED=triton.next_power_of_2(heads), HEAD_DIM=head_dim, SPLITS=splits,
        SCALED=matrix.scale is not None, ROWS=tile.rows, PDL=pdl, num_warps=tile.warps, launch_pdl=pdl,
    )  # fmt: skip
    return out


def combine_splits(partial: Tensor, denominators: Tensor, out: Tensor, *, pdl: bool = False) -> Tensor:
    """The attention output (B, H·D), combined from its splits."""
    batch, heads, splits, head_dim = partial.shape
    _combine_splits[(batch,)](
        partial, denominators, out, HEADS=heads, HEADS_PADDED=triton.next_power_of_2(heads), SPLITS=splits,
        HEAD_DIM=head_dim, PDL=pdl, num_warps=4, launch_pdl=pdl,
    )  # fmt: skip
    return out
