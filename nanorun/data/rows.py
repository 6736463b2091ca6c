"""The order of rows: one endless sequence that depends on the data and the seed and on nothing else.

An epoch's units are shuffled and taken four at a time as blocks. A block's documents are packed into rows
(`packing.py`) and the rows shuffled, so that long and short documents mix. What does not fill a last row
joins the next block, so no token is lost even between blocks and epochs.

Because a block is packed as a whole, a position in the sequence is very little: the block, the pieces
that came over from the block before, and how many rows of which context have been taken of it. Restoring
a position loads that one block again and plans it again; nothing about ranks, threads or prefetching is
part of it. When the context changes in the middle of a block, the rows that were not taken are dissolved
and their pieces packed anew.
"""

from collections import OrderedDict
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nanorun.data.packing import Ints, Packing, Pieces, Plan, plan_rows
from nanorun.data.sources import Block, Source
from nanorun.errors import UserError

UNITS_PER_BLOCK = 4
BLOCKS_KEPT = 3


@dataclass(frozen=True)
class RowOrder:
    """Everything but the data that fixes the sequence of rows."""

    packing: Packing = "best_fit"
    reuse_tails: bool = True
    shuffle: bool = True
    seed: int = 0
    epochs: int | None = None  # None: endless


@dataclass(frozen=True)
class Position:
    """Where the sequence stands. `taken` is [(context, rows), ...] of the current block."""

    epoch: int = 0
    block: int = 0
    carry: tuple[NDArray[Any], ...] = ()
    taken: tuple[tuple[int, int], ...] = ()
    rows: int = 0  # in all, since the start
    lost: int = 0  # tokens thrown away in finished blocks (only without reuse_tails)

    def to_dict(self) -> dict[str, Any]:
        return {
            "epoch": self.epoch,
            "block": self.block,
            "carry": [piece.tolist() for piece in self.carry],
            "taken": [list(entry) for entry in self.taken],
            "rows": self.rows,
            "lost": self.lost,
        }

    @staticmethod
    def from_dict(record: Mapping[str, Any]) -> "Position":
        try:
            position = Position(
                epoch=int(record["epoch"]),
                block=int(record["block"]),
                carry=tuple(np.array(piece, np.uint32) for piece in record["carry"]),
                taken=tuple((int(context), int(rows)) for context, rows in record["taken"]),
                rows=int(record["rows"]),
                lost=int(record["lost"]),
            )
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise UserError(
                f"The loader's saved position is damaged ({error}): use an earlier checkpoint."
            ) from error
        numbers = [position.epoch, position.block, position.rows, position.lost]
        if min(numbers + [n for entry in position.taken for n in entry]) < 0:
            raise UserError(
                "The loader's saved position is damaged (a count below 0): use an earlier checkpoint."
            )
        return position


@dataclass(frozen=True)
class Rows:
    """Consecutive rows of one plan, not yet turned into tokens."""

    plan: Plan
    tokens: NDArray[Any]
    trained: NDArray[np.bool_] | None
    first: int
    last: int


class BlockCache:
    """Loads blocks ahead of need on a thread and keeps the last few, so that stepping back is cheap."""

    def __init__(self, source: Source, order: RowOrder) -> None:
        self.source, self.order = source, order
        self.count = -(-source.units // UNITS_PER_BLOCK)
        self._kept: OrderedDict[tuple[int, int], Future[Block]] = OrderedDict()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="nanorun-blocks")

    def get(self, epoch: int, block: int) -> Block:
        future = self._submit(epoch, block)
        after = (epoch, block + 1) if block + 1 < self.count else (epoch + 1, 0)
        if self.order.epochs is None or after[0] < self.order.epochs:
            self._submit(*after)
        return future.result()

    def close(self) -> None:
        self._thread.shutdown(wait=True, cancel_futures=True)

    def _submit(self, epoch: int, block: int) -> "Future[Block]":
        key = (epoch, block)
        if key not in self._kept:
            self._kept[key] = self._thread.submit(self._load, epoch, block)
        self._kept.move_to_end(key)
        while len(self._kept) > BLOCKS_KEPT:
            self._kept.popitem(last=False)
        return self._kept[key]

    def _load(self, epoch: int, block: int) -> Block:
        units = np.arange(self.source.units)
        if self.order.shuffle:
            units = units[shuffled(self.source.units, self.order.seed, epoch)]
        return self.source.load(units[block * UNITS_PER_BLOCK : (block + 1) * UNITS_PER_BLOCK].tolist())


class RowSequence:
    """Takes rows from a position onward. One instance moves forward only; a new one starts anywhere."""

    def __init__(self, cache: BlockCache, position: Position) -> None:
        self._cache, self._order = cache, cache.order
        self._empty_blocks = 0
        self._plan: Plan
        if position.block > cache.count:
            raise UserError(
                f"The saved position is in block {position.block} of data that has {cache.count}."
            )
        self._enter(position)
        for context, rows in position.taken:
            self._plan_for(context)
            if rows > len(self._plan):
                raise UserError(
                    "The saved position does not fit the data: it was saved by another version of nanorun or "
                    "over other data. Start the data over, or restore what it was saved with."
                )
            self._used = rows
        self.position = position

    def take(self, rows: int, context: int) -> list[Rows]:
        """The next rows; fewer than asked for only at the end of the last epoch."""
        chunks: list[Rows] = []
        while rows > 0 and not self._ended:
            self._plan_for(context)
            n = min(rows, len(self._plan) - self._used)
            if n == 0:
                self._next_block()
                continue
            chunks.append(Rows(self._plan, self._tokens, self._trained, self._used, self._used + n))
            self._used += n
            rows -= n
            taken = self.position.taken
            if taken and taken[-1][0] == context:
                taken = taken[:-1]
            self.position = replace(
                self.position, taken=(*taken, (context, self._used)), rows=self.position.rows + n
            )
        return chunks

    @property
    def _final(self) -> bool:
        """Behind the last block of the last epoch: what is left makes one short row."""
        return self.position.block == self._cache.count

    @property
    def _ended(self) -> bool:
        return self._order.epochs is not None and self.position.epoch >= self._order.epochs

    def _enter(self, position: Position) -> None:
        self.position = position
        if self._ended:
            return
        if self._final:
            block = Block(np.zeros(0, np.uint16), Pieces(_NOTHING, _NOTHING))
        else:
            block = self._cache.get(position.epoch, position.block)
        self._tokens, self._trained, pieces = block.tokens, block.trained, block.pieces
        if position.carry:
            dtype = position.carry[0].dtype if self._final else block.tokens.dtype
            carried = [piece.astype(dtype) for piece in position.carry]
            lengths = np.array([len(piece) for piece in carried], np.int64)
            ends = np.cumsum(lengths)
            shift = int(ends[-1])
            self._tokens = np.concatenate([*carried, block.tokens.astype(dtype, copy=False)])
            pieces = Pieces.concatenate(
                [Pieces(ends - lengths, lengths), Pieces(pieces.starts + shift, pieces.lengths)]
            )
        self._pool = pieces
        self._plan, self._context, self._used = _NO_PLAN, 0, 0

    def _plan_for(self, context: int) -> None:
        if context == self._context:
            return
        if self._used:
            self._pool = self._rest()
        order = self._order
        packing = "padded" if self._final else order.packing
        plan = plan_rows(self._pool, context, packing, order.reuse_tails)
        if order.shuffle and packing != "stream":
            keys = (order.seed, self.position.epoch, self.position.block, context)
            plan = plan.reordered(shuffled(len(plan), *keys))
        self._plan, self._context, self._used = plan, context, 0

    def _rest(self) -> Pieces:
        """The pieces of rows that were planned and not taken, and those that filled no row."""
        waiting = self._plan.row_segments(self._used, len(self._plan))
        real = waiting.lengths > 0
        return Pieces.concatenate([Pieces(waiting.starts[real], waiting.lengths[real]), self._plan.leftover])

    def _next_block(self) -> None:
        here = self.position
        left = self._plan.leftover
        carry = tuple(
            np.array(self._tokens[start : start + length])
            for start, length in zip(left.starts.tolist(), left.lengths.tolist(), strict=True)
        )
        epoch, block = here.epoch, here.block + 1
        last_epoch = self._order.epochs is not None and epoch + 1 >= self._order.epochs
        if block >= self._cache.count and not (last_epoch and carry and not self._final):
            epoch, block = epoch + 1, 0
        self._empty_blocks = 0 if len(self._pool) else self._empty_blocks + 1
        if self._empty_blocks > self._cache.count:
            raise UserError("The data holds no text to fill a row with: add more.")
        self._enter(
            replace(here, epoch=epoch, block=block, carry=carry, taken=(), lost=here.lost + self._plan.lost)
        )


def count_rows(source: Source, order: RowOrder, context: int) -> int:
    """The rows of all epochs together, by planning every one of them."""
    cache = BlockCache(source, order)
    try:
        sequence = RowSequence(cache, Position())
        while sequence.take(1024, context):
            pass
        return sequence.position.rows
    finally:
        cache.close()


_NOTHING: Ints = np.zeros(0, np.int64)
_NO_PLAN = Plan(_NOTHING, Pieces(_NOTHING, _NOTHING), Pieces(_NOTHING, _NOTHING), 0)


def shuffled(n: int, *key: int) -> Ints:
    """A permutation of range(n) fixed by the key for all time (no library's generator is promised to be)."""
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
