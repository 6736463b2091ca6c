"""The desk: takes requests to the engine that has least to do, and brings what it writes back to the event loop.

Engines write in processes of their own (remote.py), or in threads. What they say goes through one mailbox, which
wakes the loop once for all that has gathered since it last looked, not once a token. Each request has a
`Delivery`, where its events wait until somebody sends them on. A reader who takes them slowly finds more of them
at once; the engine does not notice. What can gather is bounded by the tokens of the answer.

    admit     reserves room for samples, or says 429
    deliver   submits, after which events arrive
    close     cancels what is still being written and gives the room back; once all is written, it is given
              back at once, however long the reader takes
"""

import asyncio
import contextlib
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from nanorun.infer.request import Event, Request
from nanorun.serve.errors import ApiError, engine_failed
from nanorun.serve.metrics import Metrics

Arrival = tuple[int, Event | BaseException]  # the number of the request in its delivery, what happened

WRITES_PER_S = 1_000  # of all streams together; a token then waits a little for the next, if many write


class Handle(Protocol):
    def cancel(self) -> None: ...


class Writer(Protocol):
    """What the desk needs of an engine, wherever it is."""

    @property
    def slots(self) -> int: ...
    @property
    def broken(self) -> bool: ...
    @property
    def occupancy(self) -> tuple[int, int]: ...
    @property
    def context(self) -> int: ...
    @property
    def resident_bytes(self) -> float: ...
    def submit(self, request: Request, listener: Callable[[Event | BaseException], None]) -> Handle: ...


class Desk:
    def __init__(self, engines: Sequence[Writer], max_queue: int, metrics: Metrics) -> None:
        self.engines, self.metrics = engines, metrics
        self.slots = sum(engine.slots for engine in engines)
        self.most = self.slots + max_queue
        self.draining = False
        self.streams = 0  # being sent
        self._loads = dict.fromkeys(range(len(engines)), 0)  # samples reserved
        self._mailbox: Mailbox | None = None

    def admit(self, samples: int) -> "Delivery":
        """Room for these samples, on the engine with the fewest."""
        if self.draining:
            raise ApiError(
                503, "The server is shutting down.", code="shutting_down", headers={"Retry-After": "10"}
            )
        load = sum(self._loads.values())
        if load + samples > self.most:
            raise ApiError(
                429,
                f"{load} answers are being written or wait for it, and {self.most} may: try again later.",
                code="rate_limit_exceeded",
                headers={"Retry-After": str(self._retry_after(load))},
            )
        whole = [number for number, engine in enumerate(self.engines) if not engine.broken]
        if not whole:
            raise engine_failed()
        number = min(whole, key=lambda number: self._loads[number])
        self._loads[number] += samples
        if self._mailbox is None:
            self._mailbox = Mailbox(asyncio.get_running_loop())
        return Delivery(self, number, samples, self._mailbox)

    def release(self, number: int, samples: int) -> None:
        self._loads[number] -= samples

    @property
    def pause(self) -> float:
        """Seconds between two writes of one stream: what all of them cost is bounded, however many there are."""
        return self.streams / WRITES_PER_S

    def gauges(self) -> dict[str, tuple[str, float]]:
        loads = [engine.occupancy for engine in self.engines]
        return {
            "nanorun_slots": ("Texts that can be written at a time.", self.slots),
            "nanorun_slots_busy": ("Texts that are being written.", sum(busy for busy, _ in loads)),
            "nanorun_queue": ("Samples that wait for a slot.", sum(waiting for _, waiting in loads)),
            "nanorun_reserved": ("Samples that were taken on.", sum(self._loads.values())),
            "nanorun_engines_resident_memory_bytes": (
                "Memory of the engines' processes.",
                sum(engine.resident_bytes for engine in self.engines),
            ),
            "nanorun_draining": ("1 while shutting down.", int(self.draining)),
        }

    def _retry_after(self, load: int) -> int:
        duration = self.metrics.duration
        usual = duration.total / duration.count if duration.count else 1.0
        return min(max(math.ceil(usual * (load - self.slots + 1) / self.slots), 1), 60)


class Mailbox:
    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop, self._lock = loop, threading.Lock()
        self._arrived: list[tuple[Delivery, Arrival]] = []

    def put(self, delivery: "Delivery", arrival: Arrival) -> None:
        """From an engine's thread."""
        with self._lock:
            self._arrived.append((delivery, arrival))
            if len(self._arrived) > 1:
                return  # the loop knows
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is waiting any more
            self._loop.call_soon_threadsafe(self._hand_out)

    def _hand_out(self) -> None:
        with self._lock:
            arrived, self._arrived = self._arrived, []
        for delivery, arrival in arrived:
            delivery.arrive(arrival)


class Delivery:
    """What is written for one HTTP request."""

    def __init__(self, desk: Desk, number: int, samples: int, mailbox: Mailbox) -> None:
        self.begun = time.perf_counter()
        self._desk, self._number, self._samples, self._mailbox = desk, number, samples, mailbox
        self._left, self._reserved = samples, True
        self._handles: list[Handle] = []
        self._arrived: list[Arrival] = []
        self._ready = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._due = 0.0  # when what arrives may be taken
        self._timer: asyncio.TimerHandle | None = None  # says so

    @property
    def engine(self) -> Writer:
        return self._desk.engines[self._number]

    def deliver(self, requests: Sequence[Request], *, whole: bool) -> None:
        """Submits. With `whole`, only the finished samples arrive."""
        for number, request in enumerate(requests):

            def listen(event: Event | BaseException, number: int = number) -> None:
                if not whole or isinstance(event, BaseException) or event.reply is not None:
                    self._mailbox.put(self, (number, event))

            self._handles.append(self.engine.submit(request, listen))

    def arrive(self, arrival: Arrival) -> None:
        _, event = arrival
        if isinstance(event, Event) and event.reply is not None:
            self._count(event)
        self._arrived.append(arrival)
        if not self._left or isinstance(event, BaseException) or self._loop.time() >= self._due:
            self._ready.set()
        elif self._timer is None:
            self._timer = self._loop.call_at(self._due, self._ready.set)

    async def take(self, patience: float) -> list[Arrival]:
        """All that has arrived, at least something; nothing after `patience` seconds.

        What ends an answer is taken at once, the rest after the pause that many streams need.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(patience):
                await self._ready.wait()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._ready.clear()
        self._due = self._loop.time() + self._desk.pause
        arrived, self._arrived = self._arrived, []
        return arrived

    @contextlib.contextmanager
    def streaming(self) -> Iterator[None]:
        self._desk.streams += 1
        try:
            yield
        finally:
            self._desk.streams -= 1

    def close(self) -> None:
        for handle in self._handles:
            handle.cancel()
        if self._reserved:
            self._reserved = False
            self._desk.release(self._number, self._samples)

    def _count(self, event: Event) -> None:
        reply, metrics = event.reply, self._desk.metrics
        assert reply is not None
        metrics.completion_tokens += reply.forced.count(False)
        if event.sample == 0:
            metrics.prompt_tokens += reply.prompt_tokens
            metrics.cached_tokens += reply.reused_tokens
            if reply.finish != "cancelled":
                metrics.first_token.add(reply.first_token_s)
        self._left -= 1
        if not self._left:
            self.close()
