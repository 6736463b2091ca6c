"""The model: a decoder-only transformer with what is known today to train small GPTs fastest.

    token ─ embedding ─ norm ─ smear ─┬─ block 0 ─ … ─ block n-1 ─ minus the middle ─ norm ─ head ─ softcap
                                      └── x0, mixed back in before every block
    block: x = λ·x + μ·x0;  x += attention(norm(x));  x += mlp(norm(x))

- Norms have no parameters. There are no biases. Head and embedding are separate matrices.
- Attention: rotary positions, then queries and keys are normed and scaled by 1.2; most layers see a short
  window. On every other layer a second embedding of the token is added to the values, through a gate.
- MLP: four times as wide, ReLU squared.
- What writes into the stream (attention's and the MLP's last matrix) starts at zero, so at first every
  block passes its input on and the model is an embedding and a head.
- Smear lets each position see a little of the token before it, ahead of all attention. Backout subtracts
  part of the stream's middle from its end: what only later layers needed to read need not be said.

Weights are fp32 masters; activations are in the dtype given to `GPT` and weights are cast where they are
used, or (`cast_once`, `fp8`) copied into fewer bits once after each change: whoever changes weights, and has
used up their gradients, calls `renew`. Eight bits are for training steps alone; what is evaluated is what will
be served. The model knows nothing of ranks, files or optimizers. Shapes: B batch, T time, D width, H heads.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask
from torch.utils.checkpoint import checkpoint

from nanorun.config import NORM_EPSILON, SMEAR_GATE_CHANNELS, VALUE_GATE_CHANNELS, Backend, ModelConfig
from nanorun.model.attention import attend, everywhere, spare_plans, window_blocks
from nanorun.model.kernels import embedding_grad, fp8, gemm, kernels_run_on, layers8, rope_norm
from nanorun.model.kernels.fp8 import Fp8Weight
from nanorun.model.kernels.stream import Mixing, Stream
from nanorun.model.linear import Linear, LowCopy
from nanorun.model.loss import can_fuse, chunked_loss, plain_loss


def norm(x: Tensor) -> Tensor:
    return F.rms_norm(x, (x.size(-1),), eps=NORM_EPSILON)


@dataclass(frozen=True)
class Means:
    """How a model computes on the device it is built for."""

    kernels: bool = False  # those of model/kernels/ run there
    eight_bits: bool = False  # so do fp8 matmuls, and it is to learn
    copied_as: torch.dtype | None = None  # where weights are cast once and not at each use
    in_place: bool = False  # gradients of embeddings are added up by our own kernel
    products: bool = False  # matrix products are those of products.py


class Table(nn.Embedding):
    """An embedding, fp32 as all weights, whose rows are handed out in another dtype."""

    sums: Tensor | None

    def __init__(self, rows: int, width: int, means: Means) -> None:
        super().__init__(rows, width)
        sums = torch.empty(rows, width) if means.in_place else None
        self.register_buffer("sums", sums, persistent=False)

    def rows(self, tokens: Tensor, dtype: torch.dtype) -> Tensor:
        if self.sums is not None and torch.is_grad_enabled():
            return embedding_grad.embedding_lookup(self.weight, self.sums, tokens, dtype)
        return self(tokens).to(dtype)

    def added(self, v: Tensor, gate: Tensor, tokens: Tensor) -> Tensor:
        """v (B, T, K, D), to which the tokens' rows are added, weighted by gate (B, T, K)."""
        if self.sums is not None and torch.is_grad_enabled():
            return embedding_grad.add_gated_embedding(v, gate, self.weight, self.sums, tokens)
        return embedding_grad.reference.add_gated_rows(v, gate, self(tokens))

    def renew(self) -> None:
        if self.sums is not None:
            self.weight.grad = self.sums.zero_()


Values = tuple[Table, Tensor]  # a layer's second embedding, and the tokens to look up in it


class Attention(nn.Module):
    def __init__(self, config: ModelConfig, layer: int, backend: Backend, means: Means) -> None:
        super().__init__()
        self.config, self.backend = config, backend
        self.fused_rope = turns_in_one(config, means)
        self.window = config.window(layer)
        self.blocks: BlockMask | None = None
        kv_dim = config.kv_heads * config.head_dim
        self.q = Linear(config.dim, config.dim)
        self.k = Linear(config.dim, kv_dim)
        self.v = Linear(config.dim, kv_dim)
        self.out = Linear(config.dim, config.dim, means.copied_as)
        self.value_gate = (
            Linear(VALUE_GATE_CHANNELS, config.kv_heads) if config.has_value_embedding(layer) else None
        )
        in_eight = means.eight_bits and config.fp8 not in ("none", "mlp")
        stacked = (config.dim + 2 * kv_dim, config.dim)
        pingpong = config.pingpong and means.products
        self.qkv8 = Fp8Weight(*stacked, norms=False, pingpong=pingpong) if in_eight else None
        copied_as = means.copied_as if config.fused_qkv and not in_eight else None
        self.qkv_low = LowCopy(*stacked, copied_as) if copied_as else None
        self.adds = adds_in_products(config, means)

    def forward(
        self, stream: Stream, values: Values | None, rope: tuple[Tensor, Tensor], docs: Tensor | None
    ) -> Stream:
        batch, time, _ = stream.x.shape
        config = self.config
        if self.qkv8 is not None and torch.is_grad_enabled():
            x, q, k, v, gated, values = self._eight_bit_heads(stream, rope, values)
        else:
            x = stream.settled()
            n = norm(x)
            mixed, gated = self._mixed(n), n[..., :VALUE_GATE_CHANNELS]
            q, k, v = self._fused_heads(mixed, rope) if self.fused_rope else self._heads(mixed, rope)
        if values is not None and self.value_gate is not None:
            table, tokens = values
            v = table.added(v, 3 * torch.sigmoid(self.value_gate(gated)), tokens)
        mixed = attend(q, k, v, min(self.window, time), self.backend, docs, self.blocks)
        mixed = mixed.reshape(batch, time, config.dim)
        if self.adds and torch.is_grad_enabled():
            flat = gemm.linear_residual(mixed.flatten(0, 1), self.out.weight, x.flatten(0, 1))
            return Stream(x, flat.view_as(x), done=True)
        return Stream(x, self.out(mixed))

    def renew(self) -> None:
        self.out.renew()
        if self.qkv8 is not None:
            self.qkv8.requantize(*self._qkv_weights())
        if self.qkv_low is not None:
            self.qkv_low.renew(*self._qkv_weights())

    def _mixed(self, x: Tensor) -> Tensor | tuple[Tensor, ...]:
        """Queries, keys and values, side by side or apart."""
        if self.qkv_low is not None:
            return cast(Tensor, self.qkv_low(x, *self._qkv_weights()))
        if self.config.fused_qkv:
            return F.linear(x, torch.cat(self._qkv_weights()).to(x.dtype))
        return self.q(x), self.k(x), self.v(x)

    def _heads(
        self, mixed: Tensor | tuple[Tensor, ...], rope: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries and keys, turned to their positions and normed, and values: (B, T, heads, head_dim)."""
        if isinstance(mixed, Tensor):
            mixed = mixed.split([part.out_features for part in (self.q, self.k, self.v)], dim=-1)
        q, k, v = (each.unflatten(-1, (-1, self.config.head_dim)) for each in mixed)
        return norm(rotate(q, rope)) * self.config.qk_gain, norm(rotate(k, rope)) * self.config.qk_gain, v

    def _fused_heads(
        self, mixed: Tensor | tuple[Tensor, ...], rope: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        assert isinstance(mixed, Tensor)
        config, (cos, sin) = self.config, (table.squeeze(-2) for table in rope)
        return rope_norm.rope_norm(mixed, cos, sin, config.heads, config.kv_heads, config.qk_gain)

    def _eight_bit_heads(
        self, stream: Stream, rope: tuple[Tensor, Tensor], values: Values | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Values | None]:
        """The first is the stream, settled; last are the normed channels that the gate sees, and `values`, unless they
        are added already."""
        assert self.qkv8 is not None
        config, weights = self.config, self._qkv_weights()
        kept = VALUE_GATE_CHANNELS if self.value_gate is not None else 0
        if self.fused_rope:
            stream = stream if config.fused_stream else Stream(stream.settled())
            cos, sin = (table.squeeze(-2) for table in rope)
            heads = (config.heads, config.kv_heads, config.qk_gain)
            gated = self._gated(values)
            found = layers8.norm_heads(stream, self.qkv8, weights, kept, cos, sin, *heads, gated)
            return *found, None if gated is not None else values
        x = stream.settled()
        mixed, first = layers8.norm_linear(x, self.qkv8, weights, kept)
        return x, *self._heads(mixed, rope), first, values

    def _gated(self, values: Values | None) -> layers8.Gated | None:
        """What a kernel needs to add the values, where their gradients are added in place."""
        if values is None or self.value_gate is None or values[0].sums is None:
            return None
        table, tokens = values
        assert table.sums is not None
        return layers8.Gated(self.value_gate.weight, table.weight, table.sums, tokens)

    def _qkv_weights(self) -> list[Tensor]:
        return [self.q.weight, self.k.weight, self.v.weight]


class MLP(nn.Module):
    def __init__(self, config: ModelConfig, means: Means) -> None:
        super().__init__()
        self.fused_stream = config.fused_stream
        self.fused_relu2 = config.fused_relu2 and means.products
        hidden = config.mlp_ratio * config.dim
        in_eight = means.eight_bits and config.fp8 != "none"
        pingpong = config.pingpong and means.products
        copied_as = None if in_eight else means.copied_as
        self.up = Linear(config.dim, hidden, copied_as)
        self.down = Linear(hidden, config.dim, copied_as)
        self.up8 = Fp8Weight(hidden, config.dim, pingpong=pingpong) if in_eight else None
        self.down8 = Fp8Weight(config.dim, hidden) if in_eight else None

    def forward(self, stream: Stream, after: Mixing | None = None) -> tuple[Tensor, Tensor]:
        if self.up8 is not None and self.down8 is not None and torch.is_grad_enabled():
            stream = stream if self.fused_stream else Stream(stream.settled())
            weights = self.up.weight, self.down.weight
            return layers8.norm_mlp(stream, self.up8, self.down8, *weights, self.fused_relu2, after)
        x = stream.settled()
        return x, self.down(F.relu(self.up(norm(x))).square())

    def renew(self) -> None:
        self.up.renew()
        self.down.renew()
        if self.up8 is not None and self.down8 is not None:
            self.up8.requantize(self.up.weight)
            self.down8.requantize(self.down.weight)


def adds_in_products(config: ModelConfig, means: Means) -> bool:
    """Whether what is added to the stream is added by the product that makes it."""
    in_layers = means.eight_bits and config.fp8 not in ("none", "mlp")
    wanted = config.fused_stream and config.fused_residual
    return in_layers and wanted and means.products and turns_in_one(config, means)


def turns_in_one(config: ModelConfig, means: Means) -> bool:
    """Whether queries and keys are turned and normed by one kernel."""
    possible = means.kernels and rope_norm.is_supported_head_dim(config.head_dim)
    return possible and config.fused_rope and config.fused_qkv


class Block(nn.Module):
    """Attention and MLP norm their input themselves, and add up what is pending in it: each returns the stream that
    it saw, and what it adds to it. `after`: it is added already, as stream.py says."""

    def __init__(self, config: ModelConfig, layer: int, backend: Backend, means: Means) -> None:
        super().__init__()
        self.attention = Attention(config, layer, backend, means)
        self.mlp = MLP(config, means)

    def forward(
        self,
        stream: Stream,
        values: Values | None,
        rope: tuple[Tensor, Tensor],
        docs: Tensor | None,
        after: Mixing | None = None,
    ) -> tuple[Tensor, Tensor]:
        return cast(tuple[Tensor, Tensor], self.mlp(self.attention(stream, values, rope, docs), after))


class GPT(nn.Module):
    """Build on the meta device, then `to_empty(device=...)` and `init_weights()`: no memory is used twice.

    `means` says what the device can do; the configuration, what of it is wanted.
    """

    cos: Tensor
    sin: Tensor

    def __init__(
        self,
        config: ModelConfig,
        backends: tuple[Backend, ...] | None = None,
        dtype: torch.dtype = torch.float32,
        loss: Literal["chunked", "plain"] = "chunked",
        means: Means | None = None,
    ) -> None:
        super().__init__()
        self.config, self.dtype = config, dtype
        means = means or Means()
        fused_loss = means.kernels and loss == "chunked" and config.fused_loss and can_fuse(config.softcap)
        in_eight = means.eight_bits and config.fp8 in ("head", "all") and fused_loss
        head, pingpong = (config.padded_vocab, config.dim), config.pingpong and means.products
        self.head8 = Fp8Weight(*head, norms=False, pingpong=pingpong) if in_eight else None
        self._loss: Callable[..., Tensor] = chunked_loss if loss == "chunked" else plain_loss
        if fused_loss:
            exact = config.fp8 != "all"
            self._loss = functools.partial(chunked_loss, fused=True, copies=self.head8, exact_logits=exact)
        backends = backends or everywhere("sdpa", config)
        vocab, kv_dim = config.padded_vocab, config.kv_heads * config.head_dim
        self.embed = Table(vocab, config.dim, means)
        self.value_embeds = nn.ModuleDict(
            {
                str(i): Table(vocab, kv_dim, means)
                for i in range(config.depth)
                if config.has_value_embedding(i)
            }
        )
        self.blocks = nn.ModuleList(Block(config, i, backends[i], means) for i in range(config.depth))
        self.head = Linear(config.dim, vocab)
        if config.residual_scalars:
            self.lambdas = nn.Parameter(torch.empty(config.depth))
            self.mus = nn.Parameter(torch.empty(config.depth))
        if config.smear:
            self.smear_gate = Linear(SMEAR_GATE_CHANNELS, 1)
            self.smear_scale = nn.Parameter(torch.empty(1))
        if config.backout:
            self.backout_scale = nn.Parameter(torch.empty(1))
        self.adds, self.products = adds_in_products(config, means), means.products
        half = torch.empty(config.context, config.head_dim // 2)
        self.register_buffer("cos", half, persistent=False)
        self.register_buffer("sin", half.clone(), persistent=False)

    @torch.no_grad()
    def init_weights(self) -> None:
        """Fresh weights from torch's generator (seed it first), and the tables of rotary positions."""
        config = self.config
        spread = (3 / config.dim) ** 0.5  # a uniform of this half-width has standard deviation 1/√dim
        nn.init.normal_(self.embed.weight, std=0.8)
        nn.init.normal_(self.head.weight, std=0.001)
        for embed in self.value_embeds.values():
            nn.init.uniform_(cast(nn.Embedding, embed).weight, -spread, spread)
        for block in self.layers():
            attention, mlp = block.attention, block.mlp
            for linear in (attention.q, attention.k, attention.v):
                nn.init.uniform_(linear.weight, -spread, spread)
            nn.init.uniform_(mlp.up.weight, -0.4 * spread, 0.4 * spread)
            nn.init.zeros_(attention.out.weight)
            nn.init.zeros_(mlp.down.weight)
            if attention.value_gate is not None:
                nn.init.uniform_(attention.value_gate.weight, 0, 0.02)
        if config.residual_scalars:
            self.lambdas.copy_(torch.linspace(1.15, 1.05, config.depth))
            self.mus.copy_(torch.linspace(0.20, 0.05, config.depth))
        if config.smear:
            nn.init.uniform_(self.smear_gate.weight, 0, 0.02)
            nn.init.zeros_(self.smear_scale)
        if config.backout:
            nn.init.constant_(self.backout_scale, 0.2)
        self.init_buffers()
        self.renew()

    @torch.no_grad()
    def init_buffers(self) -> None:
        """What is not trained and not saved: the rotary tables, in fp32."""
        half = self.config.head_dim // 2
        device = self.cos.device
        frequency = self.config.rope_base ** -(torch.arange(half, device=device, dtype=torch.float32) / half)
        angle = torch.arange(self.config.context, device=device, dtype=torch.float32)[:, None] * frequency
        self.cos.copy_(angle.cos())
        self.sin.copy_(angle.sin())

    def renew(self) -> None:
        """After each update: copies of weights in fewer bits, made anew; gradients kept in place, zeros again."""
        for table in (self.embed, *self.value_embeds.values()):
            cast(Table, table).renew()
        for block in self.layers():
            block.attention.renew()
            block.mlp.renew()
        if self.head8 is not None:
            self.head8.requantize(self.head.weight)

    def layers(self) -> list[Block]:
        return cast(list[Block], list(self.blocks))

    def use_backend(self, backend: Backend) -> None:
        """Another way to compute attention, for all layers, from now on."""
        for block in self.layers():
            block.attention.backend = backend

    def prepare(self, context: int) -> None:
        """Makes what attention needs for rows of this length, ahead of compiled code that only reads it."""
        made: dict[int, BlockMask] = {}
        for block in self.layers():
            attention = block.attention
            if attention.backend == "flex" and not self.config.document_mask:
                window = min(attention.window, context)
                if window not in made:
                    made[window] = window_blocks(context, context, window, self.embed.weight.device)
                attention.blocks = made[window]

    def hidden(self, tokens: Tensor, docs: Tensor | None = None) -> Tensor:
        """The normed stream after the last block, (B, T, D). `docs` numbers the document of each token."""
        config = self.config
        if docs is None:
            cos, sin = self.cos[: tokens.size(1), None], self.sin[: tokens.size(1), None]
        else:
            at = positions_in_documents(docs)
            cos, sin = self.cos[at].unsqueeze(2), self.sin[at].unsqueeze(2)
        rope = (cos.to(self.dtype), sin.to(self.dtype))
        x = norm(self.embed.rows(tokens, self.dtype))
        if config.smear:
            x = self._smeared(x, docs)
        start, middle = x, x
        y: Tensor | None = None  # still to be added to x
        mixings, after = self._mixings(start), None
        for i, block in enumerate(self.layers()):
            stream = Stream(x, y, done=after is not None)
            if config.residual_scalars:
                stream = stream._replace(start=start, scale=self.lambdas[i], share=self.mus[i])
            after = mixings.get(i)
            table = cast(Table, self.value_embeds[str(i)]) if config.has_value_embedding(i) else None
            values = (table, tokens) if table is not None else None
            if config.recompute and torch.is_grad_enabled():
                x, y = checkpoint(block, stream, values, rope, docs, after, use_reentrant=False)
            else:
                x, y = block(stream, values, rope, docs, after)
            if i == config.depth // 2:
                x, y = x + y, None
                middle = x
        x = Stream(x, y).settled()
        if config.backout:
            x = x - self.backout_scale.to(x.dtype) * middle
        return norm(x)

    def _mixings(self, start: Tensor) -> dict[int, Mixing]:
        """By layer: what the next one does to the stream, where this one's last product can do it already."""
        if not self.adds or not torch.is_grad_enabled():
            return {}
        config = self.config
        layers = [i for i in range(config.depth - 1) if i != config.depth // 2]  # whose y is wanted as it is
        if not config.residual_scalars:
            return dict.fromkeys(layers, Mixing())
        lambdas, mus = (each.detach().to(self.dtype).float() for each in (self.lambdas, self.mus))
        return {i: Mixing(start.detach(), lambdas[i + 1], mus[i + 1]) for i in layers}

    def forward(
        self, tokens: Tensor, targets: Tensor, docs: Tensor | None = None, per_token: bool = False
    ) -> Tensor:
        """The loss, in nats, summed over all targets but -1 (or of each token, 0 where there is none)."""
        x = self.hidden(tokens, docs)
        softcap, vocab = self.config.softcap, self.config.vocab_size
        return self._loss(x, self.head.weight, targets, softcap, vocab, "none" if per_token else "sum")

    def logits(self, tokens: Tensor, docs: Tensor | None = None) -> Tensor:
        """fp32 logits of every position (B, T, vocabulary), padding left out."""
        z = self.head(self.hidden(tokens, docs))[..., : self.config.vocab_size].float()
        cap = self.config.softcap
        return cap * torch.tanh(z / cap) if cap else z

    def _smeared(self, x: Tensor, docs: Tensor | None) -> Tensor:
        """Each token's row plus a gated share of the one before it, if its document has one. By adding zeros to the
        first: of two slices put together a compiler makes a kernel that reads everything three times."""
        gate = torch.sigmoid(self.smear_gate(x[:, 1:, :SMEAR_GATE_CHANNELS])) * self.smear_scale.to(x.dtype)
        if docs is not None:
            gate = gate * (docs[:, 1:] == docs[:, :-1]).unsqueeze(-1)
        return x + F.pad(gate * x[:, :-1], (0, 0, 1, 0))


def rotate(x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
    """Each pair of channels (i, i + half) turned by its position's angle."""
    cos, sin = rope
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos + b * sin, b * cos - a * sin], dim=-1)


def positions_in_documents(docs: Tensor) -> Tensor:
    """How far each token is behind the start of its document; documents are runs of equal numbers."""
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
    """A fresh model on the device, to be trained."""
    model = empty(config, device, dtype, backends, learns=True)
    torch.manual_seed(seed)
    model.init_weights()
    model.prepare(config.context)
    return model


def empty(
    config: ModelConfig,
    device: torch.device,
    dtype: torch.dtype,
    backends: tuple[Backend, ...] | None = None,
    learns: bool = False,
) -> GPT:
    """A model on the device whose weights are yet to be made or loaded."""
    spare_plans()
    eight_bits = learns and fp8.is_supported(device) and dtype == torch.bfloat16
    config = replace(config, fp8=config.eight_bits(eight_bits and fp8.on_by_default(device)))
    means = Means(
        kernels_run_on(device),
        eight_bits,
        dtype if learns and config.cast_once and dtype != torch.float32 else None,
        learns and config.sparse_tables and kernels_run_on(device),
        eight_bits
        and config.fp8 != "none"
        and (config.pingpong or config.fused_relu2 or config.fused_residual)
        and gemm.is_supported(device),
    )
    with torch.device("meta"):
        model = GPT(config, backends, dtype, means=means)
    return model.to_empty(device=device)
