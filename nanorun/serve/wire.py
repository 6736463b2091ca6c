"""What the server and an engine's process say to each other, as bytes.

A message is its length and a value that `marshal` writes: tuples, lists, texts and numbers, several times cheaper
than pickled objects. It is no format for strangers: both ends are one program, on a socket that nobody else has.

    to the engine    [(key, request), (key, None), ...]             None: cancelled
    from it          (busy slots, waiting, [(key, event), ...])     an event that is a text is an error

One message holds all that has gathered since the one before.
"""

import marshal
import socket
import struct
from collections.abc import Callable, Iterator
from operator import attrgetter
from typing import Any

from nanorun.infer.request import Event, Logprobs, Reply, Request, Sampling, Tool

LENGTH = struct.Struct("<I")
pack_sampling = attrgetter(*Sampling.__dataclass_fields__)
_logprobs = attrgetter(*Logprobs.__dataclass_fields__)
_reply = attrgetter(*Reply.__dataclass_fields__)
_AT_LOGPROBS = list(Reply.__dataclass_fields__).index("logprobs")


def pack(value: Any) -> bytes:
    data = marshal.dumps(value)
    return LENGTH.pack(len(data)) + data


class Unpacker:
    """Bytes in, as they come; whole messages out."""

    def __init__(self) -> None:
        self._held = b""

    def push(self, data: bytes) -> Iterator[Any]:
        self._held += data
        at = 0
        while len(self._held) >= at + LENGTH.size:
            start = at + LENGTH.size
            end = start + LENGTH.unpack_from(self._held, at)[0]
            if len(self._held) < end:
                break
            yield marshal.loads(memoryview(self._held)[start:end])
            at = end
        self._held = self._held[at:]


def receive(connection: socket.socket) -> Any | None:
    """Waits for a message; None at the end."""
    head = _exactly(connection, LENGTH.size)
    data = _exactly(connection, LENGTH.unpack(head)[0]) if head else b""
    return marshal.loads(data) if data else None


def _exactly(connection: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        try:
            part = connection.recv(size - len(data))
        except ConnectionError:
            return b""
        if not part:
            return b""
        data += part
    return bytes(data)


def pack_request(request: Request) -> tuple[Any, ...]:
    """A tool is code, and stays: only whether it may be called is said."""
    return (
        list(request.prompt),
        pack_sampling(request.sampling),
        request.max_tokens,
        list(request.stop_ids),
        list(request.stop),
        request.samples,
        request.logprobs,
        request.tool is not None,
        request.stream,
    )


def unpack_request(packed: tuple[Any, ...], tool: Callable[[], Tool] | None) -> Request:
    prompt, sampling, max_tokens, stop_ids, stop, samples, logprobs, calls, stream = packed
    own = tool if calls else None
    return Request(prompt, Sampling(*sampling), max_tokens, stop_ids, stop, samples, logprobs, own, stream)


def pack_event(event: Event) -> tuple[Any, ...]:
    reply = event.reply
    if reply is not None:
        said = list(_reply(reply))
        if reply.logprobs is not None:
            said[_AT_LOGPROBS] = [_logprobs(of) for of in reply.logprobs]
    logprobs = [(token_id, *_logprobs(of)) for token_id, of in event.logprobs]
    return event.sample, event.ids, event.pieces, logprobs, said if reply is not None else None


def unpack_event(packed: tuple[Any, ...]) -> Event:
    sample, ids, pieces, logprobs, said = packed
    if said is not None and said[_AT_LOGPROBS] is not None:
        said[_AT_LOGPROBS] = [Logprobs(*of) for of in said[_AT_LOGPROBS]]
    shown = tuple((token_id, Logprobs(*of)) for token_id, *of in logprobs)
    return Event(sample, ids, pieces, shown, Reply(*said) if said is not None else None)
