"""How near a kernel must come to float64, for tests with and without a GPU."""

import torch.nn.functional as F

from nanorun.config import NORM_EPSILON


def relative_error(fast, truth):
    return ((fast.double() - truth.double()).norm() / truth.double().norm()).item()


def normed(x):
    return F.rms_norm(x, (x.shape[-1],), eps=NORM_EPSILON)


def assert_gradients_near(gradients, exact, most):
    """Of a stream's start, λ and μ. The last two are sums that may all but cancel: then what counts is their reach."""
    dstart, *numbers = gradients
    if exact.start is None:
        assert gradients == [None] * 3
        return
    assert relative_error(dstart, exact.start.grad) < most
    reach = exact.x.grad.norm() * exact.start.norm()
    for one, other in zip(numbers, exact[3:5], strict=True):
        assert one.shape == other.shape
        assert (one - other.grad).abs() < most / 4 * reach
