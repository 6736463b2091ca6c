"""What reaches the terminal: a model's text and its tool calls, and nothing that the terminal would obey.

A model may produce any characters, and a terminal takes some of them for commands: to move the cursor, to
change its title, to answer as if the person had typed. On a terminal they are therefore shown and not sent:
escape as ^[, the others of their kind likewise, and signs that turn the direction of writing by their number.
Into a file or a pipe the text goes as it is.

Tool calls stand dim in brackets where they happened, with their result: [12+30 = 42]. A result that no
tool gave is called made up.
"""

import os
import sys
from typing import TextIO

from nanorun.chat.wrap import Wrap

_DIM, _BOLD, _NORMAL = "\x1b[2m", "\x1b[1m", "\x1b[0m"
_UNSAFE = {code: f"^{chr(code ^ 64)}" for code in (*range(32), 127) if chr(code) not in "\n\t"}
_DIRECTIONS = (*range(0x202A, 0x202F), *range(0x2066, 0x206A))
_UNSAFE |= {code: f"<U+{code:04X}>" for code in (*range(0x80, 0xA0), *_DIRECTIONS)}


def visible(text: str) -> str:
    """The text with everything that a terminal would obey, but for line ends and tabs, as visible signs."""
    return text.translate(_UNSAFE)


def styled(stream: TextIO) -> bool:
    """Whether dim and bold can be used there."""
    plain = os.environ.get("NO_COLOR") or os.environ.get("TERM", "dumb") == "dumb"
    return stream.isatty() and not plain


class Screen:
    """Answers on stdout, notes about them on stderr."""

    def __init__(self, *, tools: bool, strip: bool) -> None:
        """With `tools`, calls are shown, else the text alone; `strip` leaves out white space before an answer."""
        self.watched = sys.stdout.isatty()
        self._tools, self._strip = tools, strip
        self._styled, self._styled_notes = styled(sys.stdout), styled(sys.stderr)
        self._kind, self._code = "text", ""  # of the part that is being shown
        self._empty, self._in_line = True, False  # nothing of the answer is there; it ends within a line
        self._wrap = Wrap(0)  # as wide as the terminal is when an answer begins

    def prompt(self) -> str:
        """What the person is asked with, none if no one watches. readline must be told what has no width."""
        if not self.watched:
            return ""
        return f"\x01{_BOLD}\x02>\x01{_NORMAL}\x02 " if self._styled else "> "

    def echo(self, text: str) -> None:
        """The text that the model goes on with."""
        if self.watched:
            self._style(_DIM)
            self._write(text)
            self._style(_NORMAL)

    def show(self, kind: str, text: str) -> None:
        """A piece of an answer; one without text begins a part."""
        if kind != "text" and not self._tools:
            return
        if kind != self._kind or not text:
            self._turn_to(kind)
        if kind == "python":
            self._code += text
        self._write(text.lstrip() if self._empty and self._strip else text)

    def end(self) -> None:
        """The answer is over: what comes next begins a line."""
        self._turn_to("text")
        if self._in_line:
            self._write("\n")
        sys.stdout.write(self._wrap.rest())
        sys.stdout.flush()
        self._empty = True

    def note(self, text: str) -> None:
        """A line about what happens, that is no part of any answer."""
        sys.stdout.flush()
        text = visible(text)
        print(f"{_DIM}{text}{_NORMAL}" if self._styled_notes else text, file=sys.stderr, flush=True)

    def _turn_to(self, kind: str) -> None:
        """Opens the bracket around a tool call, goes on in it, or closes it."""
        before, self._kind = self._kind, kind
        if before in ("output", "guess") or (before == "python" and kind in ("text", "python")):
            self._write(" (made up)]" if before == "guess" else "]")
            self._style(_NORMAL)
            before = "text"
        if kind == "text":
            return
        if before == "text":
            self._code = ""
            self._style(_DIM)
            self._write("[")
        if kind != "python":
            self._write("\n= " if "\n" in self._code else " = ")

    def _write(self, text: str) -> None:
        if not text:
            return
        if self._empty:
            self._wrap = Wrap(_columns() if self.watched else 0)
        sys.stdout.write(self._wrap.feed(visible(text)) if self.watched else text)
        sys.stdout.flush()
        self._empty, self._in_line = False, not text.endswith("\n")

    def _style(self, code: str) -> None:
        if self._styled:
            sys.stdout.write(self._wrap.rest() + code)
            sys.stdout.flush()


def _columns() -> int:
    try:
        return os.get_terminal_size(sys.stdout.fileno()).columns
    except OSError:  # a terminal that does not say
        return 0
