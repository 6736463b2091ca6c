"""Matrix products in eight bits: what is quantized, by which scale, and in which order it is written.

A GPU multiplies 8-bit floats about 1.7 times as fast as bf16 (measured on an H200 at our shapes). What goes
into a product is rounded, what comes out is not: sums are fp32, results bf16 or fp32. Weights and activations
are e4m3 (three bits of mantissa, up to 448), gradients e5m2 (two bits, but 32 powers of two of range).

Scales. A quantized tensor is q·unit, and the unit is one number, a power of two, so that scaling itself never
rounds. It comes from a bound on the tensor itself, never from what an earlier step has seen. So nothing is
remembered (a run goes on bit for bit, a block computed again gives the same bits), and no host waits:

    normed activations     an entry of a vector normed to root mean square 1 is at most √D
    weights                their largest entry, measured when they are copied, once per update
    relu(x·wᵀ)²            Cauchy and Schwarz: |x·w| ≤ √D·|w|, with the longest row w. Bounds are loose, but a
                           float's precision does not depend on its scale until it falls out of the range's
                           bottom, and the range is wide: e4m3 spans 2¹⁷. A quarter of the bound is used, and
                           more is clipped, which needs a row that points within 60° of an input: in 768
                           dimensions chance is 14 standard deviations away from that
    gradients into a layer sixteen times the largest entry of every eighth row (`SPARE`, `every`). Neither an exact
                           bound nor a tight one is needed where the range has 31 powers of two: 26 are left below
                           the largest that was seen, and what would be more than sixteen times as large as anything
                           in thousands of other rows is clipped (an infinity among those, too; no NaN is). Reading
                           all rows took 1.7% of a step
    gradients of q and k   likewise; rope_norm8.py says how
    gradient of relu²      Cauchy and Schwarz again, from the longest gradient row and column of weights.
                           Typical entries land 17 powers of two below it, and e5m2 has 13 more below them
    gradient of logits     |softmax - onehot| ≤ 1

Both ways. A matrix unit wants both factors with the summed index in adjacent bytes, and the three products of
a layer sum over different indices: x·wᵀ over inputs, g·w over outputs, gᵀ·x over tokens. So each tensor is
written twice, as it is and transposed, by the kernel that makes it: it reads a tile once. Two bytes leave for
each two bytes of bf16 that would have, so where a norm or ReLU² is fused in, quantizing costs no bandwidth.

What is made of this are layers, in layers8.py.

Every operator runs on a CPU too (Triton's interpreter and torch's own `_scaled_mm`), for tests. Shapes: N
tokens, D width, F hidden width; q is (N, D), its transpose (D, N) with N rounded up to 16 and zeros behind.
"""

import math

import torch
from torch import Tensor, nn

from nanorun.config import NORM_EPSILON

try:
    import triton
    import triton.language as tl
except ImportError:  # a CPU build of torch has no Triton
    triton = None

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
# Of e5m2's 57,344 not all is used: what Cauchy and Schwarz bound are products of numbers already rounded up.
MOST = {E4M3: 448.0, E5M2: 32_768.0}
ALIGN = 16  # bytes, of every row that a product reads
FAST_SUMS = True  # in x·wᵀ and g·w; sums over tokens are long and keep their full precision

TILE = 128  # rows and columns at a time of what is read and written both ways
NORM_ROWS, NORM_COLUMNS = 32, 256  # 76 µs for 32,768 × 768 added, mixed and normed on an H200; 64 × 128: 100
MEASURED_ROWS, MEASURED_COLUMNS = 4, 256
SPARE = 16.0  # how much larger than all that were looked at other rows may be, where not all are
SEEN_ROWS = 4_096  # at least, of those of which not all are


def works(device: torch.device) -> bool:
    """Whether this device multiplies 8-bit floats (Nvidia's Ada, Hopper and later) and can make them."""
    if device.type != "cuda" or torch.version.hip is not None or triton is None:
        return False
    return torch.cuda.get_device_capability(device) >= (8, 9)


def tried(device: torch.device) -> bool:
    """Whether it was seen to pay on such a device: on Hopper."""
    return works(device) and torch.cuda.get_device_capability(device)[0] == 9


def fits(*sizes: int) -> bool:
    return all(size % ALIGN == 0 for size in sizes)


class Copies(nn.Module):
    """A weight in eight bits, both ways; several, stacked, as one. `renew` after each change of the weights.

    Few launches, each without torch's dispatcher: an update renews them all, and the GPU must not wait for it.
    """

    rows: Tensor  # (outputs, inputs)
    columns: Tensor  # (inputs, outputs)
    unit: Tensor
    longest: Tensor  # lengths of the longest row and column, for those who ask for them

    def __init__(self, outputs: int, inputs: int, lengths: bool = True, pingpong: bool = False) -> None:
        super().__init__()
        self.lengths = lengths
        self.pingpong = pingpong  # whether it is multiplied by products.py
        self.register_buffer("rows", torch.empty(outputs, inputs, dtype=E4M3), persistent=False)
        self.register_buffer("columns", torch.empty(inputs, outputs, dtype=E4M3), persistent=False)
        self.register_buffer("unit", torch.empty(1), persistent=False)
        self.register_buffer("longest", torch.empty(2), persistent=False)

    @torch.no_grad()
    def renew(self, *weights: Tensor) -> None:
        weight = torch.cat(weights) if len(weights) > 1 else weights[0]
        largest = measured(weight)
        quantize_into(weight, largest, 0.0, self.rows, self.columns, self.unit)
        if self.lengths:
            self.longest[0].copy_(largest[1])
            torch.amax(torch.linalg.vector_norm(weight, dim=0), 0, out=self.longest[1])


def multiply(
    a: Tensor,
    b: Tensor,
    a_unit: Tensor,
    b_unit: Tensor,
    dtype: torch.dtype,
    fast: bool,
    out: Tensor | None = None,
) -> Tensor:
    """a·bᵀ of (M, K) and (N, K) in eight bits, as they stand for, by cuBLAS; `out`: where to."""
    return torch._scaled_mm(a, b.t(), a_unit, b_unit, out_dtype=dtype, use_fast_accum=fast, out=out)


if triton is not None:

    @triton.jit
    def power_of_two(bound, MOST: tl.constexpr):
        """The smallest power of two, as unit, that brings a bound to MOST or less; and its inverse. By bits, since
        neither logarithms nor division are exact there."""
        bound += tl.zeros([], tl.float32)  # which the interpreter needs to know it for a tensor
        bits = (bound * (1.0 / MOST)).to(tl.int32, bitcast=True)
        bits = tl.where(bound > 0, (bits + 0x007FFFFF) & 0x7F800000, 0x3F800000)
        return bits.to(tl.float32, bitcast=True), (0x7F000000 - bits).to(tl.float32, bitcast=True)

    @triton.jit
    def largest_of(slots, SLOTS: tl.constexpr):
        return tl.max(tl.load(slots + tl.arange(0, SLOTS)), 0)

    @triton.jit
    def store_both(tile, row, column, q, qt, rows, columns, padded, pitch):
        """A tile of q, and of its transpose, whose rows go on with zeros to `padded`: the tile has them. They are
        `pitch` apart.

        It is transposed in sixteen bits and rounded to eight afterwards, twice: ptxas of CUDA 12.9 mixes up the
        bytes of a tile of 8-bit floats that is stored both ways (triton-lang/triton issue 11111)."""
        tile = tile.to(tl.float16)
        at = row.to(tl.int64)[:, None] * columns + column[None, :]
        value = tile.to(tl.float32).to(q.dtype.element_ty)
        tl.store(q + at, value, mask=(row < rows)[:, None] & (column < columns)[None, :])
        at = column.to(tl.int64)[:, None] * pitch + row[None, :]
        value = tl.trans(tile).to(tl.float32).to(q.dtype.element_ty)
        tl.store(qt + at, value, mask=(column < columns)[:, None] & (row < padded)[None, :])

    @triton.jit(do_not_specialize=["every"])  # one kernel for all, which is compiled ahead
    def _measure_kernel(
        x, found, rows, every, spare, columns: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
    ):
        row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)) * every
        start = x + row.to(tl.int64)[:, None] * columns
        largest = tl.zeros([ROWS, COLUMNS], tl.float32)
        squares = tl.zeros([ROWS, COLUMNS], tl.float32)
        for first in range(0, columns, COLUMNS):
            column = first + tl.arange(0, COLUMNS)
            inside = (row < rows)[:, None] & (column < columns)[None, :]
            tile = tl.load(start + column[None, :], mask=inside, other=0.0).to(tl.float32)
            largest = tl.maximum(largest, tl.abs(tile))
            squares += tile * tile
        tl.atomic_max(found, tl.max(tl.max(largest, 1), 0) * spare, sem="relaxed")
        tl.atomic_max(found + 1, tl.sqrt(tl.max(tl.sum(squares, 1), 0)) * spare, sem="relaxed")

    @triton.jit
    def _quantize_kernel(
        x,
        largest,
        bound,
        q,
        qt,
        unit,
        rows,
        columns,
        padded,
        MEASURED: tl.constexpr,
        MOST: tl.constexpr,
        TILE: tl.constexpr,
    ):
        if MEASURED:
            bound = tl.load(largest)
        size, inverse = power_of_two(bound, MOST)
        row = tl.program_id(1) * TILE + tl.arange(0, TILE)
        column = tl.program_id(0) * TILE + tl.arange(0, TILE)
        inside = (row < rows)[:, None] & (column < columns)[None, :]
        at = row.to(tl.int64)[:, None] * columns + column[None, :]
        tile = tl.load(x + at, mask=inside, other=0.0).to(tl.float32) * inverse
        store_both(tile, row, column, q, qt, rows, columns, padded, padded)
        if tl.program_id(0) + tl.program_id(1) == 0:
            tl.store(unit, size)

    @triton.jit
    def _norm_kernel(
        x,
        y,
        start,
        scale,
        share,
        s,
        q,
        qt,
        unit,
        inverses,
        rows,
        columns: tl.constexpr,
        padded,
        bound,
        eps,
        ADDS: tl.constexpr,
        MIXES: tl.constexpr,
        MOST: tl.constexpr,
        ROWS: tl.constexpr,
        COLUMNS: tl.constexpr,
    ):
        size, fine = power_of_two(bound, MOST)
        row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
        begin = row.to(tl.int64)[:, None] * columns
        once: tl.constexpr = "evict_first" if ADDS or MIXES else ""  # the cache is for s, which is read again
        if MIXES:
            scale = tl.load(scale).to(x.dtype.element_ty).to(tl.float32)
            share = tl.load(share).to(x.dtype.element_ty).to(tl.float32)
        squares = tl.zeros([ROWS, COLUMNS], tl.float32)
        for first in range(0, columns, COLUMNS):
            column = first + tl.arange(0, COLUMNS)
            inside = (row < rows)[:, None] & (column < columns)[None, :]
            at = begin + column[None, :]
            tile = tl.load(x + at, mask=inside, other=0.0, eviction_policy=once).to(tl.float32)
            if ADDS:
                tile += tl.load(y + at, mask=inside, other=0.0, eviction_policy=once).to(tl.float32)
            if MIXES:
                origin = tl.load(start + at, mask=inside, other=0.0, eviction_policy=once).to(tl.float32)
                tile = scale * tile + share * origin
            if ADDS or MIXES:
                rounded = tile.to(s.dtype.element_ty)  # its norm is of what the backward pass will find
                tl.store(s + at, rounded, mask=inside)
                tile = rounded.to(tl.float32)
            squares += tile * tile
        inverse = tl.rsqrt(tl.sum(squares, 1) / columns + eps)
        tl.store(inverses + row, inverse, mask=row < rows)
        if ADDS or MIXES:
            tl.debug_barrier()  # what a thread reads now another may have written
        for first in range(0, columns, COLUMNS):  # the second time from the cache
            column = first + tl.arange(0, COLUMNS)
            inside = (row < rows)[:, None] & (column < columns)[None, :]
            tile = tl.load(s + begin + column[None, :], mask=inside, other=0.0).to(tl.float32)
            store_both(tile * inverse[:, None] * fine, row, column, q, qt, rows, columns, padded, padded)
        if tl.program_id(0) == 0:
            tl.store(unit, size)


def both_ways(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Room for (N, D) in eight bits, its transpose, and the unit."""
    rows, columns = x.shape
    return (
        x.new_empty(rows, columns, dtype=dtype),
        x.new_empty(columns, padded(rows), dtype=dtype),
        x.new_empty(1, dtype=torch.float32),
    )


def padded(rows: int) -> int:
    return -(-rows // ALIGN) * ALIGN


@torch.library.custom_op("nanorun::fp8_measure", mutates_args=())
def measure(x: Tensor) -> Tensor:
    """What neither an entry of (N, D), a gradient, nor the length of a row should exceed, by some of the rows."""
    return measured(x, every(x.shape[0]))


def measured(x: Tensor, every: int = 1) -> Tensor:
    """The largest entry of (N, D), and the length of its longest row; or SPARE times that of every so-manieth."""
    rows, columns = x.shape
    found = x.new_zeros(2, dtype=torch.float32)
    sizes = (rows, every, spare(every), columns)
    _measure_kernel[(triton.cdiv(rows, every * MEASURED_ROWS),)](
        x.contiguous(), found, *sizes, MEASURED_ROWS, MEASURED_COLUMNS, num_warps=4
    )
    return found


def every(rows: int) -> int:
    """Which rows of a gradient are looked at: each eighth of very many. None of a few is left out, and of many, any
    eight in a row have one: a gradient that is zero but for fewer could be lost."""
    return min(max(rows // SEEN_ROWS, 1), 8)


def spare(every: int) -> float:
    """What the largest of every so-manieth row is multiplied by, to stand for all."""
    return SPARE if every > 1 else 1.0


@measure.register_fake
def _(x: Tensor) -> Tensor:
    return x.new_empty(2, dtype=torch.float32)


@torch.library.custom_op("nanorun::fp8_quantize", mutates_args=())
def quantize(
    x: Tensor, largest: Tensor | None, bound: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """(N, D) in eight bits, its transpose and the unit, by what `measure` found, or by a bound."""
    q, qt, unit = both_ways(x, dtype)
    quantize_into(x, largest, bound, q, qt, unit)
    return q, qt, unit


def quantize_into(
    x: Tensor, largest: Tensor | None, bound: float, q: Tensor, qt: Tensor, unit: Tensor
) -> None:
    _quantize_kernel[tiles(x)](
        x.contiguous(),
        x if largest is None else largest,
        bound,
        q,
        qt,
        unit,
        *x.shape,
        qt.shape[1],
        MEASURED=largest is not None,
        MOST=MOST[q.dtype],
        TILE=TILE,
        num_warps=8,
    )


@quantize.register_fake
def _(x: Tensor, largest: Tensor | None, bound: float, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    return both_ways(x, dtype)


@torch.library.custom_op("nanorun::fp8_norm_quantize", mutates_args=())
def norm_quantize(x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """norm(x) of (N, D) in e4m3, its transpose and unit; and what each row was multiplied by, (N,)."""
    x = x.contiguous()
    return _norm_quantized(x, None, None, None, None, x)


@norm_quantize.register_fake
def _(x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return *both_ways(x, E4M3), x.new_empty(x.shape[0], dtype=torch.float32)


@torch.library.custom_op("nanorun::stream_norm_quantize", mutates_args=())
def stream_norm_quantize(
    x: Tensor, y: Tensor | None, start: Tensor | None, scale: Tensor | None, share: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The (N, D) stream, settled, and its norm as `norm_quantize` has it: stream.py tells how."""
    s = torch.empty_like(x, memory_format=torch.contiguous_format)
    return s, *_norm_quantized(x, y, start, scale, share, s)


@stream_norm_quantize.register_fake
def _(
    x: Tensor, y: Tensor | None, start: Tensor | None, scale: Tensor | None, share: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    s = torch.empty_like(x, memory_format=torch.contiguous_format)
    return s, *both_ways(x, E4M3), x.new_empty(x.shape[0], dtype=torch.float32)


def _norm_quantized(
    x: Tensor, y: Tensor | None, start: Tensor | None, scale: Tensor | None, share: Tensor | None, s: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Writes s, unless it is x itself."""
    q, qt, unit = both_ways(x, E4M3)
    rows, columns = x.shape
    inverses = x.new_empty(rows, dtype=torch.float32)
    _norm_kernel[(triton.cdiv(rows, NORM_ROWS),)](
        x.contiguous(),
        x if y is None else y.contiguous(),
        x if start is None else start.contiguous(),
        x if scale is None else scale,
        x if share is None else share,
        s,
        q,
        qt,
        unit,
        inverses,
        rows,
        columns,
        qt.shape[1],
        math.sqrt(columns),
        NORM_EPSILON,
        ADDS=y is not None,
        MIXES=start is not None,
        MOST=MOST[E4M3],
        ROWS=NORM_ROWS,
        COLUMNS=NORM_COLUMNS,
        num_warps=8,
    )
    return q, qt, unit, inverses


def tiles(x: Tensor, rows: int = TILE, columns: int = TILE) -> tuple[int, int]:
    """Tiles across, then down: what runs at the same time reads whole rows, which memory likes (5% at 3,072 wide)."""
    return triton.cdiv(x.shape[1], columns), triton.cdiv(x.shape[0], rows)
