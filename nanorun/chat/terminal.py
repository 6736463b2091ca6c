"""`nanorun chat`: talk in the terminal, or ask one question from a script.

Ctrl-C stops an answer: a signal handler asks the engine to cancel, the answer ends in order, and what there
is of it is kept. At the prompt Ctrl-C twice, or Ctrl-D, leaves.
"""

import contextlib
import difflib
import json
import os
import signal
import sys
import termios
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from nanorun.chat import history
from nanorun.chat.conversation import Answer, Continuation, Dialogue, Options, Speaker, converse
from nanorun.chat.screen import Screen
from nanorun.console import count
from nanorun.errors import UserError

_SETTINGS: dict[str, type] = {
    "temperature": float,
    "top_k": int,
    "top_p": float,
    "min_p": float,
    "repetition_penalty": float,
    "seed": int,
    "max_tokens": int,
}
_FOR_DIALOGUES = ("system", "load")  # a base model, which continues texts, has no use for these
_HELP = {
    "help": "what you are reading",
    "reset": "forgets everything that was said",
    "retry": "another answer to the last question",
    "system TEXT": "what the model is told before everything (/system off: nothing)",
    "save [FILE]": "writes the conversation, as chat data",
    "load FILE": "goes on with a conversation that was saved",
    "temperature X": "0 is the likeliest answer, 1 is lively",
    "verbose": "how fast each answer was, or no longer",
    "quit": "leaves (or Ctrl-D)",
}


def chat(options: Options, question: str | None, *, as_json: bool, verbose: bool) -> None:
    """One question if there is one, here or on a stdin that is no terminal; else a conversation."""
    piped = sys.stdin is None or not sys.stdin.isatty()
    if question == "-" or (question is None and piped):
        question = _read_all()
    elif question is None and as_json:
        raise UserError("--json answers one question: give it with -p, or on stdin.")
    for text in (question, options.system):
        _check(text or "")
    with Speaker(options) as speaker:
        conversation = converse(speaker, options)
        if question is None:
            Terminal(conversation, verbose).run()
        else:
            _answer_once(conversation, question, as_json, verbose)


def _read_all() -> str:
    text = sys.stdin.buffer.read() if sys.stdin is not None else b""
    if not text.strip():
        raise UserError("Nothing came in on stdin: pipe a question in, or give one with -p.")
    return text.decode("utf-8", "surrogateescape").rstrip("\r\n")


def _check(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UserError(
            f"The text is not UTF-8 (from character {error.start + 1} on): convert it first, for example with "
            "iconv -f latin1 -t utf-8."
        ) from None


def _answer_once(conversation: Dialogue | Continuation, question: str, as_json: bool, verbose: bool) -> None:
    screen = Screen(tools=False, strip=conversation.speaker.chats)
    answer = conversation.ask(question)
    if not conversation.speaker.chats:
        screen.note(f"'{conversation.speaker.name}' is a base model: it continues the text.")
    try:
        for kind, text in answer:
            if not as_json:
                screen.show(kind, text)
    finally:
        screen.end()
    if as_json:
        # ASCII where a terminal shows it: the text may hold what a terminal obeys
        print(json.dumps(answer.record(), ensure_ascii=sys.stdout.isatty()), flush=True)
    if verbose:
        screen.note(_speed(answer))


class Terminal:
    """One conversation with a person."""

    def __init__(self, conversation: Dialogue | Continuation, verbose: bool = False) -> None:
        self._conversation, self._verbose = conversation, verbose
        self._chats = isinstance(conversation, Dialogue)
        self._screen = Screen(tools=True, strip=self._chats)
        self._forgetful = False  # it was said that the oldest part is left out
        self._file: Path | None = None  # where the conversation was saved
        self._commands: dict[str, Callable[[str], None]] = {
            "help": self._help,
            "reset": self._reset,
            "retry": self._retry,
            "system": self._system,
            "save": self._save,
            "load": self._load,
            "verbose": self._toggle_verbose,
            "quit": self._quit,
            "exit": self._quit,
        }

    def run(self) -> None:
        # Elsewhere a request to end is treated like Ctrl-C, which here means something else.
        signal.signal(signal.SIGTERM, lambda signum, _: sys.exit(128 + signum))
        speaker = self._conversation.speaker
        self._screen.note(f"{speaker.name}: {count(speaker.parameters)} parameters, step {speaker.step:,}")
        if not self._chats:
            self._screen.note(
                "A base model: it continues the text that you begin; an empty line lets it go on."
            )
        self._screen.note("/help lists the commands, Ctrl-C stops an answer, Ctrl-D leaves.")
        history.load()
        with contextlib.suppress(EOFError):
            while True:
                try:
                    self._obey(self._read())
                except UserError as error:
                    self._screen.note(str(error))
                except KeyboardInterrupt:  # between two answers: nothing is lost
                    self._screen.note("")

    def _read(self) -> str:
        """A line, or EOFError."""
        interrupted = False
        while True:
            try:
                line = input(self._screen.prompt())
                _check(line)
                history.add(line)
                return line
            except KeyboardInterrupt:
                self._screen.note("")
                if interrupted:
                    raise EOFError from None
                interrupted = True
                self._screen.note("Ctrl-C again or Ctrl-D leaves.")
            except EOFError:
                self._screen.note("")
                raise
            except UnicodeDecodeError:
                raise UserError("That was not UTF-8: set your terminal to it.") from None

    def _obey(self, line: str) -> None:
        if line.startswith("/") and not line.startswith("//"):
            name, _, argument = line[1:].partition(" ")
            self._command(name)(argument.strip())
        elif line.strip() or not self._chats:
            text = line.removeprefix("/") if line.startswith("//") else line
            if isinstance(self._conversation, Continuation) and self._conversation.ended and not text:
                self._screen.note("That text has ended. Here is another:")
            self._answer(self._conversation.ask(text), echo=bool(text))

    def _command(self, name: str) -> Callable[[str], None]:
        if name in self._commands:
            return self._commands[name]
        if name in _SETTINGS:
            return lambda value: self._set(name, value)
        known = [*self._commands, *_SETTINGS]
        near = [n for n in known if name and n.startswith(name)] or difflib.get_close_matches(name, known, 1)
        hint = f"did you mean /{near[0]}? " if near else ""
        raise UserError(
            f"There is no command /{name}: {hint}/help lists them, and // begins a text with a slash."
        )

    def _answer(self, answer: Answer, *, echo: bool) -> None:
        forgetful = self._conversation.forgetful
        if forgetful and not self._forgetful:
            context = self._conversation.speaker.engine.context
            self._screen.note(
                f"The conversation is longer than the {context:,} tokens that the model sees: from now on it no "
                "longer knows the oldest part."
            )
        self._forgetful = forgetful
        with _on_interrupt(answer.stop), _unechoed():
            try:
                if echo and isinstance(self._conversation, Continuation):
                    self._screen.echo(self._conversation.begun)
                for kind, text in answer:
                    self._screen.show(kind, text)
            finally:
                self._screen.end()
        if answer.reply.finish == "cancelled":
            self._screen.note("Stopped; what there is of it is kept." if answer.parts else "Stopped.")
        elif answer.reply.finish == "length":
            self._screen.note(f"Cut: {self._limit(answer)}.")
        elif not answer.parts:
            self._screen.note("The model had nothing to say." if self._chats else "The text ends here.")
        if self._verbose:
            self._screen.note(_speed(answer))

    def _limit(self, answer: Answer) -> str:
        if answer.tokens >= self._conversation.max_tokens:
            return f"an answer may have {self._conversation.max_tokens:,} tokens (/max_tokens)"
        return "the model's context is full"

    # -- commands ------------------------------------------------------------------------------------

    def _help(self, _: str) -> None:
        listed = dict(_HELP)
        if not self._chats:
            listed = {name: text for name, text in _HELP.items() if name.split()[0] not in _FOR_DIALOGUES}
            listed["retry"] = "goes on from the same place in another way"
            listed["save [FILE]"] = "writes the texts, as data to train on"
        width = max(map(len, listed)) + 3
        others = ", ".join(f"/{name}" for name in _SETTINGS if name != "temperature")
        lines = [f"/{name:<{width}}{text}" for name, text in listed.items()]
        self._screen.note("\n".join([*lines, f"{others}: likewise; without a value, they say what is set"]))

    def _reset(self, _: str) -> None:
        self._conversation.reset()
        self._forgetful, self._file = False, None
        self._screen.note("Forgotten.")

    def _retry(self, _: str) -> None:
        self._answer(self._conversation.retry(), echo=True)

    def _system(self, text: str) -> None:
        conversation = self._dialogue("a system text")
        if text:
            conversation.system = None if text == "off" else text
        self._screen.note(
            f"system: {conversation.system}" if conversation.system else "There is no system text."
        )

    def _set(self, name: str, value: str) -> None:
        conversation, kind = self._conversation, _SETTINGS[name]
        if value:
            try:
                number = kind(value)
            except ValueError:
                what = "a whole number" if kind is int else "a number"
                raise UserError(f"{name} is '{value}': it must be {what}.") from None
            if name != "max_tokens":
                conversation.sampling = replace(conversation.sampling, **{name: number})
            elif number < 1:
                raise UserError(f"max_tokens is {number}: it must be at least 1.")
            else:
                conversation.max_tokens = number
            if name == "seed":
                conversation.restart_seeds()
        holder: Any = conversation if name == "max_tokens" else conversation.sampling
        self._screen.note(f"{name}: {getattr(holder, name)}")

    def _save(self, name: str) -> None:
        lines = self._conversation.lines()
        if not lines:
            raise UserError("There is nothing to save yet.")
        default = self._file or Path(f"chat-{time.strftime('%Y%m%d-%H%M%S')}.jsonl")
        path = Path(name).expanduser() if name else default
        if path != self._file and path.exists():
            raise UserError(f"{path} exists already: save under another name.")
        beside = path.with_name(f".{path.name}.{os.getpid()}")
        text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
        try:
            beside.write_bytes(
                text.encode("utf-8", "backslashreplace")
            )  # half a surrogate pair, as JSON has it
            beside.replace(path)
        except OSError as error:
            with contextlib.suppress(OSError):
                beside.unlink()
            raise UserError(
                f"{path} cannot be written ({error.strerror}): save in another place, the conversation goes on."
            ) from error
        self._file = path
        self._screen.note(f"Saved in {path}.")

    def _load(self, name: str) -> None:
        conversation = self._dialogue("a conversation")
        if not name:
            raise UserError("Which file? /load FILE")
        path = Path(name).expanduser()
        try:
            record = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise UserError(f"{path} cannot be read ({error.strerror}).") from error
        except (ValueError, RecursionError):
            raise UserError(f"{path} does not hold one conversation in JSON.") from None
        conversation.load(record)
        self._file, self._forgetful = None, False
        turns = len(conversation.turns)
        self._screen.note(
            f"{turns} question{'s' * (turns > 1)} and answer{'s' * (turns > 1)}; it goes on from there."
        )

    def _toggle_verbose(self, _: str) -> None:
        self._verbose = not self._verbose
        self._screen.note(f"verbose: {'on' if self._verbose else 'off'}")

    def _quit(self, _: str) -> NoReturn:
        raise EOFError

    def _dialogue(self, what: str) -> Dialogue:
        if not isinstance(self._conversation, Dialogue):
            raise UserError(f"A base model continues text and knows nothing of {what}.")
        return self._conversation


def _speed(answer: Answer) -> str:
    """'37 tokens, 412 tokens/s, first after 21 ms'"""
    rate = f", {answer.tokens_per_s:,.0f} tokens/s" if answer.tokens_per_s else ""
    plural = "s" * (answer.tokens != 1)
    return f"{answer.tokens} token{plural}{rate}, first after {1e3 * answer.reply.first_token_s:,.0f} ms"


@contextlib.contextmanager
def _on_interrupt(action: Callable[[], None]) -> Iterator[None]:
    """Ctrl-C calls this, and raises nothing."""
    before = signal.signal(signal.SIGINT, lambda *_: action())
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextlib.contextmanager
def _unechoed() -> Iterator[None]:
    """What is typed meanwhile waits for the next prompt, and does not stand in the middle of an answer."""
    try:
        before = termios.tcgetattr(sys.stdin)
    except termios.error:  # no terminal
        yield
        return
    quiet = before.copy()
    quiet[3] &= ~termios.ECHO
    termios.tcsetattr(sys.stdin, termios.TCSANOW, quiet)
    try:
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSANOW, before)
