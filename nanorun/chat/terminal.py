"""`nanorun chat`: an interactive conversation in the terminal, or one question from a script.

Ctrl-C stops an answer: a signal handler asks the engine to cancel the request, the answer ends normally, and the
conversation keeps its text so far. At the prompt, Ctrl-C twice or Ctrl-D exits.
"""

import contextlib
import difflib
import json
import signal
import sys
import termios
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from nanorun import home
from nanorun.chat import history
from nanorun.chat.conversation import ChatAnswer, ChatOptions, Continuation, Dialogue
from nanorun.chat.input import enable_bracketed_paste, read_message, terminal_without
from nanorun.chat.screen import Screen
from nanorun.console import count, show_json
from nanorun.errors import UserError
from nanorun.json_files import load_json

_SETTINGS: dict[str, type] = {
    "temperature": float,
    "top_k": int,
    "top_p": float,
    "min_p": float,
    "repetition_penalty": float,
    "seed": int,
    "max_tokens": int,
}
_CHAT_MODELS_ONLY = ("system", "load")
_HELP = {
    "help": "list the commands",
    "reset": "start a new conversation",
    "retry": "generate another answer to the last question",
    "system TEXT": "set the system message (/system off removes it)",
    "save [FILE]": "save the conversation in the format of chat data",
    "load FILE": "continue a saved conversation",
    "temperature X": "0 always takes the most likely token; higher values vary more",
    "verbose": "show or hide the speed of each answer",
    "quit": "exit (or Ctrl-D)",
}


def chat(options: ChatOptions, question: str | None, *, as_json: bool, verbose: bool) -> None:
    """Answers the question, from the argument or from piped stdin; without one, starts a conversation."""
    piped = sys.stdin is None or not sys.stdin.isatty()
    if question == "-" or (question is None and piped):
        question = _read_all()
    elif question is None and as_json:
        raise UserError("--json answers one question: give it with -p, or on stdin.")
    for text in (question, options.system):
        _check_utf8(text or "")
    with options.load() as model:
        conversation = (Dialogue if model.is_chat_model else Continuation)(model, options)
        if question is None:
            Terminal(conversation, verbose).run()
        else:
            _answer_once(conversation, question, as_json, verbose)


def _read_all() -> str:
    text = sys.stdin.buffer.read() if sys.stdin is not None else b""
    if not text.strip():
        raise UserError("stdin is empty: pipe a question, or give one with -p.")
    return text.decode("utf-8", "surrogateescape").rstrip("\r\n")


def _check_utf8(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UserError(
            f"The text is not valid UTF-8 at character {error.start + 1}: convert it, for example with "
            "iconv -f latin1 -t utf-8."
        ) from None


def _answer_once(conversation: Dialogue | Continuation, question: str, as_json: bool, verbose: bool) -> None:
    model = conversation.model
    screen = Screen(strip=model.is_chat_model)
    answer = conversation.ask(question)
    if not model.was_named:
        kind = "chat model" if model.is_chat_model else "base model: continues text"
        screen.note(f"answering: '{model.name}' ({kind})")
    elif not model.is_chat_model:
        screen.note(f"'{model.name}' is a base model: it continues the text.")
    try:
        for kind, text in answer:
            if not as_json:
                screen.show(kind, text)
    finally:
        screen.end()
    if as_json:
        show_json(answer.record())
    if verbose:
        screen.note(_speed(answer))


class Terminal:
    """An interactive conversation."""

    def __init__(self, conversation: Dialogue | Continuation, verbose: bool = False) -> None:
        self._conversation, self._verbose = conversation, verbose
        self._chats = isinstance(conversation, Dialogue)
        self._screen = Screen(strip=self._chats)
        self._truncated = False  # the user knows that the oldest part is left out
        self._file: Path | None = None  # the conversation is saved here

    def run(self) -> None:
        # Other verbs treat SIGTERM like Ctrl-C, which only stops the answer here.
        signal.signal(signal.SIGTERM, lambda signum, _: sys.exit(128 + signum))
        model = self._conversation.model
        parameters = count(model.config.model.total_parameters)
        self._screen.note(f"{model.name}: {parameters} parameters, step {model.step:,}")
        if not self._chats:
            self._screen.note(
                "A base model: it continues the text that you type; an empty line continues it."
            )
        self._screen.note("/help lists the commands, Ctrl-C stops an answer, Ctrl-D exits.")
        history.load()
        enable_bracketed_paste()
        with contextlib.suppress(EOFError):
            while True:
                try:
                    self._handle(self._read())
                except UserError as error:
                    self._screen.note(str(error))
                except KeyboardInterrupt:  # between two answers
                    self._screen.note("")

    def _read(self) -> str:
        """A message, or EOFError."""
        interrupted = False
        while True:
            try:
                message = read_message(self._screen.prompt(">"), self._screen.prompt("..."))
                _check_utf8(message)
                history.add(message)
                return message
            except KeyboardInterrupt:
                self._screen.note("")
                if interrupted:
                    raise EOFError from None
                interrupted = True
                self._screen.note("Press Ctrl-C again or Ctrl-D to exit.")
            except EOFError:
                self._screen.note("")
                raise
            except UnicodeDecodeError:
                raise UserError("The text is not valid UTF-8: set your terminal to UTF-8.") from None

    def _handle(self, message: str) -> None:
        slash = message.startswith("/") and "\n" not in message  # several lines are a text
        if slash and not message.startswith("//"):
            name, _, argument = message[1:].partition(" ")
            self._command(name)(argument.strip())
        elif message.strip() or not self._chats:
            text = message.removeprefix("/") if slash else message
            if isinstance(self._conversation, Continuation) and self._conversation.ended and not text:
                self._screen.note("The text has ended. Starting another one:")
            self._answer(self._conversation.ask(text), echo=bool(text))

    def _command(self, name: str) -> Callable[[str], None]:
        command: Callable[[str], None] | None = getattr(self, f"_do_{name}", None)
        if command is not None:
            return command
        if name in _SETTINGS:
            return lambda value: self._set(name, value)
        known = [*(usage.split()[0] for usage in _HELP), *_SETTINGS]
        near = [n for n in known if name and n.startswith(name)] or difflib.get_close_matches(name, known, 1)
        hint = f"did you mean /{near[0]}? " if near else ""
        raise UserError(
            f"Unknown command /{name}: {hint}/help lists the commands; // starts a text with a slash."
        )

    def _answer(self, answer: ChatAnswer, *, echo: bool) -> None:
        truncated = self._conversation.truncated
        if truncated and not self._truncated:
            context = self._conversation.model.engine.context
            self._screen.note(
                f"The conversation exceeds the model's context of {context:,} tokens: its oldest part is left out."
            )
        self._truncated = truncated
        with _on_interrupt(answer.stop), terminal_without(termios.ECHO):
            try:
                if echo and isinstance(self._conversation, Continuation):
                    self._screen.echo(self._conversation.start)
                for kind, text in answer:
                    self._screen.show(kind, text)
            finally:
                self._screen.end()
        if answer.reply.finish == "cancelled":
            self._screen.note("Stopped; the text so far is kept." if answer.parts else "Stopped.")
        elif answer.reply.finish == "length":
            most = self._conversation.max_tokens
            limited = answer.tokens >= most
            reason = f"the limit is {most:,} tokens (/max_tokens)" if limited else "the context is full"
            self._screen.note(f"Truncated: {reason}.")
        elif not answer.parts:
            self._screen.note("The answer is empty." if self._chats else "The text ends here.")
        if self._verbose:
            self._screen.note(_speed(answer))

    # -- commands ------------------------------------------------------------------------------------

    def _do_help(self, _: str) -> None:
        listed = dict(_HELP)
        if not self._chats:
            listed = {name: text for name, text in _HELP.items() if name.split()[0] not in _CHAT_MODELS_ONLY}
            listed["retry"] = "continue from the same place again"
            listed["save [FILE]"] = "save the texts as training data"
        width = max(map(len, listed)) + 3
        others = ", ".join(f"/{name}" for name in _SETTINGS if name != "temperature")
        lines = [f"/{name:<{width}}{text}" for name, text in listed.items()]
        lines.append(f"{others}: likewise; without a value, they show the current one")
        lines.append("To send several lines, paste them, or end each but the last with a backslash (\\).")
        self._screen.note("\n".join(lines))

    def _do_reset(self, _: str) -> None:
        self._conversation.reset()
        self._truncated, self._file = False, None
        self._screen.note("Started a new conversation.")

    def _do_retry(self, _: str) -> None:
        self._answer(self._conversation.retry(), echo=True)

    def _do_system(self, text: str) -> None:
        conversation = self._dialogue("a system message")
        if text:
            conversation.system = None if text == "off" else text
        self._screen.note(
            f"system: {conversation.system}" if conversation.system else "There is no system message."
        )

    def _set(self, name: str, value: str) -> None:
        conversation, kind = self._conversation, _SETTINGS[name]
        if value:
            try:
                number = kind(value)
            except ValueError:
                expected = "an integer" if kind is int else "a number"
                raise UserError(f"{name} is '{value}': it must be {expected}.") from None
            if name != "max_tokens":
                conversation.sampling = replace(conversation.sampling, **{name: number})
            elif number < 1:
                raise UserError(f"max_tokens is {number}: it must be at least 1.")
            else:
                conversation.max_tokens = number
            if name == "seed":
                conversation.answers = 0  # the next answer uses the seed itself
        holder: Any = conversation if name == "max_tokens" else conversation.sampling
        self._screen.note(f"{name}: {getattr(holder, name)}")

    def _do_save(self, name: str) -> None:
        lines = self._conversation.lines()
        if not lines:
            raise UserError("There is nothing to save yet.")
        default = self._file or Path(f"chat-{time.strftime('%Y%m%d-%H%M%S')}.jsonl")
        path = Path(name).expanduser() if name else default
        if path != self._file and path.exists():
            raise UserError(f"{path} already exists: choose another name.")
        text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
        try:
            home.replace_file(path, text.encode("utf-8", "backslashreplace"))  # lone surrogates, as in JSON
        except OSError as error:
            raise UserError(f"{path} cannot be written ({error.strerror}): save to another file.") from error
        self._file = path
        self._screen.note(f"Saved to {path}.")

    def _do_load(self, name: str) -> None:
        conversation = self._dialogue("a conversation")
        if not name:
            raise UserError("Name a file: /load FILE")
        path = Path(name).expanduser()
        try:
            record = load_json(path)
        except OSError as error:
            raise UserError(f"{path} cannot be read ({error.strerror}).") from error
        except ValueError as error:
            raise UserError(f"{path} does not contain one conversation in JSON ({error}).") from error
        conversation.load(record)
        self._file, self._truncated = None, False
        turns = len(conversation.turns)
        self._screen.note(f"Loaded {turns} question{'s' * (turns > 1)} and answer{'s' * (turns > 1)}.")

    def _do_verbose(self, _: str) -> None:
        self._verbose = not self._verbose
        self._screen.note(f"verbose: {'on' if self._verbose else 'off'}")

    def _do_quit(self, _: str) -> NoReturn:
        raise EOFError

    _do_exit = _do_quit

    def _dialogue(self, what: str) -> Dialogue:
        if not isinstance(self._conversation, Dialogue):
            raise UserError(f"A base model only continues text: it does not support {what}.")
        return self._conversation


def _speed(answer: ChatAnswer) -> str:
    """For example '37 tokens, 412 tokens/s, first after 21 ms'."""
    rate = f", {answer.tokens_per_s:,.0f} tokens/s" if answer.tokens_per_s else ""
    plural = "s" * (answer.tokens != 1)
    return f"{answer.tokens} token{plural}{rate}, first after {1e3 * answer.reply.first_token_s:,.0f} ms"


@contextlib.contextmanager
def _on_interrupt(action: Callable[[], None]) -> Iterator[None]:
    """Calls `action` on Ctrl-C instead of raising KeyboardInterrupt."""
    before = signal.signal(signal.SIGINT, lambda *_: action())
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
