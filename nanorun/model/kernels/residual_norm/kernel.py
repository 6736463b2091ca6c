"""Residual addition, RMS norm and quantization in one kernel, and its backward pass."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from nanorun.config import NORM_EPSILON
from nanorun.model.kernels import fp8
from nanorun.model.kernels.language import tl, triton

ROWS, COLUMNS = 32, 256  # 76 µs for 32,768 × 768 added, mixed and normed on an H200; 64 × 128: 100
BACKWARD_NUMEL = 1024  # elements of each tensor that a program of the backward pass holds, in whole rows


@triton.jit
def _residual_norm_kernel(
    x,
    y,
    x0,
    lambda_,
    mu,
    s,
    q,
    q_t,
    scale,
    inv_rms,
    rows,
    columns: tl.constexpr,
    padded,
    bound,
    eps,
    HAS_Y: tl.constexpr,
    HAS_X0: tl.constexpr,
    FP8_MAX: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    scale_value, inv_scale = fp8.power_of_two_scale(bound, FP8_MAX)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    begin = row.to(tl.int64)[:, None] * columns
    once: tl.constexpr = "evict_first" if HAS_Y or HAS_X0 else ""  # keep the cache for s, which is read again
    if HAS_X0:
        lambda_ = tl.load(lambda_).to(x.dtype.element_ty).to(tl.float32)
        mu = tl.load(mu).to(x.dtype.element_ty).to(tl.float32)
    squares = tl.zeros([ROWS, COLUMNS], tl.float32)
    for first in range(0, columns, COLUMNS):
        column = first + tl.arange(0, COLUMNS)
        inside = (row < rows)[:, None] & (column < columns)[None, :]
        at = begin + column[None, :]
        tile = tl.load(x + at, mask=inside, other=0.0, eviction_policy=once).to(tl.float32)
        if HAS_Y:
            tile += tl.load(y + at, mask=inside, other=0.0, eviction_policy=once).to(tl.float32)
        if HAS_X0:
            origin = tl.load(x0 + at, mask=inside, other=0.0, eviction_policy=once).to(tl.float32)
            tile = lambda_ * tile + mu * origin
        if HAS_Y or HAS_X0:
            rounded = tile.to(s.dtype.element_ty)  # norm what the backward pass will read
            tl.store(s + at, rounded, mask=inside)
            tile = rounded.to(tl.float32)
        squares += tile * tile
    inverse = tl.rsqrt(tl.sum(squares, 1) / columns + eps)
    tl.store(inv_rms + row, inverse, mask=row < rows)
    if HAS_Y or HAS_X0:
        tl.debug_barrier()  # a thread reads now what another thread has written
    for first in range(0, columns, COLUMNS):  # the second read hits the cache
        column = first + tl.arange(0, COLUMNS)
        inside = (row < rows)[:, None] & (column < columns)[None, :]
        tile = tl.load(s + begin + column[None, :], mask=inside, other=0.0).to(tl.float32)
        tile = tile * inverse[:, None] * inv_scale
        fp8.store_with_transpose(tile, row, column, q, q_t, rows, columns, padded, padded)
    if tl.program_id(0) == 0:
        tl.store(scale, scale_value)


@triton.jit
def _residual_norm_backward_kernel(
    dn,
    s,
    inv_rms,
    ds,
    dgate_input,
    x0,
    lambda_,
    dx,
    sums,
    rows,
    columns: tl.constexpr,
    GATE_CHANNELS: tl.constexpr,
    HAS_X0: tl.constexpr,
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
    if HAS_X0:
        x0 = tl.load(x0 + at, mask=inside, other=0.0).to(tl.float32)
    inverse = tl.load(inv_rms + row, mask=row < rows, other=0.0)[:, None]
    if GATE_CHANNELS > 0:
        of = dgate_input + row.to(tl.int64)[:, None] * GATE_CHANNELS + column[None, :]
        dn += tl.load(of, mask=inside & (column < GATE_CHANNELS)[None, :], other=0.0).to(tl.float32)
    n = s * inverse
    d = ds + inverse * (dn - n * (tl.sum(dn * n, 1) / columns)[:, None])
    if HAS_X0:
        d_dot_s = tl.sum(tl.sum(d * s, 1), 0)
        d_dot_x0 = tl.sum(tl.sum(d * x0, 1), 0)
        tl.store(sums + 2 * tl.program_id(0), d_dot_s)
        tl.store(sums + 2 * tl.program_id(0) + 1, d_dot_x0)
        d *= tl.load(lambda_).to(dx.dtype.element_ty).to(tl.float32)
    tl.store(dx + at, d.to(dx.dtype.element_ty), mask=inside)


@torch.library.custom_op("nanorun::norm_quantize", mutates_args=())
def norm_quantize(x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """norm(x) of (N, D) in e4m3, its transpose and scale (from √D: see kernels/fp8); and 1/RMS of each row, (N,)."""
    x = x.contiguous()
    return _norm_quantize(x, None, None, None, None, x)


@torch.library.custom_op("nanorun::residual_norm_quantize", mutates_args=())
def residual_norm_quantize(
    x: Tensor, y: Tensor | None, x0: Tensor | None, lambda_: Tensor | None, mu: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """s = λ·(x + y) + μ·x0 of (N, D), with as many of its terms as there are, and `norm_quantize` of s."""
    s = torch.empty_like(x, memory_format=torch.contiguous_format)
    return s, *_norm_quantize(x, y, x0, lambda_, mu, s)


def _norm_quantize(
    x: Tensor, y: Tensor | None, x0: Tensor | None, lambda_: Tensor | None, mu: Tensor | None, s: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Writes s, unless it is x itself."""
    q, q_t, scale, inv_rms = _empty_norm(x)
    rows, columns = x.shape
    _residual_norm_kernel[(triton.cdiv(rows, ROWS),)](
        x.contiguous(),
        x if y is None else y.contiguous(),
        x if x0 is None else x0.contiguous(),
        x if lambda_ is None else lambda_,
        x if mu is None else mu,
        s,
        q,
        q_t,
        scale,
        inv_rms,
        rows,
        columns,
        q_t.shape[1],
        math.sqrt(columns),
        NORM_EPSILON,
        HAS_Y=y is not None,
        HAS_X0=x0 is not None,
        FP8_MAX=fp8.FP8_MAX[fp8.E4M3],
        ROWS=ROWS,
        COLUMNS=COLUMNS,
        num_warps=8,
    )
    return q, q_t, scale, inv_rms


def _empty_norm(x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return *fp8.empty_with_transpose(x, fp8.E4M3), x.new_empty(x.shape[0], dtype=torch.float32)


norm_quantize.register_fake(_empty_norm)
residual_norm_quantize.register_fake(
    lambda x, *others: (torch.empty_like(x, memory_format=torch.contiguous_format), *_empty_norm(x))
)


def input_grads(
    dn: Tensor,
    s: Tensor,
    inv_rms: Tensor,
    ds: Tensor | None,
    dgate_input: Tensor | None,
    x0: Tensor | None,
    lambda_: Tensor | None,
    mu: Tensor | None,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """The gradients of x (that of y is the same), x0, λ and μ, from those of n = norm(s) and of s = λ·(x + y) + μ·x0:
    dx = λ·d, dx0 = μ·d, dλ = Σ d·(x + y) and dμ = Σ d·x0, where d = ds + inv_rms·(dn - n·mean(dn·n)). `dgate_input` is
    added to dn: it is the gradient of the first channels of n, which a gate reads unquantized. Without `ds`, s is x
    itself and dx = d."""
    if ds is None:  # plain, so that a compiler fuses it with what follows
        dn = dn.float()
        if dgate_input is not None and dgate_input.shape[1] > 0:
            dn = dn + F.pad(dgate_input.float(), (0, dn.shape[1] - dgate_input.shape[1]))
        n = s.float() * inv_rms[:, None]
        return (inv_rms[:, None] * (dn - n * (dn * n).mean(1, keepdim=True))).to(s.dtype), None, None, None
    if x0 is None or lambda_ is None or mu is None:
        dx, _ = backward(dn, s, inv_rms, ds, dgate_input, None, None)
        return dx, None, None, None
    dx, sums = backward(dn, s, inv_rms, ds, dgate_input, x0, lambda_)
    d_dot_s, d_dot_x0 = sums.sum(0).unbind()
    lambda_rounded, mu_rounded = (each.to(s.dtype).float() for each in (lambda_, mu))
    inv_lambda = torch.where(lambda_rounded == 0, 0.0, 1 / lambda_rounded)
    dlambda = (d_dot_s - mu_rounded * d_dot_x0) * inv_lambda
    # Plain, so that the compiler fuses it with the sum over layers.
    dx0 = (dx.float() * (mu_rounded * inv_lambda)).to(dx.dtype)
    return dx, dx0, dlambda.view_as(lambda_), d_dot_x0.view_as(mu)


@torch.library.custom_op("nanorun::residual_norm_backward", mutates_args=())
def backward(
    dn: Tensor,
    s: Tensor,
    inv_rms: Tensor,
    ds: Tensor,
    dgate_input: Tensor | None,
    x0: Tensor | None,
    lambda_: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """λ·d, (N, D), and with x0 the sums of d·s and d·x0 of each program, (programs, 2)."""
    dx, sums = _empty_backward(s, x0)
    rows, columns = s.shape
    block_columns, block_rows = _block(columns)
    gate_channels = 0 if dgate_input is None else dgate_input.shape[1]
    _residual_norm_backward_kernel[(triton.cdiv(rows, block_rows),)](
        dn.contiguous(),
        s,
        inv_rms,
        ds.contiguous(),
        dgate_input.contiguous() if dgate_input is not None and gate_channels else dn,
        s if x0 is None else x0.contiguous(),
        inv_rms if lambda_ is None else lambda_,
        dx,
        sums,
        rows,
        columns,
        GATE_CHANNELS=gate_channels,
        HAS_X0=x0 is not None,
        ROWS=block_rows,
        COLUMNS=block_columns,
        num_warps=max(4, min(16, block_columns * block_rows // 512)),
    )
    return dx, sums


def _empty_backward(s: Tensor, x0: Tensor | None) -> tuple[Tensor, Tensor]:
    programs = 0 if x0 is None else -(-s.shape[0] // _block(s.shape[1])[1])
    return torch.empty_like(s), s.new_empty(programs, 2, dtype=torch.float32)


backward.register_fake(lambda dn, s, inv_rms, ds, dgate_input, x0, lambda_: _empty_backward(s, x0))


def _block(columns: int) -> tuple[int, int]:
    """Columns, rounded up to a power of two, and rows of a program."""
    block_columns = 1 << (columns - 1).bit_length()
    return block_columns, max(1, BACKWARD_NUMEL // block_columns)
