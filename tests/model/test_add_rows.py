"""Rows added into a table's gradient: the kernel and its reference, equal tokens included."""

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")
from nanorun.model.kernels import add_rows

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize("shape", [(2, 5, 16), (1, 33, 48), (3, 7, 1100)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_kernel_adds_what_the_reference_adds(shape, dtype):
    dice = torch.Generator().manual_seed(0)
    rows = torch.randn(shape, generator=dice).to(DEVICE, dtype)
    tokens = torch.randint(0, 6, shape[:-1], generator=dice).to(DEVICE)
    sums = torch.randn(9, shape[-1], generator=dice).to(DEVICE)
    truth = add_rows.reference(sums.double(), tokens, rows)
    add_rows.add_rows(sums, tokens, rows)
    torch.testing.assert_close(sums.double(), truth, rtol=1e-5, atol=1e-5)


def test_compiled_it_adds_to_the_same_memory():
    torch._dynamo.reset()
    table = torch.randn(20, 16, device=DEVICE, requires_grad=True)
    sums = torch.zeros(20, 16, device=DEVICE)
    tokens = torch.tensor([[3, 3, 5, 19]], device=DEVICE)
    where = sums.data_ptr()

    def loss(table, sums):
        return add_rows.look_up(table, sums, tokens, torch.float32).square().sum()

    compiled = torch.compile(
        loss, fullgraph=True, backend="inductor" if DEVICE.type == "cuda" else "aot_eager"
    )
    for _ in range(3):
        compiled(table, sums).backward()
    assert sums.data_ptr() == where
    assert table.grad is None
    truth = torch.zeros_like(sums).index_add(0, tokens.flatten(), 6 * table.detach()[tokens.flatten()])
    torch.testing.assert_close(sums, truth)
