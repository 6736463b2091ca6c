"""Sources of token blocks: text that is tokenized when it is loaded, token shards, or conversations.

A source is a numbered set of small *units* (a row group of a parquet shard, a range of a token shard, a few
hundred conversations) that can be loaded in any order. `rows.py` shuffles the units and loads a few of them at
a time as one block.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from nanorun.console import command
from nanorun.data.bins import read_bin
from nanorun.data.dataset import Dataset, Split, read_row_group
from nanorun.data.packing import Segments
from nanorun.errors import UserError
from nanorun.hardware import usable_cores
from nanorun.text.tokenizer import Tokenizer

BIN_UNIT_TOKENS = 1 << 20
CONVERSATION_UNIT = 256


@dataclass(frozen=True)
class TokenBlock:
    """The tokens of many documents in a flat array, and the segment of each document (without its BOS)."""

    tokens: NDArray[Any]
    documents: Segments
    trained: NDArray[np.bool_] | None = None  # conversations: the loss mask


class Source(Protocol):
    bos: int
    fingerprint: str  # changes when the content or order of units changes
    units: int  # how many there are

    def load(self, units: Sequence[int]) -> TokenBlock: ...


def open_source(dataset: Dataset, split: Split, tokenizer: Tokenizer | None, threads: int = 0) -> "Source":
    """The source for a dataset. A dataset of tokens must have been made with `tokenizer`."""
    if not dataset.of(split):
        raise UserError(f"The dataset '{dataset.name}' has no {split} shard.")
    if dataset.kind == "bin":
        made_by = dataset.tokenizer or {}
        if tokenizer is not None and made_by.get("fingerprint") not in (None, tokenizer.fingerprint):
            raise UserError(
                f"The tokens of '{dataset.name}' were made by tokenizer '{made_by.get('name')}', not by "
                f"'{tokenizer.name}': use that tokenizer or tokenize the text again."
            )
        return BinSource(dataset.files(split), int(made_by["bos"]), dataset.fingerprint)
    if tokenizer is None:
        raise UserError(f"'{dataset.name}' is text and needs a tokenizer: {command('tok train')} makes one.")
    return TextSource(dataset, split, tokenizer, threads)


class TextSource:
    """Parquet text, tokenized on `threads` threads when a block is loaded."""

    def __init__(self, dataset: Dataset, split: Split, tokenizer: Tokenizer, threads: int = 0) -> None:
        self.bos = tokenizer.bos
        self.fingerprint = _digest(dataset.fingerprint, split, tokenizer.fingerprint)
        self._tokenizer = tokenizer
        self._threads = threads or min(usable_cores(), 16)
        self._units = [
            (dataset.folder / shard.file, group)
            for shard in dataset.of(split)
            for group in range(shard.row_groups)
        ]
        self.units = len(self._units)

    def load(self, units: Sequence[int]) -> TokenBlock:
        import pyarrow.parquet

        texts: list[str] = []
        for unit in units:
            path, group = self._units[unit]
            with pyarrow.parquet.ParquetFile(path) as file:
                texts += read_row_group(file, group)
        tokens, offsets = self._tokenizer.encode_documents(texts, self._threads)
        return TokenBlock(tokens, Segments(offsets[:-1], np.diff(offsets)))


class BinSource:
    """Token shards through memory maps. A unit is a range of a shard: the documents that begin in it."""

    def __init__(self, files: Sequence[Path], bos: int, fingerprint: str = "") -> None:
        self.bos = bos
        self._maps = [read_bin(path) for path in files]
        self._units = [
            (tokens, begin) for tokens in self._maps for begin in range(0, len(tokens), BIN_UNIT_TOKENS)
        ]
        self.fingerprint = _digest(
            fingerprint,
            str(bos),
            *(f"{path.name} {len(m)}" for path, m in zip(files, self._maps, strict=True)),
        )
        self.units = len(self._units)

    def load(self, units: Sequence[int]) -> TokenBlock:
        tokens = [np.zeros(0, np.uint16)]
        starts, ends = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
        held = 0
        for unit in units:
            shard, begin = self._units[unit]
            marks = self._marks(shard, begin)
            if not len(marks):
                continue
            last = self._next_mark(shard, min(begin + BIN_UNIT_TOKENS, len(shard)))
            first = max(int(marks[0]), 0)
            part = np.asarray(shard[first:last])
            shift = held - first
            tokens.append(part)
            starts.append(marks + 1 + shift)
            ends.append(np.append(marks[1:], last) + shift)
            held += len(part)
        start = np.concatenate(starts)
        documents = Segments(start, np.concatenate(ends) - start)
        return TokenBlock(np.concatenate(tokens), documents[documents.lengths > 0])

    def _marks(self, shard: NDArray[np.uint16], begin: int) -> NDArray[np.int64]:
        """Where documents begin in the unit: at their delimiters, and at a shard's start in any case."""
        marks = np.flatnonzero(shard[begin : begin + BIN_UNIT_TOKENS] == self.bos) + begin
        if begin == 0 and (not len(marks) or marks[0] != 0):
            marks = np.insert(marks, 0, -1)  # a shard that opens inside a document: its delimiter is missing
        return marks.astype(np.int64)

    def _next_mark(self, shard: NDArray[np.uint16], at: int) -> int:
        while at < len(shard):
            found = np.flatnonzero(shard[at : at + BIN_UNIT_TOKENS] == self.bos)
            if len(found):
                return at + int(found[0])
            at += BIN_UNIT_TOKENS
        return len(shard)


class ConversationSource:
    """Rendered conversations: `items[i]` gives (ids, mask) with a BOS first. For padded packing."""

    def __init__(
        self, items: "Sequence[tuple[Sequence[int], Sequence[int]]]", bos: int, fingerprint: str
    ) -> None:
        self.bos = bos
        self.fingerprint = _digest(fingerprint, str(len(items)))
        self._items = items
        self.units = -(-len(items) // CONVERSATION_UNIT)

    def load(self, units: Sequence[int]) -> TokenBlock:
        ids: list[int] = []
        mask: list[int] = []
        starts: list[int] = []
        lengths: list[int] = []
        for unit in units:
            for i in range(unit * CONVERSATION_UNIT, min((unit + 1) * CONVERSATION_UNIT, len(self._items))):
                item_ids, item_mask = self._items[i]
                if len(item_ids) != len(item_mask) or (item_ids and item_ids[0] != self.bos):
                    raise ValueError(
                        f"conversation {i} must begin with BOS and have one mask entry for each token"
                    )
                if not any(item_mask):
                    continue  # no token is trained (cut to nothing, or only a question)
                starts.append(len(ids) + 1)
                lengths.append(len(item_ids) - 1)
                ids += item_ids
                mask += item_mask
        return TokenBlock(
            np.array(ids, np.int32),
            Segments(np.array(starts, np.int64), np.array(lengths, np.int64)),
            np.array(mask, np.bool_),
        )


def _digest(*parts: str) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()
