# mypy: disallow-untyped-defs=False
"""The kernels of a decode step that are not matrices: embedding, residual and RMSNorm, activations, greedy sampling.

For few rows, residuals, norms and activations are part of the matrix kernels (`linear.py`); for many rows the
matrices are cuBLAS's, and these kernels run between them. One program per row, or per block of a row.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from nanorun.infer.kernels.language import grid_dependency_wait, launch_dependents
from nanorun.infer.kernels.linear import EPS, Activation, activate
from nanorun.model.kernels.language import tl, triton

BLOCK = 2048
VOCAB_BLOCK = 16_384


# ---- references


def embed_reference(
    table: Tensor,
    smear: Tensor | None,
    tokens: Tensor,
    history: Tensor,
    slots: Tensor,
    positions: Tensor,
    dtype: torch.dtype,
) -> Tensor:
    """x0 (B, width); writes the tokens to `history`."""
    slots, positions, tokens = slots.long(), positions.long(), tokens.long()
    previous = history[slots, (positions - 1) % history.size(1)].long()
    history[slots, positions % history.size(1)] = tokens.to(history.dtype)
    x = table[tokens].to(dtype)
    if smear is None:
        return x
    gate = smear[tokens].to(dtype) * (positions > 0)[:, None]
    return x + gate * table[torch.where(positions > 0, previous, 0)].to(dtype)


def residual_norm_reference(
    x: Tensor, y: Tensor | None, alpha: float = 1.0, beta: float = 0.0, extra: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """The new residual stream alpha·(x + y) + beta·extra, its RMSNorm, and x + y itself."""
    after = x if y is None else x + y.to(x.dtype)
    stream = alpha * after if extra is None else alpha * after + beta * extra
    return stream, F.rms_norm(stream, (x.size(-1),), eps=EPS), after


def greedy_sample_reference(logits: Tensor, slots: Tensor, table: Tensor) -> Tensor:
    """(B, 2): the number of sampled tokens, which is 1, and the token. Advances the slots in the table."""
    token = logits.argmax(-1)
    length, _, max_length = table[:3].index_select(1, slots)
    table[:2, slots] = torch.stack([torch.minimum(length + 1, max_length), token])
    return torch.stack([torch.ones_like(token), token], 1)


# ---- kernels


@triton.jit
def _embed(
    table,
    tokens,
    history,
    slots,
    positions,
    smear,
    x0,
    stream,
    stream_scale,
    WIDTH: tl.constexpr,
    WIDTH_PADDED: tl.constexpr,
    LENGTH: tl.constexpr,
    SMEAR: tl.constexpr,
    PDL: tl.constexpr,
):
    launch_dependents(PDL)
    row = tl.program_id(0)
    d = tl.arange(0, WIDTH_PADDED)
    mask = d < WIDTH
    token = tl.load(tokens + row).to(tl.int64)
    position = tl.load(positions + row).to(tl.int64)
    row_history = history + tl.load(slots + row).to(tl.int64) * LENGTH
    x = tl.load(table + token * WIDTH + d, mask=mask, other=0.0).to(tl.float32)
    if SMEAR:
        previous = tl.load(row_history + (position + LENGTH - 1) % LENGTH, mask=position > 0, other=0).to(
            tl.int64
        )
        gate = tl.load(smear + token, mask=position > 0, other=0.0).to(tl.float32)
        x += gate * tl.load(table + previous * WIDTH + d, mask=mask, other=0.0).to(tl.float32)
    tl.store(row_history + position % LENGTH, token.to(history.dtype.element_ty))
    tl.store(x0 + row * WIDTH + d, x.to(x0.dtype.element_ty), mask=mask)
    tl.store(stream + row * WIDTH + d, (stream_scale * x).to(stream.dtype.element_ty), mask=mask)


@triton.jit
def _residual_norm(
    x,
    y,
    extra,
    keep,
    out,
    normed,
    alpha,
    beta,
    WIDTH: tl.constexpr,
    WIDTH_PADDED: tl.constexpr,
    EPS: tl.constexpr,
    ADD: tl.constexpr,
    EXTRA: tl.constexpr,
    KEEP: tl.constexpr,
    PDL: tl.constexpr,
):
    launch_dependents(PDL)
    grid_dependency_wait(PDL)
    d = tl.arange(0, WIDTH_PADDED)
    mask = d < WIDTH
    at = tl.program_id(0) * WIDTH + d
    value = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
    if ADD:
        value += tl.load(y + at, mask=mask, other=0.0).to(tl.float32)
    if KEEP:
        tl.store(keep + at, value.to(keep.dtype.element_ty), mask=mask)
    value *= alpha
    if EXTRA:
        value += beta * tl.load(extra + at, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + at, value.to(out.dtype.element_ty), mask=mask)
    value *= tl.rsqrt(tl.sum(value * value, 0) / WIDTH + EPS)
    tl.store(normed + at, value.to(normed.dtype.element_ty), mask=mask)


@triton.jit
def _activate(
    x,
    y,
    cap,
    width,
    x_stride,
    y_stride,
    ACTIVATION: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    launch_dependents(PDL)
    grid_dependency_wait(PDL)
    row = tl.program_id(0)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + row * x_stride + d, mask=d < width, other=0.0).to(tl.float32)
    tl.store(y + row * y_stride + d, activate(value, cap, ACTIVATION).to(y.dtype.element_ty), mask=d < width)


@triton.jit
def _greedy_sample(
    logits, slots, table, out, vocab, columns, logits_stride, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    launch_dependents(PDL)
    grid_dependency_wait(PDL)
    row = tl.program_id(0)
    i = tl.arange(0, BLOCK)
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    where = tl.full([BLOCK], 0, tl.int32)
    for first in tl.range(0, vocab, BLOCK):
        value = tl.load(logits + row * logits_stride + first + i, mask=first + i < vocab, other=float("-inf"))
        larger = value > best  # false for NaN
        where = tl.where(larger, first + i, where)
        best = tl.where(larger, value, best)
    top = tl.max(best, 0)
    # the first of equal maxima; a valid token, whatever the logits
    token = tl.min(tl.where(best == top, where, vocab - 1), 0)
    slot = tl.load(slots + row).to(tl.int64)
    length, max_length = tl.load(table + slot), tl.load(table + 2 * columns + slot)
    tl.store(table + slot, tl.minimum(length + 1, max_length))
    tl.store(table + columns + slot, token.to(tl.int64))
    tl.store(out + 2 * row, tl.full([], 1, tl.int64))
    tl.store(out + 2 * row + 1, token.to(tl.int64))


# ---- launches


def embed(
    table: Tensor,
    smear: Tensor | None,
    tokens: Tensor,
    history: Tensor,
    slots: Tensor,
    positions: Tensor,
    x0: Tensor,
    stream: Tensor,
    stream_scale: float,
    *,
    signals_dependents: bool = False,
) -> None:
    """Writes x0, the embedding of each token with smear, and stream = stream_scale·x0, both (B, width).

    The norm of an embedding and the smear gate depend on the token alone, so they are tables, (vocabulary, width)
    and (vocabulary, 1). The previous token is looked up in `history` (slots, context), the token ids of each slot,
    where the kernel also writes the new one: a step can be repeated, or undone, without harm. (Positions are below the
    context, so the modulo in the kernel never wraps.)

    Never launched with PDL itself: all other kernels of the step rely on that. With `signals_dependents` the next
    kernel, which is, may begin early.
    """
    width = table.size(1)
    _embed[(tokens.size(0),)](
        table, tokens, history, slots, positions, smear, x0, stream, stream_scale,
        WIDTH=width, WIDTH_PADDED=triton.next_power_of_2(width), LENGTH=history.size(1),
        SMEAR=smear is not None, PDL=signals_dependents, num_warps=4,
    )  # fmt: skip


def residual_norm(
    x: Tensor,
    y: Tensor | None,
    out: Tensor,
    normed: Tensor,
    *,
    alpha: float = 1.0,
    beta: float = 0.0,
    extra: Tensor | None = None,
    keep: Tensor | None = None,
    pdl: bool = False,
) -> Tensor:
    """out = alpha·(x + y) + beta·extra, normed = its RMSNorm, keep = x + y; out may be x itself."""
    batch, width = x.shape
    _residual_norm[(batch,)](
        x, y, extra, keep, out, normed, alpha, beta,
        WIDTH=width, WIDTH_PADDED=triton.next_power_of_2(width), EPS=EPS, ADD=y is not None,
        EXTRA=extra is not None, KEEP=keep is not None, PDL=pdl, num_warps=4, launch_pdl=pdl,
    )  # fmt: skip
    return normed


def relu2_(x: Tensor, *, pdl: bool = False) -> Tensor:
    """ReLU squared, in place."""
    return _launch_activate(x, x, "relu2", 0.0, pdl)


def softcap(x: Tensor, y: Tensor, cap: float, *, pdl: bool = False) -> Tensor:
    """y = cap·tanh(x / cap) for the first columns of x, as many as y has, in y's dtype; without a cap, y = x."""
    return _launch_activate(x, y, "softcap" if cap else "none", cap, pdl)


def _launch_activate(x: Tensor, y: Tensor, activation: Activation, cap: float, pdl: bool) -> Tensor:
    rows, width = y.shape
    _activate[(rows, triton.cdiv(width, BLOCK))](
        x, y, cap, width, x.stride(0), y.stride(0),
        ACTIVATION=activation, BLOCK=BLOCK, PDL=pdl, num_warps=8, launch_pdl=pdl,
    )  # fmt: skip
    return y


def greedy_sample(logits: Tensor, slots: Tensor, table: Tensor, *, pdl: bool = False) -> Tensor:
    """The end of a greedy step in one kernel: the argmax of fp32 logits, and the new state of each slot.

    A slot is a column of `table`: its length, the token it reads next, its maximum length. The eager version is a
    dozen small operations, each of them a launch.
    """
    out = torch.empty(logits.size(0), 2, dtype=torch.long, device=logits.device)
    _greedy_sample[(logits.size(0),)](
        logits, slots, table, out, logits.size(1), table.stride(0), logits.stride(0),
        BLOCK=min(VOCAB_BLOCK, triton.next_power_of_2(logits.size(1))), PDL=pdl, num_warps=16, launch_pdl=pdl,
    )  # fmt: skip
    return out
