"""A short run of the fuzzer: `make fuzz` feeds each parser tens of thousands of inputs."""

import random
import tempfile
from pathlib import Path

import pytest
from fuzzer import fuzz, scratch
from mutate import mutate_bytes, mutate_json
from parsers import PARSERS

from nanorun.errors import UserError

COUNT = 250


@pytest.mark.parametrize("name", PARSERS)
def test_mutated_inputs_are_accepted_or_refused_with_a_sentence(name, monkeypatch):
    monkeypatch.setenv("NANORUN_HOME", "")
    with tempfile.TemporaryDirectory(dir=scratch()) as folder:
        result = fuzz(name, COUNT, seed=1, folder=Path(folder))
    assert result["failures"] == {}
    assert result["inputs"] == COUNT
    # Damaged lines of metrics are left out; everything else is refused.
    assert result.get("refused", 0) > COUNT / 20 or name == "metrics", "the mutations do no harm"
    assert result.get("accepted", 0) > 0, "nothing gets past the first check"


def test_the_fuzzer_reports_exceptions_hangs_and_growth(tmp_path, monkeypatch):
    class Fragile:
        name = "fragile"
        refusals = ()

        def __init__(self, folder: Path) -> None:
            self.held: list[bytes] = []

        def make(self, dice: random.Random) -> int:
            return dice.randrange(4)

        def parse(self, content: int) -> None:
            if content == 0:
                raise UserError("No.")
            if content == 1:
                raise KeyError("x")
            if content == 2:
                while True:
                    pass
            self.held.append(b"x" * (60 << 20))

    monkeypatch.setenv("NANORUN_HOME", str(tmp_path))
    monkeypatch.setitem(PARSERS, "fragile", Fragile)
    monkeypatch.setattr("fuzzer.TIME_LIMIT", 0.5)  # filling 60 MB takes 50 ms on a busy machine
    monkeypatch.setattr("fuzzer.GROWTH_LIMIT", 50 << 20)
    result = fuzz("fragile", 12, seed=0, folder=tmp_path)
    kinds = {fault.split()[0] for fault in result["failures"]}
    assert kinds == {"KeyError", "TooSlow", "grew"}
    assert result["refused"] > 0


def test_the_same_number_gives_the_same_input():
    def draw(number: int) -> tuple[bytes, bytes]:
        dice = random.Random(f"0 x {number}")
        return mutate_json(dice, {"a": [1, {"b": "c"}]}), mutate_bytes(dice, b"some bytes")

    assert [draw(n) for n in range(50)] == [draw(n) for n in range(50)]
    assert len({draw(n) for n in range(50)}) > 30
