"""Multiple choice: a question, a line for each choice, and a letter as the answer. ARC and MMLU.

    Which gas do plants take in?
    A) oxygen
    B) carbon dioxide

The answer is the letter alone. It follows <|assistant_start|> directly, so it is the token of that one byte in
every byte-level vocabulary, and a model can be graded by the logits of the letters without generation.

ARC (allenai/ai2_arc) has grade-school science questions, an easy and a challenging set. It is read from the
hub's parquet (`choices` is {"text": [...], "label": [...]}, `answerKey` a label), from jsonl with `choices` and
the index of the right one as `answer`, and from the CORE bundle (`query`, `gold`), which has the test sets.

MMLU (cais/mmlu) has questions from 57 subjects, with `question`, four `choices` and the index of the right one.
Its training set is `auxiliary_train`, whose records the hub wraps in a column `train`; without it, the training
set is the five few-shot examples of each subject (`dev`).
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from nanorun.errors import UserError
from nanorun.json_files import check_shape, shown
from nanorun.tasks.task import Conversation, Record, exchange, read_split, reply_text
from nanorun.text.chat import Part

LETTERS = "ABCDEFGHIJ"
MMLU_FILES = {
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


@dataclass(frozen=True)
class ChoiceQuestion:
    question: str
    choices: tuple[str, ...]
    correct: int  # index of the right choice

    def __post_init__(self) -> None:
        if not 2 <= len(self.choices) <= len(LETTERS) or not 0 <= self.correct < len(self.choices):
            raise ValueError(f"it has {len(self.choices)} choices and answer {self.correct}")

    def prompt(self) -> str:
        lines = [f"{letter}) {choice}" for letter, choice in zip(LETTERS, self.choices, strict=False)]
        return "\n".join([self.question, *lines])


class MultipleChoice:
    """A task of such questions. `letters` are those of the question with the most choices; see `letters_of`."""

    baseline = 0.25

    def __init__(self, name: str, questions: Sequence[ChoiceQuestion]) -> None:
        if not questions:
            raise UserError(f"The files of {name} hold no questions.")
        self.name, self.questions = name, questions
        self.letters: Sequence[str] = LETTERS[: max(len(question.choices) for question in questions)]

    def __len__(self) -> int:
        return len(self.questions)

    def __getitem__(self, index: int) -> Conversation:
        question = self.questions[index]
        return exchange(question.prompt(), LETTERS[question.correct])

    def letters_of(self, index: int) -> str:
        """The letters of one question: a few in ARC have three choices or five."""
        return LETTERS[: len(self.questions[index].choices)]

    def reward(self, index: int, reply: Sequence[Part]) -> float:
        return float(parse_letter(reply_text(reply)) == LETTERS[self.questions[index].correct])


def parse_letter(text: str) -> str | None:
    """The letter that a reply chooses: alone, before a bracket or full stop, or after "the answer is"."""
    text = text.strip()
    alone = re.match(r"\(?([A-J])(?:[).:,\n]|$)", text)
    stated = re.findall(r"(?i:answer\s*(?:is|:))\s*\(?([A-J])\b", text)
    if alone:
        return alone[1]
    return stated[-1] if stated else None


def arc(where: Path, subset: Literal["easy", "challenge"] = "easy", split: str = "test") -> MultipleChoice:
    name, hub = f"arc-{subset}", f"ARC-{subset.capitalize()}"
    files = {
        "train": (f"{hub}/train-*.parquet", f"arc_{subset}_train.jsonl"),
        "val": (f"{hub}/validation-*.parquet", f"arc_{subset}_dev.jsonl"),
        "test": (f"{hub}/test-*.parquet", f"arc_{subset}_test.jsonl", f"world_knowledge/arc_{subset}.jsonl"),
    }
    return MultipleChoice(name, read_split(where, files, split, name, _arc_question))


def mmlu(where: Path, split: str = "test") -> MultipleChoice:
    return MultipleChoice("mmlu", read_split(where, MMLU_FILES, split, "mmlu", _mmlu_question))


_TEXT = (str, float)  # some choices are numbers


def _arc_question(record: Record) -> ChoiceQuestion:
    """From CORE's bundle, from plain jsonl, or as on the hub."""
    if "query" in record:
        check_shape(record, {"query": str, "choices": [_TEXT], "gold": int})
        question = record["query"].removeprefix("Question: ")
        return ChoiceQuestion(question, _texts(record["choices"]), record["gold"])
    if "answerKey" not in record:
        return _mmlu_question(record)
    labelled = {"label": [(str, int)], "text": [_TEXT]}
    check_shape(record, {"question": str, "answerKey": (str, int), "choices": labelled})
    labels, key = [str(label) for label in record["choices"]["label"]], str(record["answerKey"])
    if key not in labels:
        raise ValueError(f"its answer is {shown(key)}, which is none of {', '.join(labels[:10])}")
    return ChoiceQuestion(record["question"], _texts(record["choices"]["text"]), labels.index(key))


def _mmlu_question(record: Record) -> ChoiceQuestion:
    record = (
        record["train"] if isinstance(record.get("train"), dict) else record
    )  # the auxiliary training set
    check_shape(record, {"question": str, "choices": [_TEXT], "answer": int})
    return ChoiceQuestion(record["question"].strip(), _texts(record["choices"]), record["answer"])


def _texts(choices: Iterable[object]) -> tuple[str, ...]:
    return tuple(str(choice).strip() for choice in choices)
