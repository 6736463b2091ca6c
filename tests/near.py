"""Comparisons of kernels with float64, for tests with and without a GPU."""

import torch
import torch.nn.functional as F

from nanorun.config import NORM_EPSILON
from nanorun.model.fast import half_blocks
from nanorun.model.fast.half_blocks import ResidualStream
from nanorun.model.fast.loss import fp8_loss_and_gradients
from nanorun.model.kernels import embedding_grad
from nanorun.model.kernels.rope_norm.reference import rope_norm as rope_norm_reference
from nanorun.model.loss import attach_gradients


def relative_error(fast, truth):
    return ((fast.double() - truth.double()).norm() / truth.double().norm()).item()


def normed(x):
    return F.rms_norm(x, (x.shape[-1],), eps=NORM_EPSILON)


def assert_residual_grads_near(gradients, exact, tolerance):
    """Gradients of x0, λ and μ. The last two are sums that may nearly cancel, so their error is relative to the size of
    the summands."""
    dx0, *scalars = gradients
    if exact.x0 is None:
        assert gradients == [None] * 3
        return
    assert relative_error(dx0, exact.x0.grad) < tolerance
    size = exact.x.grad.norm() * exact.x0.norm()
    for ours, expected in zip(scalars, exact[3:5], strict=True):
        assert ours.shape == expected.shape
        assert (ours - expected.grad).abs() < tolerance / 4 * size


def norm_mlp(x, up8, down8, up, down, fused_relu2=False):
    """The MLP's output for a residual stream x (..., D) that has nothing to add."""
    stream = ResidualStream(x.flatten(0, -2))
    return half_blocks.norm_mlp(stream, up8, down8, up, down, fused_relu2=fused_relu2).y.view(x.shape)


def norm_qkv_rope(x, qkv8, weights, channels, cos, sin, heads, kv_heads, gain, value_embedding=None):
    """q, k, v and the gate's input for a residual stream x (B, T, D) that has nothing to add."""
    stream, heads = ResidualStream(x.flatten(0, -2)), (heads, kv_heads, gain)
    _, *qkv, gate_input = half_blocks.norm_qkv_rope(
        stream, qkv8, weights, (cos, sin), heads, channels, value_embedding
    )
    return *(each.view(*x.shape[:2], -1, each.size(-1)) for each in qkv), gate_input.view(*x.shape[:2], -1)


def fp8_loss(x, weight, targets, head8, softcap, vocab_size, exact_logits=False, chunk_tokens=None):
    """The summed loss of (..., D) hidden states with a head in FP8."""
    x, copies = x.flatten(0, -2), (head8.data, head8.data_t, head8.scale)
    options = (softcap, vocab_size, exact_logits, head8.pingpong, chunk_tokens)
    with torch.no_grad():
        loss, dx, dweight = fp8_loss_and_gradients(x, weight, targets.flatten(), *copies, *options)
    return attach_gradients(loss, x, weight, dx, dweight)


def assert_adds_value_embeddings(norm_qkv_rope, draw, fp8_weight, shape):
    """Outputs and gradients of `norm_qkv_rope`, for (batch, time, heads, kv_heads, head_dim)."""
    batch, time, heads, kv_heads, dim = shape
    width, kv_width = heads * dim, kv_heads * dim
    x = draw(batch, time, width, dtype=torch.bfloat16, size=3.0).requires_grad_()
    sizes = (width, kv_width, kv_width)
    weights = [draw(n, width, seed=i, size=width**-0.5).requires_grad_() for i, n in enumerate(sizes)]
    gate_weight, table = draw(kv_heads, 12, seed=5).requires_grad_(), draw(20, kv_width, seed=6)
    token_ids = torch.randint(20, (batch, time), device=x.device, dtype=torch.int32)
    angle = draw(time, dim // 2, seed=7)
    cos, sin = angle.cos().bfloat16(), angle.sin().bfloat16()
    grad_buffer = torch.zeros_like(table)
    values = (gate_weight, table, grad_buffer, token_ids.flatten())
    *fast, _ = norm_qkv_rope(x, fp8_weight(*weights), weights, 12, cos, sin, heads, kv_heads, 1.2, values)
    exact = [t.detach().double().requires_grad_() for t in (x, *weights, gate_weight, table)]
    n = normed(exact[0])
    qkv = F.linear(n, torch.cat(exact[1:4]))
    q, k, v = rope_norm_reference(qkv, cos.double(), sin.double(), heads, kv_heads, 1.2)
    gate = 3 * torch.sigmoid(F.linear(n[..., :12], exact[4]))
    truth = [q, k, embedding_grad.reference.add_gated_rows(v, gate, exact[5][token_ids])]
    douts = [draw(*out.shape, seed=i, size=1e-3 * 3**i) for i, out in enumerate(truth)]
    for outs in (fast, truth):
        sum((out.double() * weight).sum() for out, weight in zip(outs, douts, strict=True)).backward()
    for ours, expected in zip(fast, truth, strict=True):
        assert ours.shape == expected.shape
        assert relative_error(ours, expected) < 0.06
    gradients = [x.grad, *(weight.grad for weight in weights), gate_weight.grad, grad_buffer]
    for ours, expected in zip(gradients, exact, strict=True):
        assert relative_error(ours, expected.grad) < 0.12
