"""The training loss of the fast path: a fused softcap and cross-entropy kernel, and a head in FP8.

`chunked_loss` of model/loss.py explains chunks and gradients that are computed in the forward pass; both hold here.
"""

import math
from typing import Any

import torch
from torch import Tensor

from nanorun.model.kernels import fp8, gemm, softcap_loss
from nanorun.model.loss import LARGEST_UNSHIFTED_SOFTCAP, chunk_rows

SLICE_LOGITS = 2**27  # logits in bf16 at a time; a chunk of FP8 gradients is several slices


def can_fuse(softcap: float | None) -> bool:
    return softcap is not None and 0 < softcap <= LARGEST_UNSHIFTED_SOFTCAP


def fused_chunk_loss(
    logits: Tensor, targets: Tensor, softcap: float | None, vocab_size: int, with_gradient: bool
) -> tuple[Tensor, Tensor]:
    """`loss.chunk_loss` by one kernel, which overwrites the logits with their gradient."""
    assert softcap is not None
    return softcap_loss.softcap_loss(logits, targets, softcap, vocab_size, with_gradient), logits


@torch.library.custom_op("nanorun::fp8_loss", mutates_args=())
def fp8_loss_and_gradients(
    x: Tensor,  # (N, D), the output of an RMSNorm: no entry exceeds √D
    head: Tensor,  # (V, D), fp32
    targets: Tensor,  # (N,)
    head8: Tensor,  # the head in FP8, its transpose and its scale
    head8_t: Tensor,
    head8_scale: Tensor,
    softcap: float,
    vocab_size: int,
    exact_logits: bool,  # in bf16; only the two GEMMs of the gradient are in FP8
    pingpong: bool,
    chunk_tokens: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The loss summed over all rows, and its gradients with respect to x and head.

    Logits, in bf16, exist for a slice of a chunk at a time. The GEMMs of the gradient are efficient only with many
    rows, so the FP8 gradients of a whole chunk are kept."""
    size = chunk_rows(x, head, chunk_tokens)
    exact = head.to(x.dtype) if exact_logits else None
    slice_limit = max(SLICE_LOGITS // head8.shape[0], 1)
    losses, dx = x.new_empty(x.shape[0], dtype=torch.float32), torch.empty_like(x)
    dhead: Tensor | None = None
    chunks = zip(*(each.split(size) for each in (x, targets, losses, dx)), strict=True)
    for x_chunk, target_chunk, loss_chunk, dx_chunk in chunks:
        q, q_t, x_scale = fp8.quantize(x_chunk, fp8.E4M3, bound=math.sqrt(x.shape[1]))
        dz = q.new_empty(q.shape[0], head8.shape[0], dtype=fp8.E5M2)
        dz_t = q.new_empty(head8.shape[0], q_t.shape[1], dtype=fp8.E5M2)
        slices = -(-q.shape[0] // slice_limit)
        slice_rows = fp8.padded(-(-q.shape[0] // slices))  # as equal as can be
        for first in range(0, q.shape[0], slice_rows):
            rows = slice(first, first + slice_rows)
            if exact is not None:
                logits = x_chunk[rows] @ exact.T
            else:
                logits = gemm.gemm_fp8(q[rows], head8, x_scale, head8_scale, x.dtype, pingpong)  # x·headᵀ
            # the losses, and dz·dz_scale = the gradient of the logits, into these rows of dz and columns of dz_t
            dz_scale = softcap_loss.softcap_loss_fp8(
                logits, target_chunk[rows], softcap, vocab_size, loss_chunk[rows], dz, dz_t, first
            )
            del logits
        fp8.scaled_mm(dz, head8_t, dz_scale, head8_scale, x.dtype, False, out=dx_chunk)
        wgrad = fp8.scaled_mm(dz_t, q_t, dz_scale, x_scale, head.dtype, False)
        dhead = wgrad if dhead is None else dhead.add_(wgrad)
        del dz, dz_t, wgrad
    assert dhead is not None
    return losses.sum(), dx, dhead


@fp8_loss_and_gradients.register_fake
def _(x: Tensor, head: Tensor, *others: Any) -> tuple[Tensor, Tensor, Tensor]:
    return x.new_empty((), dtype=torch.float32), torch.empty_like(x), torch.empty_like(head)
