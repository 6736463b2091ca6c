"""Packing: documents of every length become rows of one length, with nothing thrown away.

A row holds `context + 1` tokens: the model reads all but the last and predicts all but the first. Every
document in it stands behind a BOS, so every row begins with one. Three ways to fill rows:

    best_fit  The largest document that still fits goes in, again and again. When none fits, the longest
              one is cut to fill the row exactly, and its tail returns to the pool as a piece of its own
              (with `reuse_tails` off the shortest is cut instead and its tail is lost, as nanochat does:
              a third to a half of all text at a context of 2,048, by the length of documents).
    stream    Documents in their order, one after the other; the one that crosses the row's end is cut
              and goes on at the start of the next row.
    padded    For conversations, which must not be cut: best fit, and what stays empty is padding.

Planning looks at lengths only. Tokens are moved once, by `fill`, and only for the rows that this rank
trains on.
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
class Pieces:
    """Documents, or parts of them, in a flat array of tokens. A piece's BOS is not counted."""

    starts: Ints
    lengths: Ints

    def __len__(self) -> int:
        return len(self.starts)

    @staticmethod
    def concatenate(parts: "list[Pieces]") -> "Pieces":
        return Pieces(np.concatenate([p.starts for p in parts]), np.concatenate([p.lengths for p in parts]))


@dataclass(frozen=True)
class Plan:
    """Rows as segments of the token array: row r is segments row_ends[r-1] to row_ends[r]."""

    row_ends: Ints
    segments: Pieces
    leftover: Pieces  # what did not fill a last row
    lost: int  # tokens thrown away (only without reuse_tails)

    def __len__(self) -> int:
        return len(self.row_ends)

    def row_segments(self, first: int, last: int) -> Pieces:
        begin = int(self.row_ends[first - 1]) if first else 0
        end = int(self.row_ends[last - 1]) if last else 0
        return Pieces(self.segments.starts[begin:end], self.segments.lengths[begin:end])

    def reordered(self, order: Ints) -> "Plan":
        """The same rows in another order."""
        begins = np.concatenate([[0], self.row_ends[:-1]])
        sizes = (self.row_ends - begins)[order]
        ends = np.cumsum(sizes)
        take = np.arange(ends[-1] if len(ends) else 0) + np.repeat(begins[order] - (ends - sizes), sizes)
        return Plan(
            ends, Pieces(self.segments.starts[take], self.segments.lengths[take]), self.leftover, self.lost
        )


def plan_rows(pieces: Pieces, context: int, packing: Packing, reuse_tails: bool = True) -> Plan:
    if packing == "stream":
        return _plan_stream(pieces, context + 1, reuse_tails)
    if packing == "padded":
        return _plan_padded(pieces, context + 1)
    return _plan_best_fit(pieces, context + 1, reuse_tails)


def _plan_best_fit(pieces: Pieces, capacity: int, reuse_tails: bool) -> Plan:
    starts, lengths = pieces.starts.tolist(), pieces.lengths.tolist()
    pool = _pool(lengths)
    row_ends: list[int] = []
    seg_starts: list[int] = []
    seg_lengths: list[int] = []
    lost = 0
    while pool:
        room = capacity
        while room > 0 and pool:
            at = bisect_right(pool, _key(room - 1, 0)) - 1
            if at >= 0:
                piece = _piece(pool.pop(at))
                seg_starts.append(starts[piece])
                seg_lengths.append(lengths[piece])
                room -= 1 + lengths[piece]
                continue
            # Nothing fits: cut. With one place left this is a bare BOS, which tells that a document ended.
            piece = _piece(pool[-1] if reuse_tails else pool[0])
            taken = room - 1
            seg_starts.append(starts[piece])
            seg_lengths.append(taken)
            room = 0
            if taken and reuse_tails:
                pool.pop()
                starts[piece] += taken
                lengths[piece] -= taken
                insort(pool, _key(lengths[piece], piece))
            elif taken:
                pool.pop(0)
                lost += lengths[piece] - taken
        if room == 0:
            row_ends.append(len(seg_starts))
    full = row_ends[-1] if row_ends else 0
    return _plan(row_ends, seg_starts[:full], seg_lengths[:full], seg_starts[full:], seg_lengths[full:], lost)


def _plan_stream(pieces: Pieces, capacity: int, reuse_tails: bool) -> Plan:
    row_ends: list[int] = []
    seg_starts: list[int] = []
    seg_lengths: list[int] = []
    room, lost = capacity, 0
    for start, length in zip(pieces.starts.tolist(), pieces.lengths.tolist(), strict=True):
        while True:
            taken = min(length, room - 1)
            seg_starts.append(start)
            seg_lengths.append(taken)
            room -= 1 + taken
            start, length = start + taken, length - taken
            if room == 0:
                row_ends.append(len(seg_starts))
                room = capacity
                # a bare BOS at the row's end took nothing of the document: it is still to come
                if length and (reuse_tails or taken == 0):
                    continue
                lost += length
            break
    full = row_ends[-1] if row_ends else 0
    return _plan(row_ends, seg_starts[:full], seg_lengths[:full], seg_starts[full:], seg_lengths[full:], lost)


def _plan_padded(pieces: Pieces, capacity: int) -> Plan:
    starts, lengths = pieces.starts.tolist(), pieces.lengths.tolist()
    longest = max(lengths, default=0)
    if longest + 1 > capacity:
        raise UserError(
            f"A conversation of {longest + 1} tokens cannot fit a row of {capacity}: cut it when rendering "
            "(max_tokens), or use a larger --context."
        )
    pool = _pool(lengths)
    row_ends: list[int] = []
    seg_starts: list[int] = []
    seg_lengths: list[int] = []
    while pool:
        room = capacity
        while pool and (at := bisect_right(pool, _key(room - 1, 0)) - 1) >= 0:
            piece = _piece(pool.pop(at))
            seg_starts.append(starts[piece])
            seg_lengths.append(lengths[piece])
            room -= 1 + lengths[piece]
        row_ends.append(len(seg_starts))
    return _plan(row_ends, seg_starts, seg_lengths, [], [], 0)


def _plan(
    row_ends: list[int],
    starts: list[int],
    lengths: list[int],
    left_starts: list[int],
    left_lengths: list[int],
    lost: int,
) -> Plan:
    return Plan(
        np.array(row_ends, np.int64),
        Pieces(np.array(starts, np.int64), np.array(lengths, np.int64)),
        Pieces(np.array(left_starts, np.int64), np.array(left_lengths, np.int64)),
        lost,
    )


# The pool is a sorted list of plain integers, length first and, among equal lengths, the earliest piece
# last, so that one bisection finds the largest piece that fits and ties go to who waited longest.
_BITS = 32
_LAST = (1 << _BITS) - 1


def _key(length: int, piece: int) -> int:
    return (length << _BITS) + _LAST - piece


def _piece(key: int) -> int:
    return _LAST - (key & _LAST)


def _pool(lengths: list[int]) -> list[int]:
    return sorted(_key(length, piece) for piece, length in enumerate(lengths))


def fill(
    segments: Pieces, row_sizes: Ints, tokens: NDArray[Any], bos: int, capacity: int
) -> tuple[NDArray[Any], Ints]:
    """Rows of tokens for consecutive segments, and where each segment's BOS stands in the flat rows.

    `row_sizes` tells how many segments make each row. Short rows (padded packing) end in BOS tokens; the
    caller knows how many from the lengths.
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
