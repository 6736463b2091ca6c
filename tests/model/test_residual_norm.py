"""Residual addition and norm in one kernel, forward and backward, against float64."""

import pytest
import torch
from near import assert_residual_grads_near, normed, relative_error

from nanorun.config import NORM_EPSILON

pytest.importorskip("triton", reason="Triton is not installed")
from nanorun.model.fast.half_blocks import ResidualStream
from nanorun.model.kernels import residual_norm
from nanorun.model.kernels.residual_norm import reference

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SHAPES = [(33, 128), (70, 768), (1, 80), (130, 144), (3, 1536)]  # not multiples of a block


def draw(*shape, seed=0, dtype=torch.float32, size=1.0):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator) * size).to(DEVICE, dtype)


def streams(shape, has_y, has_x0, dtype, lambda_=1.15):
    """A stream and the same in float64, with λ and μ rounded as in the kernels."""
    x, y, x0 = (draw(*shape, seed=i, dtype=dtype, size=3.0) for i in range(3))
    scalars = torch.tensor([lambda_, 0.2], device=DEVICE).unbind()
    mix = (x0, *scalars) if has_x0 else (None, None, None)
    inputs = ResidualStream(x, y if has_y else None, *mix)
    return inputs, ResidualStream(
        *(each if each is None else exact_leaf(each.to(dtype)) for each in inputs[:5])
    )


def exact_leaf(x):
    return x.detach().double().requires_grad_()


CASES = [(True, False), (False, True), (True, True)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("has_y", "has_x0"), CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_sum_and_its_norm_agree_with_float64(shape, has_y, has_x0, dtype):
    inputs, exact = streams(shape, has_y, has_x0, dtype)
    s, q, q_t, scale, inv_rms = residual_norm.residual_norm_quantize(*inputs[:5])
    rows = shape[0]
    assert s.dtype == dtype
    # The interpreter truncates to bf16 instead of rounding.
    assert relative_error(s, reference.residual_norm(*exact[:5])[0]) < (
        1e-6 if dtype == torch.float32 else 5e-3
    )
    torch.testing.assert_close(inv_rms.double(), (s.double().square().mean(1) + NORM_EPSILON).rsqrt())
    assert relative_error(q.double() * scale.double(), normed(s.double())) < 0.035
    assert torch.equal(q_t[:, :rows].float(), q.float().T)
    assert q_t[:, rows:].float().eq(0).all()


def kernel_and_reference_grads(inputs, exact, gate_channels, dtype):
    """From the same gradients of s, of its norm n and of the first channels of n: those of the kernel, returned, and
    those of float64, in `exact`."""
    rows, width = inputs.x.shape
    truth, n = reference.residual_norm(*exact[:5])
    s = truth.detach().to(dtype)
    inv_rms = (s.double().square().mean(1) + NORM_EPSILON).rsqrt().float()
    dn = draw(rows, width, seed=5, dtype=dtype, size=20.0)
    dgate_input = (
        draw(rows, gate_channels, seed=6, dtype=dtype, size=50.0) if gate_channels is not None else None
    )
    ds = (
        draw(rows, width, seed=7) + inputs.x.float() / 3
    )  # correlated, so that the sums for λ and μ do not cancel
    ds = (ds if inputs.x0 is None else ds + inputs.x0.float() / 3).to(dtype)
    loss = (n * dn.double()).sum() + (truth * ds.double()).sum()
    if dgate_input is not None:
        loss = loss + (n[:, :gate_channels] * dgate_input.double()).sum()
    loss.backward()
    return residual_norm.input_grads(dn, s, inv_rms, ds, dgate_input, *inputs[2:5])


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("has_y", "has_x0"), CASES)
@pytest.mark.parametrize("gate_channels", [None, 0, 12])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_of_all_inputs_agree_with_float64(shape, has_y, has_x0, gate_channels, dtype):
    inputs, exact = streams(shape, has_y, has_x0, dtype)
    dx, *others = kernel_and_reference_grads(inputs, exact, gate_channels, dtype)
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    assert dx.dtype == dtype
    assert relative_error(dx, exact.x.grad) < tolerance
    assert_residual_grads_near(others, exact, tolerance)


def test_with_lambda_zero_unknown_gradients_are_zero_and_not_nan():
    inputs, exact = streams((20, 64), True, True, torch.float32, lambda_=0.0)
    dx, dx0, dlambda, dmu = kernel_and_reference_grads(inputs, exact, None, torch.float32)
    for gradient in (dx, dx0, dlambda):
        assert gradient.eq(0).all()
    assert relative_error(dmu, exact.mu.grad) < 1e-5
