"""What a request says, as the tokens that a model reads.

Messages become what `text/chat.py` renders: a system text first, then user and assistant by turns. OpenAI
allows more, so neighbours of one role are joined with a blank line, and system messages wherever they stand
go to the front. Text is encoded as text: whatever it says, it cannot become a special token. Only the kind
of a part, which is structure and not text, adds those that mark a tool's call and its output.
"""

from collections.abc import Sequence
from typing import Any

from nanorun.errors import UserError
from nanorun.serve.errors import ApiError
from nanorun.serve.schema import Message, Part
from nanorun.text.chat import render_prompt
from nanorun.text.tokenizer import Tokenizer

ANSWER_SHARE = 4  # with truncation, a quarter of the context is left for the answer


class Prompts:
    def __init__(self, tokenizer: Tokenizer, context: int) -> None:
        self.tokenizer, self.context = tokenizer, context
        self._longest = max(int(tokenizer.token_bytes().max()), 1)  # bytes of a token

    def of_messages(
        self, messages: Sequence[Message], truncate: bool, max_tokens: int | None
    ) -> tuple[list[int], int]:
        """The prompt, and how many of the oldest messages had to be left out."""
        turns = _turns(messages)
        all_turns = len(turns)
        if truncate:
            answer = max(self.context // ANSWER_SHARE, 1)
            turns = self._newest(turns, self.context - min(max_tokens or answer, answer))
        self._check_size(sum(len(text.encode("utf-8", "replace")) for text in _texts(turns)), "messages")
        try:
            ids = render_prompt(turns, self.tokenizer)
        except UserError as error:
            raise ApiError(400, str(error), param="messages", code="invalid_value") from error
        self._check_length(len(ids), "messages")
        return ids, all_turns - len(turns)

    def of_text(self, prompt: str | Sequence[int]) -> list[int]:
        tokenizer = self.tokenizer
        if isinstance(prompt, str):
            self._check_size(len(prompt.encode("utf-8", "replace")), "prompt")
            ids = [tokenizer.bos, *tokenizer.encode(prompt)]
        else:
            wrong = next((i for i in prompt if i >= tokenizer.vocab_size or tokenizer.is_special(i)), None)
            if wrong is not None and wrong != tokenizer.bos:
                known = f"text has tokens below {tokenizer.vocab_size}, and none of the special ones"
                raise ApiError(400, f"The prompt has token {wrong}: {known}.", param="prompt")
            ids = [tokenizer.bos, *prompt] if not prompt or prompt[0] != tokenizer.bos else list(prompt)
        self._check_length(len(ids), "prompt")
        return ids

    def _newest(self, turns: list[dict[str, Any]], room: int) -> list[dict[str, Any]]:
        """Without the oldest questions and answers, so that about `room` tokens are left."""
        system = turns[:1] if turns[0]["role"] == "system" else []
        turns = turns[len(system) :]
        left = room - 3 - sum(len(self.tokenizer.encode(text)) for text in _texts(system))
        start = len(turns)
        for at in range(len(turns) - 1, -1, -1):
            parts = turns[at]["content"]
            if left < 0 or sum(len(part["text"]) for part in parts) > left * self._longest:
                break
            left -= 2 + sum(
                len(self.tokenizer.encode(part["text"])) + 2 * (part["type"] != "text") for part in parts
            )
            if left >= 0 and turns[at]["role"] == "user":
                start = at
        start = min(start, len(turns) - 1)  # the newest question is never left out
        return [*system, *turns[start:]]

    def _check_size(self, size: int, param: str) -> None:
        """Before it is encoded: what cannot fit in any case."""
        if size > self.context * self._longest:
            self._check_length(-(-size // self._longest), param, "at least ")

    def _check_length(self, tokens: int, param: str, about: str = "") -> None:
        if tokens >= self.context:
            raise ApiError(
                400,
                f"This model's maximum context length is {self.context} tokens, with room for an answer in it. "
                f"However, your {param} resulted in {about}{tokens} tokens. Please reduce their length"
                + (", or set truncation to auto." if param == "messages" else "."),
                param=param,
                code="context_length_exceeded",
            )


def _turns(messages: Sequence[Message]) -> list[dict[str, Any]]:
    system: list[str] = []
    turns: list[dict[str, Any]] = []
    for at, message in enumerate(messages):
        if message.tool_calls:
            raise _wrong(at, "tool_calls", "The model calls no tools but the server's own.")
        parts = _parts(at, message)
        if message.role in ("system", "developer"):
            system.append("".join(part["text"] for part in parts))
        elif turns and turns[-1]["role"] == message.role:
            turns[-1]["content"] += [{"type": "text", "text": "\n\n"}, *parts]
        elif not turns and message.role == "assistant":
            raise _wrong(at, "role", "A conversation begins with a user message.")
        else:
            turns.append({"role": message.role, "content": parts})
    if not turns:
        raise ApiError(400, "There is no user message to answer.", param="messages", code="invalid_value")
    if turns[-1]["role"] == "assistant":
        raise _wrong(
            len(messages) - 1, "role", "The last message must be the user's: it is what is answered."
        )
    return [{"role": "system", "content": "\n\n".join(system)}, *turns] if system else turns


def _parts(at: int, message: Message) -> list[dict[str, str]]:
    parts = message.nanorun_parts if message.nanorun_parts is not None else message.content
    if parts is None:
        raise _wrong(at, "content", "A message needs a text.")
    if isinstance(parts, str):
        return [{"type": "text", "text": parts}]
    if message.role != "assistant" and any(part.type != "text" for part in parts):
        raise _wrong(at, "content", "Only an assistant's message has parts other than text.")
    return [_plain(part) for part in parts]


def _plain(part: Part) -> dict[str, str]:
    return {"type": "output" if part.type == "guess" else part.type, "text": part.text}


def _texts(turns: Sequence[dict[str, Any]]) -> list[str]:
    contents = [turn["content"] for turn in turns]
    return [
        text
        for content in contents
        for text in ([content] if isinstance(content, str) else [part["text"] for part in content])
    ]


def _wrong(at: int, field: str, why: str) -> ApiError:
    param = f"messages[{at}].{field}"
    return ApiError(400, f"Invalid '{param}': {why}", param=param, code="invalid_value")
