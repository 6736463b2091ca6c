"""What `nanorun serve` can be told, and how much one request may ask for."""

from dataclasses import dataclass, field
from typing import Literal

from nanorun.errors import UserError
from nanorun.infer.request import Sampling

KEY_VARIABLE = "NANORUN_API_KEY"
LOOPBACK = ("127.0.0.1", "localhost", "::1")


@dataclass(frozen=True)
class Limits:
    """Beyond these a request is refused, with the status in brackets."""

    body_bytes: int = 2 * 2**20  # (413)
    messages: int = 4096  # (400)
    samples: int = 16  # of one request: n, times the prompts (400)
    tokens: int | None = None  # of one answer; None: what the context has room for
    queue: int = 256  # samples that may wait for a slot, over all engines (429)
    body_s: float = 30.0  # for a request to arrive (408)
    answer_s: float = 600.0  # for an answer, from the request's arrival to its last byte (408)
    stall_s: float = 60.0  # a reader that takes nothing for so long is given up

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value is not None and value <= 0:
                raise UserError(f"The limit {name} is {value}: it must be above 0.")


@dataclass(frozen=True)
class Options:
    model: str | None = None  # a run; None: the newest chat model, or else the newest base model
    host: str = "127.0.0.1"
    port: int = 8000  # 0: a free one
    api_key: str | None = None
    cors: tuple[str, ...] = ()  # origins whose pages may call
    allow_hosts: tuple[str, ...] = ()  # names besides the loopback's that a local server answers to
    slots: int | None = None  # texts at a time on each device; None: 64 on a GPU, 8 on a CPU
    gpus: int | None = None  # engines, one a GPU; None: all that are here
    tools: Literal["calculator", "python", "none"] = "calculator"
    int8: bool = False
    sampling: Sampling = field(default_factory=lambda: Sampling(temperature=0.6, top_k=50))  # where not said
    drain_s: float = 30.0  # for running answers to end after SIGTERM
    limits: Limits = field(default_factory=Limits)

    def __post_init__(self) -> None:
        if self.api_key is not None and not self.api_key.strip():
            raise UserError(f"The API key is empty: give one, or leave out --api-key and {KEY_VARIABLE}.")
        if not 0 <= self.port < 2**16:
            raise UserError(f"--port is {self.port}: it must be from 0 to 65535.")
        for origin in self.cors:
            if origin != "*" and ("://" not in origin or origin.endswith("/")):
                raise UserError(f"--cors is '{origin}': give an origin such as http://localhost:3000, or *.")
