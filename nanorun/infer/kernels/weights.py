"""What a decode step reads: the engine's weights as the kernels take them, the ring cache, and room to work in.

Nothing is copied: matrices, tables and caches are those of infer/frozen.py and infer/cache.py. Only the scalars
become Python numbers, since a step is captured for fixed weights.
"""

from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from nanorun.config import SMEAR_GATE_CHANNELS, ModelConfig
from nanorun.infer.frozen import FrozenGPT, FrozenLinear, Matrix, freeze
from nanorun.infer.kernels.attention import Heads
from nanorun.model.gpt import GPT, norm


@dataclass(frozen=True)
class DecodeWeights:
    config: ModelConfig
    dtype: torch.dtype  # of activations, and of weights that are not int8
    embed: Tensor  # (vocabulary, width), normed
    smear: Tensor | None  # (vocabulary, 1)
    value_embeds: dict[int, Tensor]  # by layer: (vocabulary, K·D)
    qkv: tuple[Matrix, ...]  # of each layer: rows of queries, keys, values, then gates, then padding
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
        plain = (config.heads + 2 * config.kv_heads) * config.head_dim
        return plain + config.kv_heads * (layer in self.value_embeds)

    @staticmethod
    @torch.no_grad()
    def of(model: FrozenGPT) -> "DecodeWeights":
        config, dtype = model.config, model.dtype
        layers = model.layers()
        # The norm of an embedding depends on the token alone, and so does the gate of the smear.
        embed = norm(model.embed.weight)
        smear = None
        if config.smear:
            gate = model.smear_gate(embed[:, :SMEAR_GATE_CHANNELS])
            smear = torch.sigmoid(gate) * model.smear_scale.to(dtype)
        ones, zeros = [1.0] * config.depth, [0.0] * config.depth
        return DecodeWeights(
            config=config,
            dtype=dtype,
            embed=embed,
            smear=smear,
            value_embeds={
                int(i): cast(nn.Embedding, table).weight for i, table in model.value_embeds.items()
            },
            qkv=tuple(_matrix_of(block.attention.joined) for block in layers),
            out=tuple(_matrix_of(block.attention.out) for block in layers),
            up=tuple(_matrix_of(block.mlp.up) for block in layers),
            down=tuple(_matrix_of(block.mlp.down) for block in layers),
            head=_matrix_of(model.head),
            lambdas=tuple(model.lambdas.tolist() if config.residual_scalars else ones),
            mus=tuple(model.mus.tolist() if config.residual_scalars else zeros),
            backout=float(model.backout_scale) if config.backout else 0.0,
            cos=model.cos,
            sin=model.sin,
        )


def _matrix_of(module: nn.Module | None) -> Matrix:
    return cast(FrozenLinear, module).matrix


def decode_weights(model: GPT, dtype: torch.dtype, *, int8: bool = False) -> DecodeWeights:
    return DecodeWeights.of(freeze(model, dtype, int8))


@dataclass(frozen=True)
class RingCache:
    """Keys and values of each layer, (slots, K, L, D), and the tokens themselves, (slots, L).

    Position p of a slot is at index p % L. L is at least the layer's window. Whoever fills a slot with a
    prompt fills all three.
    """

    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    tokens: Tensor

    @staticmethod
    def empty(config: ModelConfig, slots: int, dtype: torch.dtype, device: torch.device) -> "RingCache":
        """As short as each layer's window allows."""
        shapes = [
            (slots, config.kv_heads, config.window(layer), config.head_dim) for layer in range(config.depth)
        ]
        keys = tuple(torch.zeros(shape, dtype=dtype, device=device) for shape in shapes)
        values = tuple(torch.zeros(shape, dtype=dtype, device=device) for shape in shapes)
        tokens = torch.zeros(slots, config.context, dtype=torch.int32, device=device)
        return RingCache(keys, values, tokens)


class Scratch:
    """The buffers of a step of B rows, made once. The stream is fp32, what feeds a matrix is `dtype`."""

    def __init__(self, weights: DecodeWeights, batch: int, most_splits: int) -> None:
        config, dtype = weights.config, weights.dtype
        device = weights.embed.device
        exact = torch.float32 if dtype != torch.float64 else dtype

        def room(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        self.start = room(batch, config.dim, dtype=exact)  # x0
        self.stream = room(batch, config.dim, dtype=exact)
        self.middle = room(batch, config.dim, dtype=exact)
        self.normed = room(batch, config.dim)
        self.qkv = room(batch, max(matrix.weight.size(0) for matrix in weights.qkv))
        self.sums = room(batch * config.heads * most_splits * config.head_dim)
        self.totals = room(batch * config.heads * most_splits, dtype=exact)
        self.attention = room(batch, config.dim)
        self.written = room(batch, config.dim)  # what a matrix adds to the stream
        self.hidden = room(batch, config.mlp_ratio * config.dim)
        self.raw_logits = room(batch, weights.head.weight.size(0))
        self.logits = room(batch, config.vocab_size, dtype=exact)
