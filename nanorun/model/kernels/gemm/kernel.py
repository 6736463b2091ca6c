"""GEMMs through quack, with epilogues."""

import functools
import math
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

from nanorun.model.kernels import fp8, opaque_to_dynamo, passes
from nanorun.model.kernels.gemm import reference
from nanorun.model.kernels.language import tl, triton
from nanorun.model.kernels.relu2.kernel import CLIP

# Tiles of 128 × 192 accumulators, or 128 × 128 where more than a tenth of the wider ones would lie beyond the last
# column. Clusters of two programs share what they read.
ROWS, WIDE, NARROW = 128, 192, 128
OPTIONS: dict[str, Any] = {"tile_M": ROWS, "cluster_M": 2, "pingpong": True}
FP8_OPTIONS: dict[str, Any] = {"post_init_attrs": (("fp8_slow_accum", not fp8.FAST_ACCUM),)}


@functools.cache
def is_supported(device: torch.device) -> bool:
    """Whether quack is installed, its kernels launch on this device, and they pass the self-test."""
    hopper = fp8.is_supported(device) and torch.cuda.get_device_capability(device)[0] == 9
    return hopper and passes(lambda: self_test(device))


def self_test(device: torch.device, cases: slice = slice(None)) -> bool:
    """Whether every kernel that a model uses (or these `cases`) agrees with its definition; each runs once, with a
    partial last tile."""
    generator = torch.Generator(device).manual_seed(0)
    x, w = (torch.randn(n, 128, device=device, generator=generator) for n in (200, 560))
    x8, g8, w8, one = x.to(fp8.E4M3), x.to(fp8.E5M2), w.to(fp8.E4M3), torch.ones(1, device=device)
    max_norms = torch.full((2,), 20.0, device=device)
    forward, backward = (each.float() @ w8.float().T for each in (x8, g8))
    y, x0 = forward.bfloat16(), backward.bfloat16()

    def squared() -> Tensor:
        h, scale = gemm_fp8_relu2(x8, w8, one, one, max_norms, 128)
        return h.float() * scale

    checks: list[tuple[Callable[[], Tensor], Tensor]] = [
        (lambda: gemm_fp8_pingpong(x8, w8, one, one), forward),
        (lambda: gemm_fp8_pingpong(g8, w8, one, one), backward),
        (squared, forward.relu().square()),
        (lambda: gemm_fp8_residual(x8, w8, one, one, y, None, None, None), 2 * forward),
        (lambda: gemm_fp8_residual(x8, w8, one, one, y, x0, one, one), 2 * forward + backward),
        (lambda: gemm_bf16(x8.bfloat16(), w8.bfloat16(), y), 2 * forward),
        (lambda: gemm_bf16(x8.bfloat16(), w8.bfloat16().t().contiguous().t(), None), forward),
    ]
    errors = [(call().float() - truth).norm() / truth.norm() for call, truth in checks[cases]]
    return bool((torch.stack(errors) < 0.05).all())


@functools.cache
def _epilogues() -> dict[str, Any]:
    """The functions of reference.py for quack. Built on first use: quack takes seconds to import."""
    import cutlass.cute as cute
    from quack.epilogue.frontend import gemm_epilogue

    @gemm_epilogue()
    def plain(acc: Any) -> dict[str, Any]:
        return {"D": acc}

    @gemm_epilogue()
    def scaled(acc: Any, a_scale: Any, b_scale: Any) -> dict[str, Any]:
        return {"D": acc * (a_scale * b_scale)}

    @gemm_epilogue()
    def squared(acc: Any, factor: Any) -> dict[str, Any]:
        x = acc * factor
        return {"D": cute.arch.fmax(x, 0.0) * x}  # the square of fmax would turn NaN into zero

    @gemm_epilogue()
    def residual(acc: Any, c: Any) -> dict[str, Any]:
        return {"D": acc + c}

    @gemm_epilogue()
    def scaled_residual(acc: Any, c: Any, a_scale: Any, b_scale: Any) -> dict[str, Any]:
        return {"D": acc * (a_scale * b_scale) + c}

    @gemm_epilogue()
    def mixed_residual(
        acc: Any, c: Any, x0: Any, a_scale: Any, b_scale: Any, lambda_: Any, mu: Any
    ) -> dict[str, Any]:
        return {"D": lambda_ * (acc * (a_scale * b_scale) + c) + mu * x0}

    return {
        "plain": plain,
        "scaled": scaled,
        "squared": squared,
        "residual": residual,
        "scaled_residual": scaled_residual,
        "mixed_residual": mixed_residual,
    }


def _gemm(epilogue: str, a: Tensor, b: Tensor, out: Tensor, c: Tensor | None = None, **operands: Any) -> None:
    """out = epilogue(a·bᵀ), of (M, K) and (N, K)."""
    if a.is_cuda:
        options = OPTIONS if a.element_size() > 1 else {**OPTIONS, **FP8_OPTIONS}
        _epilogues()[epilogue].gemm(a, b, out, c, epi_args=operands, tile_N=_tile(b.shape[0]), **options)
        return
    wide = {name: value.float() for name, value in (operands | ({} if c is None else {"c": c})).items()}
    result = getattr(reference, epilogue)(a.float() @ b.float().T, **wide)
    limit = fp8.FP8_MAX.get(out.dtype)
    out.copy_(result if limit is None else result.clamp(-limit, limit))


def _tile(columns: int) -> int:
    return WIDE if -(-columns // WIDE) * WIDE <= 1.1 * columns else NARROW


def _empty(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    return a.new_empty(a.shape[0], b.shape[0], dtype=dtype)


def gemm_fp8(
    a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, dtype: torch.dtype, pingpong: bool
) -> Tensor:
    """(a·bᵀ)·a_scale·b_scale, (M, N) in `dtype`, of (M, K) and (N, K) in FP8: by quack, in bf16 whatever `dtype` is,
    or by cuBLAS."""
    if pingpong:
        return gemm_fp8_pingpong(a, b, a_scale, b_scale)
    return fp8.scaled_mm(a, b, a_scale, b_scale, dtype, fp8.FAST_ACCUM)


@torch.library.custom_op("nanorun::gemm_fp8_pingpong", mutates_args=())
def gemm_fp8_pingpong(a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor) -> Tensor:
    """a·bᵀ of (M, K) and (N, K) in FP8, times both scales, in bf16."""
    out = _empty(a, b, torch.bfloat16)
    _gemm("scaled", a, b, out, a_scale=a_scale, b_scale=b_scale)
    return out


gemm_fp8_pingpong.register_fake(lambda a, b, *scales: _empty(a, b, torch.bfloat16))


@torch.library.custom_op("nanorun::gemm_fp8_grads", mutates_args=())
def gemm_fp8_grads(
    g: Tensor,
    w: Tensor,
    g_scale: Tensor,
    w_scale: Tensor,
    dtype: torch.dtype,
    pingpong: bool,
    gts: list[Tensor],
    xts: list[Tensor],
    gt_scales: list[Tensor],
    xt_scales: list[Tensor],
) -> list[Tensor]:
    """The dgrad (g·wᵀ)·g_scale·w_scale, (M, N) in `dtype`, where w is a weight's transpose; and for each pair the wgrad
    (gt·xtᵀ)·gt_scale·xt_scale in fp32, where gt and xt are the transposes of a gradient and of an input.

    One operator, though they have little in common: no operator waits for a wgrad, so a compiler defers it at will, in
    a d12 those of nine layers to the very end, and its inputs must be kept until then."""
    pairs = zip(gts, xts, gt_scales, xt_scales, strict=True)
    wgrads = [fp8.scaled_mm(*pair, torch.float32, False) for pair in pairs]
    return [gemm_fp8(g, w, g_scale, w_scale, dtype, pingpong), *wgrads]


gemm_fp8_grads.register_fake(
    lambda g, w, g_scale, w_scale, dtype, pingpong, gts, xts, *scales: [
        _empty(g, w, dtype),
        *(_empty(gt, xt, torch.float32) for gt, xt in zip(gts, xts, strict=True)),
    ]
)


@triton.jit
def _relu2_scale_kernel(x_scale, w_scale, max_norms, reach, scale, factor, FP8_MAX: tl.constexpr):
    bound = tl.load(max_norms) * reach
    scale_value, inv_scale = fp8.power_of_two_scale(bound * bound, FP8_MAX)
    tl.store(scale, scale_value)
    tl.store(factor, tl.load(x_scale) * tl.load(w_scale) * tl.sqrt_rn(inv_scale))


def relu2_scales(
    x_scale: Tensor, w_scale: Tensor, max_norms: Tensor, width: int, scale: Tensor, factor: Tensor
) -> None:
    """Writes the scale of relu(x·wᵀ)², and the factor of each accumulator before it is squared."""
    reach = math.sqrt(width) / CLIP
    _relu2_scale_kernel[(1,)](
        x_scale, w_scale, max_norms, reach, scale, factor, FP8_MAX=fp8.FP8_MAX[fp8.E4M3], num_warps=1
    )


@torch.library.custom_op("nanorun::gemm_fp8_relu2", mutates_args=())
def gemm_fp8_relu2(
    x: Tensor, w: Tensor, x_scale: Tensor, w_scale: Tensor, max_norms: Tensor, width: int
) -> tuple[Tensor, Tensor]:
    """h, (N, F) in e4m3, and its scale, with h·scale = relu(x·wᵀ)² of (N, D) and (F, D). The scale is that of
    `relu2.quantize`: max_norms[0] is the largest row norm of w, x is normed and `width` wide (kernels/fp8)."""
    h, scale = _empty_relu2(x, w)
    factor = torch.empty_like(scale)
    relu2_scales(x_scale, w_scale, max_norms, width, scale, factor)
    _gemm("squared", x, w, h, factor=factor)
    return h, scale


def _empty_relu2(x: Tensor, w: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    return _empty(x, w, fp8.E4M3), x.new_empty(1, dtype=torch.float32)


gemm_fp8_relu2.register_fake(_empty_relu2)


@torch.library.custom_op("nanorun::gemm_fp8_residual", mutates_args=())
def gemm_fp8_residual(
    h: Tensor,
    w: Tensor,
    h_scale: Tensor,
    w_scale: Tensor,
    x: Tensor,
    x0: Tensor | None,
    lambda_: Tensor | None,
    mu: Tensor | None,
) -> Tensor:
    """x + h·wᵀ or, with an x0, λ·(x + h·wᵀ) + μ·x0: (N, D) in x's dtype, of h (N, F) and w (D, F) in FP8."""
    out = torch.empty_like(x)
    scales: dict[str, Any] = {"a_scale": h_scale, "b_scale": w_scale}
    if x0 is None:
        _gemm("scaled_residual", h, w, out, x, **scales)
    else:
        _gemm("mixed_residual", h, w, out, x, **scales, x0=x0, lambda_=lambda_, mu=mu)
    return out


gemm_fp8_residual.register_fake(lambda h, w, h_scale, w_scale, x, *mixing: torch.empty_like(x))


@opaque_to_dynamo
def gemm_bf16_residual(x: Tensor, weight: Tensor, residual: Tensor) -> Tensor:
    """residual + x·wᵀ, (N, D) in bf16. The backward pass returns the gradients of x and weight, dy·w and dyᵀ·x, and
    none for `residual`, which gets its own from the next half-block (residual_norm)."""
    return cast(Tensor, _GemmBf16Residual.apply(x, weight, residual))


class _GemmBf16Residual(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, residual: Tensor) -> Tensor:
        low = weight.to(x.dtype)
        ctx.save_for_backward(x, low)
        return gemm_bf16(x, low, residual)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, low = ctx.saved_tensors
        return *gemm_bf16_grads(dy.contiguous(), x, low), None


@torch.library.custom_op("nanorun::gemm_bf16_grads", mutates_args=())
def gemm_bf16_grads(dy: Tensor, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """The dgrad of x·wᵀ in bf16 and its wgrad in fp32. One operator for the same reason as `gemm_fp8_grads`."""
    return gemm_bf16(dy, w.t(), None), (dy.t() @ x).float()


gemm_bf16_grads.register_fake(
    lambda dy, x, w: (torch.empty_like(x), torch.empty_like(w, dtype=torch.float32))
)


@torch.library.custom_op("nanorun::gemm_bf16", mutates_args=())
def gemm_bf16(a: Tensor, b: Tensor, c: Tensor | None) -> Tensor:
    """a·bᵀ + c of (M, K), (N, K) and (M, N) in bf16."""
    out = _empty(a, b, a.dtype)
    _gemm("plain" if c is None else "residual", a, b, out, c)
    return out


gemm_bf16.register_fake(lambda a, b, c: _empty(a, b, a.dtype))
