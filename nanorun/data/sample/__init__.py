"""The sample world: a small, charming world to learn language in, generated on the spot.

The first run of nanorun needs data without a download. This package writes it: the Lantern Isles, five invented
islands with their villages, people and animals. Plain documents (`documents`) for pretraining tell of them, work out
sums and spell words; `conversations` (talk.py) teach a chat model to answer; `questions` and `is_correct`
(questions.py) test it. Everything is composed from one table of facts (world.py), so nothing contradicts anything,
and everything is deterministic: the same arguments give the same bytes on every machine.

Validation differs from training in its phrasings and its combinations (which facts occur together, which numbers are
added, which words occur together), never in its facts: a model that understood the training text can answer every
validation question, and a model that memorized its sentences cannot.

    for text in documents("train", 20_000_000): ...
"""

from collections.abc import Callable, Iterator

from nanorun.data.sample.entries import comparisons, entries, lists
from nanorun.data.sample.isles import guides
from nanorun.data.sample.lessons import lessons
from nanorun.data.sample.letters import counting, signals, spelling
from nanorun.data.sample.numbers import daily, sums, worked
from nanorun.data.sample.rng import RandomStream, Split, check_split
from nanorun.data.sample.stories import stories


def documents(split: Split, size: int, seed: int = 0) -> Iterator[str]:
    """Documents until their UTF-8 bytes reach `size`; a larger size begins with the same documents."""
    check_split(split)
    rng = RandomStream("documents", split, seed)
    # The kinds of document, each with the share of all documents that it and those above it make up.
    kinds: tuple[tuple[float, Callable[[], str]], ...] = (
        (0.30, entries(split, rng).__next__),
        (0.32, guides(split, rng).__next__),
        (0.39, comparisons(split, rng).__next__),
        (0.42, lists(split, rng).__next__),
        (0.57, stories(split, rng).__next__),
        (0.68, lessons(split, rng).__next__),
        (0.72, lambda: sums(split, rng)),
        (0.74, lambda: worked(split, rng)),
        (0.77, lambda: daily(split, rng)),
        (0.85, spelling(split, rng).__next__),
        (0.95, lambda: signals(split, rng)),
        (1.00, lambda: counting(split, rng)),
    )
    written = 0
    while written < size:
        roll = rng.random()
        text = next(write for share, write in kinds if roll < share)()
        written += len(text.encode())
        yield text
