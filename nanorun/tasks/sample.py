"""The sample world's own tasks: conversations to train on, and questions in wordings that training never sees.

Four kinds of question, each with its grader (data/sample/questions.py): facts, sums (with the calculator), the spelling
of words, and how often a letter occurs in one.
"""

from collections.abc import Sequence

from nanorun.data.sample.questions import Kind, is_correct, questions
from nanorun.data.sample.rng import Split
from nanorun.data.sample.talk import conversations
from nanorun.errors import UserError
from nanorun.tasks.task import ConversationList, reply_text
from nanorun.text.chat import Part

TASKS: dict[str, Kind] = {
    "sample-facts": "fact",
    "sample-sums": "sum",
    "sample-spelling": "spelling",
    "sample-counting": "count",
}
# The split of the sample world, the number of questions, and the seed. Validation and test differ only by seed.
_STREAMS: dict[str, tuple[Split, int, int]] = {
    "train": ("train", 4_000, 0),
    "val": ("val", 500, 1),
    "test": ("val", 500, 0),
}


def sample_chat(split: str = "train") -> ConversationList:
    world_split, _, seed = _stream(split)
    return ConversationList("sample-chat", list(conversations(world_split, 20_000, seed)))


class SampleQuestions(ConversationList):
    baseline, letters = 0.0, None

    def __init__(self, name: str, split: str = "test") -> None:
        self.questions = list(questions(*_stream(split), TASKS[name]))
        super().__init__(name, [question.conversation for question in self.questions])

    def reward(self, index: int, reply: Sequence[Part]) -> float:
        return float(is_correct(self.questions[index], reply_text(reply)))


def _stream(split: str) -> tuple[Split, int, int]:
    if split not in _STREAMS:
        raise UserError(f"The sample world has no split '{split}': choose {' or '.join(_STREAMS)}.")
    return _STREAMS[split]
