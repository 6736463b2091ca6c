"""Bits per byte: how many bits the model needs for each byte of text it has not seen.

The mean loss per token says little across tokenizers: longer tokens are harder to guess and there are fewer
of them. Divided by the bytes the tokens stand for, the same sum of losses can be compared between
vocabularies:

    bpb = Σ loss in nats / (ln 2 · Σ bytes)

What is counted:

    targets that are text       their loss and their bytes
    special tokens (0 bytes)    neither; they are part of `loss`, which is what training minimises
    ignored targets (IGNORE)    nothing at all, whatever the loss function says there

A token's bytes are those of its own piece of UTF-8, also where a character is spread over several tokens, so
over whole documents they add up to the size of the text. With our loader every token of text is a target
exactly once in an epoch, so `bytes`, `text_tokens` and, for a given loss of each token, `bpb` depend on
neither the batch nor the context. (A real model's loss of a token depends on how much of the text before it
stands in the same row, so a longer context gives a lower bpb.) `tokens` and `loss` include the BOS between
documents, and where a document is cut into two rows there is one more or less of those.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from nanorun.errors import UserError
from nanorun.model.loss import IGNORE


@dataclass(frozen=True)
class BpbResult:
    bpb: float  # bits per byte of text
    loss: float  # mean nats per trained token, special tokens included: what training minimises
    tokens: int  # trained tokens
    text_tokens: int  # of these, the ones that stand for bytes
    bytes: int

    def figures(self) -> dict[str, Any]:
        return {"val_bpb": self.bpb, "val_loss": self.loss, "val_tokens": self.tokens}

    def sentence(self) -> str:
        return f"validation {self.bpb:.4f} bits per byte"


class HasTargets(Protocol):
    @property
    def targets(self) -> Tensor: ...


AnyBatch = TypeVar("AnyBatch", bound=HasTargets)


def evaluate_bpb(
    loss_fn: Callable[[AnyBatch], Tensor],
    batches: Iterable[AnyBatch],
    token_bytes: Tensor,
    reduce: Callable[[Tensor], Tensor] | None = None,
) -> BpbResult:
    """Bits per byte over all batches.

    loss_fn gives the loss in nats of each of batch.targets, in their shape. token_bytes says how many bytes
    each id stands for (`Tokenizer.token_bytes`); sums are kept in float64 where it lies, so on the model's
    device nothing waits for the GPU until the end. With several ranks each takes its own batches, and reduce
    sums a tensor over the ranks; all get the same result.
    """
    device = token_bytes.device
    totals = torch.zeros(5, dtype=torch.float64, device=device)
    with torch.no_grad():
        for batch in batches:
            losses = loss_fn(batch)
            if losses.shape != batch.targets.shape:
                raise ValueError(
                    f"the loss function gave {tuple(losses.shape)} losses for {tuple(batch.targets.shape)} targets: "
                    "it must give one for each"
                )
            totals += _count(losses.to(device), batch.targets.to(device, non_blocking=True), token_bytes)
        if reduce is not None:
            totals = reduce(totals)
    nats, text_nats, tokens, text_tokens, n_bytes = totals.tolist()
    if n_bytes == 0:
        raise UserError(
            f"There is no text to evaluate on ({int(tokens)} trained tokens, none of which stands for any bytes): "
            "add documents to the validation split."
        )
    return BpbResult(
        bpb=text_nats / (math.log(2) * n_bytes),
        loss=nats / tokens,
        tokens=int(tokens),
        text_tokens=int(text_tokens),
        bytes=int(n_bytes),
    )


def _count(losses: Tensor, targets: Tensor, token_bytes: Tensor) -> Tensor:
    """Nats, nats of text, tokens, tokens of text, bytes. What is not counted may be anything, even NaN."""
    trained = targets != IGNORE
    lengths = torch.where(trained, token_bytes[targets.clamp(min=0)], 0)
    is_text = lengths > 0
    wide = losses.double()
    sums = [
        torch.where(trained, wide, 0.0).sum(),
        torch.where(is_text, wide, 0.0).sum(),
        trained.sum(),
        is_text.sum(),
        lengths.sum(),
    ]
    return torch.stack([each.double() for each in sums])
