"""A model's weights as generation wants them: cast once, joined where they are used together.

Training keeps fp32 masters and casts them at every use. Decoding one token reads every weight once, so
the time of a step is the time to read them, and a cast at every token would double it. Here

- queries, keys, values and the gate of the value embedding are one matrix a layer, hence one kernel. The
  gate reads only the first channels of the stream; its rows are zero behind them;
- the norm of an embedding depends on nothing but the token, and so does the gate of the smear: both are
  computed for the whole vocabulary, once;
- all value embeddings lie side by side, so that one lookup finds those of all layers.

`int8=True` keeps matrices and head as int8 with one scale per output row: w ≈ scale · int8, symmetric.
Half the bytes of bf16, so up to twice the speed where a step is bound by reading weights; embeddings are
only looked up and stay as they are. Gates and scalars are too few to matter. A weight is off by at most
half a step of its row's scale; `bench infer --model` says what that costs in bits per byte.
"""

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanorun.config import SMEAR_GATE_CHANNELS, ModelConfig
from nanorun.model.gpt import GPT, Block, norm
from nanorun.model.linear import Linear

ROW_MULTIPLE = 16  # rows of a joined matrix are padded to it: GPUs like their outputs aligned


@dataclass(frozen=True)
class Matrix:
    """y = x Wᵀ, or y = (x Wᵀ)·scale where W is int8."""

    weight: Tensor  # (outputs, inputs)
    scale: Tensor | None = None  # (outputs,), fp32

    def dense(self, dtype: torch.dtype) -> Tensor:
        weight = self.weight.to(dtype)
        return weight if self.scale is None else weight * self.scale.to(dtype)[:, None]

    @property
    def bytes(self) -> int:
        return self.weight.nbytes + (self.scale.nbytes if self.scale is not None else 0)


@dataclass(frozen=True)
class Layer:
    window: int
    value: int | None  # which of the value embeddings is added here
    qkv: Matrix  # rows of q, k, v, then of the value gate, then padding
    out: Matrix
    up: Matrix
    down: Matrix


@dataclass(frozen=True)
class Weights:
    config: ModelConfig
    dtype: torch.dtype
    embed: Tensor  # (V, D), normed
    smear: Tensor | None  # (V, 1), how much of the token before each token takes up
    values: Tensor | None  # (V, layers that have one, kv_heads·head_dim)
    layers: tuple[Layer, ...]
    head: Matrix
    mixing: Tensor | None  # (depth, 2): λ and μ
    backout: Tensor | None
    cos: Tensor  # (context, head_dim / 2)
    sin: Tensor

    @staticmethod
    @torch.no_grad()
    def of(model: GPT, dtype: torch.dtype | None = None, int8: bool = False) -> "Weights":
        """A copy: training on does not change it. The dtype is the model's unless another is named."""
        config, dtype = model.config, dtype or model.dtype
        embed = norm(model.embed.weight.to(dtype))
        smear = None
        if config.smear:
            gate = model.smear_gate.weight.to(dtype)
            smear = torch.sigmoid(F.linear(embed[:, :SMEAR_GATE_CHANNELS], gate))
            smear = smear * model.smear_scale.to(dtype)
        embedded = sorted(int(name) for name in model.value_embeds)
        tables = [cast(nn.Embedding, model.value_embeds[str(i)]).weight.to(dtype) for i in embedded]
        numbers = {layer: i for i, layer in enumerate(embedded)}
        mixing = torch.stack([model.lambdas, model.mus], 1) if config.residual_scalars else None
        return Weights(
            config,
            dtype,
            embed.clone(),
            smear,
            torch.stack(tables, 1) if tables else None,
            tuple(_layer(b, numbers.get(i), dtype, int8) for i, b in enumerate(model.layers())),
            _matrix(model.head.weight, dtype, int8),
            mixing.to(dtype) if mixing is not None else None,
            model.backout_scale.to(dtype).clone() if config.backout else None,
            model.cos.to(dtype).clone(),
            model.sin.to(dtype).clone(),
        )

    @property
    def int8(self) -> bool:
        return self.head.scale is not None

    @property
    def device(self) -> torch.device:
        return self.embed.device

    @property
    def bytes(self) -> int:
        """Everything, tables included."""
        return sum(tensor.nbytes for tensor in self.tensors())

    @property
    def bytes_per_step(self) -> int:
        """What a decode step reads whatever the batch: all matrices and the head."""
        layers = sum(m.bytes for layer in self.layers for m in _matrices(layer))
        return layers + self.head.bytes

    def tensors(self) -> Iterator[Tensor]:
        for matrix in (self.head, *(m for layer in self.layers for m in _matrices(layer))):
            yield matrix.weight
            if matrix.scale is not None:
                yield matrix.scale
        for tensor in (self.embed, self.smear, self.values, self.mixing, self.backout, self.cos, self.sin):
            if tensor is not None:
                yield tensor

    @torch.no_grad()
    def load(self, model: GPT) -> None:
        """The model's weights of now, in the same memory: captured graphs stay valid."""
        for mine, new in zip(self.tensors(), Weights.of(model, self.dtype, self.int8).tensors(), strict=True):
            mine.copy_(new)


def quantize(weight: Tensor) -> Matrix:
    """Symmetric int8 with a scale per row."""
    weight = weight.float()
    scale = weight.abs().amax(dim=1).clamp(min=1e-12) / 127
    return Matrix((weight / scale[:, None]).round().to(torch.int8), scale)


@torch.no_grad()
def rounded(model: GPT) -> GPT:
    """The model as int8 would have it, in full precision: to measure what the rounding costs."""
    copied = copy.deepcopy(model)
    for module in copied.modules():
        if isinstance(module, Linear) and min(module.weight.shape) > 1:
            matrix = quantize(module.weight)
            assert matrix.scale is not None
            module.weight.copy_(matrix.weight * matrix.scale[:, None])
    return copied


def _layer(block: Block, value: int | None, dtype: torch.dtype, int8: bool) -> Layer:
    attention, mlp = block.attention, block.mlp
    rows = [attention.q.weight, attention.k.weight, attention.v.weight]
    if attention.value_gate is not None:
        gate = attention.value_gate.weight
        rows.append(F.pad(gate, (0, rows[0].size(1) - gate.size(1))))
    joined = torch.cat(rows)
    joined = F.pad(joined, (0, 0, 0, -joined.size(0) % ROW_MULTIPLE))
    return Layer(
        attention.window,
        value,
        _matrix(joined, dtype, int8),
        _matrix(attention.out.weight, dtype, int8),
        _matrix(mlp.up.weight, dtype, int8),
        _matrix(mlp.down.weight, dtype, int8),
    )


def _matrix(weight: Tensor, dtype: torch.dtype, int8: bool) -> Matrix:
    if int8:
        return quantize(weight)
    return Matrix(weight.detach().to(dtype, copy=True))


def _matrices(layer: Layer) -> tuple[Matrix, ...]:
    return layer.qkv, layer.out, layer.up, layer.down
