"""What the device does next: which texts are read, which are decoded, and what becomes of each step.

A `turn` is one round:

    admit    waiting samples take idle slots of the cache, with what is already known of their prompts
    read     one chunk of the prompts that are not read yet: a long one does not hold up the others
    launch   one decode step for all texts that are ready: they join and leave between any two steps
    land     what the step before has chosen: append, show, notice that a text ends

On CUDA a step is launched before the one before it has landed (run-ahead), so the device never waits for
Python. A text that turns out to have ended was then decoded one step too far; that token is ignored, and
the cache can go back (cache.py). On the CPU every step lands at once.

Samples of one prompt wait until the first of them has read it, and then take copies of its slot. A text
that calls a tool keeps its slot and leaves the batch until the answer is there, which is then read like a
prompt.

All of this is one thread's business; `engine.py` is the door for the others.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from nanorun.errors import UserError
from nanorun.infer.cache import Cache
from nanorun.infer.forward import Decoder, compiled_plain, plain, prefill
from nanorun.infer.progress import Progress
from nanorun.infer.request import MOST_TOP_LOGPROBS, Finish, Logprobs, Reply
from nanorun.infer.sampling import Pick, Plan, Rules, draw
from nanorun.infer.slots import Slots
from nanorun.infer.speculate import Draft, Drafter, Lookup
from nanorun.infer.step import Flight, Landed, Row, Settle, Stepper
from nanorun.infer.weights import Weights
from nanorun.model.gpt import GPT
from nanorun.model.kernels import kernels_run_on

MOST_GUESSES = 16
SHORTEST_PAUSE_S = 0.01  # between two events of a text, where `events_per_s` spaces them


@dataclass(frozen=True)
class Settings:
    slots: int = 8  # texts at a time; idle ones keep finished texts for reuse
    max_queue: int = 256  # samples that may wait
    prefill_tokens: int | None = None  # read between two steps at most; None: 512 on a CPU, 8192 on a GPU
    int8: bool = False
    speculate: Literal["lookup", "draft"] | None = None
    guesses: int = 4  # of speculation, at a time
    graphs: bool = True  # on CUDA
    compile: Literal["nothing", "draw", "decode"] | None = None  # by torch; None: the draw, on CUDA
    run_ahead: bool | None = None  # launch a step before the last has landed; None: on CUDA
    threads: int | None = None  # torch's on a CPU, while it works; None: one for a small model, else as ever
    events_per_s: int | None = None  # of all texts together, about; None: one a step for each
    tool_threads: int = 8  # 0: quick tools run in the engine's own, so that all happens in one fixed order

    def __post_init__(self) -> None:
        for name, least in (("slots", 1), ("max_queue", 1), ("guesses", 1), ("tool_threads", 0)):
            if getattr(self, name) < least:
                raise UserError(f"{name} is {getattr(self, name)}: it must be at least {least}.")
        if self.guesses > MOST_GUESSES:
            raise UserError(
                f"guesses is {self.guesses}: more than {MOST_GUESSES} are never worth their time."
            )
        if self.prefill_tokens is not None and self.prefill_tokens < 1:
            raise UserError(f"prefill_tokens is {self.prefill_tokens}: it must be at least 1.")


@dataclass
class Stats:
    """Counts since the engine was built."""

    steps: int = 0
    tokens: int = 0  # sampled
    read: int = 0  # tokens of prompts and of tools' answers
    reused: int = 0  # tokens of prompts found in the cache
    guessed: int = 0
    accepted: int = 0
    trace: list[tuple[float, int, int]] | None = None  # per landing, where wanted: time, rows, tokens

    @property
    def acceptance(self) -> float:
        """The share of guesses that were right."""
        return self.accepted / self.guessed if self.guessed else 0.0


@dataclass(frozen=True)
class _Launched:
    flight: Flight
    rows: list[tuple[Progress, int]]  # with their epoch at launch


class Scheduler:
    def __init__(
        self,
        model: GPT,
        settings: Settings,
        draft: GPT | None,
        decoder: Decoder | None,
        ended: Callable[[Progress, Reply], None],
        called: Callable[[Progress, Any], None],
    ) -> None:
        self.stats, self._ended, self._called = Stats(), ended, called
        self.weights = Weights.of(model, int8=settings.int8)
        device = self.weights.device
        cuda = device.type == "cuda"
        compiling = settings.compile or ("draw" if cuda else "nothing")
        self._pick: Pick = draw if compiling == "nothing" else torch.compile(draw)
        self._decoder = decoder or _fastest(device, compiling, settings.speculate is not None)
        self.cache = Cache(model.config, settings.slots, device, self.weights.dtype)
        self.context = model.config.context
        self.readers = [(self.weights, self.cache)]  # and the draft model, which reads every prompt, too
        drafter = self._drafter(settings, draft)
        self._slots = Slots([cache for _, cache in self.readers])
        self.stepper = Stepper(
            self._decoder(self.weights, self.cache),
            self.cache,
            self.context,
            drafter,
            self._pick,
            graphs=cuda and settings.graphs,
            settle=_greedy_end(device),
        )
        self._run_ahead = cuda if settings.run_ahead is None else settings.run_ahead
        self._chunk = settings.prefill_tokens or (8192 if cuda else 512)
        self._events_per_s, self._next_show = settings.events_per_s, 0.0
        self._waiting: deque[Progress] = deque()
        self._reading: list[Progress] = []
        self._active: list[Progress] = []
        self._calling: list[Progress] = []
        self._launched: _Launched | None = None
        self._planned: tuple[list[Progress], Plan] = ([], Plan())

    def add(self, samples: Sequence[Progress]) -> None:
        """Samples of one prompt."""
        first, *rest = samples
        first.followers = rest
        self._waiting.append(first)

    def answer(self, sample: Progress, tokens: Sequence[int]) -> None:
        """The tool has answered: its tokens are read, then the sample goes on."""
        if sample.finish is None:
            self._calling.remove(sample)
            sample.force(tokens)
            if sample.finish is not None:
                self._end(sample, sample.finish)
            else:
                self._reading.append(sample)

    def cancel(self, sample: Progress) -> None:
        if sample.finish is None:
            for place in (self._waiting, self._reading, self._active, self._calling):
                if sample in place:
                    place.remove(sample)
            self._end(sample, "cancelled")

    def swap(self, model: GPT) -> None:
        """The model's weights of now; what the cache holds is of the old ones."""
        self.weights.load(model)
        self.stepper.renew(self._decoder(self.weights, self.cache))
        self._slots.forget()

    @property
    def busy(self) -> bool:
        """Whether a turn would do anything. A sample whose tool is running gives nothing to do."""
        waiting = self._waiting and self._slots.idle
        return bool(waiting or self._reading or self._active or self._launched)

    @property
    def busy_slots(self) -> int:
        return len(self._slots.all) - self._slots.idle

    @property
    def waiting(self) -> int:
        return sum(1 + len(sample.followers) for sample in self._waiting)

    def turn(self) -> None:
        self._admit()
        self._read()
        launched = self._launch()
        if self._launched is not None:
            self._land(self._launched)
        self._launched = launched
        if not self._run_ahead and launched is not None:
            self._launched = None
            self._land(launched)

    # -- admit and read ------------------------------------------------------------------------------

    def _admit(self) -> None:
        while self._waiting and self._slots.idle:
            sample = self._waiting.popleft()
            sample.slot = self._slots.take(sample.ids)
            sample.reused = sample.slot.held
            self.stats.reused += sample.reused
            self._reading.append(sample)

    def _read(self) -> None:
        """Reads about as many tokens as a turn may, of the samples that came first."""
        batch: list[tuple[Progress, int]] = []
        longest = 0
        for sample in self._reading:
            size = min(sample.unread, self._chunk)
            if size and max(longest, size) * (len(batch) + 1) <= max(self._chunk, size):
                batch.append((sample, size))
                longest = max(longest, size)
        if batch:
            self._prefill(batch)
        ready = [sample for sample in self._reading if not sample.unread]
        if ready:
            self._reading = [sample for sample in self._reading if sample.unread]
            self._arm([sample for first in ready for sample in (first, *self._fork(first))])

    def _prefill(self, batch: Sequence[tuple[Progress, int]]) -> None:
        slots = [sample.placed for sample, _ in batch]
        starts = [slot.held for slot in slots]
        chunks = [sample.ids[at : at + n] for (sample, n), at in zip(batch, starts, strict=True)]
        for weights, cache in self.readers:
            prefill(weights, cache, [slot.number for slot in slots], chunks, starts)
        for slot, chunk in zip(slots, chunks, strict=True):
            slot.held += len(chunk)
            slot.high = max(slot.high, slot.held)
            self.stats.read += len(chunk)

    def _fork(self, first: Progress) -> list[Progress]:
        """The samples that could go on in copies of this one's slot; the others wait for a slot."""
        rest, first.followers = first.followers, []
        slots = self._slots.fork(first.placed, [sample.ids for sample in rest]) if rest else []
        for sample, slot in zip(rest, slots, strict=False):
            sample.slot, sample.reused = slot, slot.held
            self.stats.reused += slot.held
        self._waiting.extendleft(reversed(rest[len(slots) :]))
        return rest[: len(slots)]

    def _arm(self, samples: Sequence[Progress]) -> None:
        rows = []
        for sample in samples:
            slot, rules = sample.placed, Rules.packed(sample.request.sampling, sample.seed)
            rows.append(Row(slot.number, slot.held, sample.ids[-1], *rules))
        self.stepper.arm(rows)
        self._active += samples

    # -- launch and land -----------------------------------------------------------------------------

    def _launch(self) -> _Launched | None:
        samples = [sample for sample in self._active if sample.steps_left > 0]
        if not samples:
            return None
        if samples != self._planned[0]:
            wishes = [(sample.request.sampling, sample.request.logprobs) for sample in samples]
            self._planned = samples, Plan.of(wishes, MOST_TOP_LOGPROBS)
        longest, width = 0, self.stepper.tokens_per_row
        for sample in samples:
            sample.in_flight += 1
            slot = sample.placed
            reach = min(len(sample.ids) - 1 + sample.in_flight * width, self.context)
            slot.high = max(slot.high, reach)
            longest = max(longest, reach)
        numbers = [sample.placed.number for sample in samples]
        flight = self.stepper.launch(numbers, self._planned[1], longest)
        self.stats.steps += 1
        return _Launched(flight, [(sample, sample.epoch) for sample in samples])

    def _land(self, launched: _Launched) -> None:
        landed = launched.flight.land()
        width = self.stepper.tokens_per_row
        total, leaving, show = 0, False, self._shows(len(launched.rows))
        for i, (sample, epoch) in enumerate(launched.rows):
            if sample.epoch != epoch:
                continue
            sample.in_flight -= 1
            tokens, before = landed.tokens[i], len(sample.ids)
            self.stats.guessed += width - 1
            self.stats.accepted += len(tokens) - 1
            call = sample.take(tokens, _logprobs(landed, i, sample), show)
            total += len(sample.ids) - before
            sample.placed.held = len(sample.ids) - 1
            leaving = leaving or call is not None or sample.finish is not None
            if sample.finish is not None:
                self._end(sample, sample.finish)
            elif call is not None:
                sample.epoch, sample.in_flight = sample.epoch + 1, 0
                self._calling.append(sample)
                self._called(sample, call)
        if leaving:
            gone = set(self._calling)
            self._active = [s for s in self._active if s.finish is None and s not in gone]
        self.stats.tokens += total
        if self.stats.trace is not None:
            self.stats.trace.append((time.perf_counter(), len(launched.rows), total))

    def _shows(self, rows: int) -> bool:
        """Whether texts show what they have, or wait for the next steps' tokens."""
        if self._events_per_s is None:
            return True
        now = time.perf_counter()
        if now < self._next_show:
            return False
        self._next_show = now + max(rows / self._events_per_s, SHORTEST_PAUSE_S)
        return True

    def _end(self, sample: Progress, finish: Finish) -> None:
        sample.epoch += 1
        if sample.slot is not None:
            self._slots.release(sample.slot)
        followers, sample.followers = sample.followers, []
        self._waiting.extendleft(reversed(followers))
        self._ended(sample, sample.end(finish))

    def _drafter(self, settings: Settings, draft: GPT | None) -> Drafter | None:
        if settings.speculate is None:
            return None
        if settings.speculate == "lookup":
            return Lookup(self.cache, settings.guesses)
        if draft is None:
            raise UserError(
                "Speculation by a draft model needs one: name a smaller model of the same tokenizer."
            )
        mine, its = self.weights.config, draft.config
        if its.vocab_size != mine.vocab_size:
            raise UserError(
                f"The draft model has {its.vocab_size} tokens and the model {mine.vocab_size}: they must share "
                "a tokenizer."
            )
        weights = Weights.of(draft, self.weights.dtype, settings.int8)
        cache = Cache(its, settings.slots, self.weights.device, self.weights.dtype)
        self.readers.append((weights, cache))
        self.context = min(self.context, its.context)
        return Draft(self._decoder(weights, cache), cache, settings.guesses, self.context, self._pick)


def _fastest(device: torch.device, compiling: str, speculates: bool) -> Decoder:
    """Our kernels on a GPU, but for drafts: those are several rows of one text."""
    if kernels_run_on(device) and not speculates and compiling != "decode":
        from nanorun.infer.kernels.decoder import by_kernels

        return by_kernels
    return compiled_plain if compiling == "decode" else plain


def _greedy_end(device: torch.device) -> Settle | None:
    if not kernels_run_on(device):
        return None
    from nanorun.infer.kernels.decoder import greedy_end

    return greedy_end(device)


def _logprobs(landed: Landed, row: int, sample: Progress) -> list[Logprobs] | None:
    wanted = sample.request.logprobs
    if wanted is None or landed.logprobs is None:
        return None
    pairs = landed.logprobs[row]
    tops: list[tuple[tuple[int, float], ...]] = [()] * len(pairs)
    if wanted and landed.top is not None:
        values, ids = landed.top[0][row], landed.top[1][row]
        tops = [tuple(zip(i[:wanted], v[:wanted], strict=True)) for i, v in zip(ids, values, strict=True)]
    return [Logprobs(sampled, model, top) for (sampled, model), top in zip(pairs, tops, strict=True)]
