"""Which text is in which slot of the cache, and which slot a new text should take.

A finished text stays in its slot until the room is needed, oldest first. A new text looks for the slot,
busy or idle, that holds the longest part of its beginning. If that slot is idle and holds nothing else,
the text goes on there: the next turn of a conversation. Otherwise the part is copied into the idle slot that
was used longest ago: the system prompt of many conversations, or one prompt of many samples. Copying is far
cheaper than reading the tokens again.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

from nanorun.infer.cache import Cache

LEAST_SHARED = 4  # tokens; fewer are not worth a copy


@dataclass
class Slot:
    number: int
    tokens: list[int] = field(default_factory=list)  # its text; shared with whoever is writing it
    held: int = 0  # how many of those the cache surely holds
    high: int = 0  # up to where the rings may have been written
    busy: bool = False
    used: int = 0  # when it was last released


class Slots:
    """The host's side of one or more caches (a draft model has its own) with the same slots."""

    def __init__(self, caches: Sequence[Cache]) -> None:
        self.caches = caches
        self.all = [Slot(number) for number in range(caches[0].slots)]
        self._clock = itertools.count(1)

    @property
    def idle(self) -> int:
        return sum(not slot.busy for slot in self.all)

    def take(self, text: list[int]) -> Slot:
        """A slot for this text, which begins with as much of it as there was; the last token is left out."""
        wanted = text[:-1]
        shared = {slot.number: self._reusable(slot, wanted) for slot in self.all}
        best = max(self.all, key=lambda slot: (shared[slot.number], not slot.busy))
        length = shared[best.number]
        oldest = self._oldest(1)[0]
        if length < LEAST_SHARED:
            chosen, length = oldest, 0
            chosen.high = 0
        elif not best.busy and (length == best.held or best is oldest):
            chosen = best
        else:
            chosen = oldest
            self._copy(best, [chosen])
        chosen.tokens, chosen.held, chosen.busy = text, length, True
        return chosen

    def fork(self, source: Slot, texts: Sequence[list[int]]) -> list[Slot]:
        """Slots that hold what `source` holds, for as many of these texts as there are idle ones."""
        targets = self._oldest(len(texts))
        if targets:
            self._copy(source, targets)
        for slot, text in zip(targets, texts, strict=False):
            slot.tokens, slot.held, slot.busy = text, source.held, True
        return targets

    def release(self, slot: Slot) -> None:
        """The slot is idle, and keeps its text for whoever begins with the same."""
        slot.busy, slot.used = False, next(self._clock)

    def forget(self) -> None:
        """Nothing that was computed holds any more (the weights have changed): all slots are as new."""
        for slot in self.all:
            slot.held, slot.high, slot.used = 0, 0, 0

    def _oldest(self, count: int) -> list[Slot]:
        idle = [slot for slot in self.all if not slot.busy]
        return sorted(idle, key=lambda slot: (slot.held > 0, slot.used))[:count]

    def _copy(self, source: Slot, targets: Sequence[Slot]) -> None:
        for cache in self.caches:
            cache.copy(source.number, [slot.number for slot in targets], source.high)
        for slot in targets:
            slot.high = source.high

    def _reusable(self, slot: Slot, text: list[int]) -> int:
        length = common_prefix(slot.tokens[: slot.held], text)
        reachable = max(cache.earliest(slot.high) for cache in self.caches)
        return length if length >= reachable else 0


def common_prefix(a: list[int], b: list[int]) -> int:
    """How many first tokens two texts share: halving, as comparing slices is far faster than a loop."""
    low, high = 0, min(len(a), len(b))
    if a[:high] == b[:high]:
        return high
    while high - low > 1:
        middle = (low + high) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle
    return low
