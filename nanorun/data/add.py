"""`data add`: make a dataset from a user's files. It appears complete or not at all.

Validation text is that of `--val FILE`, or else a share of the input: 10% of up to 1 MB of text, about 5% of 2.5 MB,
1% from 20 MB on (at most one shard), because one document in a hundred of a small corpus gives a figure that is mostly
noise. It is spread evenly over the input, so that a corpus sorted by topic is still validated fairly:

    short documents   some of them, evenly spaced, are held out whole
    long documents    where short ones are too few or too little of the text, some of the long ones, evenly spaced,
                      lose their ends, so that validation text comes from about eight documents or more

The input is read once. Some documents, the pool, are held in memory until its size is known: at first all of them, and
when the pool is full, every second one goes to training and only half as many enter it from then on. Validation is the
last shard. The rest is training data, which the loader shuffles.
"""

import math
import unicodedata
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

from nanorun import home
from nanorun.console import Progress
from nanorun.data.dataset import SHARD_BYTES, Dataset, ParquetWriter, Shard, Split
from nanorun.data.readers import collect_files, read_documents
from nanorun.errors import UserError

POOL_BYTES = 4_000_000  # at least; more where validation needs more
MAX_SHARE, MIN_SHARE = 0.1, 0.01  # of the text that is held out, up to SMALL and from LARGE bytes on
SMALL, LARGE = 1_000_000, 20_000_000
PIECES = 8  # validation text should come from so many documents
HANDFUL = 5  # held out at least, of 30 documents or more
MIN_PIECE = 2_000  # bytes that are cut off a document, at least


def default_name(paths: list[Path]) -> str:
    """'notes' for notes.txt.gz, the folder's name for a folder or for several files of one folder."""
    first = paths[0].resolve()
    if len(paths) > 1:
        first = first.parent
    stem = first.name.split(".")[0] if first.is_file() else first.name
    plain = unicodedata.normalize("NFKD", stem.replace("ß", "ss")).encode("ascii", "ignore").decode()
    name = "".join(c if c.isalnum() or c in "._-" else "-" for c in plain)
    return name.strip("._-")[:64] or "text"


def add_files(
    paths: list[Path],
    *,
    name: str | None = None,
    val: Path | None = None,
    column: str = "text",
    separator: str | None = None,
    replace: bool = False,
) -> Dataset:
    files = collect_files(paths)
    val_files = collect_files([val]) if val is not None else []
    held_out = {path.resolve() for path in val_files}
    files = [path for path in files if path.resolve() not in held_out]
    if not files:
        raise UserError(f"There is nothing to train on: {val} is the only file named.")
    name = home.check_name(name or default_name(paths), "dataset")

    total = sum(path.stat().st_size for path in [*files, *val_files])
    source = ", ".join(str(path) for path in paths) + (f"; validation {val}" if val else "")
    bar = Progress(f"adding {name}", total, "B")
    train = _documents(files, {path.resolve() for path in paths}, column, separator, bar)
    validation = _documents(val_files, held_out, column, separator, bar) if val_files else None
    return write_dataset(name, train, validation, source, bar, replace=replace)


def write_dataset(
    name: str,
    train: Iterator[str],
    val: Iterator[str] | None,
    source: str,
    bar: Progress,
    *,
    replace: bool = False,
) -> Dataset:
    """A dataset from documents; without `val`, some of the training documents are held out."""
    with home.new_folder(home.data_dir() / home.check_name(name, "dataset"), replace=replace) as folder, bar:
        if val is None:
            shards = _write_holding_out(folder, train)
        else:
            shards = _write(folder, train)
            shards += _write(folder, val, "val", len(shards))
        dataset = Dataset(name, home.data_dir() / name, "parquet", tuple(shards), source)
        dataset.save(folder)
    return dataset


def _documents(
    files: list[Path], named: set[Path], column: str, separator: str | None, bar: Progress
) -> Iterator[str]:
    for path in files:
        found = False
        for document in read_documents(path, column=column, separator=separator, advance=bar.advance):
            found = True
            yield document
        if not found and path.resolve() in named:
            raise UserError(f"{path} holds no text: remove it from the command.")
        if not found:
            bar.note(f"{path} holds no text and was skipped")


def _write(folder: Path, documents: Iterator[str], split: Split = "train", first: int = 0) -> list[Shard]:
    with closing(ParquetWriter(folder, split, first)) as writer:
        for document in documents:
            writer.add(document, len(document.encode()))
        return writer.finish()


def validation_bytes(total: int) -> float:
    """How much of `total` bytes of text to hold out."""
    exponent = math.log(MIN_SHARE / MAX_SHARE) / math.log(LARGE / SMALL)
    share: float = MAX_SHARE * max(total / SMALL, 1) ** exponent
    return min(max(share, MIN_SHARE) * total, SHARD_BYTES)


def _write_holding_out(folder: Path, documents: Iterator[str]) -> list[Shard]:
    """Writes training shards, then the validation text as the last shard."""
    pool: list[str] = []
    pool_bytes, total_bytes, every = 0, 0, 1
    with closing(ParquetWriter(folder, "train")) as train:
        for number, document in enumerate(documents, 1):
            size = len(document.encode())
            total_bytes += size
            if number % every:
                train.add(document, size)
                continue
            pool.append(document)
            pool_bytes += size
            limit = min(max(2 * validation_bytes(total_bytes), POOL_BYTES), SHARD_BYTES)
            if pool_bytes > limit and len(pool) > (2 * PIECES if pool_bytes <= SHARD_BYTES else 1):
                for surplus in pool[::2]:
                    train.add(surplus, len(surplus.encode()))
                pool, every = pool[1::2], 2 * every
                pool_bytes = sum(len(text.encode()) for text in pool)
        if not pool:
            raise UserError("The files hold no text: add some.")
        held_out = []
        for head, tail in _hold_out(pool, validation_bytes(total_bytes)):
            if head:
                train.add(head, len(head.encode()))
            if tail:
                held_out.append(tail)
        if not held_out or not train.documents:
            raise UserError(
                "One document of a few characters is too little for training and validation: add more text."
            )
        shards = train.finish()
    return shards + _write(folder, iter(held_out), "val", len(shards))


def _hold_out(pool: list[str], target: float) -> Iterator[tuple[str, str]]:
    """What of each document is for training, and what for validation: about `target` bytes in all."""
    sizes = [len(text.encode()) for text in pool]
    share, piece = target / sum(sizes), max(target / PIECES, MIN_PIECE)
    long = [index for index, size in enumerate(sizes) if size > 2 * piece or len(pool) == 1]
    short = [index for index, size in enumerate(sizes) if size <= 2 * piece and len(pool) > 1]
    goal = share * sum(sizes[index] for index in long)
    if share * len(short) >= PIECES and goal < target / 4:
        goal = 0  # whole documents are enough
    cut = _evenly(long, max(round(goal / piece), 0 if short else 1), sizes)
    at_least = max(min(len(pool) // 6, HANDFUL), 1)
    whole = set(_evenly(short, max(round(share * len(short)), at_least - len(cut)), sizes))
    tail_share = min(goal / max(sum(sizes[index] for index in cut), 1), 0.5)
    for index, text in enumerate(pool):
        if index in cut:
            yield _cut_in_two(text, tail_share)
        else:
            yield ("", text) if index in whole else (text, "")


def _evenly(items: list[int], count: int, sizes: list[int]) -> list[int]:
    """That many of the items, evenly spaced, beginning where their sizes add up to a typical sum."""
    count = min(count, len(items))
    typical = sum(sizes[index] for index in items) * count / max(len(items), 1)
    choices = [
        [items[(16 * i + shift) * len(items) // (16 * count)] for i in range(count)]
        for shift in (8, 6, 10, 4, 12, 2, 14)  # sixteenths of the space between two
    ]
    return min(choices, key=lambda chosen: abs(sum(sizes[index] for index in chosen) - typical))


def _cut_in_two(text: str, share: float) -> tuple[str, str]:
    """Splits about `share` of the text off its end, at a paragraph, a line or a word where one ends nearby."""
    near = round(len(text) * (1 - share))
    earliest = near - (len(text) - near) // 2
    for mark in ("\n\n", "\n", " ", ""):
        at = text.rfind(mark, earliest, near) if mark else near
        if at > 0 and text[:at].strip() and text[at:].strip():
            return text[: at + len(mark)], text[at + len(mark) :]
    return text, ""
