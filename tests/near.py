"""Comparisons of kernels with float64, for tests with and without a GPU."""

import torch
import torch.nn.functional as F

from nanorun.config import NORM_EPSILON
from nanorun.model.fast import layers
from nanorun.model.fast.layers import ResidualStream
from nanorun.model.kernels import embedding_grad
from nanorun.model.kernels.rope_norm.reference import rope_norm as rope_norm_reference


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
    values = layers.GatedValues(gate_weight, table, grad_buffer, token_ids)
    inputs = (ResidualStream(x), fp8_weight(*weights), weights, 12, cos, sin, heads, kv_heads, 1.2)
    _, *fast, _ = norm_qkv_rope(*inputs, values)
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
