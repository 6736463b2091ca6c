"""The fast orthogonalizations do to every singular value what they say, and to nothing else."""

import pytest
import torch
from torch import Tensor

from nanorun.optim.muon import MARGINS, POLYNOMIALS, orthogonalize

# method: the smallest singular value (of a norm of 1) lifted into the band, the band
METHODS = {"polar_express": (0.0012, (0.858, 1.142)), "newton_schulz": (0.002, (0.68, 1.21))}
SHAPES = [(64, 64), (128, 32), (32, 128), (5, 7), (1, 9), (3, 2, 40, 24)]
each_method = pytest.mark.parametrize("name", METHODS)


def matrices(shape: tuple[int, ...], smallest: float, seed: int = 0) -> Tensor:
    """Random directions, singular values spread evenly (in their logarithm) from 1 to `smallest`."""
    generator = torch.Generator().manual_seed(seed)
    u, s, vt = torch.linalg.svd(
        torch.randn(shape, generator=generator, dtype=torch.float64), full_matrices=False
    )
    spread = torch.logspace(0, torch.tensor(smallest).log10().item(), s.size(-1), dtype=torch.float64)
    return u @ (spread[:, None] * vt)


def polar_svd(x: Tensor) -> Tensor:
    """The exact polar factor U·Vᵀ of each matrix."""
    u, _, vt = torch.linalg.svd(x, full_matrices=False)
    return u @ vt


def relative_singular_values(x: Tensor) -> Tensor:
    return torch.linalg.svdvals(x) / torch.linalg.matrix_norm(x)[..., None]


def cosine(a: Tensor, b: Tensor) -> Tensor:
    return (a * b).sum((-2, -1)) / (torch.linalg.matrix_norm(a) * torch.linalg.matrix_norm(b))


@each_method
def test_every_singular_value_above_the_promised_one_ends_in_the_promised_band(name):
    smallest, (low, high) = METHODS[name]
    values = torch.logspace(torch.tensor(smallest).log10().item(), 0, 200_001, dtype=torch.float64)
    values = values / MARGINS[name]
    for a, b, c in POLYNOMIALS[name]:
        values = a * values + b * values**3 + c * values**5
    assert low < values.min()
    assert values.max() < high


@each_method
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("smallest", [1.0, 0.1, 1e-2, 1e-5])
def test_singular_values_follow_the_polynomials_and_the_directions_stay(name, shape, smallest):
    x = matrices(shape, smallest)
    u, s, vt = torch.linalg.svd(x, full_matrices=False)
    expected = s / torch.linalg.matrix_norm(x)[..., None] / MARGINS[name]
    for a, b, c in POLYNOMIALS[name]:
        expected = a * expected + b * expected**3 + c * expected**5
    torch.testing.assert_close(orthogonalize(x, name), u @ (expected[..., None] * vt), rtol=1e-10, atol=1e-10)


@each_method
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_well_conditioned_matrices_end_near_the_polar_factor(name, shape, dtype):
    smallest, (low, high) = METHODS[name]
    x = matrices(shape, 0.05, seed=1)
    assert relative_singular_values(x).min() > smallest
    y = orthogonalize(x.to(torch.promote_types(dtype, torch.float32)), name, dtype)
    values = torch.linalg.svdvals(y.double())
    slack = 0.03 if dtype == torch.bfloat16 else 0.0  # rounding moves a singular value a little
    assert low - slack < values.min()
    assert values.max() < high + slack
    assert cosine(y.double(), polar_svd(x)).min() > (0.99 if name == "polar_express" else 0.98)


@each_method
def test_gaussian_matrices_whose_smallest_values_stay_behind_still_point_the_right_way(name):
    smallest, (low, high) = METHODS[name]
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(8, 192, 192, generator=generator)
    before = relative_singular_values(x.double())
    assert before.min() < smallest
    y = orthogonalize(x, name).double()
    after = torch.linalg.svdvals(y)
    assert after.max() < high
    in_band = ((after > low) & (after < high)).double().mean()
    assert in_band >= (before > smallest).double().mean()
    assert cosine(y, polar_svd(x.double())).min() > (0.99 if name == "polar_express" else 0.97)


@each_method
def test_a_batch_is_its_matrices_one_by_one_and_a_transpose_is_a_transpose(name):
    x = matrices((4, 20, 12), 0.01)
    torch.testing.assert_close(orthogonalize(x, name), torch.stack([orthogonalize(one, name) for one in x]))
    torch.testing.assert_close(orthogonalize(x.mT, name), orthogonalize(x, name).mT)


@each_method
def test_scale_does_not_matter_and_zeros_stay_zeros(name):
    x = matrices((16, 24), 0.1).float()
    for factor in (1e-15, 1e-6, 1e6, 1e15):
        torch.testing.assert_close(
            orthogonalize(x * factor, name), orthogonalize(x, name), rtol=1e-4, atol=1e-5
        )
    assert torch.equal(orthogonalize(torch.zeros(2, 3, 5), name), torch.zeros(2, 3, 5))
