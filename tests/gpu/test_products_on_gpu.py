"""Products that end in a scale, in ReLU² or in a sum, against float64 and against what they replace."""

from importlib.util import find_spec

import pytest
import torch
from near import relative_error as relative

from nanorun.config import NORM_EPSILON
from nanorun.model.fast import layers
from nanorun.model.fast.layers import ResidualStream
from nanorun.model.kernels import fp8, gemm, relu2, residual_norm

CUDA = torch.device("cuda")
SHAPES = [(256, 128, 512), (1040, 768, 3072), (32_768, 768, 3072), (2064, 1280, 5120), (1001, 768, 2304)]
SHAPES += [(300, 768, 1040)]  # whose last tile is cut off, whatever its width


@pytest.fixture(autouse=True)
def needs_the_package():
    if find_spec("quack") is None or torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("quack's products are for Hopper, and a package (pip install nanorun[flash])")
    assert gemm.is_supported(CUDA)


def drawn(n, d, f):
    dice = torch.Generator(CUDA).manual_seed(n + d)
    x = torch.randn(n, d, device=CUDA, generator=dice).bfloat16()
    weight = 0.03 * torch.randn(f, d, device=CUDA, generator=dice)
    copies = fp8.Fp8Weight(f, d).to(CUDA)
    copies.requantize(weight)
    return *residual_norm.norm_quantize(x), copies


def gradient(n, d, f):
    """One of (N, D), in e5m2, and weights to bring it to F."""
    dice = torch.Generator(CUDA).manual_seed(7)
    dy = 1e-4 * torch.randn(n, d, device=CUDA, generator=dice).bfloat16()
    down = fp8.Fp8Weight(d, f).to(CUDA)
    down.requantize(0.02 * torch.randn(d, f, device=CUDA, generator=dice))
    g, _, unit = fp8.quantize(dy, fp8.amax_and_row_norm(dy), 0.0, fp8.E5M2)
    return g, unit, down


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_product_is_what_it_stands_for(shape):
    n, _, unit, _, copies = drawn(*shape)
    rows = slice(max(shape[0] - 512, 0), shape[0])  # the last ones, where a tile is cut off
    truth = (n[rows].double() * unit) @ (copies.data.double() * copies.scale).T
    found = gemm.gemm_fp8_pingpong(n, copies.data, unit, copies.scale)
    library = fp8.scaled_mm(n, copies.data, unit, copies.scale, torch.bfloat16, True)
    assert relative(found[rows], truth) < max(1.2 * relative(library[rows], truth), 0.002)
    g, g_unit, down = gradient(*shape)
    truth = (g[rows].double() * g_unit) @ (down.data_t.double() * down.scale).T
    found = gemm.gemm_fp8_pingpong(g, down.data_t, g_unit, down.scale)
    library = fp8.scaled_mm(g, down.data_t, g_unit, down.scale, torch.bfloat16, True)
    assert relative(found[rows], truth) < max(1.2 * relative(library[rows], truth), 0.002)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_relu2_in_the_product_is_relu2_behind_it(shape):
    n, _, unit, _, copies = drawn(*shape)
    h, h_unit = gemm.gemm_fp8_relu2(n, copies.data, unit, copies.scale, copies.max_norms, shape[1])
    u = fp8.scaled_mm(n, copies.data, unit, copies.scale, torch.bfloat16, True)
    _, _, same_unit = relu2.quantize(u, copies.max_norms, shape[1])
    assert h_unit.item() == same_unit.item()
    rows = slice(max(shape[0] - 512, 0), shape[0])
    wide = (n[rows].double() * unit) @ (copies.data.double() * copies.scale).T
    assert relative(h[rows].double() * h_unit, wide.relu().square()) < 0.04, "an e4m3's own rounding is 2.7%"


@pytest.mark.parametrize("shape", [(256, 128, 512), (1001, 768, 3072), (32_768, 768, 3072)], ids=str)
@pytest.mark.parametrize("mixes", [False, True])
def test_what_a_product_is_added_to_is_in_its_result(shape, mixes):
    tokens, width, hidden = shape
    h, _, unit, _, copies = drawn(tokens, hidden, width)
    dice = torch.Generator(CUDA).manual_seed(5)
    x, start = torch.randn(2, tokens, width, device=CUDA, generator=dice).bfloat16()
    scale, share = torch.tensor([1.125, 0.0625], device=CUDA)
    mixing = (start, scale, share) if mixes else (None, None, None)
    found = gemm.gemm_fp8_residual(h, copies.data, unit, copies.scale, x, *mixing)
    rows = slice(max(tokens - 512, 0), tokens)
    truth = (h[rows].double() * unit) @ (copies.data.double() * copies.scale).T + x[rows].double()
    if mixes:
        truth = scale.double() * truth + share.double() * start[rows].double()
    assert relative(found[rows], truth) < 0.005


@pytest.mark.parametrize("tokens", [256, 1001, 32_768])
def test_a_linear_layer_onto_the_stream_adds_to_it_and_learns_as_without(tokens):
    dice = torch.Generator(CUDA).manual_seed(6)
    x, stream, dy = torch.randn(3, tokens, 768, device=CUDA, generator=dice).bfloat16()
    weight = 0.03 * torch.randn(768, 768, device=CUDA, generator=dice)
    given = [x.clone().requires_grad_(), weight.clone().requires_grad_(), stream.clone().requires_grad_()]
    found = torch.compile(gemm.linear_residual, dynamic=False, fullgraph=True)(*given)
    found.backward(dy)
    exact = [x.double().requires_grad_(), weight.bfloat16().double().requires_grad_()]
    truth = exact[0] @ exact[1].T
    truth.backward(dy.double())
    assert relative(found, truth.detach() + stream.double()) < 0.005
    assert relative(given[0].grad, exact[0].grad) < 0.005
    assert relative(given[1].grad, exact[1].grad) < 0.005
    assert given[2].grad is None, "the stream's gradient goes another way"


def test_numbers_that_are_none_stay_so():
    n, _, unit, _, copies = drawn(256, 128, 512)
    n.view(torch.uint8)[3, 5] = 0x7F  # e4m3's NaN
    h, _ = gemm.gemm_fp8_relu2(n, copies.data, unit, copies.scale, copies.max_norms, 128)
    assert h[3].float().isnan().any()
    assert h[:3].float().isfinite().all()


@pytest.mark.parametrize("tokens", [512, 1001])
def test_an_mlp_with_relu2_in_its_products_learns_as_one_without(tokens):
    dice = torch.Generator(CUDA).manual_seed(1)
    x = torch.randn(tokens, 768, device=CUDA, generator=dice).bfloat16()
    weights = [0.03 * torch.randn(shape, device=CUDA, generator=dice) for shape in ((3072, 768), (768, 3072))]
    dy = torch.randn(tokens, 768, device=CUDA, generator=dice).bfloat16()

    def found(fused, pingpong):
        inputs = [each.clone().requires_grad_() for each in (x, *weights)]
        copies = [fp8.Fp8Weight(*weight.shape, pingpong=pingpong).to(CUDA) for weight in weights]
        for copy, weight in zip(copies, weights, strict=True):
            copy.requantize(weight)
        compiled = torch.compile(layers.norm_mlp, dynamic=False, fullgraph=True)
        y = compiled(ResidualStream(inputs[0]), *copies, *inputs[1:], fused, None).delta
        y.backward(dy)
        return [y.detach(), *(each.grad for each in inputs)]

    wide = [each.double().requires_grad_() for each in (x, *weights)]
    normed = torch.nn.functional.rms_norm(wide[0], (768,), eps=NORM_EPSILON)
    truth = (normed @ wide[1].T).relu().square() @ wide[2].T
    truth.backward(dy.double())
    truths = [truth.detach(), *(each.grad for each in wide)]
    apart = [relative(*pair) for pair in zip(found(False, False), truths, strict=True)]
    for fused, pingpong in ((True, True), (True, False), (False, True)):
        errors = [relative(*pair) for pair in zip(found(fused, pingpong), truths, strict=True)]
        assert all(mine < 1.1 * other + 0.002 for mine, other in zip(errors, apart, strict=True)), errors
