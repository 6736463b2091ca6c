"""Readable numbers, sizes and durations."""

import time

import pytest

from nanorun.console import Progress, seconds


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
