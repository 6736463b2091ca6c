"""What people read: numbers, sizes and times."""

import pytest

from nanorun.console import seconds


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
def test_a_time_is_told_in_its_two_largest_units(s, text):
    assert seconds(s) == text
