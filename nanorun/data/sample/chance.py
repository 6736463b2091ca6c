"""Chance that falls the same way everywhere, and the rule that says what is kept for validation.

The sample world must be the same text on every machine and every Python. `random.Random(n).random()` is
promised to be stable for a seed; `choice`, `shuffle`, `hash()` and the order of a set are not, so nothing
here uses them. Two ideas carry the whole package:

* `Chance` draws from a stream named by words (`Chance("documents", "train", 0)`).
* `held_out("sum", "+", 12, 30)` says, by a hash of its arguments, whether this combination belongs to
  validation. About one in eight does. The answer never depends on a seed, so a combination that is
  validation's in one run is validation's in all of them.
"""

import hashlib
import random
from collections.abc import Sequence
from typing import Generic, Literal, TypeVar

Split = Literal["train", "val"]
T = TypeVar("T")


class Chance:
    """A stream of draws, fixed by the words that name it."""

    __slots__ = ("roll",)

    def __init__(self, *name: object) -> None:
        self.roll = random.Random(int.from_bytes(_digest(name)[:8], "big")).random

    def below(self, n: int) -> int:
        return int(self.roll() * n)

    def pick(self, items: Sequence[T]) -> T:
        return items[int(self.roll() * len(items))]

    def shuffled(self, items: Sequence[T]) -> list[T]:
        deck = list(items)
        for last in range(len(deck) - 1, 0, -1):
            other = int(self.roll() * (last + 1))
            deck[last], deck[other] = deck[other], deck[last]
        return deck


class Deck(Generic[T]):
    """Deals items in random order and shuffles again when all are dealt, so none is neglected."""

    def __init__(self, items: Sequence[T], chance: Chance) -> None:
        self._items, self._chance = items, chance
        self._left: list[T] = []

    def deal(self) -> T:
        if not self._left:
            self._left = self._chance.shuffled(self._items)
        return self._left.pop()


def held_out(*combination: object) -> bool:
    """Whether this combination is shown in validation only (about one in eight is)."""
    return _digest(combination)[0] < 32


def belongs(split: Split, *combination: object) -> bool:
    return held_out(*combination) == (split == "val")


def check_split(split: str) -> None:
    if split not in ("train", "val"):
        raise ValueError(f"split is {split!r}: the sample world has 'train' and 'val'")


def _digest(words: tuple[object, ...]) -> bytes:
    return hashlib.sha256("/".join(map(str, words)).encode()).digest()
