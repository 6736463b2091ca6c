"""The options of `nanorun serve`, and the limits of one request."""

import math
from dataclasses import dataclass, field
from typing import Literal

from nanorun.errors import UserError
from nanorun.infer.request import DEFAULT_SAMPLING, Sampling

LOOPBACK = ("127.0.0.1", "localhost", "::1")


MAX_BODY_BYTES = 8 * 10**6  # parsed in the event loop, in less than 100 ms


@dataclass(frozen=True)
class RequestLimits:
    """A request beyond these is rejected, with the status in brackets."""

    body_bytes: int = 2 * 2**20  # (413)
    samples: int = 16  # n times the number of prompts (400)
    tokens: int | None = None  # of one answer; None: up to the end of the context
    queue: int = 256  # samples that wait for a slot, over all engines (429)
    connections: int = 1024  # fewer if the process may not open enough files (503)
    idle_s: float = 20.0  # a connection without a complete request header for so long is closed
    body_s: float = 30.0  # to receive the body (408)
    answer_s: float = 600.0  # from the arrival of a request to the last byte of its answer (408)
    stall_s: float = 60.0  # a client that reads nothing for so long is disconnected

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value is not None and not 0 < value < math.inf:
                raise UserError(f"The limit {name} is {value}: it must be a number above 0.")
        if self.body_bytes > MAX_BODY_BYTES:
            raise UserError(f"--max-body is {self.body_bytes} bytes: it must be at most {MAX_BODY_BYTES}.")


@dataclass(frozen=True)
class ServeOptions:
    model: str | None = None  # a run; None: the newest chat model, or else the newest base model
    host: str = "127.0.0.1"
    port: int = 8000  # 0: any free port
    api_key: str | None = None
    cors: tuple[str, ...] = ()  # origins whose pages may call the API
    allow_hosts: tuple[str, ...] = ()  # host names, besides the loopback, that a local server accepts
    slots: int | None = None  # concurrent sequences on each device; None: 64 on a GPU, 8 on a CPU
    gpus: int | None = None  # engines, one per GPU; None: all GPUs
    tools: Literal["calculator", "python", "none"] = "calculator"
    int8: bool = False
    sampling: Sampling = DEFAULT_SAMPLING  # for parameters that a request leaves out
    drain_s: float = 30.0  # for running answers to finish after SIGTERM
    limits: RequestLimits = field(default_factory=RequestLimits)

    def __post_init__(self) -> None:
        if self.api_key is not None:
            _check_key(self.api_key)
        if not 0 <= self.port < 2**16:
            raise UserError(f"--port is {self.port}: it must be from 0 to 65535.")
        for origin in self.cors:
            if origin != "*" and ("://" not in origin or origin.endswith("/")):
                raise UserError(f"--cors is '{origin}': give an origin such as http://localhost:3000, or *.")


def _check_key(key: str) -> None:
    """A key that no client can send in a header would lock everybody out."""
    if not key.strip():
        raise UserError("The API key is empty: set one, or leave out --api-key and NANORUN_API_KEY.")
    if key != key.strip():
        raise UserError("The API key begins or ends with a blank, which no client can send: remove it.")
    if not (key.isascii() and key.isprintable()):
        raise UserError(
            "The API key has characters that no client can send: use ASCII letters, digits and signs."
        )
