"""Mixtures: many sources of examples as one, in an order that is the same everywhere.

A mixture is a list of parts and a permutation of all their examples, fixed by the seed for all time. A part
that is listed twice is seen twice as often. Looking up an example is one step, so a mixture costs no more than
what it is made of.
"""

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate

from nanorun.data.rows import shuffled
from nanorun.errors import UserError
from nanorun.tasks.task import Conversation, Examples


class Mixture:
    def __init__(self, parts: Sequence[Examples], seed: int = 0, name: str = "mixture") -> None:
        self.parts, self.name = list(parts), name
        self._ends = list(accumulate(len(part) for part in self.parts))
        self._order = shuffled(self._ends[-1] if self._ends else 0, seed)

    def __len__(self) -> int:
        return len(self._order)

    def __getitem__(self, index: int) -> Conversation:
        part, at = self.where(index)
        return self.parts[part][at]

    def where(self, index: int) -> tuple[int, int]:
        """The part that example `index` comes from, and its number there."""
        if not 0 <= index < len(self._order):
            raise IndexError(f"example {index} of a mixture of {len(self._order)}")
        drawn = int(self._order[index])
        part = bisect_right(self._ends, drawn)
        return part, drawn - (self._ends[part - 1] if part else 0)


class Slice:
    """Some of the examples: from `start` to before `stop`, every `step`-th. Numbers below 0 count from the end."""

    def __init__(
        self, examples: Examples, start: int | None = None, stop: int | None = None, step: int = 1
    ) -> None:
        if step < 1:
            raise UserError(f"A slice's step is {step}: it must be at least 1.")
        self._examples, self.name = examples, examples.name
        self._range = range(len(examples))[slice(start, stop, step)]

    def __len__(self) -> int:
        return len(self._range)

    def __getitem__(self, index: int) -> Conversation:
        if not 0 <= index < len(self._range):
            raise IndexError(f"example {index} of a slice of {len(self._range)}")
        return self._examples[self._range[index]]


class Without:
    """All examples but every `every`-th, which are kept to measure by (`Slice(examples, every - 1, step=every)`)."""

    def __init__(self, examples: Examples, every: int) -> None:
        if every < 2:
            raise UserError(f"Keeping every {every}-th example leaves none to learn from.")
        self._examples, self.name, self._every = examples, examples.name, every

    def __len__(self) -> int:
        return len(self._examples) - len(self._examples) // self._every

    def __getitem__(self, index: int) -> Conversation:
        if not 0 <= index < len(self):
            raise IndexError(f"example {index} of {len(self)}")
        return self._examples[index + index // (self._every - 1)]
