"""Bits per byte: how many bits the model needs for each byte of text it has not seen.

The mean loss per token is not comparable across tokenizers: longer tokens are harder to predict and there are
fewer of them. Divided by the bytes that the tokens stand for, the same sum of losses is:

    bpb = Σ loss in nats / (ln 2 · Σ bytes)

What counts:

    targets that are text       their loss and their bytes
    special tokens (0 bytes)    neither; they are part of `loss`, which is what training minimizes
    ignored targets (IGNORE)    nothing, whatever the loss function returns there

A token's bytes are those of its own piece of UTF-8, also where a character spans several tokens, so over whole
documents they add up to the size of the text. The loader makes every token of text a target exactly once per
epoch, so `bytes`, `text_tokens` and, for a fixed loss per token, `bpb` depend on neither batch size nor context.
(A real model's loss of a token depends on how much of the preceding text is in the same row, so a longer context
gives a lower bpb.) `tokens` and `loss` include the BOS between documents; where a document is split over two rows,
there is one more or one less of those.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from nanorun import hardware
from nanorun.config import IGNORE, ModelConfig
from nanorun.console import say
from nanorun.data.dataset import Dataset, open_dataset
from nanorun.data.loader import Batch, Loader, to_device
from nanorun.data.packing import Packing
from nanorun.data.rows import RowOrder
from nanorun.data.sources import ConversationSource, Source, open_source
from nanorun.errors import UserError
from nanorun.infer.load import load_model
from nanorun.model.gpt import GPT
from nanorun.plan import memory
from nanorun.provenance import record
from nanorun.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class BpbResult:
    bpb: float  # bits per byte of text
    loss: float  # mean nats per trained token, special tokens included: what training minimizes
    tokens: int  # trained tokens
    text_tokens: int  # of these, the ones that stand for bytes
    bytes: int

    def figures(self) -> dict[str, Any]:
        return {"val_bpb": self.bpb, "val_loss": self.loss, "val_tokens": self.tokens}

    def sentence(self) -> str:
        return f"validation {self.bpb:.4f} bits per byte"


def evaluate_run(name: str | None, data: str | None, max_tokens: int | None) -> dict[str, Any]:
    """`eval bpb`: a trained model on the validation split of its own dataset, or of another."""
    loaded = load_model(name)
    if name is None:
        say(f"evaluating {loaded}")
    dataset = open_dataset(data or loaded.config.data)
    result = evaluate_model(loaded.model, loaded.tokenizer, dataset, max_tokens)
    return record(
        "bpb",
        model=loaded.run,
        step=loaded.step,
        data=dataset.name,
        bpb=result.bpb,
        loss=result.loss,
        tokens=result.tokens,
        bytes=result.bytes,
    )


def evaluate_model(model: GPT, tokenizer: Tokenizer, dataset: Dataset, max_tokens: int | None) -> BpbResult:
    source = open_source(dataset, "val", tokenizer)
    rows, device = memory.micro_batch_rows(model.config, hardware.detect()), model.embed.weight.device
    return bpb_evaluator(source, model.config, tokenizer, model, device, rows, max_tokens)()


def bpb_evaluator(
    source: Source,
    config: ModelConfig,
    tokenizer: Tokenizer,
    forward: Callable[..., Tensor],
    device: torch.device,
    rows: int,
    max_tokens: int | None,
) -> Callable[[], BpbResult]:
    """Returns a function that evaluates `forward` on the first `max_tokens` targets of a source.

    In conversations only the assistant's tokens count.
    """
    packing: Packing = "padded" if isinstance(source, ConversationSource) else "best_fit"
    # Sums are in float64, which MPS does not support.
    sum_device = device if device.type != "mps" else torch.device("cpu")
    token_bytes = torch.from_numpy(tokenizer.token_bytes(config.padded_vocab)).to(sum_device)

    @torch.no_grad()
    def losses(batch: Batch) -> Tensor:
        return forward(*to_device(batch, device, config.document_mask), True)

    def evaluate() -> BpbResult:
        order = RowOrder(packing, shuffle=False, epochs=1)
        with Loader(source, rows=rows, context=config.context, order=order) as loader:
            return evaluate_bpb(losses, _limit_tokens(loader, max_tokens), token_bytes)

    return evaluate


def evaluate_bpb(
    loss_fn: Callable[[Batch], Tensor],
    batches: Iterable[Batch],
    token_bytes: Tensor,
    reduce: Callable[[Tensor], Tensor] | None = None,
) -> BpbResult:
    """Bits per byte over all batches.

    `loss_fn` returns the loss in nats of each of batch.targets, in their shape. `token_bytes` is the number of
    bytes of each token id (`Tokenizer.token_bytes`); sums are float64 on its device, so on the model's device
    nothing synchronizes until the end. With several ranks each evaluates its own batches, and `reduce` sums a
    tensor over the ranks; all return the same result.
    """
    device = token_bytes.device
    totals = torch.zeros(5, dtype=torch.float64, device=device)
    with torch.no_grad():
        for batch in batches:
            losses = loss_fn(batch)
            if losses.shape != batch.targets.shape:
                raise ValueError(
                    f"the loss function returned losses of shape {tuple(losses.shape)} for targets of shape "
                    f"{tuple(batch.targets.shape)}: it must return one for each"
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


def _limit_tokens(batches: Iterable[Batch], max_tokens: int | None) -> Iterator[Batch]:
    """Batches with `max_tokens` targets in all, whatever the batch size: the rest of the last one is ignored."""
    left = max_tokens
    for batch in batches:
        if left is not None and batch.trained_tokens >= left:
            counted = (batch.targets != IGNORE).flatten().cumsum(0).view_as(batch.targets) <= left
            yield replace(batch, targets=torch.where(counted, batch.targets, IGNORE), trained_tokens=left)
            return
        yield batch
        if left is not None:
            left -= batch.trained_tokens


def _count(losses: Tensor, targets: Tensor, token_bytes: Tensor) -> Tensor:
    """Nats, nats of text, tokens, tokens of text, bytes. The loss at an ignored target can be anything, even NaN."""
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
