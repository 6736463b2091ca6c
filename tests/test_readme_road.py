"""The README's section about your own text works as typed, on generated notes and conversations."""

import json
import os
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
WORDS = "the lamp keeper walks to harbour and counts every boat before night falls on quiet water".split()


@pytest.fixture
def shell(tmp_path):
    """Runs a line in a shell whose home has notes, in a folder with conversations, where `nanorun` is this one."""
    notes, rng = tmp_path / "notes", random.Random(0)
    notes.mkdir()
    for number in range(60):
        sentences = [" ".join(rng.choices(WORDS, k=12)).capitalize() + "." for _ in range(25)]
        (notes / f"{number}.txt").write_text(" ".join(sentences))
    conversations = [
        {
            "messages": [
                {"role": "user", "content": f"What is {word}?"},
                {"role": "assistant", "content": f"{word} is a word of my notes."},
            ]
        }
        for word in WORDS * 3
    ]
    program = tmp_path / "bin" / "nanorun"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m nanorun "$@"\n')
    program.chmod(0o755)
    path = f"{program.parent}:{os.environ['PATH']}"
    environment = {**os.environ, "HOME": str(tmp_path), "PATH": path, "PYTHONPATH": str(ROOT)}
    environment.pop("NANORUN_HOME", None)

    def run(line: str, folder: str) -> subprocess.CompletedProcess[str]:
        work = tmp_path / folder
        work.mkdir(exist_ok=True)
        (work / "mine.jsonl").write_text("".join(json.dumps(each) + "\n" for each in conversations))
        return subprocess.run(
            line,
            shell=True,
            cwd=work,
            env=environment,
            capture_output=True,
            text=True,
            input="What is harbour?\n",
            timeout=280,
        )

    return run


def readme_blocks() -> list[list[str]]:
    """The commands of the first two blocks of the section; minutes become seconds."""
    section = (ROOT / "README.md").read_text(encoding="utf-8").split("## Your own text")[1]
    blocks = re.findall(r"```bash\n(.*?)```", section, re.DOTALL)[:2]
    shorter = [re.sub(r"--minutes \d+", "--minutes 0.2", block) for block in blocks]
    return [[line.split("  #")[0].strip() for line in block.splitlines()] for block in shorter]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_readmes_own_text_section_works_word_by_word(shell):
    one_command, single_commands = readme_blocks()
    outputs = {}
    for folder, lines in (("made", one_command), ("step-by-step", single_commands)):
        for line in lines:
            done = shell(line, folder)
            assert done.returncode == 0, f"{line}\n{done.stderr}"
            outputs[line] = done
    made = outputs[one_command[0]]
    printed = [
        line.split("nanorun ", 1)[1].split()
        for line in made.stderr.splitlines()
        if re.match("[1-4]/4 ", line)
    ]
    documented = [line.split()[1:] for line in single_commands[:4]]
    assert len(printed) == 4
    for by_make, by_hand in zip(printed, documented, strict=True):  # all but the minutes, and ~ expanded
        same = [
            (a, b) for a, b in zip(by_make, by_hand, strict=True) if not re.fullmatch(r"[\d.]+|.*/notes", a)
        ]
        assert all(a == b for a, b in same), (by_make, by_hand)
    assert "sft-notes -p 'What is the?'" in made.stderr
    assert "'sft-notes'" in outputs["nanorun chat"].stderr, "the newest model answers"
    listed = outputs["nanorun runs"].stdout
    assert "base-notes" in listed
    assert "sft-notes" in listed
