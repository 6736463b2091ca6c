"""Score sequences in batches, reading as little twice as possible, and decide which examples are correct.

Causal attention allows three savings that change no result:

- The last token of a sequence is never read, only predicted.
- A row that is a prefix of another row need not be read: its predictions are the other's. Where the answers are
  single letters, all choices of a question are one row.
- Rows with a common prefix are one row with branches: the prefix is read once, and each branch attends to the
  prefix and to itself. (For models that support it; others read each branch after a copy of the prefix.)

A sequence longer than the context is truncated from the left, as in other implementations, each sequence on its
own.

Rows of all tasks are sorted by length and grouped into batches with a maximum number of tokens, padding included.
Padding is on the right, where no real token attends to it. A batch also has a maximum number of positions whose
logits are computed, since each costs a whole vocabulary of numbers.

    one row of a batch:   prefix prefix prefix pad │ branch 1 branch 1 │ branch 2 │ pad

The score of a choice is the mean loss of its scored tokens; the lowest wins, the first of equals. In language
modeling an example is correct if every scored token is the argmax.

Ranks share the batches: rank r of n takes every n-th, starting with the r-th. Each sequence is scored whole on one
rank, so the sums that the ranks all-reduce have one nonzero term each, and the result does not depend on the world
size. `score_one_at_a_time` is the reference: example by example, with logits at every position.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from nanorun.console import Progress
from nanorun.evals.core_prompts import EncodedExample, EncodedTask, common_prefix

# A shorter prefix is read again for every branch: attention of branches is an extra call.
_MIN_SHARED_PREFIX = 8
MAX_LOGITS_GPU = 2**29  # per batch: 2 GiB in fp32
MAX_LOGITS_CPU = 2**25

# For some positions of a row: the positions, the tokens that they should predict, and the sequence's number.
Targets = tuple[np.ndarray, np.ndarray, int]


@dataclass(frozen=True, slots=True)
class BranchedRow:
    prefix: np.ndarray
    branches: tuple[np.ndarray, ...]
    positions: np.ndarray  # (targets,) in the prefix and, after it, the concatenated branches
    targets: np.ndarray  # (targets,) the token that each of these positions should predict
    sequences: np.ndarray  # (targets,) the number of the sequence that each belongs to

    @property
    def branch_tokens(self) -> int:
        return sum(map(len, self.branches))

    @property
    def tokens(self) -> int:
        return len(self.prefix) + self.branch_tokens


@dataclass(frozen=True)
class ScoringBatch:
    """Rows padded to one shape (B, T)."""

    tokens: np.ndarray  # (B, T): prefixes padded to `prefix`, then the branches
    previous: np.ndarray  # (B, T) the token before each; of a branch's first, the last of the prefix
    positions: np.ndarray  # (B, T)
    branch: np.ndarray  # (B, T) 0 in a prefix, 1, 2... in branches, -1 for padding
    prefix: int
    logit_positions: np.ndarray  # (P,) indices into the flattened batch, each once
    target_rows: np.ndarray  # (targets,) the index in logit_positions of each target
    targets: np.ndarray  # (targets,)
    sequences: np.ndarray  # (targets,)


class ScoringModel(Protocol):
    context: int
    vocab_size: int
    device: torch.device
    shares_prefixes: bool

    def logits(self, batch: ScoringBatch) -> Tensor:
        """fp32 logits (P, vocabulary) at batch.logit_positions."""
        ...

    def all_logits(self, tokens: Tensor) -> Tensor:
        """fp32 logits of plain rows (B, T, vocabulary), the slow way."""
        ...


@dataclass(frozen=True)
class Scores:
    """Of all sequences of all tasks, in their order."""

    losses: np.ndarray  # mean nats of the scored tokens
    is_greedy: np.ndarray  # whether every scored token is the argmax
    tokens: np.ndarray  # (tasks,) tokens read, without padding
    padding: float  # its share of all tokens computed


# -- rows --------------------------------------------------------------------------------------------


def plan_rows(tasks: Sequence[EncodedTask], context: int, share_prefixes: bool) -> list[BranchedRow]:
    """The rows of all tasks; sequences are numbered through all of them."""
    rows, number = [], 0
    for task in tasks:
        for example in task.examples():
            rows += _example_rows(example, number, context, share_prefixes)
            number += len(example[1])
    return rows


def _example_rows(
    example: EncodedExample, number: int, context: int, share_prefixes: bool
) -> list[BranchedRow]:
    """The rows that one example's sequences need; its first sequence has this number."""
    prefix, suffixes, scored = example
    sequences = [np.concatenate([prefix, suffix])[-context:] for suffix in suffixes]
    hosts: list[np.ndarray] = []  # the rows that are no prefix of another
    targets: list[list[Targets]] = []  # of each host
    for i in sorted(range(len(sequences)), key=lambda i: len(sequences[i]), reverse=True):
        row = sequences[i][:-1]
        host = next(
            (h for h, other in enumerate(hosts) if np.array_equal(other[: len(row)], row)), len(hosts)
        )
        if host == len(hosts):
            hosts.append(row)
            targets.append([])
        start = max(len(sequences[i]) - scored[i], 1)
        targets[host].append((np.arange(start - 1, len(row)), sequences[i][start:], number + i))
    common = common_prefix(hosts)
    if not (share_prefixes and len(hosts) > 1 and common >= _MIN_SHARED_PREFIX):
        return [_make_row(host, (), mine) for host, mine in zip(hosts, targets, strict=True)]
    branches = tuple(host[common:] for host in hosts)
    starts = np.cumsum([common, *map(len, branches)])
    shifted = [
        (np.where(at < common, at, at - common + start), tokens, number)
        for start, mine in zip(starts, targets, strict=False)
        for at, tokens, number in mine
    ]
    return [_make_row(hosts[0][:common], branches, shifted)]


def _make_row(prefix: np.ndarray, branches: tuple[np.ndarray, ...], targets: list[Targets]) -> BranchedRow:
    positions, tokens = (np.concatenate([each[i] for each in targets]) for i in (0, 1))
    numbers = np.repeat([number for *_, number in targets], [len(at) for at, *_ in targets])
    return BranchedRow(prefix, branches, positions, tokens.astype(np.int64), numbers)


# -- batches -----------------------------------------------------------------------------------------


def group_rows(rows: Sequence[BranchedRow], max_tokens: int, max_targets: int) -> list[list[BranchedRow]]:
    """Rows of similar length together, the longest first, so that running out of memory happens at once."""
    groups: list[list[BranchedRow]] = []
    prefix = branched = targets = 0

    def length(row: BranchedRow) -> tuple[bool, int, int]:
        return bool(row.branches), len(row.prefix), row.branch_tokens

    for row in sorted(rows, key=length, reverse=True):
        prefix, branched = max(prefix, len(row.prefix)), max(branched, row.branch_tokens)
        targets += len(row.targets)
        group = groups[-1] if groups else []
        fits = (len(group) + 1) * (prefix + branched) <= max_tokens and targets <= max_targets
        if group and fits and bool(group[0].branches) == bool(row.branches):
            group.append(row)
        else:
            groups.append([row])
            prefix, branched, targets = len(row.prefix), row.branch_tokens, len(row.targets)
    return groups


def make_batch(rows: Sequence[BranchedRow], multiple: int = 1) -> ScoringBatch:
    """Rows padded to one shape, whose sides are multiples of `multiple`."""
    prefix = _round_up(max(len(row.prefix) for row in rows), multiple)
    time = prefix + _round_up(max(row.branch_tokens for row in rows), multiple)
    tokens, previous, positions = (np.zeros((len(rows), time), dtype=np.int64) for _ in range(3))
    branch = np.full((len(rows), time), -1, dtype=np.int64)
    indices = []
    for i, row in enumerate(rows):
        length = len(row.prefix)
        positions[i] = length - 1  # of padding: any that a real token could have
        start = 0
        for number, part in enumerate((row.prefix, *row.branches)):
            end = start + len(part)
            tokens[i, start:end], branch[i, start:end] = part, number
            positions[i, start:end] = np.arange(len(part)) + (length if number else 0)
            previous[i, start + 1 : end] = part[:-1]
            if number:
                previous[i, start] = row.prefix[-1]
            start = end if number else prefix
        indices.append(
            i * time + np.where(row.positions < length, row.positions, row.positions - length + prefix)
        )
    logit_positions, target_rows = np.unique(np.concatenate(indices), return_inverse=True)
    targets = np.concatenate([row.targets for row in rows])
    sequences = np.concatenate([row.sequences for row in rows])
    return ScoringBatch(
        tokens, previous, positions, branch, prefix, logit_positions, target_rows, targets, sequences
    )


def _round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


# -- scores ------------------------------------------------------------------------------------------


def score_tasks(
    model: ScoringModel, tasks: Sequence[EncodedTask], batch_tokens: int, show_progress: bool = False
) -> Scores:
    """Reads every row once, in batches of at most `batch_tokens`."""
    rank, world = rank_and_world()
    cuda = model.device.type == "cuda"
    rows = plan_rows(tasks, model.context, model.shares_prefixes)
    read = _tokens_by_task(rows, tasks)
    max_targets = max((MAX_LOGITS_GPU if cuda else MAX_LOGITS_CPU) // model.vocab_size, 1)
    results, numbers, computed = [], [], 0
    with Progress("scoring", int(read.sum()), "tok") if show_progress and not rank else nullcontext() as bar:
        for group in group_rows(rows, batch_tokens, max_targets)[rank::world]:
            batch = make_batch(group, 8 if cuda else 1)
            results.append(_target_losses(model.logits(batch), batch.target_rows, batch.targets))
            numbers.append(batch.sequences)
            computed += batch.tokens.size
            if bar is not None:
                bar.advance(world * int((batch.branch >= 0).sum()))
    sums = _sum_by_sequence(results, numbers, sum(len(task.scored) for task in tasks))
    sums, computed = _all_reduce(sums, computed, model.device)
    return Scores(sums[0] / sums[2], sums[1] == 0, read, 1 - read.sum() / max(computed, 1))


def correct_examples(task: EncodedTask, losses: np.ndarray, is_greedy: np.ndarray) -> np.ndarray:
    """Which examples are correct, from the scores of this task's own sequences."""
    ends = np.cumsum(task.choices)
    correct = np.zeros(len(task), dtype=bool)
    for i, (end, choices, gold) in enumerate(zip(ends, task.choices, task.gold, strict=True)):
        correct[i] = is_greedy[end - 1] if choices == 1 else losses[end - choices : end].argmin() == gold
    return correct


@torch.no_grad()
def score_one_at_a_time(model: ScoringModel, task: EncodedTask) -> np.ndarray:
    """The reference: which examples are correct, with the choices of one example as a batch and all logits."""
    correct = np.zeros(len(task), dtype=bool)
    for i, (prefix, suffixes, scored) in enumerate(task.examples()):
        whole = [np.concatenate([prefix, suffix])[-model.context :] for suffix in suffixes]
        sequences = [torch.from_numpy(each.astype(np.int64)).to(model.device) for each in whole]
        logits = model.all_logits(torch.nn.utils.rnn.pad_sequence(sequences, batch_first=True))
        losses, is_greedy = [], True
        for row, sequence, count in zip(logits, sequences, scored, strict=True):
            start = max(len(sequence) - count, 1)
            predicted, targets = row[start - 1 : len(sequence) - 1], sequence[start:]
            losses.append(F.cross_entropy(predicted, targets).item())
            is_greedy = bool((predicted.argmax(-1) == targets).all())
        correct[i] = is_greedy if len(suffixes) == 1 else int(np.argmin(losses)) == task.gold[i]
    return correct


def rank_and_world() -> tuple[int, int]:
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def _target_losses(logits: Tensor, target_rows: np.ndarray, targets: np.ndarray) -> Tensor:
    """(2, targets) on the device: the loss of each target, and 1 where another token is more likely."""
    row, target = (torch.from_numpy(each).to(logits.device) for each in (target_rows, targets))
    loss = logits.logsumexp(-1)[row] - logits[row, target]
    return torch.stack([loss, (logits.argmax(-1)[row] != target).float()])


def _sum_by_sequence(results: list[Tensor], numbers: list[np.ndarray], count: int) -> np.ndarray:
    """(3, sequences): nats, misses and tokens of each, in float64. This synchronizes with the device."""
    if not results:
        return np.zeros((3, count))
    nats, misses = torch.cat(results, 1).cpu().double().numpy()
    sequence = np.concatenate(numbers)
    return np.stack([np.bincount(sequence, each, count) for each in (nats, misses, np.ones(len(sequence)))])


def _tokens_by_task(rows: Sequence[BranchedRow], tasks: Sequence[EncodedTask]) -> np.ndarray:
    ends = np.cumsum([len(task.scored) for task in tasks])
    owners = np.searchsorted(ends, [row.sequences[0] for row in rows], side="right")
    return np.bincount(owners, [row.tokens for row in rows], len(tasks)).astype(np.int64)


def _all_reduce(sums: np.ndarray, computed: int, device: torch.device) -> tuple[np.ndarray, int]:
    if rank_and_world()[1] == 1:
        return sums, computed
    where = device if dist.get_backend() == "nccl" else torch.device("cpu")
    together = torch.from_numpy(np.append(sums, computed)).to(where)
    dist.all_reduce(together)
    totals = together.cpu().numpy()
    return totals[:-1].reshape(sums.shape), int(totals[-1])
