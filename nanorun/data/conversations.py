"""Conversations as tokens: all of them, rendered once before training begins.

Then everything about an epoch is known from the start: how many rows it packs into, how many tokens are
trained, and a fingerprint of every token, by which a run that goes on can tell that its data is the same.
"""

import hashlib
import warnings
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from nanorun.console import Progress
from nanorun.data.sources import ConversationSource
from nanorun.errors import UserError
from nanorun.hardware import usable_cores
from nanorun.text.chat import ConversationCut, render
from nanorun.text.tokenizer import Tokenizer

_CHUNK = 512  # conversations that a thread renders at a time


class Numbered(Protocol):
    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Mapping[str, Any]: ...


@dataclass(frozen=True)
class Conversations:
    """Flat arrays; conversation i is `tokens[offsets[i]:offsets[i + 1]]`, empty where none of it fits."""

    tokens: NDArray[np.int32]
    mask: NDArray[np.bool_]
    offsets: NDArray[np.int64]
    cut: int  # conversations that lost messages at their end
    left_out: int  # conversations of which nothing fits

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, index: int) -> tuple[list[int], list[int]]:
        at = slice(int(self.offsets[index]), int(self.offsets[index + 1]))
        return self.tokens[at].tolist(), self.mask[at].astype(np.int8).tolist()

    @property
    def trained_tokens(self) -> int:
        return int(self.mask.sum())

    @cached_property
    def fingerprint(self) -> str:
        digest = hashlib.sha256()
        for array in (self.tokens, self.mask, self.offsets):
            digest.update(np.ascontiguousarray(array).data)
        return digest.hexdigest()

    def source(self, bos: int) -> ConversationSource:
        return ConversationSource(self, bos, self.fingerprint)  # type: ignore[arg-type]


@dataclass
class _Part:
    ids: Any = field(default_factory=list)
    mask: Any = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    cut: int = 0
    left_out: int = 0

    def packed(self) -> "_Part":
        """Arrays in place of lists, which take eight times the memory."""
        self.ids, self.mask = np.array(self.ids, np.int32), np.array(self.mask, np.bool_)
        return self


def render_all(examples: Numbered, tokenizer: Tokenizer, context: int) -> Conversations:
    """Every conversation, so that it fits a row of `context` tokens to predict. The order is kept."""

    def chunk(start: int) -> _Part:
        part = _Part()
        for i in range(start, min(start + _CHUNK, len(examples))):
            rendered = render(examples[i], tokenizer, context + 1)
            part.ids += rendered.ids
            part.mask += rendered.mask
            part.lengths.append(len(rendered.ids))
            part.cut += bool(rendered.dropped and rendered.ids)
            part.left_out += not rendered.ids
        return part

    parts: list[_Part] = []
    with (
        warnings.catch_warnings(),
        Progress("rendering conversations", len(examples), "doc") as bar,
        ThreadPoolExecutor(min(usable_cores(), 16)) as pool,
    ):
        warnings.simplefilter("ignore", ConversationCut)  # they are counted
        for part in pool.map(chunk, range(0, len(examples), _CHUNK)):
            parts.append(part.packed())
            bar.advance(len(part.lengths))
    lengths = [length for part in parts for length in part.lengths]
    made = Conversations(
        np.concatenate([np.zeros(0, np.int32), *(part.ids for part in parts)]),
        np.concatenate([np.zeros(0, np.bool_), *(part.mask for part in parts)]),
        np.cumsum([0, *lengths], dtype=np.int64),
        sum(part.cut for part in parts),
        sum(part.left_out for part in parts),
    )
    if not made.trained_tokens:
        raise UserError(
            f"None of the {len(examples):,} conversations has an answer that fits in {context} tokens: use a larger "
            "--context or other conversations."
        )
    return made
