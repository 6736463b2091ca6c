"""Chat rendering: conversations as tokens with a loss mask, and generated tokens as parts of a message.

A conversation is rendered as

    <|bos|> <|user_start|> question <|user_end|> <|assistant_start|> answer <|assistant_end|> ...

An answer can run code: the code is between <|python_start|> and <|python_end|>, its output between
<|output_start|> and <|output_end|>. The loss mask is 1 for the assistant's text, its tool calls and the end of its
answer, and 0 for everything the model does not generate: user messages, tool output, and <|assistant_start|>.

A system message has no token of its own: it is prepended to the first user message, with an empty line between.
Messages are never cut. One that does not fit is dropped whole: `render` warns, `fit_prompt` returns the number.
"""

import codecs
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nanorun.errors import UserError
from nanorun.text.tokenizer import Tokenizer

Part = dict[str, str]  # {"type": "text" | "python" | "output", "text": ...}
# Type of part and text. In a reply "output" is a tool's output, "guess" an output that the model made up.
Piece = tuple[str, str]

_TOOL_PARTS = {  # start token, end token, loss mask
    "python": ("<|python_start|>", "<|python_end|>", 1),
    "output": ("<|output_start|>", "<|output_end|>", 0),
}
_OPENS = {start: kind for kind, (start, _, _) in _TOOL_PARTS.items()}
_CLOSES = {end: kind for kind, (_, end, _) in _TOOL_PARTS.items()}


class ConversationCut(UserWarning):
    """Messages of a conversation were dropped because it is too long."""


@dataclass(frozen=True)
class Rendered:
    ids: list[int]
    mask: list[int]  # loss mask, as long as ids: 1 where the token is trained
    dropped: int  # dropped messages


def render(conversation: Mapping[str, Any], tokenizer: Tokenizer, max_tokens: int | None = None) -> Rendered:
    """A whole conversation for training.

    With `max_tokens`, messages are dropped from the end until the rest fits and ends with an assistant message. If
    not even the first question and answer fit, all messages are dropped and ids is empty.
    """
    if not isinstance(conversation, Mapping) or "messages" not in conversation:
        raise UserError('A conversation must be an object with "messages".')
    messages = conversation["messages"]
    system, turns = check_messages(messages)
    rendered = [_render_message(turn, tokenizer, system if i == 0 else None) for i, turn in enumerate(turns)]

    keep, size = len(turns), 1 + sum(len(ids) for ids, _ in rendered)
    while max_tokens is not None and keep and (size > max_tokens or (keep < len(turns) and keep % 2)):
        keep -= 1
        size -= len(rendered[keep][0])
    dropped = len(turns) - keep if keep else len(messages)
    if dropped:
        lost = sum(len(ids) for ids, _ in rendered[keep:])
        warnings.warn(
            f"A conversation does not fit in {max_tokens} tokens: its last {dropped} of {len(messages)} "
            f"messages ({lost} tokens) were dropped.",
            ConversationCut,
            stacklevel=2,
        )
    if not keep:
        return Rendered([], [], dropped)
    ids, mask = [tokenizer.bos], [0]
    for message_ids, message_mask in rendered[:keep]:
        ids += message_ids
        mask += message_mask
    return Rendered(ids, mask, dropped)


def render_prompt(messages: Sequence[Mapping[str, Any]], tokenizer: Tokenizer) -> list[int]:
    """The prompt for the next answer: everything up to and including <|assistant_start|>."""
    return fit_prompt(messages, tokenizer)[0]


def fit_prompt(
    messages: Sequence[Mapping[str, Any]], tokenizer: Tokenizer, max_tokens: int | None = None
) -> tuple[list[int], int]:
    """The prompt without the oldest pairs of question and answer, as many as needed to fit into `max_tokens`.

    The system text and the newest message stay in any case. Returns the prompt and the number of dropped messages.

    It begins with the newest message and does not encode messages that cannot fit, so that an arbitrarily long
    conversation costs no more than `max_tokens`.
    """
    system, turns = check_messages(messages)
    if len(turns) % 2 == 0:
        raise UserError(
            f"messages[{len(messages) - 1}] is an assistant message: an answer can only follow a user message, so "
            "end the messages with one."
        )
    start, rest = len(turns) - 1, list[int]()
    first = _render_message(turns[start], tokenizer, system)[0]
    while start:
        older = turns[start - 2 : start]
        characters = sum(len(part["text"]) for turn in older for part in _parts(turn["content"]))
        if max_tokens is not None and characters > max_tokens * tokenizer.max_token_bytes:
            break
        question = _render_message(older[0], tokenizer, system)[0]
        newer = [
            *_render_message(older[1], tokenizer, None)[0],
            *_render_message(turns[start], tokenizer, None)[0],
        ]
        if max_tokens is not None and 2 + len(question) + len(newer) + len(rest) > max_tokens:
            break
        first, rest, start = question, newer + rest, start - 2
    return [tokenizer.bos, *first, *rest, tokenizer.special["<|assistant_start|>"]], start


def overlap(text: str, stop: str) -> int:
    """The length of the longest suffix of `text` that is a proper prefix of `stop`."""
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)


class ReplyStream:
    """Generated tokens as pieces of an assistant message, incrementally: (type of part, text).

    A piece without text begins a part of its type, so the joined pieces equal `parse_reply` of all tokens. A
    character is held back until its last byte has arrived.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._names = {token_id: name for name, token_id in tokenizer.special.items()}
        self._tokenizer, self._begun = tokenizer, False
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self.kind = "text"  # type of the part that the next token belongs to
        self.ended = False  # another message has begun: further tokens are ignored

    def push(self, *ids: int) -> list[Piece]:
        pieces, start = list[Piece](), 0
        for at, token_id in enumerate(ids):
            name = self._names.get(token_id)
            if name is not None:  # text between special tokens is decoded together
                pieces += [*self._decode(ids[start:at]), *self._mark(name, first=not self._begun and at == 0)]
                start = at + 1
        self._begun = self._begun or bool(ids)
        return [*pieces, *self._decode(ids[start:])]

    def _decode(self, ids: Sequence[int]) -> list[Piece]:
        """The characters that are complete so far."""
        text = self._utf8.decode(self._tokenizer.decode_bytes(ids)) if ids and not self.ended else ""
        return [(self.kind, text)] if text else []

    def _mark(self, name: str, first: bool) -> list[Piece]:
        """A special token begins or ends a part, or ends the reply."""
        if self.ended:
            return []
        if name in _OPENS:
            return [*self._switch_to(_OPENS[name]), (self.kind, "")]
        if name in _CLOSES:
            return self._switch_to("text") if self.kind == _CLOSES[name] else []
        if first and name == "<|assistant_start|>":
            return []
        self.ended = True
        return self.flush()

    def flush(self) -> list[Piece]:
        """The rest: U+FFFD for an incomplete character."""
        return self._switch_to(self.kind)

    def _switch_to(self, kind: str) -> list[Piece]:
        before, self.kind = self.kind, kind
        rest = self._utf8.decode(b"", final=True)
        return [(before, rest)] if rest else []


def parse_reply(ids: Iterable[int], tokenizer: Tokenizer) -> list[Part]:
    """Generated tokens as the parts of an assistant message: the inverse of `render`.

    Accepts anything a model can produce: a reply that stops early, a part that is never closed, an end without a
    start. A token that begins another message ends the reply. Adjacent texts become one part.
    """
    stream = ReplyStream(tokenizer)
    return join_pieces([*stream.push(*ids), *stream.flush()])


def join_pieces(pieces: Iterable[Piece]) -> list[Part]:
    """Joins the pieces of a stream to parts."""
    parts: list[Part] = []
    for kind, text in pieces:
        if text and parts and parts[-1]["type"] == kind:
            parts[-1]["text"] += text
        else:
            parts.append({"type": kind, "text": text})
    return parts


def _render_message(
    message: Mapping[str, Any], tokenizer: Tokenizer, system: str | None
) -> tuple[list[int], list[int]]:
    """The tokens and the loss mask of one message, from its start token to its end token; the system text, if any,
    precedes that of a user message."""
    special = tokenizer.special
    parts = _parts(message["content"])
    if message["role"] == "user":
        text = "".join(part["text"] for part in parts)
        if system is not None:
            text = f"{system}\n\n{text}"
        ids = [special["<|user_start|>"], *tokenizer.encode(text), special["<|user_end|>"]]
        return ids, [0] * len(ids)

    ids, mask = [special["<|assistant_start|>"]], [0]
    for part in parts:
        part_ids, trained = tokenizer.encode(part["text"]), 1
        if part["type"] in _TOOL_PARTS:
            start, end, trained = _TOOL_PARTS[part["type"]]
            part_ids = [special[start], *part_ids, special[end]]
        ids += part_ids
        mask += [trained] * len(part_ids)
    ids.append(special["<|assistant_end|>"])
    mask.append(1)
    return ids, mask


def _parts(content: str | Sequence[Mapping[str, str]]) -> Sequence[Mapping[str, str]]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def check_messages(messages: Any) -> tuple[str | None, Sequence[Mapping[str, Any]]]:
    """Validates messages. Returns the system text, if any, and the messages after it, which alternate from user."""
    if isinstance(messages, str) or not isinstance(messages, Sequence):
        raise UserError('"messages" must be a list of {"role", "content"} objects.')
    for i, message in enumerate(messages):
        _check_content(i, message)
    system = None
    if messages and messages[0]["role"] == "system":
        system = "".join(part["text"] for part in _parts(messages[0]["content"]))
    first = 1 if system is not None else 0
    turns = messages[first:]
    if not turns:
        raise UserError("A conversation needs at least one user message.")
    for i, message in enumerate(turns):
        expected = ("user", "assistant")[i % 2]
        if message["role"] != expected:
            raise UserError(f"messages[{first + i}] has role {message['role']!r}, expected {expected!r}.")
    return system, turns


def _check_content(i: int, message: Any) -> None:
    if not isinstance(message, Mapping):
        raise UserError(f'messages[{i}] must be an object with "role" and "content", not {message!r:.60}.')
    role, content = message.get("role"), message.get("content")
    if role not in ("system", "user", "assistant"):
        raise UserError(f"messages[{i}] has role {role!r:.60}: use 'system', 'user' or 'assistant'.")
    if isinstance(content, str):
        return
    if not isinstance(content, Sequence):
        raise UserError(f"messages[{i}] has content {content!r:.60}: it must be a string or a list of parts.")
    allowed = ("text", "python", "output") if role == "assistant" else ("text",)
    for part in content:
        if not isinstance(part, Mapping) or not isinstance(part.get("text"), str):
            raise UserError(f'messages[{i}] has part {part!r:.60}: it must be {{"type": ..., "text": ...}}.')
        if part.get("type") not in allowed:
            raise UserError(
                f"messages[{i}] has a part of type {part.get('type')!r:.60}: "
                f"{'an' if role == 'assistant' else 'a'} {role} message may have {', '.join(allowed)}."
            )
