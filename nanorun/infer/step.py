"""A decode step as one launch: draft, decode, sample, advance. On CUDA one graph.

All that a step needs to know about a slot is on the device, in two small tables: the length of its sequence, the
token to read next, and its sampling parameters. A step takes slot indices, looks up the rest, and writes the new
state back. So the next step can be launched before the host has seen the result of the last one, and between two
steps the host only replays a graph.

A graph is captured for each batch size in 1, 2, 4, 8, … and each `SamplingFeatures`, on first use (`Engine.warm_up`
launches a step of each with the scratch slot). A batch in between is padded with the scratch slot. On the CPU the same
function runs eagerly.

A graph bakes in everything but the slots: the addresses of weights, rotary tables and caches, window sizes, and
scalars of the model as kernel arguments. Whoever changes any of that calls `invalidate`, or `set_decode` to replace
the decode function: the graphs are then captured again.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nanorun.infer.cache import Cache, on_device
from nanorun.infer.forward import Decode
from nanorun.infer.request import Logprobs
from nanorun.infer.sampling import (
    FLOAT_PARAMS,
    INT_PARAMS,
    GumbelArgmax,
    SamplingFeatures,
    SamplingParams,
    gumbel_argmax,
    sample,
)
from nanorun.infer.sequence import SequenceState
from nanorun.infer.speculate import Drafter

GreedySample = Callable[[Tensor, Tensor, Tensor], Tensor]  # logits, slots, table: `kernels/elementwise.py`
# g: tokens_per_row, one more than are drafted.
Outputs = tuple[Tensor, ...]  # counts and tokens (B, 1 + g); log-probabilities (B, g, 2); top (B, g, n), ids


@dataclass(frozen=True)
class StepResult:
    """The tokens that a step sampled for each of its rows: 1 to g."""

    tokens: list[list[int]]
    logprobs: list[list[list[float]]] | None  # per token: sampled, model
    top: tuple[list[list[list[float]]], list[list[list[int]]]] | None

    def row_logprobs(self, row: int, num_top: int | None) -> list[Logprobs] | None:
        """Per token, with the `num_top` most likely alternatives; None where none are requested."""
        if num_top is None or self.logprobs is None:
            return None
        pairs = self.logprobs[row]
        tops: list[tuple[tuple[int, float], ...]] = [()] * len(pairs)
        if num_top and self.top is not None:
            values, ids = self.top[0][row], self.top[1][row]
            tops = [
                tuple(zip(i[:num_top], v[:num_top], strict=True)) for i, v in zip(ids, values, strict=True)
            ]
        return [Logprobs(sampled, model, top) for (sampled, model), top in zip(pairs, tops, strict=True)]


@dataclass
class InFlightStep:
    """A launched step."""

    batch: int
    outputs: Outputs
    event: "torch.cuda.Event | None" = None

    def wait(self) -> StepResult:
        """Blocks until the outputs are on the host, and returns them as lists, without the rows of padding."""
        if self.event is not None:
            self.event.synchronize()
        values = [output[: self.batch].tolist() for output in self.outputs]
        return StepResult(
            tokens=[row[1 : 1 + row[0]] for row in values[0]],
            logprobs=values[1] if len(values) > 1 else None,
            top=(values[2], values[3]) if len(values) > 3 else None,
        )


@dataclass
class CapturedGraph:
    replay: Callable[[], None]
    outputs: Outputs  # overwritten by each replay
    pool: Any = None  # the memory pool, which all graphs share


Capture = Callable[[Callable[[], Outputs], Any], CapturedGraph]  # a step, and the pool of earlier graphs


@dataclass
class _GraphedStep:
    graph: CapturedGraph
    slots: Tensor  # the graph's input
    slots_on_host: list[int]  # what `slots` holds


class Stepper:
    def __init__(
        self,
        decode: Decode,
        cache: Cache,
        context: int,
        drafter: Drafter | None = None,
        select: GumbelArgmax = gumbel_argmax,
        capture: Capture | None = None,  # None: steps run eagerly
        greedy_sample: GreedySample | None = None,  # a kernel for the end of a greedy step
    ) -> None:
        self.decode, self.cache, self.drafter, self.select = decode, cache, drafter, select
        self.greedy_sample = greedy_sample if drafter is None else None
        self.max_position = context - 1  # a token there is sampled but never read: nothing can follow it
        self.tokens_per_row = 1 + (drafter.width if drafter else 0)
        device = cache.tokens.device
        # A column per slot: length, next token, maximum length (0 for the scratch slot), sampling parameters.
        self._ints = torch.zeros(3 + INT_PARAMS, cache.slots + 1, dtype=torch.long, device=device)
        self._floats = torch.ones(FLOAT_PARAMS, cache.slots + 1, device=device)
        self._capture = capture
        self._graphs: dict[tuple[int, SamplingFeatures], _GraphedStep] = {}

    def write_rows(self, sequences: Sequence[SequenceState]) -> None:
        """Writes the column of each sequence's slot, for the next launch: its length, its last token, which is read
        next, and its sampling parameters. The sequences have been prefilled."""
        slots, ints, floats = [], [], []
        for sequence in sequences:
            slot = sequence.assigned_slot
            int_params, float_params = SamplingParams.pack(sequence.request.sampling, sequence.seed)
            slots.append(slot.index)
            ints.append([slot.cached_tokens, sequence.tokens[-1], self.max_position, *int_params])
            floats.append(float_params)
        device = self._ints.device
        columns = on_device(slots, device)
        self._ints[:, columns] = on_device(ints, device).t()
        self._floats[:, columns] = on_device(floats, device).t()

    def launch(self, slots: Sequence[int], features: SamplingFeatures, longest: int) -> InFlightStep:
        """Starts one step for these slots, whose sequences have at most `longest` tokens after it."""
        if self._capture is not None:
            size = 1 << (len(slots) - 1).bit_length()
            padded = [*slots, *[self.cache.scratch] * (size - len(slots))]
            key = (size, features)
            if key not in self._graphs:
                idle = [self.cache.scratch] * size  # capturing must not advance a sequence
                rows = on_device(idle, self._ints.device)
                pool = next((step.graph.pool for step in self._graphs.values()), None)
                graph = self._capture(lambda: self._step(rows, features, None), pool)
                self._graphs[key] = _GraphedStep(graph, rows, idle)
            step = self._graphs[key]
            if step.slots_on_host != padded:
                step.slots.copy_(on_device(padded, step.slots.device))
                step.slots_on_host = padded
            step.graph.replay()
            outputs = step.graph.outputs
        else:
            rows = on_device(slots, self._ints.device)
            outputs = self._step(rows, features, min(longest, self.max_position + 1))
        if self._ints.device.type != "cuda":
            return InFlightStep(len(slots), outputs)
        outputs = tuple(output.to("cpu", non_blocking=True) for output in outputs)
        event = torch.cuda.Event()
        event.record()
        return InFlightStep(len(slots), outputs, event)

    def set_decode(self, decode: Decode) -> None:
        """Replaces the decode function, as after a change of weights."""
        self.decode = decode
        self.invalidate()

    def invalidate(self) -> None:
        """Drops all captured graphs. Their memory pool is freed with the last of them."""
        self._graphs.clear()

    def _step(self, slots: Tensor, features: SamplingFeatures, longest: int | None) -> Outputs:
        if self.greedy_sample is not None and features == SamplingFeatures():
            positions, pending = self._ints[:2].index_select(1, slots)
            return (self.greedy_sample(self.decode(slots, pending, positions, longest), slots, self._ints),)
        ints, floats = self._ints.index_select(1, slots), self._floats.index_select(1, slots)
        positions, pending, max_length = ints[:3]
        params, width = SamplingParams.unpack(ints[3:], floats), self.tokens_per_row
        rows, tokens, at = slots, pending, positions
        if self.drafter is not None:
            draft = self.drafter.propose(slots, pending, positions, params, features, longest)
            tokens = torch.cat([pending[:, None], draft], 1).flatten()  # g for each row
            at = positions[:, None] + torch.arange(width, device=slots.device)
            at = at.clamp(max=self.max_position).flatten()
            rows = slots.repeat_interleave(width)
            params = SamplingParams.unpack(
                ints[3:].repeat_interleave(width, 1), floats.repeat_interleave(width, 1)
            )
        logits = self.decode(rows, tokens, at, longest)
        history = self.cache.tokens.index_select(0, rows) if features.penalty else None
        sampled = sample(logits, params, at + 1, features, history, self.select)

        candidates = next_token = sampled.tokens.view(-1, width)
        count = torch.ones_like(candidates[:, :1])
        if self.drafter is not None:
            accepted = (candidates[:, :-1] == draft).cumprod(1).sum(1, keepdim=True)
            count, next_token = accepted + 1, candidates.gather(1, accepted)
        length = torch.minimum(positions + count[:, 0], max_length)
        self._ints[:2, slots] = torch.stack([length, next_token[:, 0]])

        outputs = [torch.cat([count, candidates], 1)]
        if sampled.logprobs is not None:
            outputs.append(sampled.logprobs.unflatten(0, (-1, width)))
        if sampled.top is not None:
            outputs += [part.unflatten(0, (-1, width)) for part in sampled.top]
        return tuple(outputs)


def capture_cuda_graph(step: Callable[[], Outputs], pool: Any) -> CapturedGraph:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):  # libraries and kernels select and load what they need, outside the graph
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
        outputs = step()
    return CapturedGraph(graph.replay, outputs, pool or graph.pool())
