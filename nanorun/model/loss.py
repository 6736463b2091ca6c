"""The language-model loss, from the last hidden states to one number, without ever holding all logits.

The head turns each hidden state into one logit per token of the vocabulary: z = x·Wᵀ. Three ideas follow.

Softcap. Logits become c = softcap·tanh(z/softcap), so none is ever past ±softcap. It keeps the head from
growing without end. And since c is bounded, exp(c) can neither overflow nor vanish in float32: the sum
Σ exp(c) needs no maximum subtracted, which saves a pass over the logits. Without a softcap (or with one too
large for that) the maximum is subtracted as usual.

Chunks. A micro-batch of 65,536 tokens and a vocabulary of 32,768 has 2³¹ logits: 4 GiB in bf16, 8 in float32, and
autograd would keep both for the backward pass. Tokens do not see each other in the loss, so `chunked_loss`
takes some rows at a time and frees their logits before the next.

Gradients in the forward pass. The backward pass would need the freed logits again, at the price of one
more matmul. But the loss is a sum: its gradient dz = (softmax(c) - onehot)·(1 - tanh²) is known as soon as
the logits are, up to one factor that comes from above. So each chunk gives its share of dx = dz·W and of
dW = dzᵀ·x at once, dx and dW are what is kept (N·D and V·D numbers, not N·V), and the backward pass only
multiplies them by that factor. dW is summed over chunks in float32, whatever the compute dtype.

A chunk is three matmuls and, between them, work that a compiler can make one kernel of: a row of logits is
read to sum exp(c), read again (still in cache) and replaced by dz. So the code for it is plain and without
branches on data: the one-hot is a comparison with the column's number, an ignored target never equals
one, and padding columns of the vocabulary are -inf before the exponential.

`plain_loss` is the reference. Not covered: gradients of gradients, and a target past the vocabulary, which
is an error in `plain_loss` but may read a padding column in `chunked_loss`.
"""

from collections.abc import Callable
from typing import Any, Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from nanorun.config import IGNORE
from nanorun.model.kernels import opaque_to_dynamo

Reduction = Literal["sum", "none"]
# logits (n, V), targets (n,), softcap, vocabulary, with gradient -> losses (n,), gradient (n, V)
ChunkLoss = Callable[[Tensor, Tensor, float | None, int, bool], tuple[Tensor, Tensor]]

# Σ exp(c) over a vocabulary of 2¹⁷ stays below float32's 3e38 = e⁸⁸, and exp(-c) above its 1e-38 = e⁻⁸⁷.
LARGEST_UNSHIFTED_SOFTCAP = 75.0

# How many logits a chunk holds. Each chunk reads and writes all of dW once, so on a GPU chunks are large:
# 2²⁸ logits are half a GiB in bf16, and 8,192 rows of a vocabulary of 32,768, where dW at
# 768 wide costs some 3% of a chunk (estimated from an H200's bandwidth, not measured). Elsewhere the code often
# runs uncompiled, with several float32 copies of the chunk at once (128 MiB each), so chunks are smaller.
CHUNK_LOGITS_GPU = 2**28
CHUNK_LOGITS = 2**25
CHUNK_MULTIPLE = 128  # rows; the tile size of matmul kernels


def plain_loss(
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    softcap: float | None,
    vocab_size: int,
    reduction: Reduction = "sum",
) -> Tensor:
    """Cross entropy in nats, summed over the targets that are not IGNORE, in float32 (float64 for float64).

    x is (..., D) in the compute dtype, weight (V, D) with V ≥ vocab_size, targets (...) int64. With
    reduction="none": the loss of each target in the shape of targets, 0 where ignored.
    """
    _check(x, weight, targets, vocab_size)
    logits = (x @ weight.to(x.dtype).T)[..., :vocab_size].to(accumulation_dtype(x.dtype))
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    losses = F.cross_entropy(
        logits.flatten(0, -2), targets.flatten(), ignore_index=IGNORE, reduction=reduction
    )
    return losses if reduction == "sum" else losses.view(targets.shape)


def chunk_loss(
    logits: Tensor, targets: Tensor, softcap: float | None, vocab_size: int, with_gradient: bool
) -> tuple[Tensor, Tensor]:
    """From (n, V) logits, before the softcap: each row's loss, and the gradient of their sum in the logits' dtype."""
    z = logits.to(accumulation_dtype(logits.dtype))
    at_target = z.gather(1, targets.clamp(min=0).unsqueeze(1)).squeeze(1)
    if softcap:
        squashed = torch.tanh(z / softcap)
        z = softcap * squashed
        at_target = softcap * torch.tanh(at_target / softcap)
    columns = torch.arange(z.shape[1], device=z.device, dtype=torch.int32)
    if vocab_size < z.shape[1]:
        z = z.masked_fill(columns >= vocab_size, float("-inf"))
    if softcap and softcap <= LARGEST_UNSHIFTED_SOFTCAP:
        exponentials = z.exp()
        total = exponentials.sum(1)
        log_total = total.log()
    else:
        largest = z.amax(1)
        exponentials = (z - largest.unsqueeze(1)).exp()
        total = exponentials.sum(1)
        log_total = total.log() + largest
    trained = targets != IGNORE
    loss = torch.where(trained, log_total - at_target, 0.0)
    if not with_gradient:
        return loss, loss
    scale = torch.where(trained, 1 / total, 0.0).unsqueeze(1)  # makes the exponentials probabilities
    gradient = exponentials * scale - (columns == targets.int().unsqueeze(1)).to(z.dtype)
    if softcap:
        gradient = gradient * (1 - squashed * squashed)
    return loss, gradient.to(logits.dtype)


def chunked_loss(
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    softcap: float | None,
    vocab_size: int,
    reduction: Reduction = "sum",
    chunk_tokens: int | None = None,
    chunk_loss: ChunkLoss = chunk_loss,
) -> Tensor:
    """What `plain_loss` returns, with memory for chunk_tokens rows of logits (None: by the vocabulary).

    `chunk_loss` computes the loss and gradient of one chunk; model/fast/loss.py has a fused kernel for it.

    reduction="none" is for evaluation only: gradients computed in the forward pass can be scaled together
    afterwards, not token by token.
    """
    _check(x, weight, targets, vocab_size)
    rows, flat = x.flatten(0, -2), targets.flatten()
    size = chunk_rows(rows, weight, chunk_tokens)
    wants_dx, wants_dweight = (torch.is_grad_enabled() and each.requires_grad for each in (x, weight))
    needs_grad = wants_dx or wants_dweight
    if needs_grad and reduction == "none":
        raise ValueError(
            "chunked_loss has no gradients per token: use no_grad, or plain_loss to train on them"
        )
    losses, dx_chunks = [], []
    dweight: Tensor | None = None
    with torch.no_grad():
        head = weight.to(x.dtype)
        for x_chunk, target_chunk in zip(rows.split(size), flat.split(size), strict=True):
            logits = x_chunk @ head.T
            loss, dlogits = chunk_loss(logits, target_chunk, softcap, vocab_size, needs_grad)
            del logits
            losses.append(loss if reduction == "none" else loss.sum())
            if wants_dx:
                dx_chunks.append(dlogits @ head)
            if wants_dweight:
                share = (dlogits.T @ x_chunk).to(accumulation_dtype(x.dtype))
                dweight = share if dweight is None else dweight + share
        if reduction == "none":
            return torch.cat(losses).view(targets.shape)
        dx = torch.cat(dx_chunks) if wants_dx else None
        total = torch.stack(losses).sum()
        dweight = None if dweight is None else dweight.to(weight.dtype)
    return attach_gradients(total, rows, weight, dx, dweight) if needs_grad else total


@opaque_to_dynamo
def attach_gradients(
    loss: Tensor, x: Tensor, weight: Tensor, dx: Tensor | None, dweight: Tensor | None
) -> Tensor:
    """`loss`, unchanged, as a function of x and weight: the backward pass returns g·dx and g·dweight for an incoming
    gradient g."""
    return cast(Tensor, _AttachGradients.apply(loss, x, weight, dx, dweight))  # type: ignore[no-untyped-call]


class _AttachGradients(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, loss: Tensor, x: Tensor, weight: Tensor, dx: Tensor | None, dweight: Tensor | None
    ) -> Tensor:
        ctx.save_for_backward(dx, dweight)
        return loss.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        dx, dweight = (None if g is None else scaled(g, grad_output) for g in ctx.saved_tensors)
        return None, dx, dweight, None, None


def scaled(gradient: Tensor, factor: Tensor) -> Tensor:
    """The factor keeps its precision: rounded to bf16 it would make every gradient up to 0.4% off."""
    return (gradient.to(accumulation_dtype(gradient.dtype)) * factor).to(gradient.dtype)


def chunk_rows(rows: Tensor, weight: Tensor, chunk_tokens: int | None) -> int:
    """How many rows a chunk has: as equal as can be, so that one compiled kernel serves them all."""
    if chunk_tokens is not None:
        if chunk_tokens < 1:
            raise ValueError(f"chunk_tokens is {chunk_tokens}: a chunk needs at least one row")
        return chunk_tokens
    budget = CHUNK_LOGITS_GPU if rows.device.type == "cuda" else CHUNK_LOGITS
    most = max(budget // weight.shape[0], CHUNK_MULTIPLE)
    chunks = max(-(-rows.shape[0] // most), 1)
    even = -(-rows.shape[0] // chunks)
    return max(-(-even // CHUNK_MULTIPLE), 1) * CHUNK_MULTIPLE


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """What sums are made in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _check(x: Tensor, weight: Tensor, targets: Tensor, vocab_size: int) -> None:
    if x.shape[:-1] != targets.shape or x.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"hidden states {tuple(x.shape)}, head {tuple(weight.shape)} and targets {tuple(targets.shape)} do not "
            "fit: expected (..., D), (V, D) and (...)"
        )
    if not 0 < vocab_size <= weight.shape[0]:
        raise ValueError(f"a vocabulary of {vocab_size} does not fit a head of {weight.shape[0]} rows")
