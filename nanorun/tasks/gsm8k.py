"""GSM8K: grade-school word problems (openai/gsm8k), whose solutions mark each calculation: "48/2 = <<48/2=24>>24".

A mark becomes a call of the calculator, with the output that our calculator gives, so that what a model is
taught to read is what it will be given. The final answer stands behind "####".
"""

import re
from collections.abc import Sequence
from contextlib import suppress
from decimal import Decimal
from pathlib import Path

from nanorun.tasks.files import field, read_split
from nanorun.tasks.task import Conversation, said
from nanorun.text.chat import Part
from nanorun.tools.calculator import ToolError, calculate

NAMES = {
    "train": ("main/train-*.parquet", "gsm8k/train.jsonl", "gsm8k_train.jsonl"),
    "test": ("main/test-*.parquet", "gsm8k/test.jsonl", "gsm8k_test.jsonl"),
}


class Gsm8k:
    name, baseline, letters = "gsm8k", 0.0, None

    def __init__(self, where: Path, split: str = "test") -> None:
        records = read_split(where, NAMES, split, self.name)
        self._problems = [
            (str(field(r, "question", self.name)), str(field(r, "answer", self.name))) for r in records
        ]

    def __len__(self) -> int:
        return len(self._problems)

    def __getitem__(self, index: int) -> Conversation:
        question, answer = self._problems[index]
        return {
            "messages": [
                {"role": "user", "content": question},
                {"role": "assistant", "content": with_calls(answer)},
            ]
        }

    def reward(self, index: int, reply: Sequence[Part]) -> float:
        right = final_number(self._problems[index][1])
        return float(right is not None and final_number(said(reply)) == right)


def with_calls(answer: str) -> list[Part]:
    """The parts of a solution: its marks as calls, the text around them as it is."""
    parts: list[Part] = []
    for i, piece in enumerate(re.split(r"<<(.*?)>>", answer)):
        if i % 2 == 0:
            if piece:
                parts.append({"type": "text", "text": piece})
            continue
        expression, _, result = piece.rpartition("=")
        with suppress(ToolError):  # a mark that is no arithmetic keeps the solution's own result
            result = calculate(expression)
        parts += [{"type": "python", "text": expression}, {"type": "output", "text": result}]
    return parts


def final_number(text: str) -> Decimal | None:
    """The number behind the last "####", whatever it is dressed in: "#### $1,234.00." is 1234."""
    found = re.search(r"\s*(-?)\s*[$£€]?\s*(-?)((?:\d[\d,]*)?\.?\d+)", text.rpartition("####")[2])
    if "####" not in text or found is None or found.start() != 0:
        return None
    number = Decimal(found[3].replace(",", ""))
    return -number if found[1] or found[2] else number
