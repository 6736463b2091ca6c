"""A copy of a model for inference: weights cast once, q, k and v joined, matrices in int8 where wanted.

Training keeps fp32 master weights and casts them at every use. Decoding one token reads every weight once, so
the time of a step is the time to read them, and a cast at every token would double it. `inference_copy` returns
a `GPT` that runs the same trunk on weights in the compute dtype, where

- queries, keys, values and the gate of the value embedding are rows of one matrix a layer, hence one GEMM. The gate
  reads only the first channels of the stream; its rows are zero behind them;
- the norm of an embedding and its smear gate depend on the token alone: both are computed once, for the whole
  vocabulary.

`int8=True` stores matrices and head as int8 with one scale per output row: w ≈ scale · int8, symmetric. Half the
bytes of bf16, so up to twice the speed where a step is bound by reading weights. Embeddings are only looked up and
stay as they are. Gates and scalars are too few to matter. A weight is off by at most half a step of its row's
scale; `bench infer --model` reports what that costs in bits per byte.
"""

import copy
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanorun.model.gpt import GPT, Attention, Linear, norm

# Modules of the model that the copy replaces. All others are copied as they are.
REPLACED = {"q", "k", "v", "value_gate", "out", "up", "down", "head"}
ROW_MULTIPLE = 16  # the joined matrix is padded to a multiple of it: GPUs prefer aligned outputs


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


class InferenceLinear(nn.Module):
    def __init__(self, matrix: Matrix) -> None:
        super().__init__()
        self.matrix = matrix

    def __call__(self, x: Tensor) -> Tensor:
        """Without hooks: on a CPU, looking for them takes as long as a small matmul."""
        weight, scale = self.matrix.weight, self.matrix.scale
        if scale is None:
            return F.linear(x, weight)
        return F.linear(x, weight.to(x.dtype)) * scale.to(x.dtype)


class InferenceAttention(Attention):
    """Its `joined` matrix has the rows of q, k, v, then of the value gate, then padding. What else `Attention` has is
    carried over as it is."""

    def __init__(self, attention: Attention, dtype: torch.dtype, int8: bool) -> None:
        nn.Module.__init__(self)
        self.__dict__ |= {name: value for name, value in vars(attention).items() if not name.startswith("_")}
        gate = attention.value_gate
        rows = [attention.q.weight, attention.k.weight, attention.v.weight]
        self._qkv_rows = sum(part.size(0) for part in rows)
        self._gate_rows = 0 if gate is None else gate.out_features
        if gate is not None:
            rows.append(F.pad(gate.weight, (0, rows[0].size(1) - gate.in_features)))
        joined = torch.cat(rows)
        joined = F.pad(joined, (0, 0, 0, -joined.size(0) % ROW_MULTIPLE))
        self.joined = InferenceLinear(_matrix(joined, dtype, int8))
        self.out = _copied(attention.out, dtype, int8)
        for name, module in attention.named_children():
            if name not in REPLACED:
                setattr(self, name, copy.deepcopy(module).to(dtype))

    def project(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        y = self.joined(x)
        gate = y[..., self._qkv_rows : self._qkv_rows + self._gate_rows] if self._gate_rows else None
        return y[..., : self._qkv_rows], gate


class InferenceGPT(GPT):
    """A `GPT` whose weights change only by `load`. Its matrices are `InferenceLinear`s, its embeddings normalized."""

    smear_gates: Tensor | None  # (V, 1), by token

    def __init__(self, model: GPT, dtype: torch.dtype, int8: bool) -> None:
        with torch.device("meta"):
            super().__init__(model.config, model.batch_attention.backends, dtype)
        self.int8 = int8
        tables = {
            name: value.to(dtype, copy=True)
            for name, value in model.state_dict().items()
            if not set(name.split(".")) & REPLACED
        }
        tables["embed.weight"] = norm(tables["embed.weight"])
        self.load_state_dict(tables, assign=True, strict=False)
        self.smear_gates = self.smear_gate_value(self.embed.weight) if self.config.smear else None
        self.cos, self.sin = model.cos.to(dtype, copy=True), model.sin.to(dtype, copy=True)
        for mine, its in zip(self.layers(), model.layers(), strict=True):
            mine.attention = InferenceAttention(its.attention, dtype, int8)
            mine.mlp.up, mine.mlp.down = (
                _copied(its.mlp.up, dtype, int8),
                _copied(its.mlp.down, dtype, int8),
            )
        self.head = _copied(model.head, dtype, int8)
        self.requires_grad_(False)

    def embedded(self, tokens: Tensor) -> Tensor:
        return F.embedding(tokens, self.embed.weight)

    @property
    def device(self) -> torch.device:
        return self.embed.weight.device

    def matrices(self) -> Iterator[Matrix]:
        for module in self.modules():
            if isinstance(module, InferenceLinear):
                yield module.matrix

    def tensors(self) -> Iterator[Tensor]:
        for matrix in self.matrices():
            yield matrix.weight
            if matrix.scale is not None:
                yield matrix.scale
        yield from self.parameters()
        yield from (self.cos, self.sin, *([] if self.smear_gates is None else [self.smear_gates]))

    @property
    def bytes(self) -> int:
        """Everything, tables included."""
        return sum(tensor.nbytes for tensor in self.tensors())

    @property
    def bytes_per_step(self) -> int:
        """What a decode step reads whatever the batch: all matrices and the head."""
        return sum(matrix.bytes for matrix in self.matrices())

    @torch.no_grad()
    def load(self, model: GPT) -> None:
        """Takes the current weights of the model, in the same memory. A captured CUDA graph still has the old scalars,
        which are arguments of its kernels."""
        for mine, new in zip(
            self.tensors(), inference_copy(model, self.dtype, self.int8).tensors(), strict=True
        ):
            mine.copy_(new)


@torch.no_grad()
def inference_copy(model: GPT, dtype: torch.dtype | None = None, int8: bool = False) -> InferenceGPT:
    """A copy: further training of the model does not change it. The dtype is the model's unless another is named."""
    return InferenceGPT(model, dtype or model.dtype, int8)


def quantize(weight: Tensor) -> Matrix:
    """Symmetric int8 with a scale per row."""
    weight = weight.float()
    scale = weight.abs().amax(dim=1).clamp(min=1e-12) / 127
    return Matrix((weight / scale[:, None]).round().to(torch.int8), scale)


@torch.no_grad()
def rounded(model: GPT) -> GPT:
    """The model with its matrices rounded to int8 and back, to measure what the rounding costs."""
    copied = copy.deepcopy(model)
    for module in copied.modules():
        if isinstance(module, Linear) and min(module.weight.shape) > 1:
            matrix = quantize(module.weight)
            module.weight.copy_(matrix.dense(module.weight.dtype))
    return copied


def _matrix(weight: Tensor, dtype: torch.dtype, int8: bool) -> Matrix:
    return quantize(weight) if int8 else Matrix(weight.detach().to(dtype, copy=True))


def _copied(linear: Linear, dtype: torch.dtype, int8: bool) -> Linear:
    return InferenceLinear(_matrix(linear.weight, dtype, int8))  # type: ignore[return-value]
