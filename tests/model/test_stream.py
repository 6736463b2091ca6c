"""The residual stream, added up where it is normed: both kernels against float64, and a model with and without."""

from dataclasses import replace

import pytest
import torch
from near import assert_gradients_near, normed, relative_error
from torch.utils._python_dispatch import TorchDispatchMode

from nanorun.config import NORM_EPSILON, scale_model
from nanorun.model.fast.path import FastPath
from nanorun.model.fast.recipe import Recipe, consistent
from nanorun.model.gpt import GPT

pytest.importorskip("triton", reason="Triton is not installed")
from nanorun.model.fast.layers import ResidualStream
from nanorun.model.kernels import residual_norm

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SHAPES = [(33, 128), (70, 768), (1, 80), (130, 144), (3, 1536)]  # no multiples of what a program takes


def draw(*shape, seed=0, dtype=torch.float32, size=1.0):
    dice = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=dice) * size).to(DEVICE, dtype)


def drawn(shape, adds, mixes, dtype, scale=1.15):
    """A stream and the same in float64, where λ and μ are what the kernels round them to."""
    x, y, start = (draw(*shape, seed=i, dtype=dtype, size=3.0) for i in range(3))
    numbers = torch.tensor([scale, 0.2], device=DEVICE).unbind()
    mixing = (start, *numbers) if mixes else (None, None, None)
    given = ResidualStream(x, y if adds else None, *mixing)
    return given, ResidualStream(*(each if each is None else exactly(each.to(dtype)) for each in given[:5]))


def exactly(x):
    return x.detach().double().requires_grad_()


CASES = [(True, False), (False, True), (True, True)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("adds", "mixes"), CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_pending_is_added_and_normed_as_float64_does_it(shape, adds, mixes, dtype):
    given, exact = drawn(shape, adds, mixes, dtype)
    s, q, qt, unit, inverse = residual_norm.residual_norm_quantize(*given[:5])
    rows = shape[0]
    assert s.dtype == dtype
    # Without a GPU, bf16 is cut off and not rounded.
    assert relative_error(s, exact.materialize()) < (1e-6 if dtype == torch.float32 else 5e-3)
    torch.testing.assert_close(inverse.double(), (s.double().square().mean(1) + NORM_EPSILON).rsqrt())
    assert relative_error(q.double() * unit.double(), normed(s.double())) < 0.035
    assert torch.equal(qt[:, :rows].float(), q.float().T)
    assert qt[:, rows:].float().eq(0).all()


def gradients_both_ways(given, exact, kept, dtype):
    """From given gradients of s, of its norm and of that one's first channels, by the kernel and in float64."""
    rows, width = given.x.shape
    truth = exact.materialize()
    s = truth.detach().to(dtype)
    inverse = (s.double().square().mean(1) + NORM_EPSILON).rsqrt().float()
    dn = draw(rows, width, seed=5, dtype=dtype, size=20.0)
    dfirst = draw(rows, kept, seed=6, dtype=dtype, size=50.0) if kept is not None else None
    ds = draw(rows, width, seed=7) + given.x.float() / 3  # so that sums over all of it are no mere chance
    ds = (ds if given.x0 is None else ds + given.x0.float() / 3).to(dtype)
    n = normed(truth)
    loss = (n * dn.double()).sum() + (truth * ds.double()).sum()
    if dfirst is not None:
        loss = loss + (n[:, :kept] * dfirst.double()).sum()
    loss.backward()
    return residual_norm.input_grads(dn, s, inverse, ds, dfirst, *given[2:5])


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("adds", "mixes"), CASES)
@pytest.mark.parametrize("kept", [None, 0, 12])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_of_all_that_is_added_agree_with_float64(shape, adds, mixes, kept, dtype):
    given, exact = drawn(shape, adds, mixes, dtype)
    dx, *others = gradients_both_ways(given, exact, kept, dtype)
    most = 1e-5 if dtype == torch.float32 else 1e-2
    assert dx.dtype == dtype
    assert relative_error(dx, exact.x.grad) < most
    assert_gradients_near(others, exact, most)


def test_where_lambda_is_zero_what_cannot_be_known_is_zero_and_never_nan():
    given, exact = drawn((20, 64), True, True, torch.float32, scale=0.0)
    dx, dstart, dscale, dshare = gradients_both_ways(given, exact, None, torch.float32)
    for gradient in (dx, dstart, dscale):
        assert gradient.eq(0).all()
    assert relative_error(dshare, exact.mu.grad) < 1e-5


def built(dtype=torch.bfloat16, residual_scalars=True, backout=True, **recipe):
    config = scale_model(3, 100, context=32, dim=64, heads=2, kv_heads=2, short_window=16)
    torch.manual_seed(0)
    config = replace(config, residual_scalars=residual_scalars, backout=backout)
    model = GPT(config, dtype=dtype).to(DEVICE)
    model.init_weights()
    with torch.no_grad():
        for block in model.layers():  # zero at first, so that nothing behind them would be tested
            torch.nn.init.normal_(block.attention.out.weight, std=0.1)
            torch.nn.init.normal_(block.mlp.down.weight, std=0.1)
        model.smear_scale.fill_(0.3)
    usual = {"pingpong": False, "fused_relu2": False, "fused_residual": False, "sparse_tables": False}
    return FastPath(model, consistent(Recipe(**{**usual, **recipe})))


def learned(path, forward=None):
    tokens = torch.randint(0, 100, (3, 34), generator=torch.Generator().manual_seed(5)).to(DEVICE)[:, :33]
    loss = (path if forward is None else forward)(tokens[:, :-1], tokens[:, 1:]) / 96
    loss.backward()
    return loss.item(), {name: param.grad for name, param in path.model.named_parameters()}


class Counted(TorchDispatchMode):
    """How many times the stream was settled by the kernel."""

    times = 0

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        self.times += operator is torch.ops.nanorun.residual_norm_quantize.default
        return operator(*args, **(kwargs or {}))


# Three blocks; at the middle, the second, what is pending is added by itself.
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
def test_a_model_has_the_loss_and_gradients_of_one_that_adds_at_once(times, changes):
    # In fp32, since gradients of scalars are sums that all but cancel; the products are in eight bits all the same.
    fused, apart = (built(torch.float32, fused_add_norm=on, **changes) for on in (True, False))
    tokens = torch.arange(64, device=DEVICE).view(2, 32)
    for path, expected in ((fused, times), (apart, 0)):
        with Counted() as counted:
            path(tokens, tokens)
        assert counted.times == expected
    (loss, gradients), (truth, expected) = learned(fused), learned(apart)
    assert loss == pytest.approx(truth, rel=1e-5)
    for name, gradient in gradients.items():
        assert relative_error(gradient, expected[name]) < 1e-2, name


def test_recomputed_it_gives_the_same_bits():
    (loss, gradients), (truth, expected) = (
        learned(built(fp8="all", recompute=again)) for again in (True, False)
    )
    assert loss == truth
    for name, gradient in gradients.items():
        assert torch.equal(gradient, expected[name]), name


@pytest.mark.parametrize("changes", [{}, {"residual_scalars": False}, {"recompute": True}], ids=str)
def test_compiled_it_is_one_graph_and_gives_the_same(changes):
    torch._dynamo.reset()
    model, other = built(fp8="layers", **changes), built(fp8="layers", **changes)
    backend = "inductor" if DEVICE.type == "cuda" else "aot_eager"
    forward = torch.compile(other, dynamic=False, fullgraph=True, backend=backend)
    (truth, expected), (loss, gradients) = learned(model), learned(other, forward)
    assert loss == pytest.approx(truth, rel=1e-3)
    for name, gradient in gradients.items():
        assert (gradient - expected[name]).norm() <= 0.02 * expected[name].norm(), name
