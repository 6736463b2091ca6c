"""ReLU² of the MLP's hidden layer in eight bits, and its gradient: between two products, one kernel each way.

    h  = relu(u)²          for u = n·wᵀ, with the scale that Cauchy and Schwarz allow (fp8.py)
    du = dh·2√h            the slope 2·relu(u) from h itself, so that u need not be kept

What is written is written both ways, for the products of either side. Where the product itself squares (products.py),
h comes as it is alone, and the gradient's kernel, which reads it anyway, turns it as well. Shapes: N tokens, F hidden.
"""

import math

import torch
from torch import Tensor

from nanorun.model.kernels import fp8

try:
    import triton
    import triton.language as tl
except ImportError:  # a CPU build of torch has no Triton
    triton = None

CLIP = 2.0  # how far below its bound x·w is clipped, before the square
SLOPE_ROWS, SLOPE_COLUMNS = 64, 128  # where two tensors are read: 322 µs for 65,536 × 3,072; 128 × 128: 393

if triton is not None:

    @triton.jit
    def _relu2_kernel(
        u,
        longest,
        reach,
        q,
        qt,
        unit,
        rows,
        columns,
        padded,
        MOST: tl.constexpr,
        TILE: tl.constexpr,
    ):
        bound = tl.load(longest) * reach
        size, inverse = fp8.power_of_two(bound * bound, MOST)
        row = tl.program_id(1) * TILE + tl.arange(0, TILE)
        column = tl.program_id(0) * TILE + tl.arange(0, TILE)
        inside = (row < rows)[:, None] & (column < columns)[None, :]
        at = row.to(tl.int64)[:, None] * columns + column[None, :]
        tile = tl.load(u + at, mask=inside, other=0.0).to(tl.float32)
        tile = tl.where(tile < 0, 0.0, tile)  # comparisons that let NaN pass, here and below
        tile = tile * tile * inverse
        tile = tl.where(tile > MOST, MOST, tile)
        fp8.store_both(tile, row, column, q, qt, rows, columns, padded, padded)
        if tl.program_id(0) + tl.program_id(1) == 0:
            tl.store(unit, size)

    @triton.jit
    def _relu2_backward_kernel(
        dh,
        h,
        ht,
        h_unit,
        h_most,
        largest,
        longest,
        q,
        qt,
        unit,
        rows,
        columns,
        padded,
        MOST: tl.constexpr,
        TILE: tl.constexpr,
        WIDE: tl.constexpr,
        TURNS: tl.constexpr,  # h is given as it is, and turned here; else it is given turned
    ):
        h_size = tl.load(h_unit)
        bound = tl.load(largest + 1) * tl.load(longest + 1) * 2 * tl.sqrt(h_most * h_size)
        size, inverse = fp8.power_of_two(bound, MOST)
        row = tl.program_id(1) * TILE + tl.arange(0, TILE)
        column = tl.program_id(0) * WIDE + tl.arange(0, WIDE)
        turned = column.to(tl.int64)[:, None] * padded + row[None, :]
        at = row.to(tl.int64)[:, None] * columns + column[None, :]
        inside = (row < rows)[:, None] & (column < columns)[None, :]
        if TURNS:
            hidden = tl.load(h + at, mask=inside, other=0.0).to(tl.float16)
            value = tl.trans(hidden).to(tl.float32).to(ht.dtype.element_ty)
            tl.store(ht + turned, value, mask=(column < columns)[:, None] & (row < padded)[None, :])
        else:
            there = (column < columns)[:, None] & (row < rows)[None, :]
            hidden = tl.trans(tl.load(ht + turned, mask=there, other=0.0).to(tl.float16))
        slope = 2 * tl.sqrt(hidden.to(tl.float32) * h_size)
        tile = tl.load(dh + at, mask=inside, other=0.0).to(tl.float32) * slope * inverse
        fp8.store_both(tile, row, column, q, qt, rows, columns, padded, padded)
        if tl.program_id(0) + tl.program_id(1) == 0:
            tl.store(unit, size)


@torch.library.custom_op("nanorun::fp8_relu2_quantize", mutates_args=())
def quantize(u: Tensor, longest: Tensor, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """relu(u)² of u = n·wᵀ in e4m3, its transpose and unit; n is normed and `width` wide, longest[0] w's row."""
    q, qt, unit = fp8.both_ways(u, fp8.E4M3)
    reach = math.sqrt(width) / CLIP
    _relu2_kernel[fp8.tiles(u)](
        u, longest, reach, q, qt, unit, *u.shape, qt.shape[1], fp8.MOST[fp8.E4M3], fp8.TILE, num_warps=8
    )
    return q, qt, unit


@quantize.register_fake
def _(u: Tensor, longest: Tensor, width: int) -> tuple[Tensor, Tensor, Tensor]:
    return fp8.both_ways(u, fp8.E4M3)


@torch.library.custom_op("nanorun::fp8_relu2_backward", mutates_args=())
def backward(
    dh: Tensor, ht: Tensor, h_unit: Tensor, largest: Tensor, longest: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """dh·2√h in e5m2, its transpose and unit, for dh = g·w: `largest` measured of g, longest[1] w's column."""
    q, qt, unit = fp8.both_ways(dh, fp8.E5M2)
    _launch(dh, ht, ht, h_unit, largest, longest, q, qt, unit, turns=False)
    return q, qt, unit


@backward.register_fake
def _(
    dh: Tensor, ht: Tensor, h_unit: Tensor, largest: Tensor, longest: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    return fp8.both_ways(dh, fp8.E5M2)


def _launch(
    dh: Tensor,
    h: Tensor,
    ht: Tensor,
    h_unit: Tensor,
    largest: Tensor,
    longest: Tensor,
    q: Tensor,
    qt: Tensor,
    unit: Tensor,
    turns: bool,
) -> None:
    rows, columns = dh.shape
    _relu2_backward_kernel[fp8.tiles(dh, SLOPE_ROWS, SLOPE_COLUMNS)](
        dh,
        h,
        ht,
        h_unit,
        fp8.MOST[fp8.E4M3],
        largest,
        longest,
        q,
        qt,
        unit,
        rows,
        columns,
        qt.shape[1],
        MOST=fp8.MOST[fp8.E5M2],
        TILE=SLOPE_ROWS,
        WIDE=SLOPE_COLUMNS,
        TURNS=turns,
        num_warps=8,
    )


@torch.library.custom_op("nanorun::fp8_relu2_backward_turning", mutates_args=())
def backward_turning(
    dh: Tensor, h: Tensor, h_unit: Tensor, largest: Tensor, longest: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The same from h as it is; and its transpose, which the gradient of the weights behind it needs."""
    q, qt, unit = fp8.both_ways(dh, fp8.E5M2)
    ht = torch.empty_like(qt, dtype=fp8.E4M3)
    _launch(dh, h, ht, h_unit, largest, longest, q, qt, unit, turns=True)
    return q, qt, unit, ht


@backward_turning.register_fake
def _(
    dh: Tensor, h: Tensor, h_unit: Tensor, largest: Tensor, longest: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    q, qt, unit = fp8.both_ways(dh, fp8.E5M2)
    return q, qt, unit, torch.empty_like(qt, dtype=fp8.E4M3)
