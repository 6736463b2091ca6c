"""FP8 half-blocks: RMSNorm and the GEMMs that read it, with gradients written by hand.

    norm_qkv_rope   norm, q/k/v projection, rotary embedding, QK-norm and value embedding, up to attention
    norm_mlp        norm and MLP

The input of an FP8 GEMM is quantized by the kernel that produces it (kernels/fp8), so a half-block begins with the
norm of the residual stream, and its backward pass ends there.

**The residual stream between half-blocks.** The compiler cannot fuse into our kernels, so x + y would be one pass
over memory and the norm after it another. `ResidualStream` therefore describes the sum s = λ·(x + y) + μ·x0 without
computing it. There are three cases:

    1. nothing to add                s is x
    2. y, or only x0, is pending     the kernel that norms and quantizes for the next half-block computes s on the way
                                     (`fused_add_norm`): before the first block, and after the middle one
    3. y holds the sum               the GEMM that computes the summand has added it in its epilogue (`fused_residual`);
                                     only the norm is left. The default everywhere else

Autograd differentiates s = λ·(x + y) + μ·x0 in all three: the next half-block returns the gradients of x, y, x0, λ and
μ from one kernel (kernels/residual_norm), so that no sum of gradients is a pass of its own. So in case 3 the value of y
is s, but its gradient is that of the summand. An example, the output projection a of attention:

    forward    gemm_bf16_residual returns the tensor y = x + a; norm_mlp reads s from y
    backward   norm_mlp computes d, the gradient of s, and returns it twice: as the gradient of x and as that of y.
               gemm_bf16_residual passes the latter on to a, and nothing to x, which has its share already

The MLP keeps nothing of its hidden layer but h = relu(u)² in FP8, which the GEMM needs anyway: the slope is 2·√h
(kernels/relu2), and a square root halves the relative error. Attention keeps queries, keys and values as attention
reads them, in the one tensor that the GEMM wrote (kernels/rope_norm).

Left in bf16: attention's output projection. Its input comes from attention, so quantizing it is a pass of its own,
which at 768 wide costs what the faster GEMM gains.

`norm_qkv_rope` and `norm_mlp` flatten their arguments for an autograd.Function, whose backward pass returns one
gradient per argument. In the code, w8 is a weight in FP8, w_t its transpose, dw its gradient; n is the norm of s and
n_t its transpose, both in FP8. Shapes: N tokens of all rows, D width, F hidden width; H heads, K kv heads.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanorun.model.kernels import embedding_grad, fp8, gemm, opaque_to_dynamo, relu2, residual_norm, rope_norm


class ResidualStream(NamedTuple):
    """s = λ·(x + y) + μ·x0, or as much of it as is given, not yet computed. All but λ and μ are (N, D).

    With `y_holds_sum`, the value of y is s, and its gradient is that of the summand; x0, λ and μ are given for their
    gradients only.
    """

    x: Tensor
    y: Tensor | None = None  # what the last half-block adds to x, or the sum
    x0: Tensor | None = None
    lambda_: Tensor | None = None  # one number
    mu: Tensor | None = None
    y_holds_sum: bool = False

    @property
    def is_deferred(self) -> bool:
        return self.y is not None or self.x0 is not None

    def materialize(self) -> Tensor:
        """s, in plain PyTorch."""
        assert not self.y_holds_sum
        x = self.x if self.y is None else self.x + self.y
        if self.x0 is None or self.lambda_ is None or self.mu is None:
            return x
        return self.lambda_.to(x.dtype) * x + self.mu.to(x.dtype) * self.x0

    def norm_quantize(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """s (N, D); norm(s) in FP8, its transpose and its scale; and 1/RMS of each row of s, (N,)."""
        if self.is_deferred and not self.y_holds_sum:  # case 2
            return residual_norm.residual_norm_quantize(self.x, self.y, self.x0, self.lambda_, self.mu)
        s = self.x if self.y is None else self.y
        return s, *residual_norm.norm_quantize(s)


class NextMix(NamedTuple):
    """x0, λ and μ of the next block's sum, for the epilogue that computes it ahead. Without gradients, which the next
    half-block computes."""

    x0: Tensor | None = None  # (N, D)
    lambda_: Tensor | None = None  # rounded to the compute dtype as everywhere, in fp32
    mu: Tensor | None = None


class Fp8Weight(nn.Module):
    """A weight in FP8 with its transpose; several weights, stacked, as one. Call `requantize` after each update."""

    data: Tensor  # (outputs, inputs)
    data_t: Tensor  # (inputs, outputs)
    scale: Tensor
    max_norms: Tensor  # the largest L2 norm of a row and of a column, with `with_max_norms`

    def __init__(
        self, outputs: int, inputs: int, with_max_norms: bool = True, pingpong: bool = False
    ) -> None:
        super().__init__()
        self.with_max_norms = with_max_norms
        self.pingpong = pingpong  # whether gemm's ping-pong kernels multiply it, or cuBLAS
        self.register_buffer("data", torch.empty(outputs, inputs, dtype=fp8.E4M3), persistent=False)
        self.register_buffer("data_t", torch.empty(inputs, outputs, dtype=fp8.E4M3), persistent=False)
        self.register_buffer("scale", torch.empty(1), persistent=False)
        self.register_buffer("max_norms", torch.empty(2), persistent=False)

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.data, self.data_t, self.scale, self.max_norms

    @torch.no_grad()
    def requantize(self, *weights: Tensor) -> None:
        """data·scale ≈ the stacked weights, with a scale from their amax; and data_t and max_norms of them. In few
        launches, none through torch's dispatcher: every update calls it, and the GPU must not wait for the host."""
        weight = torch.cat(weights) if len(weights) > 1 else weights[0]
        amax_and_row_norm = fp8.amax_of_rows(weight, stride=1)
        fp8.quantize_into(self.data, self.data_t, self.scale, weight, amax_and_row_norm)
        if self.with_max_norms:
            self.max_norms[0].copy_(amax_and_row_norm[1])
            torch.amax(torch.linalg.vector_norm(weight, dim=0), 0, out=self.max_norms[1])


class NormMLP(torch.autograd.Function):
    """s and y = down(relu(up(norm(s)))²). With `fused_residual` the epilogue of the down projection returns the next
    sum, s + y or λ·(s + y) + μ·x0, in place of y. Where the stream has nothing to add, s is x and not returned."""

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
        s, n, n_t, n_scale, inv_rms = stream.norm_quantize()
        if fused_relu2:
            # h·h_scale = relu(n·upᵀ)², (N, F) in e4m3
            h, h_scale = gemm.gemm_fp8_relu2(n, up, n_scale, up_scale, up_max_norms, s.shape[1])
            saved_h = h
        else:
            u = gemm.gemm_fp8(n, up, n_scale, up_scale, s.dtype, pingpong)  # n·upᵀ, (N, F)
            h, saved_h, h_scale = relu2.quantize(u, up_max_norms, s.shape[1])
        ctx.fused_relu2, ctx.pingpong = fused_relu2, pingpong
        ctx.is_deferred, ctx.has_y = stream.is_deferred, stream.y is not None
        ctx.save_for_backward(
            *(s, inv_rms, stream.x0, stream.lambda_, stream.mu),
            *(n_t, n_scale, saved_h, h_scale, up_t, up_scale, down_t, down_scale, down_max_norms),
        )
        if fused_residual:  # s + y, or the next block's λ·(s + y) + μ·x0
            y = gemm.gemm_fp8_residual(h, down, h_scale, down_scale, s, next_x0, next_lambda, next_mu)
        else:
            y = gemm.gemm_fp8(h, down, h_scale, down_scale, s.dtype, pingpong)  # h·downᵀ, (N, D)
        return s if stream.is_deferred else s.new_empty(0), y

    @staticmethod
    def backward(ctx: Any, ds: Tensor, dy: Tensor) -> tuple[Tensor | None, ...]:
        s, inv_rms, x0, lambda_, mu, *rest = ctx.saved_tensors
        n_t, n_scale, saved_h, h_scale, up_t, up_scale, down_t, down_scale, down_max_norms = rest
        dy = dy.contiguous()
        bounds = fp8.amax_and_row_norm(dy)  # (2,): on the entries and on the row norms of dy
        g, g_t, g_scale = fp8.quantize(dy, fp8.E5M2, amax=bounds)  # g·g_scale = dy
        dh = gemm.gemm_fp8(g, down_t, g_scale, down_scale, s.dtype, ctx.pingpong)  # dy·down, (N, F)
        if ctx.fused_relu2:
            du, du_t, du_scale, h_t = relu2.backward_with_transpose(
                dh, saved_h, h_scale, bounds, down_max_norms
            )  # du·du_scale = dh·2√h
        else:
            h_t = saved_h
            du, du_t, du_scale = relu2.backward(dh, h_t, h_scale, bounds, down_max_norms)
        # dn = du·up, (N, D); ddown = gᵀ·h and dup = duᵀ·n, in fp32
        pairs = [g_t, du_t], [h_t, n_t], [g_scale, du_scale], [h_scale, n_scale]
        dn, ddown, dup = gemm.gemm_fp8_grads(du, up_t, du_scale, up_scale, s.dtype, ctx.pingpong, *pairs)
        ds_or_none = ds if ctx.is_deferred else None
        dx, *dmix = residual_norm.input_grads(dn, s, inv_rms, ds_or_none, None, x0, lambda_, mu)
        # None for 3 switches, 3 fields of NextMix and 2 groups of FP8 tensors; the weights; the fields of the stream.
        return *[None] * 8, dup, ddown, dx, dx if ctx.has_y else None, *dmix, None


@opaque_to_dynamo
def _norm_mlp(*arguments: Any) -> tuple[Tensor, Tensor]:
    return cast(tuple[Tensor, Tensor], NormMLP.apply(*arguments))


def norm_mlp(
    stream: ResidualStream,
    up8: Fp8Weight,
    down8: Fp8Weight,
    up_weight: Tensor,
    down_weight: Tensor,
    *,
    fused_relu2: bool,
    next_mix: NextMix | None = None,
) -> ResidualStream:
    """The stream s with y = down(relu(up(norm(s)))²) to add; with a `next_mix`, y holds the sum."""
    switches = (fused_relu2, up8.pingpong, next_mix is not None)
    weights = (up8.tensors, down8.tensors, up_weight, down_weight)
    s, y = _norm_mlp(*switches, *(next_mix or NextMix()), *weights, *stream)
    return ResidualStream(s if stream.is_deferred else stream.x, y, y_holds_sum=next_mix is not None)


class NormQkvRope(torch.autograd.Function):
    """s, then q, k and v of norm(s) with rotary embedding and QK-norm, (N, heads, head_dim); and `gate_input`, the
    first channels of norm(s), unquantized, which the gate of a value embedding reads.

    With a `gate_weight` (K, channels) the kernel also adds the value embedding to v: each token's row of `table`
    (V, K·head_dim) times 3·sigmoid(gate). Gradients of the table are added to `table_grad`. Where the stream has
    nothing to add, s is x and not returned."""

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
        *stream_and_weights: Any,  # the six fields of a ResidualStream, then the weights of q, k and v
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        stream, weights = ResidualStream(*stream_and_weights[:6]), stream_and_weights[6:]
        w, w_t, w_scale, _ = w8
        s, n, n_t, n_scale, inv_rms = stream.norm_quantize()
        gate_input, gate = first_channels(s, inv_rms, gate_channels), None
        if gate_weight is not None:
            gate = 3 * torch.sigmoid(F.linear(gate_input, gate_weight.to(gate_input.dtype)))
        # (N, (H + 2K)·head_dim): n·wᵀ, with q and k rotated and normed and the gated value embedding added to v; 1/RMS
        # of each head of q and k, (N, H + K), and slots whose maximum is the largest of them
        qkv, head_inv_rms, max_inv_rms = rope_norm.gemm_rope_norm(
            n, w, n_scale, w_scale, s.dtype, pingpong, cos, sin, gate, table, token_ids, heads, kv_heads, gain
        )
        ctx.save_for_backward(
            *(s, inv_rms, stream.x0, stream.lambda_, stream.mu),
            *(n_t, n_scale, w_t, w_scale, qkv, head_inv_rms, cos, sin, max_inv_rms),
            *(gate, gate_weight, table, table_grad, token_ids),
        )
        ctx.heads, ctx.kv_heads, ctx.gain, ctx.pingpong = heads, kv_heads, gain, pingpong
        ctx.is_deferred, ctx.has_y = stream.is_deferred, stream.y is not None
        ctx.outputs = [weight.shape[0] for weight in weights]
        q, k, v = qkv.unflatten(-1, (heads + 2 * kv_heads, -1)).split([heads, kv_heads, kv_heads], dim=1)
        return s if stream.is_deferred else s.new_empty(0), q, k, v, gate_input

    @staticmethod
    def backward(
        ctx: Any, ds: Tensor, dq: Tensor, dk: Tensor, dv: Tensor, dgate_input: Tensor
    ) -> tuple[Tensor | None, ...]:
        s, inv_rms, x0, lambda_, mu, *rest = ctx.saved_tensors
        n_t, n_scale, w_t, w_scale, qkv, head_inv_rms, cos, sin, max_inv_rms, *rest = rest
        gate, gate_weight, table, table_grad, token_ids = rest
        gradients = (dq.contiguous(), dk.contiguous(), dv.contiguous())
        dgate_weight: Tensor | None = None
        if gate is not None:
            dgate = embedding_grad.gated_embedding_backward(table_grad, gradients[2], gate, table, token_ids)
            wide = gate.float()
            inner = (dgate.float() * wide * (1 - wide / 3)).to(s.dtype)  # through the sigmoid
            dgate_weight = (inner.t() @ first_channels(s, inv_rms, gate_weight.shape[1])).float()
            dgate_input = dgate_input + inner @ gate_weight.to(s.dtype)
        # g·g_scale = the gradient of n·wᵀ, (N, (H + 2K)·head_dim) in e5m2
        g, g_t, g_scale = rope_norm.backward_fp8(
            qkv, head_inv_rms, cos, sin, *gradients, max_inv_rms, ctx.heads, ctx.kv_heads, ctx.gain
        )
        dn, dw = gemm.gemm_fp8_grads(  # g·w, (N, D), and gᵀ·n in fp32
            g, w_t, g_scale, w_scale, s.dtype, ctx.pingpong, [g_t], [n_t], [g_scale], [n_scale]
        )
        ds_or_none = ds if ctx.is_deferred else None
        dx, *dmix = residual_norm.input_grads(dn, s, inv_rms, ds_or_none, dgate_input, x0, lambda_, mu)
        dstream = dx, dx if ctx.has_y else None, *dmix, None
        # None for the FP8 tensors, cos, sin and 5 numbers; gate_weight; None for table, table_grad and token_ids; the
        # fields of the stream; the weights of q, k and v.
        return *[None] * 8, dgate_weight, *[None] * 3, *dstream, *dw.split(ctx.outputs)


@opaque_to_dynamo
def _norm_qkv_rope(*arguments: Any) -> tuple[Tensor, ...]:
    return cast(tuple[Tensor, ...], NormQkvRope.apply(*arguments))


def norm_qkv_rope(
    stream: ResidualStream,
    qkv8: Fp8Weight,
    weights: Sequence[Tensor],  # of q, k and v
    rope: tuple[Tensor, Tensor],
    heads: tuple[int, int, float],  # H, K and the gain of QK-norm
    gate_channels: int,
    value_embedding: Sequence[Tensor] | None = None,  # gate_weight, table, table_grad, token_ids
) -> tuple[Tensor, ...]:
    """s, q, k, v and `gate_input`, as `NormQkvRope` describes them."""
    options = (gate_channels, *heads, qkv8.pingpong, *(value_embedding or (None,) * 4))
    s, *rest = _norm_qkv_rope(qkv8.tensors, *rope, *options, *stream, *weights)
    return s if stream.is_deferred else stream.x, *rest


def first_channels(s: Tensor, inv_rms: Tensor, channels: int) -> Tensor:
    """Of norm(s)."""
    return (s[:, :channels].float() * inv_rms[:, None]).to(s.dtype)
