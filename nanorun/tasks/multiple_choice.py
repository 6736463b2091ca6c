"""Multiple choice: a question, a line for each choice, and a letter as the answer.

    Which gas do plants take in?
    A) oxygen
    B) carbon dioxide

The answer is the letter alone. It stands right behind <|assistant_start|>, so it is the token of that one byte
in every byte-level vocabulary, and a model can be judged by the logits of the letters without generating.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from nanorun.errors import UserError
from nanorun.tasks.task import Conversation, said
from nanorun.text.chat import Part

LETTERS = "ABCDEFGHIJ"


@dataclass(frozen=True)
class Problem:
    question: str
    choices: tuple[str, ...]
    right: int  # which choice

    def __post_init__(self) -> None:
        if not 2 <= len(self.choices) <= len(LETTERS) or not 0 <= self.right < len(self.choices):
            raise UserError(
                f"A question has {len(self.choices)} choices and answer {self.right}: {self.question!r:.80}."
            )


class MultipleChoice:
    """A task of such problems. `letters` are those of the question with most choices; see `letters_of`."""

    def __init__(self, name: str, problems: Sequence[Problem], baseline: float = 0.25) -> None:
        if not problems:
            raise UserError(f"The files of {name} hold no questions.")
        self.name, self.baseline, self.problems = name, baseline, problems
        self.letters: Sequence[str] = LETTERS[: max(len(problem.choices) for problem in problems)]

    def __len__(self) -> int:
        return len(self.problems)

    def __getitem__(self, index: int) -> Conversation:
        problem = self.problems[index]
        return {
            "messages": [
                {"role": "user", "content": ask(problem)},
                {"role": "assistant", "content": LETTERS[problem.right]},
            ]
        }

    def letters_of(self, index: int) -> str:
        """The letters of this very question: a few in ARC have three choices or five."""
        return LETTERS[: len(self.problems[index].choices)]

    def reward(self, index: int, reply: Sequence[Part]) -> float:
        return float(chosen(said(reply)) == LETTERS[self.problems[index].right])


def ask(problem: Problem) -> str:
    lines = [f"{letter}) {choice}" for letter, choice in zip(LETTERS, problem.choices, strict=False)]
    return "\n".join([problem.question, *lines])


def chosen(text: str) -> str | None:
    """The letter that a reply settles on: alone, before a bracket or full stop, or after "the answer is"."""
    text = text.strip()
    alone = re.match(r"\(?([A-J])(?:[).:,\n]|$)", text)
    told = re.findall(r"(?i:answer\s*(?:is|:))\s*\(?([A-J])\b", text)
    if alone:
        return alone[1]
    return told[-1] if told else None


def as_choices(value: Any) -> tuple[str, ...]:
    return tuple(str(choice).strip() for choice in value)
