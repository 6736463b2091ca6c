"""A conversation with a model: what was said, the prompt that it makes, and the answer while it comes.

    Speaker       a trained model, loaded, with the engine that writes and the tool that its answers may call
    Dialogue      with a chat model: questions and answers, rendered with its special tokens
    Continuation  with a base model, which knows no questions: it goes on with a text
    Answer        one answer on its way: iterate over its pieces; `stop` ends it early

When a dialogue outgrows the context, its oldest pairs of question and answer are left out of the prompt, not
of what is kept. A quarter of the context (or less, if fewer tokens are wanted) is left free for the answer.

The engine keeps what it has read in its cache, so that the next prompt, which begins with the same tokens,
costs only what is new in it.
"""

import queue
import secrets
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from nanorun.errors import UserError
from nanorun.infer.engine import Engine, Event, Reply, Request, Sampling, Settings, Tool
from nanorun.infer.load import load_model
from nanorun.runs import CHAT_KINDS, runs_for_chat
from nanorun.text.chat import ConversationCut, Part, Piece, join_pieces, render, render_prompt
from nanorun.tools.calls import ToolFunction, ToolState, calculate, python_tool
from nanorun.tools.sandbox import Sandbox


@dataclass(frozen=True)
class Options:
    model: str | None = None  # a run; None: the newest chat model, or else the newest base model
    sampling: Sampling = field(default_factory=lambda: Sampling(temperature=0.6, top_k=50))
    max_tokens: int = 512
    system: str | None = None
    tools: Literal["calculator", "python", "none"] = "calculator"
    int8: bool = False
    speculate: Literal["lookup", "draft"] | None = None
    draft: str | None = None  # the run that guesses
    slots: int = 1  # answers at a time
    max_queue: int = 256  # answers that may wait
    events_per_s: int | None = None  # of all answers together; None: one a token


class Speaker:
    """Close it, or use it in a `with`."""

    def __init__(self, options: Options) -> None:
        function = _function(options.tools)
        loaded = load_model(options.model, runs_for_chat())
        self.name, self.step, config, model = loaded.run, loaded.step, loaded.config, loaded.model
        self.chats = config.kind in CHAT_KINDS
        self.parameters, self.data = config.model.total_parameters, config.data
        if not self.chats and (options.system is not None or options.tools == "python"):
            unknown = "--system" if options.system is not None else "--tools python"
            raise UserError(f"'{self.name}' is a base model, which only continues text: leave out {unknown}.")
        draft = None
        if options.draft is not None:
            loaded_draft = load_model(options.draft)
            draft, draft_tokenizer = loaded_draft.model, loaded_draft.config.tokenizer
            if draft_tokenizer != config.tokenizer:
                raise UserError(
                    f"'{options.draft}' reads with the tokenizer '{draft_tokenizer}' and '{self.name}' with "
                    f"'{config.tokenizer}': a model can only guess for one that shares its tokenizer."
                )
        self.tokenizer_name = config.tokenizer
        self.tokenizer = tokenizer = loaded.tokenizer
        settings = Settings(
            options.slots,
            options.max_queue,
            int8=options.int8,
            speculate=options.speculate,
            events_per_s=options.events_per_s,
        )
        self.engine = Engine(model, tokenizer, settings, draft=draft)
        self.tool: Callable[[], Tool] | None = None
        self.tool_name: str | None = None
        if self.chats and function is not None:
            self.tool, self.tool_name = lambda: ToolState(tokenizer, function), options.tools
        # Whatever begins another message ends an answer. A base model has not learned what the others mean.
        tools = {token for token in tokenizer.special if "python" in token or "output" in token}
        kept = tools if self.chats else set()
        self.stop_ids = [token_id for token, token_id in tokenizer.special.items() if token not in kept]

    def __enter__(self) -> "Speaker":
        return self

    def __exit__(self, *_: object) -> None:
        self.engine.close()


def _function(tools: str) -> ToolFunction | None:
    if tools == "python":
        return python_tool(Sandbox.probe())
    return calculate if tools == "calculator" else None


class Answer:
    """`for kind, text in answer`; then it has `parts` and `reply`."""

    parts: list[Part]
    reply: Reply

    def __init__(self, speaker: Speaker, request: Request, keep: Callable[["Answer"], None]) -> None:
        self.request, self._speaker, self._keep = request, speaker, keep
        self._arrived = queue.SimpleQueue[Event | BaseException | None]()

    def stop(self) -> None:
        """Ends it soon, and what there is of it is kept. A signal handler may call this."""
        self._arrived.put(None)

    def __iter__(self) -> Iterator[Piece]:
        pieces, reply = list[Piece](), None
        handle = self._speaker.engine.submit(self.request, self._arrived.put)
        try:
            while reply is None:
                event = self._arrived.get()
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
        kept = [("output" if kind == "guess" else kind, text) for kind, text in pieces]  # as chat data has it
        self.parts, self.reply = join_pieces(kept), reply
        self._keep(self)

    @property
    def text(self) -> str:
        """What was said, without the tool's part in it."""
        text = "".join(part["text"] for part in self.parts if part["type"] == "text")
        return text.strip() if self._speaker.chats else text

    @property
    def tokens(self) -> int:
        """How many the model chose."""
        return self.reply.forced.count(False)

    @property
    def tokens_per_s(self) -> float | None:
        """After the first."""
        rest = self.reply.seconds - self.reply.first_token_s
        return (self.tokens - 1) / rest if self.tokens > 1 and rest > 0 else None

    def record(self) -> dict[str, Any]:
        speed = self.tokens_per_s
        return {
            "text": self.text,
            "parts": self.parts,
            "finish": self.reply.finish,
            "model": self._speaker.name,
            "step": self._speaker.step,
            "prompt_tokens": self.reply.prompt_tokens,
            "tokens": self.tokens,
            "tokens_per_s": round(speed, 1) if speed is not None else None,
            "first_token_s": round(self.reply.first_token_s, 4),
            "seed": self.request.sampling.seed,
        }


class Conversation:
    """What both kinds share: the settings, and how an answer is begun."""

    def __init__(self, speaker: Speaker, sampling: Sampling, max_tokens: int) -> None:
        self.speaker, self.max_tokens = speaker, max_tokens
        self.sampling = sampling
        self.forgetful = False  # the newest prompt had to leave out the oldest part
        self._answers = 0  # each takes its own seed, and all of them can be had again

    @property
    def sampling(self) -> Sampling:
        return self._sampling

    @sampling.setter
    def sampling(self, sampling: Sampling) -> None:
        if sampling.seed is None:
            sampling = replace(sampling, seed=secrets.randbits(32))
        self._sampling = sampling

    @property
    def room(self) -> int:
        """Tokens that a prompt may have so that there is room for an answer."""
        context = self.speaker.engine.context
        return context - min(self.max_tokens, max(context // 4, 1))

    def reset(self) -> None:
        self.forgetful, self._answers = False, 0

    def restart_seeds(self) -> None:
        """The next answer is drawn with the seed itself."""
        self._answers = 0

    def _begin(self, prompt: list[int], keep: Callable[[Answer], None]) -> Answer:
        assert self.sampling.seed is not None
        sampling = replace(self.sampling, seed=self.sampling.seed + self._answers)
        speaker, engine = self.speaker, self.speaker.engine
        request = Request(prompt, sampling, self.max_tokens, speaker.stop_ids, tool=speaker.tool)
        request.check(engine.context, engine.vocab_size, has_text=True)
        self._answers += 1
        return Answer(speaker, request, keep)


class Dialogue(Conversation):
    def __init__(
        self, speaker: Speaker, sampling: Sampling, max_tokens: int, system: str | None = None
    ) -> None:
        super().__init__(speaker, sampling, max_tokens)
        self.system = system
        self.turns: list[tuple[str, str | list[Part]]] = []  # question and answer
        self._question: str | None = None  # the last one, also when it got no answer

    def ask(self, question: str) -> Answer:
        if not question.strip():
            raise UserError("There is no question: type one.")

        def keep(answer: Answer) -> None:
            parts = answer.parts
            if parts:  # else it was stopped before its first word
                simple = len(parts) == 1 and parts[0]["type"] == "text"
                self.turns.append((question, parts[0]["text"] if simple else parts))

        prompt = self._prompt(question)
        self._question = question
        return self._begin(prompt, keep)

    def retry(self) -> Answer:
        """Another answer to the last question, in place of the one that it got."""
        if self._question is None:
            raise UserError("There is no question to answer again yet.")
        if self.turns and self.turns[-1][0] == self._question:
            self.turns.pop()
        return self.ask(self._question)

    def reset(self) -> None:
        super().reset()
        self.turns, self._question = [], None

    def lines(self) -> list[dict[str, Any]]:
        """What is kept of it: one conversation, as chat data has them."""
        return [{"messages": self._messages()}] if self.turns else []

    def load(self, record: Mapping[str, Any]) -> None:
        """Goes on with a conversation that was kept."""
        render(record, self.speaker.tokenizer)  # says what is wrong with it
        messages = list(record["messages"])
        system = messages.pop(0)["content"] if messages[0]["role"] == "system" else None
        if len(messages) % 2:
            raise UserError("The conversation ends with a question: it must end with an answer.")
        self.reset()
        self.system = system if system is None or isinstance(system, str) else _text(system)
        for question, answer in zip(messages[::2], messages[1::2], strict=True):
            asked = question["content"]
            self.turns.append((asked if isinstance(asked, str) else _text(asked), answer["content"]))
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
        tokenizer, context = self.speaker.tokenizer, self.speaker.engine.context
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", ConversationCut)
            try:
                prompt = render_prompt(messages, tokenizer, self.room)
            except UserError:  # the question alone takes more than its share
                prompt = render_prompt(messages, tokenizer, context - 1)
        self.forgetful = any(issubclass(warning.category, ConversationCut) for warning in caught)
        return prompt


class Continuation(Conversation):
    def __init__(self, speaker: Speaker, sampling: Sampling, max_tokens: int) -> None:
        super().__init__(speaker, sampling, max_tokens)
        self._texts: list[list[int]] = []  # the last is the one that goes on
        self._last: tuple[int, list[int], list[int]] | None = None  # which of them, how it was, its prompt

    def ask(self, text: str) -> Answer:
        """Goes on with this text, or if it is empty with the one before."""
        tokenizer = self.speaker.tokenizer
        if text or not self._texts or self.ended:
            begun = [tokenizer.bos, *tokenizer.encode(text)]
            return self._go_on(len(self._texts), begun, begun)
        begun = prompt = self._texts[-1]
        self.forgetful = len(begun) > self.room
        if self.forgetful:
            prompt = [tokenizer.bos, *begun[-(self.room // 2 + 1) :]]
        return self._go_on(len(self._texts) - 1, begun, prompt)

    def retry(self) -> Answer:
        """Goes on from the same place in another way."""
        if self._last is None:
            raise UserError("There is no text to go on with in another way yet.")
        return self._go_on(*self._last)

    def reset(self) -> None:
        super().reset()
        self._texts, self._last = [], None

    def lines(self) -> list[dict[str, Any]]:
        """What is kept: the texts, as data for a base model has them."""
        return [{"text": text} for text in map(self._decode, self._texts) if text]

    @property
    def ended(self) -> bool:
        """Whether the model has ended the text, so that there is nothing to go on with."""
        return bool(self._texts) and self.speaker.tokenizer.is_special(self._texts[-1][-1])

    @property
    def begun(self) -> str:
        """What the model last went on with."""
        return self._decode(self._last[1]) if self._last is not None else ""

    def _decode(self, ids: list[int]) -> str:
        tokenizer = self.speaker.tokenizer
        return tokenizer.decode(i for i in ids if not tokenizer.is_special(i))

    def _go_on(self, number: int, begun: list[int], prompt: list[int]) -> Answer:
        def keep(answer: Answer) -> None:
            self._texts[number:] = [[*begun, *answer.reply.ids]]

        self._last = number, begun, prompt
        return self._begin(prompt, keep)


def converse(speaker: Speaker, options: Options) -> Dialogue | Continuation:
    if speaker.chats:
        return Dialogue(speaker, options.sampling, options.max_tokens, options.system)
    return Continuation(speaker, options.sampling, options.max_tokens)


def _text(parts: list[Part]) -> str:
    return "".join(part["text"] for part in parts)
