"""The fast decode step: a new token per row in, fp32 logits out. It computes what `forward.decode` computes.

Three ways to multiply by matrices, by the number of rows that share them (`tune` chooses):

    gemv    1 to 4 rows (int8: 8)   a kernel that holds whole matrix rows in registers; five kernels per layer
    cublas  more rows               torch.mm, with norms, ReLU² and residuals in small kernels between
    gemm    more rows, int8         gemv's kernels with tensor cores; one more where a window is split

The elementwise end of a layer is in the epilogue of the kernel that writes the residual stream: after the MLP that
is λ·x + μ·x0 for the next layer, after the last layer the backout. Nothing here synchronizes with the GPU or reads
a value from it, and shapes depend on the number of rows alone: a step can be captured into a CUDA graph once for
each.

`unsupported` names the fields of a configuration that are not implemented here; such a model is decoded by the
plain trunk. A new field of ModelConfig is unsupported, unless at its default, until SUPPORTED_FIELDS lists it.
"""

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from nanorun.config import ModelConfig
from nanorun.infer.cache import Cache
from nanorun.infer.forward import Decode
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
from nanorun.infer.model import InferenceGPT

TARGET_PROGRAMS = 264  # two for each of an H200's 132 multiprocessors
KEYS_PER_BLOCK = 64
MAX_SPLITS = 16

SUPPORTED_FIELDS = frozenset(
    "depth dim heads kv_heads vocab_size context windows short_window mlp_ratio rope_base qk_gain softcap "
    "value_embeddings residual_scalars smear backout document_mask dropout".split()
)


def unsupported(config: ModelConfig) -> list[str]:
    """Fields, with their values, that the kernels do not implement."""
    names = config.fields_beyond(SUPPORTED_FIELDS)
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


class FastDecode:
    """`forward.decode` by the kernels.

    Rows of sequences must have distinct slots (so it cannot verify drafts); padding rows may share the scratch
    slot, whose contents do not matter.
    """

    def __init__(self, weights: DecodeWeights, cache: Cache, tuning: Tuning | None = None) -> None:
        require_triton()
        self.weights, self.cache, self.tuning = weights, cache, tuning  # None: as `tune` chooses
        self._by_batch: dict[int, tuple[Tuning, Workspace]] = {}  # captured graphs refer to the workspaces

    def __call__(
        self, slots: Tensor, tokens: Tensor, positions: Tensor, longest: int | None = None
    ) -> Tensor:
        """fp32 logits (B, vocabulary) after each row's new token, which is written to its slot of the cache.

        The logits are a buffer of the workspace. `longest` does not matter here: attention reads the tokens that
        are in the cache, and no more.
        """
        weights, cache, batch = self.weights, self.cache, tokens.size(0)
        config = weights.config
        if batch not in self._by_batch:
            tuning = self.tuning or tune(config, batch, tokens.device, weights.head.scale is not None)
            self._by_batch[batch] = tuning, Workspace(weights, batch, tuning.splits)
        tuning, work = self._by_batch[batch]
        x, normed, pdl = work.stream, work.normed, tuning.pdl
        cublas, tensor_cores = tuning.matmul == "cublas", tuning.matmul == "gemm"

        first_scale = weights.lambdas[0] + weights.mus[0]  # the first layer mixes x0 with itself
        embed(
            weights.embed, weights.smear, tokens, cache.tokens, slots, positions,
            work.x0, x, first_scale, signals_dependents=pdl,
        )  # fmt: skip
        if cublas:
            residual_norm(x, None, x, normed, pdl=pdl)
        for i in range(config.depth):
            if cublas:
                torch.mm(normed, weights.qkv[i].weight.T, out=work.qkv[:, : weights.qkv[i].weight.size(0)])
            else:
                norm_linear(
                    x, weights.qkv[i], work.qkv,
                    rows=weights.qkv_rows(i), tile=tuning.qkv, tensor_cores=tensor_cores, pdl=pdl,
                )  # fmt: skip

            window = config.window(i)
            attention, denominators = work.attention_outputs[window]
            rope_cache_attention(
                work.qkv, cache.k[i], cache.v[i], slots, positions, weights.cos, weights.sin, weights.heads,
                window, attention, denominators, tokens, weights.value_embeds.get(i),
                split=tuning.splits[window], pdl=pdl,
            )  # fmt: skip
            if denominators is not None and tuning.matmul == "gemv":
                combine_and_project(attention, denominators, weights.out[i], x, x, tile=tuning.out, pdl=pdl)
            else:
                if denominators is not None:
                    attention = combine_splits(attention, denominators, work.attention, pdl=pdl)
                if cublas:
                    torch.mm(attention, weights.out[i].weight.T, out=work.delta)
                    residual_norm(x, work.delta, x, normed, pdl=pdl)
                else:
                    linear_residual(
                        attention, weights.out[i], x, x, tile=tuning.out, tensor_cores=tensor_cores, pdl=pdl
                    )

            # After the MLP the stream becomes alpha·x + beta·extra: the input of the next layer, or the backout.
            # `keep` receives x itself.
            is_last, is_middle = i == config.depth - 1, i == config.backout_layer
            extra, keep = None, None
            if not is_last:
                alpha, beta = weights.lambdas[i + 1], weights.mus[i + 1]
                extra = work.x0 if beta else None
                keep = work.middle if is_middle and weights.backout else None
            elif is_middle:  # of a single layer
                alpha, beta = 1.0 - weights.backout, 0.0
            else:
                alpha, beta = 1.0, -weights.backout
                extra = work.middle if weights.backout else None
            if cublas:
                torch.mm(normed, weights.up[i].weight.T, out=work.hidden)
                torch.mm(relu2_(work.hidden, pdl=pdl), weights.down[i].weight.T, out=work.delta)
                residual_norm(
                    x, work.delta, x, normed, alpha=alpha, beta=beta, extra=extra, keep=keep, pdl=pdl
                )
            else:
                norm_linear(
                    x, weights.up[i], work.hidden,
                    tile=tuning.up, activation="relu2", tensor_cores=tensor_cores, pdl=pdl,
                )  # fmt: skip
                linear_residual(
                    work.hidden, weights.down[i], x, x, tile=tuning.down,
                    alpha=alpha, beta=beta, extra=extra, keep=keep, tensor_cores=tensor_cores, pdl=pdl,
                )  # fmt: skip

        if cublas:
            torch.mm(normed, weights.head.weight.T, out=work.raw_logits)
            return softcap(work.raw_logits, work.logits, config.softcap, pdl=pdl)
        return norm_linear(
            x, weights.head, work.logits, rows=config.vocab_size, tile=tuning.head,
            activation="softcap" if config.softcap else "none", cap=config.softcap,
            tensor_cores=tensor_cores, pdl=pdl,
        )  # fmt: skip


def make_fast_decode(model: InferenceGPT, cache: Cache) -> Decode:
    return FastDecode(DecodeWeights.of(model), cache)
