"""The desk: takes requests to the engine that has least to do, and keeps what it writes until somebody sends it on.

Engines write in processes of their own (remote.py) and are heard in the event loop. Each request has a
`Delivery`, where its events wait. A reader who takes them slowly finds more of them at once; the engine does not
notice. What can gather is bounded by the tokens of the answer.

    admit     reserves room for samples, or says 429
    deliver   submits, after which events arrive
    close     cancels what is still being written and gives the room back; once all is written, it is given
              back at once, however long the reader takes
"""

import asyncio
import math
import time
from collections.abc import Sequence

from nanorun.infer.request import Event, Request
from nanorun.serve.errors import ApiError, engine_failed
from nanorun.serve.metrics import Metrics
from nanorun.serve.remote import RemoteEngine, RemoteHandle

Arrival = tuple[int, Event | BaseException]  # the number of the request in its delivery, what happened


class Desk:
    def __init__(self, engines: Sequence[RemoteEngine], max_queue: int, metrics: Metrics) -> None:
        self.engines, self.metrics = engines, metrics
        self.slots = sum(engine.slots for engine in engines)
        self.most = self.slots + max_queue
        self.draining = False
        self._loads = dict.fromkeys(range(len(engines)), 0)  # samples reserved

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
        return Delivery(self, number, samples)

    def release(self, number: int, samples: int) -> None:
        self._loads[number] -= samples

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


class Delivery:
    """What is written for one HTTP request."""

    def __init__(self, desk: Desk, number: int, samples: int) -> None:
        self.begun = time.perf_counter()
        self._desk, self._number, self._samples = desk, number, samples
        self._left, self._reserved = samples, True
        self._handles: list[RemoteHandle] = []
        self._arrived: list[Arrival] = []
        self._waiting: asyncio.Future[None] | None = None

    @property
    def engine(self) -> RemoteEngine:
        return self._desk.engines[self._number]

    def deliver(self, requests: Sequence[Request]) -> None:
        for number, request in enumerate(requests):

            def listen(event: Event | BaseException, number: int = number) -> None:
                self._arrive(number, event)

            self._handles.append(self.engine.submit(request, listen))

    async def take(self, patience: float) -> list[Arrival]:
        """All that has arrived, at least something; nothing after `patience` seconds."""
        if not self._arrived:
            loop = asyncio.get_running_loop()
            self._waiting = loop.create_future()
            timer = loop.call_later(patience, self._wake)
            try:
                await self._waiting
            finally:
                timer.cancel()
        arrived, self._arrived = self._arrived, []
        return arrived

    def close(self) -> None:
        for handle in self._handles:
            handle.cancel()
        if self._reserved:
            self._reserved = False
            self._desk.release(self._number, self._samples)

    def _arrive(self, number: int, event: Event | BaseException) -> None:
        if isinstance(event, Event) and event.reply is not None:
            self._count(event)
        self._arrived.append((number, event))
        self._wake()

    def _wake(self) -> None:
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

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
