"""The KV cache: what attention must remember of each text, in S slots of fixed size.

A slot is room for one text. Each layer keeps keys and values as (S + 1, kv_heads, L, head_dim), and the key
of absolute position p stands at index p % L. A layer that sees everything has L = context. A layer with a
window needs no more than its window, so it is a ring of L = window + SLACK: what falls out of the window is
written over. Beside them the cache keeps the token ids of each slot: the smear needs the id before, the
repetition penalty and prompt lookup need all of them.

The slack is what makes going back possible. Speculation, a step launched too early and a tool call leave
tokens behind that do not count; a text is then cut to n tokens and goes on from there. Nothing is erased:
positions are read by the length of the text, and whatever lies beyond it is out of every query's sight. A
ring that was written up to position h (the high-water mark, never lowered by a cut) still holds the window
before n if h - n ≤ SLACK, or if it has not wrapped around yet. `earliest(h)` is that rule.

The last slot, `scratch`, belongs to nobody. Rows that only fill up a batch, and tokens that only fill up a
chunk, are written there.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from nanorun.config import ModelConfig

SLACK = 128  # how many of the newest tokens can be taken back once a ring has wrapped around


def on_device(values: Sequence[Any], device: torch.device) -> Tensor:
    """A tensor of these numbers on the device, without waiting for what the device is doing."""
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
        self.lengths = [
            min(config.context, config.window(layer) + slack) for layer in range(config.depth)
        ]  # L of each layer
        # Zeros, since what no query sees is still multiplied by a weight of zero.
        shapes = [(slots + 1, config.kv_heads, length, config.head_dim) for length in self.lengths]
        self.k = [torch.zeros(shape, device=device, dtype=dtype) for shape in shapes]
        self.v = [torch.zeros(shape, device=device, dtype=dtype) for shape in shapes]
        self.tokens = torch.zeros(slots + 1, config.context, device=device, dtype=torch.long)

    @property
    def bytes(self) -> int:
        return sum(tensor.nbytes for tensor in (*self.k, *self.v, self.tokens))

    def bytes_read(self, length: int) -> int:
        """What one decode step reads of a slot whose text has this many tokens, the newest included."""
        config = self.config
        keys = sum(min(length, config.window(layer)) for layer in range(config.depth))
        return 2 * keys * config.kv_heads * config.head_dim * self.k[0].element_size()

    def earliest(self, high: int) -> int:
        """The shortest length, other than 0, to which a slot written up to `high` can be cut."""
        wrapped = [
            high - (length - self.config.window(layer))
            for layer, length in enumerate(self.lengths)
            if high > length
        ]
        return max(wrapped, default=0)

    def copy(self, source: int, targets: Sequence[int], high: int) -> None:
        """Makes all targets hold what `source` holds, which was written up to `high`."""
        rows = on_device(targets, self.tokens.device)
        for cache in (*self.k, *self.v):
            used = min(high, cache.size(2))
            cache[rows, :, :used] = cache[source, :, :used].clone()
        self.tokens[rows, :high] = self.tokens[source, :high].clone()

    def write(self, layer: int, slots: Tensor, positions: Tensor, k: Tensor, v: Tensor) -> None:
        """Keys and values (N, kv_heads, head_dim) of tokens at these positions of these slots."""
        index = positions % self.lengths[layer]
        self.k[layer][slots, :, index] = k
        self.v[layer][slots, :, index] = v
