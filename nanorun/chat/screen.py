"""Terminal output: a model's text and tool calls, without control sequences, wrapped between words.

On a terminal, control characters are escaped (`console.visible`). A file or a pipe gets the text unchanged.

Tool calls are dim, in brackets, where they happened, with their result: [12+30 = 42]. A result that no tool
returned is marked as made up.

A terminal breaks a full line in the middle of a word. So a word is held back until it is complete, which is when the
next one begins, and moves to a new line if it does not fit. A long word is released early: a URL may be very long,
and some scripts have no spaces.
"""

import os
import sys
from typing import TextIO

from rich.cells import cell_len

from nanorun.console import visible

_DIM, _BOLD, _NORMAL = "\x1b[2m", "\x1b[1m", "\x1b[0m"
_LONG_WORD = 24  # columns; a longer word is not held back


def styled(stream: TextIO) -> bool:
    """Whether the stream supports dim and bold."""
    plain = os.environ.get("NO_COLOR") or os.environ.get("TERM", "dumb") == "dumb"
    return stream.isatty() and not plain


class Screen:
    """Answers on stdout, notes about them on stderr."""

    def __init__(self, *, strip: bool) -> None:
        """`strip` removes white space before an answer."""
        self.watched = sys.stdout.isatty()
        self._strip = strip
        self._styled, self._styled_notes = styled(sys.stdout), styled(sys.stderr)
        self._kind, self._code = "text", ""  # of the current part
        self._empty, self._in_line = True, False  # the answer is empty; it ends within a line
        self._wrap = Wrap(0)  # the width of the terminal when an answer begins

    def prompt(self, sign: str) -> str:
        """The input prompt, empty if stdout is not a terminal. \\x01 and \\x02 mark zero width for readline."""
        if not self.watched:
            return ""
        return f"\x01{_BOLD}\x02{sign}\x01{_NORMAL}\x02 " if self._styled else f"{sign} "

    def echo(self, text: str) -> None:
        """Shows the text that the model continues."""
        if self.watched:
            self._style(_DIM)
            self._write(text)
            self._style(_NORMAL)

    def show(self, kind: str, text: str) -> None:
        """Shows a piece of an answer; a piece without text begins a part."""
        if kind != self._kind or not text:
            self._begin_part(kind)
        if kind == "python":
            self._code += text
        self._write(text.lstrip() if self._empty and self._strip else text)

    def end(self) -> None:
        """Ends the answer and its line."""
        self._begin_part("text")
        if self._in_line:
            self._write("\n")
        sys.stdout.write(self._wrap.rest())
        sys.stdout.flush()
        self._empty = True

    def note(self, text: str) -> None:
        """Prints a line on stderr that is not part of an answer."""
        sys.stdout.flush()
        text = visible(text)
        print(f"{_DIM}{text}{_NORMAL}" if self._styled_notes else text, file=sys.stderr, flush=True)

    def _begin_part(self, kind: str) -> None:
        """Opens, continues or closes the bracket around a tool call."""
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
    except OSError:  # the terminal does not report its size
        return 0


class Wrap:
    """`feed` returns what can be shown, `rest` what was held back. A width of 0 disables wrapping."""

    def __init__(self, width: int) -> None:
        self.width = width
        self._column = 0
        self._gap, self._word = "", ""  # held back: spaces, and the beginning of the word after them
        self._inside = False  # the beginning of the word was shown already

    def feed(self, text: str) -> str:
        if self.width < 1:
            return text
        shown = []
        for character in text:
            if character in " \t\n":
                shown.append(self._place())
                self._inside = False
                if character == "\n":
                    shown.append(self._gap + "\n")
                    self._gap, self._column = "", 0
                else:
                    self._gap += character
            else:
                self._word += character
                if cells(self._word) >= _LONG_WORD:
                    shown.append(self._place())
                    self._inside = True
        return "".join(shown)

    def rest(self) -> str:
        """The last word and the spaces after it."""
        shown = self._place() + self._gap
        self._column += cells(self._gap)
        self._gap = ""
        self._inside = bool(shown) and not shown[-1].isspace()
        return shown

    def _place(self) -> str:
        if not self._word:
            return ""
        gap, word, long = self._gap, self._word, cells(self._word)
        self._gap = self._word = ""
        fits = self._column + cells(gap) + long <= self.width
        if fits or self._inside or not self._column:
            self._column += cells(gap) + long
            if self._column > self.width:  # the terminal broke the line
                self._column %= self.width
            return gap + word
        self._column = long
        return "\n" + word


def cells(text: str) -> int:
    """The width of a text in terminal columns; a tab counts as eight."""
    return cell_len(text) + 8 * text.count("\t")
