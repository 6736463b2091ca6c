"""Products that end in ReLU², or in its gradient, against float64 and against the kernels they replace."""

import pytest
import torch

from nanorun.model.kernels import epilogue, fp8

CUDA = torch.device("cuda")
SHAPES = [(256, 128, 512), (1040, 768, 3072), (32_768, 768, 3072), (2064, 1280, 5120)]


@pytest.fixture(autouse=True)
def needs_the_package():
    if not epilogue.works(CUDA):
        pytest.skip("quack's products do not run here (pip install nanorun[flash], on Hopper)")


def drawn(n, d, f):
    dice = torch.Generator(CUDA).manual_seed(n + d)
    x = torch.randn(n, d, device=CUDA, generator=dice).bfloat16()
    weight = 0.03 * torch.randn(f, d, device=CUDA, generator=dice)
    copies = fp8.Copies(f, d).to(CUDA)
    copies.renew(weight)
    return *fp8.norm_quantize(x), copies


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_relu2_in_the_product_is_relu2_behind_it(shape):
    n, _, unit, _, copies = drawn(*shape)
    h, ht, h_unit = epilogue.up_relu2(n, copies.rows, unit, copies.unit, copies.longest, shape[1])
    u = fp8.multiply(n, copies.rows, unit, copies.unit, torch.bfloat16, True)
    _, _, same_unit = fp8.relu2_quantize(u, copies.longest, shape[1])
    assert h_unit.item() == same_unit.item()
    assert torch.equal(ht.view(torch.uint8).T, h.view(torch.uint8))
    rows = slice(0, 512)
    wide = (n[rows].double() * unit) @ (copies.rows.double() * copies.unit).T
    truth = wide.relu().square()
    error = (h[rows].double() * h_unit - truth).norm() / truth.norm()
    assert error < 0.04, "an e4m3's own rounding is 2.7%"


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_gradient_in_the_product_is_the_one_behind_it(shape):
    n, _, unit, _, up = drawn(*shape)
    tokens, width, hidden = shape
    h, ht, h_unit = epilogue.up_relu2(n, up.rows, unit, up.unit, up.longest, width)
    dice = torch.Generator(CUDA).manual_seed(7)
    dy = 1e-4 * torch.randn(tokens, width, device=CUDA, generator=dice).bfloat16()
    down = fp8.Copies(width, hidden).to(CUDA)
    down.renew(0.02 * torch.randn(width, hidden, device=CUDA, generator=dice))
    largest = fp8.measure(dy)
    g, _, g_unit = fp8.quantize(dy, largest, 0.0, fp8.E5M2)
    arguments = (g, down.columns, g_unit, down.unit, ht, h_unit, largest, down.longest)
    du, dut, du_unit = epilogue.down_slope(*arguments)
    dh = fp8.multiply(g, down.columns, g_unit, down.unit, torch.bfloat16, True)
    _, _, same_unit = fp8.relu2_backward(dh, ht, h_unit, largest, down.longest)
    assert du_unit.item() == same_unit.item()
    assert torch.equal(dut.view(torch.uint8).T, du.view(torch.uint8))
    rows = slice(0, 512)
    wide = (g[rows].double() * g_unit) @ (down.columns.double() * down.unit).T
    truth = wide * 2 * (h[rows].double() * h_unit).sqrt()
    error = (du[rows].double() * du_unit - truth).norm() / truth.norm()
    assert error < 0.08, "an e5m2's own rounding is 5.3%"


def test_numbers_that_are_none_stay_so():
    n, _, unit, _, copies = drawn(256, 128, 512)
    n.view(torch.uint8)[3, 5] = 0x7F  # e4m3's NaN
    h, _, _ = epilogue.up_relu2(n, copies.rows, unit, copies.unit, copies.longest, 128)
    assert h[3].float().isnan().any()
    assert h[:3].float().isfinite().all()
