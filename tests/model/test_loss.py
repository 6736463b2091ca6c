"""The chunked loss is the plain one: same value, same gradients, without the memory."""

import math
import os
import shutil

import pytest
import torch
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from nanorun.config import IGNORE
from nanorun.model import loss as module
from nanorun.model.loss import chunked_loss, plain_loss


def draw(
    n: int, dim: int, padded: int, vocab: int, *, ignored: float = 0.2, seed: int = 0, size: float = 1.0
) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, dim, generator=generator, dtype=torch.float64) * size
    weight = torch.randn(padded, dim, generator=generator, dtype=torch.float64)
    targets = torch.randint(vocab, (n,), generator=generator)
    targets[torch.rand(n, generator=generator) < ignored] = IGNORE
    return x.requires_grad_(), weight.requires_grad_(), targets


def value_and_gradients(loss: Tensor, *inputs: Tensor) -> list[Tensor]:
    return [loss.detach(), *torch.autograd.grad(loss, inputs)]


@given(
    n=st.integers(1, 70),
    dim=st.integers(1, 20),
    vocab=st.integers(2, 90),
    padding=st.integers(0, 9),
    chunk=st.integers(1, 80),
    softcap=st.sampled_from([15.0, 30.0, 1.5, 200.0, 0.0, None]),
    size=st.sampled_from([0.01, 1.0, 100.0]),
    ignored=st.sampled_from([0.0, 0.3, 1.0]),
    seed=st.integers(0, 2**16),
)
@settings(max_examples=80, deadline=None)
def test_value_and_gradients_are_those_of_the_plain_loss(
    n, dim, vocab, padding, chunk, softcap, size, ignored, seed
):
    x, weight, targets = draw(n, dim, vocab + padding, vocab, ignored=ignored, seed=seed, size=size)
    factor = 0.37  # what comes from above
    wanted = value_and_gradients(factor * plain_loss(x, weight, targets, softcap, vocab), x, weight)
    got = value_and_gradients(
        factor * chunked_loss(x, weight, targets, softcap, vocab, chunk_tokens=chunk), x, weight
    )
    for ours, truth in zip(got, wanted, strict=True):
        torch.testing.assert_close(ours, truth, rtol=1e-10, atol=1e-10 * max(size, 1.0))
    assert got[2][vocab:].eq(0).all(), "padding of the vocabulary learns nothing"
    with torch.no_grad():
        each = chunked_loss(x, weight, targets, softcap, vocab, reduction="none", chunk_tokens=chunk)
        truth = plain_loss(x, weight, targets, softcap, vocab, reduction="none")
    torch.testing.assert_close(each, truth, rtol=1e-10, atol=1e-10)
    assert each[targets == IGNORE].eq(0).all()


@pytest.mark.parametrize("softcap", [2.0, None])
def test_gradients_are_the_slopes_of_the_value(softcap):
    x, weight, targets = draw(5, 3, 8, 7)
    assert torch.autograd.gradcheck(
        lambda x, weight: chunked_loss(x, weight, targets, softcap, 7, chunk_tokens=2), (x, weight)
    )


def test_the_plain_loss_is_the_definition():
    x, weight, targets = draw(6, 4, 12, 9)
    logits = (x @ weight.T).tolist()
    total = 0.0
    for i, target in enumerate(targets.tolist()):
        if target != IGNORE:
            capped = [15 * math.tanh(z / 15) for z in logits[i][:9]]
            total += math.log(sum(math.exp(c) for c in capped)) - capped[target]
    assert plain_loss(x, weight, targets, 15.0, 9).item() == pytest.approx(total, rel=1e-12)


def test_batches_keep_their_shape():
    x, weight, targets = draw(24, 8, 32, 32)
    x3, targets2 = x.view(4, 6, 8), targets.view(4, 6)
    flat = value_and_gradients(chunked_loss(x, weight, targets, 15.0, 32, chunk_tokens=7), x, weight)
    deep = value_and_gradients(chunked_loss(x3, weight, targets2, 15.0, 32, chunk_tokens=7), x, weight)
    for a, b in zip(flat, deep, strict=True):
        assert torch.equal(a, b)
    with torch.no_grad():
        each = chunked_loss(x3, weight, targets2, 15.0, 32, reduction="none", chunk_tokens=7)
    assert each.shape == (4, 6)
    torch.testing.assert_close(each.sum(), flat[0], rtol=1e-12, atol=0)


@pytest.mark.parametrize("size", [1.0, 1e4])
def test_bf16_activations_with_float32_master_weights(size):
    """Against the truth in float64 from the same rounded numbers, it errs no more than plain bf16 does."""
    x, weight, targets = draw(300, 64, 320, 311, size=size)
    with torch.no_grad():
        x16 = x.bfloat16()
        weight32 = (weight / 8).float()
        exact = [x16.double().requires_grad_(), weight32.bfloat16().double().requires_grad_()]
    x16.requires_grad_()
    weight32.requires_grad_()
    truth = value_and_gradients(plain_loss(exact[0], exact[1], targets, 15.0, 311), *exact)
    plain = value_and_gradients(plain_loss(x16, weight32, targets, 15.0, 311), x16, weight32)
    ours = value_and_gradients(
        chunked_loss(x16, weight32, targets, 15.0, 311, chunk_tokens=50), x16, weight32
    )
    assert [t.dtype for t in ours] == [torch.float32, torch.bfloat16, torch.float32]

    def error(got: Tensor, wanted: Tensor) -> float:
        return ((got.double() - wanted).norm() / wanted.norm()).item()

    for mine, theirs, wanted in zip(ours, plain, truth, strict=True):
        assert error(mine, wanted) < 0.01
        assert error(mine, wanted) < 1.2 * error(theirs, wanted) + 1e-6


def test_the_factor_from_above_is_not_rounded_to_bf16():
    x, weight, targets = draw(40, 8, 64, 64)
    x16, weight32 = x.detach().bfloat16().requires_grad_(), weight.detach().float().requires_grad_()
    factor = 1 / 3  # bf16 has 0.33398
    loss = chunked_loss(x16, weight32, targets, 15.0, 64)
    (whole,) = torch.autograd.grad(loss, weight32, retain_graph=True)
    (scaled,) = torch.autograd.grad(loss * factor, weight32)
    torch.testing.assert_close(scaled, whole * factor, rtol=1e-6, atol=0)


@pytest.mark.parametrize("compute", [torch.float64, torch.bfloat16])
def test_all_targets_ignored_gives_zero_and_no_nan(compute):
    x, weight, targets = draw(10, 4, 16, 13, ignored=1.0, size=50.0)
    x = x.detach().to(compute).requires_grad_()
    for part in value_and_gradients(chunked_loss(x, weight, targets, 15.0, 13, chunk_tokens=4), x, weight):
        assert part.eq(0).all()


def test_logits_far_past_the_softcap_stay_finite_in_float32():
    for softcap in (15.0, module.LARGEST_UNSHIFTED_SOFTCAP, 1000.0, None):
        for sign in (1, -1):
            x = torch.full((4, 1), 900.0 * sign, requires_grad=True)
            weight = torch.ones(1 << 17, 1, requires_grad=True)
            targets = torch.zeros(4, dtype=torch.int64)
            loss = chunked_loss(x, weight, targets, softcap, 1 << 17)
            assert loss.item() == pytest.approx(4 * math.log(1 << 17), rel=1e-4), (softcap, sign)
            assert all(part.isfinite().all() for part in value_and_gradients(loss, x, weight))


def test_only_the_wanted_gradients_are_made():
    x, weight, targets = draw(30, 6, 40, 40)
    both = value_and_gradients(chunked_loss(x, weight, targets, 15.0, 40, chunk_tokens=8), x, weight)
    (dx,) = torch.autograd.grad(
        chunked_loss(x, weight.detach(), targets, 15.0, 40, chunk_tokens=8), x
    )  # a frozen head
    (dweight,) = torch.autograd.grad(
        chunked_loss(x.detach(), weight, targets, 15.0, 40, chunk_tokens=8), weight
    )
    assert torch.equal(dx, both[1])
    assert torch.equal(dweight, both[2])
    with Recorder() as evaluation, torch.no_grad():
        chunked_loss(x, weight, targets, 15.0, 40, chunk_tokens=8)
    with Recorder() as training:
        chunked_loss(x, weight, targets, 15.0, 40, chunk_tokens=8)
    assert evaluation.matmuls == 4
    assert training.matmuls == 12


def test_losses_per_token_with_gradients_are_refused():
    x, weight, targets = draw(3, 2, 4, 4)
    with pytest.raises(ValueError, match="plain_loss"):
        chunked_loss(x, weight, targets, 15.0, 4, reduction="none")


def test_shapes_that_do_not_fit_are_refused():
    x, weight, targets = draw(3, 2, 4, 4)
    for wrong in [(x, weight, targets[:2], 15.0, 4), (x[:, :1], weight, targets, 15.0, 4)]:
        with pytest.raises(ValueError, match="do not fit"):
            chunked_loss(*wrong)
    with pytest.raises(ValueError, match="does not fit a head"):
        chunked_loss(x, weight, targets, 15.0, 5)
    with pytest.raises(ValueError, match="chunk_tokens"):
        chunked_loss(x, weight, targets, 15.0, 4, chunk_tokens=0)


@pytest.mark.parametrize("vocab", [1000, 32_768, 50_304])
def test_default_chunks_are_nearly_equal_and_within_the_budget(vocab):
    weight = torch.empty(vocab, 1, device="meta")
    for n in (0, 1, 5000, 65_536, 100_001):
        size = module.chunk_rows(torch.empty(n, 1, device="meta"), weight, None)
        assert size % module.CHUNK_MULTIPLE == 0
        assert (size - module.CHUNK_MULTIPLE) * vocab < module.CHUNK_LOGITS
        chunks = max(-(-n // size), 1)
        assert size * chunks - n <= module.CHUNK_MULTIPLE * chunks


class Recorder(TorchDispatchMode):
    """The largest tensor that any operation makes, and how many matmuls there were."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0
        self.matmuls = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.largest = max([self.largest, *(t.numel() for t in tree_leaves(result) if isinstance(t, Tensor))])
        self.matmuls += func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        return result


def test_no_tensor_is_ever_larger_than_a_chunk_of_logits():
    n, dim, vocab, chunk = 512, 16, 1024, 64
    x, weight, targets = draw(n, dim, vocab, vocab)
    with Recorder() as plain:
        plain_loss(x, weight, targets, 15.0, vocab).backward()
    assert plain.largest == n * vocab, "or the recorder does not see what it should"
    with Recorder() as ours:
        chunked_loss(x, weight, targets, 15.0, vocab, chunk_tokens=chunk).backward()
    assert ours.largest == chunk * vocab


@pytest.fixture
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


compiler = next(filter(shutil.which, [os.environ.get("CXX", "c++"), "g++", "clang++"]), None)
needs_compiler = pytest.mark.skipif(compiler is None, reason="Inductor needs a C++ compiler on the CPU")


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=needs_compiler)])
def test_compiled_in_one_graph_it_is_the_same(fresh_compiler, backend):
    x, weight, targets = draw(37, 8, 64, 59)

    def step(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        hidden = torch.nn.functional.rms_norm(x, (8,))
        return chunked_loss(hidden, weight, targets, 15.0, 59, chunk_tokens=20)

    compiled = torch.compile(step, backend=backend, fullgraph=True, dynamic=False)
    wanted = value_and_gradients(step(x, weight, targets), x, weight)
    got = value_and_gradients(compiled(x, weight, targets), x, weight)
    for ours, truth in zip(got, wanted, strict=True):
        torch.testing.assert_close(ours, truth, rtol=1e-10, atol=1e-10)


def test_compiled_evaluation_is_the_same(fresh_compiler):
    x, weight, targets = draw(37, 8, 64, 59)
    compiled = torch.compile(chunked_loss, backend="aot_eager", fullgraph=True, dynamic=False)
    with torch.no_grad():
        each = compiled(x, weight, targets, 15.0, 59, reduction="none", chunk_tokens=20)
        truth = plain_loss(x, weight, targets, 15.0, 59, reduction="none")
    torch.testing.assert_close(each, truth, rtol=1e-10, atol=1e-10)


def test_compiled_it_still_keeps_no_logits_between_forward_and_backward(fresh_compiler):
    """The compiler may move work to the backward pass; here is what it then has to keep for it."""
    n, dim, vocab, chunk = 2048, 32, 1024, 256
    kept: list[int] = []

    def backward_compiler(graph, inputs):
        kept.extend(t.numel() for t in inputs)
        return make_boxed_func(graph)

    backend = aot_autograd(
        fw_compiler=lambda graph, inputs: make_boxed_func(graph),
        bw_compiler=backward_compiler,
        partition_fn=min_cut_rematerialization_partition,  # Inductor's
    )
    x, weight, targets = draw(n, dim, vocab, vocab)
    x16, weight32 = x.detach().bfloat16().requires_grad_(), weight.detach().float().requires_grad_()
    compiled = torch.compile(chunked_loss, backend=backend, fullgraph=True, dynamic=False)
    compiled(x16, weight32, targets, 15.0, vocab, chunk_tokens=chunk).backward()
    assert kept
    assert max(kept) <= max(n * dim, vocab * dim) < chunk * vocab
