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

from nanorun.infer.cache import Cache, on_device
from nanorun.infer.forward import Decode
from nanorun.infer.sampling import FLOATS, INTS, Pick, Plan, Rules, draw, sample
from nanorun.infer.speculate import Drafter

Settle = Callable[[Tensor, Tensor, Tensor], Tensor]  # logits, slots, table: kernels/settle.py
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
        pick: Pick = draw,
        graphs: bool = False,
        settle: Settle | None = None,
    ) -> None:
        self.decode, self.cache, self.drafter, self.pick = decode, cache, drafter, pick
        self.settle = (
            settle if drafter is None else None
        )  # the end of a greedy step, where there is a kernel for it
        self.last = context - 1  # a token there is chosen but never read: nothing may follow it
        self.tokens_per_row = 1 + (drafter.width if drafter else 0)
        device = cache.tokens.device
        # A column a slot: length, next token, how long it may get (the scratch slot 0), and its rules.
        self._ints = torch.zeros(3 + INTS, cache.slots + 1, dtype=torch.long, device=device)
        self._floats = torch.ones(FLOATS, cache.slots + 1, device=device)
        self._graphs: dict[tuple[int, Plan], _Captured] | None = {} if graphs else None
        self._pool: Any = None  # the memory that all graphs share

    def arm(self, rows: Sequence[Row]) -> None:
        """Puts these rows on the device, ready for the next launch."""
        device = self._ints.device
        slots = on_device([row.slot for row in rows], device)
        ints = [[row.length, row.pending, self.last, *row.ints] for row in rows]
        self._ints[:, slots] = on_device(ints, device).t()
        self._floats[:, slots] = on_device([row.floats for row in rows], device).t()

    def launch(self, slots: Sequence[int], plan: Plan, longest: int) -> Flight:
        """One step for these slots, whose texts have at most `longest` tokens after it."""
        if self._graphs is None:
            rows = on_device(slots, self._ints.device)
            outputs = self._step(rows, plan, min(longest, self.last + 1))
            if rows.device.type != "cuda":
                return Flight(len(slots), outputs)
        else:
            outputs = self._replay(list(slots), plan)
        outputs = tuple(output.to("cpu", non_blocking=True) for output in outputs)
        event = torch.cuda.Event()
        event.record()
        return Flight(len(slots), outputs, event)

    def renew(self, decode: Decode) -> None:
        """Another way to decode, as for other weights: what was captured is captured anew."""
        self.decode = decode
        if self._graphs is not None:
            self._graphs.clear()
            self._pool = None  # with the last of its graphs it is gone

    def warm(self, batches: Sequence[int], plans: Sequence[Plan]) -> None:
        for batch in batches:
            for plan in plans:
                if self._graphs is not None:
                    self._captured(bucket(batch), plan)

    def _step(self, slots: Tensor, plan: Plan, longest: int | None) -> Outputs:
        if self.settle is not None and plan == Plan():
            positions, pending = self._ints[:2].index_select(1, slots)
            return (self.settle(self.decode(slots, pending, positions, longest), slots, self._ints),)
        ints, floats = self._ints.index_select(1, slots), self._floats.index_select(1, slots)
        positions, pending, limit = ints[:3]
        rules, width = Rules.unpacked(ints[3:], floats), self.tokens_per_row
        rows, tokens, at = slots, pending, positions
        if self.drafter is not None:
            guesses = self.drafter.propose(slots, pending, positions, rules, plan, longest)
            tokens = torch.cat([pending[:, None], guesses], 1).flatten()  # g for each row
            at = positions[:, None] + torch.arange(width, device=slots.device)
            at = at.clamp(max=self.last).flatten()
            rows = slots.repeat_interleave(width)
            rules = Rules.unpacked(ints[3:].repeat_interleave(width, 1), floats.repeat_interleave(width, 1))
        logits = self.decode(rows, tokens, at, longest)
        history = self.cache.tokens.index_select(0, rows) if plan.penalty else None
        drawn = sample(logits, rules, at + 1, plan, history, self.pick)

        chosen = next_token = drawn.tokens.view(-1, width)
        count = torch.ones_like(chosen[:, :1])
        if self.drafter is not None:
            agreed = (chosen[:, :-1] == guesses).cumprod(1).sum(1, keepdim=True)
            count, next_token = agreed + 1, chosen.gather(1, agreed)
        length = torch.minimum(positions + count[:, 0], limit)
        self._ints[:2, slots] = torch.stack([length, next_token[:, 0]])

        outputs = [torch.cat([count, chosen], 1)]
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
            captured.slots.copy_(on_device(slots, captured.slots.device))
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
                    self._step(slots, plan, None)
            torch.cuda.current_stream().wait_stream(aside)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                outputs = self._step(slots, plan, None)
            self._pool = self._pool or graph.pool()
            self._graphs[key] = _Captured(graph, slots, outputs, slots.tolist())
        return self._graphs[key]


def bucket(batch: int) -> int:
    """The batch size whose graph runs this batch: the next power of two."""
    return 1 << (batch - 1).bit_length()
