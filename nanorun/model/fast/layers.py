"""FP8 half-blocks: RMSNorm and the GEMMs that read it, with gradients written by hand.

The input of an FP8 GEMM is quantized by the kernel that produces it (kernels/fp8), so a half-block begins with the
norm of the residual stream, and its backward pass ends there.

**The residual stream between half-blocks.** The compiler cannot fuse into our kernels, so x + delta would be one pass
over memory and the norm after it another. `ResidualStream` therefore describes the sum λ·(x + delta) + μ·x0 without
computing it, and the kernel that norms and quantizes for the next half-block computes it on the way (`fused_add_norm`).
Where the GEMM that produces delta can add it in its epilogue (`fused_residual`), it stores the finished sum, which then
travels as `value`, and only the norm is left to do. Autograd differentiates the same expression in all three cases:
the function of the next half-block returns the gradients of x, delta, x0, λ and μ from one kernel
(kernels/residual_norm), so that no sum of gradients is a pass of its own.

The MLP keeps nothing of its hidden layer but h = relu(u)² in FP8, which the GEMM needs anyway: the slope is 2·√h
(kernels/relu2), and a square root halves the relative error. Attention keeps queries, keys and values as attention
reads them, in the one tensor that the GEMM wrote (kernels/rope_norm).

Left in bf16: attention's output projection. Its input comes from attention, so quantizing it is a pass of its own,
which at 768 wide costs what the faster GEMM gains.

Shapes: N tokens, D width, F hidden width; H heads, K kv heads.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from nanorun.model.kernels import embedding_grad, fp8, gemm, opaque_to_dynamo, relu2, residual_norm, rope_norm


class ResidualStream(NamedTuple):
    """λ·(x + delta) + μ·x0, or as much of it as is given, not yet computed.

    `value`, where it is given, is the result, computed by the epilogue of the GEMM that made delta. The storage of
    delta then holds the sum as well; delta only connects the gradient.
    """

    x: Tensor  # (..., D)
    delta: Tensor | None = None
    x0: Tensor | None = None
    lambda_: Tensor | None = None  # one number
    mu: Tensor | None = None
    value: Tensor | None = None

    @property
    def is_deferred(self) -> bool:
        return self.delta is not None or self.x0 is not None

    def materialize(self) -> Tensor:
        """The sum, in plain PyTorch."""
        assert self.value is None
        x = self.x if self.delta is None else self.x + self.delta
        if self.x0 is None or self.lambda_ is None or self.mu is None:
            return x
        return self.lambda_.to(x.dtype) * x + self.mu.to(x.dtype) * self.x0

    def flatten(self) -> "ResidualStream":
        flat = (each if each is None else each.flatten(0, -2) for each in (self.delta, self.x0, self.value))
        delta, x0, value = flat
        return ResidualStream(self.x.flatten(0, -2), delta, x0, self.lambda_, self.mu, value)


class NextMix(NamedTuple):
    """λ·(x + delta) + μ·x0 of the next block, for the epilogue that computes it ahead. Without gradients, which the
    next half-block computes."""

    x0: Tensor | None = None  # (..., D)
    lambda_: Tensor | None = None  # rounded to the compute dtype as everywhere, in fp32
    mu: Tensor | None = None


def norm_mlp(
    stream: ResidualStream,
    up: fp8.Fp8Weight,
    down: fp8.Fp8Weight,
    up_weight: Tensor,
    down_weight: Tensor,
    fused_relu2: bool,
    next_mix: NextMix | None,
) -> ResidualStream:
    """x and delta = down(relu(up(norm(x)))²) for the stream's value x of shape (..., D). With `next_mix` the down
    projection's epilogue computes the next block's input."""
    x0, lambda_, mu = next_mix or NextMix()
    s, y = _norm_mlp(
        fused_relu2,
        up.pingpong,
        next_mix is not None,
        None if x0 is None else x0.flatten(0, -2),
        lambda_,
        mu,
        up.tensors,
        down.tensors,
        up_weight,
        down_weight,
        *stream.flatten(),
    )
    x = s.view(stream.x.shape) if stream.is_deferred else stream.x
    delta = y.view(x.shape)
    return ResidualStream(x, delta, value=delta.detach() if next_mix is not None else None)


@opaque_to_dynamo
def _norm_mlp(*arguments: Any) -> tuple[Tensor, Tensor]:
    result: tuple[Tensor, Tensor] = _NormMLP.apply(*arguments)
    return result


class _NormMLP(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        fused_relu2: bool,
        pingpong: bool,
        fused_residual: bool,
        next_x0: Tensor | None,
        next_lambda: Tensor | None,
        next_mu: Tensor | None,
        up8: tuple[Tensor, ...],
        down8: tuple[Tensor, ...],
        up_weight: Tensor,
        down_weight: Tensor,
        *flat_stream: Any,
    ) -> tuple[Tensor, Tensor]:
        stream = ResidualStream(*flat_stream)
        (up, up_t, up_scale, up_max_norms), (down, down_t, down_scale, down_max_norms) = up8, down8
        s, n, n_t, n_scale, inv_rms = materialize_and_norm(ctx, stream)
        ctx.fused_relu2, ctx.pingpong = fused_relu2, pingpong
        if fused_relu2:
            h, h_scale = gemm.gemm_fp8_relu2(n, up, n_scale, up_scale, up_max_norms, s.shape[1])
            saved_h = h
        else:
            u = gemm.gemm_fp8(n, up, n_scale, up_scale, s.dtype, pingpong)
            h, saved_h, h_scale = relu2.quantize(u, up_max_norms, s.shape[1])
        ctx.save_for_backward(
            *(s, inv_rms, stream.x0, stream.lambda_, stream.mu),
            *(n_t, n_scale, saved_h, h_scale, up_t, up_scale, down_t, down_scale, down_max_norms),
        )
        if fused_residual:
            y = gemm.gemm_fp8_residual(h, down, h_scale, down_scale, s, next_x0, next_lambda, next_mu)
        else:
            y = gemm.gemm_fp8(h, down, h_scale, down_scale, s.dtype, pingpong)
        return residual_output(ctx, s), y

    @staticmethod
    def backward(ctx: Any, ds: Tensor, dy: Tensor) -> tuple[Tensor | None, ...]:
        s, inv_rms, x0, lambda_, mu, *rest = ctx.saved_tensors
        n_t, n_scale, saved_h, h_scale, up_t, up_scale, down_t, down_scale, down_max_norms = rest
        dy = dy.contiguous()
        amax = fp8.amax_and_row_norm(dy)
        g, g_t, g_scale = fp8.quantize(dy, amax, 0.0, fp8.E5M2)
        dh = gemm.gemm_fp8(g, down_t, g_scale, down_scale, s.dtype, ctx.pingpong)
        if ctx.fused_relu2:
            du, du_t, du_scale, h_t = relu2.backward_with_transpose(
                dh, saved_h, h_scale, amax, down_max_norms
            )
        else:
            h_t = saved_h
            du, du_t, du_scale = relu2.backward(dh, h_t, h_scale, amax, down_max_norms)
        pairs = [g_t, du_t], [h_t, n_t], [g_scale, du_scale], [h_scale, n_scale]
        dn, ddown, dup = gemm.gemm_fp8_grads(du, up_t, du_scale, up_scale, s.dtype, ctx.pingpong, *pairs)
        before = stream_gradients(ctx, dn, s, inv_rms, ds, None, x0, lambda_, mu)
        return *[None] * 8, dup, ddown, *before


class GatedValues(NamedTuple):
    """A value embedding: the token's row times the gate 3·sigmoid(w·first channels of the norm) is added to v."""

    gate_weight: Tensor  # (K, channels)
    table: Tensor  # (V, K·D)
    table_grad: Tensor  # the buffer that gradients of the table accumulate in
    tokens: Tensor  # (B, T)


def norm_qkv_rope(
    stream: ResidualStream,
    qkv8: fp8.Fp8Weight,
    weights: list[Tensor],
    gate_channels: int,
    cos: Tensor,
    sin: Tensor,
    heads: int,
    kv_heads: int,
    gain: float,
    values: GatedValues | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """For the stream's value x of shape (B, T, D): x, then q, k, v of norm(x) with rotary embedding, QK-norm and, with
    `values`, the value embedding; and the first channels of norm(x), unquantized."""
    gate_weight, table, table_grad, tokens = values or (None, None, None, None)
    gated = (gate_weight, table, table_grad, None if tokens is None else tokens.flatten())
    numbers = (gate_channels, heads, kv_heads, gain, qkv8.pingpong)
    s, q, k, v, first = _norm_qkv_rope(qkv8.tensors, cos, sin, *numbers, *gated, *stream.flatten(), *weights)
    batch, time, width = stream.x.shape
    x = s.view(batch, time, width) if stream.is_deferred else stream.x
    q, k, v = (each.view(batch, time, -1, each.size(-1)) for each in (q, k, v))
    return x, q, k, v, first.view(batch, time, gate_channels)


@opaque_to_dynamo
def _norm_qkv_rope(*arguments: Any) -> tuple[Tensor, ...]:
    result: tuple[Tensor, ...] = _NormQkvRope.apply(*arguments)
    return result


class _NormQkvRope(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        w8: tuple[Tensor, ...],
        cos: Tensor,
        sin: Tensor,
        gate_channels: int,
        heads: int,
        kv_heads: int,
        gain: float,
        pingpong: bool,
        gate_weight: Tensor | None,
        table: Tensor | None,
        table_grad: Tensor | None,
        token_ids: Tensor | None,
        *stream_and_weights: Any,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        stream, weights = ResidualStream(*stream_and_weights[:6]), stream_and_weights[6:]
        w, w_t, w_scale, _ = w8
        s, n, n_t, n_scale, inv_rms = materialize_and_norm(ctx, stream)
        first, gate = gate_inputs(s, inv_rms, gate_channels), None
        if gate_weight is not None:
            gate = 3 * torch.sigmoid(F.linear(first, gate_weight.to(first.dtype)))
        qkv, head_inv_rms, max_inv_rms = rope_norm.gemm_rope_norm(
            n, w, n_scale, w_scale, s.dtype, pingpong, cos, sin, gate, table, token_ids, heads, kv_heads, gain
        )
        ctx.save_for_backward(
            *(s, inv_rms, stream.x0, stream.lambda_, stream.mu),
            *(n_t, n_scale, w_t, w_scale, qkv, head_inv_rms, cos, sin, max_inv_rms),
            *(gate, gate_weight, table, table_grad, token_ids),
        )
        ctx.heads, ctx.kv_heads, ctx.gain, ctx.pingpong = heads, kv_heads, gain, pingpong
        ctx.outputs = [weight.shape[0] for weight in weights]
        q, k, v = qkv.unflatten(-1, (heads + 2 * kv_heads, -1)).split([heads, kv_heads, kv_heads], dim=1)
        return residual_output(ctx, s), q, k, v, first

    @staticmethod
    def backward(
        ctx: Any, ds: Tensor, dq: Tensor, dk: Tensor, dv: Tensor, dgate_in: Tensor
    ) -> tuple[Tensor | None, ...]:
        s, inv_rms, x0, lambda_, mu, *rest = ctx.saved_tensors
        n_t, n_scale, w_t, w_scale, qkv, head_inv_rms, cos, sin, max_inv_rms, *values = rest
        gate, gate_weight, table, table_grad, token_ids = values
        gradients = (dq.contiguous(), dk.contiguous(), dv.contiguous())
        dgate_weight: Tensor | None = None
        if gate is not None:
            dgate = embedding_grad.gated_embedding_backward(table_grad, gradients[2], gate, table, token_ids)
            wide = gate.float()
            inner = (dgate.float() * wide * (1 - wide / 3)).to(s.dtype)  # through the sigmoid
            gate_channels = gate_weight.shape[1]
            dgate_weight = (inner.t() @ gate_inputs(s, inv_rms, gate_channels)).float()
            dgate_in = dgate_in + inner @ gate_weight.to(s.dtype)
        g, g_t, g_scale = rope_norm.backward_fp8(
            qkv, head_inv_rms, cos, sin, *gradients, max_inv_rms, ctx.heads, ctx.kv_heads, ctx.gain
        )
        dn, dweight = gemm.gemm_fp8_grads(
            g, w_t, g_scale, w_scale, s.dtype, ctx.pingpong, [g_t], [n_t], [g_scale], [n_scale]
        )
        before = stream_gradients(ctx, dn, s, inv_rms, ds, dgate_in, x0, lambda_, mu)
        return *[None] * 8, dgate_weight, *[None] * 3, *before, *dweight.split(ctx.outputs)


def materialize_and_norm(ctx: Any, stream: ResidualStream) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """s, the value of the residual stream (N, D), and what `norm_quantize` returns for it."""
    x, delta, x0, lambda_, mu, value = stream
    ctx.has_delta, ctx.is_deferred = delta is not None, stream.is_deferred
    if value is not None:
        return value, *residual_norm.norm_quantize(value)
    if ctx.is_deferred:
        return residual_norm.residual_norm_quantize(x, delta, x0, lambda_, mu)
    return x, *residual_norm.norm_quantize(x)


def residual_output(ctx: Any, s: Tensor) -> Tensor:
    """s as an output; where nothing was deferred it is the input x, which the caller has."""
    return s if ctx.is_deferred else s.new_empty(0)


def stream_gradients(ctx: Any, *inputs: Any) -> tuple[Tensor | None, ...]:
    """Gradients of what `materialize_and_norm` took, from what `residual_norm.input_grads` takes."""
    if not ctx.is_deferred:
        dn, s, inv_rms, _, dgate_in, *_ = inputs
        return norm_backward(dn.float(), s, inv_rms, dgate_in), *[None] * 5
    dx, *others = residual_norm.input_grads(*inputs)
    return dx, dx if ctx.has_delta else None, *others, None


def gate_inputs(x: Tensor, inv_rms: Tensor, gate_channels: int) -> Tensor:
    return (x[:, :gate_channels].float() * inv_rms[:, None]).to(x.dtype)


def norm_backward(dn: Tensor, x: Tensor, inv_rms: Tensor, dgate_in: Tensor | None = None) -> Tensor:
    """From the fp32 gradient of norm(x) = x·inv_rms (and of its first channels, apart) to that of x. Plain, so that
    a compiler fuses it with what follows."""
    if dgate_in is not None and dgate_in.shape[1] > 0:
        dn = dn + F.pad(dgate_in.float(), (0, dn.shape[1] - dgate_in.shape[1]))
    n = x.float() * inv_rms[:, None]
    return (inv_rms[:, None] * (dn - n * (dn * n).mean(1, keepdim=True))).to(x.dtype)
