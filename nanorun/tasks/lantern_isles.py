"""The sample world's own tasks: conversations to learn from, and questions about it in words not trained on.

Four kinds of question, each with its judge (data/sample/quiz.py): facts, sums (through the calculator), the
spelling of words, and how often a letter comes in one.
"""

from collections.abc import Sequence

from nanorun.data import sample
from nanorun.errors import UserError
from nanorun.tasks.task import Conversation, said
from nanorun.text.chat import Part

TASKS: dict[str, sample.Kind] = {
    "sample-facts": "fact",
    "sample-sums": "sum",
    "sample-spelling": "spelling",
    "sample-counting": "count",
}
CHATS, QUESTIONS = 20_000, {"train": 4_000, "val": 500, "test": 500}
_VAL_SEED = 1  # of the questions that training looks at on its way; the test's are others


def sample_chat(split: str = "train", size: int = CHATS) -> "SampleChat":
    return SampleChat(list(sample.conversations(_split(split), size, 0 if split != "val" else _VAL_SEED)))


class SampleChat:
    name = "sample-chat"

    def __init__(self, conversations: Sequence[Conversation]) -> None:
        self._conversations = conversations

    def __len__(self) -> int:
        return len(self._conversations)

    def __getitem__(self, index: int) -> Conversation:
        return self._conversations[index]


class SampleQuestions:
    baseline, letters = 0.0, None

    def __init__(self, name: str, split: str = "test", size: int | None = None) -> None:
        if name not in TASKS:
            raise UserError(f"There is no task '{name}' of the sample world: choose {' or '.join(TASKS)}.")
        self.name = name
        seed = _VAL_SEED if split == "val" else 0
        count = QUESTIONS[_known(split)] if size is None else size
        self.questions = list(sample.questions(_split(split), count, seed, TASKS[name]))

    def __len__(self) -> int:
        return len(self.questions)

    def __getitem__(self, index: int) -> Conversation:
        return self.questions[index].conversation

    def reward(self, index: int, reply: Sequence[Part]) -> float:
        return float(sample.is_right(self.questions[index], said(reply)))


def _known(split: str) -> str:
    if split not in QUESTIONS:
        raise UserError(f"The sample world has no split '{split}': choose {' or '.join(QUESTIONS)}.")
    return split


def _split(split: str) -> sample.Split:
    return "train" if _known(split) == "train" else "val"
