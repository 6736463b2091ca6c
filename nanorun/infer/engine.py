"""The engine: many texts written at once, each request as if it were alone.

One thread owns the device and goes round in `Scheduler.turn` (schedule.py says what that is). This file is
the door for all other threads: they leave requests, cancellations and tools' answers in an inbox, which is
emptied between two turns.

    generate   takes a batch, returns all replies                          RL, evaluations
    stream     asynchronous: events of one request while it is written     the server
    events     its blocking twin                                           the terminal

All may be used together. What a request gets does not depend on the others: in fp32 its tokens are the same
whatever else is in the batch (in bf16, up to the rounding of matmuls of another shape).
"""

import asyncio
import contextlib
import queue
import secrets
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch

from nanorun.errors import UserError
from nanorun.hardware import keep_freed_memory
from nanorun.infer.forward import Decoder
from nanorun.infer.progress import Progress
from nanorun.infer.request import MOST_TOP_LOGPROBS, Event, Logprobs, Reply, Request, Sampling, Tool
from nanorun.infer.sampling import Plan
from nanorun.infer.schedule import Scheduler, Settings, Stats
from nanorun.model.gpt import GPT
from nanorun.text.tokenizer import Tokenizer

__all__ = ["Engine", "Event", "Handle", "Logprobs", "Reply", "Request", "Sampling", "Settings", "Tool"]

SMALL_STEP = 16 * 2**20  # bytes of matrices; on a CPU, threads that share less lose more by waiting

Listener = Callable[[Event | BaseException], None]


class Handle:
    """A submitted request, for any thread."""

    def __init__(self, request: Request, listener: Listener | None, wake: Callable[[], None]) -> None:
        self.request, self.listener = request, listener
        self.cancelled = False
        self._wake = wake
        self._replies: list[Reply | None] = [None] * request.samples
        self._error: BaseException | None = None
        self._done = threading.Event()

    def cancel(self) -> None:
        """Ends the request soon and frees its slots. One that is done stays as it is."""
        if not self._done.is_set():
            self.cancelled = True
            self._wake()

    def result(self, timeout: float | None = None) -> list[Reply]:
        """Waits for all samples."""
        if not self._done.wait(timeout):
            raise TimeoutError(f"The request is not done after {timeout} s.")
        if self._error is not None:
            raise self._error
        return [reply for reply in self._replies if reply is not None]

    def settle(self, number: int, reply: Reply) -> None:
        self._replies[number] = reply
        if all(reply is not None for reply in self._replies):
            self._done.set()

    def fail(self, error: BaseException) -> None:
        if not self._done.is_set():
            self._error = error
            self._done.set()
            self.tell(error)

    def tell(self, event: Event | BaseException) -> None:
        """A listener that breaks ends its own request and nobody else's."""
        try:
            if self.listener is not None:
                self.listener(event)
        except Exception as error:
            self.listener = None
            self.fail(error)
            self.cancelled = True
            self._wake()


@dataclass
class _Inbox:
    """What other threads have left for the engine's."""

    requests: list[Handle] = field(default_factory=list)
    answers: list[tuple[Progress, list[int] | BaseException]] = field(default_factory=list)
    tasks: list[Callable[[BaseException | None], None]] = field(default_factory=list)  # told why not, if so
    cancelled: bool = False  # look through the handles

    def __bool__(self) -> bool:
        return bool(self.requests or self.answers or self.tasks or self.cancelled)


class Engine:
    """Close it, or use it in a `with`: that ends its thread."""

    def __init__(
        self,
        model: GPT,
        tokenizer: Tokenizer | None = None,
        settings: Settings | None = None,
        *,
        draft: GPT | None = None,
        decoder: Decoder | None = None,  # None: the fastest that this device has
    ) -> None:
        self.settings, self.tokenizer = settings or Settings(), tokenizer
        self._scheduler = Scheduler(model, self.settings, draft, decoder, self._ended, self._call)
        self.context, self.vocab_size = self._scheduler.context, model.config.vocab_size
        self._samples: dict[Progress, Handle] = {}  # all that are not done; the engine's thread alone
        self._lock = threading.Condition()
        self._inbox = _Inbox()
        self._closing = False
        self._submitted, self._queued = 0, 0  # samples in the inbox; those that then waited for a slot
        self._failure: BaseException | None = None
        self._threads = torch.get_num_threads(), self._own_threads()
        if self._scheduler.weights.device.type == "cpu":
            keep_freed_memory()
        self._thread: threading.Thread | None = None
        self._workers: ThreadPoolExecutor | None = None

    @property
    def stats(self) -> Stats:
        return self._scheduler.stats

    @property
    def broken(self) -> bool:
        """Whether its thread has failed: it takes no more requests."""
        return self._failure is not None

    @property
    def occupancy(self) -> tuple[int, int]:
        """Samples that have a slot, and samples that wait for one."""
        with self._lock:
            return self._scheduler.busy_slots, self._submitted + self._queued

    @property
    def memory(self) -> dict[str, int]:
        """Bytes."""
        weights, caches = zip(*self._scheduler.readers, strict=True)
        return {"weights": sum(w.bytes for w in weights), "cache": sum(c.bytes for c in caches)}

    def generate(self, requests: Sequence[Request], tick: Callable[[], None] | None = None) -> list[Reply]:
        """All replies, in the order of the requests; the samples of one stand side by side.

        `tick` is called as each request in turn is done.
        """
        for request in requests:  # all are checked before any runs
            self._check(request)
        handles: list[Handle] = []
        replies: list[Reply] = []
        try:
            with self._lock:  # all arrive at once: how they share steps is the same every time
                handles += [self._submit(request, None, limited=False) for request in requests]
            for handle in handles:
                replies += handle.result()
                if tick is not None:
                    tick()
            return replies
        finally:
            for handle in handles:
                handle.cancel()

    async def stream(self, request: Request) -> AsyncIterator[Event]:
        """Events as they happen; the last one of each sample has its reply. Leaving early cancels."""
        loop, arrived = asyncio.get_running_loop(), asyncio.Queue[Event | BaseException]()

        def listen(event: Event | BaseException) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is waiting any more
                loop.call_soon_threadsafe(arrived.put_nowait, event)

        handle, left = self.submit(request, listen), request.samples
        try:
            while left:
                event = await arrived.get()
                if isinstance(event, BaseException):
                    raise event
                left -= event.reply is not None
                yield event
        finally:
            handle.cancel()

    def events(self, request: Request) -> Iterator[Event]:
        """`stream` for code that is not asynchronous."""
        arrived = queue.SimpleQueue[Event | BaseException]()
        handle, left = self.submit(request, arrived.put), request.samples
        try:
            while left:
                event = arrived.get()
                if isinstance(event, BaseException):
                    raise event
                left -= event.reply is not None
                yield event
        finally:
            handle.cancel()

    def submit(self, request: Request, listener: Listener | None = None) -> Handle:
        """Starts a request. The listener is called in the engine's thread and must be quick."""
        self._check(request)
        return self._submit(request, listener, limited=True)

    def load(self, model: GPT) -> None:
        """Goes on with the model's weights of now, as reinforcement learning does between two batches."""

        def swap() -> None:
            if self._samples:
                raise UserError("The weights cannot change while requests are running: wait for them.")
            self._scheduler.swap(model)

        self._ask(swap)

    def warm(self, batches: Sequence[int] = (1,), samplings: Sequence[Sampling] = (Sampling(),)) -> None:
        """Captures the graphs that such batches need, so that no request has to wait for it."""
        plans = [Plan.of([(sampling, None)], MOST_TOP_LOGPROBS) for sampling in samplings]
        self._ask(lambda: self._scheduler.stepper.warm(batches, plans))

    def close(self) -> None:
        """Cancels what is running and ends the thread."""
        with self._lock:
            self._closing = True
            self._lock.notify()
        if self._thread is not None:
            self._thread.join()
        if self._workers is not None:
            self._workers.shutdown(wait=False, cancel_futures=True)

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _own_threads(self) -> int:
        weights, usual = self._scheduler.weights, torch.get_num_threads()
        if weights.device.type != "cpu":
            return usual
        return self.settings.threads or (1 if weights.bytes_per_step < SMALL_STEP else usual)

    # -- the threads that ask ------------------------------------------------------------------------

    def _check(self, request: Request) -> None:
        request.check(self.context, self.vocab_size, self.tokenizer is not None)

    def _submit(self, request: Request, listener: Listener | None, limited: bool) -> Handle:
        handle = Handle(request, listener, self._cancel)
        with self._lock:
            waiting = self._submitted + self._queued
            if limited and waiting + request.samples > max(self.settings.max_queue, request.samples):
                raise UserError(
                    f"{waiting} samples wait already, and {self.settings.max_queue} may: try again later."
                )
            self._wake()
            self._submitted += request.samples
            self._inbox.requests.append(handle)
        return handle

    def _cancel(self) -> None:
        with self._lock:
            self._inbox.cancelled = True
            self._lock.notify()

    def _ask(self, task: Callable[[], None]) -> None:
        """Runs a task in the engine's thread and waits for it."""
        done, problems = threading.Event(), list[BaseException]()

        def run(problem: BaseException | None) -> None:
            try:
                if problem is not None:
                    raise problem
                with torch.inference_mode():
                    task()
            except BaseException as error:
                problems.append(error)
            done.set()

        with self._lock:
            self._wake()
            self._inbox.tasks.append(run)
        done.wait()
        if problems:
            raise problems[0]

    def _wake(self) -> None:
        if self._failure is not None:
            raise RuntimeError("The engine has failed.") from self._failure
        if self._closing:
            raise UserError("The engine is closed: build another.")
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="nanorun-engine", daemon=True)
            self._thread.start()
        self._lock.notify()

    # -- the engine's thread -------------------------------------------------------------------------

    def _work(self) -> None:
        try:
            if (device := self._scheduler.weights.device).type == "cuda":
                torch.cuda.set_device(device)
            torch.set_num_threads(self._threads[1])
            with torch.inference_mode():
                while (inbox := self._next()) is not None:
                    self._sort(inbox)
                    self._scheduler.turn()
            self._break(UserError("The engine was closed before the reply was finished."))
        except BaseException as error:
            with self._lock:
                self._failure = error
            self._break(error)
        finally:
            torch.set_num_threads(self._threads[0])

    def _next(self) -> _Inbox | None:
        """The inbox, as soon as there is something in it or the device has work; None at the end."""
        with self._lock:
            while not (self._closing or self._inbox or self._scheduler.busy):
                self._queued = self._scheduler.waiting
                torch.set_num_threads(self._threads[0])  # others may compute meanwhile
                self._lock.wait()
                torch.set_num_threads(self._threads[1])
            if self._closing:
                return None
            inbox, self._inbox = self._inbox, _Inbox()
            self._queued, self._submitted = self._scheduler.waiting + self._submitted, 0
            return inbox

    def _sort(self, inbox: _Inbox) -> None:
        for handle in inbox.requests:
            self._begin(handle)
        for sample, tokens in inbox.answers:
            if isinstance(tokens, BaseException):
                self._fail(sample, tokens)
            else:
                self._scheduler.answer(sample, tokens)
        for task in inbox.tasks:
            task(None)
        if inbox.cancelled:
            for sample in [s for s, handle in self._samples.items() if handle.cancelled]:
                self._scheduler.cancel(sample)

    def _begin(self, handle: Handle) -> None:
        request = handle.request
        seed = request.sampling.seed if request.sampling.seed is not None else secrets.randbits(62)
        emit = handle.tell if handle.listener is not None else None
        samples = [
            Progress(request, number, seed + number, self.context, self.tokenizer, emit)
            for number in range(request.samples)
        ]
        self._samples.update(dict.fromkeys(samples, handle))
        self._scheduler.add(samples)

    def _ended(self, sample: Progress, reply: Reply) -> None:
        self._samples.pop(sample).settle(sample.number, reply)

    def _call(self, sample: Progress, call: Any) -> None:
        """Runs a tool while the other texts go on."""
        tool = sample.tool
        assert tool is not None

        def run() -> None:
            try:
                answer: list[int] | BaseException = tool.answer(call)
            except BaseException as error:
                answer = error
            with self._lock:
                self._inbox.answers.append((sample, answer))
                self._lock.notify()

        if not self.settings.tool_threads:
            run()
            return
        if self._workers is None:
            self._workers = ThreadPoolExecutor(self.settings.tool_threads, "nanorun-tool")
        self._workers.submit(run)

    def _fail(self, sample: Progress, error: BaseException) -> None:
        """A tool broke: its request is over, the others are not concerned."""
        if (handle := self._samples.get(sample)) is not None:
            handle.fail(error)
            for other in [s for s, h in self._samples.items() if h is handle]:
                self._scheduler.cancel(other)

    def _break(self, error: BaseException) -> None:
        with self._lock:
            waiting, self._inbox = self._inbox, _Inbox()
        for handle in {*self._samples.values(), *waiting.requests}:
            handle.fail(error)
        for task in waiting.tasks:
            task(error)
