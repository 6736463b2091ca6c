# mypy: disallow-untyped-defs=False
"""The end of a greedy step in one kernel: the likeliest token, and where each text stands after it.

What the engine keeps of a slot is a column of `table`: its length, the token it reads next, how long it may get.
The plain way is a dozen small operations, each of them a launch; here a program has a row of logits, and as
that is all it reads, one program a row is enough.
"""

import torch
from torch import Tensor

from nanorun.infer.kernels.language import jit, let_next_start, tl, triton, wait_for_previous

BLOCK = 16_384


def plain_settle(logits: Tensor, slots: Tensor, table: Tensor) -> Tensor:
    """(B, 2): how many tokens were chosen, one, and which. The table moves on by it."""
    chosen = logits.argmax(-1)
    length, _, limit = table[:3].index_select(1, slots)
    table[:2, slots] = torch.stack([torch.minimum(length + 1, limit), chosen])
    return torch.stack([torch.ones_like(chosen), chosen], 1)


@jit
def _settle(logits, slots, table, out, vocab, columns, logits_stride, BLOCK: tl.constexpr, PDL: tl.constexpr):
    let_next_start(PDL)
    wait_for_previous(PDL)
    row = tl.program_id(0)
    i = tl.arange(0, BLOCK)
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    where = tl.full([BLOCK], 0, tl.int32)
    for first in tl.range(0, vocab, BLOCK):
        value = tl.load(logits + row * logits_stride + first + i, mask=first + i < vocab, other=float("-inf"))
        larger = value > best  # never so for what is not a number
        where = tl.where(larger, first + i, where)
        best = tl.where(larger, value, best)
    top = tl.max(best, 0)
    chosen = tl.min(
        tl.where(best == top, where, vocab - 1), 0
    )  # the first of equals; a token, whatever the logits
    slot = tl.load(slots + row).to(tl.int64)
    length, limit = tl.load(table + slot), tl.load(table + 2 * columns + slot)
    tl.store(table + slot, tl.minimum(length + 1, limit))
    tl.store(table + columns + slot, chosen.to(tl.int64))
    tl.store(out + 2 * row, tl.full([], 1, tl.int64))
    tl.store(out + 2 * row + 1, chosen.to(tl.int64))


def settle(logits: Tensor, slots: Tensor, table: Tensor, *, pdl: bool = False) -> Tensor:
    """As `plain_settle`, for fp32 logits."""
    out = torch.empty(logits.size(0), 2, dtype=torch.long, device=logits.device)
    _settle[(logits.size(0),)](
        logits, slots, table, out, logits.size(1), table.stride(0), logits.stride(0),
        BLOCK=min(BLOCK, triton.next_power_of_2(logits.size(1))), PDL=pdl, num_warps=16, launch_pdl=pdl,
    )  # fmt: skip
    return out
