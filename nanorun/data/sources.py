"""Sources of token blocks: text that is tokenized when it is loaded, token shards, or conversations.

A source is a numbered set of small *units* (a row group of a parquet shard, a range of a token shard, a few
hundred conversations) that can be loaded in any order. `rows.py` shuffles the units and loads a few of them at
a time as one block.
"""

import hashlib
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from nanorun.console import command
from nanorun.data.bins import HEADER_BYTES, MAX_TOKENS, bin_tokens
from nanorun.data.dataset import Dataset, Split
from nanorun.data.packing import Segments
from nanorun.data.shards import SplitShards
from nanorun.errors import UserError
from nanorun.hardware import usable_cores
from nanorun.text.tokenizer import Tokenizer

BIN_UNIT_TOKENS = 1 << 20
REST_TOKENS = 1 << 14  # read at a time to find the end of a document that a unit ends in
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


def open_source(
    dataset: Dataset,
    split: Split,
    tokenizer: Tokenizer | None,
    threads: int = 0,
    *,
    verify_all: bool = False,
) -> "Source":
    """The source for a dataset. A dataset of tokens must have been made with `tokenizer`.

    A shard is verified before its first use; with `verify_all`, also in the background from now on.
    """
    shards = SplitShards(dataset, split)
    if not shards.shards:
        raise UserError(f"The dataset '{dataset.name}' has no {split} shard.")
    if dataset.kind == "bin":
        made_by = dataset.tokenizer or {}
        if tokenizer is not None and made_by.get("fingerprint") not in (None, tokenizer.fingerprint):
            raise UserError(
                f"The tokens of '{dataset.name}' were made by tokenizer '{made_by.get('name')}', not by "
                f"'{tokenizer.name}': use that tokenizer or tokenize the text again."
            )
        vocab_size = tokenizer.vocab_size if tokenizer is not None else made_by.get("vocab_size", MAX_TOKENS)
        files, bos = dataset.files(split), int(made_by["bos"])
        source: Source = BinSource(files, bos, dataset.fingerprint, vocab_size=vocab_size, shards=shards)
    elif tokenizer is None:
        raise UserError(f"'{dataset.name}' is text and needs a tokenizer: {command('tok train')} makes one.")
    else:
        source = TextSource(dataset, split, tokenizer, threads, shards)
    if verify_all:
        shards.verify_all()
    return source


class TextSource:
    """Parquet text, tokenized on `threads` threads when a block is loaded."""

    def __init__(
        self, dataset: Dataset, split: Split, tokenizer: Tokenizer, threads: int, shards: SplitShards
    ) -> None:
        self.bos = tokenizer.bos
        self.fingerprint = _digest(dataset.fingerprint, split, tokenizer.fingerprint)
        self._tokenizer, self._shards = tokenizer, shards
        self._threads = threads or min(usable_cores(), 16)
        self._units = [
            (number, group) for number, shard in enumerate(shards.shards) for group in range(shard.row_groups)
        ]
        self.units = len(self._units)

    def load(self, units: Sequence[int]) -> TokenBlock:
        texts: list[str] = []
        for unit in units:
            texts += self._shards.read_row_group(*self._units[unit])
        tokens, offsets = self._tokenizer.encode_documents(texts, self._threads)
        return TokenBlock(tokens, Segments(offsets[:-1], np.diff(offsets)))


class BinSource:
    """Token shards. A unit is a range of a shard: the documents that begin in it."""

    def __init__(
        self,
        files: Sequence[Path],
        bos: int,
        fingerprint: str = "",
        *,
        vocab_size: int = MAX_TOKENS,
        shards: SplitShards | None = None,  # None: the files are not verified
    ) -> None:
        self.bos = bos
        self._files, self._vocab_size, self._shards = files, vocab_size, shards
        self._lengths = [bin_tokens(path) for path in files]
        self._units = [
            (number, begin)
            for number, length in enumerate(self._lengths)
            for begin in range(0, length, BIN_UNIT_TOKENS)
        ]
        self.fingerprint = _digest(
            fingerprint,
            str(bos),
            *(f"{path.name} {length}" for path, length in zip(files, self._lengths, strict=True)),
        )
        self.units = len(self._units)

    def load(self, units: Sequence[int]) -> TokenBlock:
        tokens = [np.zeros(0, np.uint16)]
        starts, ends = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
        held = 0
        for unit in units:
            part, marks = self._read_unit(*self._units[unit])
            if not len(marks):
                continue
            tokens.append(part)
            starts.append(marks + 1 + held)
            ends.append(np.append(marks[1:], len(part)) + held)
            held += len(part)
        start = np.concatenate(starts)
        documents = Segments(start, np.concatenate(ends) - start)
        return TokenBlock(np.concatenate(tokens), documents[documents.lengths > 0])

    def _read_unit(self, number: int, begin: int) -> tuple[NDArray[np.uint16], NDArray[np.int64]]:
        """The documents that begin in a unit, to the end of the last, and where their delimiters are.

        A shard's first document begins at its start in any case: if its delimiter is missing, at -1.
        """
        with self._open(number) as file:
            tokens = self._read(file, number, begin, BIN_UNIT_TOKENS)
            marks = np.flatnonzero(tokens == self.bos)
            if begin == 0 and (not len(marks) or marks[0] != 0):
                marks = np.insert(marks, 0, -1)
            if not len(marks):
                return tokens, marks
            parts, end = [tokens], begin + len(tokens)
            while end < self._lengths[number]:  # the rest of the last document
                more = self._read(file, number, end, REST_TOKENS)
                found = np.flatnonzero(more == self.bos)
                parts.append(more[: found[0]] if len(found) else more)
                if len(found):
                    break
                end += len(more)
        first = max(int(marks[0]), 0)
        return np.concatenate(parts)[first:], marks - first

    def _open(self, number: int) -> AbstractContextManager[BufferedReader]:
        return open(self._files[number], "rb") if self._shards is None else self._shards.open(number)

    def _read(self, file: BufferedReader, number: int, begin: int, count: int) -> NDArray[np.uint16]:
        size = 2 * min(count, self._lengths[number] - begin)
        file.seek(HEADER_BYTES + 2 * begin)
        content = file.read(size)
        if len(content) < size:
            raise UserError(f"{self._files[number]} was cut short while it was read: restore it.")
        tokens = np.frombuffer(content, "<u2")
        if (largest := int(tokens.max())) >= self._vocab_size:
            raise UserError(
                f"{self._files[number]} holds the token {largest}, but the vocabulary has {self._vocab_size:,} "
                "tokens: tokenize the text again, or get it again."
            )
        return tokens


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
