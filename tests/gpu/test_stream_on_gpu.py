"""The residual stream's two kernels at real shapes: against float64, and a compiled model with and without them."""

from dataclasses import replace

import pytest
import torch
from near import assert_gradients_near, normed, relative_error

from nanorun.config import NORM_EPSILON, OptimConfig, scale_model
from nanorun.model.attention import choose_backends
from nanorun.model.compiling import compiled
from nanorun.model.fast.layers import ResidualStream
from nanorun.model.fast.path import FastPath
from nanorun.model.fast.recipe import Recipe, resolve
from nanorun.model.gpt import build
from nanorun.model.kernels import fp8, residual_norm
from nanorun.optim import schedules
from nanorun.optim.groups import group_parameters
from nanorun.optim.optimizer import Optimizer

CUDA = torch.device("cuda")
SHAPES = [(32_768, 768), (1000, 768), (33, 1280), (2049, 1536), (7, 80), (1, 128)]
CASES = [(True, False), (False, True), (True, True)]


@pytest.fixture(autouse=True)
def needs_eight_bits():
    if not fp8.is_supported(torch.device("cuda", 0)):
        pytest.skip("this GPU has no 8-bit matmuls")
    torch._dynamo.reset()  # it allows a piece of code eight graphs


def draw(*shape, seed=0, size=1.0, dtype=torch.bfloat16):
    dice = torch.Generator("cuda").manual_seed(seed)
    return (torch.randn(shape, device="cuda", generator=dice) * size).to(dtype)


def drawn(shape, adds, mixes):
    """A stream and the same in float64, where λ and μ are what the kernels round them to."""
    x, y, start = (draw(*shape, seed=i, size=3.0) for i in range(3))
    scale, share = torch.tensor([9.0, 1.15, 0.2], device="cuda").unbind()[
        1:
    ]  # as of a parameter: not aligned
    mixing = (start, scale, share) if mixes else (None, None, None)
    given = ResidualStream(x, y if adds else None, *mixing)
    exact = (each if each is None else each.bfloat16().double().requires_grad_() for each in given[:5])
    return given, ResidualStream(*exact)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("adds", "mixes"), CASES)
def test_what_is_pending_is_added_and_normed_as_float64_does_it(shape, adds, mixes):
    given, exact = drawn(shape, adds, mixes)
    for _ in range(3):  # a thread that read too early would not do so each time
        s, q, qt, unit, inverse = residual_norm.residual_norm_quantize(*given[:5])
        assert relative_error(s, exact.materialize()) < 2.5e-3
        torch.testing.assert_close(
            inverse.double(), (s.double().square().mean(1) + NORM_EPSILON).rsqrt(), rtol=1e-5, atol=0
        )
        expected = (s.float() * inverse[:, None] / unit).half().to(fp8.E4M3)  # of s as it stands in memory
        assert torch.equal(q.float(), expected.float())
        assert relative_error(q.double() * unit.double(), normed(s.double())) < 0.035
        assert torch.equal(qt[:, : shape[0]].float(), q.float().T)
        assert qt[:, shape[0] :].float().eq(0).all()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("adds", "mixes"), CASES)
@pytest.mark.parametrize("kept", [None, 0, 12])
def test_gradients_of_all_that_is_added_agree_with_float64(shape, adds, mixes, kept):
    given, exact = drawn(shape, adds, mixes)
    truth = exact.materialize()
    s = truth.detach().bfloat16()
    inverse = (s.double().square().mean(1) + NORM_EPSILON).rsqrt().float()
    dn = draw(*shape, seed=5, size=20.0)
    dfirst = None if kept is None else draw(shape[0], kept, seed=6, size=50.0)
    ds = draw(*shape, seed=7) + given.x / 3  # so that sums over all of it are no mere chance
    ds = ds if given.x0 is None else ds + given.x0 / 3
    n = normed(truth)
    loss = (n * dn.double()).sum() + (truth * ds.double()).sum()
    if dfirst is not None:
        loss = loss + (n[:, :kept] * dfirst.double()).sum()
    loss.backward()
    dx, *others = residual_norm.input_grads(dn, s, inverse, ds, dfirst, *given[2:5])
    assert relative_error(dx, exact.x.grad) < 1e-2
    assert_gradients_near(others, exact, 1e-2)
    again, *_ = residual_norm.input_grads(dn, s, inverse, ds, dfirst, *given[2:5])
    assert torch.equal(dx, again)


def trained(recipe, steps=8, **changes):
    """Losses of a small compiled model on one batch."""
    config = scale_model(2, 1000, context=512, dim=256, heads=2, kv_heads=2, short_window=128, **changes)
    model = build(config, CUDA, torch.bfloat16, choose_backends(config, CUDA), seed=3)
    path = FastPath(model, resolve(recipe, config, CUDA, torch.bfloat16))
    forward = compiled(path)
    optim = replace(OptimConfig(), warmup_steps=5)
    optimizer = Optimizer(group_parameters(model.named_parameters(), optim), optim, compiled=True)
    dice = torch.Generator("cuda").manual_seed(1)
    tokens = torch.randint(0, 1000, (8, 513), device="cuda", generator=dice)
    losses = []
    for step in range(steps):
        loss = forward(tokens[:, :-1].int(), tokens[:, 1:]) / tokens[:, 1:].numel()
        loss.backward()
        optimizer.step(schedules.scheduled_hyperparameters(step, steps, optim))
        optimizer.zero_grad()
        path.refresh()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize(
    ("recompute", "changes"), [(False, {}), (False, {"residual_scalars": False}), (True, {})], ids=str
)
def test_a_compiled_model_learns_as_one_that_adds_at_once(recompute, changes):
    recipes = [Recipe(fp8="all", recompute=recompute, fused_add_norm=way) for way in (True, False)]
    fused, apart = (trained(recipe, **changes) for recipe in recipes)
    # Only the first steps: then rounding is amplified (Adam makes full steps of gradients that are zero at first).
    assert fused[:3] == pytest.approx(apart[:3], abs=0.02)
    assert fused[-1] == pytest.approx(apart[-1], abs=0.2)
    assert fused[-1] < fused[0]
