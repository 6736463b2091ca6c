"""Random draws that are identical everywhere, and the rule that decides what is held out for validation.

The sample world must be the same text on every machine and every Python. `random.Random(n).random()` is promised to
be stable for a seed; `choice`, `shuffle`, `hash()` and the order of a set are not, so nothing here uses them. The
package rests on two ideas:

* `RandomStream` draws from a stream named by words (`RandomStream("documents", "train", 0)`).
* `held_out("sum", "+", 12, 30)` decides by a hash of its arguments whether a combination belongs to validation.
  About one in eight does. The result does not depend on a seed, so a combination that is held out in one run is
  held out in all of them.
"""

import hashlib
import random
from collections.abc import Sequence
from typing import Generic, Literal, TypeVar

Split = Literal["train", "val"]
T = TypeVar("T")


class RandomStream:
    """A stream of random draws, determined by the words that name it."""

    __slots__ = ("random",)

    def __init__(self, *name: object) -> None:
        self.random = random.Random(int.from_bytes(_digest(name)[:8], "big")).random

    def below(self, n: int) -> int:
        return int(self.random() * n)

    def choice(self, items: Sequence[T]) -> T:
        return items[int(self.random() * len(items))]

    def shuffled(self, items: Sequence[T]) -> list[T]:
        deck = list(items)
        for last in range(len(deck) - 1, 0, -1):
            other = int(self.random() * (last + 1))
            deck[last], deck[other] = deck[other], deck[last]
        return deck


class Deck(Generic[T]):
    """Deals items in random order and shuffles again when all are dealt, so all come equally often."""

    def __init__(self, items: Sequence[T], rng: RandomStream) -> None:
        self._items, self._rng = items, rng
        self._left: list[T] = []

    def deal(self) -> T:
        if not self._left:
            self._left = self._rng.shuffled(self._items)
        return self._left.pop()


def held_out(*combination: object) -> bool:
    """Whether this combination occurs in validation only (about one in eight does)."""
    return _digest(combination)[0] < 32


def belongs(split: Split, *combination: object) -> bool:
    return held_out(*combination) == (split == "val")


def check_split(split: str) -> None:
    if split not in ("train", "val"):
        raise ValueError(f"split is {split!r}: the sample world has 'train' and 'val'")


def _digest(words: tuple[object, ...]) -> bytes:
    return hashlib.sha256("/".join(map(str, words)).encode()).digest()
