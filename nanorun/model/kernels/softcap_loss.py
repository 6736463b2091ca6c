"""Softcapped cross entropy of rows of logits and its gradient, in one kernel on a GPU.

The head's logits are the largest tensor of a step, so the cost of the loss is the bytes it moves. One program
takes one row, in blocks, twice: first it sums the exponentials, then it writes the gradient where the logits
were; the second time the row comes from the cache. (Holding the whole row in registers was slower: it spills.)

    t = tanh(z/cap)      Σ = sum exp(cap·t)      loss = log Σ - cap·t[target]
    dz = (exp(cap·t)/Σ - onehot(target))·(1 - t²)

`_chunk_loss` in model/loss.py is the same in plain PyTorch, and the truth in tests.

For 16-bit logits tanh is the GPU's own approximate instruction: its error (2⁻¹¹ of the value) is a quarter of
the logits' rounding to bf16. Does not cover: no softcap, or one so large that the exponentials need a maximum
subtracted; targets past the vocabulary.
"""

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:  # a CPU build of torch has no Triton
    triton = None

BLOCK = 8_192  # columns at a time

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
        if GRADIENT:
            for first in range(0, COLUMNS, BLOCK):
                column = first + tl.arange(0, BLOCK)
                z = tl.load(start + column, mask=column < VOCAB, other=0.0).to(tl.float32)
                t = _tanh(z * inverse, FAST)
                dz = (tl.exp2(t * scale - log2_total) - tl.where(column == target, 1.0, 0.0)) * (1 - t * t)
                dz = tl.where(trained & (column < VOCAB), dz, 0.0)
                tl.store(start + column, dz.to(logits.dtype.element_ty), mask=column < COLUMNS)


@torch.library.custom_op("nanorun::softcap_loss", mutates_args={"logits"})
def softcap_loss(logits: Tensor, targets: Tensor, softcap: float, vocab_size: int, gradient: bool) -> Tensor:
    """The loss of each row of (n, V) logits, 0 where the target is -1; `gradient`: they become its gradient."""
    rows, columns = logits.shape
    losses = logits.new_empty(rows, dtype=torch.float32)
    _row[(rows,)](
        logits,
        targets,
        losses,
        softcap,
        COLUMNS=columns,
        VOCAB=vocab_size,
        BLOCK=min(BLOCK, triton.next_power_of_2(columns)),
        FAST=logits.dtype != torch.float32 and logits.is_cuda,
        GRADIENT=gradient,
        num_warps=16 if columns >= BLOCK else 4,
    )
    return losses


@softcap_loss.register_fake
def _(logits: Tensor, targets: Tensor, softcap: float, vocab_size: int, gradient: bool) -> Tensor:
    return logits.new_empty(logits.shape[0], dtype=torch.float32)
