"""The model: a decoder-only transformer with what is known today to train small GPTs fastest.

    token ─ embedding ─ norm ─ smear ─┬─ block 0 ─ … ─ block n-1 ─ backout ─ norm ─ head ─ softcap
                                      └── x0, mixed back in before every block
    block: x = λ·x + μ·x0;  x += attention(norm(x));  x += mlp(norm(x))

- Norms are RMSNorm without parameters. There are no biases. Head and embedding are separate matrices.
- Attention: rotary position embeddings, then QK-norm with a gain of 1.2; most layers attend to a short window.
  On every other layer a value embedding of the token is added to the values, through a gate.
- MLP: four times as wide, ReLU squared.
- The output projections of attention and MLP are initialized to zero, so at first every block is the identity
  and the model is an embedding and a head.
- Smear adds a gated share of the previous token's embedding to each position, before any attention. Backout
  subtracts part of the residual stream at mid-depth from its end: features that only later layers read need not
  reach the head.

This file is the whole architecture, in plain PyTorch. Plain training, evaluation, prefill and plain decoding all run
`GPT.trunk`; how queries attend to keys is a callback, so that a batch of rows, a KV cache and a fused kernel can share
it. On a CUDA GPU with Triton two faster implementations of the same function take over, and name the fields of the
configuration that they do not support: model/fast/path.py trains, infer/kernels/ decodes.

Weights are fp32 master weights; activations are in the dtype given to `GPT`, and weights are cast where they are
used. The model knows nothing of ranks, files or optimizers.

Shapes: B rows, T positions, D width, H heads, K key-value heads, V vocabulary. Leading axes are free: the trunk
takes (B, T) tokens in training and (N,) tokens, one per sequence, in decoding.
"""

import functools
from collections.abc import Callable
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanorun.config import (
    HEAD_GATE_CHANNELS,
    NORM_EPSILON,
    SMEAR_GATE_CHANNELS,
    VALUE_GATE_CHANNELS,
    Backend,
    ModelConfig,
)
from nanorun.model.attention import BatchAttention
from nanorun.model.loss import chunked_loss

Rope = tuple[Tensor, Tensor]  # cos and sin of each token's position, (..., 1, head_dim / 2)
# embeddings (..., D) -> what smear adds: gate · the embedding of the token before, or 0 where there is none
Smear = Callable[[Tensor], Tensor]
# layer, q (..., H, D), k and v (..., K, D) -> (..., H, D)
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
LayerAttend = Callable[[Tensor, Tensor, Tensor], Tensor]  # `Attend` of one layer


def norm(x: Tensor) -> Tensor:
    return F.rms_norm(x, (x.size(-1),), eps=NORM_EPSILON)


def rotate(x: Tensor, rope: Rope) -> Tensor:
    """Rotates each pair of channels (i, i + half) by its position's angle."""
    cos, sin = rope
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos + b * sin, b * cos - a * sin], dim=-1)


def dropout(x: Tensor, probability: float) -> Tensor:
    """Only where gradients are recorded: evaluation and inference use everything."""
    return F.dropout(x, probability) if probability > 0 and torch.is_grad_enabled() else x


class Linear(nn.Linear):
    """Without bias. The fp32 weight is cast to the activation's dtype."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype))


class Attention(nn.Module):
    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.config = config
        kv_dim = config.kv_heads * config.head_dim
        self.q = Linear(config.dim, config.dim)
        self.k = Linear(config.dim, kv_dim)
        self.v = Linear(config.dim, kv_dim)
        self.out = Linear(config.dim, config.dim)
        self.value_gate = (
            Linear(VALUE_GATE_CHANNELS, config.kv_heads) if config.has_value_embedding(layer) else None
        )
        self.head_gate = Linear(HEAD_GATE_CHANNELS, config.heads) if config.head_gate else None

    def forward(self, x: Tensor, rope: Rope, value_rows: Tensor | None, attend: LayerAttend) -> Tensor:
        """`value_rows` are the tokens' rows of this layer's value embedding, (..., K·D)."""
        config = self.config
        qkv, gate = self.project(x)
        heads = qkv.unflatten(-1, (-1, config.head_dim))  # (..., H + 2K, D)
        qk_heads = config.heads + config.kv_heads
        qk = norm(rotate(heads[..., :qk_heads, :], rope)) * config.qk_gain
        q, k, v = qk[..., : config.heads, :], qk[..., config.heads :, :], heads[..., qk_heads:, :]
        if value_rows is not None and gate is not None:
            v = v + (3 * torch.sigmoid(gate)).unsqueeze(-1) * value_rows.to(v.dtype).view(v.shape)
        y = attend(q, k, v)
        if self.head_gate is not None:  # begins as the identity: its weights are initialized to zero
            y = y * (2 * torch.sigmoid(self.head_gate(x[..., :HEAD_GATE_CHANNELS]))).unsqueeze(-1)
        return cast(Tensor, self.out(y.flatten(-2)))

    def project(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """Queries, keys and values, by one matmul instead of three; and the value gate before its sigmoid. The copy for
        inference has its own (infer/model.py)."""
        qkv = F.linear(x, torch.cat([self.q.weight, self.k.weight, self.v.weight]).to(x.dtype))
        return qkv, None if self.value_gate is None else self.value_gate(x[..., :VALUE_GATE_CHANNELS])


class MLP(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.up = Linear(config.dim, config.mlp_ratio * config.dim)
        self.down = Linear(config.mlp_ratio * config.dim, config.dim)

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.down(F.relu(self.up(x)).square()))


class Block(nn.Module):
    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.dropout = config.dropout
        self.attention = Attention(config, layer)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, rope: Rope, value_rows: Tensor | None, attend: LayerAttend) -> Tensor:
        x = x + dropout(self.attention(norm(x), rope, value_rows, attend), self.dropout)
        return x + dropout(self.mlp(norm(x)), self.dropout)


class GPT(nn.Module):
    """Build on the meta device, then `to_empty(device=...)` and `init_weights()`: no memory is used twice."""

    cos: Tensor
    sin: Tensor

    def __init__(
        self,
        config: ModelConfig,
        backends: tuple[Backend, ...] | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        self.config, self.dtype = config, dtype
        self.batch_attention = BatchAttention(config, backends)
        vocab, kv_dim = config.padded_vocab, config.kv_heads * config.head_dim
        self.embed = nn.Embedding(vocab, config.dim)
        self.value_embeds = nn.ModuleDict(
            {
                str(i): nn.Embedding(vocab, kv_dim)
                for i in range(config.depth)
                if config.has_value_embedding(i)
            }
        )
        self.blocks = nn.ModuleList(Block(config, i) for i in range(config.depth))
        self.head = Linear(config.dim, vocab)
        if config.residual_scalars:
            self.lambdas = nn.Parameter(torch.empty(config.depth))
            self.mus = nn.Parameter(torch.empty(config.depth))
        if config.smear:
            self.smear_gate = Linear(SMEAR_GATE_CHANNELS, 1)
            self.smear_scale = nn.Parameter(torch.empty(1))
        if config.backout:
            self.backout_scale = nn.Parameter(torch.empty(1))
        half = torch.empty(config.context, config.head_dim // 2)
        self.register_buffer("cos", half, persistent=False)
        self.register_buffer("sin", half.clone(), persistent=False)

    def trunk(self, tokens: Tensor, rope: Rope, smear: Smear, attend: Attend) -> Tensor:
        """The normalized residual stream after the last block, (..., D)."""
        config = self.config
        x = self.embedded(tokens)
        if config.smear:
            x = x + smear(x)
        x = dropout(x, config.dropout)
        x0, middle = x, x
        for i, block in enumerate(self.blocks):
            if config.residual_scalars:
                x = self.lambdas[i].to(x.dtype) * x + self.mus[i].to(x.dtype) * x0
            value_rows = self.value_embeds[str(i)](tokens) if config.has_value_embedding(i) else None
            x = block(x, rope, value_rows, functools.partial(attend, i))
            if i == config.backout_layer:
                middle = x
        if config.backout:
            x = x - self.backout_scale.to(x.dtype) * middle
        return norm(x)

    def embedded(self, tokens: Tensor) -> Tensor:
        return norm(self.embed(tokens).to(self.dtype))

    def smear_gate_value(self, x: Tensor) -> Tensor:
        """(..., 1): how much of the previous token's embedding is added to each embedding (..., D)."""
        return torch.sigmoid(self.smear_gate(x[..., :SMEAR_GATE_CHANNELS])) * self.smear_scale.to(x.dtype)

    def hidden(self, tokens: Tensor, docs: Tensor | None = None) -> Tensor:
        """The trunk over a batch of rows, (B, T) to (B, T, D). `docs` numbers the document of each token."""
        attend = functools.partial(self.batch_attention, docs=docs)
        smear = functools.partial(self.smear_in_rows, docs=docs)
        return self.trunk(tokens, self.rope(tokens, docs), smear, attend)

    def smear_in_rows(self, x: Tensor, docs: Tensor | None = None) -> Tensor:
        """`Smear` of rows (B, T, D): gate(x[:, t])·x[:, t - 1] at t, and 0 for the first token of a row or document.
        (Zeros are padded, since of two slices joined the compiler makes a kernel that reads everything three times.)"""
        gate = self.smear_gate_value(x[:, 1:])
        if docs is not None:
            gate = gate * (docs[:, 1:] == docs[:, :-1]).unsqueeze(-1)
        return F.pad(gate * x[:, :-1], (0, 0, 1, 0))

    def forward(
        self, tokens: Tensor, targets: Tensor, docs: Tensor | None = None, per_token: bool = False
    ) -> Tensor:
        """The loss, in nats, summed over all targets but -1 (or of each token, 0 where there is none)."""
        x = self.hidden(tokens, docs)
        softcap, vocab = self.config.softcap, self.config.vocab_size
        return chunked_loss(x, self.head.weight, targets, softcap, vocab, "none" if per_token else "sum")

    def logits(self, tokens: Tensor, docs: Tensor | None = None) -> Tensor:
        """fp32 logits of every position (B, T, vocabulary), without the padding of the vocabulary."""
        return self.logits_of(self.hidden(tokens, docs))

    def logits_of(self, x: Tensor) -> Tensor:
        """fp32 (or fp64) logits of the trunk's output."""
        z, cap = self.head(x)[..., : self.config.vocab_size], self.config.softcap
        z = z.to(torch.promote_types(z.dtype, torch.float32))
        return cap * torch.tanh(z / cap) if cap else z

    def rope(self, tokens: Tensor, docs: Tensor | None) -> Rope:
        """Rotary tables of a batch of rows: positions count from the start of the row, or of the document."""
        if docs is None:
            cos, sin = self.cos[: tokens.size(1), None], self.sin[: tokens.size(1), None]
        else:
            positions = positions_in_documents(docs)
            cos, sin = self.cos[positions].unsqueeze(2), self.sin[positions].unsqueeze(2)
        return cos.to(self.dtype), sin.to(self.dtype)

    @torch.no_grad()
    def init_weights(self) -> None:
        """Fresh weights from torch's generator (seed it first), and the rotary tables."""
        config = self.config
        # A uniform distribution of this half-width has standard deviation 1/√dim.
        bound = (3 / config.dim) ** 0.5
        nn.init.normal_(self.embed.weight, std=0.8)
        nn.init.normal_(self.head.weight, std=0.001)
        for embed in self.value_embeds.values():
            nn.init.uniform_(cast(nn.Embedding, embed).weight, -bound, bound)
        for block in self.layers():
            attention, mlp = block.attention, block.mlp
            for linear in (attention.q, attention.k, attention.v):
                nn.init.uniform_(linear.weight, -bound, bound)
            nn.init.uniform_(mlp.up.weight, -0.4 * bound, 0.4 * bound)
            nn.init.zeros_(attention.out.weight)
            nn.init.zeros_(mlp.down.weight)
            if attention.value_gate is not None:
                nn.init.uniform_(attention.value_gate.weight, 0, 0.02)
            if attention.head_gate is not None:
                nn.init.zeros_(attention.head_gate.weight)
        if config.residual_scalars:
            self.lambdas.copy_(torch.linspace(1.15, 1.05, config.depth))
            self.mus.copy_(torch.linspace(0.20, 0.05, config.depth))
        if config.smear:
            nn.init.uniform_(self.smear_gate.weight, 0, 0.02)
            nn.init.zeros_(self.smear_scale)
        if config.backout:
            nn.init.constant_(self.backout_scale, 0.2)
        self.init_buffers()

    @torch.no_grad()
    def init_buffers(self) -> None:
        """The rotary tables, in fp32. They are neither trained nor saved."""
        half = self.config.head_dim // 2
        device = self.cos.device
        frequency = self.config.rope_base ** -(torch.arange(half, device=device, dtype=torch.float32) / half)
        angle = torch.arange(self.config.context, device=device, dtype=torch.float32)[:, None] * frequency
        self.cos.copy_(angle.cos())
        self.sin.copy_(angle.sin())

    def layers(self) -> list[Block]:
        return cast(list[Block], list(self.blocks))


def positions_in_documents(docs: Tensor) -> Tensor:
    """The distance of each token from the start of its document; documents are runs of equal numbers."""
    at = torch.arange(docs.size(1), device=docs.device).expand_as(docs)
    first = torch.ones_like(docs, dtype=torch.bool)
    first[:, 1:] = docs[:, 1:] != docs[:, :-1]
    return at - torch.where(first, at, 0).cummax(dim=1).values


def build(
    config: ModelConfig,
    device: torch.device,
    dtype: torch.dtype,
    backends: tuple[Backend, ...] | None = None,
    seed: int = 0,
) -> GPT:
    """A fresh model on the device."""
    model = empty(config, device, dtype, backends)
    torch.manual_seed(seed)
    model.init_weights()
    model.batch_attention.prepare(config.context, device)
    return model


def empty(
    config: ModelConfig,
    device: torch.device,
    dtype: torch.dtype,
    backends: tuple[Backend, ...] | None = None,
) -> GPT:
    """A model on the device whose weights are yet to be initialized or loaded."""
    with torch.device("meta"):
        model = GPT(config, backends, dtype)
    return model.to_empty(device=device)
