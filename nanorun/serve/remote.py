"""Engines in processes of their own, one a device: the server's end.

Python runs one thread at a time, and an engine that shares it with a hundred sockets waits for it again and
again. So an engine has a process for itself, and this one talks HTTP, encodes prompts and shapes answers; it
loads neither torch nor weights.

`RemoteEngine` is the part of `Engine` that serving needs, and `RemoteSpeaker` that of `Speaker`. What is said to
and fro is in `wire.py`, the other end in `worker.py`. All of it happens in the event loop: what the engine
has written since the last message arrives as one.

A process that dies takes the answers that it was writing with it: they end with an error, and the desk gives
it nothing more. It is not started again, since what killed it would kill the next: a supervisor that reads
/health may decide otherwise.
"""

import asyncio
import contextlib
import itertools
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from typing import Any, NoReturn, cast

from nanorun.errors import UserError
from nanorun.infer.request import Event, Request, Sampling
from nanorun.serve import wire
from nanorun.serve.errors import engine_failed
from nanorun.serve.metrics import resident
from nanorun.serve.options import Options
from nanorun.text.store import open_tokenizer

# -P and the path of this process: the same nanorun, wherever it was started.
PROGRAM = "import sys; _, fd, pid, *sys.path = sys.argv; from nanorun.serve.worker import main; main(int(fd), int(pid))"
END_S = 5.0  # for a process that was told to end
log = logging.getLogger("nanorun.serve")

Listener = Callable[[Event | BaseException], None]


class RemoteHandle:
    def __init__(self, engine: "RemoteEngine", key: int, samples: int, listener: Listener) -> None:
        self._engine, self._key, self._cancelled = engine, key, False
        self.left, self.listener = samples, listener

    def cancel(self) -> None:
        """Ends the request soon and frees its slots. One that is done stays as it is."""
        if self.left and not self._cancelled:
            self._cancelled = True
            self._engine.send(self._key, None)


class RemoteEngine(asyncio.Protocol):
    """Starts the process. `ready` waits for it, `connect` puts it on the event loop."""

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
                stdout=2,  # ours is for the address
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # a terminal's Ctrl-C is for the server alone
                env={**os.environ, "CUDA_VISIBLE_DEVICES": _visible(gpu)} if gpu else None,
            )
        with contextlib.suppress(ConnectionError):  # it is dead: `ready` says so
            self._socket.sendall(wire.pack(wanted))
        self.broken, self._ready = False, False
        self.occupancy = (0, 0)  # samples that have a slot, and samples that wait for one
        self._handles: dict[int, RemoteHandle] = {}
        self._keys = itertools.count(1)
        self._unpacker = wire.Unpacker()
        self._unsent: list[tuple[int, Any]] = []
        self._loop: asyncio.AbstractEventLoop
        self._transport: asyncio.Transport

    def ready(self) -> dict[str, Any]:
        """What there is to know about its model."""
        hello = wire.receive(self._socket)
        if hello is None:
            self._mourn()
        if "problem" in hello:
            raise UserError(hello["problem"])
        self.slots, self.context, self.vocab_size = hello["slots"], hello["context"], hello["vocab_size"]
        self._ready = True
        return hello

    async def connect(self) -> None:
        self._loop = asyncio.get_running_loop()
        # Of a duplicate: the loop closes its own, and `close` needs one when the loop has gone.
        await self._loop.create_unix_connection(lambda: self, sock=self._socket.dup())

    def submit(self, request: Request, listener: Listener) -> RemoteHandle:
        """Starts a request. Only for the event loop, where the listener is called, too."""
        request.check(self.context, self.vocab_size, has_text=True)
        if self.broken:
            raise engine_failed()
        key = next(self._keys)
        self._handles[key] = handle = RemoteHandle(self, key, request.samples, listener)
        self.send(key, wire.pack_request(request))
        return handle

    def send(self, key: int, said: Any) -> None:
        if not self._unsent:
            self._loop.call_soon(self._flush)
        self._unsent.append((key, said))

    def close(self) -> None:
        """Ends the process, whatever it is doing."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        if not self._ready:  # while it loads, it does not listen
            self.process.kill()
        try:
            self.process.wait(END_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    @property
    def resident_bytes(self) -> float:
        """Of its process."""
        return resident(self.process.pid) if not self.broken else 0

    # -- the event loop ------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # which uvloop's is, though not by name

    def data_received(self, data: bytes) -> None:
        for busy, waiting, written in self._unpacker.push(data):
            self.occupancy = busy, waiting
            for key, packed in written:
                self._arrive(key, packed)

    def connection_lost(self, error: Exception | None) -> None:
        self.broken, self.occupancy = True, (0, 0)
        handles, self._handles = self._handles, {}
        for handle in handles.values():
            handle.left = 0
            handle.listener(engine_failed())
        self._loop.run_in_executor(None, self._bury)

    def _flush(self) -> None:
        unsent, self._unsent = self._unsent, []
        if not self.broken:
            self._transport.write(wire.pack(unsent))

    def _arrive(self, key: int, packed: Any) -> None:
        handle = self._handles.get(key)
        if handle is None:
            return
        if isinstance(packed, str):
            event: Event | BaseException = RuntimeError(f"The engine says: {packed}")
            handle.left = 0
        else:
            event = wire.unpack_event(packed)
            handle.left -= event.reply is not None
        if not handle.left:
            del self._handles[key]
        handle.listener(event)

    # -- its death -----------------------------------------------------------------------------------

    def _bury(self) -> None:
        """It has hung up: it is dead, or about to be."""
        log.error("%s It takes no more requests: start the server again.", self._obituary())

    def _mourn(self) -> NoReturn:
        raise UserError(f"{self._obituary()} That was before the model was ready.")

    def _obituary(self) -> str:
        try:
            code = self.process.wait(END_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            code = self.process.wait()
        if code >= 0:
            return f"The engine's process {self.process.pid} ended with exit code {code}: its last words are above."
        killer = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
        why = " (as the system does when memory runs out)" if killer == "SIGKILL" else ""
        return f"The engine's process {self.process.pid} was ended by {killer}{why}."


class RemoteSpeaker:
    """A model and the processes that write with it. Close it, or use it in a `with`."""

    def __init__(self, options: Options) -> None:
        self.engines: list[RemoteEngine] = []
        spoken = {"model": options.model, "tools": options.tools, "int8": options.int8}
        samplings = [wire.pack_sampling(options.sampling), wire.pack_sampling(Sampling(temperature=0))]
        wanted = {"options": spoken, "slots": options.slots, "samplings": samplings}
        try:
            self.engines.append(RemoteEngine(wanted))
            hello = self.engines[0].ready()
            # The first knows how many devices there are, and which model is the newest.
            devices = hello["devices"] if hello["device"] == "cuda" else 1
            if hello["device"] == "cuda" and (options.gpus or 1) > devices:
                raise UserError(f"--gpus is {options.gpus}, and this machine has {devices}.")
            spoken["model"] = hello["name"]
            others = range(1, min(options.gpus or devices, devices))
            self.engines += [RemoteEngine(wanted, gpu) for gpu in others]
            for engine in self.engines[1:]:
                engine.ready()
        except BaseException:
            self.close()
            raise
        self.name: str = hello["name"]
        self.step: int = hello["step"]
        self.chats: bool = hello["chats"]
        self.parameters: int = hello["parameters"]
        self.data: str = hello["data"]
        self.stop_ids: list[int] = hello["stop_ids"]
        self.tool_name: str | None = hello["tool_name"]
        self.tool = _elsewhere if self.tool_name is not None else None
        self.tokenizer = open_tokenizer(hello["tokenizer"])

    async def connect(self) -> None:
        for engine in self.engines:
            await engine.connect()

    def close(self) -> None:
        for engine in self.engines:
            engine.close()

    def __enter__(self) -> "RemoteSpeaker":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _elsewhere() -> NoReturn:
    raise RuntimeError("The tool is in the engine's process, and is only named here.")


def _visible(gpu: int) -> str:
    """The GPU of this number, among those that we may use."""
    mine = os.environ.get("CUDA_VISIBLE_DEVICES")
    return mine.split(",")[gpu].strip() if mine else str(gpu)
