"""Layers in eight bits: a norm, and the products behind it, with gradients written by hand.

What goes into a product is quantized by the kernel that makes it (fp8.py), so a layer here begins with the norm of
the residual stream, or with adding up what is still pending in it (stream.py), and its backward pass ends there.

The MLP keeps nothing of its hidden layer but h = relu(u)² in eight bits, which the product needs anyway: the slope
is 2·√h (relu2.py), and a root halves the relative error. Attention's keeps queries, keys and values as attention
sees them, in the one tensor that the product wrote (rope_norm8.py).

Left in bf16: attention's output projection. Its input comes from attention, so quantizing it is a pass of
its own, which at 768 wide eats what the faster product gives.

Shapes: N tokens, D width, F hidden width; H heads, K kv heads.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from nanorun.model.kernels import embedding_grad, fp8, gemm, opaque_to_dynamo, relu2, residual_norm, rope_norm
from nanorun.model.kernels.stream import Mixing, Stream


def norm_linear(x: Tensor, copies: fp8.Fp8Weight, weights: list[Tensor], kept: int) -> tuple[Tensor, Tensor]:
    """norm(x)·wᵀ for (..., D) x and the stacked weights, and norm(x)'s first channels unquantized."""
    flat = x.flatten(0, -2)
    y, first = _norm_linear(flat, copies.data, copies.data_t, copies.scale, copies.pingpong, kept, *weights)
    return y.view(*x.shape[:-1], -1), first.view(*x.shape[:-1], kept)


def norm_mlp(
    before: Stream,
    up: fp8.Fp8Weight,
    down: fp8.Fp8Weight,
    up_weight: Tensor,
    down_weight: Tensor,
    fused: bool = False,
    after: Mixing | None = None,
) -> tuple[Tensor, Tensor]:
    """The stream of (..., D), settled, and down(relu(up(norm(it)))²). `fused`: ReLU² inside its product. With `after`
    the second is, as far as its numbers go, the stream as the next half-block wants it (stream.py)."""
    start, scale, share = after or Mixing()
    s, y = _norm_mlp(
        fused,
        up.pingpong,
        after is not None,
        None if start is None else start.flatten(0, -2),
        scale,
        share,
        *before.flat(),
        up_weight,
        down_weight,
        up.data,
        up.data_t,
        up.scale,
        up.max_norms,
        down.data,
        down.data_t,
        down.scale,
        down.max_norms,
    )
    return s.view(before.x.shape) if before.pending() else before.x, y.view(before.x.shape)


@opaque_to_dynamo
def _norm_linear(*arguments: Any) -> tuple[Tensor, Tensor]:
    result: tuple[Tensor, Tensor] = _NormLinear.apply(*arguments)
    return result


@opaque_to_dynamo
def _norm_mlp(*arguments: Any) -> tuple[Tensor, Tensor]:
    result: tuple[Tensor, Tensor] = _NormMLP.apply(*arguments)
    return result


class _NormLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        rows: Tensor,
        columns: Tensor,
        unit: Tensor,
        pingpong: bool,
        kept: int,
        *weights: Tensor,
    ) -> tuple[Tensor, Tensor]:
        n, nt, n_unit, inverse = residual_norm.norm_quantize(x)
        ctx.save_for_backward(x, inverse, nt, n_unit, columns, unit)
        ctx.outputs, ctx.pingpong = [weight.shape[0] for weight in weights], pingpong
        y = gemm.gemm_fp8(n, rows, n_unit, unit, x.dtype, pingpong)
        return y, first_channels(x, inverse, kept)

    @staticmethod
    def backward(ctx: Any, dy: Tensor, dfirst: Tensor) -> tuple[Tensor | None, ...]:
        x, inverse, nt, n_unit, columns, unit = ctx.saved_tensors
        dy = dy.contiguous()
        g, gt, g_unit = fp8.quantize(dy, fp8.amax_and_row_norm(dy), 0.0, fp8.E5M2)
        dn, dweight = gemm.gemm_fp8_grads(
            g, columns, g_unit, unit, x.dtype, ctx.pingpong, [gt], [nt], [g_unit], [n_unit]
        )
        return norm_backward(dn.float(), x, inverse, dfirst), *[None] * 5, *dweight.split(ctx.outputs)


class _NormMLP(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        fused: bool,
        pingpong: bool,
        adds: bool,
        next_start: Tensor | None,  # these three without gradients, which are the next half-block's business
        next_scale: Tensor | None,
        next_share: Tensor | None,
        x: Tensor,  # (N, D)
        y: Tensor | None,
        start: Tensor | None,
        scale: Tensor | None,
        share: Tensor | None,
        done: bool,
        up_weight: Tensor,
        down_weight: Tensor,
        up: Tensor,
        up_columns: Tensor,
        up_unit: Tensor,
        up_longest: Tensor,
        down: Tensor,
        down_columns: Tensor,
        down_unit: Tensor,
        down_longest: Tensor,
    ) -> tuple[Tensor, Tensor]:
        s, n, nt, n_unit, inverse = settle_and_norm(ctx, x, y, start, scale, share, done)
        ctx.fused, ctx.pingpong = fused, pingpong
        if fused:
            h, h_unit = gemm.gemm_fp8_relu2(n, up, n_unit, up_unit, up_longest, x.shape[1])
            kept = h
        else:
            u = gemm.gemm_fp8(n, up, n_unit, up_unit, x.dtype, pingpong)
            h, kept, h_unit = relu2.quantize(u, up_longest, x.shape[1])
        ctx.save_for_backward(
            *(s, inverse, start, scale, share),
            *(nt, n_unit, kept, h_unit, up_columns, up_unit, down_columns, down_unit, down_longest),
        )
        if adds:
            y = gemm.gemm_fp8_residual(h, down, h_unit, down_unit, s, next_start, next_scale, next_share)
        else:
            y = gemm.gemm_fp8(h, down, h_unit, down_unit, x.dtype, pingpong)
        return handed_on(ctx, s), y

    @staticmethod
    def backward(ctx: Any, ds: Tensor, dy: Tensor) -> tuple[Tensor | None, ...]:
        s, inverse, start, scale, share, *rest = ctx.saved_tensors
        nt, n_unit, kept, h_unit, up_columns, up_unit, down_columns, down_unit, down_longest = rest
        dy = dy.contiguous()
        largest = fp8.amax_and_row_norm(dy)
        g, gt, g_unit = fp8.quantize(dy, largest, 0.0, fp8.E5M2)
        dh = gemm.gemm_fp8(g, down_columns, g_unit, down_unit, s.dtype, ctx.pingpong)
        if ctx.fused:
            du, dut, du_unit, ht = relu2.backward_with_transpose(dh, kept, h_unit, largest, down_longest)
        else:
            ht = kept
            du, dut, du_unit = relu2.backward(dh, ht, h_unit, largest, down_longest)
        pairs = [gt, dut], [ht, nt], [g_unit, du_unit], [h_unit, n_unit]
        dn, ddown, dup = gemm.gemm_fp8_grads(du, up_columns, du_unit, up_unit, s.dtype, ctx.pingpong, *pairs)
        before = settle_backward(ctx, dn, s, inverse, ds, None, start, scale, share)
        return *[None] * 6, *before, dup, ddown, *[None] * 8


class Gated(NamedTuple):
    """Embeddings that are added to values: 3·sigmoid(w·first channels of the norm) times the word's row."""

    weight: Tensor  # (K, channels)
    table: Tensor  # (V, K·D)
    sums: Tensor  # where gradients of the table go (add_rows.py)
    words: Tensor  # (B, T)


def norm_heads(
    before: Stream,
    copies: fp8.Fp8Weight,
    weights: list[Tensor],
    kept: int,
    cos: Tensor,
    sin: Tensor,
    heads: int,
    kv_heads: int,
    gain: float,
    gated: Gated | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The stream of (B, T, D), settled; `norm_linear` of it and then `rope_norm.rope_norm`: q, k, v, and the first
    channels of its norm. With `gated`, v is what `embedding_grad.add_gated_embedding` makes of it."""
    arguments = (*before.flat(), copies.data, copies.data_t, copies.scale, cos, sin)
    weight, table, sums, words = gated or (None, None, None, None)
    values = (weight, table, sums, None if words is None else words.flatten())
    s, q, k, v, first = _norm_heads(
        *arguments, kept, heads, kv_heads, gain, copies.pingpong, *values, *weights
    )
    batch, time, width = before.x.shape
    x = s.view(batch, time, width) if before.pending() else before.x
    q, k, v = (each.view(batch, time, -1, each.size(-1)) for each in (q, k, v))
    return x, q, k, v, first.view(batch, time, kept)


@opaque_to_dynamo
def _norm_heads(*arguments: Any) -> tuple[Tensor, ...]:
    result: tuple[Tensor, ...] = _NormHeads.apply(*arguments)
    return result


class _NormHeads(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,  # (N, D)
        y: Tensor | None,
        start: Tensor | None,
        scale: Tensor | None,
        share: Tensor | None,
        done: bool,
        rows: Tensor,
        columns: Tensor,
        unit: Tensor,
        cos: Tensor,
        sin: Tensor,
        kept: int,
        heads: int,
        kv_heads: int,
        gain: float,
        pingpong: bool,
        gate_weight: Tensor | None,
        table: Tensor | None,
        sums: Tensor | None,
        words: Tensor | None,
        *weights: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        s, n, nt, n_unit, inverse = settle_and_norm(ctx, x, y, start, scale, share, done)
        first, gate = first_channels(s, inverse, kept), None
        if gate_weight is not None:
            gate = 3 * torch.sigmoid(F.linear(first, gate_weight.to(first.dtype)))
        qkv, inverses, steepest = rope_norm.gemm_rope_norm(
            n, rows, n_unit, unit, x.dtype, pingpong, cos, sin, gate, table, words, heads, kv_heads, gain
        )
        ctx.save_for_backward(
            *(s, inverse, start, scale, share),
            *(nt, n_unit, columns, unit, qkv, inverses, cos, sin, steepest),
            *(gate, gate_weight, table, sums, words),
        )
        ctx.heads, ctx.kv_heads, ctx.gain, ctx.pingpong = heads, kv_heads, gain, pingpong
        ctx.outputs = [weight.shape[0] for weight in weights]
        q, k, v = qkv.unflatten(-1, (heads + 2 * kv_heads, -1)).split([heads, kv_heads, kv_heads], dim=1)
        return handed_on(ctx, s), q, k, v, first

    @staticmethod
    def backward(
        ctx: Any, ds: Tensor, dq: Tensor, dk: Tensor, dv: Tensor, dfirst: Tensor
    ) -> tuple[Tensor | None, ...]:
        s, inverse, start, scale, share, *rest = ctx.saved_tensors
        nt, n_unit, columns, unit, qkv, inverses, cos, sin, steepest, *values = rest
        gate, gate_weight, table, sums, words = values
        gradients = (dq.contiguous(), dk.contiguous(), dv.contiguous())
        dgate_weight: Tensor | None = None
        if gate is not None:
            dgate = embedding_grad.gated_embedding_backward(sums, gradients[2], gate, table, words)
            wide = gate.float()
            inner = (dgate.float() * wide * (1 - wide / 3)).to(s.dtype)  # through the sigmoid
            kept = gate_weight.shape[1]
            dgate_weight = (inner.t() @ first_channels(s, inverse, kept)).float()
            dfirst = dfirst + inner @ gate_weight.to(s.dtype)
        g, gt, g_unit = rope_norm.backward_fp8(
            qkv, inverses, cos, sin, *gradients, steepest, ctx.heads, ctx.kv_heads, ctx.gain
        )
        dn, dweight = gemm.gemm_fp8_grads(
            g, columns, g_unit, unit, s.dtype, ctx.pingpong, [gt], [nt], [g_unit], [n_unit]
        )
        before = settle_backward(ctx, dn, s, inverse, ds, dfirst, start, scale, share)
        return *before, *[None] * 10, dgate_weight, *[None] * 3, *dweight.split(ctx.outputs)


def settle_and_norm(
    ctx: Any,
    x: Tensor,
    y: Tensor | None,
    start: Tensor | None,
    scale: Tensor | None,
    share: Tensor | None,
    done: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """s, the stream with nothing left to do to it, and what `norm_quantize` makes of it."""
    ctx.adds, ctx.pending = y is not None, y is not None or start is not None
    if done:
        assert y is not None
        return y, *residual_norm.norm_quantize(y)
    if ctx.pending:
        return residual_norm.residual_norm_quantize(x, y, start, scale, share)
    return x, *residual_norm.norm_quantize(x)


def handed_on(ctx: Any, s: Tensor) -> Tensor:
    """s as a result of its own: where nothing was pending it is x, which its owner has."""
    return s if ctx.pending else s.new_empty(0)


def settle_backward(ctx: Any, *given: Any) -> tuple[Tensor | None, ...]:
    """Gradients of what `settle_and_norm` took, from what `residual_norm.input_grads` takes."""
    if not ctx.pending:
        dn, s, inverse, _, dfirst, *_ = given
        return norm_backward(dn.float(), s, inverse, dfirst), *[None] * 5
    dx, *others = residual_norm.input_grads(*given)
    return dx, dx if ctx.adds else None, *others, None


def first_channels(x: Tensor, inverse: Tensor, kept: int) -> Tensor:
    return (x[:, :kept].float() * inverse[:, None]).to(x.dtype)


def norm_backward(dn: Tensor, x: Tensor, inverse: Tensor, dfirst: Tensor | None = None) -> Tensor:
    """From the fp32 gradient of norm(x) = x·inverse (and of its first channels, apart) to that of x. Plain, so that
    a compiler fuses it with what follows."""
    if dfirst is not None and dfirst.shape[1] > 0:
        dn = dn + F.pad(dfirst.float(), (0, dn.shape[1] - dfirst.shape[1]))
    n = x.float() * inverse[:, None]
    return (inverse[:, None] * (dn - n * (dn * n).mean(1, keepdim=True))).to(x.dtype)
