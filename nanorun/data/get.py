"""`data get` and `data ls`: datasets by name. The sample world is generated, the others are downloaded."""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from nanorun import console, home
from nanorun.console import Progress, say
from nanorun.data import hub, sample
from nanorun.data.add import write_dataset
from nanorun.data.bins import read_bin
from nanorun.data.dataset import MANIFEST, Dataset, Shard, Split, dataset_names, open_dataset
from nanorun.errors import UserError
from nanorun.tables import table

SAMPLE_BYTES = 8_000_000
# The tokenizer of the speedruns' token shards: text.store.public_tokenizer("gpt2", ...) has this fingerprint.
GPT2: dict[str, Any] = {
    "name": "gpt2",
    "fingerprint": "c90cbff5bbfe4e24843619f918e2bf7f36a7ee52366ac00c04d299d62b094dc7",
    "bos": 50256,
    "vocab_size": 50265,
}


def parse_size(text: str) -> int:
    """'20MB' -> 20000000. Plain bytes, or kB, MB, GB, in powers of ten."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmg]?)b?", text.strip().lower())
    if match is None:
        raise UserError(f"{text!r} is not a size: write it like 500kB, 20MB or 2GB.")
    return int(float(match[1]) * {"": 1, "k": 10**3, "m": 10**6, "g": 10**9}[match[2]])


def get_dataset(
    name: str, shards: int | None, sample_bytes: int, seed: int, workers: int, replace: bool = False
) -> Dataset:
    if name == "sample":
        return make_sample(sample_bytes, seed, replace=replace)
    if name not in hub.CORPORA:
        raise UserError(f"There is no corpus '{name}': choose one of sample, {', '.join(hub.CORPORA)}, core.")
    return _download(name, shards or hub.DEFAULT_SHARDS, workers)


def make_sample(
    size: int = SAMPLE_BYTES, seed: int = 0, *, name: str = "sample", replace: bool = False
) -> Dataset:
    """The sample world: `size` bytes of training text, and a twentieth of that, phrased differently, to validate."""
    if size < 1000:
        raise UserError(f"The sample world is too small: {size} bytes (at least 1kB).")
    source = f"the sample world, {size} bytes, seed {seed}"
    if (home.data_dir() / name / MANIFEST).is_file() and not replace:
        here = open_dataset(name)
        if here.source != source:
            raise UserError(f"'{name}' exists as {here.source}: --replace writes it again as {source}.")
        say(f"'{name}' is already here")
        return here
    val_size = min(max(size // 20, 1000), 2_000_000)
    bar = Progress("writing the sample world", size + val_size, "B")
    train = _counted(sample.documents("train", size, seed), bar)
    val = _counted(sample.documents("val", val_size, seed), bar)
    return write_dataset(name, train, val, source, bar, replace=replace)


def _counted(documents: Iterator[str], bar: Progress) -> Iterator[str]:
    for document in documents:
        bar.advance(len(document.encode()))
        yield document


def _download(name: str, shards: int, workers: int) -> Dataset:
    home.make_home()
    corpus, folder = hub.CORPORA[name], home.data_dir() / name
    known: dict[str, Shard] = {}
    if (folder / MANIFEST).is_file():
        existing = open_dataset(name)
        if len(existing.of("train")) >= shards:
            say(f"{name} is already here, with {len(existing.of('train'))} training shards")
            return existing
        known = {shard.file: shard for shard in existing.shards}
    describe = _describe_parquet if corpus.kind == "parquet" else _describe_bin
    records = []
    for path in hub.fetch_corpus(corpus, shards, folder, workers):
        shard = known.get(path.name)
        if shard is None or shard.file_bytes != path.stat().st_size:
            shard = describe(path, "val" if path.name == corpus.val else "train")
        records.append(shard)
    source = f"{corpus.repo} at {hub.endpoint()}"
    tokenizer = GPT2 if corpus.kind == "bin" else None
    dataset = Dataset(name, folder, corpus.kind, tuple(records), source, tokenizer)
    dataset.save()
    return dataset


def _describe_parquet(path: Path, split: Split) -> Shard:
    """Reads the whole shard, which also proves that every page of it can be read."""
    import pyarrow.compute
    import pyarrow.parquet

    text_bytes = 0
    with pyarrow.parquet.ParquetFile(path) as file:
        for group in range(file.num_row_groups):
            column = file.read_row_group(group, columns=["text"]).column(0)
            text_bytes += pyarrow.compute.sum(pyarrow.compute.binary_length(column)).as_py() or 0
        rows, groups = file.metadata.num_rows, file.num_row_groups
    return Shard.describe(path, split, rows, text_bytes, row_groups=groups)


def _describe_bin(path: Path, split: Split) -> Shard:
    tokens = read_bin(path)
    documents = int(np.count_nonzero(tokens == GPT2["bos"]))
    return Shard.describe(path, split, documents, None, tokens=len(tokens))


def newest_text(name: str | None = None) -> Dataset:
    """The named dataset, which must hold text, or the newest that does."""
    if name is not None:
        dataset = open_dataset(name)
        if dataset.kind != "parquet":
            raise UserError(f"'{dataset.name}' holds tokens, not text: name the dataset it was made from.")
        return dataset
    newest = open_dataset()
    if newest.kind != "parquet":
        texts = [dataset for dataset in list_datasets()[0] if dataset.kind == "parquet"]
        if not texts:
            raise UserError(
                f"There is no dataset of text, only of tokens: {console.command('data add')} FILE... makes one."
            )
        newest = max(texts, key=lambda d: (d.folder / MANIFEST).stat().st_mtime)
    if len(dataset_names()) > 1:
        say(f"using the newest text, '{newest.name}' (--data chooses another)")
    return newest


def list_datasets(verify: bool = False) -> tuple[list[Dataset], list[str]]:
    """The datasets of this home, and an error message for each broken one."""
    datasets, broken = [], []
    for name in dataset_names():
        try:
            dataset = open_dataset(name)
            dataset.check_files(checksums=verify)
            datasets.append(dataset)
        except UserError as error:
            broken.append(str(error))
    return datasets, broken


def dataset_record(dataset: Dataset) -> dict[str, Any]:
    def part(split: Any) -> dict[str, Any]:
        return {
            "documents": dataset.total("documents", split),
            "bytes": dataset.total("text_bytes", split),
            "tokens": dataset.total("tokens", split),
            "shards": len(dataset.of(split)),
        }

    return {
        "name": dataset.name,
        "folder": str(dataset.folder),
        "kind": dataset.kind,
        "documents": dataset.total("documents"),
        "bytes": dataset.total("text_bytes"),
        "shards": len(dataset.shards),
        "file_bytes": dataset.total("file_bytes"),
        "train": part("train"),
        "val": part("val"),
        "tokenizer": dataset.tokenizer,
        "source": dataset.source,
        "created": dataset.created,
    }


def datasets_table(datasets: Sequence[Dataset]) -> str:
    if not datasets:
        ways = f"{console.command('data add')} FILE..., or {console.command('data get sample')}"
        return f"no data in {home.data_dir()} yet: {ways}"
    rows = []
    for dataset in datasets:
        for split in ("train", "val"):
            known = all(shard.text_bytes is not None for shard in dataset.of(split))
            rows.append(
                [
                    dataset.name if split == "train" else "",
                    split,
                    f"{dataset.total('documents', split):,}",
                    f"{dataset.total('text_bytes', split):,}" if known else "?",
                    f"{dataset.total('tokens', split):,}" if dataset.kind == "bin" else "–",
                    f"{len(dataset.of(split)):,}",
                    console.size(dataset.total("file_bytes", split)),
                ]
            )
    return table(["dataset", "split", "documents", "bytes of text", "tokens", "shards", "on disk"], rows)
