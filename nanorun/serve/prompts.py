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
from nanorun.text.chat import Part, fit_prompt
from nanorun.text.tokenizer import Tokenizer

ANSWER_SHARE = 4  # with truncation, a quarter of the context is reserved for the answer


class PromptEncoder:
    def __init__(self, tokenizer: Tokenizer, context: int) -> None:
        self.tokenizer, self.context = tokenizer, context

    def encode_messages(
        self, messages: Sequence[Message], truncate: bool, max_tokens: int | None
    ) -> tuple[list[list[int]], int]:
        """Returns the prompt, and how many of the oldest messages were left out."""
        turns = _turns(messages)  # [system], user, assistant, ..., user, as text/chat.py wants them
        kept = turns
        if truncate:  # the system message and the newest one are never left out
            kept = [turn for turn in turns if turn is turns[-1] or turn["role"] == "system"]
        texts = [part["text"] for turn in kept for part in turn["content"]]
        self._check_size(sum(len(text.encode("utf-8", "replace")) for text in texts), "messages")
        reserved = max(self.context // ANSWER_SHARE, 1)
        max_prompt = self.context - min(max_tokens or reserved, reserved)
        try:
            ids, left_out = fit_prompt(turns, self.tokenizer, max_prompt if truncate else None)
        except UserError as error:
            raise ApiError(400, str(error), "invalid_value", "messages") from error
        self._check_length(len(ids), "messages")
        return [ids], left_out

    def encode_texts(self, prompts: Sequence[str | Sequence[int]]) -> tuple[list[list[int]], int]:
        return [self._encode_text(prompt) for prompt in prompts], 0

    def _encode_text(self, prompt: str | Sequence[int]) -> list[int]:
        tokenizer = self.tokenizer
        if isinstance(prompt, str):
            self._check_size(len(prompt.encode("utf-8", "replace")), "prompt")
            ids: Sequence[int] = tokenizer.encode(prompt)
        else:
            self._check_length(len(prompt), "prompt")
            ids = prompt[1:] if prompt[:1] == [tokenizer.bos] else prompt
            invalid = next((i for i in ids if i >= tokenizer.vocab_size or tokenizer.is_special(i)), None)
            if invalid is not None:
                allowed = f"the tokens of a text are below {tokenizer.vocab_size} and not special"
                raise ApiError(400, f"The prompt has token {invalid}: {allowed}.", param="prompt")
        ids = [tokenizer.bos, *ids]
        self._check_length(len(ids), "prompt")
        return ids

    def _check_size(self, size: int, param: str) -> None:
        """Rejects what cannot fit, before it is encoded."""
        if size > self.context * self.tokenizer.max_token_bytes:
            self._check_length(-(-size // self.tokenizer.max_token_bytes), param, "at least ")

    def _check_length(self, tokens: int, param: str, about: str = "") -> None:
        if tokens >= self.context:
            remedy = ", or set truncation to auto." if param == "messages" else "."
            message = (
                f"This model's maximum context length is {self.context} tokens, including the answer. "
                f"However, your {param} resulted in {about}{tokens} tokens. Please reduce their length{remedy}"
            )
            raise ApiError(400, message, "context_length_exceeded", param)


def _turns(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Joins neighbouring messages of one role and moves system messages to the front."""
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
