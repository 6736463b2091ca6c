"""ReLU² and its gradient, quantized; the scales come from bounds that fp8 explains."""

import math

import torch
from torch import Tensor

from nanorun.model.kernels import fp8
from nanorun.model.kernels.language import tl, triton

CLIP = 2.0  # x·w is clipped at its bound divided by this, before the square
BACKWARD_ROWS, BACKWARD_COLUMNS = 64, 128  # for two inputs: 322 µs for 65,536 × 3,072; 128 × 128: 393


@triton.jit
def _relu2_kernel(
    u,
    max_norms,
    reach,
    q,
    q_t,
    scale,
    rows,
    columns,
    padded,
    FP8_MAX: tl.constexpr,
    TILE: tl.constexpr,
):
    bound = tl.load(max_norms) * reach
    scale_value, inv_scale = fp8.power_of_two_scale(bound * bound, FP8_MAX)
    row = tl.program_id(1) * TILE + tl.arange(0, TILE)
    column = tl.program_id(0) * TILE + tl.arange(0, TILE)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    at = row.to(tl.int64)[:, None] * columns + column[None, :]
    tile = tl.load(u + at, mask=inside, other=0.0).to(tl.float32)
    tile = tl.where(tile < 0, 0.0, tile)  # comparisons that pass NaN on, here and below
    tile = tile * tile * inv_scale
    tile = tl.where(tile > FP8_MAX, FP8_MAX, tile)
    fp8.store_with_transpose(tile, row, column, q, q_t, rows, columns, padded, padded)
    if tl.program_id(0) + tl.program_id(1) == 0:
        tl.store(scale, scale_value)


@triton.jit
def _relu2_backward_kernel(
    dh,
    h,
    h_t,
    h_scale,
    h_max,
    bounds,
    max_norms,
    q,
    q_t,
    scale,
    rows,
    columns,
    padded,
    FP8_MAX: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TRANSPOSE_H: tl.constexpr,  # read h and write h_t; else read h_t
):
    h_scale_value = tl.load(h_scale)
    bound = tl.load(bounds + 1) * tl.load(max_norms + 1) * 2 * tl.sqrt(h_max * h_scale_value)
    scale_value, inv_scale = fp8.power_of_two_scale(bound, FP8_MAX)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    transposed = column.to(tl.int64)[:, None] * padded + row[None, :]
    at = row.to(tl.int64)[:, None] * columns + column[None, :]
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    if TRANSPOSE_H:
        hidden = tl.load(h + at, mask=inside, other=0.0).to(tl.float16)
        value = tl.trans(hidden).to(tl.float32).to(h_t.dtype.element_ty)
        tl.store(h_t + transposed, value, mask=(column < columns)[:, None] & (row < padded)[None, :])
    else:
        there = (column < columns)[:, None] & (row < rows)[None, :]
        hidden = tl.trans(tl.load(h_t + transposed, mask=there, other=0.0).to(tl.float16))
    slope = 2 * tl.sqrt(hidden.to(tl.float32) * h_scale_value)
    tile = tl.load(dh + at, mask=inside, other=0.0).to(tl.float32) * slope * inv_scale
    fp8.store_with_transpose(tile, row, column, q, q_t, rows, columns, padded, padded)
    if tl.program_id(0) + tl.program_id(1) == 0:
        tl.store(scale, scale_value)


@torch.library.custom_op("nanorun::fp8_relu2_quantize", mutates_args=())
def quantize(u: Tensor, max_norms: Tensor, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """relu(u)² of u = n·wᵀ in e4m3, its transpose and scale; n is normed and `width` wide, max_norms[0] is the largest
    row norm of w."""
    q, q_t, scale = fp8.empty_with_transpose(u, fp8.E4M3)
    reach = math.sqrt(width) / CLIP
    _relu2_kernel[fp8.tiles(u)](
        u,
        max_norms,
        reach,
        q,
        q_t,
        scale,
        *u.shape,
        q_t.shape[1],
        fp8.FP8_MAX[fp8.E4M3],
        fp8.TILE,
        num_warps=8,
    )
    return q, q_t, scale


quantize.register_fake(lambda u, max_norms, width: fp8.empty_with_transpose(u, fp8.E4M3))


@torch.library.custom_op("nanorun::fp8_relu2_backward", mutates_args=())
def backward(
    dh: Tensor, h_t: Tensor, h_scale: Tensor, bounds: Tensor, max_norms: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """dh·2√h in e5m2, its transpose and scale, for dh = g·w: `bounds` is `amax_and_row_norm` of g, max_norms[1] the
    largest column norm of w."""
    return _backward(dh, h_t, h_t, h_scale, bounds, max_norms, transpose_h=False)


backward.register_fake(lambda dh, *others: fp8.empty_with_transpose(dh, fp8.E5M2))


@torch.library.custom_op("nanorun::fp8_relu2_backward_with_transpose", mutates_args=())
def backward_with_transpose(
    dh: Tensor, h: Tensor, h_scale: Tensor, bounds: Tensor, max_norms: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The same from h instead of its transpose, which is returned too: the wgrad of the next layer needs it."""
    h_t = _empty_h_t(dh)
    return *_backward(dh, h, h_t, h_scale, bounds, max_norms, transpose_h=True), h_t


def _empty_h_t(dh: Tensor) -> Tensor:
    return dh.new_empty(dh.shape[1], fp8.padded(dh.shape[0]), dtype=fp8.E4M3)


backward_with_transpose.register_fake(
    lambda dh, *others: (*fp8.empty_with_transpose(dh, fp8.E5M2), _empty_h_t(dh))
)


def _backward(
    dh: Tensor, h: Tensor, h_t: Tensor, h_scale: Tensor, bounds: Tensor, max_norms: Tensor, transpose_h: bool
) -> tuple[Tensor, Tensor, Tensor]:
    q, q_t, scale = fp8.empty_with_transpose(dh, fp8.E5M2)
    _relu2_backward_kernel[fp8.tiles(dh, BACKWARD_ROWS, BACKWARD_COLUMNS)](
        dh,
        h,
        h_t,
        h_scale,
        fp8.FP8_MAX[fp8.E4M3],
        bounds,
        max_norms,
        q,
        q_t,
        scale,
        *dh.shape,
        q_t.shape[1],
        FP8_MAX=fp8.FP8_MAX[fp8.E5M2],
        ROWS=BACKWARD_ROWS,
        COLUMNS=BACKWARD_COLUMNS,
        TRANSPOSE_H=transpose_h,
        num_warps=8,
    )
    return q, q_t, scale
