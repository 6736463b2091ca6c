"""The fast training path against float64 and against the plain model: half-blocks, loss, gradients, compilation."""

from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch
import torch.nn.functional as F
from near import assert_adds_value_embeddings, fp8_loss, norm_mlp, norm_qkv_rope, normed, relative_error
from torch.utils._python_dispatch import TorchDispatchMode

from nanorun.config import scale_model
from nanorun.model.fast.half_blocks import Fp8Weight
from nanorun.model.fast.path import FastPath, unsupported
from nanorun.model.fast.recipe import PLAIN_RECIPE, Recipe, consistent
from nanorun.model.gpt import GPT
from nanorun.model.loss import plain_loss

pytest.importorskip("triton", reason="Triton is not installed")
from nanorun.model.fast import loss as fast_loss
from nanorun.model.kernels import fp8
from nanorun.model.kernels.rope_norm.reference import rope_norm as rope_norm_reference

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def draw(*shape, seed=0, dtype=torch.float32, size=1.0):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator) * size).to(DEVICE, dtype)


def fp8_weight(*weights):
    weight8 = Fp8Weight(sum(w.shape[0] for w in weights), weights[0].shape[1]).to(DEVICE)
    weight8.requantize(*weights)
    return weight8


@pytest.fixture(params=["all rows", "every eighth row"])
def sampled_rows(request, monkeypatch):
    """Which rows the amax of a gradient is computed from: all of the few of a test, unless the limit is lowered."""
    if request.param != "all rows":
        monkeypatch.setattr(fp8.kernel, "AMAX_MIN_ROWS", 4)


@pytest.mark.parametrize("shape", [(33, 32), (130, 144)], ids=str)
def test_the_fp8_mlp_agrees_with_float64_forward_and_backward(shape, sampled_rows):
    rows, width = shape
    x = draw(1, rows, width, dtype=torch.bfloat16, size=3.0).requires_grad_()
    up = draw(4 * width, width, seed=1, size=width**-0.5).requires_grad_()
    down = draw(width, 4 * width, seed=2, size=0.1).requires_grad_()
    douts = draw(1, rows, width, seed=3, size=1e-7)
    fast = norm_mlp(x, fp8_weight(up), fp8_weight(down), up, down)
    (fast.float() * douts).sum().backward()
    exact = [t.detach().double().requires_grad_() for t in (x, up, down)]
    truth = F.linear(F.relu(F.linear(normed(exact[0]), exact[1])).square(), exact[2])
    (truth * douts).sum().backward()
    assert relative_error(fast, truth) < 0.08
    for ours, expected in zip((x, up, down), exact, strict=True):
        assert relative_error(ours.grad, expected.grad) < 0.13


@pytest.mark.parametrize("shape", [(2, 33, 2, 2, 32), (1, 70, 4, 2, 16), (3, 5, 2, 1, 64)], ids=str)
@pytest.mark.parametrize("own_angles", [False, True])
def test_fp8_queries_keys_and_values_agree_with_float64(shape, own_angles, sampled_rows):
    batch, time, heads, kv_heads, dim = shape
    width = heads * dim
    x = draw(batch, time, width, dtype=torch.bfloat16, size=3.0).requires_grad_()
    sizes = (width, kv_heads * dim, kv_heads * dim)
    weights = [draw(n, width, seed=i, size=width**-0.5).requires_grad_() for i, n in enumerate(sizes)]
    angle = draw(*((batch, time) if own_angles else (time,)), dim // 2, seed=7)
    cos, sin = angle.cos().bfloat16(), angle.sin().bfloat16()
    fast = norm_qkv_rope(x, fp8_weight(*weights), weights, 12, cos, sin, heads, kv_heads, 1.2)
    exact = [t.detach().double().requires_grad_() for t in (x, *weights)]
    n = normed(exact[0])
    qkv = F.linear(n, torch.cat(exact[1:]))
    truth = (*rope_norm_reference(qkv, cos.double(), sin.double(), heads, kv_heads, 1.2), n[..., :12])
    douts = [draw(*out.shape, seed=i, size=1e-7 * 30**i) for i, out in enumerate(truth)]
    for outs in (fast, truth):
        sum((out.double() * weight).sum() for out, weight in zip(outs, douts, strict=True)).backward()
    for ours, expected in zip(fast, truth, strict=True):
        assert ours.shape == expected.shape
        assert relative_error(ours, expected) < 0.06
    for ours, expected in zip((x, *weights), exact, strict=True):
        assert relative_error(ours.grad, expected.grad) < 0.12


@pytest.mark.parametrize("shape", [(2, 33, 2, 2, 32), (1, 70, 4, 2, 16), (3, 5, 2, 1, 64)], ids=str)
def test_value_embeddings_added_by_the_kernel_agree_with_float64(shape):
    assert_adds_value_embeddings(norm_qkv_rope, draw, fp8_weight, shape)


@pytest.mark.parametrize(("chunk", "rows"), [(None, None), (16, None), (25, 16), (48, 32)])
@pytest.mark.parametrize("exact", [False, True])
def test_the_loss_with_an_fp8_head_agrees_with_float64(chunk, rows, exact, monkeypatch):
    if rows is not None:
        monkeypatch.setattr(fast_loss, "SLICE_LOGITS", rows * 128)
    x = normed(draw(2, 50, 64)).bfloat16().requires_grad_()
    weight = draw(128, 64, seed=1, size=0.2).requires_grad_()
    targets = torch.randint(-1, 100, (2, 50), generator=torch.Generator().manual_seed(1)).to(DEVICE)
    wide = [x.detach().double().requires_grad_(), weight.detach().double().requires_grad_()]
    fast = 0.37 * fp8_loss(x, weight, targets, fp8_weight(weight), 15.0, 100, exact, chunk)
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
        for block in model.layers():  # zero at first, and then no gradient would reach the rest
            torch.nn.init.normal_(block.attention.out.weight, std=0.1)
            torch.nn.init.normal_(block.mlp.down.weight, std=0.1)
    return model if recipe == PLAIN_RECIPE else FastPath(model, recipe)


def recipe_with(**changes):
    """FP8 without quack and without gradients that accumulate in place, unless changed."""
    usual = {
        "pingpong": False,
        "fused_relu2": False,
        "fused_residual": False,
        "inplace_embedding_grads": False,
    }
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
    "recipe",
    [recipe_with(inplace_embedding_grads=True), recipe_with(fp8="none", inplace_embedding_grads=True)],
)
def test_gradients_of_tables_that_accumulate_in_place_are_those_of_autograd_and_restart_at_zero(recipe):
    paths = [built(small(), replace(recipe, inplace_embedding_grads=way)) for way in (False, True)]
    for path in paths:
        for _ in range(2):
            path(*rows_of_text()).backward()
    truth = parameters_of(paths[0])
    for name, param in parameters_of(paths[1]).items():
        if "embed" in name:
            assert relative_error(param.grad, truth[name].grad) < 0.05, name
    paths[1].refresh()
    assert paths[1].model.embed.weight.grad.eq(0).all()


def assert_compiled_gives_the_same(path, compiled_path, times=2):
    torch._dynamo.reset()
    backend = "inductor" if DEVICE.type == "cuda" else "aot_eager"
    compiled = torch.compile(compiled_path, dynamic=False, fullgraph=True, backend=backend)
    for _ in range(times):
        losses = [forward(*rows_of_text()) / 64 for forward in (path, compiled)]
        for loss in losses:
            loss.backward()
    assert losses[1].item() == pytest.approx(losses[0].item(), rel=1e-3)
    truth = parameters_of(path)
    for name, param in parameters_of(compiled_path).items():
        assert (param.grad - truth[name].grad).norm() <= 0.02 * truth[name].grad.norm(), name


def test_compiled_it_is_one_graph_and_gives_the_same():
    assert_compiled_gives_the_same(built(small(), recipe_with()), built(small(), recipe_with()))


EPILOGUES = ("pingpong", "fused_relu2", "fused_residual")


def five_layers(**changes):
    sizes = {"context": 32, "dim": 64, "heads": 2, "kv_heads": 2, "short_window": 16}
    return replace(scale_model(5, 128, **sizes), **changes)


def recipe_of(chosen=EPILOGUES, **changes):
    return recipe_with(**{name: name in chosen for name in EPILOGUES}, **changes)


def require_quack():
    if DEVICE.type == "cuda" and (find_spec("quack") is None or torch.cuda.get_device_capability()[0] != 9):
        pytest.skip("needs quack (pip install nanorun[flash]) and a Hopper GPU")


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
    require_quack()
    model = five_layers(**config)
    path = built(model, recipe_of(chosen, **recipe))
    assert path.recipe.fused_residual == fused_residual
    assert path.recipe.fused_relu2 == ("fused_relu2" in chosen)
    assert path.up8[0].pingpong == ("pingpong" in chosen)
    truth, together = gradients(built(model)), gradients(path)
    apart = gradients(built(model, recipe_of((), **recipe)))
    for name, exact in truth.items():
        if exact.numel() > 1:  # the error of a single number says nothing
            size = exact.norm()
            usual = (apart[name] - exact).norm()
            chance = 0.02 if exact.numel() > 64 else 0.3  # a few numbers, each a sum that nearly cancels
            assert (together[name] - exact).norm() <= 1.3 * usual + chance * size, name


def test_compiled_a_path_with_epilogues_is_one_graph_and_gives_the_same():
    require_quack()
    assert_compiled_gives_the_same(*(built(five_layers(), recipe_of()) for _ in range(2)), times=1)


def test_a_model_that_the_kernels_do_not_take_is_rejected_by_name():
    assert unsupported(five_layers(), recipe_of()) == []
    assert unsupported(five_layers(dim=96), recipe_of()) == ["heads=2"], "heads of 48"
    assert unsupported(five_layers(softcap=0.0), recipe_of()) == ["softcap=0.0"]
    with pytest.raises(ValueError, match="heads=2"):
        built(five_layers(dim=96), recipe_of())


def three_layers(dtype=torch.bfloat16, residual_scalars=True, backout=True, **recipe):
    config = scale_model(3, 100, context=32, dim=64, heads=2, kv_heads=2, short_window=16)
    torch.manual_seed(0)
    config = replace(config, residual_scalars=residual_scalars, backout=backout)
    model = GPT(config, dtype=dtype).to(DEVICE)
    model.init_weights()
    with torch.no_grad():
        for block in model.layers():  # zero at first, and then no gradient would reach the rest
            torch.nn.init.normal_(block.attention.out.weight, std=0.1)
            torch.nn.init.normal_(block.mlp.down.weight, std=0.1)
        model.smear_scale.fill_(0.3)
    return FastPath(model, recipe_with(**recipe))


def loss_and_gradients(path, forward=None):
    tokens = torch.randint(0, 100, (3, 34), generator=torch.Generator().manual_seed(5)).to(DEVICE)[:, :33]
    loss = (path if forward is None else forward)(tokens[:, :-1], tokens[:, 1:]) / 96
    loss.backward()
    return loss.item(), {name: param.grad for name, param in path.model.named_parameters()}


class KernelCounter(TorchDispatchMode):
    """How many times a kernel added and normed the residual stream."""

    times = 0

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        self.times += operator is torch.ops.nanorun.residual_norm_quantize.default
        return operator(*args, **(kwargs or {}))


# Three blocks; at mid-depth, after the second, the sum is materialized by itself.
@pytest.mark.parametrize(
    ("times", "changes"),
    [
        (6, {"fp8": "layers"}),
        (6, {"fp8": "all", "recompute": True}),
        (3, {"fp8": "mlp"}),
        (4, {"fp8": "layers", "residual_scalars": False}),
        (6, {"fp8": "layers", "backout": False}),
    ],
    ids=str,
)
def test_fused_add_norm_gives_the_loss_and_gradients_of_separate_additions(times, changes):
    # In fp32, since gradients of scalars are sums that nearly cancel; the GEMMs are FP8 all the same.
    fused, separate = (three_layers(torch.float32, fused_add_norm=on, **changes) for on in (True, False))
    tokens = torch.arange(64, device=DEVICE).view(2, 32)
    for path, expected in ((fused, times), (separate, 0)):
        with KernelCounter() as counter:
            path(tokens, tokens)
        assert counter.times == expected
    (loss, gradients), (truth, expected) = loss_and_gradients(fused), loss_and_gradients(separate)
    assert loss == pytest.approx(truth, rel=1e-5)
    for name, gradient in gradients.items():
        assert relative_error(gradient, expected[name]) < 1e-2, name


def test_recomputed_blocks_give_the_same_bits():
    (loss, gradients), (truth, expected) = (
        loss_and_gradients(three_layers(fp8="all", recompute=again)) for again in (True, False)
    )
    assert loss == truth
    for name, gradient in gradients.items():
        assert torch.equal(gradient, expected[name]), name


@pytest.mark.parametrize("changes", [{}, {"residual_scalars": False}, {"recompute": True}], ids=str)
def test_compiled_fused_add_norm_is_one_graph_and_gives_the_same(changes):
    torch._dynamo.reset()
    path, compiled_path = three_layers(fp8="layers", **changes), three_layers(fp8="layers", **changes)
    backend = "inductor" if DEVICE.type == "cuda" else "aot_eager"
    forward = torch.compile(compiled_path, dynamic=False, fullgraph=True, backend=backend)
    (truth, expected), (loss, gradients) = (
        loss_and_gradients(path),
        loss_and_gradients(compiled_path, forward),
    )
    assert loss == pytest.approx(truth, rel=1e-3)
    for name, gradient in gradients.items():
        assert (gradient - expected[name]).norm() <= 0.02 * expected[name].norm(), name
