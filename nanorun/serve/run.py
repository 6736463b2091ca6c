"""`nanorun serve`: loads the model, listens, and shuts down gracefully.

The first SIGTERM or Ctrl-C drains the server: new requests get 503, running answers finish (within --drain
seconds), then it stops. The second one stops it at once.
"""

import asyncio
import contextlib
import logging
import socket
from types import FrameType
from typing import TYPE_CHECKING

from nanorun import console
from nanorun.errors import UserError
from nanorun.serve.options import LOOPBACK, ServeOptions

if TYPE_CHECKING:
    from nanorun.serve.app import Service


def serve(options: ServeOptions) -> None:
    try:
        import uvicorn

        from nanorun.serve import app, engines
    except ModuleNotFoundError as error:
        raise UserError(
            f"The server needs {error.name}, which is not installed: pip install 'nanorun[serve]'."
        ) from error

    listening = _listen(options)
    console.say("Loading the model ...")
    logging.getLogger("nanorun.serve").addHandler(logging.StreamHandler())
    logging.getLogger("uvicorn.error").addFilter(_is_not_cancellation)
    with contextlib.closing(engines.RemoteModel(options)) as model:
        service = app.Service(model, options)
        config = uvicorn.Config(
            app.build_app(service),
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
                await model.connect()
                await super().startup(sockets)
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
        listening.listen(1024)
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
