"""GSM8K: grade-school word problems (openai/gsm8k), whose solutions annotate each calculation: "48/2 = <<48/2=24>>24".

An annotation becomes a call of the calculator with our calculator's own output, so that the model trains on the
outputs it will see at inference. The final answer follows "####".
"""

import re
from collections.abc import Sequence
from contextlib import suppress
from decimal import Decimal
from pathlib import Path

from nanorun.json_files import check_shape
from nanorun.tasks.task import Conversation, Record, exchange, read_split, reply_text
from nanorun.text.chat import Part
from nanorun.tools.calculator import ToolError, calculate

FILES = {
    "train": ("main/train-*.parquet", "gsm8k/train.jsonl", "gsm8k_train.jsonl"),
    "test": ("main/test-*.parquet", "gsm8k/test.jsonl", "gsm8k_test.jsonl"),
}


class Gsm8k:
    name, baseline, letters = "gsm8k", 0.0, None

    def __init__(self, where: Path, split: str = "test") -> None:
        self._problems = read_split(where, FILES, split, self.name, _problem)

    def __len__(self) -> int:
        return len(self._problems)

    def __getitem__(self, index: int) -> Conversation:
        question, answer = self._problems[index]
        return exchange(question, with_calls(answer))

    def reward(self, index: int, reply: Sequence[Part]) -> float:
        expected = final_number(self._problems[index][1])
        return float(expected is not None and final_number(reply_text(reply)) == expected)


def _problem(record: Record) -> tuple[str, str]:
    check_shape(record, {"question": str, "answer": str})
    return record["question"], record["answer"]


def with_calls(answer: str) -> list[Part]:
    """The parts of a solution: annotations as tool calls, the text between them unchanged."""
    parts: list[Part] = []
    for i, piece in enumerate(re.split(r"<<(.{0,300}?)>>", answer)):
        if i % 2 == 0:
            if piece:
                parts.append({"type": "text", "text": piece})
            continue
        expression, _, result = piece.rpartition("=")
        with suppress(ToolError):  # an annotation that is no arithmetic keeps the solution's own result
            result = calculate(expression)
        parts += [{"type": "python", "text": expression}, {"type": "output", "text": result}]
    return parts


def final_number(text: str) -> Decimal | None:
    """The number after the last "####", without currency signs and separators: "#### $1,234.00." is 1234."""
    found = re.match(r"\s*(-?)\s*[$£€]?\s*(-?)((?:\d[\d,]*)?\.?\d+)", text.rpartition("####")[2])
    if "####" not in text or found is None:
        return None
    number = Decimal(found[3].replace(",", ""))
    return -number if found[1] or found[2] else number
