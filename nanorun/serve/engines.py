"""The server's side of the engines: their processes, and the dispatcher that distributes requests among them.

Python runs one thread at a time, and an engine that shares an interpreter with a hundred sockets waits for its
lock again and again. So each engine, one per device, has a process of its own (worker.py). The server handles
HTTP, encodes prompts and formats responses, all in the event loop; it loads neither torch nor weights.

    RemoteModel      the model, with one RemoteEngine per device
    RemoteEngine     an engine process: submits requests to it and passes its events to listeners
    Dispatcher       admits requests within the limits, each to the engine with the least load
    ResponseStream   the events of one HTTP request until the response takes them

A client that reads slowly gets more events at a time; the engine does not notice. The events that can accumulate
are bounded by the tokens of the answer, and those with logprobs, which take a thousand times the memory, by a limit
for all clients together. Once all samples are done, their capacity is free again, even if the client still reads.

When an engine process dies, its running answers end with an error, and the dispatcher stops using it. It is not
restarted, since the next process would die of the same cause: a supervisor that polls /health may decide otherwise.
An engine sends a message every second. One that is silent for longer (stopped, or starved of memory) gets no requests
until it is heard again.
"""

import asyncio
import contextlib
import itertools
import logging
import marshal
import math
import os
import signal
import socket
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from nanorun.errors import UserError
from nanorun.infer.request import MAX_TOP_LOGPROBS, Event, Request, Sampling
from nanorun.serve import worker
from nanorun.serve.errors import ApiError, engine_failed, engine_silent
from nanorun.serve.metrics import Metrics, resident_bytes
from nanorun.serve.options import ServeOptions
from nanorun.text.store import open_tokenizer

# -P and the path of this process: the same nanorun, wherever it was started.
PROGRAM = "import sys; _, fd, pid, *sys.path = sys.argv; from nanorun.serve.worker import main; main(int(fd), int(pid))"
EXIT_TIMEOUT_S = 5.0
MAX_SILENCE_S = 10.0
MAX_BATCH = 256  # tokens that a response formats before others have their turn: with all logprobs, 15 ms
FEW_LOGPROBS = 5_000  # of one response that may always wait for its client: 500 kB
log = logging.getLogger("nanorun.serve")

Listener = Callable[[Event | BaseException], None]


class RemoteEngine:
    """Starts the process. `wait_until_ready` waits for its model, `connect` attaches it to the event loop."""

    slots: int
    context: int
    vocab_size: int

    def __init__(self, wanted: dict[str, Any], gpu: int = 0) -> None:
        self._socket, theirs = socket.socketpair()
        with theirs:
            arguments = [str(theirs.fileno()), str(os.getpid()), *sys.path]
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-c", PROGRAM, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=2,  # the server's stdout is for its address
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # Ctrl-C in a terminal is for the server alone
                env={**os.environ, "CUDA_VISIBLE_DEVICES": _visible_device(gpu)} if gpu else None,
            )
        with contextlib.suppress(ConnectionError):  # a dead process is reported by `wait_until_ready`
            self._socket.sendall(worker.pack(wanted))
        self.broken, self._ready = False, False
        self._last_message = math.inf
        self.occupancy = (0, 0)  # busy slots, queued samples
        self._listeners: dict[int, Listener] = {}  # of running requests, by key
        self._samples_left: dict[int, int] = {}
        self._keys = itertools.count(1)

    def wait_until_ready(self) -> dict[str, Any]:
        """Returns the description of the model."""
        with self._socket.makefile("rb") as messages:
            description: dict[str, Any] | None = worker.receive(messages)
        if description is None:
            raise UserError(f"{self._exit_message()} The model was not loaded yet.")
        if "problem" in description:
            raise UserError(description["problem"])
        self.slots, self.context = description["slots"], description["context"]
        self.vocab_size = description["vocab_size"]
        self._ready = True
        return description

    async def connect(self) -> None:
        # A duplicate: the event loop closes its own, and `close` needs one after the loop has ended.
        reader, self._writer = await asyncio.open_unix_connection(sock=self._socket.dup())
        self._reading = asyncio.create_task(self._read(reader))
        self._last_message = time.monotonic()

    @property
    def silent(self) -> bool:
        return time.monotonic() - self._last_message > MAX_SILENCE_S

    def submit(self, request: Request, listener: Listener) -> int:
        """Sends a request to the engine process and returns its key, which `cancel` takes. `_read` passes its events to
        the listener, in the event loop."""
        request.check(self.context, self.vocab_size, has_text=True)
        if self.broken:
            raise engine_failed()
        key = next(self._keys)
        self._listeners[key], self._samples_left[key] = listener, request.samples
        self._writer.write(worker.pack((key, worker.encode_request(request))))
        return key

    def cancel(self, key: int) -> None:
        """Ends a request soon and frees its slots. Does nothing if the request is done."""
        if key in self._listeners:
            self._writer.write(worker.pack((key, None)))

    def close(self) -> None:
        """Ends the process, even while it generates."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        if not self._ready:  # it does not read the socket while it loads the model
            self.process.kill()
        self._wait_for_exit()

    async def _read(self, reader: asyncio.StreamReader) -> None:
        try:
            while True:
                (length,) = worker.LENGTH.unpack(await reader.readexactly(worker.LENGTH.size))
                busy, queued, events = marshal.loads(await reader.readexactly(length))
                self.occupancy, self._last_message = (busy, queued), time.monotonic()
                for key, encoded in events:
                    if (listener := self._listeners.get(key)) is None:
                        continue
                    event: Event | BaseException
                    if isinstance(encoded, str):
                        event, self._samples_left[key] = RuntimeError(f"The engine failed: {encoded}"), 0
                    else:
                        event = worker.decode_event(encoded)
                        self._samples_left[key] -= event.reply is not None
                    if not self._samples_left[key]:
                        del self._listeners[key], self._samples_left[key]
                    listener(event)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        except Exception:
            log.exception("A message of the engine process could not be read.")
        self.broken, self.occupancy = True, (0, 0)
        listeners, self._listeners = self._listeners, {}
        for listener in listeners.values():
            listener(engine_failed())
        message = await asyncio.to_thread(self._exit_message)
        log.error("%s It accepts no more requests: restart the server.", message)

    def _exit_message(self) -> str:
        """The process has closed its socket: it is dead, or about to exit."""
        code = self._wait_for_exit()
        if code >= 0:
            return f"The engine process {self.process.pid} exited with code {code}: see its output above."
        name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
        cause = " (the system does this when memory runs out)" if name == "SIGKILL" else ""
        return f"The engine process {self.process.pid} was ended by {name}{cause}."

    def _wait_for_exit(self) -> int:
        try:
            return self.process.wait(EXIT_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait()


class RemoteModel:
    """The model, with one engine process per device. `close` ends the processes."""

    def __init__(self, options: ServeOptions) -> None:
        self.engines: list[RemoteEngine] = []
        wanted = {name: getattr(options, name) for name in ("model", "tools", "int8", "slots")}
        wanted["samplings"] = [vars(options.sampling), vars(Sampling(temperature=0))]  # to warm up
        try:
            self.engines.append(RemoteEngine(wanted))
            description = self.engines[0].wait_until_ready()
            # The first engine knows the number of devices, and which model is the newest.
            devices = description["devices"] if description["device"] == "cuda" else 1
            if description["device"] == "cuda" and (options.gpus or 1) > devices:
                raise UserError(f"--gpus is {options.gpus}: this machine has {devices}.")
            wanted["model"] = description["name"]
            others = range(1, min(options.gpus or devices, devices))
            self.engines += [RemoteEngine(wanted, gpu) for gpu in others]
            for engine in self.engines[1:]:
                engine.wait_until_ready()
        except BaseException:
            self.close()
            raise
        self.name: str = description["name"]
        self.step: int = description["step"]
        self.is_chat_model: bool = description["is_chat_model"]
        self.parameters: int = description["parameters"]
        self.data: str = description["data"]
        self.stop_ids: list[int] = description["stop_ids"]
        self.tool_name: str | None = description["tool_name"]
        self.tool = _tool_placeholder if self.tool_name is not None else None
        self.tokenizer = open_tokenizer(description["tokenizer"])

    async def connect(self) -> None:
        for engine in self.engines:
            await engine.connect()

    def close(self) -> None:
        for engine in self.engines:
            engine.close()


class Dispatcher:
    def __init__(self, engines: Sequence[RemoteEngine], max_queue: int, metrics: Metrics) -> None:
        self.engines, self.metrics = engines, metrics
        self.slots = sum(engine.slots for engine in engines)
        self.max_samples = self.slots + max_queue
        self.draining = False
        # Logprobs that wait for clients to read them, and their limit: twice what the slots can generate.
        self.waiting_logprobs = 0
        self.max_logprobs = sum(2 * engine.slots * engine.context * MAX_TOP_LOGPROBS for engine in engines)
        self.loads = [0] * len(engines)  # samples that each engine has reserved

    def admit(self, samples: int) -> "ResponseStream":
        """Reserves capacity for these samples on the engine with the least load; an `ApiError` where there is none."""
        if self.draining:
            raise ApiError(
                503, "The server is shutting down.", "shutting_down", headers={"Retry-After": "10"}
            )
        load = sum(self.loads)
        if load + samples > self.max_samples:
            message = f"Too many requests: {load} answers are running or queued (at most {self.max_samples})."
            retry = {"Retry-After": str(self._retry_after(load))}
            raise ApiError(429, f"{message} Try again later.", "rate_limit_exceeded", headers=retry)
        numbers = [number for number, engine in enumerate(self.engines) if not engine.broken]
        if not numbers:
            raise engine_failed()
        numbers = [number for number in numbers if not self.engines[number].silent]
        if not numbers:
            raise engine_silent()
        number = min(numbers, key=self.loads.__getitem__)
        self.loads[number] += samples
        return ResponseStream(self, number, samples)

    @property
    def occupancy(self) -> tuple[int, int]:
        """Busy slots and queued samples of all engines."""
        busy, queued = zip(*(engine.occupancy for engine in self.engines), strict=True)
        return sum(busy), sum(queued)

    def gauges(self) -> dict[str, tuple[str, float]]:
        busy, queued = self.occupancy
        memory = sum(resident_bytes(engine.process.pid) for engine in self.engines if not engine.broken)
        return {
            "nanorun_slots": ("Sequences that can be generated at a time.", self.slots),
            "nanorun_slots_busy": ("Sequences that are being generated.", busy),
            "nanorun_queue": ("Samples that wait for a slot.", queued),
            "nanorun_reserved": ("Samples that were admitted.", sum(self.loads)),
            "nanorun_engines_resident_memory_bytes": ("Memory of the engine processes.", memory),
            "nanorun_draining": ("1 while the server shuts down.", int(self.draining)),
        }

    def _retry_after(self, load: int) -> int:
        """In seconds: the mean duration of a request times the rounds of slots until one is free."""
        duration = self.metrics.duration
        mean = duration.total / duration.count if duration.count else 1.0
        return min(max(math.ceil(mean * (load - self.slots + 1) / self.slots), 1), 60)


class ResponseStream:
    """The events of one HTTP request, by choice: the samples of all its prompts, in order."""

    def __init__(self, dispatcher: Dispatcher, number: int, samples: int) -> None:
        self.start_time = time.perf_counter()
        self._dispatcher, self._number, self._engine = dispatcher, number, dispatcher.engines[number]
        self._samples = self._samples_left = samples
        self._keys: list[int] = []
        self._events: dict[int, list[Event]] = defaultdict(list)
        self._error: BaseException | None = None
        self._waiting_logprobs = 0  # of these events
        self._arrived = asyncio.Event()

    def submit(self, requests: Sequence[Request]) -> None:
        for number, request in enumerate(requests):
            first_choice = number * request.samples

            def listen(event: Event | BaseException, first_choice: int = first_choice) -> None:
                if isinstance(event, BaseException):
                    self._error = event
                else:
                    self._count(event)
                    self._hold(first_choice + event.sample, event)
                self._arrived.set()

            self._keys.append(self._engine.submit(request, listen))

    async def next_events(self, timeout: float, *, keep: bool = False) -> dict[int, Event]:
        """Waits for events and returns what is new of each choice as one event, a limited number of tokens in all;
        nothing after the timeout. With `keep`, their logprobs wait on, until `close`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                await self._arrived.wait()
        if self._error is not None:
            raise self._error
        batch, tokens = dict[int, Event](), 0
        while self._events and tokens < MAX_BATCH:
            choice, events = next(iter(self._events.items()))
            count = 0
            while count < len(events) and tokens < MAX_BATCH:
                tokens += len(events[count].ids)
                count += 1
            batch[choice] = _merge(events[:count])
            if not keep:
                self._count_logprobs(-_logprobs(batch[choice]))
            del events[:count]
            if not events:
                del self._events[choice]
        if self._events:
            await asyncio.sleep(0)
        else:
            self._arrived.clear()
        return batch

    def close(self) -> None:
        """Cancels what still runs, releases the reserved capacity, and drops the events."""
        for key in self._keys:
            self._engine.cancel(key)
        self._release()
        self._events.clear()
        self._count_logprobs(-self._waiting_logprobs)

    def _release(self) -> None:
        self._dispatcher.loads[self._number] -= self._samples
        self._samples = 0

    def _count(self, event: Event) -> None:
        reply, metrics = event.reply, self._dispatcher.metrics
        if reply is None:
            return
        metrics.completion_tokens += reply.forced.count(False)
        if event.sample == 0:
            metrics.prompt_tokens += reply.prompt_tokens
            metrics.cached_tokens += reply.reused_tokens
            if reply.finish != "cancelled":
                metrics.first_token.add(reply.first_token_s)
        self._samples_left -= 1
        if not self._samples_left:
            self._release()

    def _hold(self, choice: int, event: Event) -> None:
        """Keeps an event for the client, unless it has let too many logprobs accumulate."""
        if self._error is not None:
            return
        self._events[choice].append(event)
        self._count_logprobs(_logprobs(event))
        is_full = self._dispatcher.waiting_logprobs > self._dispatcher.max_logprobs
        if is_full and self._waiting_logprobs > FEW_LOGPROBS:
            message = "The client reads too slowly: ask for fewer logprobs."
            self._error = ApiError(408, message, "slow_client", headers={"x-should-retry": "false"})
            self.close()

    def _count_logprobs(self, change: int) -> None:
        self._waiting_logprobs += change
        self._dispatcher.waiting_logprobs += change


def _logprobs(event: Event) -> int:
    return sum([len(logprobs.top) + 1 for _, logprobs in event.logprobs])


def _merge(events: list[Event]) -> Event:
    if len(events) == 1:
        return events[0]
    ids, pieces, logprobs = (
        tuple(itertools.chain.from_iterable(getattr(event, name) for event in events))
        for name in ("ids", "pieces", "logprobs")
    )
    return Event(events[0].sample, ids, pieces, logprobs, events[-1].sampled_tokens, events[-1].reply)


def _tool_placeholder() -> NoReturn:
    raise RuntimeError("The tool runs in the engine process.")


def _visible_device(gpu: int) -> str:
    """The GPU with this number among those that this process may use."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return visible.split(",")[gpu].strip() if visible else str(gpu)
