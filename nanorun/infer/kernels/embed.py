# mypy: disallow-untyped-defs=False
"""The start of a step: a token's embedding with a little of that of the token before it (smear).

Both the norm of an embedding and how much of the one before it takes up depend on the token alone, so they come
as tables, (vocabulary, width) and (vocabulary, 1).

The token before is looked up in `history` (slots, L), a ring like the caches, where the kernel also writes
the new one: a step can be repeated, or taken back, without harm. One program a row.
"""

import torch
from torch import Tensor

from nanorun.infer.kernels.language import jit, let_next_start, tl, triton


def plain_embed(
    table: Tensor,
    smear: Tensor | None,
    tokens: Tensor,
    history: Tensor,
    slots: Tensor,
    positions: Tensor,
    dtype: torch.dtype,
) -> Tensor:
    """x0 (B, width); `history` gets the tokens."""
    slots, positions, tokens = slots.long(), positions.long(), tokens.long()
    before = history[slots, (positions - 1) % history.size(1)].long()
    history[slots, positions % history.size(1)] = tokens.to(history.dtype)
    x = table[tokens].to(dtype)
    if smear is None:
        return x
    gate = smear[tokens].to(dtype) * (positions > 0)[:, None]
    return x + gate * table[torch.where(positions > 0, before, 0)].to(dtype)


@jit
def _embed(
    table,
    tokens,
    history,
    slots,
    positions,
    smear,
    start,
    stream,
    stream_scale,
    WIDTH: tl.constexpr,
    WIDTH_PADDED: tl.constexpr,
    LENGTH: tl.constexpr,
    SMEAR: tl.constexpr,
    PDL: tl.constexpr,
):
    let_next_start(PDL)
    row = tl.program_id(0)
    d = tl.arange(0, WIDTH_PADDED)
    inside = d < WIDTH
    token = tl.load(tokens + row).to(tl.int64)
    position = tl.load(positions + row).to(tl.int64)
    past = history + tl.load(slots + row).to(tl.int64) * LENGTH
    x = tl.load(table + token * WIDTH + d, mask=inside, other=0.0).to(tl.float32)
    if SMEAR:
        before = tl.load(past + (position + LENGTH - 1) % LENGTH, mask=position > 0, other=0).to(tl.int64)
        gate = tl.load(smear + token, mask=position > 0, other=0.0).to(tl.float32)
        x += gate * tl.load(table + before * WIDTH + d, mask=inside, other=0.0).to(tl.float32)
    tl.store(past + position % LENGTH, token.to(history.dtype.element_ty))
    tl.store(start + row * WIDTH + d, x.to(start.dtype.element_ty), mask=inside)
    tl.store(stream + row * WIDTH + d, (stream_scale * x).to(stream.dtype.element_ty), mask=inside)


def embed(
    table: Tensor,
    smear: Tensor | None,
    tokens: Tensor,
    history: Tensor,
    slots: Tensor,
    positions: Tensor,
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
        table, tokens, history, slots, positions, smear, start, stream, stream_scale,
        WIDTH=width, WIDTH_PADDED=triton.next_power_of_2(width), LENGTH=history.size(1),
        SMEAR=smear is not None, PDL=pdl, num_warps=4,
    )  # fmt: skip
