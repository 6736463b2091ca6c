"""Amax and quantization with a transposed copy; the package docstring explains the scales."""

import torch
from torch import Tensor

from nanorun.model.kernels.language import HAS_TRITON, tl, triton

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
# Of e5m2's 57,344 not all is used: Cauchy-Schwarz bounds GEMM outputs whose inputs were already rounded up.
FP8_MAX = {E4M3: 448.0, E5M2: 32_768.0}
ALIGNMENT = 16  # bytes, of every row that a GEMM reads
FAST_ACCUM = True  # in x·wᵀ and dgrad; wgrad sums over many tokens and accumulates in full precision

TILE = 128  # rows and columns of a tile that is written with its transpose
AMAX_ROWS, AMAX_COLUMNS = 4, 256
AMAX_HEADROOM = 16.0  # how much larger than the sampled rows the others may be
AMAX_MIN_ROWS = 4_096  # at least this many rows are sampled


def is_supported(device: torch.device) -> bool:
    """Whether this device has FP8 tensor cores (Nvidia's Ada, Hopper and later) and Triton to quantize with."""
    if device.type != "cuda" or torch.version.hip is not None or not HAS_TRITON:
        return False
    return torch.cuda.get_device_capability(device) >= (8, 9)


def on_by_default(device: torch.device) -> bool:
    """Whether FP8 was measured to be faster on such a device: on Hopper."""
    return is_supported(device) and torch.cuda.get_device_capability(device)[0] == 9


def is_aligned(*sizes: int) -> bool:
    return all(size % ALIGNMENT == 0 for size in sizes)


def padded(rows: int) -> int:
    return -(-rows // ALIGNMENT) * ALIGNMENT


def scaled_mm(
    a: Tensor,
    b: Tensor,
    a_scale: Tensor,
    b_scale: Tensor,
    dtype: torch.dtype,
    fast_accum: bool,
    out: Tensor | None = None,
) -> Tensor:
    """a·bᵀ of (M, K) and (N, K) in FP8, times both scales, by cuBLAS."""
    return torch._scaled_mm(a, b.t(), a_scale, b_scale, out_dtype=dtype, use_fast_accum=fast_accum, out=out)


@triton.jit
def power_of_two_scale(bound, FP8_MAX: tl.constexpr):
    """The smallest power of two that, as the scale, brings a bound to FP8_MAX or less; and its inverse. Computed on the
    bits, since neither logarithm nor division is exact on a GPU."""
    bound += tl.zeros([], tl.float32)  # the interpreter needs this to treat it as a tensor
    bits = (bound * (1.0 / FP8_MAX)).to(tl.int32, bitcast=True)
    bits = tl.where(bound > 0, (bits + 0x007FFFFF) & 0x7F800000, 0x3F800000)
    return bits.to(tl.float32, bitcast=True), (0x7F000000 - bits).to(tl.float32, bitcast=True)


@triton.jit
def store_with_transpose(tile, row, column, q, q_t, rows, columns, padded, pitch):
    """Stores a tile of q and of its transpose. Rows of the transpose are zero-padded to `padded` (the tile holds the
    zeros) and `pitch` apart.

    The tile is transposed in 16 bits and rounded to 8 afterwards, twice: ptxas of CUDA 12.9 mixes up the
    bytes of a tile of 8-bit floats that is stored both ways (triton-lang/triton issue 11111)."""
    tile = tile.to(tl.float16)
    at = row.to(tl.int64)[:, None] * columns + column[None, :]
    value = tile.to(tl.float32).to(q.dtype.element_ty)
    tl.store(q + at, value, mask=(row < rows)[:, None] & (column < columns)[None, :])
    at = column.to(tl.int64)[:, None] * pitch + row[None, :]
    value = tl.trans(tile).to(tl.float32).to(q.dtype.element_ty)
    tl.store(q_t + at, value, mask=(column < columns)[:, None] & (row < padded)[None, :])


@triton.jit(do_not_specialize=["stride"])  # one kernel for all strides, so that it can be precompiled
def _amax_kernel(
    x, result, rows, stride, headroom, columns: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)) * stride
    start = x + row.to(tl.int64)[:, None] * columns
    amax = tl.zeros([ROWS, COLUMNS], tl.float32)
    squares = tl.zeros([ROWS, COLUMNS], tl.float32)
    for first in range(0, columns, COLUMNS):
        column = first + tl.arange(0, COLUMNS)
        inside = (row < rows)[:, None] & (column < columns)[None, :]
        tile = tl.load(start + column[None, :], mask=inside, other=0.0).to(tl.float32)
        amax = tl.maximum(amax, tl.abs(tile))
        squares += tile * tile
    tl.atomic_max(result, tl.max(tl.max(amax, 1), 0) * headroom, sem="relaxed")
    tl.atomic_max(result + 1, tl.sqrt(tl.max(tl.sum(squares, 1), 0)) * headroom, sem="relaxed")


@triton.jit
def _quantize_kernel(
    x,
    amax,
    bound,
    q,
    q_t,
    scale,
    rows,
    columns,
    padded,
    HAS_AMAX: tl.constexpr,
    FP8_MAX: tl.constexpr,
    TILE: tl.constexpr,
):
    if HAS_AMAX:
        bound = tl.load(amax)
    scale_value, inv_scale = power_of_two_scale(bound, FP8_MAX)
    row = tl.program_id(1) * TILE + tl.arange(0, TILE)
    column = tl.program_id(0) * TILE + tl.arange(0, TILE)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    at = row.to(tl.int64)[:, None] * columns + column[None, :]
    tile = tl.load(x + at, mask=inside, other=0.0).to(tl.float32) * inv_scale
    store_with_transpose(tile, row, column, q, q_t, rows, columns, padded, padded)
    if tl.program_id(0) + tl.program_id(1) == 0:
        tl.store(scale, scale_value)


def tiles(x: Tensor, rows: int = TILE, columns: int = TILE) -> tuple[int, int]:
    """The grid, column tiles first: concurrent programs then read whole rows, which is 5% faster at 3,072 columns."""
    return triton.cdiv(x.shape[1], columns), triton.cdiv(x.shape[0], rows)


def empty_with_transpose(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Uninitialized: (N, D) in FP8, its transpose, and the scale."""
    rows, columns = x.shape
    return (
        x.new_empty(rows, columns, dtype=dtype),
        x.new_empty(columns, padded(rows), dtype=dtype),
        x.new_empty(1, dtype=torch.float32),
    )


def amax_stride(rows: int) -> int:
    """Which rows of a gradient are sampled for its amax: all of a few, every eighth of very many. Of any eight adjacent
    rows one is sampled; a gradient that is nonzero in fewer could be lost."""
    return min(max(rows // AMAX_MIN_ROWS, 1), 8)


def amax_headroom(stride: int) -> float:
    """The factor from the amax of the sampled rows to a bound on all rows."""
    return AMAX_HEADROOM if stride > 1 else 1.0


def amax_of_rows(x: Tensor, stride: int) -> Tensor:
    """The largest absolute entry of (N, D) and the largest row norm, (2,), over every `stride`-th row; with a stride
    above 1, both times `AMAX_HEADROOM`."""
    rows, columns = x.shape
    result = x.new_zeros(2, dtype=torch.float32)
    sizes = (rows, stride, amax_headroom(stride), columns)
    _amax_kernel[(triton.cdiv(rows, stride * AMAX_ROWS),)](
        x.contiguous(), result, *sizes, AMAX_ROWS, AMAX_COLUMNS, num_warps=4
    )
    return result


@torch.library.custom_op("nanorun::fp8_amax_and_row_norm", mutates_args=())
def amax_and_row_norm(x: Tensor) -> Tensor:
    """Bounds on the entries and on the row norms of (N, D), a gradient, estimated from a sample of its rows."""
    return amax_of_rows(x, amax_stride(x.shape[0]))


amax_and_row_norm.register_fake(lambda x: x.new_empty(2, dtype=torch.float32))


@torch.library.custom_op("nanorun::fp8_quantize", mutates_args=())
def quantize(
    x: Tensor, dtype: torch.dtype, amax: Tensor | None = None, bound: float = 0.0
) -> tuple[Tensor, Tensor, Tensor]:
    """(N, D) in FP8, its transpose and the scale. Its entries are at most amax[0], as `amax_and_row_norm` returns it,
    or, without one, at most `bound`."""
    q, q_t, scale = empty_with_transpose(x, dtype)
    quantize_into(q, q_t, scale, x, amax, bound)
    return q, q_t, scale


quantize.register_fake(lambda x, dtype, amax=None, bound=0.0: empty_with_transpose(x, dtype))


def quantize_into(
    q: Tensor, q_t: Tensor, scale: Tensor, x: Tensor, amax: Tensor | None, bound: float = 0.0
) -> None:
    """`quantize`, into tensors that exist."""
    _quantize_kernel[tiles(x)](
        x.contiguous(),
        x if amax is None else amax,
        bound,
        q,
        q_t,
        scale,
        *x.shape,
        q_t.shape[1],
        HAS_AMAX=amax is not None,
        FP8_MAX=FP8_MAX[q.dtype],
        TILE=TILE,
        num_warps=8,
    )
