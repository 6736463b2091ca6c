"""A dataset: a folder `data/NAME/` of shards and a manifest, `dataset.json`, that describes them.

Text is stored as parquet (column `text`, row groups of about a thousand documents), tokens as `.bin` (`bins.py`).
Validation is the last shard. The manifest records the split, documents, bytes of text, tokens and SHA-256 of every
shard, so that a damaged or replaced shard is noticed and a resumed training run can tell whether its data is
unchanged.
"""

import hashlib
import json
import os
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from nanorun import home
from nanorun.console import command
from nanorun.errors import UserError
from nanorun.json_files import check_shape, read_json, shown

MANIFEST = "dataset.json"
ROW_GROUP_DOCUMENTS = 1000
ROW_GROUP_BYTES = 16 << 20
SHARD_BYTES = 100_000_000  # bytes of text in one parquet shard
_ROW_GROUP_MIN = 32  # bytes of parquet that describe a row group, at least
_MAX_MANIFEST_BYTES = 1 << 26  # some 200,000 shards

Split = Literal["train", "val"]


@dataclass(frozen=True)
class Shard:
    file: str
    split: Split
    documents: int
    text_bytes: int | None  # None for tokens without their text
    file_bytes: int
    sha256: str
    row_groups: int = 0  # parquet
    tokens: int = 0  # bin

    @staticmethod
    def describe(path: Path, split: Split, documents: int, text_bytes: int | None, **counts: int) -> "Shard":
        """The record of a shard file on disk."""
        size, digest = path.stat().st_size, file_sha256(path)
        return Shard(path.name, split, documents, text_bytes, size, digest, **counts)


@dataclass(frozen=True)
class Dataset:
    name: str
    folder: Path
    kind: Literal["parquet", "bin"]
    shards: tuple[Shard, ...]
    source: str = ""
    tokenizer: dict[str, Any] | None = None  # bin: its name, fingerprint, bos and vocab_size
    created: str = field(default_factory=lambda: time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()))

    def files(self, split: Split) -> list[Path]:
        return [self.folder / shard.file for shard in self.of(split)]

    def of(self, split: Split) -> list[Shard]:
        return [shard for shard in self.shards if shard.split == split]

    def total(
        self, what: Literal["documents", "text_bytes", "file_bytes", "tokens"], split: Split | None = None
    ) -> int:
        return sum(getattr(shard, what) or 0 for shard in self.shards if split in (None, shard.split))

    @property
    def fingerprint(self) -> str:
        """Hash of what the order of documents depends on: contents and splits of shards, not names or dates."""
        digest = hashlib.sha256()
        for shard in self.shards:
            digest.update(f"{shard.split} {shard.sha256}\n".encode())
        return digest.hexdigest()

    def save(self, folder: Path | None = None) -> None:
        """Writes the manifest. It is written last, so a folder that has one is complete."""
        record = {"format": "nanorun-dataset", "version": 1, **asdict(self)}
        del record["folder"]
        path = (folder or self.folder) / MANIFEST
        home.replace_file(path, (json.dumps(record, indent=1) + "\n").encode())

    def check_files(self, *, checksums: bool = False) -> None:
        """Checks that every shard exists with the right size and, if asked (`data ls --verify`), the right bytes."""
        for shard in self.shards:
            path = self.folder / shard.file
            if not os.path.isfile(path):
                fault = "is missing"
            elif path.stat().st_size != shard.file_bytes:
                fault = f"has {path.stat().st_size:,} bytes, expected {shard.file_bytes:,}"
            elif checksums and file_sha256(path) != shard.sha256:
                fault = "is damaged (its checksum differs)"
            else:
                continue
            raise UserError(f"{path} {fault}: add or get the dataset '{self.name}' again.")


def file_sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def open_dataset(name: str | None = None) -> Dataset:
    """The dataset of that name (or folder); without a name, the newest."""
    if name is None:
        name = home.newest(home.data_dir(), MANIFEST)
        if name is None:
            raise UserError(
                f"There is no data in {home.data_dir()}: {command('data add')} FILE... takes your own text, "
                f"{command('data get sample')} builds the small sample world."
            )
    for folder in (home.data_dir() / name, Path(name)):
        if os.path.isfile(folder / MANIFEST):  # False also for a name that no file can have
            dataset = _read_manifest(folder)
            dataset.check_files()
            return dataset
    known = ", ".join(dataset_names()) or "none yet"
    raise UserError(
        f"There is no dataset '{name:.100}' in {home.data_dir()} (there: {known}): see {command('data ls')}."
    )


def dataset_names() -> list[str]:
    return sorted(path.parent.name for path in home.data_dir().glob(f"[!.]*/{MANIFEST}"))


def _read_manifest(folder: Path) -> Dataset:
    path, remedy = folder / MANIFEST, "add or get the dataset again"
    record = read_json(path, remedy, {"format": str, "version": int}, max_bytes=_MAX_MANIFEST_BYTES)
    if record["format"] != "nanorun-dataset" or record["version"] != 1:
        raise UserError(
            f"{path} has format {shown(record['format'])} {record['version']}, which this version of nanorun cannot "
            f"read: {remedy}."
        )
    try:
        check_shape(record, _MANIFEST_SHAPE)
        names = [f.name for f in fields(Shard)]
        shards = tuple(
            Shard(**{name: entry[name] for name in names if name in entry}) for entry in record["shards"]
        )
        _check_manifest(record, shards)
    except ValueError as error:
        raise UserError(f"{path} is damaged ({error}): {remedy}.") from error
    if any("/" in shard.file or "\\" in shard.file or shard.file.startswith(".") for shard in shards):
        raise UserError(f"{path} names files outside its folder: do not trust this dataset.")
    named = {key: record[key] for key in ("kind", "source", "tokenizer", "created")}
    return Dataset(folder.name, folder, shards=shards, **named)


_TOKENIZER_SHAPE = {"name": str, "fingerprint": (str, None), "bos": int, "vocab_size": int}
_SHARD_SHAPE = {
    **dict.fromkeys(("file", "split", "sha256"), str),
    **dict.fromkeys(("documents", "file_bytes", "row_groups?", "tokens?"), int),
    "text_bytes": (int, None),
}
_MANIFEST_SHAPE = {
    **dict.fromkeys(("kind", "source", "created"), str),
    "shards": [_SHARD_SHAPE],
    "tokenizer": (_TOKENIZER_SHAPE, None),
}


def _check_manifest(record: Mapping[str, Any], shards: Sequence[Shard]) -> None:
    """ValueError for values that no dataset has."""
    made_by = record["tokenizer"]
    if record["kind"] not in ("parquet", "bin") or any(
        shard.split not in ("train", "val") for shard in shards
    ):
        raise ValueError("its kind is not parquet or bin, or the split of a shard not train or val")
    if record["kind"] == "bin" and (
        made_by is None or not 0 <= made_by["bos"] < made_by["vocab_size"] <= 2**16
    ):
        raise ValueError("the tokenizer of its tokens is missing, or its sizes are out of range")
    for shard in shards:
        if not 0 < len(shard.file.encode("utf-8", "surrogatepass")) < 256 or "\0" in shard.file:
            raise ValueError(f"{shown(shard.file)} is no name of a file")
        if not re.fullmatch("[0-9a-f]{64}", shard.sha256):
            raise ValueError(f"the SHA-256 of {shown(shard.file)} is {shown(shard.sha256)}")
        counts = (shard.documents, shard.text_bytes or 0, shard.file_bytes, shard.row_groups, shard.tokens)
        if min(counts) < 0 or _ROW_GROUP_MIN * shard.row_groups > shard.file_bytes:
            raise ValueError(f"the counts of {shard.file} are out of range")


class ShardWriter:
    """Writes documents into shards `shard-00000.SUFFIX`, ... of a folder. A subclass knows the format."""

    suffix: str
    counted: Literal["row_groups", "tokens"]  # the field of Shard that `_count` goes to

    def __init__(self, folder: Path, split: Split, first: int = 0) -> None:
        self.folder, self.split, self.next_index = folder, split, first
        self.shards: list[Shard] = []
        self._file: Any = None
        self._documents = self._text_bytes = self._count = 0

    def finish(self) -> list[Shard]:
        if self._file is not None:
            self._finish_shard()
        return self.shards

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _path(self) -> Path:
        return self.folder / f"shard-{self.next_index:05d}.{self.suffix}"

    def _finish_shard(self) -> None:
        self.close()
        count = {self.counted: self._count}
        self.shards.append(
            Shard.describe(self._path(), self.split, self._documents, self._text_bytes, **count)
        )
        self.next_index += 1
        self._documents = self._text_bytes = self._count = 0


class ParquetWriter(ShardWriter):
    suffix, counted = "parquet", "row_groups"

    def __init__(self, folder: Path, split: Split, first: int = 0) -> None:
        super().__init__(folder, split, first)
        self._rows: list[str] = []
        self._row_bytes = 0

    def add(self, text: str, text_bytes: int) -> None:
        self._rows.append(text)
        self._row_bytes += text_bytes
        if len(self._rows) >= ROW_GROUP_DOCUMENTS or self._row_bytes >= ROW_GROUP_BYTES:
            self._flush()
            if self._text_bytes >= SHARD_BYTES:
                self._finish_shard()

    @property
    def documents(self) -> int:
        return sum(shard.documents for shard in self.shards) + self._documents + len(self._rows)

    def finish(self) -> list[Shard]:
        if self._rows:
            self._flush()
        return super().finish()

    def _flush(self) -> None:
        import pyarrow
        import pyarrow.parquet

        schema = pyarrow.schema([("text", pyarrow.large_string())])
        if self._file is None:
            self._file = pyarrow.parquet.ParquetWriter(self._path(), schema, compression="zstd")
        table = pyarrow.table([pyarrow.array(self._rows, pyarrow.large_string())], schema=schema)
        self._file.write_table(table, row_group_size=len(self._rows))
        self._documents += len(self._rows)
        self._text_bytes += self._row_bytes
        self._count += 1
        self._rows, self._row_bytes = [], 0
