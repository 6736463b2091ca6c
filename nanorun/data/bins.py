"""Token shards: `.bin` files in the format of llm.c and of the NanoGPT speedrun.

    256 little-endian int32: 20240520, 1, the number of tokens, zeros
    the tokens, uint16, each document after its delimiter (our BOS, GPT-2's <|endoftext|>)

A unit of them is read at a time, so a corpus can be larger than memory.
"""

from collections.abc import Sequence
from contextlib import closing
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nanorun import home
from nanorun.console import Progress
from nanorun.data.dataset import Dataset, Shard, ShardWriter, Split
from nanorun.data.shards import read_row_groups
from nanorun.errors import UserError
from nanorun.hardware import usable_cores
from nanorun.text.tokenizer import Tokenizer

MAGIC, VERSION, HEADER_BYTES = 20240520, 1, 1024
MAX_TOKENS = 1 << 16  # different ones, in 16 bits
SHARD_TOKENS = 100_000_000


def check_bin(path: Path) -> int:
    """The number of tokens in a shard; ValueError unless it has the header and exactly its tokens."""
    size = path.stat().st_size
    with open(path, "rb") as file:
        header = np.frombuffer(file.read(HEADER_BYTES).ljust(HEADER_BYTES, b"\0"), dtype="<i4")
    if header[0] != MAGIC:
        raise ValueError(f"it is not a token shard (its first number is not {MAGIC})")
    if header[1] != VERSION:
        raise ValueError(f"it is a token shard of version {header[1]}, not {VERSION}")
    expected = HEADER_BYTES + 2 * int(header[2])
    if size != expected or header[2] < 0:
        raise ValueError(f"it announces {header[2]} tokens, so {expected} bytes, but has {size}")
    return int(header[2])


def bin_tokens(path: Path) -> int:
    """The number of tokens in a shard. UserError for a file that is not a token shard."""
    try:
        return check_bin(path)
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}): download or make it again.") from error
    except ValueError as error:
        raise UserError(f"{path} cannot be read, {error}: download or make it again.") from error


def read_bin(path: Path) -> NDArray[np.uint16]:
    """The tokens of a shard as a read-only memory map. UserError for a file that is not a token shard."""
    count = bin_tokens(path)
    return np.memmap(path, dtype="<u2", mode="r", offset=HEADER_BYTES, shape=(count,))


class BinWriter(ShardWriter):
    """A document never spans two shards."""

    suffix, counted = "bin", "tokens"

    def __init__(self, folder: Path, split: Split, bos: int, first: int = 0) -> None:
        super().__init__(folder, split, first)
        if not 0 <= bos < MAX_TOKENS:
            raise UserError(
                f"The delimiter {bos} does not fit the 16-bit tokens of a token shard: use a smaller vocabulary."
            )
        self.bos = bos

    def add(self, tokens: NDArray[Any], offsets: NDArray[np.int64], text_bytes: Sequence[int]) -> None:
        """Adds documents: a flat array without delimiters, and the offsets at which each begins and ends."""
        for i, (begin, end) in enumerate(pairwise(offsets.tolist())):
            if self._file is not None and self._count + 1 + end - begin > SHARD_TOKENS:
                self._finish_shard()
            if self._file is None:
                self._file = open(self._path(), "wb")  # noqa: SIM115 (closed by _finish_shard or close)
                self._file.write(bytes(HEADER_BYTES))
            self._file.write(np.uint16(self.bos).tobytes())
            self._file.write(tokens[begin:end].astype("<u2", copy=False).tobytes())
            self._documents += 1
            self._count += 1 + int(end - begin)
            self._text_bytes += text_bytes[i]

    def _finish_shard(self) -> None:
        header = np.zeros(256, dtype="<i4")
        header[:3] = MAGIC, VERSION, self._count
        self._file.seek(0)
        self._file.write(header.tobytes())
        super()._finish_shard()


def tokenize_dataset(
    dataset: Dataset,
    tokenizer: Tokenizer,
    *,
    name: str | None = None,
    threads: int = 0,
    replace: bool = False,
) -> Dataset:
    """Writes the documents of a dataset as token shards, in the same order and splits."""
    if dataset.kind != "parquet":
        raise UserError(f"'{dataset.name}' already holds tokens: name a dataset of text.")
    if tokenizer.vocab_size > MAX_TOKENS:
        raise UserError(
            f"The vocabulary of '{tokenizer.name}' is too large for 16-bit token shards: {tokenizer.vocab_size:,} "
            "tokens (at most 65,536)."
        )
    name = home.check_name(name or f"{dataset.name}-{tokenizer.name}"[:64], "dataset")
    threads = threads or usable_cores()
    shards: list[Shard] = []
    with (
        home.new_folder(home.data_dir() / name, replace=replace) as folder,
        Progress(f"tokenizing {dataset.name}", dataset.total("text_bytes") or None, "B") as bar,
    ):
        splits: tuple[Split, ...] = ("train", "val")
        for split in splits:
            with closing(BinWriter(folder, split, tokenizer.bos, first=len(shards))) as writer:
                for texts in read_row_groups(dataset, split):
                    sizes = [len(text.encode()) for text in texts]
                    tokens, offsets = tokenizer.encode_documents(texts, threads)
                    writer.add(tokens, offsets, sizes)
                    bar.advance(sum(sizes))
                shards += writer.finish()
        made = Dataset(
            name,
            home.data_dir() / name,
            "bin",
            tuple(shards),
            source=f"dataset {dataset.name}",
            tokenizer={key: getattr(tokenizer, key) for key in ("name", "fingerprint", "bos", "vocab_size")},
        )
        made.save(folder)
    return made
