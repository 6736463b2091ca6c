"""ARC: grade-school science questions, an easy and a challenging set (allenai/ai2_arc).

Read from the hub's parquet (`choices` is {"text": [...], "label": [...]}, `answerKey` a label), from jsonl
with `choices` and the number of the right one as `answer`, and from the CORE bundle (`query`, `gold`), which
has the test sets.
"""

from pathlib import Path
from typing import Literal

from nanorun.errors import UserError
from nanorun.tasks.files import Record, field, read_split
from nanorun.tasks.multiple_choice import MultipleChoice, Problem, as_choices

Subset = Literal["easy", "challenge"]


def arc(where: Path, subset: Subset = "easy", split: str = "test") -> MultipleChoice:
    name, hub = f"arc-{subset}", f"ARC-{subset.capitalize()}"
    names = {
        "train": (f"{hub}/train-*.parquet", f"arc_{subset}_train.jsonl"),
        "val": (f"{hub}/validation-*.parquet", f"arc_{subset}_dev.jsonl"),
        "test": (f"{hub}/test-*.parquet", f"arc_{subset}_test.jsonl", f"world_knowledge/arc_{subset}.jsonl"),
    }
    return MultipleChoice(name, [_problem(record, name) for record in read_split(where, names, split, name)])


def _problem(record: Record, name: str) -> Problem:
    if "query" in record:
        question = str(record["query"]).removeprefix("Question: ")
        return Problem(question, as_choices(field(record, "choices", name)), int(field(record, "gold", name)))
    question, choices = str(field(record, "question", name)), field(record, "choices", name)
    if "answerKey" not in record:
        return Problem(question, as_choices(choices), int(field(record, "answer", name)))
    labels = [str(label) for label in field(choices, "label", name)]  # A to D, or 1 to 4
    key = str(record["answerKey"])
    if key not in labels:
        raise UserError(
            f"A question of {name} has the answer {key} among {', '.join(labels)}: {question!r:.80}."
        )
    return Problem(question, as_choices(field(choices, "text", name)), labels.index(key))
