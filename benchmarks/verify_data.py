"""What it costs to verify a dataset's checksums when it is used: seconds at the start, and percent of throughput.

    nanorun data add ../shared/data/pretrain/train-0*.jsonl.xz --val ../shared/data/pretrain/val.jsonl.xz --name shared
    nanorun tok train --vocab 32768 --data shared
    nanorun data tokenize shared --tokenizer shared-32768
    python benchmarks/verify_data.py shared shared-shared-32768 --tokenizer shared-32768

For each dataset, in a table and then in one JSON line:

    hash cold, warm    all shards, one thread, from the disk and from the page cache
    first batch        time from opening the data to the first batch, with verification and without
    tokens/s           of the loader over the first N seconds of a run, in which all hashing happens, with and without
    check              what opening a shard that was verified before adds, a unit

Without verification means that the hashes of all files are known already.
"""

import argparse
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from nanorun.data import shards
from nanorun.data.dataset import Dataset, Split, file_sha256, open_dataset
from nanorun.data.loader import Loader
from nanorun.data.rows import RowOrder
from nanorun.data.sources import open_source
from nanorun.provenance import record, write_and_print_result
from nanorun.tables import table_of
from nanorun.text.store import open_tokenizer
from nanorun.text.tokenizer import Tokenizer

SPLITS: tuple[Split, ...] = ("train", "val")


def hash_all(dataset: Dataset, *, cold: bool) -> float:
    files = [path for split in SPLITS for path in dataset.files(split)]
    for path in files if cold else ():
        with open(path, "rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    start = time.perf_counter()
    for path in files:
        file_sha256(path)
    return time.perf_counter() - start


def know_hashes(dataset: Dataset) -> None:
    """As if every shard had been hashed before."""
    for shard in dataset.shards:
        with open(dataset.folder / shard.file, "rb") as file:
            shards._hashed[shards._identity(file)] = shard.sha256


def load(dataset: Dataset, tokenizer: Tokenizer, *, verify: bool, seconds: float) -> tuple[float, float]:
    """Seconds to the first batch, and tokens per second of the first `seconds`."""
    shards._hashed.clear()
    if not verify:
        know_hashes(dataset)
    start, tokens = time.perf_counter(), 0
    source = open_source(dataset, "train", tokenizer, verify_all=verify)
    with Loader(source, rows=32, context=2048, order=RowOrder()) as loader:
        next(loader)
        first = time.perf_counter() - start
        while time.perf_counter() - start < seconds:
            tokens += next(loader).inputs.numel()
        return first, tokens / (time.perf_counter() - start)


def check_seconds(dataset: Dataset, repeats: int = 2000) -> float:
    """What verification adds to opening a shard whose hash is known."""
    know_hashes(dataset)
    split, path = shards.SplitShards(dataset, "train"), dataset.files("train")[0]
    start = time.perf_counter()
    for _ in range(repeats):
        with split.open(0):
            pass
    between = time.perf_counter()
    for _ in range(repeats):
        with open(path, "rb"):
            pass
    return (2 * between - start - time.perf_counter()) / repeats


def measure(dataset: Dataset, tokenizer: Tokenizer, seconds: float, repeats: int) -> dict[str, Any]:
    runs: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
    for _ in range(repeats):
        for verify in (True, False):  # in turns, so that a change of the machine's load affects both
            runs[verify].append(load(dataset, tokenizer, verify=verify, seconds=seconds))
    (first, rate), (first_without, rate_without) = (
        tuple(map(statistics.median, zip(*runs[verify], strict=True))) for verify in (True, False)
    )
    return {
        "dataset": dataset.name,
        "kind": dataset.kind,
        "shards": len(dataset.shards),
        "file_mb": round(dataset.total("file_bytes") / 1e6, 1),
        "hash_cold_s": round(hash_all(dataset, cold=True), 3),
        "hash_warm_s": round(hash_all(dataset, cold=False), 3),
        "first_batch_s": round(first, 3),
        "first_batch_without_s": round(first_without, 3),
        "tokens_per_s": round(rate),
        "tokens_per_s_without": round(rate_without),
        "percent": round(100 * (1 - rate / rate_without), 2),
        "check_us": round(1e6 * check_seconds(dataset), 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("datasets", nargs="+")
    parser.add_argument("--tokenizer", required=True)
    parser.add_argument("--seconds", type=float, default=20.0, help="of loading, each time")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--save", type=Path)
    args = parser.parse_args()
    tokenizer = open_tokenizer(args.tokenizer)
    rows = [measure(open_dataset(name), tokenizer, args.seconds, args.repeats) for name in args.datasets]
    columns = {
        "dataset": "{dataset}",
        "MB": "{file_mb:,.0f}",
        "hash cold s": "{hash_cold_s:.2f}",
        "warm s": "{hash_warm_s:.2f}",
        "first batch s": "{first_batch_s:.2f}",
        "without s": "{first_batch_without_s:.2f}",
        "tokens/s": "{tokens_per_s:,}",
        "without": "{tokens_per_s_without:,}",
        "percent": "{percent:.2f}",
        "check µs": "{check_us:.0f}",
    }
    print(table_of(rows, columns), end="\n\n")
    write_and_print_result(record("verify", seconds=args.seconds, rows=rows), args.save)


if __name__ == "__main__":
    main()
