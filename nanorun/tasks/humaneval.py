"""HumanEval: Python functions to complete from their docstrings (openai_humaneval), graded by running their tests.

A reply is the body, or the whole function again, bare or in a ``` block. The program is the prompt and the reply. It
runs in a sandbox and the tests in another, where no reply can reach them; without a sandbox, grading raises
SandboxUnavailable: a model's code never runs unprotected. There is only a test set.
"""

import re
import textwrap
import threading
import warnings
from collections.abc import Sequence
from pathlib import Path

from nanorun.json_files import check_shape
from nanorun.tasks.task import Conversation, Record, exchange, read_split, reply_text
from nanorun.text.chat import Part
from nanorun.tools.sandbox import Sandbox

FILES = {"test": ("openai_humaneval/test-*.parquet", "HumanEval.jsonl", "humaneval.jsonl")}
TIMEOUT = 5.0  # seconds, for a program with its tests


class HumanEval:
    name, baseline, letters = "humaneval", 0.0, None

    def __init__(self, where: Path, split: str = "test") -> None:
        self._records = read_split(where, FILES, split, self.name, _checked)
        self._sandbox: Sandbox | None = None
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._records)

    def __getitem__(self, index: int) -> Conversation:
        record = self._records[index]
        solution = f"```python\n{record['prompt']}{record['canonical_solution'].rstrip()}\n```"
        request = f"Complete this Python function.\n\n```python\n{record['prompt'].rstrip()}\n```"
        return exchange(request, solution)

    def reward(self, index: int, reply: Sequence[Part]) -> float:
        with self._lock:
            if self._sandbox is None:
                self._sandbox = Sandbox.probe()
        record = self._records[index]
        code = program(record, reply_text(reply))
        return float(self._sandbox.grade(code, checks(record), record["entry_point"], timeout=TIMEOUT).ok)


def checks(record: Record) -> str:
    """The tests to run, after what the prompt defines before the function: some of them use it."""
    start = _find_function(record)
    before = record["prompt"][: start.start()] if start else ""
    return f"{before}\n\n{record['test']}\n\ncheck({record['entry_point']})\n"


def _checked(record: Record) -> Record:
    check_shape(record, dict.fromkeys(("prompt", "canonical_solution", "test", "entry_point"), str))
    return record


def program(record: Record, reply: str) -> str:
    """The program to grade: the function as the reply completes it."""
    prompt, entry = record["prompt"], record["entry_point"]
    block = re.search(r"```[\w+-]*[ \t]*\n(.*?)(?:```|\Z)", reply, re.DOTALL)
    code = block[1] if block else reply
    start = _find_function(record)
    if re.search(rf"^\s*def {re.escape(entry)}\b", code, re.MULTILINE):
        # The whole function: it follows what the prompt defines and imports.
        function = (prompt[: start.start()] if start else "") + textwrap.dedent(code)
    else:
        function = prompt + code
        if not _parses(function):  # a body whose first line, or every line, lacks its indentation
            body = code.strip("\n")
            candidates = (f"    {body.lstrip()}", textwrap.indent(textwrap.dedent(body), "    "))
            function = next((prompt + each for each in candidates if _parses(prompt + each)), function)
    return function


def _find_function(record: Record) -> re.Match[str] | None:
    """Where the function to complete begins in the prompt."""
    return re.search(rf"^(?:async )?def {re.escape(record['entry_point'])}\b", record["prompt"], re.MULTILINE)


def _parses(code: str) -> bool:
    """Whether the code is valid Python; compiling runs nothing."""
    try:
        with warnings.catch_warnings(action="ignore"):
            compile(code, "reply", "exec", dont_inherit=True)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return True
