"""ReLU² and its gradient at the end of the matrix product that makes their input, in eight bits, on Hopper.

The MLP's hidden layer is the widest thing in a block. Its product writes it in sixteen bits, and a kernel of its own
reads it back to square, round and transpose it (fp8.py): 4 bytes of traffic a channel that need not be, forward, and
4 backward. A matrix unit leaves its sums in registers, so this can be done before anything is written.

The products are quack's (the package that FlashAttention-4 is built on): a GEMM whose ending is a Python function of
a sum. Both results, as it is and transposed, leave from there. Scales are those of fp8.py, as one factor that is
known before the product begins:

    h  = relu(x·wᵀ)²       x·wᵀ/√unit is squared, so that what is written is h/unit
    du = (g·w)·2√h          by the unit that Cauchy and Schwarz allow

It is optional, as the package is; without it, fp8.py's kernels do the same. Shapes as there: N tokens, D width,
F hidden width; N is a multiple of 16.
"""

import functools
import math
from typing import Any

import torch
from torch import Tensor

from nanorun.model.kernels import fp8

try:
    import triton
    import triton.language as tl
except ImportError:  # a CPU build of torch has no Triton
    triton = None

# How a product is cut up, and that sums are made as fast as in fp8.py (`FAST_SUMS`).
TILES: dict[str, Any] = {
    "tile_M": 128,
    "tile_N": 256,
    "cluster_M": 2,
    "pingpong": False,
    "post_init_attrs": (("fp8_slow_accum", not fp8.FAST_SUMS),),
}


def fits(tokens: int) -> bool:
    return tokens % fp8.ALIGN == 0


@functools.cache
def works(device: torch.device) -> bool:
    """Whether the products are installed, launch on this device, and give what fp8.py's kernels give."""
    if not fp8.works(device) or torch.cuda.get_device_capability(device)[0] != 9:
        return False
    try:
        import quack.epilogue.frontend  # noqa: F401
    except ImportError:
        return False
    dice = torch.Generator(device).manual_seed(0)
    x = torch.randn(256, 128, device=device, generator=dice)
    w = torch.randn(256, 128, device=device, generator=dice)
    x8, w8, one = x.to(fp8.E4M3), w.to(fp8.E4M3), torch.ones(1, device=device)
    longest = torch.full((2,), 20.0, device=device)
    try:
        h, ht, unit = up_relu2(x8, w8, one, one, longest, 128)
    except Exception:  # whatever a young compiler may raise on a machine it was not tried on
        return False
    truth = (x8.float() @ w8.float().T).relu().square()
    return bool((h.float() * unit - truth).norm() < 0.05 * truth.norm()) and torch.equal(
        ht.view(torch.uint8).T, h.view(torch.uint8)
    )


@functools.cache
def _endings() -> tuple[Any, Any]:
    """The two functions of a sum. Made when first needed: the package takes seconds to import."""
    import cutlass.cute as cute
    from quack.epilogue.frontend import gemm_epilogue

    @gemm_epilogue(outputs=("turned",))
    def squared(acc: Any, factor: Any) -> dict[str, Any]:
        x = acc * factor
        h = cute.arch.fmax(x, 0.0) * x  # and not its square, by which NaN would become zero
        return {"D": h, "turned": h}

    @gemm_epilogue(outputs=("turned",))
    def sloped(acc: Any, c: Any, factor: Any) -> dict[str, Any]:
        du = acc * factor * cute.math.sqrt(c)
        return {"D": du, "turned": du}

    return squared, sloped


if triton is not None:

    @triton.jit
    def _squared_factor(x_unit, w_unit, longest, reach, unit, factor, MOST: tl.constexpr):
        bound = tl.load(longest) * reach
        size, inverse = fp8.power_of_two(bound * bound, MOST)
        tl.store(unit, size)
        tl.store(factor, tl.load(x_unit) * tl.load(w_unit) * tl.sqrt_rn(inverse))

    @triton.jit
    def _sloped_factor(g_unit, w_unit, h_unit, h_most, largest, longest, unit, factor, MOST: tl.constexpr):
        slope = 2 * tl.sqrt_rn(tl.load(h_unit))
        bound = tl.load(largest + 1) * tl.load(longest + 1) * slope * tl.sqrt_rn(h_most + 0.0)
        size, inverse = fp8.power_of_two(bound, MOST)
        tl.store(unit, size)
        tl.store(factor, tl.load(g_unit) * tl.load(w_unit) * slope * inverse)


@torch.library.custom_op("nanorun::fp8_up_relu2", mutates_args=())
def up_relu2(
    x: Tensor, w: Tensor, x_unit: Tensor, w_unit: Tensor, longest: Tensor, width: int
) -> tuple[Tensor, Tensor, Tensor]:
    """relu(x·wᵀ)² of (N, D) and (F, D) in e4m3, its transpose and unit, as `fp8.relu2_quantize` has them."""
    h, ht, unit = _room(x, w, fp8.E4M3)
    factor = torch.empty_like(unit)
    _squared_factor[(1,)](
        x_unit,
        w_unit,
        longest,
        math.sqrt(width) / fp8.CLIP,
        unit,
        factor,
        MOST=fp8.MOST[fp8.E4M3],
        num_warps=1,
    )
    _endings()[0].gemm(x, w, h, epi_args={"factor": factor, "turned": ht.T}, **TILES)
    return h, ht, unit


@up_relu2.register_fake
def _(
    x: Tensor, w: Tensor, x_unit: Tensor, w_unit: Tensor, longest: Tensor, width: int
) -> tuple[Tensor, Tensor, Tensor]:
    return _room(x, w, fp8.E4M3)


@torch.library.custom_op("nanorun::fp8_down_slope", mutates_args=())
def down_slope(
    g: Tensor,
    w: Tensor,
    g_unit: Tensor,
    w_unit: Tensor,
    ht: Tensor,
    h_unit: Tensor,
    largest: Tensor,
    longest: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """(g·wᵀ)·2√h of (N, D) and (F, D) in e5m2, its transpose and unit, as `fp8.relu2_backward` has them."""
    du, dut, unit = _room(g, w, fp8.E5M2)
    factor = torch.empty_like(unit)
    _sloped_factor[(1,)](
        g_unit,
        w_unit,
        h_unit,
        fp8.MOST[fp8.E4M3],
        largest,
        longest,
        unit,
        factor,
        MOST=fp8.MOST[fp8.E5M2],
        num_warps=1,
    )
    _endings()[1].gemm(g, w, du, ht.T, epi_args={"factor": factor, "turned": dut.T}, **TILES)
    return du, dut, unit


@down_slope.register_fake
def _(
    g: Tensor,
    w: Tensor,
    g_unit: Tensor,
    w_unit: Tensor,
    ht: Tensor,
    h_unit: Tensor,
    largest: Tensor,
    longest: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    return _room(g, w, fp8.E5M2)


def _room(x: Tensor, w: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    rows, columns = x.shape[0], w.shape[0]
    return (
        x.new_empty(rows, columns, dtype=dtype),
        x.new_empty(columns, rows, dtype=dtype),
        x.new_empty(1, dtype=torch.float32),
    )
