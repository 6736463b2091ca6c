"""Continuous batching: which sequences are prefilled, which are decoded, and what follows from each step.

`Scheduler.step` is one iteration:

    admit     waiting sequences take idle slots of the cache, with the prefix of their prompt that is cached
    prefill   one chunk of the prompts that are not cached yet: a long one does not delay the others
    launch    one decode step for all sequences that are ready: they join and leave between any two steps
    process   the result of the step before: append tokens, emit events, detect the end of a sequence

On CUDA a step is launched before the result of the one before it is processed (async scheduling), so the device
never waits for Python. A sequence that turns out to have ended was then decoded one step too far; that token is
ignored, and the cache can be truncated (cache.py). On the CPU the result of every step is processed at once.

Samples of one prompt wait until the first of them has been prefilled, and then take copies of its slot. A sequence
that calls a tool keeps its slot and leaves the batch until the output arrives, which is then prefilled.

Only the engine's thread calls the scheduler; `engine.py` is the interface for other threads.
"""

import functools
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from nanorun.config import ModelConfig
from nanorun.console import say
from nanorun.errors import UserError
from nanorun.infer.cache import Cache, SlotPool
from nanorun.infer.forward import DecodeFactory, make_compiled_decode, make_plain_decode, prefill
from nanorun.infer.model import inference_copy
from nanorun.infer.request import MAX_TOP_LOGPROBS, Finish, Reply
from nanorun.infer.sampling import GumbelArgmax, SamplingFeatures, gumbel_argmax
from nanorun.infer.sequence import SequenceState
from nanorun.infer.speculate import Drafter, DraftModel, PromptLookup
from nanorun.infer.step import GreedySample, InFlightStep, Stepper, capture_cuda_graph
from nanorun.model.gpt import GPT
from nanorun.model.kernels import kernels_run_on

MAX_DRAFT_TOKENS = 16
MIN_EVENT_INTERVAL_S = 0.01  # between two steps after which events are emitted, where `events_per_s` is set


@dataclass(frozen=True)
class Settings:
    slots: int = 8  # sequences at a time; idle slots keep finished ones for reuse
    max_queue: int = 256  # samples that may wait
    prefill_tokens: int | None = None  # per step, at most; None: 512 on a CPU, 8192 on a GPU
    int8: bool = False
    speculate: Literal["lookup", "draft"] | None = None
    draft_tokens: int = 4  # of speculative decoding, per step
    graphs: bool = True  # on CUDA
    compile: Literal["none", "sampler", "decode"] | None = None  # None: the sampler, on CUDA
    async_scheduling: bool | None = None  # launch a step before processing the last; None: on CUDA
    threads: int | None = None  # of torch on a CPU; None: one for a small model, else torch's default
    events_per_s: int | None = None  # of all sequences together, about; None: one per step for each
    tool_threads: int = 8  # 0: tools run in the engine's thread, so that everything happens in a fixed order

    def __post_init__(self) -> None:
        for name, least in (("slots", 1), ("max_queue", 1), ("draft_tokens", 1), ("tool_threads", 0)):
            if getattr(self, name) < least:
                raise UserError(f"{name} is {getattr(self, name)}: it must be at least {least}.")
        if self.draft_tokens > MAX_DRAFT_TOKENS:
            raise UserError(
                f"draft_tokens is {self.draft_tokens}: it must be at most {MAX_DRAFT_TOKENS}, since more never pay."
            )
        if self.prefill_tokens is not None and self.prefill_tokens < 1:
            raise UserError(f"prefill_tokens is {self.prefill_tokens}: it must be at least 1.")


@dataclass
class Stats:
    """Counts since the engine was built."""

    steps: int = 0
    sampled_tokens: int = 0
    prefilled_tokens: int = 0  # of prompts and tool outputs
    reused_tokens: int = 0  # of prompts, found in the cache
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    trace: list[tuple[float, int, int]] | None = None  # per processed step, if set: time, rows, tokens

    @property
    def acceptance_rate(self) -> float:
        return self.accepted_tokens / self.drafted_tokens if self.drafted_tokens else 0.0


@dataclass(frozen=True)
class _ScheduledStep:
    step: InFlightStep
    rows: list[tuple[SequenceState, int]]  # with their version at launch


class Scheduler:
    def __init__(
        self,
        model: GPT,
        settings: Settings,
        draft: GPT | None,
        make_decode: DecodeFactory | None,
        on_finish: Callable[[SequenceState, Reply], None],
        on_tool_call: Callable[[SequenceState, Any], None],
    ) -> None:
        self.stats, self._on_finish, self._on_tool_call = Stats(), on_finish, on_tool_call
        self._settings, self._draft, self._custom_decode = settings, draft, make_decode
        self._build(model)
        cuda = self.model.device.type == "cuda"
        self._async = cuda if settings.async_scheduling is None else settings.async_scheduling
        self._prefill_tokens = settings.prefill_tokens or (8192 if cuda else 512)
        self._events_per_s, self._next_event_time = settings.events_per_s, 0.0
        self._waiting: deque[SequenceState] = deque()
        self._prefilling: list[SequenceState] = []
        self._decoding: list[SequenceState] = []
        self._calling_tools: list[SequenceState] = []
        self._in_flight: _ScheduledStep | None = None
        self._batch: tuple[list[SequenceState], SamplingFeatures] = ([], SamplingFeatures())

    def _build(self, model: GPT) -> None:
        """Everything that depends on the model's configuration: weights, caches and the decode step."""
        settings = self._settings
        self.model = inference_copy(model, int8=settings.int8)
        device = self.model.device
        cuda = device.type == "cuda"
        target = settings.compile or ("sampler" if cuda else "none")  # of torch.compile
        self._select: GumbelArgmax = gumbel_argmax if target == "none" else torch.compile(gumbel_argmax)
        speculates = settings.speculate is not None
        self._make_decode = self._custom_decode or _fastest_decode(model.config, device, target, speculates)
        self.cache = Cache(model.config, settings.slots, device, self.model.dtype)
        self.context = model.config.context
        self.models = [(self.model, self.cache)]  # and the draft model, which prefills every prompt, too
        drafter = self._drafter()
        self._pool = SlotPool([cache for _, cache in self.models])
        self.stepper = Stepper(
            self._make_decode(self.model, self.cache),
            self.cache,
            self.context,
            drafter,
            self._select,
            capture=capture_cuda_graph if cuda and settings.graphs else None,
            greedy_sample=_greedy_kernel(device),
        )

    def add(self, samples: Sequence[SequenceState]) -> None:
        """Queues the samples of one prompt."""
        first, *rest = samples
        first.siblings = rest
        self._waiting.append(first)

    def add_tool_output(self, sequence: SequenceState, tokens: Sequence[int]) -> None:
        """Continues a sequence behind the output of its tool."""
        if sequence.finish is None:
            self._calling_tools.remove(sequence)
            sequence.append_forced(tokens)
            if sequence.finish is not None:
                self._end(sequence, sequence.finish)
            else:
                self._prefilling.append(sequence)

    def cancel(self, sequence: SequenceState) -> None:
        if sequence.finish is None:
            for queue in (self._waiting, self._prefilling, self._decoding, self._calling_tools):
                if sequence in queue:
                    queue.remove(sequence)
            self._end(sequence, "cancelled")

    def load_weights(self, model: GPT) -> None:
        """Copies the model's current weights; captured graphs and cached prefixes of the old ones are dropped.

        Where the configuration has changed (windows, context, rotary embedding), everything is built again.
        """
        if model.config != self.model.config:
            self._build(model)
        else:
            self.model.load(model)
            self.stepper.set_decode(self._make_decode(self.model, self.cache))
            self._pool.clear()

    @property
    def has_work(self) -> bool:
        """Whether `step` would do anything. A sequence whose tool is running needs nothing done."""
        can_admit = self._waiting and self._pool.num_idle
        return bool(can_admit or self._prefilling or self._decoding or self._in_flight)

    @property
    def num_running(self) -> int:
        return len(self._pool.slots) - self._pool.num_idle

    @property
    def num_waiting(self) -> int:
        return sum(1 + len(sequence.siblings) for sequence in self._waiting)

    def step(self) -> None:
        while self._waiting and self._pool.num_idle:
            sequence = self._waiting.popleft()
            sequence.slot = self._pool.acquire(sequence.tokens)
            sequence.reused_tokens = sequence.slot.cached_tokens
            self.stats.reused_tokens += sequence.reused_tokens
            self._prefilling.append(sequence)
        self._prefill()
        launched = self._launch()
        if self._in_flight is not None:
            self._process(self._in_flight)
        self._in_flight = launched
        if not self._async and launched is not None:
            self._in_flight = None
            self._process(launched)

    def _prefill(self) -> None:
        """Prefills up to the budget of a step, oldest sequences first, and starts decoding those that are done."""
        batch: list[tuple[SequenceState, int]] = []
        longest = 0
        for sequence in self._prefilling:
            size = min(sequence.uncached_tokens, self._prefill_tokens)
            if size and max(longest, size) * (len(batch) + 1) <= max(self._prefill_tokens, size):
                batch.append((sequence, size))
                longest = max(longest, size)
        if batch:
            slots = [sequence.assigned_slot for sequence, _ in batch]
            starts = [slot.cached_tokens for slot in slots]
            chunks = [s.tokens[start : start + n] for (s, n), start in zip(batch, starts, strict=True)]
            for model, cache in self.models:
                prefill(model, cache, [slot.index for slot in slots], chunks, starts)
            for slot, chunk in zip(slots, chunks, strict=True):
                slot.cached_tokens += len(chunk)
                slot.high_water_mark = max(slot.high_water_mark, slot.cached_tokens)
                self.stats.prefilled_tokens += len(chunk)

        done = [sequence for sequence in self._prefilling if not sequence.uncached_tokens]
        if not done:
            return
        self._prefilling = [sequence for sequence in self._prefilling if sequence.uncached_tokens]
        ready = [sequence for first in done for sequence in (first, *self._fork(first))]
        self.stepper.write_rows(ready)
        self._decoding += ready

    def _fork(self, first: SequenceState) -> list[SequenceState]:
        """The siblings that start in copies of this slot; those without an idle slot wait for one."""
        siblings, first.siblings = first.siblings, []
        slots = self._pool.fork(first.assigned_slot, [s.tokens for s in siblings]) if siblings else []
        for sequence, slot in zip(siblings, slots, strict=False):
            sequence.slot, sequence.reused_tokens = slot, slot.cached_tokens
            self.stats.reused_tokens += slot.cached_tokens
        self._waiting.extendleft(reversed(siblings[len(slots) :]))
        return siblings[: len(slots)]

    def _launch(self) -> _ScheduledStep | None:
        sequences = [sequence for sequence in self._decoding if sequence.remaining_steps > 0]
        if not sequences:
            return None
        if sequences != self._batch[0]:
            wanted = [(sequence.request.sampling, sequence.request.logprobs) for sequence in sequences]
            self._batch = sequences, SamplingFeatures.union(wanted, MAX_TOP_LOGPROBS)
        longest, width = 0, self.stepper.tokens_per_row
        for sequence in sequences:
            sequence.steps_in_flight += 1
            slot = sequence.assigned_slot
            length = min(len(sequence.tokens) - 1 + sequence.steps_in_flight * width, self.context)
            slot.high_water_mark = max(slot.high_water_mark, length)
            longest = max(longest, length)
        slots = [sequence.assigned_slot.index for sequence in sequences]
        step = self.stepper.launch(slots, self._batch[1], longest)
        self.stats.steps += 1
        return _ScheduledStep(step, [(sequence, sequence.launch_version) for sequence in sequences])

    def _process(self, scheduled: _ScheduledStep) -> None:
        result = scheduled.step.wait()
        width = self.stepper.tokens_per_row
        total, any_left, now = 0, False, time.perf_counter()
        emit = now >= self._next_event_time  # or with the tokens of a later step
        if emit and self._events_per_s is not None:
            interval = len(scheduled.rows) / self._events_per_s
            self._next_event_time = now + max(interval, MIN_EVENT_INTERVAL_S)
        for row, (sequence, launch_version) in enumerate(scheduled.rows):
            if sequence.launch_version != launch_version:
                continue
            sequence.steps_in_flight -= 1
            tokens, length = result.tokens[row], len(sequence.tokens)
            self.stats.drafted_tokens += width - 1
            self.stats.accepted_tokens += len(tokens) - 1
            logprobs = result.row_logprobs(row, sequence.request.logprobs)
            call = sequence.append_sampled(tokens, logprobs, emit)
            total += len(sequence.tokens) - length
            sequence.assigned_slot.cached_tokens = len(sequence.tokens) - 1
            any_left = any_left or call is not None or sequence.finish is not None
            if sequence.finish is not None:
                self._end(sequence, sequence.finish)
            elif call is not None:
                sequence.launch_version, sequence.steps_in_flight = sequence.launch_version + 1, 0
                self._calling_tools.append(sequence)
                self._on_tool_call(sequence, call)
        if any_left:
            calling = set(self._calling_tools)
            self._decoding = [s for s in self._decoding if s.finish is None and s not in calling]
        self.stats.sampled_tokens += total
        if self.stats.trace is not None:
            self.stats.trace.append((time.perf_counter(), len(scheduled.rows), total))

    def _end(self, sequence: SequenceState, finish: Finish) -> None:
        sequence.launch_version += 1
        if sequence.slot is not None:
            self._pool.release(sequence.slot)
        siblings, sequence.siblings = sequence.siblings, []
        self._waiting.extendleft(reversed(siblings))
        self._on_finish(sequence, sequence.end(finish))

    def _drafter(self) -> Drafter | None:
        settings = self._settings
        if settings.speculate is None:
            return None
        if settings.speculate == "lookup":
            return PromptLookup(self.cache, settings.draft_tokens)
        if self._draft is None:
            raise UserError(
                "Speculative decoding with a draft model needs one: name a smaller model of the same tokenizer."
            )
        config, vocab_size = self._draft.config, self.model.config.vocab_size
        if config.vocab_size != vocab_size:
            raise UserError(
                f"The draft model has {config.vocab_size} tokens and the model {vocab_size}: they must share a "
                "tokenizer."
            )
        draft = inference_copy(self._draft, self.model.dtype, settings.int8)
        cache = Cache(config, settings.slots, self.model.device, self.model.dtype)
        self.models.append((draft, cache))
        self.context = min(self.context, config.context)
        decode = self._make_decode(draft, cache)
        return DraftModel(decode, cache, settings.draft_tokens, self.context, self._select)


def _fastest_decode(
    config: ModelConfig, device: torch.device, target: str, speculates: bool
) -> DecodeFactory:
    """Our kernels on a GPU, if they support the model; they cannot verify drafts, several rows of one sequence."""
    if kernels_run_on(device) and not speculates and target != "decode":
        from nanorun.infer.kernels.decode import make_fast_decode, unsupported

        fields = unsupported(config)
        if not fields:
            return make_fast_decode
        say(f"The fast decode step does not support {', '.join(fields)}: decoding with the plain model.")
    return make_compiled_decode if target == "decode" else make_plain_decode


def _greedy_kernel(device: torch.device) -> GreedySample | None:
    if not kernels_run_on(device):
        return None
    from nanorun.infer.kernels.elementwise import greedy_sample
    from nanorun.infer.kernels.language import supports_pdl

    return functools.partial(greedy_sample, pdl=supports_pdl(device))
