"""A conversation with a model: its history, the prompt rendered from it, and the answer while it streams.

    Dialogue      with a chat model: questions and answers, rendered with its special tokens
    Continuation  with a base model: it continues a text
    ChatAnswer    one answer: iterate over its pieces; `stop` ends it early

When a dialogue exceeds the context, the prompt leaves out its oldest pairs of question and answer; the history
keeps them. A quarter of the context (or less, with a smaller `max_tokens`) is reserved for the answer.

The engine keeps the prefix of a conversation in its KV cache, so the next prompt, which begins with the same
tokens, prefills only its new part.
"""

import queue
import secrets
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from nanorun.errors import UserError
from nanorun.infer.engine import Event, Reply, Request, Sampling, Settings
from nanorun.infer.load import ServedModel, ToolName
from nanorun.infer.request import DEFAULT_SAMPLING
from nanorun.text.chat import Part, Piece, fit_prompt, join_pieces, render


@dataclass(frozen=True)
class ChatOptions:
    model: str | None = None  # a run; None: the one that was trained last
    sampling: Sampling = DEFAULT_SAMPLING
    max_tokens: int = 512
    system: str | None = None
    tools: ToolName = "calculator"
    int8: bool = False
    speculate: Literal["lookup", "draft"] | None = None
    draft: str | None = None  # the run of the draft model

    def load(self) -> ServedModel:
        settings = Settings(slots=1, int8=self.int8, speculate=self.speculate)
        model = ServedModel(self.model, settings, tools=self.tools, draft=self.draft)
        if self.system is not None and not model.is_chat_model:
            model.close()
            raise UserError(f"'{model.name}' is a base model, which only continues text: leave out --system.")
        return model


class ChatAnswer:
    """`for kind, text in answer`; afterwards it has `parts` and `reply`."""

    parts: list[Part]
    reply: Reply

    def __init__(self, model: ServedModel, request: Request, on_end: Callable[["ChatAnswer"], None]) -> None:
        self.request, self._model, self._on_end = request, model, on_end
        self._events = queue.SimpleQueue[Event | BaseException | None]()

    def stop(self) -> None:
        """Ends the answer soon and keeps its text so far. Safe to call in a signal handler."""
        self._events.put(None)

    def __iter__(self) -> Iterator[Piece]:
        pieces, reply = list[Piece](), None
        handle = self._model.engine.submit(self.request, self._events.put)
        try:
            while reply is None:
                event = self._events.get()
                if event is None:
                    handle.cancel()
                    continue
                if isinstance(event, BaseException):
                    raise event
                reply = event.reply
                pieces += event.pieces
                yield from event.pieces
        finally:
            handle.cancel()
        # Chat data has no "guess": an output is an output, whoever wrote it.
        self.parts = join_pieces(("output" if kind == "guess" else kind, text) for kind, text in pieces)
        self.reply = reply
        self._on_end(self)

    @property
    def text(self) -> str:
        """The answer without its tool calls."""
        return self.reply.text.strip() if self._model.is_chat_model else self.reply.text

    @property
    def tokens(self) -> int:
        """How many tokens were sampled."""
        return self.reply.forced.count(False)

    @property
    def tokens_per_s(self) -> float | None:
        """After the first token."""
        rest = self.reply.seconds - self.reply.first_token_s
        return (self.tokens - 1) / rest if self.tokens > 1 and rest > 0 else None

    def record(self) -> dict[str, Any]:
        speed = self.tokens_per_s
        return {
            "text": self.text,
            "parts": self.parts,
            "finish": self.reply.finish,
            "model": self._model.name,
            "kind": self._model.config.kind,
            "step": self._model.step,
            "prompt_tokens": self.reply.prompt_tokens,
            "tokens": self.tokens,
            "tokens_per_s": round(speed, 1) if speed is not None else None,
            "first_token_s": round(self.reply.first_token_s, 4),
            "seed": self.request.sampling.seed,
        }


class Conversation:
    """What both kinds share: the settings, and how an answer starts."""

    def __init__(self, model: ServedModel, options: ChatOptions) -> None:
        self.model, self.max_tokens = model, options.max_tokens
        self.sampling = options.sampling
        if self.sampling.seed is None:
            self.sampling = replace(self.sampling, seed=secrets.randbits(32))
        self.truncated = False  # the newest prompt left out the oldest part
        self.answers = 0  # each answer has a seed of its own, and all are reproducible

    @property
    def max_prompt(self) -> int:
        """The longest prompt, in tokens, that leaves room for an answer."""
        context = self.model.engine.context
        return context - min(self.max_tokens, max(context // 4, 1))

    def reset(self) -> None:
        self.truncated, self.answers = False, 0

    def _answer(self, prompt: list[int], on_end: Callable[[ChatAnswer], None]) -> ChatAnswer:
        assert self.sampling.seed is not None
        sampling = replace(self.sampling, seed=self.sampling.seed + self.answers)
        model, engine = self.model, self.model.engine
        request = Request(prompt, sampling, self.max_tokens, model.stop_ids, tool=model.tool)
        request.check(engine.context, engine.vocab_size, has_text=True)
        self.answers += 1
        return ChatAnswer(model, request, on_end)


class Dialogue(Conversation):
    def __init__(self, model: ServedModel, options: ChatOptions) -> None:
        super().__init__(model, options)
        self.system = options.system
        self.turns: list[tuple[str, str | list[Part]]] = []  # question and answer
        self._question: str | None = None  # the last one, even if it has no answer

    def ask(self, question: str) -> ChatAnswer:
        if not question.strip():
            raise UserError("There is no question: type one.")

        def add_turn(answer: ChatAnswer) -> None:
            parts = answer.parts
            if parts:  # otherwise it was stopped before its first word
                is_text = len(parts) == 1 and parts[0]["type"] == "text"
                self.turns.append((question, parts[0]["text"] if is_text else parts))

        prompt = self._prompt(question)
        self._question = question
        return self._answer(prompt, add_turn)

    def retry(self) -> ChatAnswer:
        """Replaces the answer to the last question with another one."""
        if self._question is None:
            raise UserError("There is no question to answer again yet.")
        if self.turns and self.turns[-1][0] == self._question:
            self.turns.pop()
        return self.ask(self._question)

    def reset(self) -> None:
        super().reset()
        self.turns, self._question = [], None

    def lines(self) -> list[dict[str, Any]]:
        """The lines of a saved file: one conversation, in the format of chat data."""
        return [{"messages": self._messages()}] if self.turns else []

    def load(self, record: Mapping[str, Any]) -> None:
        """Continues a saved conversation."""
        render(record, self.model.tokenizer)  # raises if it is malformed
        messages = [dict(message) for message in record["messages"]]
        for message in messages:
            if message["role"] != "assistant" and not isinstance(message["content"], str):
                message["content"] = "".join(part["text"] for part in message["content"])
        system = messages.pop(0)["content"] if messages[0]["role"] == "system" else None
        if len(messages) % 2:
            raise UserError("The conversation ends with a question: it must end with an answer.")
        self.reset()
        self.system = system
        self.turns = [
            (question["content"], answer["content"])
            for question, answer in zip(messages[::2], messages[1::2], strict=True)
        ]
        self._question = self.turns[-1][0]

    def _messages(self) -> list[dict[str, Any]]:
        messages: list[dict[str, Any]] = []
        if self.system is not None:
            messages.append({"role": "system", "content": self.system})
        for question, answer in self.turns:
            messages.append({"role": "user", "content": question})
            messages.append({"role": "assistant", "content": answer})
        return messages

    def _prompt(self, question: str) -> list[int]:
        messages = [*self._messages(), {"role": "user", "content": question}]
        prompt, dropped = fit_prompt(messages, self.model.tokenizer, self.max_prompt)
        if len(prompt) > self.max_prompt:  # the question alone exceeds its share
            prompt, dropped = fit_prompt(messages, self.model.tokenizer, self.model.engine.context - 1)
        self.truncated = dropped > 0
        return prompt


class Continuation(Conversation):
    def __init__(self, model: ServedModel, options: ChatOptions) -> None:
        super().__init__(model, options)
        self._texts: list[list[int]] = []  # tokens; the model continues the last one
        self._last: tuple[int, list[int], list[int]] | None = None  # its index, its text before, its prompt

    def ask(self, text: str) -> ChatAnswer:
        """Continues this text, or the previous one if it is empty."""
        tokenizer = self.model.tokenizer
        if text or not self._texts or self.ended:
            start = [tokenizer.bos, *tokenizer.encode(text)]
            return self._continue(len(self._texts), start, start)
        start = prompt = self._texts[-1]
        self.truncated = len(start) > self.max_prompt
        if self.truncated:
            prompt = [tokenizer.bos, *start[-(self.max_prompt // 2 + 1) :]]
        return self._continue(len(self._texts) - 1, start, prompt)

    def retry(self) -> ChatAnswer:
        """Continues from the same place with another sample."""
        if self._last is None:
            raise UserError("There is no text to continue again yet.")
        return self._continue(*self._last)

    def reset(self) -> None:
        super().reset()
        self._texts, self._last = [], None

    def lines(self) -> list[dict[str, Any]]:
        """The lines of a saved file: the texts, in the format of data for a base model."""
        return [{"text": text} for text in map(self._decode, self._texts) if text]

    @property
    def ended(self) -> bool:
        """Whether the model has ended the text, so that it cannot be continued."""
        return bool(self._texts) and self.model.tokenizer.is_special(self._texts[-1][-1])

    @property
    def start(self) -> str:
        """The text that the last answer continues."""
        return self._decode(self._last[1]) if self._last is not None else ""

    def _decode(self, ids: list[int]) -> str:
        tokenizer = self.model.tokenizer
        return tokenizer.decode(i for i in ids if not tokenizer.is_special(i))

    def _continue(self, index: int, start: list[int], prompt: list[int]) -> ChatAnswer:
        def replace_text(answer: ChatAnswer) -> None:
            self._texts[index:] = [[*start, *answer.reply.ids]]

        self._last = index, start, prompt
        return self._answer(prompt, replace_text)
