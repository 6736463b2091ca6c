"""Connections, and limits for clients that keep the server waiting.

The server waits for a client in three phases: for the headers of its next request, for the body, and for the client to
read the response. Each phase has a deadline, after which the connection is closed. If there are too many connections,
the one that has waited longest is closed, so that idle connections cannot keep others out. A connection whose request
is being answered is not closed; if there are no others, a new one gets 503.

The parser is always h11, and not the faster one that uvicorn prefers where it is installed: h11 limits the size of
headers. It checks the limit whenever headers are incomplete, and it parses all that it has received before the event
loop continues. So it receives a few kilobytes at a time.
"""

import asyncio
import logging
import resource
from http import HTTPStatus
from typing import Any, Literal

from uvicorn.protocols.http.h11_impl import H11Protocol

from nanorun.serve.errors import ApiError
from nanorun.serve.metrics import Metrics
from nanorun.serve.options import RequestLimits

READ_BYTES = 8 * 2**10
CHECK_S = 0.5  # how late a deadline may be noticed
log = logging.getLogger("nanorun.serve")

Phase = Literal["headers", "body", "response"]


class ConnectionPool:
    """The connections that wait for their clients, the oldest first, with their deadlines."""

    def __init__(self, limits: RequestLimits, metrics: Metrics) -> None:
        self.metrics = metrics
        self.buffer = bytearray(READ_BYTES)  # of the connection that receives just now
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        is_limited = files != resource.RLIM_INFINITY
        self.max_connections = min(limits.connections, files * 3 // 4) if is_limited else limits.connections
        self._seconds: dict[Phase, float] = {
            "headers": limits.idle_s,
            "body": limits.body_s + 5,  # middleware.py responds after body_s
            "response": limits.stall_s,
        }
        self._deadlines: dict[Connection, float] = {}

    def create_protocol(self, **options: Any) -> "Connection":
        return Connection(self, **options)

    def wait(self, connection: "Connection", phase: Phase | None) -> None:
        """`phase` begins. None: the connection does not wait for its client."""
        self._deadlines.pop(connection, None)
        if phase is not None:
            self._deadlines[connection] = connection.loop.time() + self._seconds[phase]

    def make_room(self, newest: "Connection") -> None:
        log.warning(
            "%d connections are open, the most that this server accepts: those that wait for their clients are closed.",
            self.max_connections,
        )
        oldest = next(iter(self._deadlines))
        if oldest is newest:
            message = f"Too many connections (at most {self.max_connections}). Try again later."
            newest.refuse(ApiError(503, message, "too_many_connections", headers={"Retry-After": "1"}))
        else:
            oldest.transport.abort()
        self._drop(oldest)

    async def close_overdue(self) -> None:
        """Runs as long as the server."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(CHECK_S)
            now = loop.time()
            for connection in [each for each, deadline in self._deadlines.items() if deadline <= now]:
                connection.transport.abort()  # `close` would wait for a client that does not read
                self._drop(connection)

    def _drop(self, connection: "Connection") -> None:
        del self._deadlines[connection]
        self.metrics.dropped_connections += 1


class Connection(H11Protocol, asyncio.BufferedProtocol):
    def __init__(self, pool: ConnectionPool, **options: Any) -> None:
        super().__init__(**options)
        self._pool = pool
        self._phase: Phase | None = None

    def get_buffer(self, sizehint: int) -> bytearray:
        return self._pool.buffer

    def buffer_updated(self, nbytes: int) -> None:
        self.data_received(bytes(self._pool.buffer[:nbytes]))

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._pool.metrics.connections += 1
        self._update_phase()
        if len(self.connections) > self._pool.max_connections:
            self._pool.make_room(self)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self.timeout_keep_alive_task is not None:  # uvicorn keeps it, and so the connection, after a reset
            self.timeout_keep_alive_task.cancel()
        self._pool.metrics.connections -= 1
        self._pool.wait(self, None)

    def handle_events(self) -> None:
        super().handle_events()
        self._update_phase()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._update_phase()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._update_phase()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._update_phase()

    def send_400_response(self, msg: str) -> None:
        self.refuse(
            ApiError(400, "This is not a valid HTTP request, or its headers are too long.", "invalid_http")
        )

    def refuse(self, error: ApiError) -> None:
        """Responds without the app, and closes the connection."""
        body = error.body.encode()
        headers = {"Content-Type": "application/json", "Content-Length": len(body), "Connection": "close"}
        lines = [f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}"]
        lines += [f"{name}: {value}" for name, value in {**headers, **error.headers}.items()]
        self.transport.write("\r\n".join([*lines, "", ""]).encode() + body)
        self.transport.close()

    def _update_phase(self) -> None:
        if self not in self.connections:
            return  # it is lost
        cycle = self.cycle
        phase: Phase | None = None
        if self.flow.write_paused:
            phase = "response"
        elif cycle is None or cycle.response_complete:
            phase = "headers"
        elif cycle.more_body:
            phase = "body"
        if phase != self._phase:
            self._phase = phase
            self._pool.wait(self, phase)
