import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "tokenizer_trainers.py"


def run(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(SCRIPT), *arguments], capture_output=True, text=True, cwd=cwd, timeout=120
    )


def test_the_trainers_are_compared_on_the_same_text_and_agree(
    tmp_path: Path, made_text: Callable[..., list[str]]
) -> None:
    pytest.importorskip("tokenizers")
    lines = [json.dumps({"text": text}) for text in made_text(400)]
    (tmp_path / "some.jsonl").write_text("\n".join(lines), "utf-8")
    done = run("some.jsonl", "--vocab", "400", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert [row["trainer"] for row in result["rows"]] == ["rustbpe", "tokenizers"]
    assert [row["vocab_size"] for row in result["rows"]] == [400, 400]
    # Equal counts are ordered differently by the two, so a few tokens may differ.
    assert result["tokens_in_common"] > 0.9
    ours, theirs = (row["held_out_bytes_per_token"] for row in result["rows"])
    assert ours == pytest.approx(theirs, rel=0.02)


def test_a_file_that_is_not_jsonl_is_one_line_on_stderr(tmp_path: Path) -> None:
    (tmp_path / "bad.jsonl").write_text("not json\n")
    done = run("bad.jsonl", cwd=tmp_path)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert "bad.jsonl" in done.stderr
