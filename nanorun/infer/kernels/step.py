"""The fast decode step: a new token per row in, fp32 logits out. It computes what `forward.decode` computes.

Three ways to multiply by matrices, by the number of rows that share them (`tune` chooses):

    gemv    1 to 4 rows   a kernel that holds whole matrix rows in registers; five kernels per layer
    cublas  more          torch.mm, with norms, ReLU² and residuals in small kernels between
    gemm    int8          the same five kernels with tensor cores

The elementwise end of a layer is in the epilogue of the kernel that writes the residual stream: after the MLP that
is λ·x + μ·x0 for the next layer, after the last layer the backout. Nothing here synchronizes with the GPU or reads
a value from it, and shapes depend on the number of rows alone: a step can be captured into a CUDA graph once for
each.

`unsupported` names the fields of a configuration that are not implemented here; such a model is decoded by the
plain trunk. A new field of ModelConfig is unsupported, unless at its default, until SUPPORTED_FIELDS lists it.
"""

from dataclasses import dataclass, fields, replace
from typing import Literal

import torch
from torch import Tensor

from nanorun.config import ModelConfig
from nanorun.infer.cache import Cache
from nanorun.infer.forward import Decode
from nanorun.infer.frozen import FrozenGPT
from nanorun.infer.kernels.attention import (
    MAX_GROUP,
    MAX_SCORE,
    KVSplit,
    combine_and_project,
    combine_splits,
    rope_cache_attention,
)
from nanorun.infer.kernels.elementwise import embed, relu2_, residual_norm, softcap
from nanorun.infer.kernels.language import require_triton, supports_pdl
from nanorun.infer.kernels.linear import Tile, linear_residual, norm_linear, padded
from nanorun.infer.kernels.weights import DecodeWeights, Workspace

TARGET_PROGRAMS = 264  # two for each of an H200's 132 multiprocessors
KEYS_PER_BLOCK = 64
MAX_SPLITS = 16

SUPPORTED_FIELDS = frozenset(
    "depth dim heads kv_heads vocab_size context windows short_window mlp_ratio rope_base qk_gain softcap "
    "value_embeddings residual_scalars smear backout document_mask".split()
)


def unsupported(config: ModelConfig) -> list[str]:
    """Fields, with their values, that the kernels do not implement."""
    names = [
        field.name
        for field in fields(ModelConfig)
        if field.name not in SUPPORTED_FIELDS and getattr(config, field.name) != field.default
    ]
    if config.head_dim < 16 or config.head_dim & (config.head_dim - 1):
        names.append("heads")  # the head dimension is the side of a tile: a power of two, at least 16
    if config.dim % 16:
        names.append("dim")
    if config.heads // config.kv_heads > MAX_GROUP:
        names.append("kv_heads")
    if config.qk_gain**2 * config.head_dim**0.5 > MAX_SCORE:
        names.append("qk_gain")
    return [f"{name}={getattr(config, name)}" for name in names]


@dataclass(frozen=True)
class Tuning:
    """The launch parameters of each kernel of a step; what a sweep varies."""

    matmul: Literal["gemv", "gemm", "cublas"]
    qkv: Tile
    out: Tile
    up: Tile
    down: Tile
    head: Tile
    splits: dict[int, KVSplit]  # by window
    pdl: bool

    @property
    def max_splits(self) -> int:
        return max(split.splits for split in self.splits.values())


def tune(config: ModelConfig, batch: int, device: torch.device, int8: bool = False) -> Tuning:
    pdl = supports_pdl(device)
    few = batch <= (8 if int8 else 4)
    splits = {}
    for window in {config.window(layer) for layer in range(config.depth)}:
        wanted = -(-TARGET_PROGRAMS // (batch * config.kv_heads))
        blocks = -(-window // KEYS_PER_BLOCK)
        count = 1
        while count < min(wanted, blocks, MAX_SPLITS):
            count *= 2
        splits[window] = KVSplit(
            count, KEYS_PER_BLOCK, stages=2 if few else 3, preload=few, tensor_cores=not few
        )
    if few:
        narrow, wide = Tile(rows=4, inputs=256), Tile(rows=16, inputs=256)
        out = replace(narrow, warps=4 if config.heads <= 8 else 8)  # a warp has one or two heads there
        return Tuning("gemv", narrow, out, narrow, narrow, wide, splits, pdl)
    inputs = 4096 // padded(batch)  # per stage: the norm keeps the squares of all rows in registers
    tile = Tile(rows=16, inputs=inputs, stages=4)
    deep, head = replace(tile, inputs=2 * inputs), Tile(rows=64, inputs=min(inputs, 128), stages=4)
    return Tuning("gemm" if int8 else "cublas", tile, tile, tile, deep, head, splits, pdl)


def fast_decode(model: FrozenGPT, cache: Cache) -> Decode:
    """`forward.decode` by the kernels.

    Rows of sequences must have distinct slots (so it cannot verify drafts); padding rows may share the scratch
    slot, whose contents do not matter.
    """
    weights = DecodeWeights.of(model)
    by_batch: dict[int, tuple[Tuning, Workspace]] = {}  # captured graphs refer to the workspaces

    def decode(slots: Tensor, tokens: Tensor, positions: Tensor, longest: int | None = None) -> Tensor:
        batch = tokens.size(0)
        if batch not in by_batch:
            tuning = tune(model.config, batch, tokens.device, model.int8)
            by_batch[batch] = tuning, Workspace(weights, batch, tuning.max_splits)
        return decode_step(weights, cache, slots, tokens, positions, *by_batch[batch])

    return decode


def decode_step(
    weights: DecodeWeights,
    cache: Cache,
    slots: Tensor,
    tokens: Tensor,
    positions: Tensor,
    tuning: Tuning | None = None,
    workspace: Workspace | None = None,
) -> Tensor:
    """fp32 logits (B, vocabulary) after each row's new token, which is written to its slot of the cache.

    The logits are a buffer of the workspace. Two rows must not have the same slot.
    """
    require_triton()
    batch = tokens.size(0)
    tuning = tuning or tune(weights.config, batch, tokens.device, weights.head.scale is not None)
    step = _Step(
        weights,
        cache,
        slots,
        tokens,
        positions,
        tuning,
        workspace or Workspace(weights, batch, tuning.max_splits),
    )
    return step.run_cublas() if tuning.matmul == "cublas" else step.run_fused()


@dataclass(frozen=True)
class _Step:
    weights: DecodeWeights
    cache: Cache
    slots: Tensor
    tokens: Tensor
    positions: Tensor
    tuning: Tuning
    workspace: Workspace

    def run_fused(self) -> Tensor:
        weights, tuning, work = self.weights, self.tuning, self.workspace
        config, x = weights.config, work.stream
        tensor_cores, pdl = tuning.matmul == "gemm", tuning.pdl
        self._embed()
        for i in range(config.depth):
            norm_linear(
                x, weights.qkv[i], work.qkv,
                rows=weights.qkv_rows(i), tile=tuning.qkv, tensor_cores=tensor_cores, pdl=pdl,
            )  # fmt: skip
            partial, denominators = self._attend(i)
            if denominators is not None and not tensor_cores:
                combine_and_project(partial, denominators, weights.out[i], x, x, tile=tuning.out, pdl=pdl)
            else:
                attention = self._combine(partial, denominators)
                linear_residual(
                    attention, weights.out[i], x, x, tile=tuning.out, tensor_cores=tensor_cores, pdl=pdl
                )
            norm_linear(
                x, weights.up[i], work.hidden,
                tile=tuning.up, activation="relu2", tensor_cores=tensor_cores, pdl=pdl,
            )  # fmt: skip
            alpha, beta, extra, keep = self._epilogue(i)
            linear_residual(
                work.hidden, weights.down[i], x, x, tile=tuning.down,
                alpha=alpha, beta=beta, extra=extra, keep=keep, tensor_cores=tensor_cores, pdl=pdl,
            )  # fmt: skip
        return norm_linear(
            x, weights.head, work.logits,
            rows=config.vocab_size, tile=tuning.head, activation="softcap" if config.softcap else "none",
            cap=config.softcap, tensor_cores=tensor_cores, pdl=pdl,
        )  # fmt: skip

    def run_cublas(self) -> Tensor:
        weights, work, pdl = self.weights, self.workspace, self.tuning.pdl
        config, x = weights.config, work.stream
        self._embed()
        normed = residual_norm(x, None, x, work.normed, pdl=pdl)
        for i in range(config.depth):
            matrix = weights.qkv[i].weight
            torch.mm(normed, matrix.T, out=work.qkv[:, : matrix.size(0)])
            attention = self._combine(*self._attend(i))
            torch.mm(attention, weights.out[i].weight.T, out=work.delta)
            residual_norm(x, work.delta, x, normed, pdl=pdl)
            torch.mm(normed, weights.up[i].weight.T, out=work.hidden)
            torch.mm(relu2_(work.hidden, pdl=pdl), weights.down[i].weight.T, out=work.delta)
            alpha, beta, extra, keep = self._epilogue(i)
            residual_norm(x, work.delta, x, normed, alpha=alpha, beta=beta, extra=extra, keep=keep, pdl=pdl)
        torch.mm(normed, weights.head.weight.T, out=work.raw_logits)
        return softcap(work.raw_logits, work.logits, config.softcap, pdl=pdl)

    def _embed(self) -> None:
        weights, work = self.weights, self.workspace
        stream_scale = weights.lambdas[0] + weights.mus[0]  # the first layer mixes x0 with itself
        embed(
            weights.embed, weights.smear, self.tokens, self.cache.tokens, self.slots, self.positions,
            work.x0, work.stream, stream_scale, pdl=self.tuning.pdl,
        )  # fmt: skip

    def _attend(self, layer: int) -> tuple[Tensor, Tensor | None]:
        """The attention output (B, H·D), or partial sums (B, H, splits, D) and denominators (B, H, splits)."""
        weights, work = self.weights, self.workspace
        config = weights.config
        window = config.window(layer)
        split = self.tuning.splits[window]
        out, denominators = work.attention, None
        if split.splits > 1:
            shape = (self.tokens.size(0), config.heads, split.splits)
            denominators = work.denominators[: shape[0] * shape[1] * shape[2]].view(shape)
            out = work.partial[: denominators.numel() * config.head_dim].view(*shape, config.head_dim)
        rope_cache_attention(
            work.qkv, self.cache.k[layer], self.cache.v[layer], self.slots, self.positions,
            weights.cos, weights.sin, weights.heads, window, out, denominators, self.tokens,
            weights.value_embeds.get(layer), split=split, pdl=self.tuning.pdl,
        )  # fmt: skip
        return out, denominators

    def _combine(self, partial: Tensor, denominators: Tensor | None) -> Tensor:
        if denominators is None:
            return partial
        return combine_splits(partial, denominators, self.workspace.attention, pdl=self.tuning.pdl)

    def _epilogue(self, layer: int) -> tuple[float, float, Tensor | None, Tensor | None]:
        """The residual stream after a layer is alpha·x + beta·extra; `keep` receives x itself."""
        weights, work = self.weights, self.workspace
        config = weights.config
        is_middle = layer == config.depth // 2
        keep = work.middle if is_middle and weights.backout else None
        if layer < config.depth - 1:
            mu = weights.mus[layer + 1]
            return weights.lambdas[layer + 1], mu, work.x0 if mu else None, keep
        if is_middle:  # of one or two layers the last is also the middle
            return 1.0 - weights.backout, 0.0, None, None
        return 1.0, -weights.backout, work.middle if weights.backout else None, None
