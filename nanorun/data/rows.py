"""The order of rows: one endless sequence that depends only on the data and the seed.

The units of an epoch are shuffled and grouped into blocks of four. The documents of a block are packed into rows
(`packing.py`) and the rows are shuffled, so that long and short documents mix. What does not fill a last row
is carried into the next block, so no token is lost between blocks or epochs.

A block is packed as a whole, so a position in the sequence is small: the block, the segments carried over
from the block before, and how many rows of which context were taken from it. Restoring a position loads that
one block and packs it again; ranks, threads and prefetching are no part of it. When the context changes in the
middle of a block, the segments of the remaining rows are packed again.
"""

from collections import OrderedDict
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nanorun.data.packing import Ints, Packing, PackingPlan, Segments, pack
from nanorun.data.sources import Source, TokenBlock
from nanorun.errors import UserError
from nanorun.json_files import check_shape

UNITS_PER_BLOCK = 4
BLOCKS_KEPT = 3


@dataclass(frozen=True)
class RowOrder:
    """Everything besides the data that determines the sequence of rows."""

    packing: Packing = "best_fit"
    reuse_tails: bool = True
    shuffle: bool = True
    seed: int = 0
    epochs: int | None = None  # None: endless


@dataclass(frozen=True)
class Position:
    """A position in the sequence. `taken` is [(context, rows), ...] of the current block."""

    epoch: int = 0
    block: int = 0
    carry: tuple[NDArray[Any], ...] = ()
    taken: tuple[tuple[int, int], ...] = ()
    rows: int = 0  # in all, since the start
    lost: int = 0  # tokens dropped in finished blocks (only without reuse_tails)

    def to_dict(self) -> dict[str, Any]:
        carry = [tokens.tolist() for tokens in self.carry]
        return {**vars(self), "carry": carry, "taken": [list(entry) for entry in self.taken]}

    @staticmethod
    def from_dict(record: Mapping[str, Any]) -> "Position":
        try:
            names = ("epoch", "block", "rows", "lost")
            check_shape(record, {**dict.fromkeys(names, int), "taken": [[int]], "carry": [[int]]})
            counts = {name: record[name] for name in names}
            taken = tuple((context, rows) for context, rows in record["taken"])
            if min(*counts.values(), *chain.from_iterable(taken)) < 0 or any(not each[0] for each in taken):
                raise ValueError("a negative count")
            carry = tuple(np.array(tokens, np.uint32) for tokens in record["carry"])
            return Position(**counts, carry=carry, taken=taken)
        except (ValueError, OverflowError) as error:
            raise UserError(
                f"The loader's saved position is damaged ({error}): use an earlier checkpoint."
            ) from error


@dataclass(frozen=True)
class RowRange:
    """Consecutive rows of one packing plan. Their tokens have not been copied yet."""

    plan: PackingPlan
    tokens: NDArray[Any]
    trained: NDArray[np.bool_] | None
    first: int
    last: int

    def __len__(self) -> int:
        return self.last - self.first


class BlockCache:
    """Prefetches blocks on a thread and keeps the last few, so that restarting at a recent position is cheap."""

    def __init__(self, source: Source, order: RowOrder) -> None:
        self.source, self.order = source, order
        self.count = -(-source.units // UNITS_PER_BLOCK)
        self._kept: OrderedDict[tuple[int, int], Future[TokenBlock]] = OrderedDict()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="nanorun-blocks")

    def get(self, epoch: int, block: int) -> TokenBlock:
        following = (epoch, block + 1) if block + 1 < self.count else (epoch + 1, 0)
        for key in ((epoch, block), following):
            if key == following and self.order.epochs is not None and key[0] >= self.order.epochs:
                continue
            if key not in self._kept:
                units, first = np.arange(self.source.units), key[1] * UNITS_PER_BLOCK
                if self.order.shuffle:
                    units = shuffled(self.source.units, self.order.seed, key[0])
                of_block = units[first : first + UNITS_PER_BLOCK].tolist()
                self._kept[key] = self._thread.submit(self.source.load, of_block)
            self._kept.move_to_end(key)
        while len(self._kept) > BLOCKS_KEPT:
            self._kept.popitem(last=False)
        return self._kept[epoch, block].result()

    def close(self) -> None:
        self._thread.shutdown(wait=True, cancel_futures=True)


class RowSequence:
    """Takes rows from a position onward. One instance moves forward only; a new one starts anywhere."""

    def __init__(self, cache: BlockCache, position: Position) -> None:
        self._cache, self._order = cache, cache.order
        self._empty_blocks = 0
        self._plan = _EMPTY_PLAN
        if position.block > cache.count:
            raise UserError(
                f"The saved position is in block {position.block}, but the data has {cache.count} blocks."
            )
        self._open_block(position)
        for context, rows in position.taken:
            self._pack(context)
            if rows > len(self._plan):
                raise UserError(
                    "The saved position does not fit the data: it was saved by another version of nanorun or "
                    "with other data. Start the data over, or restore what it was saved with."
                )
            self._used = rows
        self.position = position

    def take(self, rows: int, context: int) -> list[RowRange]:
        """The next rows; fewer than requested only at the end of the last epoch."""
        ranges: list[RowRange] = []
        while rows > 0 and not self._ended:
            self._pack(context)
            here, n = self.position, min(rows, len(self._plan) - self._used)
            if n > 0:
                ranges.append(RowRange(self._plan, self._tokens, self._trained, self._used, self._used + n))
                self._used += n
                rows -= n
                earlier = here.taken[:-1] if here.taken and here.taken[-1][0] == context else here.taken
                self.position = replace(here, taken=(*earlier, (context, self._used)), rows=here.rows + n)
                continue
            left = self._plan.leftover  # the block is used up: the next one follows what did not fill a row
            carry = tuple(
                np.array(self._tokens[start : start + length])
                for start, length in zip(left.starts.tolist(), left.lengths.tolist(), strict=True)
            )
            epoch, block = here.epoch, here.block + 1
            is_last_epoch = self._order.epochs is not None and epoch + 1 >= self._order.epochs
            if block >= self._cache.count and not (is_last_epoch and carry and not self._is_final):
                epoch, block = epoch + 1, 0
            self._empty_blocks = 0 if len(self._pool) else self._empty_blocks + 1
            if self._empty_blocks > self._cache.count:
                raise UserError("The data holds no text to fill a row with: add more.")
            lost = here.lost + self._plan.lost
            self._open_block(replace(here, epoch=epoch, block=block, carry=carry, taken=(), lost=lost))
        return ranges

    @property
    def _is_final(self) -> bool:
        """After the last block of the last epoch: what is left makes one short row."""
        return self.position.block == self._cache.count

    @property
    def _ended(self) -> bool:
        return self._order.epochs is not None and self.position.epoch >= self._order.epochs

    def _open_block(self, position: Position) -> None:
        """Loads the block at `position` and puts the carried segments in front of its documents."""
        self.position = position
        if self._ended:
            return
        if self._is_final:
            block = TokenBlock(np.zeros(0, np.uint16), _NOTHING)
        else:
            block = self._cache.get(position.epoch, position.block)
        self._tokens, self._trained, self._pool = block.tokens, block.trained, block.documents
        if position.carry:
            dtype = position.carry[0].dtype if self._is_final else block.tokens.dtype
            carried = [tokens.astype(dtype) for tokens in position.carry]
            lengths = np.array([len(tokens) for tokens in carried], np.int64)
            ends = np.cumsum(lengths)
            self._tokens = np.concatenate([*carried, block.tokens.astype(dtype, copy=False)])
            moved = Segments(block.documents.starts + int(ends[-1]), block.documents.lengths)
            self._pool = Segments.concatenate([Segments(ends - lengths, lengths), moved])
        self._plan, self._context, self._used = _EMPTY_PLAN, 0, 0

    def _pack(self, context: int) -> None:
        """Packs and shuffles the segments of the block that no taken row holds, unless that is done."""
        if context == self._context:
            return
        if self._used:
            rest = self._plan.row_segments(self._used, len(self._plan))
            self._pool = Segments.concatenate([rest[rest.lengths > 0], self._plan.leftover])
        order = self._order
        packing = "padded" if self._is_final else order.packing
        plan = pack(self._pool, context, packing, order.reuse_tails)
        if order.shuffle and packing != "stream":
            key = (order.seed, self.position.epoch, self.position.block, context)
            plan = plan.reordered(shuffled(len(plan), *key))
        self._plan, self._context, self._used = plan, context, 0


def count_rows(source: Source, order: RowOrder, context: int) -> int:
    """The number of rows of all epochs together. Packs all of them."""
    with closing(BlockCache(source, order)) as cache:
        sequence = RowSequence(cache, Position())
        while sequence.take(1024, context):
            pass
        return sequence.position.rows


_NOTHING = Segments(np.zeros(0, np.int64), np.zeros(0, np.int64))
_EMPTY_PLAN = PackingPlan(np.zeros(0, np.int64), _NOTHING, _NOTHING, 0)


def shuffled(n: int, *key: int) -> Ints:
    """A permutation of range(n) that depends only on the key. Libraries do not promise this of their generators."""
    state = np.uint64(0)
    with np.errstate(over="ignore"):
        for part in key:
            state = _mix(state + np.uint64(part % (1 << 64)) + _GOLDEN)
        drawn = _mix(state + (np.arange(n, dtype=np.uint64) + np.uint64(1)) * _GOLDEN)
    return np.argsort(drawn, kind="stable")


_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def _mix(z: Any) -> Any:
    """The finalizer of splitmix64: every input bit moves every output bit."""
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))
