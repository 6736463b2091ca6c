"""An engine in a process of its own, at the other end of `remote.py`'s socket.

Beside the engine's thread there are two: this one reads what is asked, the other sends what was written, all
that has gathered since it last sent.

A token by itself costs the server and its client a write, a wake-up and a read. So a text says what is new of it
a hundred times a second at most, and less often while many are written, all in the same step. Its first token
and its end go at once.

It lives no longer than the server: the socket's end ends it, and on Linux the kernel does, should Python be
stuck. Signals are the server's business (Ctrl-C reaches a whole process group, and some supervisors stop all
that a service has started): were the engine to heed them, no answer could end.
"""

import contextlib
import ctypes
import os
import queue
import signal
import socket
import sys
import threading
import traceback
from typing import TYPE_CHECKING, Any, NoReturn

from nanorun.errors import UserError
from nanorun.serve import wire

if TYPE_CHECKING:
    from nanorun.chat.conversation import Speaker
    from nanorun.infer.engine import Event, Handle

EVENTS_PER_S = 1_280  # of all texts together: with 64 of them 20 of each
LOOK_S = 0.05  # while slots are taken: how long the server may believe it when they no longer are
_PR_SET_PDEATHSIG = 1


def main(descriptor: int, parent: int) -> NoReturn:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: None)  # not SIG_IGN, which the sandbox's programs would inherit
    if sys.platform == "linux":
        # When the thread that started this ends: the server's main thread.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(0)
    connection = socket.socket(fileno=descriptor)
    code = 1
    try:
        wanted = wire.receive(connection)
        if wanted is not None:
            speaker, hello = _prepare(**wanted)
            connection.sendall(wire.pack(hello))
            Worker(connection, speaker).serve()
        code = 0
    except UserError as error:
        connection.sendall(wire.pack({"problem": str(error)}))
    except BrokenPipeError:
        code = 0  # the server has gone
    except BaseException:
        traceback.print_exc()
    sys.stderr.flush()
    os._exit(code)  # without waiting for what still runs: nobody wants it any more


def _prepare(
    options: dict[str, Any], slots: int | None, samplings: list[tuple[Any, ...]]
) -> "tuple[Speaker, dict[str, Any]]":
    """The model, ready to write, and what the server should know about it."""
    import torch

    from nanorun import hardware
    from nanorun.chat.conversation import Options, Speaker
    from nanorun.infer.request import Sampling

    machine = hardware.detect()
    cuda = machine.device == "cuda"
    slots = slots or (64 if cuda else 8)
    try:
        # The desk refuses what cannot wait.
        speaker = Speaker(Options(slots=slots, max_queue=2**31, events_per_s=EVENTS_PER_S, **options))
        if cuda:
            sizes = [2**i for i in range(slots.bit_length()) if 2**i <= slots]
            speaker.engine.warm_up([*sizes, slots], [Sampling(*sampling) for sampling in samplings])
    except torch.OutOfMemoryError as error:
        raise UserError(
            f"The memory of {machine.name} is too small for this model with {slots} slots: use fewer --slots, "
            "or --int8."
        ) from error
    hello = {
        "device": machine.device,
        "devices": machine.devices,
        "slots": slots,
        "context": speaker.engine.context,
        "vocab_size": speaker.engine.vocab_size,
        "name": speaker.name,
        "step": speaker.step,
        "chats": speaker.chats,
        "parameters": speaker.parameters,
        "data": speaker.data,
        "tokenizer": speaker.tokenizer_name,
        "stop_ids": speaker.stop_ids,
        "tool_name": speaker.tool_name,
    }
    return speaker, hello


class Worker:
    def __init__(self, connection: socket.socket, speaker: "Speaker") -> None:
        self._connection, self._speaker, self._engine = connection, speaker, speaker.engine
        # What was written, by key. None: nothing, but slots may have been taken.
        self._written = queue.SimpleQueue["tuple[int, Event | BaseException] | None"]()
        self._lock = threading.Lock()
        self._asked: dict[int, list[Any]] = {}  # handle, samples that are not done

    def serve(self) -> None:
        """Until the server hangs up."""
        threading.Thread(target=self._send, name="nanorun-send", daemon=True).start()
        while (asked := wire.receive(self._connection)) is not None:
            for key, request in asked:
                if request is not None:
                    self._begin(key, request)
                elif (found := self._asked.get(key)) is not None:
                    found[0].cancel()
            self._written.put(None)

    def _begin(self, key: int, packed: tuple[Any, ...]) -> None:
        request = wire.unpack_request(packed, self._speaker.tool)

        def listen(event: "Event | BaseException") -> None:
            self._written.put((key, event))

        with self._lock:  # its last event may come before there is a handle to forget
            try:
                handle: Handle = self._engine.submit(request, listen)
            except UserError as error:
                listen(error)
                return
            self._asked[key] = [handle, request.samples]

    def _send(self) -> None:
        told = (0, 0)
        try:
            while True:
                written = self._gathered(LOOK_S if self._asked or any(told) else None)
                packed = [(key, self._packed(key, event)) for key, event in written]
                now = self._engine.occupancy
                if packed or now != told:
                    told = now
                    self._connection.sendall(wire.pack((*now, packed)))
        except (BrokenPipeError, ConnectionError):
            os._exit(0)  # the server has gone
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)

    def _gathered(self, patience: float | None) -> list[tuple[int, "Event | BaseException"]]:
        gathered = []
        with contextlib.suppress(queue.Empty):
            gathered.append(self._written.get(timeout=patience))
            while True:
                gathered.append(self._written.get_nowait())
        return [said for said in gathered if said is not None]

    def _packed(self, key: int, event: "Event | BaseException") -> tuple[Any, ...] | str:
        if isinstance(event, BaseException):
            if self._engine.broken:
                raise event
            traceback.print_exception(event)
            self._forget(key)
            return f"{type(event).__name__}: {event}"
        if event.reply is not None:
            self._forget(key)
        return wire.pack_event(event)

    def _forget(self, key: int) -> None:
        with self._lock:
            if (found := self._asked.get(key)) is not None:
                found[1] -= 1
                if not found[1]:
                    del self._asked[key]
