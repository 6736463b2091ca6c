"""A decode step as one thing to launch: guess, decode, sample, move on. On CUDA one graph.

All that a step needs to know of a slot is on the device, in two small tables: how long its text is, which
token it reads next, and how it samples. A step takes the numbers of the slots, finds the rest by them, and
writes back where each text now stands. So the next step can be launched before anybody has seen what the
last one chose, and the host has nothing to do between two steps but to replay a graph.

A graph is captured for each batch size in 1, 2, 4, 8, … and each `Plan`, when first needed or by `warm`.
A batch in between is filled up with the scratch slot. On the CPU the same function runs as it is.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nanorun.infer.cache import Cache
from nanorun.infer.forward import Decode
from nanorun.infer.sampling import FLOATS, INTS, Plan, Rules, sample
from nanorun.infer.speculate import Drafter

Outputs = tuple[Tensor, ...]  # counts and tokens (B, 1 + g); log-probabilities (B, g, 2); top (B, g, n), ids


@dataclass(frozen=True)
class Row:
    """A slot that is ready to go on: it holds `length` tokens, and reads `pending` next."""

    slot: int
    length: int
    pending: int
    ints: list[int]
    floats: list[float]


@dataclass(frozen=True)
class Landed:
    """What a step chose for each of its rows: 1 to g tokens."""

    tokens: list[list[int]]
    logprobs: list[list[list[float]]] | None  # per token: sampled, model
    top: tuple[list[list[list[float]]], list[list[list[int]]]] | None


@dataclass
class Flight:
    """A launched step; `land` waits for it."""

    batch: int
    outputs: Outputs
    event: "torch.cuda.Event | None" = None

    def land(self) -> Landed:
        if self.event is not None:
            self.event.synchronize()
        found = [output[: self.batch].tolist() for output in self.outputs]
        tokens = [row[1 : 1 + row[0]] for row in found[0]]
        return Landed(
            tokens,
            found[1] if len(found) > 1 else None,
            (found[2], found[3]) if len(found) > 3 else None,
        )


@dataclass
class _Captured:
    graph: "torch.cuda.CUDAGraph"
    slots: Tensor
    outputs: Outputs
    holds: list[int]  # what `slots` was last filled with


class Stepper:
    def __init__(
        self,
        decode: Decode,
        cache: Cache,
        context: int,
        drafter: Drafter | None = None,
        graphs: bool = False,
        compiled: bool = False,
    ) -> None:
        self.decode, self.cache, self.drafter = decode, cache, drafter
        self.last = context - 1  # a token there is chosen but never read: nothing may follow it
        self.tokens_per_row = 1 + (drafter.width if drafter else 0)
        device = cache.tokens.device
        self._ints = torch.zeros(cache.slots + 1, 2 + INTS, dtype=torch.long, device=device)
        self._floats = torch.ones(cache.slots + 1, FLOATS, device=device)
        self._graphs: dict[tuple[int, Plan], _Captured] | None = {} if graphs else None
        self._pool: Any = None  # the memory that all graphs share
        self._run: Callable[[Tensor, Plan, int | None], Outputs] = self._step
        if compiled:
            self._run = torch.compile(self._step, dynamic=False)

    def arm(self, rows: Sequence[Row]) -> None:
        """Puts these rows on the device, ready for the next launch."""
        device = self._ints.device
        slots = torch.tensor([row.slot for row in rows], device=device)
        self._ints[slots] = torch.tensor([[r.length, r.pending, *r.ints] for r in rows], device=device)
        self._floats[slots] = torch.tensor([row.floats for row in rows], device=device)

    def launch(self, slots: Sequence[int], plan: Plan, longest: int) -> Flight:
        """One step for these slots, whose texts have at most `longest` tokens after it."""
        if self._graphs is None:
            rows = torch.tensor(list(slots), device=self._ints.device)
            outputs = self._run(rows, plan, min(longest, self.last + 1))
            if rows.device.type != "cuda":
                return Flight(len(slots), outputs)
        else:
            outputs = self._replay(list(slots), plan)
        outputs = tuple(output.to("cpu", non_blocking=True) for output in outputs)
        event = torch.cuda.Event()
        event.record()
        return Flight(len(slots), outputs, event)

    def warm(self, batches: Sequence[int], plans: Sequence[Plan]) -> None:
        for batch in batches:
            for plan in plans:
                if self._graphs is not None:
                    self._captured(bucket(batch), plan)

    def _step(self, slots: Tensor, plan: Plan, longest: int | None) -> Outputs:
        ints, floats = self._ints[slots], self._floats[slots]
        positions, pending = ints[:, 0], ints[:, 1]
        tokens, rules = pending[:, None], Rules.unpacked(ints[:, 2:], floats)
        width = self.tokens_per_row
        if self.drafter is not None:
            guesses = self.drafter.propose(slots, pending, positions, rules, plan, longest)
            tokens = torch.cat([tokens, guesses], 1)  # (B, g)
            ints, floats = ints.repeat_interleave(width, 0), floats.repeat_interleave(width, 0)
            rules = Rules.unpacked(ints[:, 2:], floats)
        at = positions[:, None] + torch.arange(width, device=slots.device)
        at = at.clamp(max=self.last).flatten()
        rows = slots.repeat_interleave(width)
        logits = self.decode(rows, tokens.flatten(), at, longest)
        history = self.cache.tokens[rows] if plan.penalty else None
        drawn = sample(logits, rules, at + 1, plan, history)

        chosen = drawn.tokens.view_as(tokens)
        right = (chosen[:, :-1] == tokens[:, 1:]).cumprod(1).sum(1, keepdim=True)
        length = (positions[:, None] + right + 1).clamp(max=self.last)
        length = torch.where(slots[:, None] == self.cache.scratch, 0, length)
        self._ints[slots, :2] = torch.cat([length, chosen.gather(1, right)], 1)

        outputs = [torch.cat([right + 1, chosen], 1)]
        if drawn.logprobs is not None:
            outputs.append(drawn.logprobs.unflatten(0, (-1, width)))
        if drawn.top is not None:
            outputs += [part.unflatten(0, (-1, width)) for part in drawn.top]
        return tuple(outputs)

    def _replay(self, slots: list[int], plan: Plan) -> Outputs:
        size = bucket(len(slots))
        captured = self._captured(size, plan)
        slots += [self.cache.scratch] * (size - len(slots))
        if captured.holds != slots:
            captured.slots.copy_(torch.tensor(slots), non_blocking=True)
            captured.holds = slots
        captured.graph.replay()
        return captured.outputs

    def _captured(self, size: int, plan: Plan) -> _Captured:
        assert self._graphs is not None
        key = (size, plan)
        if key not in self._graphs:
            slots = torch.full((size,), self.cache.scratch, device=self._ints.device)
            aside = torch.cuda.Stream()
            aside.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(aside):
                for _ in range(2):  # libraries and kernels choose and load what they need, outside the graph
                    self._run(slots, plan, None)
            torch.cuda.current_stream().wait_stream(aside)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                outputs = self._run(slots, plan, None)
            self._pool = self._pool or graph.pool()
            self._graphs[key] = _Captured(graph, slots, outputs, slots.tolist())
        return self._graphs[key]


def bucket(batch: int) -> int:
    """The batch size whose graph runs this batch: the next power of two."""
    return 1 << (batch - 1).bit_length()
