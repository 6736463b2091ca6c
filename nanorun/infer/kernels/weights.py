"""The inputs of the fast decode step: the weights of an `InferenceGPT` as the kernels read them, and the workspace.

Matrices and tables are those of the model. Scalars become Python numbers, since a step is captured for fixed
weights.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from nanorun.config import ModelConfig
from nanorun.infer.kernels.attention import Heads, KVSplit
from nanorun.infer.model import InferenceAttention, InferenceGPT, InferenceLinear, Matrix


@dataclass(frozen=True)
class DecodeWeights:
    config: ModelConfig
    dtype: torch.dtype  # of activations, and of weights that are not int8
    embed: Tensor  # (vocabulary, width), normalized
    smear: Tensor | None  # (vocabulary, 1)
    value_embeds: dict[int, Tensor]  # by layer: (vocabulary, K·D)
    qkv: tuple[Matrix, ...]  # of each layer: rows of queries, keys, values, then value gates, then padding
    out: tuple[Matrix, ...]
    up: tuple[Matrix, ...]
    down: tuple[Matrix, ...]
    head: Matrix
    lambdas: tuple[float, ...]
    mus: tuple[float, ...]
    backout: float
    cos: Tensor  # (context, D/2)
    sin: Tensor

    @property
    def heads(self) -> Heads:
        config = self.config
        return Heads(config.heads, config.kv_heads, config.head_dim, config.qk_gain)

    def qkv_rows(self, layer: int) -> int:
        """How many rows of the joined matrix this layer uses."""
        config = self.config
        rows = (config.heads + 2 * config.kv_heads) * config.head_dim
        return rows + config.kv_heads * (layer in self.value_embeds)

    @staticmethod
    @torch.no_grad()
    def of(model: InferenceGPT) -> "DecodeWeights":
        config, layers = model.config, model.layers()
        scalars = config.residual_scalars
        return DecodeWeights(
            config=config,
            dtype=model.dtype,
            embed=model.embed.weight,
            smear=model.smear_gates,
            value_embeds={
                int(i): cast(nn.Embedding, table).weight for i, table in model.value_embeds.items()
            },
            qkv=tuple(_matrix(cast(InferenceAttention, layer.attention).joined) for layer in layers),
            out=tuple(_matrix(layer.attention.out) for layer in layers),
            up=tuple(_matrix(layer.mlp.up) for layer in layers),
            down=tuple(_matrix(layer.mlp.down) for layer in layers),
            head=_matrix(model.head),
            lambdas=tuple(model.lambdas.tolist()) if scalars else (1.0,) * config.depth,
            mus=tuple(model.mus.tolist()) if scalars else (0.0,) * config.depth,
            backout=float(model.backout_scale) if config.backout else 0.0,
            cos=model.cos,
            sin=model.sin,
        )


def _matrix(module: nn.Module) -> Matrix:
    return cast(InferenceLinear, module).matrix


class Workspace:
    """Buffers for a step of B rows, allocated once. The residual stream is fp32, inputs of a matrix are `dtype`."""

    def __init__(self, weights: DecodeWeights, batch: int, splits: Mapping[int, KVSplit]) -> None:
        config, dtype = weights.config, weights.dtype
        device = weights.embed.device
        accumulate = torch.float32 if dtype != torch.float64 else dtype

        def empty(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        self.x0 = empty(batch, config.dim, dtype=accumulate)
        self.stream = empty(batch, config.dim, dtype=accumulate)
        self.middle = empty(batch, config.dim, dtype=accumulate)
        self.normed = empty(batch, config.dim)
        self.qkv = empty(batch, max(matrix.weight.size(0) for matrix in weights.qkv))
        self.attention = empty(batch, config.dim)
        most = max(split.splits for split in splits.values())
        denominators = empty(batch, config.heads, most, dtype=accumulate).flatten()
        partial = empty(batch, config.heads, most, config.head_dim).flatten()
        # By window: the attention output (B, H·D), or partial sums (B, H, splits, D) with their denominators.
        self.attention_outputs: dict[int, tuple[Tensor, Tensor | None]] = {}
        for window, split in splits.items():
            self.attention_outputs[window] = self.attention, None
            if split.splits > 1:
                shape = (batch, config.heads, split.splits)
                sums = denominators[: math.prod(shape)].view(shape)
                self.attention_outputs[window] = (
                    partial[: sums.numel() * config.head_dim].view(*shape, config.head_dim),
                    sums,
                )
        self.delta = empty(batch, config.dim)  # what attention or MLP adds to the residual stream
        self.hidden = empty(batch, config.mlp_ratio * config.dim)
        self.raw_logits = empty(batch, weights.head.weight.size(0))
        self.logits = empty(batch, config.vocab_size, dtype=accumulate)
