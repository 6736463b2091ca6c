"""Softcapped cross entropy of rows of logits and its gradient, in one kernel on a GPU.

The head's logits are the largest tensor of a step, so the cost of the loss is the bytes it moves. One program
takes one row, in blocks, twice: first it sums the exponentials, then it writes the gradient where the logits
were; the second time the row comes from the cache. (Holding the whole row in registers was slower: it spills.)

    t = tanh(z/cap)      Σ = sum exp(cap·t)      loss = log Σ - cap·t[target]
    dz = (exp(cap·t)/Σ - onehot(target))·(1 - t²)

`_chunk_loss` in model/loss.py is the same in plain PyTorch, and the truth in tests.

For 16-bit logits tanh is the GPU's own approximate instruction: its error (2⁻¹¹ of the value) is a quarter of
the logits' rounding to bf16.

For a head in eight bits the gradient is wanted as e5m2 and transposed as well (fp8.py says why), so tiles have
to be written. Then sums and gradient are two kernels, and the logits are read twice from memory; but what is
written is half as much, so it takes about as long.

Does not cover: no softcap, or one so large that the exponentials need a maximum
subtracted; targets past the vocabulary.
"""

from typing import Any

import torch
from torch import Tensor

from nanorun.model.kernels import fp8

try:
    import triton
    import triton.language as tl
except ImportError:  # a CPU build of torch has no Triton
    triton = None

BLOCK = 8_192  # columns at a time
TILE_ROWS, TILE_COLUMNS = 64, 64  # of a gradient written both ways

if triton is not None:

    @triton.jit
    def _tanh(y, FAST: tl.constexpr):
        if FAST:
            return tl.inline_asm_elementwise(
                "tanh.approx.f32 $0, $1;", "=f,f", [y], dtype=tl.float32, is_pure=True, pack=1
            )
        return 1 - 2 / (1 + tl.exp(2 * y))

    @triton.jit
    def _row(
        logits,
        targets,
        losses,
        totals,
        softcap,
        COLUMNS: tl.constexpr,
        VOCAB: tl.constexpr,
        BLOCK: tl.constexpr,
        FAST: tl.constexpr,
        GRADIENT: tl.constexpr,
    ):
        row = tl.program_id(0).to(tl.int64)
        target = tl.load(targets + row)
        trained = target >= 0
        inverse = 1.0 / softcap
        start = logits + row * COLUMNS
        z_target = tl.load(start + tl.maximum(target, 0)).to(tl.float32)
        scale = softcap * 1.4426950408889634
        sums = tl.zeros([BLOCK], tl.float32)
        for first in range(0, VOCAB, BLOCK):
            column = first + tl.arange(0, BLOCK)
            z = tl.load(start + column, mask=column < VOCAB, other=0.0).to(tl.float32)
            sums += tl.where(column < VOCAB, tl.exp2(_tanh(z * inverse, FAST) * scale), 0.0)
        log2_total = tl.log2(tl.sum(sums, 0))
        loss = log2_total * 0.6931471805599453 - softcap * _tanh(z_target * inverse, FAST)
        tl.store(losses + row, tl.where(trained, loss, 0.0))
        tl.store(totals + row, log2_total)
        if GRADIENT:
            for first in range(0, COLUMNS, BLOCK):
                column = first + tl.arange(0, BLOCK)
                z = tl.load(start + column, mask=column < VOCAB, other=0.0).to(tl.float32)
                t = _tanh(z * inverse, FAST)
                dz = (tl.exp2(t * scale - log2_total) - tl.where(column == target, 1.0, 0.0)) * (1 - t * t)
                dz = tl.where(trained & (column < VOCAB), dz, 0.0)
                tl.store(start + column, dz.to(logits.dtype.element_ty), mask=column < COLUMNS)

    @triton.jit
    def _gradient_tile(
        logits,
        targets,
        totals,
        softcap,
        q,
        qt,
        unit,
        rows,
        padded,
        pitch,
        COLUMNS: tl.constexpr,
        VOCAB: tl.constexpr,
        TILE: tl.constexpr,
        WIDE: tl.constexpr,
        MOST: tl.constexpr,
        FAST: tl.constexpr,
    ):
        size, inverse = fp8.power_of_two(1.0, MOST)  # no gradient of a logit is larger
        row = tl.program_id(1) * TILE + tl.arange(0, TILE)
        column = tl.program_id(0) * WIDE + tl.arange(0, WIDE)
        target = tl.load(targets + row, mask=row < rows, other=-1).to(tl.int32)[:, None]
        log2_total = tl.load(totals + row, mask=row < rows, other=0.0)[:, None]
        at = row.to(tl.int64)[:, None] * COLUMNS + column[None, :]
        inside = (row < rows)[:, None] & (column < VOCAB)[None, :]
        z = tl.load(logits + at, mask=inside, other=0.0).to(tl.float32)
        t = _tanh(z * (1.0 / softcap), FAST)
        share = tl.exp2(t * (softcap * 1.4426950408889634) - log2_total)
        dz = (share - tl.where(column[None, :] == target, 1.0, 0.0)) * (1 - t * t)
        dz = tl.where(inside & (target >= 0), dz, 0.0) * inverse
        fp8.store_both(dz, row, column, q, qt, rows, COLUMNS, padded, pitch)
        if tl.program_id(0) + tl.program_id(1) == 0:
            tl.store(unit, size)


@torch.library.custom_op("nanorun::softcap_loss", mutates_args={"logits"})
def softcap_loss(logits: Tensor, targets: Tensor, softcap: float, vocab_size: int, gradient: bool) -> Tensor:
    """The loss of each row of (n, V) logits, 0 where the target is -1; `gradient`: they become its gradient."""
    losses = logits.new_empty(logits.shape[0], dtype=torch.float32)
    _rows(logits, targets, softcap, vocab_size, losses, gradient)
    return losses


@softcap_loss.register_fake
def _(logits: Tensor, targets: Tensor, softcap: float, vocab_size: int, gradient: bool) -> Tensor:
    return logits.new_empty(logits.shape[0], dtype=torch.float32)


@torch.library.custom_op("nanorun::softcap_loss_fp8", mutates_args={"losses", "gradient", "turned"})
def softcap_loss_fp8(
    logits: Tensor,
    targets: Tensor,
    softcap: float,
    vocab_size: int,
    losses: Tensor,
    gradient: Tensor,
    turned: Tensor,
    first: int,
) -> Tensor:
    """The loss of each row of (n, V) logits, into `losses` (n,), and its gradient in e5m2, into rows of `gradient`
    (N, V) and, transposed, into columns of `turned` (V, N), from `first` on; returns the gradient's unit."""
    rows, columns = logits.shape
    totals = _rows(logits, targets, softcap, vocab_size, losses, gradient=False)
    unit = logits.new_empty(1, dtype=torch.float32)
    q, qt = gradient[first:], turned[:, first:]
    _gradient_tile[(triton.cdiv(columns, TILE_COLUMNS), triton.cdiv(rows, TILE_ROWS))](
        logits,
        targets,
        totals,
        softcap,
        q,
        qt,
        unit,
        rows,
        fp8.padded(rows),
        turned.shape[1],
        COLUMNS=columns,
        VOCAB=vocab_size,
        TILE=TILE_ROWS,
        WIDE=TILE_COLUMNS,
        MOST=fp8.MOST[fp8.E5M2],
        FAST=_fast(logits),
        num_warps=8,
    )
    return unit


@softcap_loss_fp8.register_fake
def _(logits: Tensor, *others: Any) -> Tensor:
    return logits.new_empty(1, dtype=torch.float32)


def _rows(
    logits: Tensor, targets: Tensor, softcap: float, vocab_size: int, losses: Tensor, gradient: bool
) -> Tensor:
    """Logarithms (to base 2) of the sums of exponentials; losses where they shall go."""
    rows, columns = logits.shape
    totals = logits.new_empty(rows, dtype=torch.float32)
    _row[(rows,)](
        logits,
        targets,
        losses,
        totals,
        softcap,
        COLUMNS=columns,
        VOCAB=vocab_size,
        BLOCK=min(BLOCK, triton.next_power_of_2(columns)),
        FAST=_fast(logits),
        GRADIENT=gradient,
        num_warps=16 if columns >= BLOCK else 4,
    )
    return totals


def _fast(logits: Tensor) -> bool:
    return logits.dtype != torch.float32 and logits.device.type != "cpu"
