# mypy: disallow-untyped-defs=False
"""Matrices times a few vectors: `norm_linear` into attention and MLP, `linear_residual` out of them.

With B rows of activations a matrix is read once and used B times, so the goal is to have all of its bytes in
flight at once. Two kernels for two ranges of B:

- **GEMV** (B up to about 8). A program takes a few whole rows of the matrix, one per warp: 16 bytes per thread,
  every load issued before the first use and before the wait for the previous kernel, so that the weights are in
  registers when the wait ends. RMSNorm has no weights and so is one factor per row of activations: it multiplies
  the result. No shared memory, one reduction inside the warp.
- **GEMM** (B up to 128). Tensor cores, B padded to 16 or more. Weights come through a pipeline of shared-memory
  stages; before the wait they are only prefetched into the L2 cache.

Elementwise work is in the epilogue: activation and softcap in `norm_linear`, residual add and the scalars of the
next layer in `linear_residual`.

Weights are (rows, inputs) in the activations' dtype, or int8 with one fp32 scale per row. The residual stream x
is fp32, everything accumulates in fp32, no atomics are used: the same input gives the same bits.
"""

from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from nanorun.config import NORM_EPSILON
from nanorun.infer.kernels.language import dot_dtype, grid_dependency_wait, launch_dependents
from nanorun.infer.model import Matrix
from nanorun.model.kernels.language import tl, triton

EPS = NORM_EPSILON
Activation = Literal["none", "relu2", "softcap"]


@dataclass(frozen=True)
class Tile:
    """The tile shape and launch parameters of one kernel; what a sweep varies."""

    rows: int  # of the matrix, per program
    inputs: int  # at most this many columns per load
    warps: int = 4
    stages: int = 3


# ---- references


def activation_reference(y: Tensor, activation: Activation, cap: float = 0.0) -> Tensor:
    if activation == "relu2":
        return F.relu(y).square()
    return cap * torch.tanh(y / cap) if activation == "softcap" else y


def norm_linear_reference(
    x: Tensor, matrix: Matrix, activation: Activation = "none", cap: float = 0.0
) -> Tensor:
    y = F.rms_norm(x, (x.size(-1),), eps=EPS) @ matrix.dense(x.dtype).T
    return activation_reference(y, activation, cap)


def linear_residual_reference(
    h: Tensor, matrix: Matrix, x: Tensor, alpha: float = 1.0, beta: float = 0.0, extra: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The new residual stream alpha·(x + h·Wᵀ) + beta·extra, and x + h·Wᵀ itself."""
    after = x + h @ matrix.dense(h.dtype).T
    return (alpha * after if extra is None else alpha * after + beta * extra), after


# ---- device functions


@triton.jit
def load_matrix_rows(w, r, rows, K: tl.constexpr, BLOCK_K: tl.constexpr):
    """The whole rows r of a matrix, as a tuple of (rows, BLOCK_K) tiles."""
    at = r[:, None] * K + tl.arange(0, BLOCK_K)[None, :]
    tiles = ()
    for c in tl.static_range(K // BLOCK_K):
        tile = tl.load(w + at + c * BLOCK_K, mask=r[:, None] < rows, other=0.0)
        tiles = tiles + (tile,)  # type: ignore[assignment]  # noqa: RUF005
    return tiles


@triton.jit
def multiply(tiles, x, NORM: tl.constexpr, EPS: tl.constexpr, K: tl.constexpr, BLOCK_K: tl.constexpr):
    """The products of those rows with one vector of activations, with or without RMSNorm.

    Each warp reads the whole vector, though all read the same: it comes from L1, and in exchange no value is
    exchanged between warps.
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


@triton.jit
def activate(y, cap, ACTIVATION: tl.constexpr):
    if ACTIVATION == "relu2":
        y = tl.maximum(y, 0.0)
        y = y * y
    if ACTIVATION == "softcap":
        y = cap * (1.0 - 2.0 / (tl.exp(y * (2.0 / cap)) + 1.0))  # cap·tanh(y/cap)
    return y


@triton.jit
def store_residual(y, x, extra, keep, out, at, mask, alpha, beta, EXTRA: tl.constexpr, KEEP: tl.constexpr):
    """Stores the residual stream alpha·(x + y) + beta·extra; each element is read and written by one thread."""
    y += tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
    if KEEP:
        tl.store(keep + at, y.to(keep.dtype.element_ty), mask=mask)
    y *= alpha
    if EXTRA:
        y += beta * tl.load(extra + at, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + at, y.to(out.dtype.element_ty), mask=mask)


@triton.jit
def prefetch_rows(
    w, first, rows, ROWS: tl.constexpr, K: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr
):
    """Prefetches matrix rows into L2, one request per 128 bytes."""
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


@triton.jit
def _norm_gemv(
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
    launch_dependents(PDL)
    r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    tiles = load_matrix_rows(w, r, rows, K, BLOCK_K)
    grid_dependency_wait(PDL)
    for b in tl.static_range(B):
        z = multiply(tiles, x + b * K, True, EPS, K, BLOCK_K)
        if SCALED:
            z *= tl.load(scales + r, mask=r < rows, other=0.0)
        z = activate(z, cap, ACTIVATION)
        tl.store(y + b * y_stride + r, z.to(y.dtype.element_ty), mask=r < rows)


@triton.jit
def _gemv_residual(
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
    launch_dependents(PDL)
    r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    tiles = load_matrix_rows(w, r, rows, K, BLOCK_K)
    grid_dependency_wait(PDL)
    for b in tl.static_range(B):
        z = multiply(tiles, h + b * K, False, 0.0, K, BLOCK_K)
        if SCALED:
            z *= tl.load(scales + r, mask=r < rows, other=0.0)
        store_residual(z, x, extra, keep, out, b * rows + r, r < rows, alpha, beta, EXTRA, KEEP)


@triton.jit
def _gemm(
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
    launch_dependents(PDL)
    first = tl.program_id(0) * ROWS
    prefetch_rows(w, first, rows, ROWS, K, BLOCK_K, PDL)
    grid_dependency_wait(PDL)
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
        total = activate(total, cap, ACTIVATION)
        tl.store(y + b[:, None] * y_stride + r[None, :], total.to(y.dtype.element_ty), mask=here)


# ---- launches


def norm_linear(
    x: Tensor,
    matrix: Matrix,
    y: Tensor,
    *,
    tile: Tile,
    rows: int | None = None,
    activation: Activation = "none",
    cap: float = 0.0,
    tensor_cores: bool = False,
    pdl: bool = False,
) -> Tensor:
    """y[:, :rows] = activation(norm(x) · Wᵀ) for x (B, inputs); `rows` excludes the last rows of the matrix."""
    batch, weight, scales = x.size(0), matrix.weight, matrix.scale
    rows = weight.size(0) if rows is None else rows
    grid = (triton.cdiv(rows, tile.rows),)
    shared = {"EPS": EPS, "ACTIVATION": activation, **_launch_arguments(matrix, tile, pdl)}
    if not tensor_cores:
        _norm_gemv[grid](x, weight, scales, y, rows, y.stride(0), cap, B=batch, **shared)
    else:
        _gemm[grid](
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
    alpha: float = 1.0,
    beta: float = 0.0,
    extra: Tensor | None = None,
    keep: Tensor | None = None,
    tensor_cores: bool = False,
    pdl: bool = False,
) -> Tensor:
    """out = alpha·(x + h·Wᵀ) + beta·extra, and keep = x + h·Wᵀ; out may be x itself."""
    batch, weight, scales = h.size(0), matrix.weight, matrix.scale
    rows = weight.size(0)
    grid = (triton.cdiv(rows, tile.rows),)
    shared = {
        "EXTRA": extra is not None,
        "KEEP": keep is not None,
        **_launch_arguments(matrix, tile, pdl),
    }
    if not tensor_cores:
        _gemv_residual[grid](h, weight, scales, x, extra, keep, out, rows, alpha, beta, B=batch, **shared)
    else:
        _gemm[grid](
            h, weight, scales, out, x, extra, keep, rows, rows, 0.0, alpha, beta,
            B=batch, B_PADDED=padded(batch), NORM=False, RESIDUAL=True, ACTIVATION="none", EPS=0.0,
            STAGES=tile.stages, DTYPE=dot_dtype(weight.dtype), **shared,
        )  # fmt: skip
    return out


def _launch_arguments(matrix: Matrix, tile: Tile, pdl: bool) -> dict[str, Any]:
    inputs = matrix.weight.size(1)
    return {
        "K": inputs,
        "SCALED": matrix.scale is not None,
        "ROWS": tile.rows,
        "BLOCK_K": min(inputs & -inputs, tile.inputs),  # divides the inputs: 256 of 768, 1280 or 5120
        "PDL": pdl,
        "num_warps": tile.warps,
        "launch_pdl": pdl,
    }


def padded(batch: int) -> int:
    """Tensor cores need at least 16 rows."""
    return max(16, 1 << (batch - 1).bit_length())
