# mypy: disallow-untyped-defs=False
"""What lies between cuBLAS's matrix products in a step of many rows: residual and norm, ReLU², softcap.

For few rows the same things happen inside the matrix kernels (`linear.py`). One program a row, or a block.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from nanorun.infer.kernels.language import jit, let_next_start, tl, triton, wait_for_previous
from nanorun.infer.kernels.linear import EPS, Activation, activated

BLOCK = 2048


def plain_residual_norm(
    x: Tensor, y: Tensor | None, a: float = 1.0, b: float = 0.0, extra: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """The new stream a·(x + y) + b·extra, its norm, and x + y itself."""
    after = x if y is None else x + y.to(x.dtype)
    stream = a * after if extra is None else a * after + b * extra
    return stream, F.rms_norm(stream, (x.size(-1),), eps=EPS), after


@jit
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
    let_next_start(PDL)
    wait_for_previous(PDL)
    d = tl.arange(0, WIDTH_PADDED)
    inside = d < WIDTH
    at = tl.program_id(0) * WIDTH + d
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        value += tl.load(y + at, mask=inside, other=0.0).to(tl.float32)
    if KEEP:
        tl.store(keep + at, value.to(keep.dtype.element_ty), mask=inside)
    value *= alpha
    if EXTRA:
        value += beta * tl.load(extra + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at, value.to(out.dtype.element_ty), mask=inside)
    value *= tl.rsqrt(tl.sum(value * value, 0) / WIDTH + EPS)
    tl.store(normed + at, value.to(normed.dtype.element_ty), mask=inside)


@jit
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
    let_next_start(PDL)
    wait_for_previous(PDL)
    row = tl.program_id(0)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + row * x_stride + d, mask=d < width, other=0.0).to(tl.float32)
    tl.store(y + row * y_stride + d, activated(value, cap, ACTIVATION).to(y.dtype.element_ty), mask=d < width)


def residual_norm(
    x: Tensor,
    y: Tensor | None,
    out: Tensor,
    normed: Tensor,
    *,
    a: float = 1.0,
    b: float = 0.0,
    extra: Tensor | None = None,
    keep: Tensor | None = None,
    pdl: bool = False,
) -> Tensor:
    """out = a·(x + y) + b·extra, normed = its norm, keep = x + y; out may be x itself."""
    batch, width = x.shape
    _residual_norm[(batch,)](
        x, y, extra, keep, out, normed, a, b,
        WIDTH=width, WIDTH_PADDED=triton.next_power_of_2(width), EPS=EPS, ADD=y is not None,
        EXTRA=extra is not None, KEEP=keep is not None, PDL=pdl, num_warps=4, launch_pdl=pdl,
    )  # fmt: skip
    return normed


def relu2_(x: Tensor, *, pdl: bool = False) -> Tensor:
    """ReLU squared, in place."""
    return _activated_into(x, x, "relu2", 0.0, pdl)


def softcap(x: Tensor, y: Tensor, cap: float, *, pdl: bool = False) -> Tensor:
    """y = cap·tanh(x / cap) of the first columns of x, as many as y has; a cap of 0 only widens."""
    return _activated_into(x, y, "softcap" if cap else "none", cap, pdl)


def _activated_into(x: Tensor, y: Tensor, activation: Activation, cap: float, pdl: bool) -> Tensor:
    rows, width = y.shape
    _activate[(rows, triton.cdiv(width, BLOCK))](
        x, y, cap, width, x.stride(0), y.stride(0),
        ACTIVATION=activation, BLOCK=BLOCK, PDL=pdl, num_warps=8, launch_pdl=pdl,
    )  # fmt: skip
    return y


def plain_softcap(x: Tensor, cap: float) -> Tensor:
    return cap * torch.tanh(x / cap) if cap else x
