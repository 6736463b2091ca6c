"""The KV cache, and the pool of slots that sequences take in it.

A slot holds one sequence. Each layer keeps keys and values as (S + 1, kv_heads, L, head_dim), with the key of
absolute position p at index p % L. A layer with full attention has L = context. A layer with a sliding window
is a ring buffer of L = window + SLACK: keys that leave the window are overwritten. The cache also keeps the
token ids of each slot: the smear reads the previous id, the repetition penalty and prompt lookup read all.

The slack makes truncation possible. Rejected draft tokens, a step launched too early and a tool call leave
tokens in the cache that are not part of the sequence; the sequence is then truncated to n tokens and continues
from there. Nothing is erased: each query masks by the length of its sequence, so later entries are invisible.
A ring that was written up to position h (the high-water mark, which truncation does not lower) still holds the
window before n if h - n ≤ SLACK, or if it has not wrapped around yet. `min_truncation(h)` is that rule.

The last slot, `scratch`, belongs to no sequence. Padding rows of a batch and padding tokens of a chunk are
written there.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from nanorun.config import ModelConfig

SLACK = 128  # how many of the newest tokens can be dropped once a ring has wrapped around
MIN_SHARED_PREFIX = 4  # tokens; a shorter prefix is not worth a copy


def on_device(values: Sequence[Any], device: torch.device) -> Tensor:
    """A tensor of these numbers on the device, copied without synchronizing with it."""
    tensor = torch.tensor(values)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


class Cache:
    def __init__(
        self,
        config: ModelConfig,
        slots: int,
        device: torch.device,
        dtype: torch.dtype,
        slack: int = SLACK,
    ) -> None:
        self.config, self.slots, self.slack, self.scratch = config, slots, slack, slots
        # L of each layer
        self.lengths = [min(config.context, config.window(layer) + slack) for layer in range(config.depth)]
        # Zeros, because masked entries are still multiplied by a weight of zero.
        shapes = [(slots + 1, config.kv_heads, length, config.head_dim) for length in self.lengths]
        self.k = [torch.zeros(shape, device=device, dtype=dtype) for shape in shapes]
        self.v = [torch.zeros(shape, device=device, dtype=dtype) for shape in shapes]
        self.tokens = torch.zeros(slots + 1, config.context, device=device, dtype=torch.long)

    @property
    def bytes(self) -> int:
        return sum(tensor.nbytes for tensor in (*self.k, *self.v, self.tokens))

    def bytes_read(self, length: int) -> int:
        """Bytes that one decode step reads for a sequence of this many tokens, the newest included."""
        config = self.config
        keys = sum(min(length, config.window(layer)) for layer in range(config.depth))
        return 2 * keys * config.kv_heads * config.head_dim * self.k[0].element_size()

    def min_truncation(self, high_water_mark: int) -> int:
        """The shortest length, other than 0, to which a slot written up to the mark can be truncated."""
        wrapped = [
            high_water_mark - (length - self.config.window(layer))
            for layer, length in enumerate(self.lengths)
            if high_water_mark > length
        ]
        return max(wrapped, default=0)

    def copy(self, source: int, targets: Sequence[int], high_water_mark: int) -> None:
        """Copies the contents of slot `source`, which was written up to the mark, to all targets."""
        rows = on_device(targets, self.tokens.device)
        for cache in (*self.k, *self.v):
            used = min(high_water_mark, cache.size(2))
            cache[rows, :, :used] = cache[source, :, :used].clone()
        self.tokens[rows, :high_water_mark] = self.tokens[source, :high_water_mark].clone()

    def write(self, layer: int, slots: Tensor, positions: Tensor, k: Tensor, v: Tensor) -> None:
        """Stores keys and values (N, kv_heads, head_dim) of tokens at these positions of these slots."""
        index = positions % self.lengths[layer]
        self.k[layer][slots, :, index] = k
        self.v[layer][slots, :, index] = v


@dataclass
class Slot:
    index: int
    tokens: list[int] = field(default_factory=list)  # shared with the SequenceState that owns the slot
    cached_tokens: int = 0  # how many of them have their keys and values in the cache
    high_water_mark: int = 0  # the length up to which the rings may have been written
    in_use: bool = False
    last_used: int = 0  # logical time of the last release


class SlotPool:
    """Assigns sequences to slots and reuses cached prefixes; one pool serves all caches (a draft model has its own).

    A finished sequence stays in its slot until the slot is needed, least recently used first. A new sequence
    looks for the slot, idle or in use, with the longest common prefix. If that slot is idle and holds nothing
    else, the sequence continues there: the next turn of a conversation. Otherwise the prefix is copied to the
    least recently used idle slot: the system prompt of many conversations, or one prompt of many samples. A
    copy is far cheaper than a prefill.
    """

    def __init__(self, caches: Sequence[Cache]) -> None:
        self.caches = caches
        self.slots = [Slot(index) for index in range(caches[0].slots)]
        self._clock = itertools.count(1)

    @property
    def num_idle(self) -> int:
        return sum(not slot.in_use for slot in self.slots)

    def acquire(self, tokens: list[int]) -> Slot:
        """An idle slot for this sequence, whose `cached_tokens` counts the longest prefix that any slot holds, there or
        copied there (the class says when), without the last token; 0 if that is shorter than `MIN_SHARED_PREFIX`."""
        prefix = tokens[:-1]
        shared = {slot.index: self._shared_prefix(slot, prefix) for slot in self.slots}
        best = max(self.slots, key=lambda slot: (shared[slot.index], not slot.in_use))
        length = shared[best.index]
        oldest = self._least_recently_used(1)[0]
        if length < MIN_SHARED_PREFIX:
            chosen, length = oldest, 0
            chosen.high_water_mark = 0
        elif not best.in_use and (length == best.cached_tokens or best is oldest):
            chosen = best
        else:
            chosen = oldest
            self._copy(best, [chosen])
        chosen.tokens, chosen.cached_tokens, chosen.in_use = tokens, length, True
        return chosen

    def fork(self, source: Slot, sequences: Sequence[list[int]]) -> list[Slot]:
        """Copies of `source` for as many of these sequences as there are idle slots."""
        targets = self._least_recently_used(len(sequences))
        if targets:
            self._copy(source, targets)
        for slot, tokens in zip(targets, sequences, strict=False):
            slot.tokens, slot.cached_tokens, slot.in_use = tokens, source.cached_tokens, True
        return targets

    def release(self, slot: Slot) -> None:
        """Marks the slot idle. Its contents stay available for a sequence with the same prefix."""
        slot.in_use, slot.last_used = False, next(self._clock)

    def clear(self) -> None:
        """Forgets all cached prefixes, as after a change of weights."""
        for slot in self.slots:
            slot.cached_tokens, slot.high_water_mark, slot.last_used = 0, 0, 0

    def _least_recently_used(self, count: int) -> list[Slot]:
        idle = [slot for slot in self.slots if not slot.in_use]
        return sorted(idle, key=lambda slot: (slot.cached_tokens > 0, slot.last_used))[:count]

    def _copy(self, source: Slot, targets: Sequence[Slot]) -> None:
        for cache in self.caches:
            cache.copy(source.index, [slot.index for slot in targets], source.high_water_mark)
        for slot in targets:
            slot.high_water_mark = source.high_water_mark

    def _shared_prefix(self, slot: Slot, tokens: list[int]) -> int:
        length = common_prefix(slot.tokens[: slot.cached_tokens], tokens)
        reachable = max(cache.min_truncation(slot.high_water_mark) for cache in self.caches)
        return length if length >= reachable else 0


def common_prefix(a: list[int], b: list[int]) -> int:
    """The length of the common prefix, by bisection: comparing slices is far faster than a Python loop."""
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
