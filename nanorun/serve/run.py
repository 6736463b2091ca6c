"""`nanorun serve`: loads the model, listens, and ends well.

The first SIGTERM or Ctrl-C begins to drain: new requests get 503, running answers end (for --drain seconds at
most), then the server stops. The second one stops it at once.
"""

import asyncio
import logging
import socket
from types import FrameType
from typing import TYPE_CHECKING

from nanorun import console
from nanorun.errors import UserError
from nanorun.serve.options import LOOPBACK, Options

if TYPE_CHECKING:
    from nanorun.serve.app import Service


def serve(options: Options) -> None:
    try:
        import uvicorn

        from nanorun.serve import app, remote
    except ModuleNotFoundError as error:
        raise UserError(
            f"The server needs {error.name}, which is not installed: pip install 'nanorun[serve]'."
        ) from error

    listening = _listen(options)
    console.say("Loading the model ...")
    logging.getLogger("nanorun.serve").addHandler(logging.StreamHandler())
    logging.getLogger("uvicorn.error").addFilter(_is_news)
    with remote.RemoteSpeaker(options) as speaker:
        service = app.Service(speaker, options)
        config = uvicorn.Config(
            app.build(service),
            log_level="warning",
            access_log=False,
            server_header=False,
            date_header=False,
            timeout_graceful_shutdown=5,
            timeout_keep_alive=30,
            ws="none",
        )

        class Server(uvicorn.Server):
            """Drains before it exits."""

            async def startup(self, sockets: list[socket.socket] | None = None) -> None:
                self.loop = asyncio.get_running_loop()
                await speaker.connect()
                await super().startup(sockets)
                _greet(service, listening.getsockname()[1])

            def handle_exit(self, sig: int, frame: FrameType | None) -> None:
                if service.desk.draining or not self.started:
                    self.should_exit = self.force_exit = True
                    return
                service.desk.draining = True
                self.loop.call_soon_threadsafe(self._drain)

            def _drain(self) -> None:
                self.draining = self.loop.create_task(self._drained())

            async def _drained(self) -> None:
                running = service.metrics.open_requests
                more = f": {running} requests may take {options.drain_s:g} s more" if running else ""
                console.say(f"Ending{more}.")
                deadline = self.loop.time() + options.drain_s
                while service.metrics.open_requests and self.loop.time() < deadline:
                    await asyncio.sleep(0.02)
                self.should_exit = True

        Server(config).run([listening])


def _is_news(record: logging.LogRecord) -> bool:
    """Not what is cut short because somebody asked twice to end."""
    return not (record.exc_info and isinstance(record.exc_info[1], asyncio.CancelledError))


def _listen(options: Options) -> socket.socket:
    """Before the model is loaded: a port that is taken is told at once."""
    family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
    # By its name: asyncio sends small writes at once (TCP_NODELAY) only on sockets that say they are TCP's.
    listening = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((options.host, options.port))
        listening.listen(1024)
    except OSError as error:
        listening.close()
        raise UserError(
            f"The server cannot listen on {options.host}:{options.port} ({error.strerror or error}): choose "
            "another --port or --host."
        ) from error
    listening.set_inheritable(True)
    return listening


def _greet(service: "Service", port: int) -> None:
    options, speaker, slots = service.options, service.speaker, service.desk.slots
    host = f"[{options.host}]" if ":" in options.host else options.host
    kind = "a chat model" if speaker.chats else "a base model, which only continues text"
    console.say(f"'{speaker.name}' ({kind}), {slots} answers at a time")
    if options.host not in LOOPBACK and options.api_key is None:
        console.say("Anyone who can reach this machine can use it: --api-key asks for a key.")
    console.say(f"To talk to it, open http://{host}:{port} in a browser. The API:")
    print(f"http://{host}:{port}/v1", flush=True)
