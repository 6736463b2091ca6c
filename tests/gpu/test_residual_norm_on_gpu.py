"""Residual addition and norm in one kernel, at real shapes, against float64; a compiled model with and without it."""

from dataclasses import replace

import pytest
import torch
from near import assert_residual_grads_near, normed, relative_error

from nanorun.config import NORM_EPSILON, OptimConfig, scale_model
from nanorun.model.attention import choose_backends
from nanorun.model.compiling import compiled
from nanorun.model.fast.half_blocks import ResidualStream
from nanorun.model.fast.path import FastPath
from nanorun.model.fast.recipe import Recipe, resolve
from nanorun.model.gpt import build
from nanorun.model.kernels import fp8, residual_norm
from nanorun.model.kernels.residual_norm import reference
from nanorun.optim import schedules
from nanorun.optim.groups import group_parameters
from nanorun.optim.optimizer import Optimizer

CUDA = torch.device("cuda")
SHAPES = [(32_768, 768), (1000, 768), (33, 1280), (2049, 1536), (7, 80), (1, 128)]
CASES = [(True, False), (False, True), (True, True)]


@pytest.fixture(autouse=True)
def require_fp8():
    if not fp8.is_supported(torch.device("cuda", 0)):
        pytest.skip("this GPU does not support FP8")
    torch._dynamo.reset()  # Dynamo compiles at most eight graphs for a function


def draw(*shape, seed=0, size=1.0, dtype=torch.bfloat16):
    generator = torch.Generator("cuda").manual_seed(seed)
    return (torch.randn(shape, device="cuda", generator=generator) * size).to(dtype)


def streams(shape, has_y, has_x0):
    """A stream and the same in float64, with λ and μ rounded as in the kernels."""
    x, y, x0 = (draw(*shape, seed=i, size=3.0) for i in range(3))
    _, lambda_, mu = torch.tensor([9.0, 1.15, 0.2], device="cuda").unbind()  # not aligned, as in a parameter
    mix = (x0, lambda_, mu) if has_x0 else (None, None, None)
    inputs = ResidualStream(x, y if has_y else None, *mix)
    exact = (each if each is None else each.bfloat16().double().requires_grad_() for each in inputs[:5])
    return inputs, ResidualStream(*exact)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("has_y", "has_x0"), CASES)
def test_the_sum_and_its_norm_agree_with_float64(shape, has_y, has_x0):
    inputs, exact = streams(shape, has_y, has_x0)
    for _ in range(3):  # a data race would not show every time
        s, q, q_t, scale, inv_rms = residual_norm.residual_norm_quantize(*inputs[:5])
        assert relative_error(s, reference.residual_norm(*exact[:5])[0]) < 2.5e-3
        torch.testing.assert_close(
            inv_rms.double(), (s.double().square().mean(1) + NORM_EPSILON).rsqrt(), rtol=1e-5, atol=0
        )
        expected = (s.float() * inv_rms[:, None] / scale).half().to(fp8.E4M3)  # from s as stored
        assert torch.equal(q.float(), expected.float())
        assert relative_error(q.double() * scale.double(), normed(s.double())) < 0.035
        assert torch.equal(q_t[:, : shape[0]].float(), q.float().T)
        assert q_t[:, shape[0] :].float().eq(0).all()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("has_y", "has_x0"), CASES)
@pytest.mark.parametrize("gate_channels", [None, 0, 12])
def test_gradients_of_all_inputs_agree_with_float64(shape, has_y, has_x0, gate_channels):
    inputs, exact = streams(shape, has_y, has_x0)
    truth, n = reference.residual_norm(*exact[:5])
    s = truth.detach().bfloat16()
    inv_rms = (s.double().square().mean(1) + NORM_EPSILON).rsqrt().float()
    dn = draw(*shape, seed=5, size=20.0)
    dgate_input = None if gate_channels is None else draw(shape[0], gate_channels, seed=6, size=50.0)
    ds = draw(*shape, seed=7) + inputs.x / 3  # correlated, so that the sums for λ and μ do not cancel
    ds = ds if inputs.x0 is None else ds + inputs.x0 / 3
    loss = (n * dn.double()).sum() + (truth * ds.double()).sum()
    if dgate_input is not None:
        loss = loss + (n[:, :gate_channels] * dgate_input.double()).sum()
    loss.backward()
    dx, *others = residual_norm.input_grads(dn, s, inv_rms, ds, dgate_input, *inputs[2:5])
    assert relative_error(dx, exact.x.grad) < 1e-2
    assert_residual_grads_near(others, exact, 1e-2)
    again, *_ = residual_norm.input_grads(dn, s, inv_rms, ds, dgate_input, *inputs[2:5])
    assert torch.equal(dx, again)


def trained(recipe, steps=8, **changes):
    """Losses of a small compiled model on one batch."""
    config = scale_model(2, 1000, context=512, dim=256, heads=2, kv_heads=2, short_window=128, **changes)
    model = build(config, CUDA, torch.bfloat16, choose_backends(config, CUDA), seed=3)
    path = FastPath(model, resolve(recipe, config, CUDA, torch.bfloat16))
    forward = compiled(path)
    optim = replace(OptimConfig(), warmup_steps=5)
    optimizer = Optimizer(group_parameters(model.named_parameters(), optim), optim, compiled=True)
    generator = torch.Generator("cuda").manual_seed(1)
    tokens = torch.randint(0, 1000, (8, 513), device="cuda", generator=generator)
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
def test_a_compiled_model_with_fused_add_norm_trains_as_one_without(recompute, changes):
    recipes = [Recipe(fp8="all", recompute=recompute, fused_add_norm=way) for way in (True, False)]
    fused, separate = (trained(recipe, **changes) for recipe in recipes)
    # Only the first steps: then rounding is amplified (Adam makes full steps of gradients that are zero at first).
    assert fused[:3] == pytest.approx(separate[:3], abs=0.02)
    assert fused[-1] == pytest.approx(separate[-1], abs=0.2)
    assert fused[-1] < fused[0]
