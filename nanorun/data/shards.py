"""Read the shards of a dataset, each compared with its checksum before it is used.

A shard is hashed when it is first opened, whole, and again whenever the file has changed since: by its device, inode,
size and times. Among these is the time of the last change (ctime), which no program can set, so a shard that is
exchanged or edited in the middle of a run is noticed even if its length and modification time are kept. What is
read between two looks at the same unchanged file is what was hashed. Nothing is remembered from one process to the
next: each start and each resume hashes again.

Training also hashes all shards in the background from its start (`verify_all`), so that a damaged one is reported
within seconds and not when its turn comes. benchmarks/verify_data.py measures the cost.

Not covered: a disk that returns other bytes for a file that nobody has changed, after the file was hashed; and
someone who exchanges the checksums in dataset.json as well (a run that exists notices that when it resumes).
"""

import hashlib
import os
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from io import BufferedReader
from itertools import chain

from nanorun.data.dataset import MANIFEST, Dataset, Shard, Split
from nanorun.errors import UserError

_Identity = tuple[int, ...]
_hashed: dict[_Identity, str] = {}
_hashing = threading.Lock()


@contextmanager
def open_shard(dataset: Dataset, shard: Shard) -> Iterator[BufferedReader]:
    """The file of a shard, verified. UserError if it is missing, damaged, or changes while it is read."""
    path, remedy = dataset.folder / shard.file, f"add or get the dataset '{dataset.name}' again"
    try:
        with open(path, "rb") as file:
            before = _identity(file)
            if _sha256(file, before) != shard.sha256:
                raise UserError(f"{path} is damaged or was exchanged (its checksum differs): {remedy}.")
            file.seek(0)
            yield file
            if _identity(file) != before:
                raise UserError(f"{path} was changed while it was read: {remedy}.")
    except OSError as error:
        if error.errno is None:  # not of the operating system
            raise
        raise UserError(f"{path} cannot be read ({error.strerror}): {remedy}.") from error


def _identity(file: BufferedReader) -> _Identity:
    now = os.fstat(file.fileno())
    return now.st_dev, now.st_ino, now.st_size, now.st_mtime_ns, now.st_ctime_ns


def _sha256(file: BufferedReader, identity: _Identity) -> str:
    with _hashing:
        if identity not in _hashed:
            _hashed[identity] = hashlib.file_digest(file, "sha256").hexdigest()
        return _hashed[identity]


class SplitShards:
    """The shards of a split, opened by number."""

    def __init__(self, dataset: Dataset, split: Split) -> None:
        self._dataset, self.shards = dataset, dataset.of(split)
        self._fault: UserError | None = None

    def open(self, number: int) -> AbstractContextManager[BufferedReader]:
        if self._fault is not None:
            raise self._fault
        return open_shard(self._dataset, self.shards[number])

    def read_row_group(self, number: int, group: int) -> list[str]:
        """The documents of a row group of a parquet shard, without empty ones."""
        import pyarrow
        import pyarrow.parquet

        expected, is_string = self.shards[number].row_groups, pyarrow.types.is_string
        with self.open(number) as file:
            try:
                with pyarrow.parquet.ParquetFile(file) as parquet:
                    if parquet.num_row_groups != expected:
                        raise ValueError(f"{parquet.num_row_groups} row groups, not {expected}")
                    column = parquet.read_row_group(group, columns=["text"]).column(0)
                    if not (is_string(column.type) or pyarrow.types.is_large_string(column.type)):
                        raise ValueError(f"a column 'text' of type {column.type}")
                    return [text for text in column.to_pylist() if text]
            except (pyarrow.ArrowException, ValueError, IndexError, OSError) as error:
                reason = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
                path, name = self._dataset.folder / self.shards[number].file, self._dataset.name
                raise UserError(
                    f"{path} is not what {MANIFEST} says ({reason}): add or get the dataset '{name}' again."
                ) from error

    def verify_all(self) -> None:
        """Begins to hash every shard in the background. Once it finds a damaged one, no shard can be opened."""
        threading.Thread(target=self._verify_all, name="nanorun-verify", daemon=True).start()

    def _verify_all(self) -> None:
        try:
            for shard in self.shards:
                with open_shard(self._dataset, shard):
                    pass
        except UserError as fault:
            self._fault = fault


def read_texts(dataset: Dataset, split: Split) -> Iterator[str]:
    """The documents of a split of text, one row group in memory at a time."""
    return chain.from_iterable(read_row_groups(dataset, split))


def read_row_groups(dataset: Dataset, split: Split) -> Iterator[list[str]]:
    shards = SplitShards(dataset, split)
    for number, shard in enumerate(shards.shards):
        for group in range(shard.row_groups):
            yield shards.read_row_group(number, group)
