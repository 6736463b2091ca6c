"""`data add`: make a dataset from a user's files. It appears complete or not at all.

Validation documents are those of `--val FILE`, or else one in a hundred, spread evenly over the input so that a corpus
sorted by topic is still validated fairly. They are held in memory until the end, at most one shard of them: when it is
full, every second one goes back to training and only half as many are held out from then on. They form the last
shard. The rest is training data, which the loader shuffles.
"""

import unicodedata
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

from nanorun import home
from nanorun.console import Progress
from nanorun.data.dataset import SHARD_BYTES, Dataset, ParquetWriter, Shard, Split
from nanorun.data.readers import collect_files, read_documents
from nanorun.errors import UserError

VAL_EVERY = 100


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


def _write_holding_out(folder: Path, documents: Iterator[str]) -> list[Shard]:
    """Writes training shards, then the held-out documents as the last shard."""
    held, held_bytes, every = [], 0, VAL_EVERY
    last: str | None = None  # kept back, to be the validation document if there is no other

    def add(document: str) -> None:
        train.add(document, len(document.encode()))

    with closing(ParquetWriter(folder, "train")) as train:
        for number, document in enumerate(documents, 1):
            if last is not None:
                add(last)
                last = None
            if number % every:
                last = document
                continue
            held.append(document)
            held_bytes += len(document.encode())
            if held_bytes > SHARD_BYTES and len(held) > 1:
                for surplus in held[::2]:
                    add(surplus)
                held = held[1::2]
                held_bytes, every = sum(len(text.encode()) for text in held), 2 * every
        if last is not None and held:
            add(last)
        elif last is not None:
            if not train.documents:
                head, last = _cut_in_two(last)
                add(head)
            held.append(last)
        if not train.documents and not held:
            raise UserError("The files hold no text: add some.")
        shards = train.finish()
    return shards + _write(folder, iter(held), "val", len(shards))


def _cut_in_two(text: str) -> tuple[str, str]:
    """Splits a single document: about nine tenths for training, the rest for validation."""
    near = len(text) * 9 // 10
    for mark in ("\n\n", "\n", " ", ""):
        at = text.rfind(mark, near // 2, near) if mark else near
        if at > 0 and text[:at].strip() and text[at:].strip():
            return text[: at + len(mark)], text[at + len(mark) :]
    raise UserError(
        "One document of a few characters is too little for training and validation: add more text."
    )
