"""From rows to verdicts: which examples a model gets right.

A choice's score is the mean loss of its tokens that count; the lowest wins, the first of equals. A text to go
on with is right when every token that counts is the model's likeliest.

Ranks share the batches: rank r of n takes every n-th, from the r-th. Each sequence is scored whole on one
rank, so the sums that the ranks then exchange have one term each, and the verdicts do not depend on their
number. `one_at_a_time` is the usual evaluator, example by example with all logits: the slow truth, and what
speed is compared with.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from nanorun.console import Progress
from nanorun.evals.core_model import CausalModel
from nanorun.evals.core_prompts import Encoded
from nanorun.evals.core_rows import Row, group_rows, make_batch, plan_rows

MOST_LOGITS_GPU = 2**29  # of a batch: 2 GiB in fp32
MOST_LOGITS = 2**25


@dataclass(frozen=True)
class Scores:
    """Of all sequences of all tasks, in their order."""

    losses: np.ndarray  # mean nats of the tokens that count
    likeliest: np.ndarray  # whether each of them is the argmax
    tokens: np.ndarray  # (tasks,) that were read, without padding
    padding: float  # its share of all that was computed


def score(model: CausalModel, tasks: Sequence[Encoded], batch_tokens: int, watched: bool = False) -> Scores:
    """Reads every row once, in batches of at most so many tokens; `watched` shows how far it is."""
    rank, world = ranks()
    cuda = model.device.type == "cuda"
    rows = plan_rows(tasks, model.context, model.shares_trunks)
    read = _tokens_by_task(rows, tasks)
    most_wanted = max((MOST_LOGITS_GPU if cuda else MOST_LOGITS) // model.vocab_size, 1)
    judged, numbers, padded = [], [], 0
    with Progress("scoring", int(read.sum()), "tok") if watched and not rank else nullcontext() as bar:
        for group in group_rows(rows, batch_tokens, most_wanted)[rank::world]:
            batch = make_batch(group, 8 if cuda else 1)
            judged.append(judge(model.logits(batch), batch.which, batch.targets))
            numbers.append(batch.sequences)
            padded += batch.tokens.size
            if bar is not None:
                bar.advance(world * batch.real)
    sums = _by_sequence(judged, numbers, sum(len(task.tails) for task in tasks))
    sums, padded = _over_ranks(sums, padded, model.device)
    return Scores(sums[0] / sums[2], sums[1] == 0, read, 1 - read.sum() / max(padded, 1))


def judge(logits: Tensor, which: np.ndarray, targets: np.ndarray) -> Tensor:
    """The loss of each target at its place, and whether another token is likelier: (2, targets), on the device."""
    place, target = (torch.from_numpy(each).to(logits.device) for each in (which, targets))
    loss = logits.logsumexp(-1)[place] - logits[place, target]
    return torch.stack([loss, (logits.argmax(-1)[place] != target).float()])


def _by_sequence(judged: list[Tensor], numbers: list[np.ndarray], count: int) -> np.ndarray:
    """(3, sequences): nats, misses and tokens of each, in float64. Here the host waits for the device."""
    if not judged:
        return np.zeros((3, count))
    nats, misses = torch.cat(judged, 1).cpu().double().numpy()
    whose = np.concatenate(numbers)
    return np.stack([np.bincount(whose, each, count) for each in (nats, misses, np.ones(len(whose)))])


def _tokens_by_task(rows: Sequence[Row], tasks: Sequence[Encoded]) -> np.ndarray:
    ends = np.cumsum([len(task.tails) for task in tasks])
    owners = np.searchsorted(ends, [row.sequences[0] for row in rows], side="right")
    return np.bincount(owners, [row.tokens for row in rows], len(tasks)).astype(np.int64)


def ranks() -> tuple[int, int]:
    """Which of the processes that share the work this one is, and how many they are."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def _over_ranks(sums: np.ndarray, padded: int, device: torch.device) -> tuple[np.ndarray, int]:
    if ranks()[1] == 1:
        return sums, padded
    where = device if dist.get_backend() == "nccl" else torch.device("cpu")
    together = torch.from_numpy(np.append(sums, padded)).to(where)
    dist.all_reduce(together)
    whole = together.cpu().numpy()
    return whole[:-1].reshape(sums.shape), int(whole[-1])


def verdicts(task: Encoded, losses: np.ndarray, likeliest: np.ndarray) -> np.ndarray:
    """Which examples are right, from the scores of this task's own sequences."""
    ends = np.cumsum(task.choices)
    right = np.zeros(len(task), dtype=bool)
    for i, (end, choices, gold) in enumerate(zip(ends, task.choices, task.gold, strict=True)):
        right[i] = likeliest[end - 1] if choices == 1 else losses[end - choices : end].argmin() == gold
    return right


@torch.no_grad()
def one_at_a_time(
    all_logits: Callable[[Tensor], Tensor], task: Encoded, context: int, device: torch.device
) -> np.ndarray:
    """The verdicts of the usual evaluator: an example's choices as a small batch, logits of everything."""
    right = np.zeros(len(task), dtype=bool)
    for i, (trunk, tails, scored) in enumerate(task.examples()):
        wholes = [torch.from_numpy(np.concatenate([trunk, t])[-context:].astype(np.int64)) for t in tails]
        tokens = torch.nn.utils.rnn.pad_sequence(wholes, batch_first=True).to(device)
        logits = all_logits(tokens)
        losses, likeliest = [], True
        for row, whole, count in zip(logits, wholes, scored.tolist(), strict=True):
            start = max(len(whole) - count, 1)
            said, meant = row[start - 1 : len(whole) - 1], whole[start:].to(device)
            losses.append(F.cross_entropy(said, meant).item())
            likeliest = bool((said.argmax(-1) == meant).all())
        right[i] = likeliest if len(tails) == 1 else int(np.argmin(losses)) == task.gold[i]
    return right
