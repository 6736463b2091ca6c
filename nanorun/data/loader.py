"""The loader: prefetched batches that resume exactly where they stopped.

Three things run concurrently with training: one thread loads (and, for text, tokenizes) the next block, a second
one packs rows and copies this rank's share of them into pinned memory, and the training loop takes finished
batches from a short queue. The result does not depend on any of it: a batch carries the position after it,
`state()` is the position after the last batch that was taken, and a loader made from it continues with the
next row, on any number of ranks, whatever was prefetched.

How a batch is made: `Loader.__next__` takes it from the queue; `_produce` fills the queue with `_build_batch`. There
`RowSequence.take` (rows.py) decides which rows come next, from blocks that a source loads (sources.py) and `pack`
packs (packing.py), and `fill` (packing.py) copies the tokens of this rank's rows.

Every rank packs every row and copies only its own. Packing needs document lengths only, so with token shards
(`nanorun data tokenize`) it is almost free. With plain text each rank tokenizes the whole stream, which is fine
on one GPU and wasteful on eight.
"""

import contextlib
import queue
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Self, get_args

import numpy as np
import torch
from torch import Tensor

from nanorun.config import IGNORE
from nanorun.data.packing import Packing, fill
from nanorun.data.rows import BlockCache, Position, RowOrder, RowRange, RowSequence
from nanorun.data.sources import ConversationSource, Source
from nanorun.errors import UserError
from nanorun.json_files import check_shape

_STATE_SHAPE = {
    **dict.fromkeys(("data", "packing"), str),
    **dict.fromkeys(("reuse_tails", "shuffle"), bool),
    "seed": int,
    "position": dict,
}
_SAVED_ORDER = ("packing", "reuse_tails", "shuffle", "seed")  # the fields of RowOrder that a state records


@dataclass(frozen=True)
class Batch:
    """One micro-batch of this rank; B rows of T tokens."""

    inputs: Tensor  # (B, T) int32
    targets: Tensor  # (B, T) int64, IGNORE where the loss does not count
    doc_starts: Tensor  # (D,) int32: where documents begin in inputs.flatten(), always at each row's start
    trained_tokens: int  # targets that count, over all ranks
    epoch: int
    position: Position  # after this batch


def to_device(
    batch: Batch, device: torch.device, document_mask: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Inputs and targets (B, T) on the device, copied without synchronizing with it; and, with a document mask, the
    document number of each token (B, T), from 1 and counting over all rows, else None."""
    inputs = batch.inputs.to(device, non_blocking=True)
    targets = batch.targets.to(device, non_blocking=True)
    if not document_mask:
        return inputs, targets, None
    docs = torch.zeros(batch.inputs.numel(), dtype=torch.int32)
    docs[batch.doc_starts.long()] = 1
    docs = docs.cumsum(0, dtype=torch.int32).view(batch.inputs.shape)
    return inputs, targets, docs.to(device, non_blocking=True)


def check_loader_state(state: Mapping[str, Any], shape: Mapping[str, Any]) -> None:
    try:
        check_shape(state, shape)
    except ValueError as error:
        raise UserError(
            f"The loader's saved state is damaged ({error}): use an earlier checkpoint."
        ) from error


class Loader:
    """Iterates over batches. `rows` counts the rows of all ranks together; each takes its share."""

    def __init__(
        self,
        source: Source,
        *,
        rows: int,
        context: int,
        order: RowOrder | None = None,
        rank: int = 0,
        world: int = 1,
        state: Mapping[str, Any] | None = None,
        pin_memory: bool = False,
        ahead: int = 4,
        short_last: bool = False,
    ) -> None:
        """`short_last`: the last batch of the last epoch has only the remaining rows. Otherwise it is filled up
        with empty rows, without targets, because compiled code needs one shape. `ahead`: batches to prefetch."""
        self.source, self.order = source, order or RowOrder()
        self.rank, self.world, self._short_last = rank, world, short_last
        self._pin = pin_memory
        if self.order.packing not in get_args(Packing):
            raise ValueError(f"unknown packing {self.order.packing!r}: choose one of {get_args(Packing)}")
        if isinstance(source, ConversationSource) != (self.order.packing == "padded"):
            raise ValueError(
                "'padded' packing, which cuts no document, is for conversations and only for them"
            )
        if not 0 <= rank < world:
            raise ValueError(f"rank {rank} is out of range for {world} ranks")
        if source.units == 0:
            raise UserError("The data holds no documents: add some text.")
        self._position = Position() if state is None else self._check(state)
        self._cache = BlockCache(source, self.order)
        self._queue: queue.Queue[Batch | BaseException | None] = queue.Queue(max(ahead, 1))
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None
        self._set(rows, context)

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        """The next batch that the thread has put into the queue (or the exception that ended it)."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._produce, name="nanorun-batches", daemon=True)
            self._thread.start()
        item = self._queue.get()
        if isinstance(item, Batch):
            self._position = item.position
            return item
        self._queue.put(item)  # the next call ends the same way
        raise StopIteration if item is None else item

    def set_shape(self, rows: int, context: int) -> None:
        """Changes the number of rows or the context from the next batch on. No row is skipped."""
        if (rows, context) != (self.rows, self.context):
            self._stop()
            self._set(rows, context)

    def state(self) -> dict[str, Any]:
        """What a new loader needs to continue after the last batch taken. Plain JSON, the same on every rank."""
        order = {name: getattr(self.order, name) for name in _SAVED_ORDER}
        data = self.source.fingerprint
        return {"version": 1, "data": data, **order, "position": self._position.to_dict()}

    def close(self) -> None:
        self._stop()
        self._cache.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def _set(self, rows: int, context: int) -> None:
        if context < 1 or rows < self.world:
            raise UserError(
                f"A batch of {rows} rows of {context} tokens cannot be shared by {self.world} ranks: each needs at "
                "least one row of at least one token."
            )
        self.rows, self.context = rows, context

    def _stop(self) -> None:
        if self._thread is None:
            return
        self._stopped.set()
        while self._thread.is_alive():
            with contextlib.suppress(queue.Empty):
                self._queue.get(timeout=0.01)  # makes room for a producer that waits in put
        self._thread, self._stopped = None, threading.Event()
        self._queue = queue.Queue(self._queue.maxsize)

    def _check(self, state: Mapping[str, Any]) -> Position:
        check_loader_state(state, {"version": int})
        if state["version"] != 1:
            raise UserError(
                f"The loader's state has version {state['version']}: use the nanorun version that wrote it."
            )
        check_loader_state(state, _STATE_SHAPE)
        if state["data"] != self.source.fingerprint:
            raise UserError(
                "The data or the tokenizer differs from the one this run began with, so it cannot resume exactly: "
                "restore the old one, or start a new run."
            )
        for name in _SAVED_ORDER:
            if state[name] != getattr(self.order, name):
                raise UserError(
                    f"This run began with {name} = {state[name]}, not {getattr(self.order, name)}: keep it, or start "
                    "a new run."
                )
        return Position.from_dict(state["position"])

    def _produce(self) -> None:
        """The thread that builds batches from the current position onward, until it is stopped."""
        stopped, batches = self._stopped, self._queue

        def put(item: Batch | BaseException | None) -> None:
            while not stopped.is_set():
                with contextlib.suppress(queue.Full):
                    batches.put(item, timeout=0.1)
                    return

        try:
            sequence = RowSequence(self._cache, self._position)
            while not stopped.is_set():
                batch = self._build_batch(sequence)
                put(batch)
                if batch is None:
                    return
        except BaseException as error:  # raised in the training loop, whatever it is
            put(error)

    def _build_batch(self, sequence: RowSequence) -> Batch | None:
        """This rank's share of the next rows."""
        epoch, ranges = sequence.position.epoch, sequence.take(self.rows, self.context)
        if not ranges:
            return None
        capacity = self.context + 1
        rows = sum(len(part) for part in ranges) if self._short_last else self.rows
        low, high = rows * self.rank // self.world, rows * (self.rank + 1) // self.world
        own = max(high - low, 1)  # a rank for which no row is left gets an empty one
        tokens = np.full((own, capacity), self.source.bos, np.int64)
        trained = np.zeros((own, capacity), np.bool_)
        starts = [np.arange(0, own * self.context, self.context)]
        seen = 0
        for part in ranges:
            first, last = max(low - seen, 0), min(high - seen, len(part))
            if first < last:
                here = slice(seen + first - low, seen + last - low)
                segments = part.plan.row_segments(part.first + first, part.first + last)
                sizes = part.plan.row_sizes[part.first + first : part.first + last]
                tokens[here], at = fill(segments, sizes, part.tokens, self.source.bos, capacity)
                if part.trained is None:
                    used = np.add.reduceat(segments.lengths + 1, np.cumsum(sizes) - sizes)
                    trained[here] = np.arange(capacity) < used[:, None]
                else:
                    trained[here], _ = fill(segments, sizes, part.trained, False, capacity)
                row, column = at // capacity + here.start, at % capacity
                inside = (column > 0) & (column < self.context)
                starts.append(row[inside] * self.context + column[inside])
            seen += len(part)
        inputs = torch.from_numpy(tokens[:, :-1].astype(np.int32))
        targets = torch.from_numpy(np.where(trained[:, 1:], tokens[:, 1:], IGNORE))
        doc_starts = torch.from_numpy(np.sort(np.concatenate(starts)).astype(np.int32))
        if self._pin:
            inputs, targets, doc_starts = inputs.pin_memory(), targets.pin_memory(), doc_starts.pin_memory()
        trained_tokens = sum(_trained_tokens(part) for part in ranges)
        return Batch(inputs, targets, doc_starts, trained_tokens, epoch, sequence.position)


def _trained_tokens(part: RowRange) -> int:
    segments = part.plan.row_segments(part.first, part.last)
    if part.trained is None:
        return int((segments.lengths + 1).sum()) - len(part)
    counted = np.concatenate([[0], np.cumsum(part.trained)])
    return int((counted[segments.starts + segments.lengths] - counted[segments.starts]).sum())
