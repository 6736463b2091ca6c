"""What one asks of the engine and what one gets: requests, events while they run, replies.

    Request   a prompt (token ids), how to sample, when to stop
    Event     what is new of one sample: tokens, and text that is safe to show
    Reply     one finished sample

A request may ask for several samples of one prompt, which is then read only once. A `Tool` watches the
tokens of a sample, may interrupt it with a call, and says which tokens its answer is: those are forced,
the model did not choose them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from nanorun.errors import UserError

MOST_TOP_LOGPROBS = 20
MOST_STOPS = 16  # stop strings of one request
MOST_STOP_LENGTH = 256  # characters

Finish = Literal["stop", "length", "cancelled"]


@dataclass(frozen=True)
class Sampling:
    """How the next token is drawn. What is left out by one rule is not looked at by the next, in this order."""

    repetition_penalty: float = (
        1.0  # tokens of the text so far: logits divided by it (multiplied if negative)
    )
    temperature: float = 1.0  # 0 takes the likeliest
    top_k: int = 0  # only the k likeliest; 0 is no limit
    top_p: float = 1.0  # only the likeliest that together reach this probability
    min_p: float = 0.0  # only those at least this likely, relative to the likeliest
    seed: int | None = None  # None: a fresh one. Sample i of a request uses seed + i.

    def __post_init__(self) -> None:
        for name, low, high in (
            ("temperature", 0, 100),
            ("top_k", 0, 2**31),
            ("top_p", 0, 1),
            ("min_p", 0, 1),
            ("repetition_penalty", 0.01, 100),
        ):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
                raise UserError(f"{name} is {value!r}: it must be a number from {low} to {high}.")
        if self.top_p == 0:
            raise UserError(
                "top_p is 0, which leaves no token to choose: use temperature 0 for the likeliest."
            )
        if self.seed is not None and not -(2**63) <= self.seed < 2**63 - 2**20:
            raise UserError(f"seed is {self.seed}: it must fit in 64 bits.")


class Tool(Protocol):
    """One conversation's state of a tool. A new one is made for each sample."""

    def push(self, token_id: int) -> Any | None:
        """Told every sampled token, in the engine's thread. The call that this token completes, if any."""
        ...

    def answer(self, call: Any) -> list[int]:
        """Runs a call, in a worker's thread: the tokens of its outcome, behind which the sample goes on."""
        ...


@dataclass(frozen=True)
class Request:
    prompt: Sequence[int]
    sampling: Sampling = field(default_factory=Sampling)
    max_tokens: int | None = None  # sampled ones; None: as many as the context has room for
    stop_ids: Sequence[int] = ()
    stop: Sequence[str] = ()  # texts; what is from the first of them on is not part of the reply
    samples: int = 1
    logprobs: int | None = None  # None: none; 0: of the chosen tokens; n: and of the n likeliest
    tool: Callable[[], Tool] | None = None

    def check(self, context: int, vocab_size: int, has_text: bool) -> None:
        if not self.prompt:
            raise UserError("The prompt is empty: begin it with at least one token, such as <|bos|>.")
        if len(self.prompt) >= context:
            raise UserError(
                f"The prompt has {len(self.prompt):,} tokens and the model's context is {context:,}, which the "
                "reply must fit in, too: shorten the prompt."
            )
        wrong = next((i for i in self.prompt if not 0 <= i < vocab_size), None)
        if wrong is not None:
            raise UserError(f"The prompt has token {wrong}; the vocabulary is 0 to {vocab_size - 1}.")
        if self.max_tokens is not None and self.max_tokens < 1:
            raise UserError(f"max_tokens is {self.max_tokens}: it must be at least 1.")
        if not 1 <= self.samples <= 1024:
            raise UserError(f"samples is {self.samples}: it must be from 1 to 1024.")
        if self.logprobs is not None and not 0 <= self.logprobs <= MOST_TOP_LOGPROBS:
            raise UserError(f"logprobs is {self.logprobs}: it must be from 0 to {MOST_TOP_LOGPROBS}.")
        if self.stop and not has_text:
            raise UserError("Stop strings need a tokenizer, and this engine was built without one.")
        if len(self.stop) > MOST_STOPS or any(not 0 < len(s) <= MOST_STOP_LENGTH for s in self.stop):
            raise UserError(
                f"stop may hold {MOST_STOPS} strings of 1 to {MOST_STOP_LENGTH} characters, "
                f"not {len(self.stop)} of up to {max(len(s) for s in self.stop)}."
            )


@dataclass(frozen=True)
class Logprobs:
    """Of one token, in nats. A forced token has zeros and no others."""

    sampled: float  # by the distribution it was drawn from: tempered, penalised, cut and normalised
    model: float  # by the model alone
    top: tuple[tuple[int, float], ...] = ()  # the likeliest tokens, by the model alone


@dataclass(frozen=True)
class Reply:
    ids: list[int]  # sampled and forced, the stop token included
    forced: list[bool]  # as long as ids; True where a tool spoke and not the model
    text: str  # without the stop token or string, and without a last character that is not whole
    finish: Finish
    prompt_tokens: int
    reused_tokens: int  # of the prompt, found in the cache
    logprobs: list[Logprobs] | None  # as long as ids
    first_token_s: float  # from submission
    seconds: float


@dataclass(frozen=True)
class Event:
    sample: int  # which of the request's samples
    ids: tuple[int, ...]
    forced: bool
    text: str  # complete characters that can no longer be the beginning of a stop string
    logprobs: tuple[Logprobs, ...] = ()
    reply: Reply | None = None  # with the last event of each sample
