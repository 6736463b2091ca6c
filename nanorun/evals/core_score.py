"""From rows to verdicts: which examples a model gets right.

A choice's score is the mean loss of its tokens that count; the lowest wins, the first of equals. A text to go
on with is right when every token that counts is the model's likeliest.

Ranks share the batches: rank r of n takes every n-th, from the r-th. Each sequence is scored whole on one
rank, so the sums that the ranks then exchange have one term each, and the verdicts do not depend on their
number. `one_at_a_time` is the usual evaluator, example by example with all logits: the slow truth, and what
speed is compared with.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from nanorun.console import Progress
from nanorun.evals.core_model import CausalModel
from nanorun.evals.core_prompts import Encoded
from nanorun.evals.core_rows import group_rows, make_batch, plan_rows

MOST_LOGITS_GPU = 2**29  # of a batch: 2 GiB in fp32
MOST_LOGITS = 2**25


@dataclass(frozen=True)
class Scores:
    """Of all sequences of all tasks, in their order."""

    losses: np.ndarray  # mean nats of the tokens that count
    likeliest: np.ndarray  # whether each of them is the argmax
    batches: int  # this rank's
    tokens: int  # read, over all ranks; without padding
    padding: float  # its share of what was computed


def score(
    model: CausalModel, tasks: Sequence[Encoded], batch_tokens: int, bar: Progress | None = None
) -> Scores:
    rank, world = ranks()
    cuda = model.device.type == "cuda"
    rows = plan_rows(tasks, model.context, model.shares_trunks)
    most_wanted = max((MOST_LOGITS_GPU if cuda else MOST_LOGITS) // model.vocab_size, 1)
    groups = group_rows(rows, batch_tokens, most_wanted)[rank::world]
    losses, hits, numbers, padded = [], [], [np.zeros(0, dtype=np.int64)], 0
    for group in groups:
        batch = make_batch(group, 8 if cuda else 1)
        loss, hit = judge(model.logits(batch), batch.which, batch.targets)
        losses.append(loss)
        hits.append(hit)
        numbers.append(batch.sequences)
        padded += batch.tokens.size
        if bar is not None:
            bar.advance(batch.real)
    return _sum_up(model.device, losses, hits, np.concatenate(numbers), tasks, rows, len(groups), padded)


def judge(logits: Tensor, which: np.ndarray, targets: np.ndarray) -> tuple[Tensor, Tensor]:
    """The loss of each target at its place, and whether it is the likeliest token there. Stays on the device."""
    place, target = (torch.from_numpy(each).to(logits.device) for each in (which, targets))
    loss = logits.logsumexp(-1)[place] - logits[place, target]
    return loss, logits.argmax(-1)[place] == target


def _sum_up(
    device: torch.device,
    losses: list[Tensor],
    hits: list[Tensor],
    numbers: np.ndarray,
    tasks: Sequence[Encoded],
    rows: Sequence[object],
    batches: int,
    padded: int,
) -> Scores:
    count = sum(len(task.tails) for task in tasks)
    nats = torch.cat(losses).double().cpu().numpy() if losses else np.zeros(0)
    misses = ~torch.cat(hits).cpu().numpy() if hits else np.zeros(0, dtype=bool)
    sums = np.stack([np.bincount(numbers, each, count) for each in (nats, misses, np.ones(len(nats)))])
    tokens = sum(row.tokens for row in rows)  # type: ignore[attr-defined]
    sums, padded = _over_ranks(sums, padded, device)
    return Scores(sums[0] / sums[2], sums[1] == 0, batches, tokens, 1 - tokens / max(padded, 1))


def ranks() -> tuple[int, int]:
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def _over_ranks(sums: np.ndarray, padded: int, device: torch.device) -> tuple[np.ndarray, int]:
    import torch.distributed as dist

    if ranks()[1] == 1:
        return sums, padded
    where = device if dist.get_backend() == "nccl" else torch.device("cpu")
    together = torch.from_numpy(np.append(sums.ravel(), padded)).to(where)
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
