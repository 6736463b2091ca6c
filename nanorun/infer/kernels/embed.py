# mypy: disallow-untyped-defs=False
"""The start of a step: a token's embedding, normed, with a little of the token before it (smear).

The token before is looked up in `history` (slots, L), a ring like the caches, where the kernel also writes
the new one: a step can be repeated, or taken back, without harm. One program a row.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from nanorun.config import SMEAR_GATE_CHANNELS
from nanorun.infer.kernels.language import jit, let_next_start, tl, triton
from nanorun.infer.kernels.linear import EPS


def plain_embed(
    table: Tensor,
    tokens: Tensor,
    history: Tensor,
    slots: Tensor,
    positions: Tensor,
    smear_gate: Tensor | None,
    smear_scale: float,
    dtype: torch.dtype,
) -> Tensor:
    """x0 (B, width); `history` gets the tokens."""

    def normed(which: Tensor) -> Tensor:
        return F.rms_norm(table[which].to(dtype), (table.size(1),), eps=EPS)

    slots, positions, tokens = slots.long(), positions.long(), tokens.long()
    before = history[slots, (positions - 1) % history.size(1)].long()
    history[slots, positions % history.size(1)] = tokens.to(history.dtype)
    x = normed(tokens)
    if smear_gate is None:
        return x
    gate = torch.sigmoid(x[:, :SMEAR_GATE_CHANNELS] @ smear_gate.to(dtype)) * smear_scale
    return x + (gate * (positions > 0))[:, None] * normed(torch.where(positions > 0, before, 0))


@jit
def normed_row(table, token, d, inside, WIDTH: tl.constexpr, EPS: tl.constexpr):
    x = tl.load(table + token * WIDTH + d, mask=inside, other=0.0).to(tl.float32)
    return x * tl.rsqrt(tl.sum(x * x, 0) / WIDTH + EPS)


@jit
def _embed(
    table,
    tokens,
    history,
    slots,
    positions,
    smear_gate,
    start,
    stream,
    smear_scale,
    stream_scale,
    WIDTH: tl.constexpr,
    WIDTH_PADDED: tl.constexpr,
    LENGTH: tl.constexpr,
    GATES: tl.constexpr,
    SMEAR: tl.constexpr,
    EPS: tl.constexpr,
    PDL: tl.constexpr,
):
    let_next_start(PDL)
    row = tl.program_id(0)
    d = tl.arange(0, WIDTH_PADDED)
    inside = d < WIDTH
    token = tl.load(tokens + row).to(tl.int64)
    position = tl.load(positions + row).to(tl.int64)
    past = history + tl.load(slots + row).to(tl.int64) * LENGTH
    x = normed_row(table, token, d, inside, WIDTH, EPS)
    if SMEAR:
        before = tl.load(past + (position + LENGTH - 1) % LENGTH, mask=position > 0, other=0).to(tl.int64)
        weight = tl.load(smear_gate + d, mask=d < GATES, other=0.0).to(tl.float32)
        gate = smear_scale / (1.0 + tl.exp(-tl.sum(weight * x, 0)))
        x += tl.where(position > 0, gate, 0.0) * normed_row(table, before, d, inside, WIDTH, EPS)
    tl.store(past + position % LENGTH, token.to(history.dtype.element_ty))
    tl.store(start + row * WIDTH + d, x.to(start.dtype.element_ty), mask=inside)
    tl.store(stream + row * WIDTH + d, (stream_scale * x).to(stream.dtype.element_ty), mask=inside)


def embed(
    table: Tensor,
    tokens: Tensor,
    history: Tensor,
    slots: Tensor,
    positions: Tensor,
    smear_gate: Tensor | None,
    smear_scale: float,
    start: Tensor,
    stream: Tensor,
    stream_scale: float,
    *,
    pdl: bool = False,
) -> None:
    """start = x0, and stream = stream_scale·x0, both (B, width).

    Never launched ahead of what came before it: all other kernels of the step rely on that.
    """
    width = table.size(1)
    _embed[(tokens.size(0),)](
        table, tokens, history, slots, positions, smear_gate, start, stream, smear_scale, stream_scale,
        WIDTH=width, WIDTH_PADDED=triton.next_power_of_2(width), LENGTH=history.size(1),
        GATES=SMEAR_GATE_CHANNELS, SMEAR=smear_gate is not None, EPS=EPS, PDL=pdl, num_warps=4,
    )  # fmt: skip
