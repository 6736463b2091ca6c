"""FlashAttention-4 as operators that torch.compile keeps whole.

The package `flash-attn-4` (with `nvidia-cutlass-dsl`) writes its kernels in Python and compiles them when they
are first called; it keeps them on disk for the next process when asked to, which `works` does. Called directly
from compiled code it would break the graph at every layer, so forward and backward are wrapped as two operators
that the compiler does not look into. It is optional: nothing imports it until `works` is asked, and `works`
answers by really computing something.
"""

import functools
import os
import warnings
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from nanorun.model.kernels import no_memory

DISK_CACHE = "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED"


@functools.cache
def works(device: torch.device, head_dim: int) -> bool:
    """Whether the kernels are installed, launch on this device, and give what the definition gives."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] < 9:
        return False
    os.environ.setdefault(DISK_CACHE, "1")  # read when it is imported
    try:
        import flash_attn.cute  # noqa: F401
    except ImportError:
        return False
    warnings.filterwarnings("ignore", module="cutlass")  # which warns of its own inner calls
    dice = torch.Generator(device).manual_seed(0)
    q, k, v = torch.randn(3, 1, 256, 2, head_dim, device=device, generator=dice).bfloat16().unbind()
    try:
        fast = flash_attention(q, k, v, 64)
    except torch.OutOfMemoryError as error:
        raise no_memory() from error
    except Exception:  # whatever a young compiler may raise on a machine it was not tried on
        return False
    at = torch.arange(256, device=device)
    seen = (at[None] <= at[:, None]) & (at[None] > at[:, None] - 64)
    wide = [x.float().transpose(1, 2) for x in (q, k, v)]
    truth = scaled_dot_product_attention(wide[0], wide[1], wide[2], attn_mask=seen).transpose(1, 2)
    return bool((fast.float() - truth).norm() < 0.02 * truth.norm())


def flash_attention(q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
    """Causal attention of (B, T, H, D) over (B, T, K, D) in 16 bits; position i sees `window` up to itself."""
    out: Tensor = _forward(q, k, v, window)[0]
    return out


def _bounds(window: int, length: int) -> dict[str, Any]:
    if window >= length:
        return {"causal": True}
    return {"window_size_left": window - 1, "window_size_right": 0}


@torch.library.custom_op("nanorun::flash_forward", mutates_args=())
def _forward(q: Tensor, k: Tensor, v: Tensor, window: int) -> tuple[Tensor, Tensor]:
    from flash_attn.cute.interface import (
        _flash_attn_fwd,
    )

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
    from flash_attn.cute.interface import (
        _flash_attn_bwd,
    )

    exact = torch.are_deterministic_algorithms_enabled()
    dq, dk, dv = _flash_attn_bwd(
        q, k, v, out, dout.contiguous(), lse, deterministic=exact, **_bounds(window, k.size(1))
    )
    return dq, dk, dv


@_backward.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dout: Tensor, window: int
) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, ctx.window = inputs
    ctx.save_for_backward(q, k, v, *output)


def _gradients(ctx: Any, dout: Tensor, dlse: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
    dq, dk, dv = _backward(*ctx.saved_tensors, dout, ctx.window)
    return dq, dk, dv, None


_forward.register_autograd(_gradients, setup_context=_remember)
