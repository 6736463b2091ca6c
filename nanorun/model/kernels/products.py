"""Matrix products in eight bits that end as we like, on Hopper: faster than the library's, and with ReLU² inside.

A product's end is where its sums leave the matrix unit's registers: scaled, rounded, written. In a library's kernel
the matrix unit waits meanwhile, and where sums are short (768 factors at d12) that is a good part of the time. Here
two groups of warps take turns ("ping-pong"): while one ends its tile the other multiplies.

And the end is a Python function of a sum, so it can do what a kernel of its own would do next. The MLP's hidden
layer is the widest thing in a block. Its product would write it in sixteen bits, and another kernel would read it
back to square and round it (relu2.py); here it is squared where it is made, and leaves in eight bits. (x·wᵀ/√unit is
squared, so that what is written is h/unit.) And what a half-block adds to the residual stream is added where it is
made, mixed with the start of the stream if the next half-block wants that (stream.py), so that the next norm reads
one tensor instead of three.

An end must be short, or the next one waits for it. Three that were too long: transposes, which would be stored byte by
byte; ReLU²'s gradient, which has to read h first; and the exponentials of logits for the loss (docs/lab-notebook.md).

The products are quack's, the package that FlashAttention-4 is built on. It is optional, as that is; without it
fp8.py's kernels and cuBLAS do the same. `PLAIN` has every ending in plain PyTorch: the truth, and what a CPU computes.
Shapes as there: N tokens, D width, F hidden width.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from nanorun.model.kernels import fp8, no_memory, relu2, whole

try:
    import triton
    import triton.language as tl
except ImportError:  # a CPU build of torch has no Triton
    triton = None

# How a product is cut up: tiles of 128 × 192 sums, or 128 × 128 where more than a tenth of the wider ones would lie
# beyond the last column. Pairs of programs share what they read.
ROWS, WIDE, NARROW = 128, 192, 128
OPTIONS: dict[str, Any] = {"tile_M": ROWS, "cluster_M": 2, "pingpong": True}
EIGHT_BITS: dict[str, Any] = {"post_init_attrs": (("fp8_slow_accum", not fp8.FAST_SUMS),)}


@functools.cache
def work(device: torch.device) -> bool:
    """Whether the products are installed, launch on this device, and give what the definition gives."""
    if not fp8.works(device) or torch.cuda.get_device_capability(device)[0] != 9:
        return False
    try:
        import quack.epilogue.frontend  # noqa: F401
    except ImportError:
        return False
    try:
        return right(device)
    except torch.OutOfMemoryError as error:
        raise no_memory() from error
    except Exception:  # whatever a young compiler may raise on a machine it was not tried on
        return False


def right(device: torch.device, which: slice = slice(None)) -> bool:
    """Whether every kernel that a model uses (or `which` of them) gives what it should, each called once, with a last
    tile cut off."""
    dice = torch.Generator(device).manual_seed(0)
    x, w = (torch.randn(n, 128, device=device, generator=dice) for n in (200, 560))
    x8, g8, w8, one = x.to(fp8.E4M3), x.to(fp8.E5M2), w.to(fp8.E4M3), torch.ones(1, device=device)
    longest = torch.full((2,), 20.0, device=device)
    forward, backward = (each.float() @ w8.float().T for each in (x8, g8))
    y, start = forward.bfloat16(), backward.bfloat16()

    def squared() -> Tensor:
        h, unit = up_relu2(x8, w8, one, one, longest, 128)
        return h.float() * unit

    cases: list[tuple[Callable[[], Tensor], Tensor]] = [
        (lambda: pingpong(x8, w8, one, one), forward),
        (lambda: pingpong(g8, w8, one, one), backward),
        (squared, forward.relu().square()),
        (lambda: land(x8, w8, one, one, y, None, None, None), 2 * forward),
        (lambda: land(x8, w8, one, one, y, start, one, one), 2 * forward + backward),
        (lambda: product16(x8.bfloat16(), w8.bfloat16(), y), 2 * forward),
        (lambda: product16(x8.bfloat16(), w8.bfloat16().t().contiguous().t(), None), forward),
    ]
    errors = [(call().float() - truth).norm() / truth.norm() for call, truth in cases[which]]
    return bool((torch.stack(errors) < 0.05).all())


# What is done with a sum: `c` is of the product's shape, as `start` is; all else are numbers.
PLAIN: dict[str, Callable[..., Tensor]] = {
    "scaled": lambda acc, a_unit, b_unit: acc * (a_unit * b_unit),
    "squared": lambda acc, factor: (acc * factor).clamp_min(0) * (acc * factor),
    "plain": lambda acc: acc,
    "added": lambda acc, c: acc + c,
    "landed": lambda acc, c, a_unit, b_unit: acc * (a_unit * b_unit) + c,
    "mixed": lambda acc, c, start, a_unit, b_unit, scale, share: (
        scale * (acc * (a_unit * b_unit) + c) + share * start
    ),
}


@functools.cache
def _endings() -> dict[str, Any]:
    """The same for the package. Made when first needed: it takes seconds to import."""
    import cutlass.cute as cute
    from quack.epilogue.frontend import gemm_epilogue

    @gemm_epilogue()
    def scaled(acc: Any, a_unit: Any, b_unit: Any) -> dict[str, Any]:
        return {"D": acc * (a_unit * b_unit)}

    @gemm_epilogue()
    def squared(acc: Any, factor: Any) -> dict[str, Any]:
        x = acc * factor
        return {"D": cute.arch.fmax(x, 0.0) * x}  # and not its square, by which NaN would become zero

    @gemm_epilogue()
    def plain(acc: Any) -> dict[str, Any]:
        return {"D": acc}

    @gemm_epilogue()
    def added(acc: Any, c: Any) -> dict[str, Any]:
        return {"D": acc + c}

    @gemm_epilogue()
    def landed(acc: Any, c: Any, a_unit: Any, b_unit: Any) -> dict[str, Any]:
        return {"D": acc * (a_unit * b_unit) + c}

    @gemm_epilogue()
    def mixed(
        acc: Any, c: Any, start: Any, a_unit: Any, b_unit: Any, scale: Any, share: Any
    ) -> dict[str, Any]:
        return {"D": scale * (acc * (a_unit * b_unit) + c) + share * start}

    return {
        "scaled": scaled,
        "squared": squared,
        "plain": plain,
        "added": added,
        "landed": landed,
        "mixed": mixed,
    }


def _product(ending: str, a: Tensor, b: Tensor, out: Tensor, c: Tensor | None = None, **given: Any) -> None:
    """out = ending(a·bᵀ), of (M, K) and (N, K)."""
    if a.is_cuda:
        options = OPTIONS if a.element_size() > 1 else {**OPTIONS, **EIGHT_BITS}
        _endings()[ending].gemm(a, b, out, c, epi_args=given, tile_N=_tile(b.shape[0]), **options)
        return
    wide = {name: value.float() for name, value in (given | ({} if c is None else {"c": c})).items()}
    result = PLAIN[ending](a.float() @ b.float().T, **wide)
    most = fp8.MOST.get(out.dtype)
    out.copy_(result if most is None else result.clamp(-most, most))


def _tile(columns: int) -> int:
    return WIDE if -(-columns // WIDE) * WIDE <= 1.1 * columns else NARROW


if triton is not None:

    @triton.jit
    def _squared_factor(x_unit, w_unit, longest, reach, unit, factor, MOST: tl.constexpr):
        bound = tl.load(longest) * reach
        size, inverse = fp8.power_of_two(bound * bound, MOST)
        tl.store(unit, size)
        tl.store(factor, tl.load(x_unit) * tl.load(w_unit) * tl.sqrt_rn(inverse))


def product8(a: Tensor, b: Tensor, a_unit: Tensor, b_unit: Tensor, dtype: torch.dtype, ours: bool) -> Tensor:
    """a·bᵀ of (M, K) and (N, K) in eight bits, as they stand for: by `pingpong` or by cuBLAS."""
    return (
        pingpong(a, b, a_unit, b_unit) if ours else fp8.multiply(a, b, a_unit, b_unit, dtype, fp8.FAST_SUMS)
    )


@torch.library.custom_op("nanorun::fp8_pingpong", mutates_args=())
def pingpong(a: Tensor, b: Tensor, a_unit: Tensor, b_unit: Tensor) -> Tensor:
    """a·bᵀ of (M, K) and (N, K) in eight bits, as they stand for, in bf16."""
    product = a.new_empty(a.shape[0], b.shape[0], dtype=torch.bfloat16)
    _product("scaled", a, b, product, a_unit=a_unit, b_unit=b_unit)
    return product


@pingpong.register_fake
def _(a: Tensor, b: Tensor, a_unit: Tensor, b_unit: Tensor) -> Tensor:
    return a.new_empty(a.shape[0], b.shape[0], dtype=torch.bfloat16)


@torch.library.custom_op("nanorun::fp8_gradients", mutates_args=())
def gradients8(
    g: Tensor,
    w: Tensor,
    g_unit: Tensor,
    w_unit: Tensor,
    dtype: torch.dtype,
    ours: bool,
    gts: list[Tensor],
    xts: list[Tensor],
    gt_units: list[Tensor],
    xt_units: list[Tensor],
) -> list[Tensor]:
    """`product8`, a gradient on its way to the input, and gᵀ·x of each pair, those of weights, in fp32.

    One operator, though they have little in common. Nobody waits for gradients of weights, so a compiler puts them off
    as it likes, in a d12 those of nine layers to the very end, and what goes into them has to be kept until then."""
    pairs = zip(gts, xts, gt_units, xt_units, strict=True)
    weights = [fp8.multiply(*pair, torch.float32, False) for pair in pairs]
    return [product8(g, w, g_unit, w_unit, dtype, ours), *weights]


@gradients8.register_fake
def _(
    g: Tensor,
    w: Tensor,
    g_unit: Tensor,
    w_unit: Tensor,
    dtype: torch.dtype,
    ours: bool,
    gts: list[Tensor],
    xts: list[Tensor],
    *units: list[Tensor],
) -> list[Tensor]:
    weights = [
        gt.new_empty(gt.shape[0], xt.shape[0], dtype=torch.float32) for gt, xt in zip(gts, xts, strict=True)
    ]
    return [g.new_empty(g.shape[0], w.shape[0], dtype=dtype), *weights]


@torch.library.custom_op("nanorun::fp8_up_relu2", mutates_args=())
def up_relu2(
    x: Tensor, w: Tensor, x_unit: Tensor, w_unit: Tensor, longest: Tensor, width: int
) -> tuple[Tensor, Tensor]:
    """relu(x·wᵀ)² of (N, D) and (F, D) in e4m3, and its unit, as `relu2.quantize` has them."""
    h, unit = _room(x, w, fp8.E4M3)
    factor = torch.empty_like(unit)
    squared_factor(x_unit, w_unit, longest, width, unit, factor)
    _product("squared", x, w, h, factor=factor)
    return h, unit


def squared_factor(
    x_unit: Tensor, w_unit: Tensor, longest: Tensor, width: int, unit: Tensor, factor: Tensor
) -> None:
    """The unit of relu(x·wᵀ)², and what each sum has to be multiplied by before it is squared."""
    reach, most = math.sqrt(width) / relu2.CLIP, fp8.MOST[fp8.E4M3]
    _squared_factor[(1,)](x_unit, w_unit, longest, reach, unit, factor, MOST=most, num_warps=1)


@up_relu2.register_fake
def _(
    x: Tensor, w: Tensor, x_unit: Tensor, w_unit: Tensor, longest: Tensor, width: int
) -> tuple[Tensor, Tensor]:
    return _room(x, w, fp8.E4M3)


def _room(x: Tensor, w: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape[0], w.shape[0], dtype=dtype), x.new_empty(1, dtype=torch.float32)


@torch.library.custom_op("nanorun::fp8_land", mutates_args=())
def land(
    h: Tensor,
    w: Tensor,
    h_unit: Tensor,
    w_unit: Tensor,
    x: Tensor,
    start: Tensor | None,
    scale: Tensor | None,
    share: Tensor | None,
) -> Tensor:
    """x + h·wᵀ in x's dtype, of (N, F) and (D, F) in eight bits; or that times `scale`, plus `start` times `share`."""
    sum_ = torch.empty_like(x)
    units: dict[str, Any] = {"a_unit": h_unit, "b_unit": w_unit}
    if start is None:
        _product("landed", h, w, sum_, x, **units)
    else:
        _product("mixed", h, w, sum_, x, **units, start=start, scale=scale, share=share)
    return sum_


@land.register_fake
def _(h: Tensor, w: Tensor, h_unit: Tensor, w_unit: Tensor, x: Tensor, *mixing: Tensor | None) -> Tensor:
    return torch.empty_like(x)


@whole
def linear_onto(x: Tensor, weight: Tensor, stream: Tensor) -> Tensor:
    """stream + x·wᵀ of (N, D), in sixteen bits. As far as gradients go, only what is added: x·wᵀ (stream.py)."""
    result: Tensor = _LinearOnto.apply(x, weight, stream)
    return result


class _LinearOnto(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, stream: Tensor) -> Tensor:
        low = weight.to(x.dtype)
        ctx.save_for_backward(x, low)
        return product16(x, low, stream)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, low = ctx.saved_tensors
        return *gradients16(dy.contiguous(), x, low), None


@torch.library.custom_op("nanorun::gradients16", mutates_args=())
def gradients16(dy: Tensor, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """Of x·wᵀ, in sixteen bits, the weights' in fp32. One operator for the reason that `gradients8` has."""
    return product16(dy, w.t(), None), (dy.t() @ x).float()


@gradients16.register_fake
def _(dy: Tensor, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(w, dtype=torch.float32)


@torch.library.custom_op("nanorun::product16", mutates_args=())
def product16(a: Tensor, b: Tensor, c: Tensor | None) -> Tensor:
    """a·bᵀ + c of (M, K), (N, K) and (M, N) in sixteen bits."""
    out = a.new_empty(a.shape[0], b.shape[0])
    _product("plain" if c is None else "added", a, b, out, c)
    return out


@product16.register_fake
def _(a: Tensor, b: Tensor, c: Tensor | None) -> Tensor:
    return a.new_empty(a.shape[0], b.shape[0])
