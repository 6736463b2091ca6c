"""Embedding gradients that accumulate in place: kernels against their references, with repeated tokens."""

import pytest
import torch
from near import relative_error

pytest.importorskip("triton", reason="Triton is not installed")
from nanorun.model.kernels import embedding_grad

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize("shape", [(2, 5, 16), (1, 33, 48), (3, 7, 1100)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_kernel_accumulates_what_the_reference_does(shape, dtype):
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(shape, generator=generator).to(DEVICE, dtype)
    token_ids = torch.randint(0, 6, shape[:-1], generator=generator).to(DEVICE)
    grad_buffer = torch.randn(9, shape[-1], generator=generator).to(DEVICE)
    truth = embedding_grad.reference.accumulate(grad_buffer.double(), token_ids, rows)
    embedding_grad.accumulate(grad_buffer, token_ids, rows)
    torch.testing.assert_close(grad_buffer.double(), truth, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shape", [(2, 5, 3, 16), (1, 33, 1, 48), (3, 7, 6, 20)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("deterministic", [False, True])
def test_gated_value_embeddings_and_their_gradients_agree_with_float64(shape, dtype, deterministic):
    generator = torch.Generator().manual_seed(0)
    v, dy = (torch.randn(shape, generator=generator).to(DEVICE, dtype) for _ in range(2))
    gate = torch.rand(shape[:-1], generator=generator).to(DEVICE, dtype)
    table = torch.randn(9, shape[-2] * shape[-1], generator=generator).to(DEVICE)
    token_ids = torch.randint(0, 6, shape[:2], generator=generator).to(DEVICE)
    inputs = [each.clone().requires_grad_() for each in (v, gate, table)]
    grad_buffer = torch.ones_like(table)
    torch.use_deterministic_algorithms(deterministic)
    try:
        fast = embedding_grad.add_gated_embedding(inputs[0], inputs[1], inputs[2], grad_buffer, token_ids)
        fast.backward(dy)
    finally:
        torch.use_deterministic_algorithms(False)
    exact = [each.detach().double().requires_grad_() for each in (v, gate, table.to(dtype))]
    truth = embedding_grad.reference.add_gated_rows(exact[0], exact[1], exact[2][token_ids])
    truth.backward(dy.double())
    tolerance = 1e-6 if dtype == torch.float32 else 0.01
    assert relative_error(fast, truth) < tolerance
    torch.testing.assert_close(inputs[0].grad.double(), exact[0].grad)
    assert relative_error(inputs[1].grad, exact[1].grad) < tolerance
    assert inputs[2].grad is None
    torch.testing.assert_close(grad_buffer.double() - 1, exact[2].grad, rtol=1e-5, atol=1e-5)


def test_compiled_code_accumulates_into_the_same_memory():
    torch._dynamo.reset()
    table = torch.randn(20, 16, device=DEVICE, requires_grad=True)
    grad_buffer = torch.zeros(20, 16, device=DEVICE)
    token_ids = torch.tensor([[3, 3, 5, 19]], device=DEVICE)
    address = grad_buffer.data_ptr()

    gate, v = torch.ones(1, 4, 2, device=DEVICE, requires_grad=True), torch.zeros(1, 4, 2, 8, device=DEVICE)

    def loss(table, grad_buffer):
        rows = embedding_grad.embedding_lookup(table, grad_buffer, token_ids, torch.float32)
        return (
            rows.square().sum()
            + embedding_grad.add_gated_embedding(v, gate, table, grad_buffer, token_ids).square().sum()
        )

    compiled = torch.compile(
        loss, fullgraph=True, backend="inductor" if DEVICE.type == "cuda" else "aot_eager"
    )
    for _ in range(3):
        compiled(table, grad_buffer).backward()
    assert grad_buffer.data_ptr() == address
    assert table.grad is None
    truth = torch.zeros_like(grad_buffer).index_add(
        0, token_ids.flatten(), 12 * table.detach()[token_ids.flatten()]
    )
    torch.testing.assert_close(grad_buffer, truth)
