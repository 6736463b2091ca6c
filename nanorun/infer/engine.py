"""The engine: generates many sequences at once, each as if it were alone.

One thread owns the device and runs `Scheduler.step` in a loop (scheduler.py describes a step). This file is the
interface for all other threads: they put requests, cancellations and tool outputs into an inbox, which is emptied
between two steps.

    submit     starts a request; a listener receives its events        the server, the terminal
    generate   takes a batch, returns all replies                      RL, evaluations
    events     yields the events of one request

All can be used together. The result of a request does not depend on the others: in fp32 its tokens are the same
whatever else is in the batch (in bf16, up to the rounding of matmuls of a different shape).
"""

import queue
import secrets
import threading
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch

from nanorun.errors import UserError
from nanorun.hardware import keep_freed_memory
from nanorun.infer.forward import DecodeFactory
from nanorun.infer.request import MAX_TOP_LOGPROBS, Event, Logprobs, Reply, Request, Sampling, Tool
from nanorun.infer.sampling import SamplingFeatures
from nanorun.infer.scheduler import Scheduler, Settings, Stats
from nanorun.infer.sequence import SequenceState
from nanorun.model.gpt import GPT
from nanorun.text.tokenizer import Tokenizer

__all__ = ["Engine", "Event", "Handle", "Logprobs", "Reply", "Request", "Sampling", "Settings", "Tool"]

SINGLE_THREAD_BYTES = 16 * 2**20  # of matrices; on a CPU, threads that share less cost more than they save

Listener = Callable[[Event | BaseException], None]


class Handle:
    """A submitted request, for any thread."""

    def __init__(self, request: Request, listener: Listener | None, wake: Callable[[], None]) -> None:
        self.request, self.listener = request, listener
        self.on_sample: Callable[[], object] = lambda: (
            None
        )  # called in the engine's thread as each sample is done
        self.cancelled = False
        self._wake = wake
        self._replies: dict[int, Reply] = {}
        self._future: Future[list[Reply]] = Future()

    @property
    def is_done(self) -> bool:
        return self._future.done()

    def cancel(self) -> None:
        """Ends the request soon and frees its slots. A finished one stays as it is."""
        if not self.is_done:
            self.cancelled = True
            self._wake()

    def result(self, timeout: float | None = None) -> list[Reply]:
        """Waits for all samples."""
        try:
            return self._future.result(timeout)
        except TimeoutError:
            if self._future.done():
                raise  # the request's own error
            raise TimeoutError(f"The request is not done after {timeout} s.") from None

    def set_result(self, sample: int, reply: Reply) -> None:
        self._replies[sample] = reply
        self.on_sample()
        if len(self._replies) == self.request.samples and not self._future.done():
            self._future.set_result([self._replies[sample] for sample in range(self.request.samples)])

    def set_exception(self, error: BaseException) -> None:
        if not self._future.done():
            self._future.set_exception(error)
            self.notify(error)

    def notify(self, event: Event | BaseException) -> None:
        """Calls the listener. One that raises ends its own request and no other."""
        try:
            if self.listener is not None:
                self.listener(event)
        except Exception as error:
            self.listener = None
            self.set_exception(error)
            self.cancelled = True
            self._wake()


@dataclass
class _Inbox:
    """What other threads have sent to the engine's thread."""

    requests: list[Handle] = field(default_factory=list)
    tool_outputs: list[tuple[SequenceState, list[int] | BaseException]] = field(default_factory=list)
    tasks: list[tuple[Callable[[], None], Future[None]]] = field(default_factory=list)
    has_cancellations: bool = False

    def __bool__(self) -> bool:
        return bool(self.requests or self.tool_outputs or self.tasks or self.has_cancellations)


class Engine:
    """Close it, or use it in a `with` statement: that ends its thread."""

    def __init__(
        self,
        model: GPT,
        tokenizer: Tokenizer | None = None,
        settings: Settings | None = None,
        *,
        draft: GPT | None = None,
        make_decode: DecodeFactory | None = None,  # None: the fastest on this device
    ) -> None:
        self.settings, self.tokenizer = settings or Settings(), tokenizer
        self._scheduler = Scheduler(
            model, self.settings, draft, make_decode, self._on_finish, self._on_tool_call
        )
        # Of all running samples; only for the engine's thread.
        self._handles: dict[SequenceState, Handle] = {}
        self._lock = threading.Condition()
        self._inbox = _Inbox()
        self._closing = False
        self._submitted, self._queued = 0, 0  # samples in the inbox; samples that wait in the scheduler
        self._failure: BaseException | None = None
        self._default_threads = self._own_threads = torch.get_num_threads()
        copied = self._scheduler.model
        if copied.device.type == "cpu":
            keep_freed_memory()
            is_small = copied.bytes_per_step < SINGLE_THREAD_BYTES
            self._own_threads = self.settings.threads or (1 if is_small else self._default_threads)
        self._thread: threading.Thread | None = None
        self._tool_executor: ThreadPoolExecutor | None = None

    @property
    def context(self) -> int:
        return self._scheduler.context

    @property
    def vocab_size(self) -> int:
        return self._scheduler.model.config.vocab_size

    @property
    def stats(self) -> Stats:
        return self._scheduler.stats

    @property
    def broken(self) -> bool:
        """Whether its thread has failed: it accepts no more requests."""
        return self._failure is not None

    @property
    def occupancy(self) -> tuple[int, int]:
        """How many samples have a slot, and how many wait for one."""
        with self._lock:
            return self._scheduler.num_running, self._submitted + self._queued

    @property
    def memory(self) -> dict[str, int]:
        """Bytes."""
        models, caches = zip(*self._scheduler.models, strict=True)
        return {"weights": sum(m.bytes for m in models), "cache": sum(c.bytes for c in caches)}

    def generate(
        self,
        requests: Sequence[Request],
        on_reply: Callable[[], None] | None = None,
        on_sample: Callable[[], object] | None = None,
    ) -> list[Reply]:
        """All replies, in the order of the requests; the samples of one request are adjacent.

        `on_reply` is called as each request, in order, is done; `on_sample`, in the engine's thread, as each of their
        samples is done, in any order.
        """
        for request in requests:  # all, before any runs
            request.check(self.context, self.vocab_size, self.tokenizer is not None)
        handles: list[Handle] = []
        replies: list[Reply] = []
        try:
            with self._lock:  # all arrive at once: which sequences share steps is the same every time
                handles += [self.submit(request, limit_queue=False) for request in requests]
                for handle in handles:
                    handle.on_sample = on_sample or handle.on_sample
            for handle in handles:
                replies += handle.result()
                if on_reply is not None:
                    on_reply()
            return replies
        finally:
            for handle in handles:
                handle.cancel()

    def events(self, request: Request) -> Generator[Event, None, None]:
        """Events as they happen; the last one of each sample has its reply. Closing the iterator cancels."""
        received = queue.SimpleQueue[Event | BaseException]()
        handle, unfinished = self.submit(request, received.put), request.samples
        try:
            while unfinished:
                event = received.get()
                if isinstance(event, BaseException):
                    raise event
                unfinished -= event.reply is not None
                yield event
        finally:
            handle.cancel()

    def submit(
        self, request: Request, listener: Listener | None = None, *, limit_queue: bool = True
    ) -> Handle:
        """Puts a request into the inbox and wakes the engine's thread, which calls the listener: it must be quick."""
        request.check(self.context, self.vocab_size, self.tokenizer is not None)
        with self._lock:
            waiting, limit = self._submitted + self._queued, self.settings.max_queue
            if limit_queue and waiting + request.samples > max(limit, request.samples):
                raise UserError(
                    f"The queue is full: {waiting} samples wait and {request.samples} more were requested "
                    f"(at most {limit}). Please try again later."
                )
            self._wake()
            self._submitted += request.samples
            handle = Handle(request, listener, self._on_cancel)
            self._inbox.requests.append(handle)
            return handle

    def load_weights(self, model: GPT) -> None:
        """Continues with the model's current weights, as reinforcement learning does between two batches. Its
        configuration may differ from that of the old model."""

        def load() -> None:
            if self._handles:
                raise UserError("The weights cannot change while requests are running: wait for them to end.")
            self._scheduler.load_weights(model)

        self._run_in_thread(load)

    def warm_up(self, batches: Sequence[int] = (1,), samplings: Sequence[Sampling] = (Sampling(),)) -> None:
        """Captures the CUDA graphs for these batch sizes, so that no request waits for the capture."""
        features = [SamplingFeatures.union([(sampling, None)], MAX_TOP_LOGPROBS) for sampling in samplings]
        stepper = self._scheduler.stepper

        def launch() -> None:
            for batch in batches:
                for each in features:
                    stepper.launch([stepper.cache.scratch] * batch, each, longest=1)

        self._run_in_thread(launch)

    def close(self) -> None:
        """Cancels what is running and ends the thread."""
        with self._lock:
            self._closing = True
            self._lock.notify()
        if self._thread is not None:
            self._thread.join()
        if self._tool_executor is not None:
            self._tool_executor.shutdown(wait=False, cancel_futures=True)

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- other threads -------------------------------------------------------------------------------

    def _on_cancel(self) -> None:
        with self._lock:
            self._inbox.has_cancellations = True
            self._lock.notify()

    def _run_in_thread(self, task: Callable[[], None]) -> None:
        """Runs a task in the engine's thread and waits for it."""
        future: Future[None] = Future()
        with self._lock:
            self._wake()
            self._inbox.tasks.append((task, future))
        future.result()

    def _wake(self) -> None:
        if self._failure is not None:
            raise RuntimeError("The engine has failed.") from self._failure
        if self._closing:
            raise UserError("The engine is closed: build a new one.")
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="nanorun-engine", daemon=True)
            self._thread.start()
        self._lock.notify()

    # -- the engine's thread -------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            if (device := self._scheduler.model.device).type == "cuda":
                torch.cuda.set_device(device)
            torch.set_num_threads(self._own_threads)
            with torch.inference_mode():
                while (inbox := self._wait_for_work()) is not None:
                    for handle in inbox.requests:
                        request, seed = handle.request, handle.request.sampling.seed
                        seed = seed if seed is not None else secrets.randbits(62)
                        emit = handle.notify if handle.listener is not None else None
                        samples = [
                            SequenceState(request, sample, seed + sample, self.context, self.tokenizer, emit)
                            for sample in range(request.samples)
                        ]
                        self._handles.update(dict.fromkeys(samples, handle))
                        self._scheduler.add(samples)
                    self._process_tools_and_tasks(inbox)
                    self._scheduler.step()
            self._fail_all(UserError("The engine was closed before the reply was finished."))
        except BaseException as error:
            with self._lock:
                self._failure = error
            self._fail_all(error)
        finally:
            torch.set_num_threads(self._default_threads)

    def _wait_for_work(self) -> _Inbox | None:
        """The inbox, as soon as it has something or the scheduler has work; None once the engine closes."""
        with self._lock:
            while not (self._closing or self._inbox or self._scheduler.has_work):
                self._queued = self._scheduler.num_waiting
                torch.set_num_threads(self._default_threads)  # other threads may compute meanwhile
                self._lock.wait()
                torch.set_num_threads(self._own_threads)
            if self._closing:
                return None
            inbox, self._inbox = self._inbox, _Inbox()
            self._queued, self._submitted = self._scheduler.num_waiting + self._submitted, 0
            return inbox

    def _process_tools_and_tasks(self, inbox: _Inbox) -> None:
        """What the inbox has beside requests: outputs of tools, cancellations, tasks of other threads."""
        has_cancellations = inbox.has_cancellations
        for sequence, output in inbox.tool_outputs:
            if not isinstance(output, BaseException):
                self._scheduler.add_tool_output(sequence, output)
            elif (failed := self._handles.get(sequence)) is not None:
                failed.set_exception(output)  # the tool failed: its request ends, the others continue
                failed.cancelled = has_cancellations = True
        if has_cancellations:
            for sequence in [s for s, handle in self._handles.items() if handle.cancelled]:
                self._scheduler.cancel(sequence)
        for task, future in inbox.tasks:
            try:
                future.set_result(task())
            except BaseException as error:
                future.set_exception(error)

    def _on_finish(self, sequence: SequenceState, reply: Reply) -> None:
        self._handles.pop(sequence).set_result(sequence.sample, reply)

    def _on_tool_call(self, sequence: SequenceState, call: Any) -> None:
        """Runs a tool while the other sequences continue."""
        tool = sequence.tool
        assert tool is not None

        def run() -> None:
            try:
                output: list[int] | BaseException = tool.answer(call)
            except BaseException as error:
                output = error
            with self._lock:
                self._inbox.tool_outputs.append((sequence, output))
                self._lock.notify()

        if not self.settings.tool_threads:
            run()
            return
        if self._tool_executor is None:
            self._tool_executor = ThreadPoolExecutor(self.settings.tool_threads, "nanorun-tool")
        self._tool_executor.submit(run)

    def _fail_all(self, error: BaseException) -> None:
        with self._lock:
            unprocessed, self._inbox = self._inbox, _Inbox()
        for handle in {*self._handles.values(), *unprocessed.requests}:
            handle.set_exception(error)
        for _, future in unprocessed.tasks:
            future.set_exception(error)
