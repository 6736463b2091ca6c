"""The engine's input and output types: requests, events while they run, replies.

    Request   a prompt (token ids), sampling parameters, stop conditions
    Event     what is new in one sample: tokens, and pieces of text that are final
    Reply     one finished sample

A request may ask for several samples of one prompt, which is then prefilled only once. A `Tool` receives the
tokens of a sample, may interrupt it with a call, and returns the tokens of its output: those are forced, not
sampled from the model.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from nanorun.errors import UserError
from nanorun.text.chat import Piece

MAX_TOP_LOGPROBS = 20
MAX_STOPS = 16  # stop strings of one request
MAX_STOP_LENGTH = 256  # characters

Finish = Literal["stop", "length", "cancelled"]


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters. Each filter sees only the tokens that the one before it kept, in this order."""

    repetition_penalty: float = 1.0  # divides the logits of earlier tokens (multiplies negative ones)
    temperature: float = 1.0  # 0 is greedy
    top_k: int = 0  # keep the k most likely tokens; 0 is no limit
    top_p: float = 1.0  # keep the most likely tokens that together reach this probability
    min_p: float = 0.0  # keep tokens at least this likely, relative to the most likely one
    seed: int | None = None  # None: a random one. Sample i of a request uses seed + i.

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
                "top_p is 0, which leaves no token to choose: use temperature 0 for greedy decoding."
            )
        if self.seed is not None and not -(2**63) <= self.seed < 2**63 - 2**20:
            raise UserError(f"seed is {self.seed}: it must fit in 64 bits.")


DEFAULT_SAMPLING = Sampling(temperature=0.6, top_k=50)  # of `chat` and `serve`


class Tool(Protocol):
    """The state of a tool in one sample. A new one is made for each sample."""

    def push(self, token_id: int) -> Any | None:
        """Receives every sampled token, in the engine's thread. Returns the call it completes, if any."""
        ...

    def answer(self, call: Any) -> list[int]:
        """Runs a call, in a worker thread, and returns the tokens of its output."""
        ...


@dataclass(frozen=True)
class Request:
    prompt: Sequence[int]
    sampling: Sampling = field(default_factory=Sampling)
    max_tokens: int | None = None  # sampled tokens; None: up to the end of the context
    stop_ids: Sequence[int] = ()
    stop: Sequence[str] = ()  # stop strings; the reply ends before the first match
    samples: int = 1
    logprobs: int | None = None  # None: none; 0: of the sampled tokens; n: and of the n most likely
    tool: Callable[[], Tool] | None = None
    stream: bool = True  # False: one event per sample, when it is done

    def check(self, context: int, vocab_size: int, has_text: bool) -> None:
        if not self.prompt:
            raise UserError("The prompt is empty: begin it with at least one token, such as <|bos|>.")
        if len(self.prompt) >= context:
            raise UserError(
                f"The prompt has {len(self.prompt):,} tokens and the model's context is {context:,}, which must "
                "also hold the reply: shorten the prompt."
            )
        wrong = next((i for i in self.prompt if not 0 <= i < vocab_size), None)
        if wrong is not None:
            raise UserError(f"The prompt has token {wrong}: token ids range from 0 to {vocab_size - 1}.")
        if self.max_tokens is not None and self.max_tokens < 1:
            raise UserError(f"max_tokens is {self.max_tokens}: it must be at least 1.")
        if not 1 <= self.samples <= 1024:
            raise UserError(f"samples is {self.samples}: it must be from 1 to 1024.")
        if self.logprobs is not None and not 0 <= self.logprobs <= MAX_TOP_LOGPROBS:
            raise UserError(f"logprobs is {self.logprobs}: it must be from 0 to {MAX_TOP_LOGPROBS}.")
        if self.stop and not has_text:
            raise UserError("Stop strings need a tokenizer, and this engine was built without one.")
        if len(self.stop) > MAX_STOPS or any(not 0 < len(s) <= MAX_STOP_LENGTH for s in self.stop):
            raise UserError(
                f"stop has {len(self.stop)} strings of up to {max(len(s) for s in self.stop)} characters: at most "
                f"{MAX_STOPS} strings of 1 to {MAX_STOP_LENGTH} characters are allowed."
            )


@dataclass(frozen=True)
class Logprobs:
    """Of one token, in nats. A forced token has zeros and no alternatives."""

    under_sampling: float  # the distribution it was sampled from: penalized, scaled, truncated, normalized
    under_model: float  # the model alone
    top: tuple[tuple[int, float], ...] = ()  # the most likely tokens, under the model alone


TokenLogprobs = tuple[int, Logprobs]


class PlainText:
    """The text of a reply without its tool calls, incrementally.

    Blanks before and after a call would add up to a gap: those after it are left out if there are some before it, and
    all white space if the reply begins with the call.
    """

    def __init__(self) -> None:
        self._after_call, self._end = False, ""  # the last character so far

    def push(self, kind: str, text: str) -> str:
        if kind != "text":
            self._after_call = True
            return ""
        if self._after_call and not self._end.strip():
            text = text.lstrip(" \t" if self._end else None)
        if text:
            self._after_call, self._end = False, text[-1]
        return text


def join_text(pieces: Iterable[Piece]) -> str:
    """The text of a reply, without tool calls and their outputs."""
    plain = PlainText()
    return "".join([plain.push(kind, text) for kind, text in pieces])


@dataclass(frozen=True)
class Reply:
    ids: list[int]  # sampled and forced, including the stop token
    forced: list[bool]  # per id; True for tool output
    text: str  # without tool calls, the stop token or string, and an incomplete last character
    finish: Finish
    prompt_tokens: int
    reused_tokens: int  # of the prompt, found in the cache
    logprobs: list[Logprobs] | None  # per id
    first_token_s: float  # from submission
    seconds: float


@dataclass(frozen=True)
class Event:
    sample: int  # which of the request's samples
    ids: tuple[int, ...]
    pieces: tuple[Piece, ...]  # complete characters that cannot be the beginning of a stop string any more
    # Of the sampled tokens whose text is emitted by now. Stop strings and tool calls have none.
    logprobs: tuple[TokenLogprobs, ...]
    sampled_tokens: int  # of the sample so far, without the tool's output
    reply: Reply | None = None  # with the last event of each sample

    @property
    def text(self) -> str:
        return join_text(self.pieces)
