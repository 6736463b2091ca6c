"""Reads a message from the terminal: one line, or several that are pasted or joined by a backslash.

With GNU readline the terminal marks the beginning and the end of a paste (bracketed paste), and its lines stay in the
line editor until Enter. Elsewhere (libedit, a terminal without such marks) they arrive as if they were typed, but
faster than anyone types: a line that follows another within PASTE_S belongs to the same message. Lines typed while the
model answered are waiting before the prompt is shown; each remains a message of its own.
"""

import contextlib
import select
import sys
import termios
from collections.abc import Iterator

try:
    import readline
except ImportError:  # then input() has no line editing
    readline = None  # type: ignore[assignment]

PASTE_S = 0.03


def enable_bracketed_paste() -> None:
    """Python disables it. libedit would not understand the option."""
    if readline is not None and "libedit" not in (readline.__doc__ or ""):
        readline.parse_and_bind("set enable-bracketed-paste on")


def read_message(prompt: str, continuation: str) -> str:
    """Raises EOFError at the end of the input."""
    message = _read_lines(prompt)
    while message.endswith("\\"):
        message = f"{message[:-1]}\n{_read_lines(continuation)}"
    return message


def _read_lines(prompt: str) -> str:
    typed_ahead = _is_pending(0)
    lines = [input(prompt)]
    while not typed_ahead and _is_pending(PASTE_S):
        lines.append(input())
    return "\n".join(lines).rstrip("\n")


def _is_pending(seconds: float) -> bool:
    """Whether there is input, even if its line is incomplete."""
    # Without line editing the terminal must deliver line by line, or input() would buffer the lines after the first.
    with terminal_without(termios.ECHO | (termios.ICANON if readline is not None else 0)):
        return bool(select.select([sys.stdin], [], [], seconds)[0])


@contextlib.contextmanager
def terminal_without(modes: int) -> Iterator[None]:
    """Disables local modes of the terminal, such as termios.ECHO, and keeps what is typed."""
    try:
        before = termios.tcgetattr(sys.stdin)
    except termios.error:  # stdin is not a terminal
        yield
        return
    changed = before.copy()
    changed[3] &= ~modes
    termios.tcsetattr(sys.stdin, termios.TCSANOW, changed)
    try:
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSANOW, before)
