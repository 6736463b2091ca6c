"""GEMMs with epilogues (scale, ReLU², residual) against float64 and against the kernels that they replace."""

from importlib.util import find_spec
from typing import Any

import pytest
import torch
from near import norm_mlp
from near import relative_error as relative

from nanorun.config import NORM_EPSILON
from nanorun.model.fast.half_blocks import Fp8Weight
from nanorun.model.kernels import fp8, gemm, relu2, residual_norm

CUDA = torch.device("cuda")
SHAPES = [(256, 128, 512), (1040, 768, 3072), (32_768, 768, 3072), (2064, 1280, 5120), (1001, 768, 2304)]
SHAPES += [(300, 768, 1040)]  # with a partial last tile for either tile width


@pytest.fixture(autouse=True)
def require_quack():
    if find_spec("quack") is None or torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("needs quack (pip install nanorun[flash]) and a Hopper GPU")
    assert gemm.is_supported(CUDA)


def quantized(n, d, f):
    generator = torch.Generator(CUDA).manual_seed(n + d)
    x = torch.randn(n, d, device=CUDA, generator=generator).bfloat16()
    weight = 0.03 * torch.randn(f, d, device=CUDA, generator=generator)
    weight8 = Fp8Weight(f, d).to(CUDA)
    weight8.requantize(weight)
    return *residual_norm.norm_quantize(x), weight8


def gradient(n, d, f):
    """A gradient of (N, D) in e5m2, its scale, and a weight of (D, F)."""
    generator = torch.Generator(CUDA).manual_seed(7)
    dy = 1e-4 * torch.randn(n, d, device=CUDA, generator=generator).bfloat16()
    down = Fp8Weight(d, f).to(CUDA)
    down.requantize(0.02 * torch.randn(d, f, device=CUDA, generator=generator))
    g, _, scale = fp8.quantize(dy, fp8.E5M2, amax=fp8.amax_and_row_norm(dy))
    return g, scale, down


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_pingpong_gemm_agrees_with_float64_as_cublas_does(shape):
    n, _, scale, _, weight8 = quantized(*shape)
    rows = slice(max(shape[0] - 512, 0), shape[0])  # the last rows, where a tile is partial
    truth = (n[rows].double() * scale) @ (weight8.data.double() * weight8.scale).T
    ours = gemm.gemm_fp8_pingpong(n, weight8.data, scale, weight8.scale)
    cublas = fp8.scaled_mm(n, weight8.data, scale, weight8.scale, torch.bfloat16, True)
    assert relative(ours[rows], truth) < max(1.2 * relative(cublas[rows], truth), 0.002)
    g, g_scale, down = gradient(*shape)
    truth = (g[rows].double() * g_scale) @ (down.data_t.double() * down.scale).T
    ours = gemm.gemm_fp8_pingpong(g, down.data_t, g_scale, down.scale)
    cublas = fp8.scaled_mm(g, down.data_t, g_scale, down.scale, torch.bfloat16, True)
    assert relative(ours[rows], truth) < max(1.2 * relative(cublas[rows], truth), 0.002)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_relu2_in_the_epilogue_is_relu2_after_the_gemm(shape):
    n, _, scale, _, weight8 = quantized(*shape)
    h, h_scale = gemm.gemm_fp8_relu2(n, weight8.data, scale, weight8.scale, weight8.max_norms, shape[1])
    u = fp8.scaled_mm(n, weight8.data, scale, weight8.scale, torch.bfloat16, True)
    _, _, expected_scale = relu2.quantize(u, weight8.max_norms, shape[1])
    assert h_scale.item() == expected_scale.item()
    rows = slice(max(shape[0] - 512, 0), shape[0])
    wide = (n[rows].double() * scale) @ (weight8.data.double() * weight8.scale).T
    assert relative(h[rows].double() * h_scale, wide.relu().square()) < 0.04, "rounding to e4m3 alone is 2.7%"


@pytest.mark.parametrize("shape", [(256, 128, 512), (1001, 768, 3072), (32_768, 768, 3072)], ids=str)
@pytest.mark.parametrize("has_x0", [False, True])
def test_the_residual_epilogue_agrees_with_float64(shape, has_x0):
    tokens, width, hidden = shape
    h, _, scale, _, weight8 = quantized(tokens, hidden, width)
    generator = torch.Generator(CUDA).manual_seed(5)
    x, x0 = torch.randn(2, tokens, width, device=CUDA, generator=generator).bfloat16()
    lambda_, mu = torch.tensor([1.125, 0.0625], device=CUDA)
    mix = (x0, lambda_, mu) if has_x0 else (None, None, None)
    ours = gemm.gemm_fp8_residual(h, weight8.data, scale, weight8.scale, x, *mix)
    rows = slice(max(tokens - 512, 0), tokens)
    truth = (h[rows].double() * scale) @ (weight8.data.double() * weight8.scale).T + x[rows].double()
    if has_x0:
        truth = lambda_.double() * truth + mu.double() * x0[rows].double()
    assert relative(ours[rows], truth) < 0.005


@pytest.mark.parametrize("tokens", [256, 1001, 32_768])
def test_gemm_bf16_residual_adds_to_the_residual_and_has_the_gradients_of_a_linear_layer(tokens):
    generator = torch.Generator(CUDA).manual_seed(6)
    x, residual, dy = torch.randn(3, tokens, 768, device=CUDA, generator=generator).bfloat16()
    weight = 0.03 * torch.randn(768, 768, device=CUDA, generator=generator)
    inputs = [x.clone().requires_grad_(), weight.clone().requires_grad_(), residual.clone().requires_grad_()]
    ours = torch.compile(gemm.gemm_bf16_residual, dynamic=False, fullgraph=True)(*inputs)
    ours.backward(dy)
    exact = [x.double().requires_grad_(), weight.bfloat16().double().requires_grad_()]
    truth = exact[0] @ exact[1].T
    truth.backward(dy.double())
    assert relative(ours, truth.detach() + residual.double()) < 0.005
    assert relative(inputs[0].grad, exact[0].grad) < 0.005
    assert relative(inputs[1].grad, exact[1].grad) < 0.005
    assert inputs[2].grad is None, "the residual gets its gradient elsewhere"


def test_nan_stays_nan():
    n, _, scale, _, weight8 = quantized(256, 128, 512)
    n.view(torch.uint8)[3, 5] = 0x7F  # e4m3's NaN
    h, _ = gemm.gemm_fp8_relu2(n, weight8.data, scale, weight8.scale, weight8.max_norms, 128)
    assert h[3].float().isnan().any()
    assert h[:3].float().isfinite().all()


@pytest.mark.parametrize("tokens", [512, 1001])
def test_the_mlp_with_relu2_in_the_epilogue_has_the_gradients_of_one_without(tokens):
    generator = torch.Generator(CUDA).manual_seed(1)
    x = torch.randn(tokens, 768, device=CUDA, generator=generator).bfloat16()
    weights = [
        0.03 * torch.randn(shape, device=CUDA, generator=generator) for shape in ((3072, 768), (768, 3072))
    ]
    dy = torch.randn(tokens, 768, device=CUDA, generator=generator).bfloat16()

    def outputs_and_gradients(fused, pingpong):
        inputs = [each.clone().requires_grad_() for each in (x, *weights)]
        weight8 = [Fp8Weight(*weight.shape, pingpong=pingpong).to(CUDA) for weight in weights]
        for copy, weight in zip(weight8, weights, strict=True):
            copy.requantize(weight)
        compiled: Any = torch.compile(norm_mlp, dynamic=False, fullgraph=True)
        y = compiled(inputs[0], *weight8, *inputs[1:], fused)
        y.backward(dy)
        return [y.detach(), *(each.grad for each in inputs)]

    wide = [each.double().requires_grad_() for each in (x, *weights)]
    normed = torch.nn.functional.rms_norm(wide[0], (768,), eps=NORM_EPSILON)
    truth = (normed @ wide[1].T).relu().square() @ wide[2].T
    truth.backward(dy.double())
    truths = [truth.detach(), *(each.grad for each in wide)]
    separate = [relative(*pair) for pair in zip(outputs_and_gradients(False, False), truths, strict=True)]
    for fused, pingpong in ((True, True), (True, False), (False, True)):
        errors = [
            relative(*pair) for pair in zip(outputs_and_gradients(fused, pingpong), truths, strict=True)
        ]
        assert all(mine < 1.1 * other + 0.002 for mine, other in zip(errors, separate, strict=True)), errors
