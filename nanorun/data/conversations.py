"""Conversations as tokens: all of them, rendered once before training begins.

So the number of rows and trained tokens of an epoch is known from the start, and so is a fingerprint of every token,
by which a resumed run can tell that its data is unchanged.
"""

import hashlib
import warnings
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
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

_CHUNK = 512  # conversations rendered per task


class ConversationExamples(Protocol):
    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Mapping[str, Any]: ...


@dataclass(frozen=True)
class Conversations:
    """Flat arrays. Conversation i is `tokens[offsets[i]:offsets[i + 1]]`, empty if nothing of it fits."""

    tokens: NDArray[np.int32]
    mask: NDArray[np.bool_]  # loss mask
    offsets: NDArray[np.int64]
    cut: int  # conversations that lost messages at their end
    left_out: int  # conversations that were dropped whole

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, index: int) -> tuple[list[int], list[int]]:
        at = slice(int(self.offsets[index]), int(self.offsets[index + 1]))
        return self.tokens[at].tolist(), self.mask[at].astype(np.int8).tolist()

    @property
    def trained_tokens(self) -> int:
        return int(self.mask.sum())

    @property
    def trained_per_conversation(self) -> NDArray[np.int64]:
        before = np.concatenate([[0], np.cumsum(self.mask, dtype=np.int64)])
        return np.diff(before[self.offsets])

    @cached_property
    def fingerprint(self) -> str:
        digest = hashlib.sha256()
        for array in (self.tokens, self.mask, self.offsets):
            digest.update(np.ascontiguousarray(array).data)
        return digest.hexdigest()

    def source(self, bos: int) -> ConversationSource:
        return ConversationSource(self, bos, self.fingerprint)  # type: ignore[arg-type]


def render_all(examples: ConversationExamples, tokenizer: Tokenizer, context: int) -> Conversations:
    """Renders every conversation so that it fits a row of `context` tokens to predict. Keeps the order."""

    def render_chunk(start: int) -> tuple[NDArray[np.int32], NDArray[np.bool_], list[int], int, int]:
        rendered = [
            render(examples[i], tokenizer, context + 1)
            for i in range(start, min(start + _CHUNK, len(examples)))
        ]
        return (  # arrays, because lists take eight times the memory
            np.array([token for one in rendered for token in one.ids], np.int32),
            np.array([trained for one in rendered for trained in one.mask], np.bool_),
            [len(one.ids) for one in rendered],
            sum(bool(one.dropped and one.ids) for one in rendered),
            sum(not one.ids for one in rendered),
        )

    chunks = []
    with (
        warnings.catch_warnings(),
        Progress("rendering conversations", len(examples), "doc") as bar,
        ThreadPoolExecutor(min(usable_cores(), 16)) as pool,
    ):
        warnings.simplefilter("ignore", ConversationCut)  # they are counted
        for chunk in pool.map(render_chunk, range(0, len(examples), _CHUNK)):
            chunks.append(chunk)
            bar.advance(len(chunk[2]))
    conversations = Conversations(
        np.concatenate([np.zeros(0, np.int32), *(chunk[0] for chunk in chunks)]),
        np.concatenate([np.zeros(0, np.bool_), *(chunk[1] for chunk in chunks)]),
        np.cumsum([0, *(length for chunk in chunks for length in chunk[2])], dtype=np.int64),
        sum(chunk[3] for chunk in chunks),
        sum(chunk[4] for chunk in chunks),
    )
    if not conversations.trained_tokens:
        raise UserError(
            f"None of the {len(examples):,} conversations has an answer that fits in {context} tokens: use a larger "
            "--context or other conversations."
        )
    return conversations
