"""The residual stream on its way from one half of a block to the next: what is still to be added is added where
the next norm reads it, and not before.

A compiler cannot look into kernels like ours, so around each of them it writes the stream to memory and reads it
back: x + y by one kernel, its norm by the next. Here a half hands on what it was given, x, and what it found, y,
as they are. The kernel that norms and quantizes for the next half (`fp8.stream_norm_quantize`) adds them on its
way; backward, one kernel does the rest:

    s = λ·(x + y) + μ·x0        the stream as the next half sees it (mixed with x0 before attention, else s = x + y)
    n = s·inverse               its norm
    d = ds + inverse·(dn - n·mean(dn·n))        the gradient of s, from those behind it and that of its norm
    dx = dy = λ·d        dμ = Σ d·x0        dλ = Σ d·(x + y) = (Σ d·s - μ·Σ d·x0)/λ

Where y's own product can do the adding (products.py), it does: then what is handed on as y is s itself, `done`, and
only the norm is left to do. Gradients do not see the difference.

Neither x nor y is kept for the backward pass: s is enough, unless λ is 0 (then λ and x0 get no gradient, which is
not the truth; λ begins above 1 and stays there). λ and μ are rounded to the stream's dtype, as they are
when a model is evaluated. `Stream.settled` is the same in plain PyTorch, and the truth. Shapes: N tokens, D width.
"""

from typing import NamedTuple

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:  # a CPU build of torch has no Triton
    triton = None

AT_ONCE = 1024  # numbers of each tensor that a program holds, in whole rows


class Stream(NamedTuple):
    """The stream, and what is still to be done to it: λ·(x + y) + μ·start, or as much of it as is given."""

    x: Tensor  # (..., D)
    y: Tensor | None = None
    start: Tensor | None = None
    scale: Tensor | None = None  # λ, one number
    share: Tensor | None = None  # μ
    done: bool = False  # y is the settled stream already; its gradient is still that of what was added

    def settled(self) -> Tensor:
        assert not self.done
        x = self.x if self.y is None else self.x + self.y
        if self.start is None or self.scale is None or self.share is None:
            return x
        return self.scale.to(x.dtype) * x + self.share.to(x.dtype) * self.start

    def pending(self) -> bool:
        return self.y is not None or self.start is not None

    def flat(self) -> "Stream":
        y, start = (each if each is None else each.flatten(0, -2) for each in (self.y, self.start))
        return Stream(self.x.flatten(0, -2), y, start, self.scale, self.share, self.done)


class Mixing(NamedTuple):
    """What the next half-block does to the stream, beside adding to it."""

    start: Tensor | None = None  # (..., D)
    scale: Tensor | None = None  # λ and μ, rounded as everywhere, in fp32
    share: Tensor | None = None


def gradients(
    dn: Tensor,
    s: Tensor,
    inverse: Tensor,
    ds: Tensor,
    dfirst: Tensor | None,
    start: Tensor | None,
    scale: Tensor | None,
    share: Tensor | None,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Of x (and y, the same), start, λ and μ; `dfirst` is the gradient of the first channels of n, apart."""
    if start is None or scale is None or share is None:
        dx, _ = backward(dn, s, inverse, ds, dfirst, None, None)
        return dx, None, None, None
    dx, sums = backward(dn, s, inverse, ds, dfirst, start, scale)
    with_s, with_start = sums.sum(0).unbind()
    kept, mixed = (each.to(s.dtype).float() for each in (scale, share))
    once = torch.where(kept == 0, 0.0, 1 / kept)
    dscale = (with_s - mixed * with_start) * once
    # Plain, so that a compiler fuses it with the sum over layers.
    dstart = (dx.float() * (mixed * once)).to(dx.dtype)
    return dx, dstart, dscale.view_as(scale), with_start.view_as(share)


if triton is not None:

    @triton.jit
    def _stream_backward_kernel(
        dn,
        s,
        inverses,
        ds,
        dfirst,
        start,
        scale,
        dx,
        sums,
        rows,
        columns: tl.constexpr,
        KEPT: tl.constexpr,
        MIXES: tl.constexpr,
        ROWS: tl.constexpr,
        COLUMNS: tl.constexpr,
    ):
        row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
        column = tl.arange(0, COLUMNS)
        at = row.to(tl.int64)[:, None] * columns + column[None, :]
        inside = (row < rows)[:, None] & (column < columns)[None, :]
        dn = tl.load(dn + at, mask=inside, other=0.0).to(tl.float32)
        s = tl.load(s + at, mask=inside, other=0.0).to(tl.float32)
        ds = tl.load(ds + at, mask=inside, other=0.0).to(tl.float32)
        if MIXES:
            start = tl.load(start + at, mask=inside, other=0.0).to(tl.float32)
        inverse = tl.load(inverses + row, mask=row < rows, other=0.0)[:, None]
        if KEPT > 0:
            of = dfirst + row.to(tl.int64)[:, None] * KEPT + column[None, :]
            dn += tl.load(of, mask=inside & (column < KEPT)[None, :], other=0.0).to(tl.float32)
        n = s * inverse
        d = ds + inverse * (dn - n * (tl.sum(dn * n, 1) / columns)[:, None])
        if MIXES:
            with_s = tl.sum(tl.sum(d * s, 1), 0)
            with_start = tl.sum(tl.sum(d * start, 1), 0)
            tl.store(sums + 2 * tl.program_id(0), with_s)
            tl.store(sums + 2 * tl.program_id(0) + 1, with_start)
            d *= tl.load(scale).to(dx.dtype.element_ty).to(tl.float32)
        tl.store(dx + at, d.to(dx.dtype.element_ty), mask=inside)


@torch.library.custom_op("nanorun::stream_backward", mutates_args=())
def backward(
    dn: Tensor,
    s: Tensor,
    inverse: Tensor,
    ds: Tensor,
    dfirst: Tensor | None,
    start: Tensor | None,
    scale: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """λ·d, (N, D), and where start is mixed in the sums of d·s and d·start, apart for each program, (programs, 2)."""
    dx, sums = _backward_room(s, start)
    rows, columns = s.shape
    across, together = _block(columns)
    kept = 0 if dfirst is None else dfirst.shape[1]
    _stream_backward_kernel[(triton.cdiv(rows, together),)](
        dn.contiguous(),
        s,
        inverse,
        ds.contiguous(),
        dfirst.contiguous() if dfirst is not None and kept else dn,
        s if start is None else start.contiguous(),
        inverse if scale is None else scale,
        dx,
        sums,
        rows,
        columns,
        KEPT=kept,
        MIXES=start is not None,
        ROWS=together,
        COLUMNS=across,
        num_warps=max(4, min(16, across * together // 512)),
    )
    return dx, sums


@backward.register_fake
def _(
    dn: Tensor,
    s: Tensor,
    inverse: Tensor,
    ds: Tensor,
    dfirst: Tensor | None,
    start: Tensor | None,
    scale: Tensor | None,
) -> tuple[Tensor, Tensor]:
    return _backward_room(s, start)


def _backward_room(s: Tensor, start: Tensor | None) -> tuple[Tensor, Tensor]:
    programs = 0 if start is None else -(-s.shape[0] // _block(s.shape[1])[1])
    return torch.empty_like(s), s.new_empty(programs, 2, dtype=torch.float32)


def _block(columns: int) -> tuple[int, int]:
    """Columns, rounded up to a power of two, and how many rows of them one program takes."""
    across = 1 << (columns - 1).bit_length()
    return across, max(1, AT_ONCE // across)
