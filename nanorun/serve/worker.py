"""The engine process: one engine, and the messages that it exchanges with the server (engines.py) on a socket.

A message is its length and a value serialized by `marshal`: tuples, lists, strings and numbers, several times
cheaper than pickled objects. It is not a public format: both ends are the same program, on a private socket.

    to the engine    (key, request), or (key, None), which cancels
    from it          (busy slots, queued samples, [(key, event), ...])   an event that is a string is an error

Beside the engine's thread there are two: the main thread reads requests, the other sends everything that was
generated since its last message. A token sent by itself costs the server and its client a write, a wake-up and
a read. So events are emitted after at most a hundred steps per second, for all sequences together, and
after fewer when many run. The first token of a sequence and its end are sent at once. While there is nothing to send,
an empty message every second shows the server that the process runs.

The process never outlives the server: it exits at the end of the socket, and on Linux the kernel kills it, in case
Python is stuck. It ignores the usual signals, because Ctrl-C reaches a whole process group and some supervisors stop
every process of a service: otherwise no running answer could finish.
"""

import contextlib
import ctypes
import marshal
import os
import queue
import signal
import socket
import struct
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, BinaryIO, NoReturn

from nanorun.errors import UserError
from nanorun.infer.request import Event, Logprobs, Reply, Request, Sampling, Tool

if TYPE_CHECKING:
    from nanorun.infer.engine import Handle
    from nanorun.infer.load import ServedModel

EVENTS_PER_S = 1_280  # of all sequences together: 20 of each with 64 sequences
POLL_S = 0.05  # how long the server may see an outdated occupancy
HEARTBEAT_S = 1.0
LENGTH = struct.Struct("<I")
_PR_SET_PDEATHSIG = 1


def main(descriptor: int, parent: int) -> NoReturn:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: None)  # not SIG_IGN, which sandboxed programs would inherit
    if sys.platform == "linux":
        # Sent when the thread that started this process ends: the server's main thread.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(0)
    connection = socket.socket(fileno=descriptor)
    messages = connection.makefile("rb")
    code = 1
    try:
        wanted = receive(messages)
        if wanted is not None:
            model, description = _load(**wanted)
            connection.sendall(pack(description))
            Worker(connection, messages, model).serve()
        code = 0
    except UserError as error:
        connection.sendall(pack({"problem": str(error)}))
    except BrokenPipeError:
        code = 0  # the server is gone
    except BaseException:
        traceback.print_exc()
    sys.stderr.flush()
    os._exit(code)  # without waiting for requests that still run


def _load(
    model: str | None = None,
    tools: Any = "calculator",
    int8: bool = False,
    slots: int | None = None,
    samplings: Sequence[dict[str, Any]] = (),
) -> "tuple[ServedModel, dict[str, Any]]":
    """Loads and warms up the model. Returns it with its description for the server."""
    import torch

    from nanorun import hardware
    from nanorun.infer.engine import Settings
    from nanorun.infer.load import ServedModel

    machine = hardware.detect()
    is_cuda = machine.device == "cuda"
    slots = slots or (64 if is_cuda else 8)
    # No limit on the queue here: the dispatcher rejects requests.
    settings = Settings(slots, max_queue=2**31, int8=int8, events_per_s=EVENTS_PER_S)
    try:
        served = ServedModel(model, settings, tools=tools)
        if is_cuda:
            sizes = [2**i for i in range(slots.bit_length()) if 2**i <= slots]
            served.engine.warm_up([*sizes, slots], [Sampling(**sampling) for sampling in samplings])
    except torch.OutOfMemoryError as error:
        raise UserError(
            f"Out of memory on {machine.name}, with this model and {slots} slots: use fewer --slots, or --int8."
        ) from error
    return served, {
        "device": machine.device,
        "devices": machine.devices,
        "slots": slots,
        "context": served.engine.context,
        "vocab_size": served.engine.vocab_size,
        "name": served.name,
        "step": served.step,
        "is_chat_model": served.is_chat_model,
        "parameters": served.config.model.total_parameters,
        "data": served.config.data,
        "tokenizer": served.config.tokenizer,
        "stop_ids": served.stop_ids,
        "tool_name": served.tool_name,
    }


class Worker:
    def __init__(self, connection: socket.socket, messages: BinaryIO, model: "ServedModel") -> None:
        self._connection, self._messages = connection, messages
        self._engine, self._tool = model.engine, model.tool
        # Events by key. None: no event, but the occupancy may have changed.
        self._events = queue.SimpleQueue["tuple[int, Event | BaseException] | None"]()
        self._running: dict[int, Handle] = {}

    def serve(self) -> None:
        """Reads requests until the server closes the connection."""
        threading.Thread(target=self._send, name="nanorun-send", daemon=True).start()
        while (message := receive(self._messages)) is not None:
            key, request = message

            def listen(event: Event | BaseException, key: int = key) -> None:
                self._events.put((key, event))

            try:
                if request is not None:
                    self._running[key] = self._engine.submit(decode_request(request, self._tool), listen)
                elif (handle := self._running.get(key)) is not None:
                    handle.cancel()
            except UserError as error:
                listen(error)
            self._events.put(None)

    def _send(self) -> None:
        sent, sent_at = (0, 0), 0.0
        try:
            while True:
                gathered = []
                with contextlib.suppress(queue.Empty):
                    timeout = POLL_S if self._running or any(sent) else HEARTBEAT_S
                    gathered.append(self._events.get(timeout=timeout))
                    while True:
                        gathered.append(self._events.get_nowait())
                encoded = [(item[0], self._encode(item[1])) for item in gathered if item is not None]
                for key in [key for key, handle in list(self._running.items()) if handle.is_done]:
                    del self._running[key]
                occupancy = self._engine.occupancy
                now = time.monotonic()
                if encoded or occupancy != sent or now - sent_at >= HEARTBEAT_S:
                    sent, sent_at = occupancy, now
                    self._connection.sendall(pack((*occupancy, encoded)))
        except ConnectionError:
            os._exit(0)  # the server is gone
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)

    def _encode(self, event: Event | BaseException) -> tuple[Any, ...] | str:
        if not isinstance(event, BaseException):
            return encode_event(event)
        if self._engine.broken:
            raise event
        traceback.print_exception(event)
        return f"{type(event).__name__}: {event}"


def pack(value: Any) -> bytes:
    data = marshal.dumps(value)
    return LENGTH.pack(len(data)) + data


def receive(messages: BinaryIO) -> Any | None:
    """Waits for a message; None at the end."""
    with contextlib.suppress(ConnectionError, EOFError, struct.error):
        return marshal.loads(messages.read(LENGTH.unpack(messages.read(LENGTH.size))[0]))
    return None


def encode_request(request: Request) -> dict[str, Any]:
    """Of the tool, which is code, only whether there is one."""
    return {**vars(request), "sampling": vars(request.sampling), "tool": request.tool is not None}


def decode_request(fields: dict[str, Any], tool: Callable[[], Tool] | None) -> Request:
    sampling = Sampling(**fields["sampling"])
    return Request(**{**fields, "sampling": sampling, "tool": tool if fields["tool"] else None})


def encode_event(event: Event) -> tuple[Any, ...]:
    """Without the logprobs of the reply: those of the events are enough for the server."""
    reply = {**vars(event.reply), "logprobs": None} if event.reply is not None else None
    logprobs = [(token_id, *vars(logprobs).values()) for token_id, logprobs in event.logprobs]
    return event.sample, event.ids, event.pieces, logprobs, event.sampled_tokens, reply


def decode_event(encoded: tuple[Any, ...]) -> Event:
    sample, ids, pieces, logprobs, sampled_tokens, reply = encoded
    shown = tuple((token_id, Logprobs(*values)) for token_id, *values in logprobs)
    return Event(sample, ids, pieces, shown, sampled_tokens, Reply(**reply) if reply is not None else None)
