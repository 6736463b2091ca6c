"""Every way to compute attention gives what the definition gives, outputs and gradients."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nanorun.config import scale_model
from nanorun.errors import UserError
from nanorun.model.attention import attend, choose_backends


def inputs(batch, q_len, k_len, heads, kv_heads, dim, seed=0):
    dice = torch.Generator().manual_seed(seed)
    shapes = [(batch, q_len, heads, dim), (batch, k_len, kv_heads, dim), (batch, k_len, kv_heads, dim)]
    return [torch.randn(s, dtype=torch.float64, generator=dice, requires_grad=True) for s in shapes]


def definition(q, k, v, window, docs=None):
    """One query at a time, in plain loops."""
    out = torch.zeros_like(q)
    shift = k.size(1) - q.size(1)
    for b in range(q.size(0)):
        for t in range(q.size(1)):
            keys = [s for s in range(k.size(1)) if t + shift - window < s <= t + shift]
            if docs is not None:
                keys = [s for s in keys if docs[b, s] == docs[b, t + shift]]
            for h in range(q.size(2)):
                kv = h // (q.size(2) // k.size(2))
                scores = (k[b, keys, kv] @ q[b, t, h]) / q.size(3) ** 0.5
                out[b, t, h] = scores.softmax(0) @ v[b, keys, kv]
    return out


@settings(max_examples=25, deadline=None)
@given(
    q_len=st.integers(1, 9),
    extra=st.integers(0, 5),
    window=st.integers(1, 14),
    kv_heads=st.sampled_from([1, 2]),
    masked=st.booleans(),
    backend=st.sampled_from(["plain", "sdpa"]),
)
def test_backends_equal_the_definition(q_len, extra, window, kv_heads, masked, backend):
    q, k, v = inputs(2, q_len, q_len + extra, 2, kv_heads, 4)
    docs = torch.randint(0, 2, (2, q_len + extra)).cumsum(1) if masked else None
    torch.testing.assert_close(attend(q, k, v, window, backend, docs), definition(q, k, v, window, docs))


@pytest.mark.parametrize("kv_heads", [1, 4])
@pytest.mark.parametrize("window", [5, 33, 64])
@pytest.mark.parametrize("masked", [False, True])
def test_gradients_equal_those_of_the_definition(window, kv_heads, masked):
    docs = torch.tensor([[0] * 20 + [1] * 44, [0] * 63 + [1]]) if masked else None
    results = []
    for way in ("plain", "sdpa"):
        q, k, v = inputs(2, 64, 64, 4, kv_heads, 16, seed=3)
        out = attend(q, k, v, window, way, docs)
        (out * torch.linspace(-1, 1, out.numel(), dtype=torch.float64).view_as(out)).sum().backward()
        results.append([out, q.grad, k.grad, v.grad])
    for fast, slow in zip(*results, strict=True):
        torch.testing.assert_close(fast, slow, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("window", [5, 128, 200])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.filterwarnings("ignore:flex_attention called without")
def test_flex_attention_gives_what_the_definition_gives(window, masked):
    docs = torch.tensor([[0] * 20 + [1] * 180, [0] * 130 + [1] * 70]) if masked else None
    with torch.no_grad():  # torch has no backward of it on a CPU; tests/gpu compares gradients
        q, k, v = (x.float() for x in inputs(2, 200, 200, 4, 2, 16, seed=3))
        torch.testing.assert_close(
            attend(q, k, v, window, "flex", docs),
            attend(q, k, v, window, "plain", docs),
            rtol=1e-5,
            atol=1e-5,
        )


def test_backends_are_chosen_by_the_machine_and_refused_where_they_cannot_run():
    config = scale_model(8, 1000)
    assert choose_backends(config, torch.device("cpu")) == ("sdpa",) * 8
    assert choose_backends(config, torch.device("cpu"), "plain") == ("plain",) * 8
    for backend in ("flex", "cudnn", "flash"):
        with pytest.raises(UserError, match="choose"):
            choose_backends(config, torch.device("cpu"), backend)
