"""Requests as the tokens of prompts.

Messages become what `text/chat.py` renders: a system message first, then user and assistant in alternation. OpenAI
allows more, so neighbouring messages of one role are joined with a blank line, and system messages anywhere move to
the front. Text is always encoded as text: it cannot become a special token. Only the type of a part, which is
structure and not text, adds the special tokens of a tool call and its output.
"""

from collections.abc import Sequence
from typing import Any

from nanorun.errors import UserError
from nanorun.serve.errors import ApiError
from nanorun.serve.schema import Message
from nanorun.text.chat import Part, render_prompt
from nanorun.text.tokenizer import Tokenizer

ANSWER_SHARE = 4  # with truncation, a quarter of the context is reserved for the answer


class PromptEncoder:
    def __init__(self, tokenizer: Tokenizer, context: int) -> None:
        self.tokenizer, self.context = tokenizer, context
        self._max_token_bytes = max(int(tokenizer.token_bytes().max()), 1)

    def encode_messages(
        self, messages: Sequence[Message], truncate: bool, max_tokens: int | None
    ) -> tuple[list[list[int]], int]:
        """Returns the prompt, and how many of the oldest messages were left out."""
        turns = _turns(messages)
        all_turns = len(turns)
        if truncate:
            reserved = max(self.context // ANSWER_SHARE, 1)
            turns = self._newest(turns, self.context - min(max_tokens or reserved, reserved))
        size = sum(len(part["text"].encode("utf-8", "replace")) for turn in turns for part in turn["content"])
        self._check_size(size, "messages")
        try:
            ids = render_prompt(turns, self.tokenizer)
        except UserError as error:
            raise ApiError(400, str(error), "invalid_value", "messages") from error
        self._check_length(len(ids), "messages")
        return [ids], all_turns - len(turns)

    def encode_texts(self, prompts: Sequence[str | Sequence[int]]) -> tuple[list[list[int]], int]:
        return [self._encode_text(prompt) for prompt in prompts], 0

    def _encode_text(self, prompt: str | Sequence[int]) -> list[int]:
        tokenizer = self.tokenizer
        if isinstance(prompt, str):
            self._check_size(len(prompt.encode("utf-8", "replace")), "prompt")
            ids: Sequence[int] = tokenizer.encode(prompt)
        else:
            ids = prompt
            invalid = next((i for i in prompt if i >= tokenizer.vocab_size or tokenizer.is_special(i)), None)
            if invalid is not None and invalid != tokenizer.bos:
                allowed = f"the tokens of a text are below {tokenizer.vocab_size} and not special"
                raise ApiError(400, f"The prompt has token {invalid}: {allowed}.", param="prompt")
        if not ids or ids[0] != tokenizer.bos:
            ids = [tokenizer.bos, *ids]
        self._check_length(len(ids), "prompt")
        return list(ids)

    def _newest(self, turns: list[dict[str, Any]], max_tokens: int) -> list[dict[str, Any]]:
        """Leaves out the oldest questions and answers, so that the rest has about `max_tokens` tokens.

        Old messages are not encoded: a long conversation costs no more than the context.
        """
        system = turns[:1] if turns[0]["role"] == "system" else []
        turns = turns[len(system) :]
        left = max_tokens - 3 - sum(self._count(turn) for turn in system)
        start = len(turns)
        for at in range(len(turns) - 1, -1, -1):
            if (
                left < 0
                or sum(len(part["text"]) for part in turns[at]["content"]) > left * self._max_token_bytes
            ):
                break
            left -= self._count(turns[at])
            if left >= 0 and turns[at]["role"] == "user":
                start = at
        start = min(start, len(turns) - 1)  # the newest question is never left out
        return [*system, *turns[start:]]

    def _count(self, turn: dict[str, Any]) -> int:
        """Tokens of a message, with the special tokens around it and around its tool calls."""
        parts: list[dict[str, str]] = turn["content"]
        return 2 + sum(len(self.tokenizer.encode(p["text"])) + 2 * (p["type"] != "text") for p in parts)

    def _check_size(self, size: int, param: str) -> None:
        """Rejects what cannot fit, before it is encoded."""
        if size > self.context * self._max_token_bytes:
            self._check_length(-(-size // self._max_token_bytes), param, "at least ")

    def _check_length(self, tokens: int, param: str, about: str = "") -> None:
        if tokens >= self.context:
            remedy = ", or set truncation to auto." if param == "messages" else "."
            message = (
                f"This model's maximum context length is {self.context} tokens, including the answer. "
                f"However, your {param} resulted in {about}{tokens} tokens. Please reduce their length{remedy}"
            )
            raise ApiError(400, message, "context_length_exceeded", param)


def _turns(messages: Sequence[Message]) -> list[dict[str, Any]]:
    system: list[str] = []
    turns: list[dict[str, Any]] = []
    for at, message in enumerate(messages):
        if message.tool_calls:
            raise _invalid(at, "tool_calls", "The model calls only the tool of the server.")
        parts = _parts(at, message)
        if message.role in ("system", "developer"):
            system.append("".join(part["text"] for part in parts))
        elif turns and turns[-1]["role"] == message.role:
            turns[-1]["content"] += [{"type": "text", "text": "\n\n"}, *parts]
        elif not turns and message.role == "assistant":
            raise _invalid(at, "role", "A conversation begins with a user message.")
        else:
            turns.append({"role": message.role, "content": parts})
    if not turns:
        raise ApiError(400, "There is no user message to answer.", "invalid_value", "messages")
    if turns[-1]["role"] == "assistant":
        raise _invalid(len(messages) - 1, "role", "The last message must be a user message.")
    joined = [{"type": "text", "text": "\n\n".join(system)}]
    return [{"role": "system", "content": joined}, *turns] if system else turns


def _parts(at: int, message: Message) -> list[Part]:
    parts = message.nanorun_parts if message.nanorun_parts is not None else message.content
    if parts is None:
        raise _invalid(at, "content", "A message needs a text.")
    if isinstance(parts, str):
        return [{"type": "text", "text": parts}]
    if message.role != "assistant" and any(part.type != "text" for part in parts):
        raise _invalid(at, "content", "Only an assistant message has parts other than text.")
    return [{"type": "output" if part.type == "guess" else part.type, "text": part.text} for part in parts]


def _invalid(at: int, field: str, reason: str) -> ApiError:
    param = f"messages[{at}].{field}"
    return ApiError(400, f"Invalid '{param}': {reason}", "invalid_value", param)
