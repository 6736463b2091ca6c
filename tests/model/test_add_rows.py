"""Rows added into a table's gradient: the kernel and its reference, equal tokens included."""

import pytest
import torch
from near import relative_error

pytest.importorskip("triton", reason="Triton is not installed")
from nanorun.model.kernels import embedding_grad

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize("shape", [(2, 5, 16), (1, 33, 48), (3, 7, 1100)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_kernel_adds_what_the_reference_adds(shape, dtype):
    dice = torch.Generator().manual_seed(0)
    rows = torch.randn(shape, generator=dice).to(DEVICE, dtype)
    tokens = torch.randint(0, 6, shape[:-1], generator=dice).to(DEVICE)
    sums = torch.randn(9, shape[-1], generator=dice).to(DEVICE)
    truth = embedding_grad.reference.accumulate(sums.double(), tokens, rows)
    embedding_grad.accumulate(sums, tokens, rows)
    torch.testing.assert_close(sums.double(), truth, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shape", [(2, 5, 3, 16), (1, 33, 1, 48), (3, 7, 6, 20)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("ordered", [False, True])
def test_values_through_a_gate_learn_as_the_plain_sum_does(shape, dtype, ordered):
    dice = torch.Generator().manual_seed(0)
    v, dy = (torch.randn(shape, generator=dice).to(DEVICE, dtype) for _ in range(2))
    gate = torch.rand(shape[:-1], generator=dice).to(DEVICE, dtype)
    table = torch.randn(9, shape[-2] * shape[-1], generator=dice).to(DEVICE)
    tokens = torch.randint(0, 6, shape[:2], generator=dice).to(DEVICE)
    given = [each.clone().requires_grad_() for each in (v, gate, table)]
    sums = torch.ones_like(table)
    torch.use_deterministic_algorithms(ordered)
    try:
        fast = embedding_grad.add_gated_embedding(*given, sums, tokens)
        fast.backward(dy)
    finally:
        torch.use_deterministic_algorithms(False)
    exact = [each.detach().double().requires_grad_() for each in (v, gate, table.to(dtype))]
    truth = embedding_grad.reference.add_gated_rows(exact[0], exact[1], exact[2][tokens])
    truth.backward(dy.double())
    near = 1e-6 if dtype == torch.float32 else 0.01
    assert relative_error(fast, truth) < near
    torch.testing.assert_close(given[0].grad.double(), exact[0].grad)
    assert relative_error(given[1].grad, exact[1].grad) < near
    assert given[2].grad is None
    torch.testing.assert_close(sums.double() - 1, exact[2].grad, rtol=1e-5, atol=1e-5)


def test_compiled_it_adds_to_the_same_memory():
    torch._dynamo.reset()
    table = torch.randn(20, 16, device=DEVICE, requires_grad=True)
    sums = torch.zeros(20, 16, device=DEVICE)
    tokens = torch.tensor([[3, 3, 5, 19]], device=DEVICE)
    where = sums.data_ptr()

    gate, v = torch.ones(1, 4, 2, device=DEVICE, requires_grad=True), torch.zeros(1, 4, 2, 8, device=DEVICE)

    def loss(table, sums):
        rows = embedding_grad.embedding_lookup(table, sums, tokens, torch.float32)
        return (
            rows.square().sum()
            + embedding_grad.add_gated_embedding(v, gate, table, sums, tokens).square().sum()
        )

    compiled = torch.compile(
        loss, fullgraph=True, backend="inductor" if DEVICE.type == "cuda" else "aot_eager"
    )
    for _ in range(3):
        compiled(table, sums).backward()
    assert sums.data_ptr() == where
    assert table.grad is None
    truth = torch.zeros_like(sums).index_add(0, tokens.flatten(), 12 * table.detach()[tokens.flatten()])
    torch.testing.assert_close(sums, truth)
