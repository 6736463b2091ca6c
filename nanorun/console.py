"""Console output: messages, progress bars, and numbers in readable units.

stdout is for results, stderr for everything else. On a terminal a task shows a live progress bar with rate and
remaining time; elsewhere (a pipe, a log file, CI) it prints a plain line every ten seconds.

Models and files contain any characters, and a terminal interprets some of them as commands: to move the cursor, to
change its title, to write to the clipboard, to answer as if the user had typed. Whatever is printed here is therefore
escaped (`visible`), also for a pipe or a file, which may be shown on a terminal later. Unchanged are two outputs that
programs read: JSON, which has its own escapes, and the answers of `chat` into a pipe.
"""

import json
import os
import shlex
import shutil
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, Self

Unit = Literal["B", "tok", "doc", "file", "step", "question", "reply"]
_PLAIN_INTERVAL_S = 10.0
_WINDOW_S, _MAX_SAMPLES = 60.0, 64  # the rate is measured over the last minute
_UNSAFE = {code: f"^{chr(code ^ 64)}" for code in (*range(32), 127) if chr(code) not in "\n\t"}
_DIRECTIONS = (
    *range(0x202A, 0x202F),
    *range(0x2066, 0x206A),
)  # bidirectional controls: text in another order
_UNSAFE |= {code: f"<U+{code:04X}>" for code in (*range(0x80, 0xA0), *_DIRECTIONS)}


def visible(text: str) -> str:
    """Escapes what a terminal would interpret, except newlines and tabs: the escape character as ^[, and so on."""
    return text.translate(_UNSAFE)


def say(text: str = "") -> None:
    """Prints a message on stderr."""
    print(visible(text), file=sys.stderr, flush=True)


def show(text: str) -> None:
    """Prints a result on stdout."""
    print(visible(text), flush=True)


def show_json(record: Mapping[str, Any]) -> None:
    """Prints a result on stdout as one line of JSON; on a terminal in ASCII."""
    print(json.dumps(record, ensure_ascii=sys.stdout.isatty()), flush=True)


def is_nanorun() -> bool:
    """Whether this process is the command line, and not another program that imports nanorun."""
    script = Path(sys.argv[0])
    return script.name == "nanorun" or script.parts[-2:] == ("nanorun", "__main__.py")


def command(arguments: str) -> str:
    """`nanorun ARGUMENTS` as it can be typed in the shell that started this process, for suggestions to the user."""
    script, found = sys.argv[0], shutil.which("nanorun")
    has_path = is_nanorun() and os.path.isfile(script)
    if "UV_RUN_RECURSION_DEPTH" in os.environ:  # uv's PATH is not the shell's
        program = "uv run nanorun"
    elif not has_path or (found is not None and os.path.samefile(found, script)):
        program = "nanorun"
    elif script.endswith(".py"):
        names = [name for name in ("python", "python3") if shutil.which(name) == sys.executable]
        program = f"{(names or [_path(sys.executable)])[0]} -m nanorun"
    else:
        program = _path(script)
    return f"{program} {arguments}"


def _path(program: str) -> str:
    """Relative to the current folder if the program is below it."""
    relative = os.path.relpath(program)
    shown = os.path.abspath(program) if relative.startswith("..") else relative
    return shlex.quote(shown if os.sep in shown else os.path.join(".", shown))


def count(n: float) -> str:
    """1234567 -> '1.23M': three significant digits."""
    for size, suffix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(n) >= size:
            return f"{n / size:.3g}{suffix}"
    return f"{n:.3g}"


def size(n: float) -> str:
    """Bytes in decimal units: '648 MB'."""
    if abs(n) < 1e3:
        return f"{n:.0f} B"
    scaled = count(n)
    return f"{scaled[:-1]} {scaled[-1]}B"


def seconds(s: float) -> str:
    """A duration in its two largest units: '2 min 05 s', '1 h 30 min', '1 d 12 h'."""
    if s < 59.95:
        return f"{s:.1f} s"
    if s < 3599.5:
        return "{} min {:02d} s".format(*divmod(round(s), 60))
    if s < 86_370:
        return "{} h {:02d} min".format(*divmod(round(s / 60), 60))
    days, hours = divmod(round(s / 3600), 24)
    return f"{days} d {hours} h" if days < 10 else f"{days:,} d"


class Progress:
    """`with Progress("reading", total, "B") as bar: bar.advance(n)`. Thread-safe."""

    def __init__(self, task: str, total: float | None = None, unit: Unit = "B", done: float = 0.0) -> None:
        self.task, self.total, self.unit = visible(task), total, unit
        self.done = done  # the work of an earlier session counts as done, but not in the rate
        self._lock = threading.Lock()
        self._note = ""  # shown until it is replaced
        self._last_line = time.monotonic()
        self._samples = deque([(self._last_line, done)])
        self._bar: Any = None  # rich's live bar, on a terminal
        self._bar_task: Any = None

    def __enter__(self) -> Self:
        if sys.stderr.isatty() and os.environ.get("TERM", "dumb") != "dumb":
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

            self._bar = Progress(
                TextColumn("{task.description}", markup=False),
                BarColumn(),
                TextColumn("{task.fields[figures]}", markup=False),
                TimeRemainingColumn(compact=True),
                console=Console(file=sys.stderr),
            )
            self._bar_task = self._bar.add_task(self.task, total=self.total, completed=self.done, figures="")
            self._bar.start()
        return self

    def advance(self, n: float, note: str = "") -> None:
        with self._lock:
            self.done += n
            self._note = note = visible(note) or self._note
            now = time.monotonic()
            self._add_sample(now)
            if self._bar is not None:
                self._bar.update(self._bar_task, completed=self.done, figures=self._figures(now, note))
            elif now - self._last_line >= _PLAIN_INTERVAL_S:
                self._last_line = now
                say(f"{self.task}: {self._figures(now, note)}{self._left(now)}")

    def note(self, text: str) -> None:
        """Prints a line above the bar."""
        with self._lock:
            if self._bar is not None:
                self._bar.console.print(visible(text), markup=False, highlight=False)
            else:
                say(text)

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Excludes the time of work that is not part of the task, such as an evaluation, from the rate."""
        start = time.monotonic()
        try:
            yield
        finally:
            away = time.monotonic() - start
            with self._lock:
                self._samples = deque((when + away, done) for when, done in self._samples)

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def _figures(self, now: float, note: str) -> str:
        show = size if self.unit == "B" else count
        rate = self._rate(now)
        of = f" of {show(self.total)}" if self.total else ""
        unit = "" if self.unit == "B" else f" {self.unit}"
        return f"{show(self.done)}{of}{unit}, {show(rate)}{unit}/s{f', {note}' if note else ''}"

    def _left(self, now: float) -> str:
        rate = self._rate(now)
        if not self.total or not rate:
            return ""
        return f", {seconds(max(self.total - self.done, 0) / rate)} left"

    def _rate(self, now: float) -> float:
        """Over the last minute, so that a slow start (compiling kernels) stops counting."""
        then, done = self._samples[0]
        return (self.done - done) / max(now - then, 1e-9)

    def _add_sample(self, now: float) -> None:
        if len(self._samples) == 1 or now - self._samples[-1][0] >= _WINDOW_S / _MAX_SAMPLES:
            self._samples.append((now, self.done))
        while len(self._samples) > 2 and now - self._samples[1][0] > _WINDOW_S:
            self._samples.popleft()
