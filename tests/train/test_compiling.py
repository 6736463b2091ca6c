"""Compiling takes as long as the model is deep, and no longer. (Of the versions tried, torch 2.11 needs our help.)"""

import pytest
import torch
from torch import Tensor, nn

from nanorun.model.compiling import compiled

DEEP = 40


@torch.library.custom_op("nanorun_tests::joined", mutates_args=())
def joined(a: Tensor, b: Tensor) -> Tensor:
    return 0.5 * (a + b)


@joined.register_fake
def _(a: Tensor, b: Tensor) -> Tensor:
    return torch.empty_like(a)


@torch.library.custom_op("nanorun_tests::ended", mutates_args=())
def ended(a: Tensor) -> Tensor:
    return a + 1


@ended.register_fake
def _(a: Tensor) -> Tensor:
    return torch.empty_like(a)


class Deep(nn.Module):
    """Two ways through each layer: a text that follows all of them from the end would have 2⁴⁰ lines."""

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(DEEP):
            x = joined(x, x)
        return ended(x)


@pytest.mark.timeout(120)
def test_an_operator_met_first_at_the_end_of_a_deep_model_is_compiled_in_time():
    with torch.no_grad():
        result = compiled(Deep())(torch.ones(4))
    assert torch.equal(result, torch.full((4,), 2.0))
