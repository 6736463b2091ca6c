"""Gradients of an embedding table, added up where they belong.

A micro-step looks up a few thousand of a table's rows, and autograd makes a gradient of the whole table of it:
zeros everywhere, rows added into them, and the whole added to the gradient so far. A d12 has seven tables of
100 MB and sixteen micro-steps; those zeros and sums are 45 GB a step, and the rows themselves a tenth of it.

So the sum over micro-steps is one buffer, and the backward pass adds the rows of its tokens to it. The buffer
is the table's `.grad`; autograd itself gets no gradient. Compiled, nothing is copied: the operator writes to
the buffer in place (checked in the generated code).

Most tables are of values, whose rows are not used as they are but added to something through a gate: `add_gated`
does that, and in its backward pass one kernel makes the gradients of rows and gate, with no row written in between.

Rows of equal tokens are added in any order, so sums differ in their last bits from run to run, as they do in the
compiled code without this; with deterministic algorithms torch's ordered `index_add_` is used.
`reference` is the gradient in plain PyTorch, and the truth.
"""

from typing import Any

import torch
from torch import Tensor

from nanorun.model.kernels import whole

try:
    import triton
    import triton.language as tl
except ImportError:  # a CPU build of torch has no Triton
    triton = None

COLUMNS = 1024  # at most, for each program


def reference(sums: Tensor, tokens: Tensor, rows: Tensor) -> Tensor:
    """sums (V, D) with each of rows (..., D) added to that of its token (...)."""
    return sums.index_add(0, tokens.flatten(), rows.flatten(0, -2).to(sums.dtype))


@whole
def look_up(table: Tensor, sums: Tensor, tokens: Tensor, dtype: torch.dtype) -> Tensor:
    """Rows of (V, D), as `dtype`; their gradients go to `sums`."""
    rows: Tensor = _LookUp.apply(table, sums, tokens, dtype)
    return rows


class _LookUp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, table: Tensor, sums: Tensor, tokens: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.save_for_backward(sums, tokens)
        return table[tokens].to(dtype)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[None, ...]:
        sums, tokens = ctx.saved_tensors
        add_rows(sums, tokens, dy)
        return None, None, None, None


@whole
def add_gated(v: Tensor, gate: Tensor, table: Tensor, sums: Tensor, tokens: Tensor) -> Tensor:
    """v (..., K, D) plus each token's row of (V, K·D) times gate (..., K); the rows' gradients go to `sums`."""
    added: Tensor = _AddGated.apply(v, gate, table, sums, tokens)
    return added


def gated(v: Tensor, gate: Tensor, rows: Tensor) -> Tensor:
    """The same from rows at hand, in plain PyTorch."""
    return v + gate.unsqueeze(-1) * rows.to(v.dtype).view(v.shape)


class _AddGated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, v: Tensor, gate: Tensor, table: Tensor, sums: Tensor, tokens: Tensor) -> Tensor:
        ctx.save_for_backward(gate, table, sums, tokens)
        return gated(v, gate, table[tokens])

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        gate, table, sums, tokens = ctx.saved_tensors
        return dy, gated_backward(sums, dy, gate, table, tokens), None, None, None


if triton is not None:

    @triton.jit
    def _gated_kernel(
        sums,
        dy,
        gate,
        table,
        tokens,
        dgate,
        HEADS: tl.constexpr,
        DIM: tl.constexpr,
        MOST_HEADS: tl.constexpr,
        MOST_DIM: tl.constexpr,
    ):
        at = tl.program_id(0).to(tl.int64)
        token = tl.load(tokens + at).to(tl.int64)
        head, channel = tl.arange(0, MOST_HEADS), tl.arange(0, MOST_DIM)
        inside = (head < HEADS)[:, None] & (channel < DIM)[None, :]
        column = head[:, None] * DIM + channel[None, :]
        gradient = tl.load(dy + at * HEADS * DIM + column, mask=inside, other=0.0).to(tl.float32)
        row = tl.load(table + token * HEADS * DIM + column, mask=inside, other=0.0)
        row = row.to(dy.dtype.element_ty).to(tl.float32)  # as it was added
        tl.store(dgate + at * HEADS + head, tl.sum(gradient * row, 1), mask=head < HEADS)
        share = tl.load(gate + at * HEADS + head, mask=head < HEADS, other=0.0).to(tl.float32)
        to = sums + token * HEADS * DIM + column
        tl.atomic_add(to, gradient * share[:, None], mask=inside, sem="relaxed")

    @triton.jit
    def _add_kernel(sums, tokens, rows, WIDTH: tl.constexpr, COLUMNS: tl.constexpr):
        at = tl.program_id(0)
        token = tl.load(tokens + at).to(tl.int64)
        column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        row = tl.load(rows + at.to(tl.int64) * WIDTH + column, mask=column < WIDTH, other=0.0).to(tl.float32)
        tl.atomic_add(sums + token * WIDTH + column, row, mask=column < WIDTH, sem="relaxed")


@torch.library.custom_op("nanorun::add_rows", mutates_args={"sums"})
def add_rows(sums: Tensor, tokens: Tensor, rows: Tensor) -> None:
    """`reference`, in place."""
    if triton is None or sums.dtype != torch.float32 or torch.are_deterministic_algorithms_enabled():
        sums.index_add_(0, tokens.flatten(), rows.flatten(0, -2).to(sums.dtype))
        return
    width = sums.shape[1]
    columns = min(COLUMNS, triton.next_power_of_2(width))
    _add_kernel[(tokens.numel(), triton.cdiv(width, columns))](
        sums, tokens.contiguous(), rows.contiguous(), width, columns, num_warps=4
    )


@add_rows.register_fake
def _(sums: Tensor, tokens: Tensor, rows: Tensor) -> None:
    return None


@torch.library.custom_op("nanorun::gated_backward", mutates_args={"sums"})
def gated_backward(sums: Tensor, dy: Tensor, gate: Tensor, table: Tensor, tokens: Tensor) -> Tensor:
    """The gradient of `gate`, from that of what `add_gated` returned; that of the rows is added to `sums`."""
    *_, heads, dim = dy.shape
    if triton is None or sums.dtype != torch.float32 or torch.are_deterministic_algorithms_enabled():
        rows = table[tokens].to(dy.dtype).view(dy.shape)
        share = (dy.float() * gate.float().unsqueeze(-1)).flatten(-2)
        sums.index_add_(0, tokens.flatten(), share.flatten(0, -2).to(sums.dtype))
        return (dy.float() * rows.float()).sum(-1).to(gate.dtype)
    dgate = torch.empty_like(gate, memory_format=torch.contiguous_format)
    _gated_kernel[(tokens.numel(),)](
        sums,
        dy.contiguous(),
        gate.contiguous(),
        table,
        tokens.contiguous(),
        dgate,
        HEADS=heads,
        DIM=dim,
        MOST_HEADS=triton.next_power_of_2(heads),
        MOST_DIM=triton.next_power_of_2(dim),
        num_warps=4,
    )
    return dgate


@gated_backward.register_fake
def _(sums: Tensor, dy: Tensor, gate: Tensor, table: Tensor, tokens: Tensor) -> Tensor:
    return torch.empty_like(gate, memory_format=torch.contiguous_format)
