"""MMLU: questions from 57 subjects (cais/mmlu), with `question`, four `choices` and the right one's number.

The training set is `auxiliary_train`, whose records the hub wraps in a column `train`; where it is absent, the
five questions of each subject that are meant for examples (`dev`) are what there is to learn from.
"""

from pathlib import Path

from nanorun.tasks.files import Record, field, read_split
from nanorun.tasks.multiple_choice import MultipleChoice, Problem, as_choices

NAMES = {
    "train": (
        "auxiliary_train/train-*.parquet",
        "all/auxiliary_train-*.parquet",
        "mmlu_train.jsonl",
        "all/dev-*.parquet",
        "mmlu_dev.jsonl",
    ),
    "dev": ("all/dev-*.parquet", "mmlu_dev.jsonl"),
    "val": ("all/validation-*.parquet", "mmlu_val.jsonl"),
    "test": ("all/test-*.parquet", "mmlu_test.jsonl"),
}


def mmlu(where: Path, split: str = "test") -> MultipleChoice:
    return MultipleChoice("mmlu", [_problem(record) for record in read_split(where, NAMES, split, "mmlu")])


def _problem(record: Record) -> Problem:
    inner = record.get("train") or record
    return Problem(
        str(field(inner, "question", "mmlu")).strip(),
        as_choices(field(inner, "choices", "mmlu")),
        int(field(inner, "answer", "mmlu")),
    )
