"""`nanorun serve`: loads the model, listens, and shuts down gracefully.

The first SIGTERM or Ctrl-C drains the server: new requests get 503, running answers finish (within --drain
seconds), then it stops. The second one stops it at once.
"""

import asyncio
import contextlib
import errno
import gc
import logging
import math
import socket
import time
from types import FrameType
from typing import TYPE_CHECKING, Any

from nanorun import console
from nanorun.errors import UserError
from nanorun.serve.options import LOOPBACK, ServeOptions

if TYPE_CHECKING:
    from nanorun.serve.app import Service

BACKLOG = 1024  # connections that the kernel holds
ACCEPTS = 64  # connections that the event loop accepts in a row
HEADER_BYTES = 16 * 2**10
REPEAT_S = 10.0  # the same line is not logged again for so long
log = logging.getLogger("nanorun.serve")


def serve(options: ServeOptions) -> None:
    try:
        import uvicorn

        from nanorun.serve import app, connection, engines
    except ModuleNotFoundError as error:
        raise UserError(
            f"The server needs {error.name}, which is not installed: pip install 'nanorun[serve]'."
        ) from error

    listening = _listen(options)
    console.say("Loading the model ...")
    log.addHandler(logging.StreamHandler())
    logging.getLogger("uvicorn.error").addFilter(_is_not_cancellation)
    for name in ("nanorun.serve", "uvicorn.error", "asyncio"):
        logging.getLogger(name).addFilter(RepeatFilter())
    with contextlib.closing(engines.RemoteModel(options)) as model:
        service = app.Service(model, options)
        pool = connection.ConnectionPool(options.limits, service.metrics)
        config = uvicorn.Config(
            app.build_app(service),
            http=pool.create_protocol,  # type: ignore[arg-type]  # uvicorn only calls it
            h11_max_incomplete_event_size=HEADER_BYTES,
            loop="asyncio",
            backlog=ACCEPTS,
            log_level="warning",
            access_log=False,
            server_header=False,
            date_header=False,
            timeout_graceful_shutdown=5,
            timeout_keep_alive=math.ceil(options.limits.idle_s),
            ws="none",
        )

        class Server(uvicorn.Server):
            """Drains before it exits."""

            async def startup(self, sockets: list[socket.socket] | None = None) -> None:
                self.loop = asyncio.get_running_loop()
                self.loop.set_exception_handler(_log_loop_error)
                await model.connect()
                await super().startup(sockets)
                listening.listen(BACKLOG)
                self.watching = asyncio.create_task(pool.close_overdue())
                gc.freeze()  # what exists by now stays: later collections need not visit it
                _print_address(service, listening.getsockname()[1])

            def handle_exit(self, sig: int, frame: FrameType | None) -> None:
                if service.dispatcher.draining or not self.started:
                    self.should_exit = self.force_exit = True
                    return
                service.dispatcher.draining = True
                self.draining = asyncio.run_coroutine_threadsafe(self._drain(), self.loop)

            async def _drain(self) -> None:
                running = service.metrics.open_requests
                wait = f": waiting up to {options.drain_s:g} s for {running} requests" if running else ""
                console.say(f"Shutting down{wait}.")
                deadline = self.loop.time() + options.drain_s
                while service.metrics.open_requests and self.loop.time() < deadline:
                    await asyncio.sleep(0.02)
                self.should_exit = True

        Server(config).run([listening])


class RepeatFilter(logging.Filter):
    """Passes a line again only after a while, with the number of times that it was left out: clients may cause as many
    lines as they like."""

    def __init__(self) -> None:
        super().__init__()
        self._seen: dict[Any, tuple[float, int]] = {}  # last time that it passed, times it was left out since

    def filter(self, record: logging.LogRecord) -> bool:
        key, now = (record.msg, record.exc_info and record.exc_info[0]), time.monotonic()
        passed, left_out = self._seen.get(key, (-math.inf, 0))
        if now - passed < REPEAT_S:
            self._seen[key] = passed, left_out + 1
            return False
        if len(self._seen) >= 1024:
            self._seen.clear()
        self._seen[key] = now, 0
        if left_out:
            record.msg = f"{record.msg} ({left_out} more such lines were left out.)"
        return True


def _log_loop_error(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    error = context.get("exception")
    if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
        log.error("No more files can be opened, so new connections wait: raise the limit with ulimit -n.")
    else:
        loop.default_exception_handler(context)


def _is_not_cancellation(record: logging.LogRecord) -> bool:
    """Filters out requests that a second signal cancelled."""
    return not (record.exc_info and isinstance(record.exc_info[1], asyncio.CancelledError))


def _listen(options: ServeOptions) -> socket.socket:
    """Called before the model is loaded, so that a port in use is reported at once."""
    family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
    # IPPROTO_TCP explicitly: asyncio sets TCP_NODELAY only on sockets with this protocol number.
    listening = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((options.host, options.port))
        listening.listen(BACKLOG)
    except OSError as error:
        listening.close()
        raise UserError(
            f"Cannot listen on {options.host}:{options.port} ({error.strerror or error}): choose another --port "
            "or --host."
        ) from error
    listening.set_inheritable(True)
    return listening


def _print_address(service: "Service", port: int) -> None:
    options, model, slots = service.options, service.model, service.dispatcher.slots
    host = f"[{options.host}]" if ":" in options.host else options.host
    kind = "a chat model" if model.is_chat_model else "a base model, which only continues text"
    console.say(f"'{model.name}' ({kind}), {slots} answers at a time")
    if options.host not in LOOPBACK and options.api_key is None:
        console.say("Anyone who can reach this machine can use the server: --api-key sets a key.")
    console.say(f"Open http://{host}:{port} in a browser to chat. The API:")
    print(f"http://{host}:{port}/v1", flush=True)
