"""Causal attention with a window: one call, several ways to compute it, chosen once.

Position i sees positions i - window + 1 to i, of its own document only when documents are masked. Queries
may be fewer than keys, as in generation: they are then the last positions.

    plain   the definition, with the whole matrix of scores: slow, exact in any dtype, the reference in tests
    sdpa    torch's fused kernels; a window or documents become an explicit mask
    cudnn   the same, restricted to cuDNN's kernel: the fastest for a full window on Hopper without flash-attn-4
    flex    FlexAttention, compiled: skips what a window or documents mask away; CUDA only
    flash   FlashAttention-4, where the package flash-attn-4 is installed and its kernels launch (Hopper and later)

`choose_backends` looks at the machine and the shape once, before training, and gives each layer its own.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from nanorun.config import Backend, ModelConfig
from nanorun.errors import UserError
from nanorun.model.kernels import flash

# Shapes: B batch, T queries, S keys, H heads, K kv heads, D head dimension.


class BatchAttention:
    """Causal attention over the rows of a batch, as training and evaluation need it: layer by layer, by the
    backend that was chosen for the layer."""

    def __init__(self, config: ModelConfig, backends: tuple[Backend, ...] | None = None) -> None:
        disable_cudnn_sdpa()
        self.config = config
        self.backends = backends or everywhere("sdpa", config)
        self.windows = tuple(config.window(layer) for layer in range(config.depth))
        self.block_masks: dict[int, BlockMask] = {}  # by window, for rows of the length that was prepared

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, docs: Tensor | None = None) -> Tensor:
        """`attend` of q (B, T, H, D) over k and v (B, T, K, D), by the layer's window and backend, to (B, T, H, D)."""
        window = min(self.windows[layer], q.size(1))
        return attend(q, k, v, window, self.backends[layer], docs, self.block_masks.get(self.windows[layer]))

    def prepare(self, context: int, device: torch.device) -> None:
        """Makes the block masks for rows of this length, ahead of compiled code that only reads them."""
        self.block_masks = {}
        for window, backend in zip(self.windows, self.backends, strict=True):
            if backend == "flex" and not self.config.document_mask and window not in self.block_masks:
                self.block_masks[window] = window_blocks(context, context, min(window, context), device)

    def use_backend(self, backend: Backend) -> None:
        self.backends = everywhere(backend, self.config)


def attend(
    q_bthd: Tensor,
    k_bskd: Tensor,
    v_bskd: Tensor,
    window: int,
    backend: Backend,
    docs: Tensor | None = None,
    block_mask: BlockMask | None = None,
) -> Tensor:
    """Attention of (B, T, H, D) queries over (B, S, K, D) keys and values; `docs` (B, S) numbers documents.

    `block_mask` is a `window_blocks` of this shape made ahead; only flex reads it.
    """
    if backend == "flash" and docs is None and q_bthd.size(1) == k_bskd.size(1):
        return flash.flash_attention(q_bthd, k_bskd, v_bskd, window)
    q, k, v = (x.transpose(1, 2) for x in (q_bthd, k_bskd, v_bskd))  # (B, H, T, D)
    if backend == "plain":
        out = _plain(q, k, v, window, docs)
    elif backend == "flex":
        out = _flex(q, k, v, window, docs, block_mask)
    else:
        out = _sdpa(q, k, v, window, docs, backend)
    return out.transpose(1, 2)


def disable_cudnn_sdpa() -> None:
    """Removes cuDNN from torch's automatic choice of SDPA backend, for this process.

    cuDNN builds an execution plan for every new shape. On Hopper torch would choose it for all masked attention;
    evaluation, chat and RL bring another shape with every batch, and CORE took three times as long. The backend
    `cudnn` still selects it explicitly.
    """
    torch.backends.cuda.enable_cudnn_sdp(False)


def choose_backends(
    config: ModelConfig,
    device: torch.device,
    backend: Backend = "auto",
    dtype: torch.dtype = torch.bfloat16,
    compiled: bool = True,
) -> tuple[Backend, ...]:
    """The backend of each layer on this device. FlexAttention is only fast compiled; cuDNN's backward pass has no
    deterministic form."""
    if backend == "flash" and (config.document_mask or not flash.is_supported(device, config.head_dim)):
        raise UserError(
            "FlashAttention-4 cannot run here: it needs a Hopper or newer GPU, the packages flash-attn-4 and "
            "nvidia-cutlass-dsl, and no document mask; choose auto, cudnn, flex, sdpa or plain."
        )
    if backend != "auto":
        if device.type != "cuda" and backend in ("cudnn", "flex"):
            raise UserError(
                f"The attention backend '{backend}' needs a CUDA device: choose auto, sdpa or plain."
            )
        return (backend,) * config.depth
    if device.type != "cuda":
        return everywhere("sdpa", config)
    if dtype == torch.bfloat16 and not config.document_mask and flash.is_supported(device, config.head_dim):
        return everywhere("flash", config)
    hopper = torch.cuda.get_device_capability(device)[0] >= 9 and dtype != torch.float32
    exact = torch.are_deterministic_algorithms_enabled()
    full: Backend = "cudnn" if hopper and config.head_dim <= 128 and not exact else "sdpa"
    masked: Backend = "flex" if compiled and config.head_dim >= 16 else "sdpa"
    return tuple(
        masked if config.document_mask or config.window(layer) < config.context else full
        for layer in range(config.depth)
    )


def everywhere(backend: Backend, config: ModelConfig) -> tuple[Backend, ...]:
    return (backend,) * config.depth


def visible(q_len: int, k_len: int, window: int, device: torch.device, docs: Tensor | None) -> Tensor:
    """Which keys each query sees: (T, S), or (B, 1, T, S) when documents are masked."""
    q_at = torch.arange(k_len - q_len, k_len, device=device)[:, None]
    k_at = torch.arange(k_len, device=device)[None, :]
    seen = (k_at <= q_at) & (k_at > q_at - window)
    if docs is not None:
        same = docs[:, k_len - q_len :, None] == docs[:, None, :]
        seen = seen & same[:, None]
    return seen


def _plain(q: Tensor, k: Tensor, v: Tensor, window: int, docs: Tensor | None) -> Tensor:
    repeat = q.size(1) // k.size(1)
    k, v = k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
    scores = (q @ k.transpose(-2, -1)).float() if q.dtype != torch.float64 else q @ k.transpose(-2, -1)
    scores = scores / q.size(-1) ** 0.5
    scores = scores.masked_fill(~visible(q.size(2), k.size(2), window, q.device, docs), float("-inf"))
    out: Tensor = scores.softmax(-1).to(q.dtype) @ v
    return out


def _sdpa(q: Tensor, k: Tensor, v: Tensor, window: int, docs: Tensor | None, backend: Backend) -> Tensor:
    grouped = q.size(1) != k.size(1)
    if docs is None and window >= k.size(2) and q.size(2) == k.size(2):
        if backend == "cudnn":
            with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
                return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
    if docs is None and q.size(2) == 1 and window >= k.size(2):
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=grouped)
    mask = visible(q.size(2), k.size(2), window, q.device, docs)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=grouped)


def _flex(
    q: Tensor, k: Tensor, v: Tensor, window: int, docs: Tensor | None, blocks: BlockMask | None
) -> Tensor:
    if docs is not None:
        blocks = _document_blocks(docs, q.size(2), window)
    elif blocks is None:
        blocks = window_blocks(q.size(2), k.size(2), window, q.device)
    out = flex_attention(q, k, v, block_mask=blocks, enable_gqa=q.size(1) != k.size(1))
    assert isinstance(out, Tensor)
    return out


def window_blocks(q_len: int, k_len: int, window: int, device: torch.device) -> BlockMask:
    """The blocks of scores that a window touches; the others are never computed."""
    shift = k_len - q_len

    def seen(b: Any, h: Any, q_at: Any, k_at: Any) -> Any:
        return (k_at <= q_at + shift) & (k_at > q_at + shift - window)

    return create_block_mask(seen, None, None, q_len, k_len, device=str(device))


def _document_blocks(docs: Tensor, q_len: int, window: int) -> BlockMask:
    shift = docs.size(1) - q_len

    def seen(b: Any, h: Any, q_at: Any, k_at: Any) -> Any:
        near = (k_at <= q_at + shift) & (k_at > q_at + shift - window)
        return near & (docs[b, q_at + shift] == docs[b, k_at])

    return create_block_mask(seen, docs.size(0), None, q_len, docs.size(1), device=str(docs.device))
