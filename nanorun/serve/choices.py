"""One choice of an answer: from the engine's tokens to text, tool calls and log-probabilities.

A chat model's answer has parts: text, and where it called its tool the call ("python") and what came of it
("output", or "guess" if the model made it up). `content` is the text alone, so that any client shows what was
said. The whole answer, in order, is in `nanorun_parts`, which a message has if there is more than text.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from nanorun.infer.request import Event, TokenLogprobs, join_text
from nanorun.text.chat import Piece, join_pieces
from nanorun.text.tokenizer import Tokenizer


@dataclass
class News:
    """What is new of one choice."""

    pieces: list[Piece] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish: str | None = None

    @property
    def text(self) -> str:
        return join_text(self.pieces)

    @property
    def calls(self) -> bool:
        return any(kind != "text" for kind, _ in self.pieces)

    @property
    def parts(self) -> list[dict[str, str]]:
        return join_pieces(self.pieces)

    def add(self, event: Event) -> None:
        self.pieces += event.pieces
        self.logprobs += event.logprobs
        self.finish = event.reply.finish if event.reply is not None else None


def chat_logprobs(tokenizer: Tokenizer, logprobs: Sequence[TokenLogprobs]) -> dict[str, Any]:
    def entry(token_id: int, logprob: float) -> dict[str, Any]:
        data = tokenizer.decode_bytes([token_id])
        return {"token": data.decode("utf-8", "replace"), "logprob": logprob, "bytes": list(data)}

    content = [
        {**entry(token_id, of.model), "top_logprobs": [entry(other, value) for other, value in of.top]}
        for token_id, of in logprobs
    ]
    return {"content": content, "refusal": None}


def text_logprobs(tokenizer: Tokenizer, logprobs: Sequence[TokenLogprobs], offset: int) -> dict[str, Any]:
    """The older shape. `offset` is where the first token's text stands."""
    tokens = [tokenizer.decode([token_id]) for token_id, _ in logprobs]
    offsets = []
    for token in tokens:
        offsets.append(offset)
        offset += len(token)
    return {
        "tokens": tokens,
        "token_logprobs": [of.model for _, of in logprobs],
        "top_logprobs": [{tokenizer.decode([i]): value for i, value in of.top} for _, of in logprobs],
        "text_offset": offsets,
    }
