"""The sample world: a small, charming place to learn language in, generated on the spot.

nanorun's first run needs data without a download. This package writes it: the Lantern Isles, five invented
islands with their villages, people and animals. Plain documents (`documents`) for pretraining tell of them,
work out sums and spell words; `conversations` teach a chat model to answer; `questions` and `is_right`
examine it. All of it is composed from one table of facts (tables.py), so nothing contradicts anything, and
all of it is deterministic: the same arguments give the same bytes on every machine.

Validation differs from training by its phrasings and its combinations (which facts stand together, which
numbers are added, which words stand together), never by its facts: whoever understood the training text can
answer every validation question, and whoever memorised its sentences cannot.

    for text in documents("train", 20_000_000): ...
"""

from collections.abc import Callable, Iterator

from nanorun.data.sample.chance import Chance, Split, check_split
from nanorun.data.sample.entries import comparisons, entries, lists
from nanorun.data.sample.lessons import lessons
from nanorun.data.sample.letters import counting, signals, spelling
from nanorun.data.sample.numbers import daily, sums, worked
from nanorun.data.sample.quiz import KINDS, Kind, Question, is_right, questions
from nanorun.data.sample.stories import stories
from nanorun.data.sample.talk import conversations
from nanorun.data.sample.world import Fact, World, world

__all__ = [
    "KINDS",
    "Fact",
    "Kind",
    "Question",
    "Split",
    "World",
    "conversations",
    "documents",
    "is_right",
    "questions",
    "world",
]


def documents(split: Split, size: int, seed: int = 0) -> Iterator[str]:
    """Documents until their UTF-8 bytes reach `size`; a larger size begins with the same documents."""
    check_split(split)
    chance = Chance("documents", split, seed)
    recipe = _recipe(split, chance)
    written = 0
    while written < size:
        roll = chance.roll()
        write = next(write for share, write in recipe if roll < share)
        text = write()
        written += len(text.encode())
        yield text


def _recipe(split: Split, chance: Chance) -> tuple[tuple[float, Callable[[], str]], ...]:
    """The kinds of document, each with the share of all documents that it and those above it make up."""
    return (
        (0.30, entries(split, chance).__next__),
        (0.39, comparisons(split, chance).__next__),
        (0.42, lists(split, chance).__next__),
        (0.57, stories(split, chance).__next__),
        (0.68, lessons(split, chance).__next__),
        (0.73, lambda: sums(split, chance)),
        (0.76, lambda: worked(split, chance)),
        (0.79, lambda: daily(split, chance)),
        (0.88, spelling(split, chance).__next__),
        (0.94, lambda: signals(split, chance)),
        (1.00, lambda: counting(split, chance)),
    )
