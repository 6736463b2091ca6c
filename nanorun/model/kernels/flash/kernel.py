"""FlashAttention-4, forward and backward."""

import functools
import os
import warnings
from typing import Any

import torch
from torch import Tensor

from nanorun.model.kernels import passes
from nanorun.model.kernels.flash import reference

DISK_CACHE = "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED"


@functools.cache
def is_supported(device: torch.device, head_dim: int) -> bool:
    """Whether the package is installed, its kernels launch on this device, and they agree with the reference."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] < 9:
        return False
    os.environ.setdefault(DISK_CACHE, "1")  # read at import
    warnings.filterwarnings("ignore", module="cutlass")  # it warns about its own internal calls
    return passes(lambda: self_test(device, head_dim))


def self_test(device: torch.device, head_dim: int) -> bool:
    generator = torch.Generator(device).manual_seed(0)
    q, k, v = torch.randn(3, 1, 256, 2, head_dim, device=device, generator=generator).bfloat16().unbind()
    fast = flash_attention(q, k, v, 64)
    truth = reference.flash_attention(q.float(), k.float(), v.float(), 64)
    return bool((fast.float() - truth).norm() < 0.02 * truth.norm())


def flash_attention(q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
    """Causal attention of (B, T, H, D) over (B, T, K, D) in 16 bits; position i attends to the `window` positions up to
    itself."""
    out: Tensor = _forward(q, k, v, window)[0]
    return out


def _bounds(window: int, length: int) -> dict[str, Any]:
    if window >= length:
        return {"causal": True}
    return {"window_size_left": window - 1, "window_size_right": 0}


@torch.library.custom_op("nanorun::flash_forward", mutates_args=())
def _forward(q: Tensor, k: Tensor, v: Tensor, window: int) -> tuple[Tensor, Tensor]:
    from flash_attn.cute.interface import _flash_attn_fwd

    out, lse, *_ = _flash_attn_fwd(q, k, v, return_lse=True, **_bounds(window, k.size(1)))
    return out, lse


@_forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, window: int) -> tuple[Tensor, Tensor]:
    batch, time, heads, _ = q.shape
    return q.new_empty(q.shape), q.new_empty((batch, heads, time), dtype=torch.float32)


@torch.library.custom_op("nanorun::flash_backward", mutates_args=())
def _backward(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dout: Tensor, window: int
) -> tuple[Tensor, Tensor, Tensor]:
    from flash_attn.cute.interface import _flash_attn_bwd

    deterministic = torch.are_deterministic_algorithms_enabled()
    dq, dk, dv = _flash_attn_bwd(
        q, k, v, out, dout.contiguous(), lse, deterministic=deterministic, **_bounds(window, k.size(1))
    )
    return dq, dk, dv


_backward.register_fake(
    lambda q, k, v, *others: (q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape))
)


def _save_inputs(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, ctx.window = inputs
    ctx.save_for_backward(q, k, v, *output)


def _grads(ctx: Any, dout: Tensor, dlse: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
    dq, dk, dv = _backward(*ctx.saved_tensors, dout, ctx.window)
    return dq, dk, dv, None


_forward.register_autograd(_grads, setup_context=_save_inputs)
