"""Loss and gradient of softcapped logits."""

import torch
from torch import Tensor

from nanorun.model.kernels import fp8
from nanorun.model.kernels.language import tl, triton

BLOCK = 8_192  # columns that a program holds
TILE_ROWS, TILE_COLUMNS = 64, 64  # of a gradient written with its transpose


@triton.jit
def _tanh(y, FAST_TANH: tl.constexpr):
    if FAST_TANH:
        return tl.inline_asm_elementwise(
            "tanh.approx.f32 $0, $1;", "=f,f", [y], dtype=tl.float32, is_pure=True, pack=1
        )
    return 1 - 2 / (1 + tl.exp(2 * y))


@triton.jit
def _softcap_loss_kernel(
    logits,
    targets,
    losses,
    log2_sums,
    softcap,
    COLUMNS: tl.constexpr,
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
    FAST_TANH: tl.constexpr,
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
        sums += tl.where(column < VOCAB, tl.exp2(_tanh(z * inverse, FAST_TANH) * scale), 0.0)
    log2_total = tl.log2(tl.sum(sums, 0))
    loss = log2_total * 0.6931471805599453 - softcap * _tanh(z_target * inverse, FAST_TANH)
    tl.store(losses + row, tl.where(trained, loss, 0.0))
    tl.store(log2_sums + row, log2_total)
    if GRADIENT:
        for first in range(0, COLUMNS, BLOCK):
            column = first + tl.arange(0, BLOCK)
            z = tl.load(start + column, mask=column < VOCAB, other=0.0).to(tl.float32)
            t = _tanh(z * inverse, FAST_TANH)
            dz = (tl.exp2(t * scale - log2_total) - tl.where(column == target, 1.0, 0.0)) * (1 - t * t)
            dz = tl.where(trained & (column < VOCAB), dz, 0.0)
            tl.store(start + column, dz.to(logits.dtype.element_ty), mask=column < COLUMNS)


@triton.jit
def _softcap_loss_grad_fp8_kernel(
    logits,
    targets,
    log2_sums,
    softcap,
    q,
    q_t,
    scale,
    rows,
    padded,
    pitch,
    COLUMNS: tl.constexpr,
    VOCAB: tl.constexpr,
    ROWS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
    FP8_MAX: tl.constexpr,
    FAST_TANH: tl.constexpr,
):
    scale_value, inv_scale = fp8.power_of_two_scale(1.0, FP8_MAX)  # no gradient of a logit is larger
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(0) * TILE_COLUMNS + tl.arange(0, TILE_COLUMNS)
    target = tl.load(targets + row, mask=row < rows, other=-1).to(tl.int32)[:, None]
    log2_total = tl.load(log2_sums + row, mask=row < rows, other=0.0)[:, None]
    at = row.to(tl.int64)[:, None] * COLUMNS + column[None, :]
    inside = (row < rows)[:, None] & (column < VOCAB)[None, :]
    z = tl.load(logits + at, mask=inside, other=0.0).to(tl.float32)
    t = _tanh(z * (1.0 / softcap), FAST_TANH)
    probability = tl.exp2(t * (softcap * 1.4426950408889634) - log2_total)
    dz = (probability - tl.where(column[None, :] == target, 1.0, 0.0)) * (1 - t * t)
    dz = tl.where(inside & (target >= 0), dz, 0.0) * inv_scale
    fp8.store_with_transpose(dz, row, column, q, q_t, rows, COLUMNS, padded, pitch)
    if tl.program_id(0) + tl.program_id(1) == 0:
        tl.store(scale, scale_value)


@torch.library.custom_op("nanorun::softcap_loss", mutates_args={"logits"})
def softcap_loss(logits: Tensor, targets: Tensor, softcap: float, vocab_size: int, gradient: bool) -> Tensor:
    """The loss of each row of (n, V) logits, 0 where the target is -1. With `gradient`, overwrites the logits with
    their gradient."""
    losses = logits.new_empty(logits.shape[0], dtype=torch.float32)
    _launch_loss(logits, targets, softcap, vocab_size, losses, gradient)
    return losses


softcap_loss.register_fake(lambda logits, *others: logits.new_empty(logits.shape[0], dtype=torch.float32))


@torch.library.custom_op("nanorun::softcap_loss_fp8", mutates_args={"losses", "gradient", "gradient_t"})
def softcap_loss_fp8(
    logits: Tensor,
    targets: Tensor,
    softcap: float,
    vocab_size: int,
    losses: Tensor,
    gradient: Tensor,
    gradient_t: Tensor,
    first: int,
) -> Tensor:
    """Writes the loss of each row of (n, V) logits to `losses` (n,), 0 where the target is -1; and its gradient in
    e5m2, (softmax - onehot)·(1 - tanh²), to rows first to first + n of `gradient` (N, V) and to these columns of its
    transpose (V, N). Returns the scale of the gradient, which is always the same: no entry exceeds 1."""
    rows, columns = logits.shape
    log2_sums = _launch_loss(logits, targets, softcap, vocab_size, losses, gradient=False)
    scale = logits.new_empty(1, dtype=torch.float32)
    q, q_t = gradient[first:], gradient_t[:, first:]
    _softcap_loss_grad_fp8_kernel[(triton.cdiv(columns, TILE_COLUMNS), triton.cdiv(rows, TILE_ROWS))](
        logits,
        targets,
        log2_sums,
        softcap,
        q,
        q_t,
        scale,
        rows,
        fp8.padded(rows),
        gradient_t.shape[1],
        COLUMNS=columns,
        VOCAB=vocab_size,
        ROWS=TILE_ROWS,
        TILE_COLUMNS=TILE_COLUMNS,
        FP8_MAX=fp8.FP8_MAX[fp8.E5M2],
        FAST_TANH=_use_fast_tanh(logits),
        num_warps=8,
    )
    return scale


softcap_loss_fp8.register_fake(lambda logits, *others: logits.new_empty(1, dtype=torch.float32))


def _launch_loss(
    logits: Tensor, targets: Tensor, softcap: float, vocab_size: int, losses: Tensor, gradient: bool
) -> Tensor:
    """Writes the losses. Returns log2 of the sums of exponentials."""
    rows, columns = logits.shape
    log2_sums = logits.new_empty(rows, dtype=torch.float32)
    _softcap_loss_kernel[(rows,)](
        logits,
        targets,
        losses,
        log2_sums,
        softcap,
        COLUMNS=columns,
        VOCAB=vocab_size,
        BLOCK=min(BLOCK, triton.next_power_of_2(columns)),
        FAST_TANH=_use_fast_tanh(logits),
        GRADIENT=gradient,
        num_warps=16 if columns >= BLOCK else 4,
    )
    return log2_sums


def _use_fast_tanh(logits: Tensor) -> bool:
    return logits.dtype != torch.float32 and logits.device.type != "cpu"
