"""The loader: batches, ahead of need, that go on exactly where they stopped.

Three things happen at once while the model trains: a thread loads (and, for text, tokenizes) the next
block, a second one packs rows and copies this rank's share of them into pinned memory, and the training
loop takes finished batches from a short queue. None of it shows in the result: a batch carries the
position behind it, `state()` is the position behind the last batch that was taken, and a loader made from
it continues with the very next row, on any number of ranks, whatever was prefetched.

Every rank plans every row and copies only its own. Planning looks at document lengths alone, so with
token shards (`nanorun data tokenize`) it costs next to nothing; with plain text each rank has to tokenize
the whole stream, which is fine on one GPU and wasteful on eight.
"""

import queue
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nanorun.data.packing import Packing, fill
from nanorun.data.rows import BlockCache, Position, RowOrder, Rows, RowSequence
from nanorun.data.sources import ConversationSource, Source
from nanorun.errors import UserError

IGNORE = -1  # the target of a position that is not trained


@dataclass(frozen=True)
class Batch:
    """One micro-batch of this rank; B rows of T tokens."""

    inputs: Tensor  # (B, T) int32
    targets: Tensor  # (B, T) int64, IGNORE where nothing is to be learned
    doc_starts: Tensor  # (D,) int32: where documents begin in inputs.flatten(), always at each row's start
    trained_tokens: int  # targets that count, over all ranks
    epoch: int
    position: Position  # behind this batch


def to_device(
    batch: Batch, device: torch.device, document_mask: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Inputs, targets and, with a document mask, the document number of each token (B, T)."""
    inputs = batch.inputs.to(device, non_blocking=True)
    targets = batch.targets.to(device, non_blocking=True)
    if not document_mask:
        return inputs, targets, None
    docs = torch.zeros(batch.inputs.numel(), dtype=torch.int32)
    docs[batch.doc_starts.long()] = 1
    docs = docs.cumsum(0, dtype=torch.int32).view(batch.inputs.shape)
    return inputs, targets, docs.to(device, non_blocking=True)


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
        """`short_last`: the last batch of the last epoch has only the rows there are. Otherwise it is filled
        with empty rows, without targets, since compiled code wants one shape."""
        self.source, self.order = source, order or RowOrder()
        self.rank, self.world, self._short_last = rank, world, short_last
        self._pin, self._ahead = pin_memory, ahead
        if self.order.packing not in get_args(Packing):
            raise ValueError(f"there is no packing {self.order.packing!r}: choose among {get_args(Packing)}")
        if isinstance(source, ConversationSource) != (self.order.packing == "padded"):
            raise ValueError("conversations are packed 'padded', which never cuts one, and nothing else is")
        if not 0 <= rank < world:
            raise ValueError(f"rank {rank} does not exist among {world} ranks")
        if source.units == 0:
            raise UserError("The data holds no documents: add some text.")
        self._position = Position() if state is None else self._check(state)
        self._cache = BlockCache(source, self.order)
        self._producer: _Producer | None = None
        self._set(rows, context)

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        if self._producer is None:
            self._producer = _Producer(self)
        batch = self._producer.get()
        if batch is None:
            raise StopIteration
        self._position = batch.position
        return batch

    def set_shape(self, rows: int, context: int) -> None:
        """From the next batch on, another number of rows or another context. Nothing is skipped."""
        if (rows, context) != (self.rows, self.context):
            self._stop()
            self._set(rows, context)

    def state(self) -> dict[str, Any]:
        """What a new loader needs to go on behind the last batch taken. Plain JSON, the same on every rank."""
        return {
            "version": 1,
            "data": self.source.fingerprint,
            "packing": self.order.packing,
            "reuse_tails": self.order.reuse_tails,
            "shuffle": self.order.shuffle,
            "seed": self.order.seed,
            "position": self._position.to_dict(),
        }

    def close(self) -> None:
        self._stop()
        self._cache.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _set(self, rows: int, context: int) -> None:
        if context < 1 or rows < self.world:
            raise UserError(
                f"A batch of {rows} rows of {context} tokens cannot be shared by {self.world} ranks: each needs at "
                "least one row of at least one token."
            )
        self.rows, self.context = rows, context

    def _stop(self) -> None:
        if self._producer is not None:
            self._producer.stop()
            self._producer = None

    def _check(self, state: Mapping[str, Any]) -> Position:
        if state.get("version") != 1:
            raise UserError(
                f"The loader's state has version {state.get('version')}; this nanorun reads version 1."
            )
        if state["data"] != self.source.fingerprint:
            raise UserError(
                "The data or the tokenizer is not the one this run began with, so it cannot go on exactly: bring "
                "the old one back, or start a new run."
            )
        for name in ("packing", "reuse_tails", "shuffle", "seed"):
            if state[name] != getattr(self.order, name):
                raise UserError(
                    f"This run began with {name} = {state[name]}, not {getattr(self.order, name)}: keep it, or start "
                    "a new run."
                )
        return Position.from_dict(state["position"])

    def _build(self, sequence: RowSequence) -> Batch | None:
        epoch = sequence.position.epoch
        chunks = sequence.take(self.rows, self.context)
        if not chunks:
            return None
        there = sum(chunk.last - chunk.first for chunk in chunks)
        tokens, trained, starts = self._own_rows(chunks, there if self._short_last else self.rows)
        inputs = torch.from_numpy(tokens[:, :-1].astype(np.int32))
        targets = torch.from_numpy(np.where(trained[:, 1:], tokens[:, 1:], IGNORE))
        doc_starts = torch.from_numpy(starts)
        if self._pin:
            inputs, targets, doc_starts = inputs.pin_memory(), targets.pin_memory(), doc_starts.pin_memory()
        counted = sum(_trained_tokens(chunk) for chunk in chunks)
        return Batch(inputs, targets, doc_starts, counted, epoch, sequence.position)

    def _own_rows(
        self, chunks: list[Rows], rows: int
    ) -> tuple[NDArray[np.int64], NDArray[np.bool_], NDArray[np.int32]]:
        """This rank's rows, which of their tokens are trained, and where documents begin in the inputs."""
        capacity = self.context + 1
        low, high = rows * self.rank // self.world, rows * (self.rank + 1) // self.world
        own = max(high - low, 1)  # a rank for which no row is left gets an empty one
        tokens = np.full((own, capacity), self.source.bos, np.int64)
        trained = np.zeros((own, capacity), np.bool_)
        starts = [np.arange(0, own * self.context, self.context)]
        seen = 0
        for chunk in chunks:
            n = chunk.last - chunk.first
            first, last = max(low - seen, 0), min(high - seen, n)
            seen += n
            if first >= last:
                continue
            here = slice(seen - n + first - low, seen - n + last - low)
            segments = chunk.plan.row_segments(chunk.first + first, chunk.first + last)
            ends = chunk.plan.row_ends[chunk.first + first : chunk.first + last]
            before = chunk.plan.row_ends[chunk.first + first - 1] if chunk.first + first else 0
            sizes = np.diff(ends, prepend=before)
            tokens[here], at = fill(segments, sizes, chunk.tokens, self.source.bos, capacity)
            if chunk.trained is None:
                used = np.add.reduceat(segments.lengths + 1, np.cumsum(sizes) - sizes)
                trained[here] = np.arange(capacity) < used[:, None]
            else:
                trained[here], _ = fill(segments, sizes, chunk.trained, False, capacity)
            row, column = at // capacity + here.start, at % capacity
            inside = (column > 0) & (column < self.context)
            starts.append(row[inside] * self.context + column[inside])
        return tokens, trained, np.sort(np.concatenate(starts)).astype(np.int32)


def _trained_tokens(chunk: Rows) -> int:
    segments = chunk.plan.row_segments(chunk.first, chunk.last)
    if chunk.trained is None:
        return int((segments.lengths + 1).sum()) - (chunk.last - chunk.first)
    spoken = np.concatenate([[0], np.cumsum(chunk.trained)])
    return int((spoken[segments.starts + segments.lengths] - spoken[segments.starts]).sum())


class _Producer:
    """The thread that builds batches from the loader's position onward, until it is stopped."""

    def __init__(self, loader: Loader) -> None:
        self._queue: queue.Queue[Batch | BaseException | None] = queue.Queue(max(loader._ahead, 1))
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(loader,), name="nanorun-batches", daemon=True)
        self._thread.start()

    def get(self) -> Batch | None:
        item = self._queue.get()
        if isinstance(item, BaseException):
            self._queue.put(item)  # asked again, it fails again
            raise item
        if item is None:
            self._queue.put(None)
        return item

    def stop(self) -> None:
        self._stopped.set()
        while self._thread.is_alive():
            try:
                self._queue.get(timeout=0.01)  # makes room for a producer that waits to put
            except queue.Empty:
                continue
        self._thread.join()

    def _run(self, loader: Loader) -> None:
        try:
            sequence = RowSequence(loader._cache, loader._position)
            while not self._stopped.is_set():
                batch = loader._build(sequence)
                self._put(batch)
                if batch is None:
                    return
        except BaseException as error:  # whatever it is, the training loop must hear of it
            self._put(error)

    def _put(self, item: Batch | BaseException | None) -> None:
        while not self._stopped.is_set():
            try:
                self._queue.put(item, timeout=0.1)
            except queue.Full:
                continue
            return
