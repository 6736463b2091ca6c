"""The fast training path: the same parameters and the same function as `GPT.forward`, computed with FP8 matmuls and
fused kernels, as a `Recipe` says. Straight-line code in the order of the model: `forward` from tokens to the loss,
`block` for one layer, with the FP8 half-blocks of half_blocks.py.

A `FastPath` owns what is derived from the weights: FP8 copies of the matrices, and buffers in which gradients of the
embedding tables accumulate. After each change of the weights, and once gradients are used up, call `refresh`.

It trains only. Evaluation runs the plain model, in the precision in which the model will be served.

`unsupported` names the fields of a configuration that are not implemented here; such a model trains by the plain
path. A new field of ModelConfig is unsupported, unless at its default, until it is listed in `SUPPORTED_FIELDS`.
"""

import functools
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from nanorun.config import VALUE_GATE_CHANNELS, ModelConfig
from nanorun.model.fast.half_blocks import Fp8Weight, NextMix, ResidualStream, norm_mlp, norm_qkv_rope
from nanorun.model.fast.loss import can_fuse, fp8_loss_and_gradients, fused_chunk_loss
from nanorun.model.fast.recipe import Recipe
from nanorun.model.gpt import GPT, norm
from nanorun.model.kernels import embedding_grad, fp8, gemm, rope_norm
from nanorun.model.kernels.embedding_grad.reference import add_gated_rows
from nanorun.model.kernels.rope_norm.reference import rope_norm as rope_norm_reference
from nanorun.model.loss import attach_gradients, chunk_loss, chunked_loss

SUPPORTED_FIELDS = frozenset(
    "depth dim heads kv_heads vocab_size context windows short_window mlp_ratio rope_base qk_gain softcap "
    "value_embeddings residual_scalars smear backout document_mask".split()
)


def unsupported(config: ModelConfig, recipe: Recipe) -> list[str]:
    """Fields, with their values, that this path does not implement under this recipe."""
    names = config.fields_beyond(SUPPORTED_FIELDS)
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

        def per_layer(outputs: int, inputs: int, with_max_norms: bool = True) -> nn.ModuleList:
            sizes = (outputs, inputs, with_max_norms, pingpong)
            return nn.ModuleList(Fp8Weight(*sizes) for _ in range(config.depth))

        self.qkv8 = per_layer(config.dim + 2 * kv_dim, config.dim, False) if recipe.fp8_layers else None
        self.up8 = per_layer(hidden, config.dim) if recipe.fp8_mlp else None
        self.down8 = per_layer(config.dim, hidden) if recipe.fp8_mlp else None
        self.head8 = Fp8Weight(config.padded_vocab, config.dim, False, pingpong) if recipe.fp8_head else None
        for name, table in self._tables().items() if recipe.inplace_embedding_grads else ():
            self.register_buffer(f"{name}_grad", torch.empty_like(table.weight), persistent=False)
        self.to(model.embed.weight.device)
        self.refresh()

    def forward(self, tokens: Tensor, targets: Tensor, docs: Tensor | None = None) -> Tensor:
        """`GPT.forward`: the loss, in nats, summed over all targets but -1."""
        model, config, recipe = self.model, self.model.config, self.recipe
        cos, sin = (table.squeeze(-2) for table in model.rope(tokens, docs))
        if recipe.inplace_embedding_grads:
            table, grad = model.embed.weight, self._grad("embed")
            # table[tokens]; the backward pass adds the rows' gradients to `grad`
            rows = embedding_grad.embedding_lookup(table, grad, tokens, model.dtype)
        else:
            rows = model.embed(tokens).to(model.dtype)
        x = norm(rows)
        if config.smear:
            x = x + model.smear_in_rows(x, docs)
        # (B·T, D) from here on, but in attention. Two views, since Dynamo rejects functions that get a tensor twice.
        x0, stream = x.flatten(0, 1), ResidualStream(x.flatten(0, 1))
        middle = x0
        if config.residual_scalars:
            lambdas, mus = (p.detach().to(model.dtype).float() for p in (model.lambdas, model.mus))
        for i in range(config.depth):
            if config.residual_scalars:
                stream = stream._replace(x0=x0, lambda_=model.lambdas[i], mu=model.mus[i])
            # What the epilogue of this block's down projection computes for the next block. The middle block's output
            # is needed as it is, for the backout, and the last block has no next one.
            next_mix = None
            if recipe.fused_residual and i not in (config.backout_layer, config.depth - 1):
                next_mix = (
                    NextMix(x0.detach(), lambdas[i + 1], mus[i + 1]) if config.residual_scalars else NextMix()
                )
            inputs = (i, stream, tokens, cos, sin, docs, next_mix)
            if recipe.recompute:
                stream = checkpoint(self.block, *inputs, use_reentrant=False)
            else:
                stream = self.block(*inputs)
            if i == config.backout_layer:
                middle = stream.materialize()
                stream = ResidualStream(middle)
        x = stream.materialize()
        if config.backout:
            x = x - model.backout_scale.to(x.dtype) * middle
        x, targets, head, head8 = norm(x), targets.flatten(), model.head.weight, self.head8
        softcap, vocab = config.softcap, config.vocab_size
        if head8 is None:
            fused = fused_chunk_loss if recipe.fused_loss else chunk_loss
            return chunked_loss(x, head, targets, softcap, vocab, chunk_loss=fused)
        with torch.no_grad():  # the gradients are computed with the loss
            copies = head8.data, head8.data_t, head8.scale
            loss, dx, dhead = fp8_loss_and_gradients(
                x, head, targets, *copies, softcap, vocab, recipe.fp8 != "all", head8.pingpong
            )
        return attach_gradients(loss, x, head, dx, dhead)  # loss, whose backward pass returns dx and dhead

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
        """Attention, then the MLP: each normalizes the stream, and returns it with what it adds, added or not."""
        model, config, recipe = self.model, self.model.config, self.recipe
        attention, mlp = model.layers()[i].attention, model.layers()[i].mlp
        weights = [attention.q.weight, attention.k.weight, attention.v.weight]
        heads = (config.heads, config.kv_heads, config.qk_gain)
        gate, value_args = attention.value_gate, None

        if self.qkv8 is None or not recipe.fused_add_norm:
            stream = ResidualStream(stream.materialize())
        x = stream.x
        if self.qkv8 is not None:
            if gate is not None and recipe.inplace_embedding_grads:  # the kernel adds the value embedding
                table = self._tables()[f"values{i}"].weight
                value_args = (gate.weight, table, self._grad(f"values{i}"), tokens.flatten())
            channels, qkv8 = VALUE_GATE_CHANNELS if gate is not None else 0, self._fp8(self.qkv8, i)
            rope = (cos, sin)
            x, *qkv, gate_input = norm_qkv_rope(stream, qkv8, weights, rope, heads, channels, value_args)
            q, k, v = (each.view(*tokens.shape, -1, config.head_dim) for each in qkv)
        else:
            n = norm(x)
            gate_input = n[:, :VALUE_GATE_CHANNELS]
            projected = F.linear(n, torch.cat(weights).to(n.dtype)).view(*tokens.shape, -1)
            rotate = rope_norm.rope_norm if recipe.fused_rope else rope_norm_reference
            q, k, v = rotate(projected, cos, sin, *heads)
        if gate is not None and value_args is None:
            v = self._add_values(i, v, 3 * torch.sigmoid(gate(gate_input)).view(*tokens.shape, -1), tokens)
        attended = model.batch_attention(i, q, k, v, docs).flatten(-2).flatten(0, 1)
        out, fused = attention.out, recipe.fused_residual
        # attended·outᵀ; fused: x + attended·outᵀ
        y = gemm.gemm_bf16_residual(attended, out.weight, x) if fused else out(attended)
        stream = ResidualStream(x, y, y_holds_sum=fused)

        if self.up8 is None or self.down8 is None or not recipe.fused_add_norm:
            stream = ResidualStream(stream.materialize())
        x = stream.x
        if self.up8 is None or self.down8 is None:
            return ResidualStream(x, mlp(norm(x)))
        up8, down8 = self._fp8(self.up8, i), self._fp8(self.down8, i)
        weights = [mlp.up.weight, mlp.down.weight]
        return norm_mlp(stream, up8, down8, *weights, fused_relu2=recipe.fused_relu2, next_mix=next_mix)

    @torch.no_grad()
    def refresh(self) -> None:
        """Quantizes the weights anew, and zeroes the gradients that accumulate in place."""
        for name, table in self._tables().items() if self.recipe.inplace_embedding_grads else ():
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

    def _tables(self) -> dict[str, nn.Embedding]:
        values = {f"values{i}": cast(nn.Embedding, table) for i, table in self.model.value_embeds.items()}
        return {"embed": self.model.embed, **values}

    def _grad(self, name: str) -> Tensor:
        """The buffer that gradients of a table accumulate in."""
        return cast(Tensor, getattr(self, f"{name}_grad"))

    def _add_values(self, i: int, v: Tensor, gate: Tensor, tokens: Tensor) -> Tensor:
        """v (B, T, K, D) plus the tokens' rows of layer i's value embedding, weighted by gate (B, T, K)."""
        name = f"values{i}"
        table = self._tables()[name]
        if not self.recipe.inplace_embedding_grads:
            return add_gated_rows(v, gate, table(tokens))
        return embedding_grad.add_gated_embedding(v, gate, table.weight, self._grad(name), tokens)

    @staticmethod
    def _fp8(copies: nn.ModuleList, i: int) -> Fp8Weight:
        return cast(Fp8Weight, copies[i])


def recompute_blocks(model: GPT) -> None:
    """Activation checkpointing for the plain model: each block keeps its input and recomputes the rest."""
    for block in model.layers():
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)  # type: ignore[method-assign]
