"""The input history of earlier conversations, for the arrow keys: `.chat_history` in the home, one line each.

Lines are appended as they are typed, so several terminals can share the file and a killed process loses nothing.
Only its owner can read it. If it cannot be written, there is no history and no error.
"""

import contextlib
import os
from pathlib import Path

from nanorun import home

try:
    import readline
except ImportError:  # then input() has no line editing
    readline = None  # type: ignore[assignment]

FILE = ".chat_history"
KEEP = 1_000  # lines


def path() -> Path:
    return home.home() / FILE


def load() -> None:
    if readline is None:
        return
    readline.set_auto_history(False)
    readline.clear_history()
    for line in _lines()[-KEEP:]:
        readline.add_history(line)


def add(line: str) -> None:
    """Stores a repeated line once, and a text of several lines as one."""
    line = " ".join(line.split())
    if not line:
        return
    if readline is not None:
        readline.add_history(line)
    with contextlib.suppress(OSError):
        lines = _lines()
        if lines[-1:] == [line]:
            return
        if len(lines) >= 2 * KEEP:
            _write(lines[-KEEP:], os.O_TRUNC)
        _write([line], os.O_APPEND)


def _lines() -> list[str]:
    try:
        return path().read_text(encoding="utf-8", errors="replace").split("\n")[:-1]
    except OSError:
        return []


def _write(lines: list[str], how: int) -> None:
    with open(os.open(path(), os.O_WRONLY | os.O_CREAT | how, 0o600), "w", encoding="utf-8") as file:
        file.write("".join(f"{line}\n" for line in lines))
