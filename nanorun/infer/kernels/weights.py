"""What a decode step reads: a model's weights laid out for it, the ring cache, and room to work in.

Query, key and value matrices of a layer are one matrix, and on layers with a value embedding the gate is
K more rows of it (zero but for the channels it looks at), so that one product gives all four. Matrices of
all layers are slices of one tensor. Scalars become Python numbers: a step is captured for fixed weights.
"""

from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from nanorun.config import VALUE_GATE_CHANNELS, ModelConfig
from nanorun.infer.kernels.attention import Heads
from nanorun.infer.kernels.linear import Matrix, quantized
from nanorun.model.gpt import GPT

GATE_ROWS_MULTIPLE = 16  # keeps rows of activations aligned for wide loads and tensor cores


@dataclass(frozen=True)
class Stack:
    """The same matrix of every layer: weights (layers, rows, inputs), int8 scales (layers, rows) or none."""

    weight: Tensor
    scales: Tensor | None = None

    def __getitem__(self, layer: int) -> Matrix:
        return Matrix(self.weight[layer], None if self.scales is None else self.scales[layer])


@dataclass(frozen=True)
class DecodeWeights:
    config: ModelConfig
    dtype: torch.dtype  # of activations, and of weights that are not int8
    embed: Tensor  # (vocabulary, width)
    value_embeds: dict[int, Tensor]  # by layer: (vocabulary, K·D)
    qkv: Stack  # queries, keys, values, then gates
    out: Stack
    up: Stack
    down: Stack
    head: Matrix
    lambdas: tuple[float, ...]
    mus: tuple[float, ...]
    smear_gate: Tensor | None
    smear_scale: float
    backout: float
    cos: Tensor  # (context, D/2)
    sin: Tensor

    @property
    def heads(self) -> Heads:
        config = self.config
        return Heads(config.heads, config.kv_heads, config.head_dim, config.qk_gain)

    def qkv_rows(self, layer: int) -> int:
        """How many rows of the fused matrix this layer uses."""
        config = self.config
        plain = (config.heads + 2 * config.kv_heads) * config.head_dim
        return plain + config.kv_heads * (layer in self.value_embeds)


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


@torch.no_grad()
def decode_weights(model: GPT, dtype: torch.dtype, *, int8: bool = False) -> DecodeWeights:
    """A model's weights for decoding; `int8` narrows the block matrices and the head."""
    config, layers = model.config, model.layers()
    plain = (config.heads + 2 * config.kv_heads) * config.head_dim
    gates = -(-config.kv_heads // GATE_ROWS_MULTIPLE) * GATE_ROWS_MULTIPLE if model.value_embeds else 0
    device = model.embed.weight.device
    fused = torch.zeros(config.depth, plain + gates, config.dim, dtype=torch.float32, device=device)
    for i, block in enumerate(layers):
        attention = block.attention
        fused[i, :plain] = torch.cat([attention.q.weight, attention.k.weight, attention.v.weight])
        if attention.value_gate is not None:
            fused[i, plain : plain + config.kv_heads, :VALUE_GATE_CHANNELS] = attention.value_gate.weight

    def own(weight: Tensor) -> Tensor:
        return weight.detach().to(dtype).contiguous()

    def narrow(weight: Tensor) -> Matrix:
        return quantized(weight.detach()) if int8 else Matrix(own(weight))

    def stack(weights: list[Tensor]) -> Stack:
        matrices = [narrow(weight) for weight in weights]
        scales = [matrix.scales for matrix in matrices if matrix.scales is not None]
        return Stack(torch.stack([m.weight for m in matrices]), torch.stack(scales) if scales else None)

    def number(parameter: Tensor) -> float:
        return float(parameter.to(dtype))

    mixed = config.residual_scalars
    return DecodeWeights(
        config=config,
        dtype=dtype,
        embed=own(model.embed.weight),
        value_embeds={
            int(i): cast(Tensor, table.weight).to(dtype) for i, table in model.value_embeds.items()
        },
        qkv=stack(list(fused)),
        out=stack([block.attention.out.weight for block in layers]),
        up=stack([block.mlp.up.weight for block in layers]),
        down=stack([block.mlp.down.weight for block in layers]),
        head=narrow(model.head.weight),
        lambdas=tuple(number(v) for v in model.lambdas) if mixed else (1.0,) * config.depth,
        mus=tuple(number(v) for v in model.mus) if mixed else (0.0,) * config.depth,
        smear_gate=own(model.smear_gate.weight[0]) if config.smear else None,
        smear_scale=number(model.smear_scale[0]) if config.smear else 0.0,
        backout=number(model.backout_scale[0]) if config.backout else 0.0,
        cos=own(model.cos),
        sin=own(model.sin),
    )


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
        self.qkv = room(batch, weights.qkv.weight.size(1))
        self.sums = room(batch * config.heads * most_splits * config.head_dim)
        self.totals = room(batch * config.heads * most_splits, dtype=exact)
        self.attention = room(batch, config.dim)
        self.written = room(batch, config.dim)  # what a matrix adds to the stream
        self.hidden = room(batch, config.mlp_ratio * config.dim)
        self.raw_logits = room(batch, weights.head.weight.size(0))
        self.logits = room(batch, config.vocab_size, dtype=exact)
