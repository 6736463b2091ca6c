"""Eight bits: each kernel against float64, the bounds that scales rest on, and a model that learns with them."""

import math
from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch
import torch.nn.functional as F
from near import assert_values_are_added, normed, relative_error

from nanorun.config import NORM_EPSILON, scale_model
from nanorun.model.fast.loss import fp8_loss
from nanorun.model.fast.path import FastPath, unsupported
from nanorun.model.fast.recipe import PLAIN_RECIPE, Recipe, consistent
from nanorun.model.gpt import GPT
from nanorun.model.loss import IGNORE, plain_loss

pytest.importorskip("triton", reason="Triton is not installed")
from nanorun.model.fast import layers
from nanorun.model.fast.layers import ResidualStream
from nanorun.model.kernels import fp8, relu2, residual_norm, rope_norm
from nanorun.model.kernels.rope_norm.reference import rope_norm as rope_norm_reference
from nanorun.model.kernels.softcap_loss import softcap_loss_fp8

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ODD = [(33, 32), (130, 144), (1, 16), (257, 48)]  # more than a tile, less than one, no multiple of 16


def draw(*shape, seed=0, dtype=torch.float32, size=1.0):
    dice = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=dice) * size).to(DEVICE, dtype)


def meant(q, unit):
    return q.double() * unit.double()


def copied(*weights):
    copies = fp8.Fp8Weight(sum(w.shape[0] for w in weights), weights[0].shape[1]).to(DEVICE)
    copies.requantize(*weights)
    return copies


@pytest.fixture(params=["all rows", "every eighth row"])
def looked_at(request, monkeypatch):
    """What the scale of a gradient rests on: in tests, all rows unless few are made to count as very many."""
    if request.param != "all rows":
        monkeypatch.setattr(fp8.kernel, "AMAX_MIN_ROWS", 4)


def assert_both_ways(q, qt):
    rows = q.shape[0]
    assert qt.shape == (q.shape[1], -(-rows // 16) * 16)
    assert torch.equal(qt[:, :rows].float().T.nan_to_num(), q.float().nan_to_num())
    assert qt[:, rows:].float().eq(0).all()


@pytest.mark.parametrize("shape", ODD, ids=str)
@pytest.mark.parametrize("dtype", [fp8.E4M3, fp8.E5M2])
@pytest.mark.parametrize("size", [1e-12, 1.0, 3e7])
def test_what_is_quantized_is_rounded_to_nearest_and_written_both_ways(shape, dtype, size):
    x = draw(*shape, size=size)
    q, qt, unit = fp8.quantize(x, fp8.amax_and_row_norm(x), 0.0, dtype)
    assert_both_ways(q, qt)
    assert torch.equal(q.float(), (x / unit).half().to(dtype).float())
    assert torch.frexp(unit).mantissa.item() == 0.5, "a power of two"
    largest = (x / unit).abs().max().item()
    assert fp8.FP8_MAX[dtype] / 2 < largest <= fp8.FP8_MAX[dtype]


def test_the_measure_is_the_largest_entry_and_the_longest_row():
    x = draw(100, 80, dtype=torch.bfloat16)
    largest, longest = fp8.amax_and_row_norm(x)
    assert largest == x.abs().max()
    torch.testing.assert_close(longest, x.float().norm(dim=1).max())


def test_of_very_many_rows_every_eighth_is_measured_with_a_reserve_and_a_weight_s_all(monkeypatch):
    monkeypatch.setattr(fp8.kernel, "AMAX_MIN_ROWS", 10)
    x = draw(100, 80, dtype=torch.bfloat16)
    x[8 * 5 + 3] *= 1000  # between those that are looked at
    largest, longest = fp8.amax_and_row_norm(x)
    assert largest == fp8.kernel.AMAX_HEADROOM * x[::8].abs().max()
    torch.testing.assert_close(longest, fp8.kernel.AMAX_HEADROOM * x[::8].float().norm(dim=1).max())
    assert fp8.kernel.exact_amax_and_row_norm(x)[0] == x.abs().max()
    assert [fp8.kernel.amax_stride(rows) for rows in (0, 19, 20, 79, 80, 10**6)] == [1, 1, 2, 7, 8, 8]


def test_zeros_stay_zeros_and_what_is_no_number_stays_none():
    x = torch.zeros(20, 16, device=DEVICE)
    q, _, unit = fp8.quantize(x, fp8.amax_and_row_norm(x), 0.0, fp8.E5M2)
    assert unit == 1
    assert q.float().eq(0).all()
    x[3, 4] = float("nan")
    q, qt, _ = fp8.quantize(x, fp8.amax_and_row_norm(x), 0.0, fp8.E5M2)
    assert q.float().isnan().sum() == qt.float().isnan().sum() == 1
    x[3, 4] = float("inf")
    q, _, unit = fp8.quantize(x, fp8.amax_and_row_norm(x), 0.0, fp8.E5M2)
    assert not meant(q, unit).isfinite().all(), "the guard must see it"


@pytest.mark.parametrize("shape", ODD, ids=str)
def test_a_norm_is_quantized_as_float64_norms_it(shape):
    x = draw(*shape, dtype=torch.bfloat16, size=5.0)
    x[0] = 0
    x[0, 3] = 7  # all in one entry, the largest that a norm can leave
    q, qt, unit, inverse = residual_norm.norm_quantize(x)
    assert_both_ways(q, qt)
    truth = normed(x.double())
    assert relative_error(meant(q, unit), truth) < 0.035
    assert meant(q, unit).max() == pytest.approx(shape[1] ** 0.5, rel=0.07)
    torch.testing.assert_close(inverse.double(), (x.double().square().mean(1) + NORM_EPSILON).rsqrt())


@pytest.mark.parametrize("shape", ODD, ids=str)
def test_relu_squared_is_quantized_and_its_gradient_follows_from_it(shape):
    rows, width = shape
    weight = draw(4 * width, width, size=width**-0.5)
    copies = copied(weight)
    u = (normed(draw(*shape, seed=1)) @ weight.T).bfloat16()
    h, ht, unit = relu2.quantize(u, copies.max_norms, width)
    assert_both_ways(h, ht)
    assert relative_error(meant(h, unit), F.relu(u.double()).square()) < 0.04
    down = draw(width, 4 * width, seed=2)
    g = draw(rows, width, seed=3, size=1e-6)
    dh = (g @ down).bfloat16()
    du, dut, du_unit = relu2.backward(dh, ht, unit, fp8.amax_and_row_norm(g), copied(down).max_norms)
    turning = relu2.backward_with_transpose(dh, h, unit, fp8.amax_and_row_norm(g), copied(down).max_norms)
    for one, other in zip(turning, (du, dut, du_unit, ht), strict=True):
        assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))
    assert_both_ways(du, dut)
    assert relative_error(meant(du, du_unit), 2 * F.relu(u.double()) * dh.double()) < 0.09
    assert du.float().abs().max() <= fp8.FP8_MAX[fp8.E5M2]


def test_an_input_that_is_a_row_of_weights_is_clipped_not_lost():
    weight = draw(64, 16)
    x = weight[weight.norm(dim=1).argmax()][None]
    u = (normed(x) @ weight.T).bfloat16()
    h, _, unit = relu2.quantize(u, copied(weight).max_norms, 16)
    assert u.max().double().square() / 4 == pytest.approx(meant(h, unit).max().item(), rel=0.5)
    assert h.float().isfinite().all()


@pytest.mark.parametrize("shape", [(33, 32), (130, 144)], ids=str)
def test_the_mlp_agrees_with_float64_forward_and_backward(shape, looked_at):
    rows, width = shape
    x = draw(1, rows, width, dtype=torch.bfloat16, size=3.0).requires_grad_()
    up = draw(4 * width, width, seed=1, size=width**-0.5).requires_grad_()
    down = draw(width, 4 * width, seed=2, size=0.1).requires_grad_()
    above = draw(1, rows, width, seed=3, size=1e-7)
    fast = layers.norm_mlp(ResidualStream(x), copied(up), copied(down), up, down, False, None).delta
    (fast.float() * above).sum().backward()
    exact = [t.detach().double().requires_grad_() for t in (x, up, down)]
    truth = F.linear(F.relu(F.linear(normed(exact[0]), exact[1])).square(), exact[2])
    (truth * above).sum().backward()
    assert relative_error(fast, truth) < 0.08
    for one, other in zip((x, up, down), exact, strict=True):
        assert relative_error(one.grad, other.grad) < 0.13


@pytest.mark.parametrize("shape", [(2, 33, 2, 2, 32), (1, 70, 4, 2, 16), (3, 5, 2, 1, 64)], ids=str)
@pytest.mark.parametrize("own_angles", [False, True])
def test_eight_bit_queries_keys_and_values_agree_with_float64(shape, own_angles, looked_at):
    batch, time, heads, kv_heads, dim = shape
    width = heads * dim
    x = draw(batch, time, width, dtype=torch.bfloat16, size=3.0).requires_grad_()
    sizes = (width, kv_heads * dim, kv_heads * dim)
    weights = [draw(n, width, seed=i, size=width**-0.5).requires_grad_() for i, n in enumerate(sizes)]
    angle = draw(*((batch, time) if own_angles else (time,)), dim // 2, seed=7)
    cos, sin = angle.cos().bfloat16(), angle.sin().bfloat16()
    _, *fast = layers.norm_qkv_rope(
        ResidualStream(x), copied(*weights), weights, 12, cos, sin, heads, kv_heads, 1.2
    )
    exact = [t.detach().double().requires_grad_() for t in (x, *weights)]
    n = normed(exact[0])
    mixed = F.linear(n, torch.cat(exact[1:]))
    truth = (*rope_norm_reference(mixed, cos.double(), sin.double(), heads, kv_heads, 1.2), n[..., :12])
    above = [draw(*out.shape, seed=i, size=1e-7 * 30**i) for i, out in enumerate(truth)]
    for outs in (fast, truth):
        sum((out.double() * weight).sum() for out, weight in zip(outs, above, strict=True)).backward()
    for one, other in zip(fast, truth, strict=True):
        assert one.shape == other.shape
        assert relative_error(one, other) < 0.06
    for one, other in zip((x, *weights), exact, strict=True):
        assert relative_error(one.grad, other.grad) < 0.12


@pytest.mark.parametrize("shape", [(2, 33, 2, 2, 32), (1, 70, 4, 2, 16), (3, 5, 2, 1, 64)], ids=str)
def test_values_added_on_the_way_agree_with_float64(shape):
    assert_values_are_added(layers.norm_qkv_rope, draw, copied, shape)


def test_the_bound_on_gradients_of_queries_and_keys_holds_for_a_tiny_head():
    qkv = draw(20, 3 * 32, dtype=torch.bfloat16)
    qkv[3, :32] *= 1e-4  # a query that the norm blows up
    angle = torch.zeros(20, 16, device=DEVICE, dtype=torch.bfloat16)
    turned = qkv.clone()
    inverses, steepest = rope_norm.rope_norm_inplace(turned, angle.cos(), angle, None, None, None, 1, 1, 1.2)
    inverse = (qkv.float()[:, :64].view(20, 2, 32).square().mean(-1) + NORM_EPSILON).rsqrt()
    torch.testing.assert_close(inverses, inverse)
    torch.testing.assert_close(steepest.max(), inverse.max())
    gradients = [draw(20, 1, 32, seed=i, dtype=torch.bfloat16) for i in range(3)]
    g, gt, unit = rope_norm.backward_fp8(
        turned, inverses, angle.cos(), angle, *gradients, steepest, 1, 1, 1.2
    )
    assert_both_ways(g, gt)
    assert g.float().abs().max() <= fp8.FP8_MAX[fp8.E5M2]
    truth = rope_norm.kernel.rope_norm_backward(
        qkv.float(), angle.cos(), angle, *[d.float() for d in gradients], 1, 1, 1.2
    )
    assert relative_error(meant(g, unit), truth) < 0.1
    assert relative_error(meant(g, unit)[:, 64:], truth[:, 64:]) < 0.08, (
        "small ones beside it keep their precision"
    )


@pytest.mark.parametrize("tokens", [1, 15, 33, 70])
def test_the_gradients_of_queries_keys_and_values_are_each_looked_at_to_the_last_sampled_token(
    tokens, monkeypatch
):
    monkeypatch.setattr(fp8.kernel, "AMAX_MIN_ROWS", 4)
    monkeypatch.setattr(
        rope_norm.kernel_fp8, "AMAX_NUMEL", 64
    )  # many programs, none of them with whole tokens
    heads, kv_heads, dim, every = 3, 1, 16, fp8.kernel.amax_stride(tokens)
    turned = draw(tokens, (heads + 2 * kv_heads) * dim, dtype=torch.bfloat16)
    angle = torch.zeros(tokens, dim // 2, device=DEVICE, dtype=torch.bfloat16)
    inverses, steepest = torch.ones(tokens, heads + kv_heads, device=DEVICE), torch.ones(64, device=DEVICE)
    last = (tokens - 1) // every * every
    for which, reach in ((0, dim**0.5), (1, dim**0.5), (2, 1)):
        gradients = [draw(tokens, n, dim, seed=n, dtype=torch.bfloat16) for n in (heads, kv_heads, kv_heads)]
        gradients[which][last, -1, -1] = 1000
        *_, unit = rope_norm.backward_fp8(
            turned, inverses, angle.cos(), angle, *gradients, steepest, heads, kv_heads, 1.0
        )
        bound = 1000 * reach * (fp8.kernel.AMAX_HEADROOM if every > 1 else 1) / fp8.FP8_MAX[fp8.E5M2]
        assert unit.item() == 2 ** math.ceil(math.log2(bound))


@pytest.mark.parametrize("sizes", [(97, 128, 33), (300, 320, 130)], ids=str)
def test_the_gradient_of_logits_agrees_with_float64_both_ways(sizes):
    vocab, padded, rows = sizes
    logits = draw(rows, padded, dtype=torch.bfloat16, size=6.0)
    targets = torch.randint(-1, vocab, (rows,), generator=torch.Generator().manual_seed(1)).to(DEVICE)
    gradient = torch.full((64 + rows, padded), 1.0, device=DEVICE).to(fp8.E5M2)
    turned = torch.full((padded, 64 + fp8.padded(rows)), 1.0, device=DEVICE).to(fp8.E5M2)
    losses = torch.empty(logits.shape[0], device=DEVICE)
    unit = softcap_loss_fp8(logits, targets, 15.0, vocab, losses, gradient, turned, 64)
    q = gradient[64:]
    assert_both_ways(q, turned[:, 64:])
    assert turned[:, :64].float().eq(1).all(), "another chunk's"
    assert gradient[:64].float().eq(1).all(), "another chunk's"
    exact = logits.double()[:, :vocab].requires_grad_()
    truth = F.cross_entropy(15 * torch.tanh(exact / 15), targets, ignore_index=IGNORE, reduction="none")
    truth.sum().backward()
    torch.testing.assert_close(losses.double(), truth.detach(), rtol=5e-3, atol=5e-3)
    assert relative_error(meant(q, unit)[:, :vocab], exact.grad) < 0.07
    assert q.float()[:, vocab:].eq(0).all()
    assert q.float()[targets == IGNORE].eq(0).all()


@pytest.mark.parametrize(("chunk", "piece"), [(None, None), (16, None), (25, 16), (48, 32)])
@pytest.mark.parametrize("exact", [False, True])
def test_the_loss_with_its_head_in_eight_bits_agrees_with_float64(chunk, piece, exact, monkeypatch):
    if piece is not None:
        monkeypatch.setattr("nanorun.model.fast.loss.SLICE_LOGITS", piece * 128)
    x = normed(draw(2, 50, 64)).bfloat16().requires_grad_()
    weight = draw(128, 64, seed=1, size=0.2).requires_grad_()
    targets = torch.randint(-1, 100, (2, 50), generator=torch.Generator().manual_seed(1)).to(DEVICE)
    wide = [x.detach().double().requires_grad_(), weight.detach().double().requires_grad_()]
    fast = 0.37 * fp8_loss(x, weight, targets, copied(weight), 15.0, 100, exact, chunk)
    truth = 0.37 * plain_loss(wide[0], wide[1], targets, 15.0, 100)
    fast.backward()
    truth.backward()
    assert fast.item() == pytest.approx(truth.item(), rel=3e-4 if exact else 3e-3)
    assert relative_error(x.grad, wide[0].grad) < 0.12
    assert relative_error(weight.grad, wide[1].grad) < 0.12
    assert weight.grad[100:].eq(0).all()


def small(**changes):
    config = scale_model(2, 100, context=32, dim=64, heads=2, kv_heads=2, short_window=16)
    return replace(config, **changes)


def built(config, recipe=PLAIN_RECIPE):
    """The plain model, or its fast path."""
    torch.manual_seed(0)
    model = GPT(config, dtype=torch.bfloat16).to(DEVICE)
    model.init_weights()
    with torch.no_grad():
        for block in model.layers():  # zero at first, so that nothing behind them would be tested
            torch.nn.init.normal_(block.attention.out.weight, std=0.1)
            torch.nn.init.normal_(block.mlp.down.weight, std=0.1)
    return model if recipe == PLAIN_RECIPE else FastPath(model, recipe)


def recipe_with(**changes):
    """FP8 without quack and without gradients that accumulate in place, unless changed."""
    usual = {"pingpong": False, "fused_relu2": False, "fused_residual": False, "sparse_tables": False}
    return consistent(Recipe(**{"fp8": "all", **usual, **changes}))


def parameters_of(path):
    """By name, of the plain model or of the model inside a fast path."""
    return dict((path.model if isinstance(path, FastPath) else path).named_parameters())


def rows_of_text(rows=2):
    tokens = torch.randint(0, 100, (rows, 33), generator=torch.Generator().manual_seed(5)).to(DEVICE)
    return tokens[:, :-1], tokens[:, 1:]


@pytest.mark.parametrize("fp8_mode", ["mlp", "layers", "head", "all"])
@pytest.mark.parametrize("recompute", [False, True])
def test_the_fast_path_in_fp8_has_nearly_the_loss_and_gradients_of_the_plain_model(fp8_mode, recompute):
    plain, fast = built(small()), built(small(), recipe_with(fp8=fp8_mode, recompute=recompute))
    losses = [path(*rows_of_text()) for path in (plain, fast)]
    for loss in losses:
        (loss / 64).backward()
    assert losses[1].item() == pytest.approx(losses[0].item(), rel=2e-3)
    assert losses[0].item() != losses[1].item()
    truth = parameters_of(plain)
    for name, param in parameters_of(fast).items():
        if param.dim() == 2 and "gate" not in name:
            assert relative_error(param.grad, truth[name].grad) < 0.3, name


def test_fp8_weights_follow_the_weights_when_refreshed():
    path = built(small(), recipe_with())
    before = path(*rows_of_text()).item()
    with torch.no_grad():
        for param in path.model.parameters():
            param.mul_(1.5)
    stale = path(*rows_of_text()).item()
    path.refresh()
    assert len({before, stale, path(*rows_of_text()).item()}) == 3


@pytest.mark.parametrize(
    "recipe", [recipe_with(sparse_tables=True), recipe_with(fp8="none", sparse_tables=True)]
)
def test_gradients_of_tables_that_accumulate_in_place_are_those_of_autograd_and_restart_at_zero(recipe):
    paths = [built(small(), replace(recipe, sparse_tables=way)) for way in (False, True)]
    for path in paths:
        for _ in range(2):
            path(*rows_of_text()).backward()
    truth = parameters_of(paths[0])
    for name, param in parameters_of(paths[1]).items():
        if "embed" in name:
            assert relative_error(param.grad, truth[name].grad) < 0.02, name
    paths[1].refresh()
    assert paths[1].model.embed.weight.grad.eq(0).all()


def assert_compiled_gives_the_same(model, other, times=2):
    torch._dynamo.reset()
    backend = "inductor" if DEVICE.type == "cuda" else "aot_eager"
    compiled = torch.compile(other, dynamic=False, fullgraph=True, backend=backend)
    for _ in range(times):
        losses = [forward(*rows_of_text()) / 64 for forward in (model, compiled)]
        for loss in losses:
            loss.backward()
    assert losses[1].item() == pytest.approx(losses[0].item(), rel=1e-3)
    truth = parameters_of(model)
    for name, param in parameters_of(other).items():
        assert (param.grad - truth[name].grad).norm() <= 0.02 * truth[name].grad.norm(), name


def test_compiled_it_is_one_graph_and_gives_the_same():
    assert_compiled_gives_the_same(built(small(), recipe_with()), built(small(), recipe_with()))


EPILOGUES = ("pingpong", "fused_relu2", "fused_residual")


def five_layers(**changes):
    sizes = {"context": 32, "dim": 64, "heads": 2, "kv_heads": 2, "short_window": 16}
    return replace(scale_model(5, 128, **sizes), **changes)


def recipe_of(chosen=EPILOGUES, **changes):
    return recipe_with(**{name: name in chosen for name in EPILOGUES}, **changes)


def needs_products():
    if DEVICE.type == "cuda" and (find_spec("quack") is None or torch.cuda.get_device_capability()[0] != 9):
        pytest.skip("quack's products are for Hopper, and a package (pip install nanorun[flash])")


def gradients(path):
    (path(*rows_of_text()) / 64).backward()
    return {name: param.grad.double() for name, param in parameters_of(path).items()}


@pytest.mark.parametrize(
    ("chosen", "recipe", "config", "fused_residual"),
    [
        (("pingpong",), {}, {}, False),
        (("fused_relu2",), {}, {}, False),
        (("fused_residual",), {}, {}, True),
        (EPILOGUES, {}, {}, True),
        (EPILOGUES, {"recompute": True}, {}, True),
        (EPILOGUES, {}, {"kv_heads": 1, "vocab_size": 100}, True),
        (EPILOGUES, {}, {"residual_scalars": False}, True),
        (("fused_residual",), {}, {"residual_scalars": False}, True),
        (EPILOGUES, {"fused_rope": False}, {}, False),
        (EPILOGUES, {"fused_add_norm": False}, {}, False),
        (EPILOGUES, {"fp8": "mlp"}, {}, False),
    ],
    ids=str,
)
def test_gemms_with_epilogues_train_as_those_without(chosen, recipe, config, fused_residual):
    needs_products()
    model = five_layers(**config)
    path = built(model, recipe_of(chosen, **recipe))
    assert path.recipe.fused_residual == fused_residual
    assert path.recipe.fused_relu2 == ("fused_relu2" in chosen)
    assert path.up8[0].pingpong == ("pingpong" in chosen)
    truth, together = gradients(built(model)), gradients(path)
    apart = gradients(built(model, recipe_of((), **recipe)))
    for name, exact in truth.items():
        if exact.numel() > 1:  # a single number's error says nothing
            size = exact.norm()
            usual = (apart[name] - exact).norm()
            chance = 0.02 if exact.numel() > 64 else 0.3  # of a few numbers, each a sum that all but cancels
            assert (together[name] - exact).norm() <= 1.3 * usual + chance * size, name


def test_compiled_a_path_with_epilogues_is_one_graph_and_gives_the_same():
    needs_products()
    assert_compiled_gives_the_same(*(built(five_layers(), recipe_of()) for _ in range(2)), times=1)


def test_a_model_that_the_kernels_do_not_take_is_rejected_by_name():
    assert unsupported(five_layers(), recipe_of()) == []
    assert unsupported(five_layers(dim=96), recipe_of()) == ["heads=2"], "heads of 48"
    assert unsupported(five_layers(softcap=0.0), recipe_of()) == ["softcap=0.0"]
    with pytest.raises(ValueError, match="heads=2"):
        built(five_layers(dim=96), recipe_of())
