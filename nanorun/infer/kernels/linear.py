# mypy: disallow-untyped-defs=False
"""Matrices times a few vectors: `norm_linear` into a layer's halves, `linear_residual` out of them.

With B rows of activations a matrix is read once and used B times, so what counts is to have all of its
bytes on their way at once. Two kernels for two ranges of B:

- **rows** (B up to about 8). A program takes a few rows of the matrix, whole, a warp each: 16 bytes a
  thread, every load issued before the first use and before the wait for the kernel ahead, so that at the
  wait's end the weights are in registers already. A norm has no weights and so is one factor a row of
  activations: it multiplies the result. No shared memory, one reduction inside the warp.
- **tiles** (B up to 128). Tensor cores, B padded to 16 or more. Weights come through a pipeline of
  shared-memory stages; before the wait they are only asked into the L2 cache.

Weights are (rows, inputs) in the activations' dtype, or int8 with one fp32 scale a row. The stream x is
fp32, everything accumulates in fp32, no atomics are used: the same input gives the same bits.
"""

from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from nanorun.config import NORM_EPSILON
from nanorun.infer.frozen import Matrix
from nanorun.infer.kernels.language import (
    dot_dtype,
    jit,
    largest_power_of_two_in,
    let_next_start,
    tl,
    triton,
    wait_for_previous,
)

EPS = NORM_EPSILON
Activation = Literal["none", "relu2", "softcap"]


@dataclass(frozen=True)
class Tile:
    """How a matrix is cut for one kernel; what a sweep varies."""

    rows: int  # of the matrix, per program
    inputs: int  # at most this many columns per load
    warps: int = 4
    stages: int = 3


# ---- the truth


def plain_norm_linear(x: Tensor, matrix: Matrix, activation: Activation = "none", cap: float = 0.0) -> Tensor:
    y = F.rms_norm(x, (x.size(-1),), eps=EPS) @ matrix.dense(x.dtype).T
    if activation == "relu2":
        return F.relu(y).square()
    return cap * torch.tanh(y / cap) if activation == "softcap" and cap else y


def plain_linear_residual(
    h: Tensor, matrix: Matrix, x: Tensor, a: float = 1.0, b: float = 0.0, extra: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The new stream a·(x + h·Wᵀ) + b·extra, and x + h·Wᵀ itself."""
    after = x + h @ matrix.dense(h.dtype).T
    return (a * after if extra is None else a * after + b * extra), after


# ---- pieces that the kernels share


@jit
def load_matrix_rows(w, r, rows, K: tl.constexpr, BLOCK_K: tl.constexpr):
    """The rows r of a matrix, whole, as a tuple of (rows, BLOCK_K) tiles."""
    at = r[:, None] * K + tl.arange(0, BLOCK_K)[None, :]
    tiles = ()
    for c in tl.static_range(K // BLOCK_K):
        tile = tl.load(w + at + c * BLOCK_K, mask=r[:, None] < rows, other=0.0)
        tiles = tiles + (tile,)  # type: ignore[assignment]  # noqa: RUF005
    return tiles


@jit
def multiply(tiles, x, NORM: tl.constexpr, EPS: tl.constexpr, K: tl.constexpr, BLOCK_K: tl.constexpr):
    """The products of those rows with one vector of activations, normed or not.

    Each warp reads the whole vector, though all read the same: it comes from L1, and in exchange no value
    crosses from warp to warp.
    """
    k = tl.arange(0, BLOCK_K)[None, :] + tl.zeros(tiles[0].shape, tl.int32)
    total = tl.zeros(tiles[0].shape, tl.float32)
    squares = tl.zeros(tiles[0].shape, tl.float32)
    for c in tl.static_range(K // BLOCK_K):
        value = tl.load(x + c * BLOCK_K + k).to(tl.float32)
        total += tiles[c].to(tl.float32) * value
        if NORM:
            squares += value * value
    y = tl.sum(total, 1)
    if NORM:
        y *= tl.rsqrt(tl.sum(squares, 1) / K + EPS)
    return y


@jit
def activated(y, cap, ACTIVATION: tl.constexpr):
    if ACTIVATION == "relu2":
        y = tl.maximum(y, 0.0)
        y = y * y
    if ACTIVATION == "softcap":
        y = cap * (1.0 - 2.0 / (tl.exp(y * (2.0 / cap)) + 1.0))  # cap·tanh(y/cap)
    return y


@jit
def store_residual(y, x, extra, keep, out, at, mask, a, b, EXTRA: tl.constexpr, KEEP: tl.constexpr):
    """The stream after a matrix: a·(x + y) + b·extra; each element is read and written by one thread."""
    y += tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
    if KEEP:
        tl.store(keep + at, y.to(keep.dtype.element_ty), mask=mask)
    y *= a
    if EXTRA:
        y += b * tl.load(extra + at, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + at, y.to(out.dtype.element_ty), mask=mask)


@jit
def prefetch_rows(
    w, first, rows, ROWS: tl.constexpr, K: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr
):
    """Asks for matrix rows into L2, a request for each 128 bytes."""
    if PDL:
        LINE: tl.constexpr = 1024 // w.dtype.element_ty.primitive_bitwidth
        r = tl.minimum(first + tl.arange(0, ROWS), rows - 1)
        at = r[:, None] * K + tl.arange(0, (BLOCK_K + LINE - 1) // LINE)[None, :] * LINE
        for c in tl.static_range(K // BLOCK_K):
            tl.inline_asm_elementwise(
                "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
                "=r,l",
                [w + at + c * BLOCK_K],
                dtype=tl.int32,
                is_pure=False,
                pack=1,
            )


# ---- the kernels


@jit
def _norm_linear_rows(
    x,
    w,
    scales,
    y,
    rows,
    y_stride,
    cap,
    B: tl.constexpr,
    K: tl.constexpr,
    EPS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    SCALED: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    let_next_start(PDL)
    r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    tiles = load_matrix_rows(w, r, rows, K, BLOCK_K)
    wait_for_previous(PDL)
    for b in tl.static_range(B):
        z = multiply(tiles, x + b * K, True, EPS, K, BLOCK_K)
        if SCALED:
            z *= tl.load(scales + r, mask=r < rows, other=0.0)
        z = activated(z, cap, ACTIVATION)
        tl.store(y + b * y_stride + r, z.to(y.dtype.element_ty), mask=r < rows)


@jit
def _linear_residual_rows(
    h,
    w,
    scales,
    x,
    extra,
    keep,
    out,
    rows,
    alpha,
    beta,
    B: tl.constexpr,
    K: tl.constexpr,
    SCALED: tl.constexpr,
    EXTRA: tl.constexpr,
    KEEP: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    let_next_start(PDL)
    r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    tiles = load_matrix_rows(w, r, rows, K, BLOCK_K)
    wait_for_previous(PDL)
    for b in tl.static_range(B):
        z = multiply(tiles, h + b * K, False, 0.0, K, BLOCK_K)
        if SCALED:
            z *= tl.load(scales + r, mask=r < rows, other=0.0)
        store_residual(z, x, extra, keep, out, b * rows + r, r < rows, alpha, beta, EXTRA, KEEP)


@jit
def _linear_tiles(
    x,
    w,
    scales,
    y,
    stream,
    extra,
    keep,
    rows,
    y_stride,
    cap,
    alpha,
    beta,
    B: tl.constexpr,
    B_PADDED: tl.constexpr,
    K: tl.constexpr,
    EPS: tl.constexpr,
    NORM: tl.constexpr,
    ACTIVATION: tl.constexpr,
    RESIDUAL: tl.constexpr,
    SCALED: tl.constexpr,
    EXTRA: tl.constexpr,
    KEEP: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
    DTYPE: tl.constexpr,
):
    let_next_start(PDL)
    first = tl.program_id(0) * ROWS
    prefetch_rows(w, first, rows, ROWS, K, BLOCK_K, PDL)
    wait_for_previous(PDL)
    r = first + tl.arange(0, ROWS)
    b = tl.arange(0, B_PADDED)
    k = tl.arange(0, BLOCK_K)
    x_at = b[:, None] * K + k[None, :]
    w_at = r[:, None] * K + k[None, :]
    total = tl.zeros([B_PADDED, ROWS], tl.float32)
    squares = tl.zeros([B_PADDED, BLOCK_K], tl.float32)
    for c in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        value = tl.load(x + x_at + c, mask=b[:, None] < B, other=0.0)
        weight = tl.load(w + w_at + c, mask=r[:, None] < rows, other=0.0)
        if NORM:
            squares += value.to(tl.float32) * value.to(tl.float32)
        total = tl.dot(value.to(DTYPE), tl.trans(weight.to(DTYPE)), total, input_precision="ieee")
    if NORM:
        total *= tl.rsqrt(tl.sum(squares, 1) / K + EPS)[:, None]
    if SCALED:
        total *= tl.load(scales + r, mask=r < rows, other=0.0)[None, :]
    here = (b[:, None] < B) & (r[None, :] < rows)
    if RESIDUAL:
        at = b[:, None] * rows + r[None, :]
        store_residual(total, stream, extra, keep, y, at, here, alpha, beta, EXTRA, KEEP)
    else:
        total = activated(total, cap, ACTIVATION)
        tl.store(y + b[:, None] * y_stride + r[None, :], total.to(y.dtype.element_ty), mask=here)


# ---- what the step calls


def norm_linear(
    x: Tensor,
    matrix: Matrix,
    y: Tensor,
    *,
    tile: Tile,
    rows: int | None = None,
    activation: Activation = "none",
    cap: float = 0.0,
    dots: bool = False,
    pdl: bool = False,
) -> Tensor:
    """y[:, :rows] = activation(norm(x) · Wᵀ) for x (B, inputs); `rows` leaves the matrix's last rows out."""
    batch, inputs = x.shape
    weight, scales = matrix.weight, matrix.scale
    rows = weight.size(0) if rows is None else rows
    wide = largest_power_of_two_in(inputs, tile.inputs)
    grid = (triton.cdiv(rows, tile.rows),)
    shared: dict[str, Any] = {
        "K": inputs,
        "EPS": EPS,
        "ACTIVATION": activation,
        "SCALED": scales is not None,
        "ROWS": tile.rows,
        "BLOCK_K": wide,
        "PDL": pdl,
        "num_warps": tile.warps,
        "launch_pdl": pdl,
    }
    if not dots:
        _norm_linear_rows[grid](x, weight, scales, y, rows, y.stride(0), cap, B=batch, **shared)
    else:
        _linear_tiles[grid](
            x, weight, scales, y, None, None, None, rows, y.stride(0), cap, 1.0, 0.0,
            B=batch, B_PADDED=padded(batch), NORM=True, RESIDUAL=False, EXTRA=False, KEEP=False,
            STAGES=tile.stages, DTYPE=dot_dtype(weight.dtype), **shared,
        )  # fmt: skip
    return y


def linear_residual(
    h: Tensor,
    matrix: Matrix,
    x: Tensor,
    out: Tensor,
    *,
    tile: Tile,
    a: float = 1.0,
    b: float = 0.0,
    extra: Tensor | None = None,
    keep: Tensor | None = None,
    dots: bool = False,
    pdl: bool = False,
) -> Tensor:
    """out = a·(x + h·Wᵀ) + b·extra, and keep = x + h·Wᵀ; out may be x itself."""
    batch, inputs = h.shape
    weight, scales = matrix.weight, matrix.scale
    rows = weight.size(0)
    wide = largest_power_of_two_in(inputs, tile.inputs)
    grid = (triton.cdiv(rows, tile.rows),)
    shared: dict[str, Any] = {
        "K": inputs,
        "SCALED": scales is not None,
        "EXTRA": extra is not None,
        "KEEP": keep is not None,
        "ROWS": tile.rows,
        "BLOCK_K": wide,
        "PDL": pdl,
        "num_warps": tile.warps,
        "launch_pdl": pdl,
    }
    if not dots:
        _linear_residual_rows[grid](h, weight, scales, x, extra, keep, out, rows, a, b, B=batch, **shared)
    else:
        _linear_tiles[grid](
            h, weight, scales, out, x, extra, keep, rows, rows, 0.0, a, b,
            B=batch, B_PADDED=padded(batch), NORM=False, RESIDUAL=True, ACTIVATION="none", EPS=0.0,
            STAGES=tile.stages, DTYPE=dot_dtype(weight.dtype), **shared,
        )  # fmt: skip
    return out


def padded(batch: int) -> int:
    """Tensor cores take 16 rows at least."""
    return max(16, 1 << (batch - 1).bit_length())
