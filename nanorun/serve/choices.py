"""One choice of an answer: from the engine's tokens to text, tool calls and log-probabilities.

A chat model's answer has parts: text, and where it called its tool the call ("python") and what came of it
("output", or "guess" if the model made it up). `content` is the text alone, so that any client shows what was
said. The whole answer, in order, is in `nanorun_parts`, which a message has if there is more than text.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from nanorun.infer.request import Event, Logprobs, Reply
from nanorun.text.chat import ReplyStream, join_pieces
from nanorun.text.stream import overlap
from nanorun.text.tokenizer import Tokenizer

Piece = tuple[str, str]  # kind of part, text


@dataclass
class News:
    """What is new of one choice."""

    pieces: list[Piece] = field(default_factory=list)
    logprobs: list[tuple[int, Logprobs]] = field(default_factory=list)
    finish: str | None = None
    reply: Reply | None = None

    @property
    def text(self) -> str:
        return "".join(text for kind, text in self.pieces if kind == "text")

    @property
    def calls(self) -> bool:
        return any(kind != "text" for kind, _ in self.pieces)

    @property
    def parts(self) -> list[dict[str, str]]:
        return join_pieces(self.pieces)

    def add(self, other: "News") -> None:
        self.pieces += other.pieces
        self.logprobs += other.logprobs
        self.finish, self.reply = other.finish, other.reply


class Choice:
    """Takes a sample's events, or its whole reply. The text is made here: the engine's shows special tokens, too."""

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str], stop_ids: Sequence[int]) -> None:
        self._tokenizer, self._stop_ids = tokenizer, frozenset(stop_ids)
        self._stream = ReplyStream(tokenizer)
        self._stops = _Stops(stops)
        # Log-probabilities of tokens that have shown nothing yet, with where their text begins.
        self._unshown: list[tuple[int, tuple[int, Logprobs]]] = []

    def take(self, event: Event) -> News:
        reply, logprobs = event.reply, event.logprobs
        news = News(reply=reply, finish=reply.finish if reply is not None else None)
        for at, token_id in enumerate(event.ids):
            if reply is not None and at == len(event.ids) - 1 and token_id in self._stop_ids:
                break
            begins = self._stops.taken
            news.pieces += self._push(token_id, event.forced)
            said = self._stream.kind == "text" and not self._tokenizer.is_special(token_id)
            if said and not event.forced and at < len(logprobs):
                self._unshown.append((begins, (token_id, logprobs[at])))
        if reply is not None:
            news.pieces += self._stops.end()
        news.logprobs = self._shown(at_end=reply is not None)
        return news

    def take_whole(self, reply: Reply) -> News:
        """A finished reply whose events were not kept."""
        news = News()
        last = len(reply.ids) - 1
        for at, (token_id, forced) in enumerate(zip(reply.ids, reply.forced, strict=True)):
            logprobs = (reply.logprobs[at],) if reply.logprobs is not None else ()
            news.add(self.take(Event(0, (token_id,), forced, "", logprobs, reply if at == last else None)))
        return news if reply.ids else News(finish=reply.finish, reply=reply)

    def _push(self, token_id: int, forced: bool) -> list[Piece]:
        pieces: list[Piece] = []
        for kind, text in self._stream.push(token_id):
            if forced:
                pieces += [*self._stops.end(), (kind, text)]
            else:
                pieces += self._stops.push("guess" if kind == "output" else kind, text)
        return pieces

    def _shown(self, at_end: bool) -> list[tuple[int, Logprobs]]:
        """Of tokens that something is shown of, which a stop string's are not."""
        if at_end and not self._stops.stopped:
            count = len(self._unshown)
        else:
            shown = (begins < self._stops.shown for begins, _ in self._unshown)
            count = sum(itertools.takewhile(bool, shown))
        pairs = [pair for _, pair in self._unshown[:count]]
        del self._unshown[:count]
        return pairs


class _Stops:
    """Holds back what may be the beginning of a stop string. The engine ends the reply; this cuts its text."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops, self._kind, self._held = stops, "text", ""
        self.taken, self.shown = 0, 0  # characters
        self.stopped = False

    def push(self, kind: str, text: str) -> list[Piece]:
        if self.stopped:
            return []
        self.taken += len(text)
        if not self._stops or not text:  # a piece of no text begins another part
            return [*self.end(), (kind, text)]
        before = self.end(but=len(text)) if kind != self._kind else []
        self._kind, text = kind, self._held + text
        found = [at for at in (text.find(stop) for stop in self._stops) if at >= 0]
        if found:
            self.stopped, self._held = True, ""
            self.shown += min(found)
            return [*before, (kind, text[: min(found)])]
        keep = max(overlap(text, stop) for stop in self._stops)
        self._held = text[len(text) - keep :]
        self.shown = self.taken - keep
        said = text[: len(text) - keep]
        return [*before, (kind, said)] if said else before

    def end(self, but: int = 0) -> list[Piece]:
        """What was held back in vain; `but` as many characters were taken after it."""
        if not self.stopped:
            self.shown = self.taken - but
        held, self._held = self._held, ""
        return [(self._kind, held)] if held else []


def chat_logprobs(tokenizer: Tokenizer, logprobs: Sequence[tuple[int, Logprobs]]) -> dict[str, Any]:
    def entry(token_id: int, logprob: float) -> dict[str, Any]:
        data = tokenizer.decode_bytes([token_id])
        return {"token": data.decode("utf-8", "replace"), "logprob": logprob, "bytes": list(data)}

    content = [
        {**entry(token_id, of.model), "top_logprobs": [entry(other, value) for other, value in of.top]}
        for token_id, of in logprobs
    ]
    return {"content": content, "refusal": None}


def text_logprobs(
    tokenizer: Tokenizer, logprobs: Sequence[tuple[int, Logprobs]], offset: int
) -> dict[str, Any]:
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
