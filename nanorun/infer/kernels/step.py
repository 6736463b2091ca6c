"""One decode step: a new token for each row in, fp32 logits out. `plain_step` is the truth, `decode_step` the fast way.

Three ways to do the matrices, by how many rows share them (`tune` chooses):

    rows    1 to 4      a kernel that has whole matrix rows in registers; five kernels a layer
    cublas  above       torch.mm, with norms, ReLU² and residuals in small kernels between
    tiles   int8        the same five kernels with tensor cores

The elementwise end of a layer belongs to the kernel that writes the stream: after the MLP that is
λ·x + μ·x0 for the next layer, after the last layer the subtraction of the middle. Nothing here waits for
the GPU or looks at a value on it, and shapes depend on the number of rows alone: a step can be captured
into a CUDA graph once for each.
"""

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from nanorun.config import ModelConfig
from nanorun.infer.kernels.attention import (
    MOST_SCORE,
    Split,
    attention_out,
    combine,
    plain_rope_cache_attention,
    rope_cache_attention,
)
from nanorun.infer.kernels.elementwise import plain_softcap, relu2_, residual_norm, softcap
from nanorun.infer.kernels.embed import embed, plain_embed
from nanorun.infer.kernels.language import pdl_works, require_triton
from nanorun.infer.kernels.linear import (
    Tile,
    linear_residual,
    norm_linear,
    padded,
    plain_linear_residual,
    plain_norm_linear,
)
from nanorun.infer.kernels.weights import DecodeWeights, RingCache, Scratch

PROGRAMS_WANTED = 264  # two for each of an H200's 132 multiprocessors
KEYS_PER_BLOCK = 64
MOST_SPLITS = 16


@dataclass(frozen=True)
class Tuning:
    """How each kernel of a step is cut; what a sweep varies."""

    matrices: Literal["rows", "tiles", "cublas"]
    qkv: Tile
    out: Tile
    up: Tile
    down: Tile
    head: Tile
    splits: dict[int, Split]  # by window
    pdl: bool

    @property
    def most_splits(self) -> int:
        return max(split.splits for split in self.splits.values())


def fits(config: ModelConfig) -> bool:
    """Whether the kernels take a model of this shape: tiles have sides that are powers of two."""
    head, score = config.head_dim, config.qk_gain**2 * config.head_dim**0.5
    group = config.heads // config.kv_heads
    return (
        head >= 16 and head & (head - 1) == 0 and config.dim % 16 == 0 and group <= 16 and score <= MOST_SCORE
    )


def tune(config: ModelConfig, batch: int, device: torch.device, int8: bool = False) -> Tuning:
    pdl = pdl_works(device)
    few = batch <= (8 if int8 else 4)
    splits = {}
    for window in {config.window(layer) for layer in range(config.depth)}:
        wanted = -(-PROGRAMS_WANTED // (batch * config.kv_heads))
        blocks = -(-window // KEYS_PER_BLOCK)
        count = 1
        while count < min(wanted, blocks, MOST_SPLITS):
            count *= 2
        splits[window] = Split(count, KEYS_PER_BLOCK, stages=2 if few else 3, preload=few, dots=not few)
    if few:
        narrow, wide = Tile(rows=4, inputs=256), Tile(rows=16, inputs=256)
        out = replace(narrow, warps=4 if config.heads <= 8 else 8)  # a warp has one or two heads there
        return Tuning("rows", narrow, out, narrow, narrow, wide, splits, pdl)
    at_once = 4096 // padded(batch)  # inputs of a stage: a norm keeps the squares of all rows in registers
    tile = Tile(rows=16, inputs=at_once, stages=4)
    deep, head = replace(tile, inputs=2 * at_once), Tile(rows=64, inputs=min(at_once, 128), stages=4)
    matrices: Literal["tiles", "cublas"] = "tiles" if int8 else "cublas"
    return Tuning(matrices, tile, tile, tile, deep, head, splits, pdl)


# ---- the truth


def plain_step(
    weights: DecodeWeights, cache: RingCache, slots: Tensor, tokens: Tensor, positions: Tensor
) -> Tensor:
    """Logits (B, vocabulary) in the cache's dtype, and everything on the way there in it."""
    config, dtype = weights.config, cache.keys[0].dtype
    x0 = plain_embed(weights.embed, weights.smear, tokens, cache.tokens, slots, positions, dtype)
    x, middle = x0, x0
    for i in range(config.depth):
        x = weights.lambdas[i] * x + weights.mus[i] * x0
        attention = plain_rope_cache_attention(
            plain_norm_linear(x, weights.qkv[i]),
            cache.keys[i],
            cache.values[i],
            slots.long(),
            positions.long(),
            weights.cos,
            weights.sin,
            weights.heads,
            config.window(i),
            tokens.long(),
            weights.value_embeds.get(i),
        )
        x, _ = plain_linear_residual(attention, weights.out[i], x)
        x, _ = plain_linear_residual(plain_norm_linear(x, weights.up[i], "relu2"), weights.down[i], x)
        if i == config.depth // 2:
            middle = x
    logits = plain_norm_linear(x - weights.backout * middle, weights.head)[:, : config.vocab_size]
    return plain_softcap(logits, config.softcap)


# ---- the fast way


def decode_step(
    weights: DecodeWeights,
    cache: RingCache,
    slots: Tensor,
    tokens: Tensor,
    positions: Tensor,
    *,
    tuning: Tuning | None = None,
    scratch: Scratch | None = None,
) -> Tensor:
    """fp32 logits (B, vocabulary) after each row's new token, which goes into its slot of the cache.

    The logits are a buffer of `scratch` when one is given. Two rows must not have the same slot.
    """
    require_triton()
    batch = tokens.size(0)
    tuning = tuning or tune(weights.config, batch, tokens.device, weights.head.scale is not None)
    scratch = scratch or Scratch(weights, batch, tuning.most_splits)
    stream_scale = weights.lambdas[0] + weights.mus[0]  # the first layer's mix of x0 with itself
    embed(
        weights.embed, weights.smear, tokens, cache.tokens, slots, positions,
        scratch.start, scratch.stream, stream_scale, pdl=tuning.pdl,
    )  # fmt: skip
    if tuning.matrices == "cublas":
        return _layers_between_matrix_products(weights, cache, slots, tokens, positions, tuning, scratch)
    return _layers_of_fused_matrices(weights, cache, slots, tokens, positions, tuning, scratch)


def _layers_of_fused_matrices(
    weights: DecodeWeights,
    cache: RingCache,
    slots: Tensor,
    tokens: Tensor,
    positions: Tensor,
    tuning: Tuning,
    scratch: Scratch,
) -> Tensor:
    config, x = weights.config, scratch.stream
    dots, pdl = tuning.matrices == "tiles", tuning.pdl
    for i in range(config.depth):
        norm_linear(
            x, weights.qkv[i], scratch.qkv, rows=weights.qkv_rows(i), tile=tuning.qkv, dots=dots, pdl=pdl
        )
        sums, totals = _attend(weights, cache, slots, tokens, positions, tuning, scratch, i)
        if totals is not None and not dots:
            attention_out(sums, totals, weights.out[i], x, x, tile=tuning.out, pdl=pdl)
        else:
            mixed = sums if totals is None else combine(sums, totals, scratch.attention, pdl=pdl)
            linear_residual(mixed, weights.out[i], x, x, tile=tuning.out, dots=dots, pdl=pdl)
        norm_linear(x, weights.up[i], scratch.hidden, tile=tuning.up, activation="relu2", dots=dots, pdl=pdl)
        a, b, extra, keep = _end_of_layer(weights, scratch, i)
        linear_residual(
            scratch.hidden, weights.down[i], x, x,
            tile=tuning.down, a=a, b=b, extra=extra, keep=keep, dots=dots, pdl=pdl,
        )  # fmt: skip
    capped: Literal["softcap", "none"] = "softcap" if config.softcap else "none"
    return norm_linear(
        x, weights.head, scratch.logits,
        rows=config.vocab_size, tile=tuning.head, activation=capped, cap=config.softcap, dots=dots, pdl=pdl,
    )  # fmt: skip


def _layers_between_matrix_products(
    weights: DecodeWeights,
    cache: RingCache,
    slots: Tensor,
    tokens: Tensor,
    positions: Tensor,
    tuning: Tuning,
    scratch: Scratch,
) -> Tensor:
    config, x, pdl = weights.config, scratch.stream, tuning.pdl
    normed = residual_norm(x, None, x, scratch.normed, pdl=pdl)
    for i in range(config.depth):
        matrix = weights.qkv[i].weight
        torch.mm(normed, matrix.T, out=scratch.qkv[:, : matrix.size(0)])
        sums, totals = _attend(weights, cache, slots, tokens, positions, tuning, scratch, i)
        mixed = sums if totals is None else combine(sums, totals, scratch.attention, pdl=pdl)
        torch.mm(mixed, weights.out[i].weight.T, out=scratch.written)
        residual_norm(x, scratch.written, x, normed, pdl=pdl)
        torch.mm(normed, weights.up[i].weight.T, out=scratch.hidden)
        torch.mm(relu2_(scratch.hidden, pdl=pdl), weights.down[i].weight.T, out=scratch.written)
        a, b, extra, keep = _end_of_layer(weights, scratch, i)
        residual_norm(x, scratch.written, x, normed, a=a, b=b, extra=extra, keep=keep, pdl=pdl)
    torch.mm(normed, weights.head.weight.T, out=scratch.raw_logits)
    return softcap(scratch.raw_logits, scratch.logits, config.softcap, pdl=pdl)


def _attend(
    weights: DecodeWeights,
    cache: RingCache,
    slots: Tensor,
    tokens: Tensor,
    positions: Tensor,
    tuning: Tuning,
    scratch: Scratch,
    layer: int,
) -> tuple[Tensor, Tensor | None]:
    """Attention (B, H·D), or the splits' sums (B, H, splits, D) and totals (B, H, splits)."""
    config = weights.config
    window = config.window(layer)
    split = tuning.splits[window]
    out, totals = scratch.attention, None
    if split.splits > 1:
        shape = (tokens.size(0), config.heads, split.splits)
        totals = scratch.totals[: shape[0] * shape[1] * shape[2]].view(shape)
        out = scratch.sums[: totals.numel() * config.head_dim].view(*shape, config.head_dim)
    rope_cache_attention(
        scratch.qkv, cache.keys[layer], cache.values[layer], slots, positions, weights.cos, weights.sin,
        weights.heads, window, out, totals, tokens, weights.value_embeds.get(layer),
        split=split, pdl=tuning.pdl,
    )  # fmt: skip
    return out, totals


def _end_of_layer(
    weights: DecodeWeights, scratch: Scratch, layer: int
) -> tuple[float, float, Tensor | None, Tensor | None]:
    """What the stream becomes after a layer, a·x + b·extra, and where x itself is kept."""
    config = weights.config
    middle = layer == config.depth // 2
    keep = scratch.middle if middle and weights.backout else None
    if layer < config.depth - 1:
        mu = weights.mus[layer + 1]
        return weights.lambdas[layer + 1], mu, scratch.start if mu else None, keep
    if middle:  # of one or two layers the last is also the middle
        return 1.0 - weights.backout, 0.0, None, None
    return 1.0, -weights.backout, scratch.middle if weights.backout else None, None
