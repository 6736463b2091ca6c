"""FP8 kernels against float64, and the bounds that their scales rely on."""

import math

import pytest
import torch
from near import normed, relative_error

from nanorun.config import IGNORE, NORM_EPSILON

pytest.importorskip("triton", reason="Triton is not installed")
from nanorun.model.fast.half_blocks import Fp8Weight
from nanorun.model.kernels import fp8, relu2, residual_norm, rope_norm
from nanorun.model.kernels.fp8 import reference as fp8_reference
from nanorun.model.kernels.fp8.reference import dequantize
from nanorun.model.kernels.relu2 import reference as relu2_reference
from nanorun.model.kernels.residual_norm import reference as residual_norm_reference
from nanorun.model.kernels.rope_norm import reference as rope_norm_reference
from nanorun.model.kernels.softcap_loss import reference as softcap_loss_reference
from nanorun.model.kernels.softcap_loss import softcap_loss, softcap_loss_fp8

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ODD = [(33, 32), (130, 144), (1, 16), (257, 48)]  # more and less than a tile, not multiples of 16


def draw(*shape, seed=0, dtype=torch.float32, size=1.0):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator) * size).to(DEVICE, dtype)


def fp8_weight(*weights):
    weight8 = Fp8Weight(sum(w.shape[0] for w in weights), weights[0].shape[1]).to(DEVICE)
    weight8.requantize(*weights)
    return weight8


def assert_has_transpose(q, q_t):
    rows = q.shape[0]
    assert q_t.shape == (q.shape[1], -(-rows // 16) * 16)
    assert torch.equal(q_t[:, :rows].float().T.nan_to_num(), q.float().nan_to_num())
    assert q_t[:, rows:].float().eq(0).all()


@pytest.mark.parametrize("shape", ODD, ids=str)
@pytest.mark.parametrize("dtype", [fp8.E4M3, fp8.E5M2])
@pytest.mark.parametrize("size", [1e-12, 1.0, 3e7])
def test_quantization_agrees_with_the_reference_and_writes_the_transpose(shape, dtype, size):
    x = draw(*shape, size=size)
    q, q_t, scale = fp8.quantize(x, dtype, amax=fp8.amax_and_row_norm(x))
    assert_has_transpose(q, q_t)
    for ours, expected in zip((q, q_t, scale), fp8_reference.quantize(x, x.abs().max(), dtype), strict=True):
        assert torch.equal(ours.float(), expected.float().view(ours.shape))
    assert torch.frexp(scale).mantissa.item() == 0.5, "not a power of two"
    amax = (x / scale).abs().max().item()
    assert fp8.FP8_MAX[dtype] / 2 < amax <= fp8.FP8_MAX[dtype]


def test_amax_and_row_norm_agree_with_the_reference():
    x = draw(100, 80, dtype=torch.bfloat16)
    torch.testing.assert_close(fp8.amax_and_row_norm(x), fp8_reference.amax_and_row_norm(x))


def test_the_amax_of_many_rows_samples_every_eighth_with_headroom_and_that_of_a_weight_all(monkeypatch):
    monkeypatch.setattr(fp8.kernel, "AMAX_MIN_ROWS", 10)
    x = draw(100, 80, dtype=torch.bfloat16)
    x[8 * 5 + 3] *= 1000  # between the sampled rows
    sampled = fp8.kernel.AMAX_HEADROOM * fp8_reference.amax_and_row_norm(x[::8])
    torch.testing.assert_close(fp8.amax_and_row_norm(x), sampled)
    assert fp8.kernel.amax_of_rows(x, stride=1)[0] == x.abs().max()
    assert [fp8.kernel.amax_stride(rows) for rows in (0, 19, 20, 79, 80, 10**6)] == [1, 1, 2, 7, 8, 8]


def test_zeros_stay_zeros_and_nonfinite_values_stay_nonfinite():
    x = torch.zeros(20, 16, device=DEVICE)
    q, _, scale = fp8.quantize(x, fp8.E5M2, amax=fp8.amax_and_row_norm(x))
    assert scale == 1
    assert q.float().eq(0).all()
    x[3, 4] = float("nan")
    q, q_t, _ = fp8.quantize(x, fp8.E5M2, amax=fp8.amax_and_row_norm(x))
    assert q.float().isnan().sum() == q_t.float().isnan().sum() == 1
    x[3, 4] = float("inf")
    q, _, scale = fp8.quantize(x, fp8.E5M2, amax=fp8.amax_and_row_norm(x))
    assert not dequantize(q, scale).isfinite().all(), "the training guard must see it"


@pytest.mark.parametrize("shape", ODD, ids=str)
def test_norm_quantize_agrees_with_float64(shape):
    x = draw(*shape, dtype=torch.bfloat16, size=5.0)
    x[0] = 0
    x[0, 3] = 7  # the largest entry that a norm can produce
    q, q_t, scale, inv_rms = residual_norm.norm_quantize(x)
    assert_has_transpose(q, q_t)
    _, truth = residual_norm_reference.residual_norm(x.double(), None, None, None, None)
    assert relative_error(dequantize(q, scale), truth) < 0.035
    assert dequantize(q, scale).max() == pytest.approx(shape[1] ** 0.5, rel=0.07)
    torch.testing.assert_close(inv_rms.double(), (x.double().square().mean(1) + NORM_EPSILON).rsqrt())


@pytest.mark.parametrize("shape", ODD, ids=str)
def test_relu2_and_its_gradient_agree_with_float64(shape):
    rows, width = shape
    weight = draw(4 * width, width, size=width**-0.5)
    weight8 = fp8_weight(weight)
    u = (normed(draw(*shape, seed=1)) @ weight.T).bfloat16()
    h, h_t, scale = relu2.quantize(u, weight8.max_norms, width)
    assert_has_transpose(h, h_t)
    assert relative_error(dequantize(h, scale), relu2_reference.relu2(u.double())) < 0.04
    down = draw(width, 4 * width, seed=2)
    g = draw(rows, width, seed=3, size=1e-6)
    dh = (g @ down).bfloat16()
    du, du_t, du_scale = relu2.backward(dh, h_t, scale, fp8.amax_and_row_norm(g), fp8_weight(down).max_norms)
    with_transpose = relu2.backward_with_transpose(
        dh, h, scale, fp8.amax_and_row_norm(g), fp8_weight(down).max_norms
    )
    for ours, expected in zip(with_transpose, (du, du_t, du_scale, h_t), strict=True):
        assert torch.equal(ours.view(torch.uint8), expected.view(torch.uint8))
    assert_has_transpose(du, du_t)
    assert relative_error(dequantize(du, du_scale), relu2_reference.backward(dh.double(), u.double())) < 0.09
    assert du.float().abs().max() <= fp8.FP8_MAX[fp8.E5M2]


def test_relu2_clips_an_input_that_is_parallel_to_a_row_of_the_weight():
    weight = draw(64, 16)
    x = weight[weight.norm(dim=1).argmax()][None]
    u = (normed(x) @ weight.T).bfloat16()
    h, _, scale = relu2.quantize(u, fp8_weight(weight).max_norms, 16)
    assert u.max().double().square() / 4 == pytest.approx(dequantize(h, scale).max().item(), rel=0.5)
    assert h.float().isfinite().all()


def test_the_bound_on_gradients_of_queries_and_keys_holds_for_a_tiny_head():
    qkv = draw(20, 3 * 32, dtype=torch.bfloat16)
    qkv[3, :32] *= 1e-4  # a query that the norm scales up
    angle = torch.zeros(20, 16, device=DEVICE, dtype=torch.bfloat16)
    rotated = qkv.clone()
    inv_rms, max_inv_rms = rope_norm.rope_norm_inplace(
        rotated, angle.cos(), angle, None, None, None, 1, 1, 1.2
    )
    expected_inv_rms = (qkv.float()[:, :64].view(20, 2, 32).square().mean(-1) + NORM_EPSILON).rsqrt()
    torch.testing.assert_close(inv_rms, expected_inv_rms)
    torch.testing.assert_close(max_inv_rms.max(), expected_inv_rms.max())
    gradients = [draw(20, 1, 32, seed=i, dtype=torch.bfloat16) for i in range(3)]
    g, g_t, scale = rope_norm.backward_fp8(
        rotated, inv_rms, angle.cos(), angle, *gradients, max_inv_rms, 1, 1, 1.2
    )
    assert_has_transpose(g, g_t)
    assert g.float().abs().max() <= fp8.FP8_MAX[fp8.E5M2]
    truth = rope_norm.kernel.rope_norm_backward(
        qkv.float(), angle.cos(), angle, *[d.float() for d in gradients], 1, 1, 1.2
    )
    assert relative_error(dequantize(g, scale), truth) < 0.1
    assert relative_error(dequantize(g, scale)[:, 64:], truth[:, 64:]) < 0.08, (
        "small gradients beside it lose their precision"
    )


@pytest.mark.parametrize("tokens", [1, 15, 33, 70])
def test_the_amax_of_each_of_dq_dk_and_dv_includes_the_last_sampled_token(tokens, monkeypatch):
    monkeypatch.setattr(fp8.kernel, "AMAX_MIN_ROWS", 4)
    monkeypatch.setattr(rope_norm.kernel_fp8, "AMAX_NUMEL", 64)  # many programs, none with whole tokens
    heads, kv_heads, dim, stride = 3, 1, 16, fp8.kernel.amax_stride(tokens)
    rotated = draw(tokens, (heads + 2 * kv_heads) * dim, dtype=torch.bfloat16)
    angle = torch.zeros(tokens, dim // 2, device=DEVICE, dtype=torch.bfloat16)
    inv_rms, max_inv_rms = torch.ones(tokens, heads + kv_heads, device=DEVICE), torch.ones(64, device=DEVICE)
    last = (tokens - 1) // stride * stride
    for which, reach in ((0, dim**0.5), (1, dim**0.5), (2, 1)):
        gradients = [draw(tokens, n, dim, seed=n, dtype=torch.bfloat16) for n in (heads, kv_heads, kv_heads)]
        gradients[which][last, -1, -1] = 1000
        *_, scale = rope_norm.backward_fp8(
            rotated, inv_rms, angle.cos(), angle, *gradients, max_inv_rms, heads, kv_heads, 1.0
        )
        bound = 1000 * reach * (fp8.kernel.AMAX_HEADROOM if stride > 1 else 1) / fp8.FP8_MAX[fp8.E5M2]
        assert scale.item() == 2 ** math.ceil(math.log2(bound))


@pytest.mark.parametrize("sizes", [(97, 128, 33), (300, 320, 130)], ids=str)
def test_the_fp8_gradient_of_logits_agrees_with_float64_and_writes_the_transpose(sizes):
    vocab, padded, rows = sizes
    logits = draw(rows, padded, dtype=torch.bfloat16, size=6.0)
    targets = torch.randint(-1, vocab, (rows,), generator=torch.Generator().manual_seed(1)).to(DEVICE)
    gradient = torch.full((64 + rows, padded), 1.0, device=DEVICE).to(fp8.E5M2)
    gradient_t = torch.full((padded, 64 + fp8.padded(rows)), 1.0, device=DEVICE).to(fp8.E5M2)
    losses = torch.empty(logits.shape[0], device=DEVICE)
    scale = softcap_loss_fp8(logits, targets, 15.0, vocab, losses, gradient, gradient_t, 64)
    q = gradient[64:]
    assert_has_transpose(q, gradient_t[:, 64:])
    assert gradient_t[:, :64].float().eq(1).all(), "belongs to another chunk"
    assert gradient[:64].float().eq(1).all(), "belongs to another chunk"
    exact = logits.double().requires_grad_()
    truth = softcap_loss_reference.softcap_loss(exact, targets, 15.0, vocab)
    truth.sum().backward()
    torch.testing.assert_close(losses.double(), truth.detach(), rtol=5e-3, atol=5e-3)
    assert relative_error(dequantize(q, scale), exact.grad) < 0.07
    assert q.float()[:, vocab:].eq(0).all()
    assert q.float()[targets == IGNORE].eq(0).all()


@pytest.mark.parametrize("shape", [(2, 33, 2, 2, 32), (1, 40, 4, 2, 16)], ids=str)
@pytest.mark.parametrize("own_angles", [False, True])
def test_rope_norm_agrees_with_the_reference_forward_and_backward(shape, own_angles):
    batch, time, heads, kv_heads, dim = shape
    qkv = draw(batch, time, (heads + 2 * kv_heads) * dim).requires_grad_()
    exact = qkv.detach().double().requires_grad_()
    angle = draw(*((batch, time) if own_angles else (time,)), dim // 2, seed=7)
    cos, sin = angle.cos(), angle.sin()
    fast = rope_norm.rope_norm(qkv, cos, sin, heads, kv_heads, 1.2)
    truth = rope_norm_reference.rope_norm(exact, cos.double(), sin.double(), heads, kv_heads, 1.2)
    douts = [draw(*out.shape, seed=i) for i, out in enumerate(truth)]
    for outs in (fast, truth):
        sum((out.double() * dout).sum() for out, dout in zip(outs, douts, strict=True)).backward()
    for ours, expected in zip(fast, truth, strict=True):
        assert relative_error(ours, expected) < 1e-6
    assert relative_error(qkv.grad, exact.grad) < 1e-6


@pytest.mark.parametrize("sizes", [(97, 128, 33), (300, 320, 10)], ids=str)
def test_softcap_loss_agrees_with_the_reference_and_overwrites_logits_with_their_gradient(sizes):
    vocab, padded, rows = sizes
    logits = draw(rows, padded, size=6.0)
    targets = torch.randint(-1, vocab, (rows,), generator=torch.Generator().manual_seed(1)).to(DEVICE)
    exact = logits.double().requires_grad_()
    truth = softcap_loss_reference.softcap_loss(exact, targets, 15.0, vocab)
    truth.sum().backward()
    assert relative_error(softcap_loss(logits, targets, 15.0, vocab, True), truth) < 1e-6
    assert relative_error(logits, exact.grad) < 1e-5
    assert logits[targets == IGNORE].eq(0).all()
