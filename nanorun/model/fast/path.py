"""The fast training path: the same parameters and the same function as `GPT.forward`, computed with FP8 matmuls and
fused kernels, as a `Recipe` says. Straight-line code in the order of the model.

A `FastPath` owns what is derived from the weights: FP8 copies of the matrices, and buffers in which gradients of the
embedding tables accumulate. After each change of the weights, and once gradients are used up, call `refresh`.

It trains only. Evaluation runs the plain model, in the precision in which the model will be served.

`unsupported` names the fields of a configuration that are not implemented here; such a model trains by the plain
path. A new field of ModelConfig is unsupported, unless at its default, until it is listed in `SUPPORTED_FIELDS`.
"""

import functools
from dataclasses import fields
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from nanorun.config import VALUE_GATE_CHANNELS, ModelConfig
from nanorun.model.fast import layers
from nanorun.model.fast.layers import NextMix, ResidualStream
from nanorun.model.fast.loss import can_fuse, fp8_loss, fused_chunk_loss
from nanorun.model.fast.recipe import Recipe
from nanorun.model.gpt import GPT, norm, previous_in_rows
from nanorun.model.kernels import embedding_grad, fp8, gemm, rope_norm
from nanorun.model.kernels.embedding_grad.reference import add_gated_rows
from nanorun.model.kernels.rope_norm.reference import rope_norm as rope_norm_reference
from nanorun.model.loss import chunked_loss

SUPPORTED_FIELDS = frozenset(
    "depth dim heads kv_heads vocab_size context windows short_window mlp_ratio rope_base qk_gain softcap "
    "value_embeddings residual_scalars smear backout document_mask".split()
)


def unsupported(config: ModelConfig, recipe: Recipe) -> list[str]:
    """Fields, with their values, that this path does not implement under this recipe."""
    names = [
        field.name
        for field in fields(ModelConfig)
        if field.name not in SUPPORTED_FIELDS and getattr(config, field.name) != field.default
    ]
    if recipe.fused_rope and not rope_norm.is_supported_head_dim(config.head_dim):
        names.append("heads")  # the head dimension must be a power of two
    if recipe.fused_loss and not can_fuse(config.softcap):
        names.append("softcap")
    if recipe.fp8 != "none" and not fp8.is_aligned(config.dim):
        names.append("dim")
    return [f"{name}={getattr(config, name)}" for name in names]


class FastPath(nn.Module):
    def __init__(self, model: GPT, recipe: Recipe) -> None:
        super().__init__()
        if names := unsupported(model.config, recipe):
            raise ValueError(f"the fast path does not support {', '.join(names)}")
        self.model, self.recipe = model, recipe
        config, kv_dim = model.config, model.config.kv_heads * model.config.head_dim
        hidden, pingpong = config.mlp_ratio * config.dim, recipe.pingpong

        def per_layer(
            outputs: int, inputs: int, *, norms: bool = True, pingpong: bool = pingpong
        ) -> nn.ModuleList:
            return nn.ModuleList(
                fp8.Fp8Weight(outputs, inputs, norms=norms, pingpong=pingpong) for _ in range(config.depth)
            )

        self.qkv8 = per_layer(config.dim + 2 * kv_dim, config.dim, norms=False) if recipe.fp8_layers else None
        self.up8 = per_layer(hidden, config.dim) if recipe.fp8_mlp else None
        self.down8 = per_layer(config.dim, hidden, pingpong=False) if recipe.fp8_mlp else None
        self.head8 = (
            fp8.Fp8Weight(config.padded_vocab, config.dim, norms=False, pingpong=pingpong)
            if recipe.fp8_head
            else None
        )
        for name, table in self._tables().items() if recipe.sparse_tables else ():
            self.register_buffer(f"{name}_grad", torch.empty_like(table.weight), persistent=False)
        self.to(model.embed.weight.device)
        self.refresh()

    def forward(self, tokens: Tensor, targets: Tensor, docs: Tensor | None = None) -> Tensor:
        """`GPT.forward`: the loss, in nats, summed over all targets but -1."""
        model, config = self.model, self.model.config
        cos, sin = (table.squeeze(-2) for table in model.rope(tokens, docs))
        x = norm(self._lookup("embed", tokens))
        if config.smear:
            x = x + previous_in_rows(x, model.smear_share, docs)
        x0, middle, stream = x, x, ResidualStream(x)
        for i in range(config.depth):
            if config.residual_scalars:
                stream = stream._replace(x0=x0, lambda_=model.lambdas[i], mu=model.mus[i])
            inputs = (i, stream, tokens, cos, sin, docs, self._next_mix(i, x0))
            if self.recipe.recompute:
                stream = checkpoint(self.block, *inputs, use_reentrant=False)
            else:
                stream = self.block(*inputs)
            if i == config.depth // 2:
                middle = stream.materialize()
                stream = ResidualStream(middle)
        x = stream.materialize()
        if config.backout:
            x = x - model.backout_scale.to(x.dtype) * middle
        return self._loss(norm(x), targets)

    def block(
        self,
        i: int,
        stream: ResidualStream,
        tokens: Tensor,
        cos: Tensor,
        sin: Tensor,
        docs: Tensor | None,
        next_mix: NextMix | None,
    ) -> ResidualStream:
        """Attention, then the MLP: each norms the stream, and returns it with what it adds."""
        config, recipe, block = self.model.config, self.recipe, self.model.layers()[i]
        attention, mlp = block.attention, block.mlp
        qkv_weights = [attention.q.weight, attention.k.weight, attention.v.weight]
        heads = (config.heads, config.kv_heads, config.qk_gain)
        gate = attention.value_gate

        if self.qkv8 is not None:
            values = self._gated_values(i, tokens)
            channels = VALUE_GATE_CHANNELS if gate is not None else 0
            x, q, k, v, gate_input = layers.norm_qkv_rope(
                self._prepared(stream),
                self._fp8(self.qkv8, i),
                qkv_weights,
                channels,
                cos,
                sin,
                *heads,
                values,
            )
        else:
            values, x = None, stream.materialize()
            n = norm(x)
            gate_input = n[..., :VALUE_GATE_CHANNELS]
            qkv = F.linear(n, torch.cat(qkv_weights).to(n.dtype))
            rotate = rope_norm.rope_norm if recipe.fused_rope else rope_norm_reference
            q, k, v = rotate(qkv, cos, sin, *heads)
        if gate is not None and values is None:
            v = self._add_values(i, v, 3 * torch.sigmoid(gate(gate_input)), tokens)
        y = self.model.batch_attention(i, q, k, v, docs).flatten(-2)
        if recipe.fused_residual:
            total = gemm.linear_residual(y.flatten(0, 1), attention.out.weight, x.flatten(0, 1)).view_as(x)
            stream = ResidualStream(x, total, value=total.detach())
        else:
            stream = ResidualStream(x, attention.out(y))

        if self.up8 is not None and self.down8 is not None:
            copies = self._fp8(self.up8, i), self._fp8(self.down8, i)
            weights = mlp.up.weight, mlp.down.weight
            return layers.norm_mlp(self._prepared(stream), *copies, *weights, recipe.fused_relu2, next_mix)
        x = stream.materialize()
        return ResidualStream(x, mlp(norm(x)))

    @torch.no_grad()
    def refresh(self) -> None:
        """Quantizes the weights anew, and zeroes the gradients that accumulate in place."""
        for name, table in self._tables().items() if self.recipe.sparse_tables else ():
            table.weight.grad = self._grad(name).zero_()
        for i, block in enumerate(self.model.layers()):
            attention, mlp = block.attention, block.mlp
            if self.qkv8 is not None:
                self._fp8(self.qkv8, i).requantize(attention.q.weight, attention.k.weight, attention.v.weight)
            if self.up8 is not None and self.down8 is not None:
                self._fp8(self.up8, i).requantize(mlp.up.weight)
                self._fp8(self.down8, i).requantize(mlp.down.weight)
        if self.head8 is not None:
            self.head8.requantize(self.model.head.weight)

    def _prepared(self, stream: ResidualStream) -> ResidualStream:
        return stream if self.recipe.fused_add_norm else ResidualStream(stream.materialize())

    def _next_mix(self, i: int, x0: Tensor) -> NextMix | None:
        """What the epilogue of block i's down projection applies for block i + 1; None: the sum is not computed
        there. At mid-depth and at the end x + delta itself is needed."""
        config = self.model.config
        if not self.recipe.fused_residual or i in (config.depth // 2, config.depth - 1):
            return None
        if not config.residual_scalars:
            return NextMix()
        lambdas, mus = (p.detach().to(self.model.dtype).float() for p in (self.model.lambdas, self.model.mus))
        return NextMix(x0.detach(), lambdas[i + 1], mus[i + 1])

    def _loss(self, x: Tensor, targets: Tensor) -> Tensor:
        config, weight = self.model.config, self.model.head.weight
        if self.head8 is not None:
            exact = self.recipe.fp8 != "all"
            return fp8_loss(x, weight, targets, self.head8, config.softcap, config.vocab_size, exact)
        if self.recipe.fused_loss:
            return chunked_loss(
                x, weight, targets, config.softcap, config.vocab_size, chunk_loss=fused_chunk_loss
            )
        return chunked_loss(x, weight, targets, config.softcap, config.vocab_size)

    def _tables(self) -> dict[str, nn.Embedding]:
        values = {f"values{i}": cast(nn.Embedding, table) for i, table in self.model.value_embeds.items()}
        return {"embed": self.model.embed, **values}

    def _grad(self, name: str) -> Tensor:
        """The buffer that gradients of a table accumulate in."""
        return cast(Tensor, getattr(self, f"{name}_grad"))

    def _lookup(self, name: str, tokens: Tensor) -> Tensor:
        table = self._tables()[name]
        if not self.recipe.sparse_tables:
            return cast(Tensor, table(tokens).to(self.model.dtype))
        return embedding_grad.embedding_lookup(table.weight, self._grad(name), tokens, self.model.dtype)

    def _add_values(self, i: int, v: Tensor, gate: Tensor, tokens: Tensor) -> Tensor:
        """v (B, T, K, D) plus the tokens' rows of layer i's value embedding, weighted by gate (B, T, K)."""
        name = f"values{i}"
        table = self._tables()[name]
        if not self.recipe.sparse_tables:
            return add_gated_rows(v, gate, table(tokens))
        return embedding_grad.add_gated_embedding(v, gate, table.weight, self._grad(name), tokens)

    def _gated_values(self, i: int, tokens: Tensor) -> layers.GatedValues | None:
        """The value embedding for the kernel that adds it, where its gradients accumulate in place."""
        gate, name = self.model.layers()[i].attention.value_gate, f"values{i}"
        if gate is None or not self.recipe.sparse_tables:
            return None
        return layers.GatedValues(gate.weight, self._tables()[name].weight, self._grad(name), tokens)

    @staticmethod
    def _fp8(copies: nn.ModuleList, i: int) -> fp8.Fp8Weight:
        return cast(fp8.Fp8Weight, copies[i])


def recompute_blocks(model: GPT) -> None:
    """Activation checkpointing for the plain model: each block keeps its input and recomputes the rest."""
    for block in model.layers():
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)  # type: ignore[method-assign]
