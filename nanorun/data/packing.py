"""Sequence packing: documents of any length become rows of one length, with nothing thrown away.

A row holds `context + 1` tokens: the model reads all but the last and predicts all but the first. Each document
in it follows a BOS, so every row begins with one. There are three ways to pack:

    best_fit  Repeatedly place the largest document that still fits. When none fits, cut the longest one to fill
              the row exactly and return its tail to the pool as a segment of its own. (With `reuse_tails` off,
              cut the shortest instead and drop its tail, as nanochat does. At a context of 2,048 this drops a
              third to a half of all text, depending on the lengths of the documents.)
    stream    Concatenate documents in order. A document that crosses the end of a row continues in the next.
    padded    For conversations, which must not be cut: best fit, and the rest of a row is padding.

`pack` looks at lengths only. `fill` then copies tokens, once, for the rows that this rank trains on.
"""

from bisect import bisect_right, insort
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from nanorun.errors import UserError

Packing = Literal["best_fit", "stream", "padded"]
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Segments:
    """Documents, or parts of them, in a flat array of tokens. The BOS of a segment is not counted."""

    starts: Ints
    lengths: Ints

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, index: slice | NDArray[Any]) -> "Segments":
        return Segments(self.starts[index], self.lengths[index])

    @staticmethod
    def concatenate(parts: "list[Segments]") -> "Segments":
        return Segments(np.concatenate([p.starts for p in parts]), np.concatenate([p.lengths for p in parts]))


@dataclass(frozen=True)
class PackingPlan:
    """Rows as segments of the token array: row r is segments row_ends[r-1] to row_ends[r]."""

    row_ends: Ints
    segments: Segments
    leftover: Segments  # what did not fill a last row
    lost: int  # dropped tokens (only without reuse_tails)

    def __len__(self) -> int:
        return len(self.row_ends)

    @property
    def row_sizes(self) -> Ints:
        """The number of segments in each row."""
        return np.diff(self.row_ends, prepend=0)

    def row_segments(self, first: int, last: int) -> Segments:
        begin = int(self.row_ends[first - 1]) if first else 0
        end = int(self.row_ends[last - 1]) if last else 0
        return self.segments[begin:end]

    def reordered(self, order: Ints) -> "PackingPlan":
        """The same rows in another order."""
        sizes = self.row_sizes[order]
        ends = np.cumsum(sizes)
        take = np.arange(len(self.segments)) + np.repeat(self.row_ends[order] - ends, sizes)
        return PackingPlan(ends, self.segments[take], self.leftover, self.lost)


def pack(segments: Segments, context: int, packing: Packing, reuse_tails: bool = True) -> PackingPlan:
    """Decides which segments, or parts of them, make a row: by best fit, unless they are a stream."""
    capacity, pad = context + 1, packing == "padded"
    if packing == "stream":
        return _pack_stream(segments, capacity, reuse_tails)
    starts, lengths = segments.starts.tolist(), segments.lengths.tolist()
    if pad and (longest := max(lengths, default=0) + 1) > capacity:
        raise UserError(
            f"A conversation of {longest} tokens does not fit a row of {capacity}: cut it when rendering "
            "(max_tokens), or use a larger --context."
        )
    pool = sorted(_key(length, index) for index, length in enumerate(lengths))
    rows = _Rows()
    while pool:
        room = capacity
        while room > 0 and pool:
            at = bisect_right(pool, _key(room - 1, 0)) - 1
            if at >= 0:
                index = _index(pool.pop(at))
                rows.add(starts[index], lengths[index])
                room -= 1 + lengths[index]
                continue
            if pad:
                break
            # Nothing fits: cut. With one place left this is a bare BOS, which marks the end of a document.
            index = _index(pool[-1] if reuse_tails else pool[0])
            taken = room - 1
            rows.add(starts[index], taken)
            room = 0
            if taken and reuse_tails:
                pool.pop()
                starts[index] += taken
                lengths[index] -= taken
                insort(pool, _key(lengths[index], index))
            elif taken:
                pool.pop(0)
                rows.lost += lengths[index] - taken
        if room == 0 or pad:
            rows.end()
    return rows.plan()


def _pack_stream(segments: Segments, capacity: int, reuse_tails: bool) -> PackingPlan:
    rows, room = _Rows(), capacity
    for start, length in zip(segments.starts.tolist(), segments.lengths.tolist(), strict=True):
        while True:
            taken = min(length, room - 1)
            rows.add(start, taken)
            room -= 1 + taken
            start, length = start + taken, length - taken
            if room == 0:
                rows.end()
                room = capacity
                # A bare BOS at the end of a row took nothing of the document: all of it is still to come.
                if length and (reuse_tails or taken == 0):
                    continue
                rows.lost += length
            break
    return rows.plan()


class _Rows:
    """Collects the segments of rows. Those after the last finished row are left over."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._lengths: list[int] = []
        self._ends: list[int] = []
        self.lost = 0

    def add(self, start: int, length: int) -> None:
        self._starts.append(start)
        self._lengths.append(length)

    def end(self) -> None:
        self._ends.append(len(self._starts))

    def plan(self) -> PackingPlan:
        full = self._ends[-1] if self._ends else 0
        segments = Segments(np.array(self._starts, np.int64), np.array(self._lengths, np.int64))
        return PackingPlan(np.array(self._ends, np.int64), segments[:full], segments[full:], self.lost)


# The pool is a sorted list of integers: the length in the high bits, and in the low bits the index of the segment,
# reversed. One bisection finds the largest segment that fits, and the earliest among equal lengths.
_BITS = 32
_LAST = (1 << _BITS) - 1


def _key(length: int, index: int) -> int:
    return (length << _BITS) + _LAST - index


def _index(key: int) -> int:
    return _LAST - (key & _LAST)


def fill(
    segments: Segments, row_sizes: Ints, tokens: NDArray[Any], bos: int, capacity: int
) -> tuple[NDArray[Any], Ints]:
    """Rows of tokens for consecutive segments, and the position of each segment's BOS in the flat rows.

    `row_sizes` is the number of segments in each row. Short rows (padded packing) end in BOS tokens; the caller
    derives their number from the lengths.
    """
    rows = len(row_sizes)
    sizes = segments.lengths + 1
    row_of = np.repeat(np.arange(rows), row_sizes)
    ends = np.cumsum(sizes)
    row_totals = np.bincount(row_of, weights=sizes, minlength=rows).astype(np.int64)
    filled = np.cumsum(row_totals) - row_totals  # tokens before each row, without padding
    at = (ends - sizes) - filled[row_of] + row_of * capacity
    # Position p of segment i reads token starts[i] - 1 + (p - at[i]); p == at[i] is its BOS.
    source = np.repeat(segments.starts - 1 - at, sizes)
    if int(ends[-1]) == rows * capacity:
        source += np.arange(rows * capacity)
        out = tokens.take(source, mode="clip")
    else:
        where = np.arange(int(ends[-1])) + np.repeat(row_of * capacity - filled[row_of], sizes)
        source += where
        out = np.full(rows * capacity, bos, tokens.dtype)
        out[where] = tokens.take(source, mode="clip")
    out[at] = bos
    return out.reshape(rows, capacity), at
