"""Which rows a model must read to score sequences, with as little read twice as possible, and their batches.

Causal attention lets three things be saved without changing any result:

- The last token of a sequence is never read, only predicted.
- A row that begins another row need not be read: its predictions are the other's. Where the answers are
  single letters, all choices of a question are one row.
- Rows that begin alike are one row with branches: the common trunk is read once, and each branch sees the
  trunk and itself. (For models that can do that; others read each branch behind a copy of the trunk.)

A sequence too long for the model loses tokens from the left, as in everyone's evaluation, each sequence on
its own.

Rows of all tasks are sorted by length and grouped into batches of at most so many tokens, padding included.
Padding stands on the right, where no real token sees it. A batch also has a most of positions whose logits
are wanted, since a position costs a whole vocabulary of numbers.

    one row of a batch:   trunk trunk trunk pad │ branch 1 branch 1 │ branch 2 │ pad
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from nanorun.evals.core_prompts import Encoded, common_length

# A trunk shorter than this is read again for every branch: attention of branches is a call of its own.
_SHORTEST_TRUNK = 8


@dataclass(frozen=True, slots=True)
class Row:
    trunk: np.ndarray
    branches: tuple[np.ndarray, ...]
    at: np.ndarray  # (wanted,) places in the trunk and, behind it, the branches one after the other
    targets: np.ndarray  # (wanted,) the token that each of these places should predict
    sequences: np.ndarray  # (wanted,) the number of the sequence it belongs to

    @property
    def branched(self) -> int:
        return sum(map(len, self.branches))

    @property
    def tokens(self) -> int:
        return len(self.trunk) + self.branched


@dataclass(frozen=True)
class Batch:
    """Rows side by side."""

    tokens: np.ndarray  # (rows, time): trunks padded to `trunk`, then the branches
    previous: np.ndarray  # (rows, time) the token before each, which for a branch's first is the trunk's last
    positions: np.ndarray  # (rows, time)
    branch: np.ndarray  # (rows, time) 0 in a trunk, 1, 2... in branches, -1 for padding
    trunk: int
    at: np.ndarray  # (places,) whose logits are wanted, counted through all rows, each once
    which: np.ndarray  # (wanted,) the place of each target
    targets: np.ndarray  # (wanted,)
    sequences: np.ndarray  # (wanted,)
    real: int  # tokens that are not padding


def plan_rows(tasks: Sequence[Encoded], context: int, share: bool) -> list[Row]:
    """The rows of all tasks; sequences are numbered through all of them."""
    rows, number = [], 0
    for task in tasks:
        for trunk, tails, scored in task.examples():
            rows += example_rows(trunk, tails, scored, number, context, share)
            number += len(tails)
    return rows


def example_rows(
    trunk: np.ndarray, tails: list[np.ndarray], scored: np.ndarray, number: int, context: int, share: bool
) -> list[Row]:
    """The rows that one example's sequences need, the first of which has this number."""
    wholes = [np.concatenate([trunk, tail])[-context:] for tail in tails]
    inputs = [whole[:-1] for whole in wholes]
    hosts: list[np.ndarray] = []
    for each in sorted(inputs, key=len, reverse=True):
        if _host(each, hosts) is None:
            hosts.append(each)
    wanted: list[list[tuple[np.ndarray, np.ndarray, int]]] = [[] for _ in hosts]
    for i, (whole, count) in enumerate(zip(wholes, scored.tolist(), strict=True)):
        start = max(len(whole) - count, 1)
        host = _host(inputs[i], hosts)
        assert host is not None
        wanted[host].append((np.arange(start - 1, len(whole) - 1), whole[start:], number + i))
    common = common_length(hosts)
    if share and len(hosts) > 1 and common >= _SHORTEST_TRUNK:
        return [_branching(hosts, common, wanted)]
    return [_row(host, (), mine) for host, mine in zip(hosts, wanted, strict=True)]


def _host(row: np.ndarray, hosts: list[np.ndarray]) -> int | None:
    """Which of the hosts begins with the row."""
    for i, host in enumerate(hosts):
        if np.array_equal(host[: len(row)], row):
            return i
    return None


def _branching(
    hosts: list[np.ndarray], common: int, wanted: list[list[tuple[np.ndarray, np.ndarray, int]]]
) -> Row:
    branches = tuple(host[common:] for host in hosts)
    starts = np.cumsum([common, *map(len, branches)])
    moved = [
        (np.where(at < common, at, at - common + start), targets, number)
        for start, mine in zip(starts, wanted, strict=False)
        for at, targets, number in mine
    ]
    return _row(hosts[0][:common], branches, moved)


def _row(
    trunk: np.ndarray, branches: tuple[np.ndarray, ...], wanted: list[tuple[np.ndarray, np.ndarray, int]]
) -> Row:
    at, targets = (np.concatenate([each[i] for each in wanted]) for i in (0, 1))
    numbers = np.repeat([number for *_, number in wanted], [len(at) for at, *_ in wanted])
    return Row(trunk, branches, at, targets.astype(np.int64), numbers)


# Batches


def group_rows(rows: Sequence[Row], most_tokens: int, most_wanted: int) -> list[list[Row]]:
    """Rows of similar length together, the longest first, so that what does not fit fails at once."""
    groups: list[list[Row]] = []
    trunk = branched = wanted = 0
    for row in sorted(rows, key=lambda row: (bool(row.branches), len(row.trunk), row.branched), reverse=True):
        trunk, branched = max(trunk, len(row.trunk)), max(branched, row.branched)
        wanted += len(row.at)
        group = groups[-1] if groups else []
        room = (len(group) + 1) * (trunk + branched) <= most_tokens and wanted <= most_wanted
        if group and room and bool(group[0].branches) == bool(row.branches):
            group.append(row)
        else:
            groups.append([row])
            trunk, branched, wanted = len(row.trunk), row.branched, len(row.at)
    return groups


def make_batch(rows: Sequence[Row], multiple: int = 1) -> Batch:
    """Rows padded to one shape, whose sides are multiples of `multiple`."""
    trunk = _up(max(len(row.trunk) for row in rows), multiple)
    time = trunk + _up(max(row.branched for row in rows), multiple)
    tokens, previous, positions = (np.zeros((len(rows), time), dtype=np.int64) for _ in range(3))
    branch = np.full((len(rows), time), -1, dtype=np.int64)
    at = []
    for i, row in enumerate(rows):
        length = len(row.trunk)
        positions[i] = length - 1  # of padding: any that a real token could have
        for number, (start, before, part) in enumerate(_parts(row, trunk)):
            end = start + len(part)
            tokens[i, start:end], branch[i, start:end] = part, number
            previous[i, start : start + 1], previous[i, start + 1 : end] = before, part[:-1]
            positions[i, start:end] = np.arange(len(part)) + (length if number else 0)
        at.append(i * time + np.where(row.at < length, row.at, row.at - length + trunk))
    places, which = np.unique(np.concatenate(at), return_inverse=True)
    targets, sequences = (
        np.concatenate([getattr(row, name) for row in rows]) for name in ("targets", "sequences")
    )
    real = sum(row.tokens for row in rows)
    return Batch(tokens, previous, positions, branch, trunk, places, which, targets, sequences, real)


def _parts(row: Row, trunk: int) -> Iterator[tuple[int, int, np.ndarray]]:
    """The trunk and the branches: where each starts in a padded row, the token before it, its tokens."""
    yield 0, 0, row.trunk
    start = trunk
    for branch in row.branches:
        yield start, int(row.trunk[-1]), branch
        start += len(branch)


def _up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple
