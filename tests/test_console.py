"""Readable numbers, sizes and durations, and text that cannot control a terminal."""

import json
import time
import unicodedata

import pytest

from nanorun import console
from nanorun.cli import options
from nanorun.console import Progress, seconds

# The clipboard (OSC 52), the title, the cursor, a report of the terminal, C1 controls, and text in another order.
CONTROLS = "\x1b]52;c;cm0gLXJm\x07\x1b]0;owned\x1b\\\x1b[2J\x1b[6n\r\b\x00\x7f\x9b31m\x9d0;x\x9c"
CONTROLS += "\u202egnp\u202c\u2066x\u2069"


def controls(text: str) -> set[str]:
    return {c for c in text if unicodedata.category(c) in ("Cc", "Cf")} - {"\n", "\t"}


@pytest.mark.parametrize(
    ("s", "text"),
    [
        (0.04, "0.0 s"),
        (59.94, "59.9 s"),
        (59.96, "1 min 00 s"),
        (125, "2 min 05 s"),
        (3599.4, "59 min 59 s"),
        (3599.9, "1 h 00 min"),
        (5400, "1 h 30 min"),
        (86_399, "1 d 0 h"),
        (36 * 3600, "1 d 12 h"),
        (100 * 86_400, "100 d"),
        (5000 * 86_400, "5,000 d"),
    ],
)
def test_a_duration_has_its_two_largest_units(s, text):
    assert seconds(s) == text


def test_time_spent_aside_does_not_count_in_the_rate(monkeypatch):
    clock = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    with Progress("training", 1000, "tok") as bar:
        for _ in range(4):
            clock[0] += 0.05
            bar.advance(100)
        with bar.aside():
            clock[0] += 0.6
        clock[0] += 0.05
        bar.advance(100)
        assert bar._rate(time.monotonic()) == pytest.approx(2000), "590 with the time aside"


def test_nothing_that_is_printed_controls_the_terminal(capsys):
    console.say(f"a {CONTROLS}\n\tb")
    console.show(f"a {CONTROLS}\n\tb")
    options.show({"text": CONTROLS}, False, f"a {CONTROLS}\n\tb")
    with Progress(f"reading {CONTROLS}") as bar:
        bar.note(CONTROLS)
        bar._last_line -= 60
        bar.advance(1, note=CONTROLS)
    printed = capsys.readouterr()
    assert controls(printed.out + printed.err) == set()
    assert printed.out.count("a ^[]52;c;cm0gLXJm^G^[]0;owned^[\\^[[2J^[[6n^M^H^@^?<U+009B>31m") == 2
    assert "\n\tb\n" in printed.out, "line breaks and tabs stay"
    assert printed.err.count("^[]52;c;") == 4


def test_a_progress_bar_on_a_terminal_shows_controls_and_markup_as_text(monkeypatch, capsys):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    with Progress(f"[link=http://x]{CONTROLS}", 2) as bar:
        bar.note(CONTROLS)
        bar.advance(1, note=f"[bold]{CONTROLS}")
    printed = capsys.readouterr().err
    assert "[link=http://x]^[]52" in printed.replace("\n", "")
    assert "\x1b]" not in printed
    assert "\x9b" not in printed


def test_json_stays_json_and_is_ascii_on_a_terminal(monkeypatch, capsys):
    options.show({"text": CONTROLS}, True, "")
    assert json.loads(capsys.readouterr().out) == {"text": CONTROLS}
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    options.show({"text": CONTROLS}, True, "")
    printed = capsys.readouterr().out
    assert json.loads(printed) == {"text": CONTROLS}
    assert controls(printed) <= {"\x7f"}, "which terminals ignore"
