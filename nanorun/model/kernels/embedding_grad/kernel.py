"""Embedding lookups whose gradients are accumulated in place."""

from typing import Any, cast

import torch
from torch import Tensor

from nanorun.model.kernels import opaque_to_dynamo
from nanorun.model.kernels.embedding_grad.reference import add_gated_rows
from nanorun.model.kernels.language import HAS_TRITON, tl, triton

COLUMNS = 1024  # at most, for each program


@opaque_to_dynamo
def embedding_lookup(table: Tensor, grad_buffer: Tensor, token_ids: Tensor, dtype: torch.dtype) -> Tensor:
    """table[token_ids], rows of (V, D), cast to `dtype`. The backward pass adds their gradients to `grad_buffer`, in
    place: grad_buffer[token_ids] += dy. Autograd itself gets no gradient of the table."""
    return cast(Tensor, _EmbeddingLookup.apply(table, grad_buffer, token_ids, dtype))


class _EmbeddingLookup(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, table: Tensor, grad_buffer: Tensor, token_ids: Tensor, dtype: torch.dtype
    ) -> Tensor:
        ctx.save_for_backward(grad_buffer, token_ids)
        return table[token_ids].to(dtype)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[None, ...]:
        grad_buffer, token_ids = ctx.saved_tensors
        accumulate(grad_buffer, token_ids, dy)
        return None, None, None, None


@opaque_to_dynamo
def add_gated_embedding(
    v: Tensor, gate: Tensor, table: Tensor, grad_buffer: Tensor, token_ids: Tensor
) -> Tensor:
    """v (..., K, D) plus each token's row of (V, K·D) times gate (..., K); the gradients of the rows are added to
    `grad_buffer`."""
    return cast(Tensor, _AddGatedEmbedding.apply(v, gate, table, grad_buffer, token_ids))


class _AddGatedEmbedding(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, v: Tensor, gate: Tensor, table: Tensor, grad_buffer: Tensor, token_ids: Tensor
    ) -> Tensor:
        ctx.save_for_backward(gate, table, grad_buffer, token_ids)
        return add_gated_rows(v, gate, table[token_ids])

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        gate, table, grad_buffer, token_ids = ctx.saved_tensors
        return dy, gated_embedding_backward(grad_buffer, dy, gate, table, token_ids), None, None, None


@triton.jit
def _gated_embedding_backward_kernel(
    grad_buffer,
    dy,
    gate,
    table,
    token_ids,
    dgate,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
):
    at = tl.program_id(0).to(tl.int64)
    token = tl.load(token_ids + at).to(tl.int64)
    head, channel = tl.arange(0, BLOCK_HEADS), tl.arange(0, BLOCK_DIM)
    inside = (head < HEADS)[:, None] & (channel < DIM)[None, :]
    column = head[:, None] * DIM + channel[None, :]
    gradient = tl.load(dy + at * HEADS * DIM + column, mask=inside, other=0.0).to(tl.float32)
    row = tl.load(table + token * HEADS * DIM + column, mask=inside, other=0.0)
    row = row.to(dy.dtype.element_ty).to(tl.float32)  # rounded as in the forward pass
    tl.store(dgate + at * HEADS + head, tl.sum(gradient * row, 1), mask=head < HEADS)
    gate_value = tl.load(gate + at * HEADS + head, mask=head < HEADS, other=0.0).to(tl.float32)
    to = grad_buffer + token * HEADS * DIM + column
    tl.atomic_add(to, gradient * gate_value[:, None], mask=inside, sem="relaxed")


@triton.jit
def _embedding_grad_kernel(grad_buffer, token_ids, rows, WIDTH: tl.constexpr, COLUMNS: tl.constexpr):
    at = tl.program_id(0)
    token = tl.load(token_ids + at).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    row = tl.load(rows + at.to(tl.int64) * WIDTH + column, mask=column < WIDTH, other=0.0).to(tl.float32)
    tl.atomic_add(grad_buffer + token * WIDTH + column, row, mask=column < WIDTH, sem="relaxed")


def _uses_atomics(grad_buffer: Tensor) -> bool:
    deterministic = torch.are_deterministic_algorithms_enabled()
    return HAS_TRITON and grad_buffer.dtype == torch.float32 and not deterministic


@torch.library.custom_op("nanorun::embedding_grad", mutates_args={"grad_buffer"})
def accumulate(grad_buffer: Tensor, token_ids: Tensor, rows: Tensor) -> None:
    """`reference.accumulate`, in place."""
    if not _uses_atomics(grad_buffer):
        grad_buffer.index_add_(0, token_ids.flatten(), rows.flatten(0, -2).to(grad_buffer.dtype))
        return
    width = grad_buffer.shape[1]
    columns = min(COLUMNS, triton.next_power_of_2(width))
    _embedding_grad_kernel[(token_ids.numel(), triton.cdiv(width, columns))](
        grad_buffer, token_ids.contiguous(), rows.contiguous(), width, columns, num_warps=4
    )


accumulate.register_fake(lambda grad_buffer, token_ids, rows: None)


@torch.library.custom_op("nanorun::gated_embedding_backward", mutates_args={"grad_buffer"})
def gated_embedding_backward(
    grad_buffer: Tensor, dy: Tensor, gate: Tensor, table: Tensor, token_ids: Tensor
) -> Tensor:
    """The gradient of `gate`, from that of the result of `add_gated_embedding`; that of the rows is added to
    `grad_buffer`."""
    *_, heads, dim = dy.shape
    if not _uses_atomics(grad_buffer):
        rows = table[token_ids].to(dy.dtype).view(dy.shape)
        drows = (dy.float() * gate.float().unsqueeze(-1)).flatten(-2)
        grad_buffer.index_add_(0, token_ids.flatten(), drows.flatten(0, -2).to(grad_buffer.dtype))
        return (dy.float() * rows.float()).sum(-1).to(gate.dtype)
    dgate = _empty_like_contiguous(gate)
    _gated_embedding_backward_kernel[(token_ids.numel(),)](
        grad_buffer,
        dy.contiguous(),
        gate.contiguous(),
        table,
        token_ids.contiguous(),
        dgate,
        HEADS=heads,
        DIM=dim,
        BLOCK_HEADS=triton.next_power_of_2(heads),
        BLOCK_DIM=triton.next_power_of_2(dim),
        num_warps=4,
    )
    return dgate


def _empty_like_contiguous(gate: Tensor) -> Tensor:
    return torch.empty_like(gate, memory_format=torch.contiguous_format)


gated_embedding_backward.register_fake(lambda grad_buffer, dy, gate, *others: _empty_like_contiguous(gate))
