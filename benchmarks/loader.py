"""Throughput of the data loader, and what each way of packing costs and loses.

    nanorun data add ../shared/data/pretrain/train-0*.jsonl.xz --val ../shared/data/pretrain/val.jsonl.xz --name shared
    nanorun tok train --vocab 32768 --data shared
    nanorun data tokenize shared --tokenizer shared-32768
    python benchmarks/loader.py --text shared --tokens shared-shared-32768 --tokenizer shared-32768

Prints two tables and, last, one JSON line; --save writes it to a file. Throughput is measured on the batches
that training gets: packed, split into inputs and targets, converted to tensors.
"""

import argparse
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
from tables import TABLES

from nanorun.data.dataset import open_dataset
from nanorun.data.loader import Loader
from nanorun.data.packing import Segments, pack
from nanorun.data.rows import UNITS_PER_BLOCK, RowOrder, shuffled
from nanorun.data.sources import Source, open_source
from nanorun.provenance import record, write_and_print_result
from nanorun.text.store import open_tokenizer


def tokens_per_second(source: Source, rows: int, context: int, order: RowOrder, seconds: float) -> float:
    """Measured over whole blocks: a block of text arrives at once, so part of one would distort the result."""
    with Loader(source, rows=rows, context=context, order=order) as loader:
        tokens, block = 0, None
        marks: list[tuple[float, int]] = []  # (time, tokens so far) at each change of block
        while not marks or len(marks) < 3 or marks[-1][0] - marks[0][0] < seconds:
            batch = next(loader)
            tokens += batch.inputs.numel()
            here = (batch.position.epoch, batch.position.block)
            if block is not None and here != block:
                marks.append((time.perf_counter(), tokens))
            block = here
        (start, before), (end, after) = marks[0], marks[-1]
        return (after - before) / (end - start)


def blocks(source: Source, limit: int) -> list[Segments]:
    units = np.arange(source.units)[shuffled(source.units, 0, 0)]
    parts = [units[i : i + UNITS_PER_BLOCK].tolist() for i in range(0, len(units), UNITS_PER_BLOCK)]
    return [source.load(part).documents for part in parts[:limit]]


def packing(pools: list[Segments], context: int, how: Any, reuse: bool) -> dict[str, Any]:
    start = time.perf_counter()
    plans = [pack(pool, context, how, reuse) for pool in pools]
    took = time.perf_counter() - start
    content = sum(int(pool.lengths.sum()) for pool in pools)
    segments = sum(len(plan.segments) for plan in plans)
    documents = sum(len(pool) for pool in pools)
    return {
        "packing": how,
        "context": context,
        "reuse_tails": reuse,
        "lost_percent": 100 * sum(plan.lost for plan in plans) / content,
        "pieces_per_document": segments / documents,
        "plan_s_per_million_tokens": took / content * 1e6,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--text", required=True, help="a dataset of text")
    parser.add_argument("--tokens", required=True, help="the same dataset, tokenized")
    parser.add_argument("--tokenizer", required=True)
    parser.add_argument("--seconds", type=float, default=12.0, help="for each measurement")
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--save", type=Path)
    args = parser.parse_args()

    tokenizer = open_tokenizer(args.tokenizer)
    text = open_source(open_dataset(args.text), "train", tokenizer)
    tokens = open_source(open_dataset(args.tokens), "train", tokenizer)

    speeds = []
    for name, source in (("memory-mapped .bin", tokens), ("tokenizing parquet", text)):
        for context in (256, 2048):
            for how in ("best_fit", "stream"):
                order = RowOrder(packing=how)
                rate = tokens_per_second(source, args.rows * 2048 // context, context, order, args.seconds)
                speeds.append(
                    {"source": name, "packing": how, "context": context, "tokens_per_s": round(rate)}
                )
    pools = blocks(tokens, 40)
    ways = [("best_fit", True), ("best_fit", False), ("stream", True), ("stream", False)]
    packed = [packing(pools, context, how, reuse) for context in (256, 1024, 2048) for how, reuse in ways]
    result = record("loader", rows=args.rows, speed=speeds, packing=packed)
    print(TABLES["loader"](result), end="\n\n")
    write_and_print_result(result, args.save)


if __name__ == "__main__":
    main()
