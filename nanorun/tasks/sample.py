"""The sample world's own tasks: conversations to train on, and questions in wordings that training never sees.

Four kinds of question, each with its grader (data/sample/questions.py): facts, sums (with the calculator), the spelling
of words, and how often a letter occurs in one.
"""

from collections.abc import Sequence

from nanorun.data.sample.questions import Kind, is_correct, questions
from nanorun.data.sample.rng import Split
from nanorun.data.sample.talk import conversations
from nanorun.errors import UserError
from nanorun.tasks.task import Conversation, ConversationList, reply_text
from nanorun.text.chat import Part

TASKS: dict[str, Kind] = {
    "sample-facts": "fact",
    "sample-sums": "sum",
    "sample-spelling": "spelling",
    "sample-counting": "count",
}
CHATS, QUESTIONS = 20_000, {"train": 4_000, "val": 500, "test": 500}


def sample_chat(split: str = "train", size: int = CHATS) -> ConversationList:
    return ConversationList("sample-chat", list(conversations(*_stream(split, size))))


class SampleQuestions:
    baseline, letters = 0.0, None

    def __init__(self, name: str, split: str = "test", size: int | None = None) -> None:
        if name not in TASKS:
            raise UserError(f"There is no task '{name}' of the sample world: choose {' or '.join(TASKS)}.")
        self.name = name
        self.questions = list(questions(*_stream(split, size), TASKS[name]))

    def __len__(self) -> int:
        return len(self.questions)

    def __getitem__(self, index: int) -> Conversation:
        return self.questions[index].conversation

    def reward(self, index: int, reply: Sequence[Part]) -> float:
        return float(is_correct(self.questions[index], reply_text(reply)))


def _stream(split: str, size: int | None) -> tuple[Split, int, int]:
    """The split of the sample world, how many to draw, and the seed. Validation and test differ only by seed."""
    if split not in QUESTIONS:
        raise UserError(f"The sample world has no split '{split}': choose {' or '.join(QUESTIONS)}.")
    count = QUESTIONS[split] if size is None else size
    return "train" if split == "train" else "val", count, 1 if split == "val" else 0
