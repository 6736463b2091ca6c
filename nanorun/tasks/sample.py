"""The sample world's own tasks: conversations to train on, and questions in wordings that training never sees.

Each kind of question has its grader (data/sample/questions.py): facts, sums (with the calculator), the spelling of
words, how often a letter occurs in one; and, harder, sums with numbers of three digits, results of three and four
digits that are copied from the calculator, the spelling of words that training never has, and questions about the
isles as a whole and the assistant itself.
"""

from collections.abc import Sequence

from nanorun.data.sample.isles import askings
from nanorun.data.sample.letters import UNSEEN
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
    "sample-sums-3digit": "large_sum",
    "sample-long-results": "long_result",
    "sample-spelling-unseen": "new_word",
    "sample-world": "world",
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
        world_split, count, seed = _stream(split)
        kind = TASKS[name]
        # Each unseen word and each question about the world is asked once.
        once = {"new_word": len(UNSEEN), "world": len(askings(world_split))}
        if world_split == "val":
            count = min(count, once.get(kind, count))
        self.questions = list(questions(world_split, count, seed, kind))
        super().__init__(name, [question.conversation for question in self.questions])

    def reward(self, index: int, reply: Sequence[Part]) -> float:
        calls = [part["text"] for part in reply if part["type"] == "python"]
        return float(is_correct(self.questions[index], reply_text(reply), calls))


def _stream(split: str) -> tuple[Split, int, int]:
    if split not in _STREAMS:
        raise UserError(f"The sample world has no split '{split}': choose {' or '.join(_STREAMS)}.")
    return _STREAMS[split]
