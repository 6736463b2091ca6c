"""How fast the loader is, and what packing costs and saves.

    nanorun data add ../shared/data/pretrain/train-0*.jsonl.xz --val ../shared/data/pretrain/val.jsonl.xz --name shared
    nanorun tok train --vocab 32768 --data shared
    nanorun data tokenize shared --tokenizer shared-32768
    python bench/loader.py --text shared --tokens shared-shared-32768 --tokenizer shared-32768

Prints three tables and, last, one JSON line; --save keeps that line's content in a file. Speed is measured
on the batches that training gets: packed, cut into inputs and targets, converted to tensors.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np  # noqa: E402
import torch  # noqa: E402

from nanorun.data.dataset import open_dataset  # noqa: E402
from nanorun.data.loader import Loader  # noqa: E402
from nanorun.data.packing import Pieces, plan_rows  # noqa: E402
from nanorun.data.rows import UNITS_PER_BLOCK, RowOrder, shuffled  # noqa: E402
from nanorun.data.sources import Source, open_source  # noqa: E402
from nanorun.tables import table  # noqa: E402
from nanorun.text.store import open_tokenizer  # noqa: E402


def tokens_per_second(source: Source, rows: int, context: int, order: RowOrder, seconds: float) -> float:
    with Loader(source, rows=rows, context=context, order=order) as loader:
        next(loader)
        count, start = 0, time.perf_counter()
        while (took := time.perf_counter() - start) < seconds:
            count += next(loader).inputs.numel()
        return count / took


def blocks(source: Source, limit: int) -> list[Pieces]:
    units = np.arange(source.units)[shuffled(source.units, 0, 0)]
    parts = [units[i : i + UNITS_PER_BLOCK].tolist() for i in range(0, len(units), UNITS_PER_BLOCK)]
    return [source.load(part).pieces for part in parts[:limit]]


def packing(pools: list[Pieces], context: int, how: Any, reuse: bool) -> dict[str, Any]:
    start = time.perf_counter()
    plans = [plan_rows(pool, context, how, reuse) for pool in pools]
    took = time.perf_counter() - start
    content = sum(int(pool.lengths.sum()) for pool in pools)
    pieces = sum(len(plan.segments) for plan in plans)
    documents = sum(len(pool) for pool in pools)
    return {
        "packing": how,
        "context": context,
        "reuse_tails": reuse,
        "lost_percent": 100 * sum(plan.lost for plan in plans) / content,
        "pieces_per_document": pieces / documents,
        "plan_s_per_million_tokens": took / content * 1e6,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", required=True, help="a dataset of text")
    parser.add_argument("--tokens", required=True, help="the same dataset, tokenized")
    parser.add_argument("--tokenizer", required=True)
    parser.add_argument("--seconds", type=float, default=8.0, help="for each speed")
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
                speeds.append({"source": name, "packing": how, "context": context, "tokens_per_s": round(rate)})
    print(f"\nloader, {os.cpu_count()} cores, batches of {args.rows * 2048:,} tokens\n")
    print(
        table(
            ["source", "packing", "context", "M tokens/s"],
            [[s["source"], s["packing"], s["context"], f"{s['tokens_per_s'] / 1e6:.2f}"] for s in speeds],
        )
    )

    pools = blocks(tokens, 40)
    ways = [("best_fit", True), ("best_fit", False), ("stream", True), ("stream", False)]
    packed = [packing(pools, context, how, reuse) for context in (256, 1024, 2048) for how, reuse in ways]
    print("\npacking: what is lost by cutting, and what planning costs\n")
    print(
        table(
            ["packing", "context", "tails", "tokens lost", "pieces/document", "ms to plan 1 M tokens"],
            [
                [
                    p["packing"],
                    p["context"],
                    "come back" if p["reuse_tails"] else "dropped",
                    f"{p['lost_percent']:.2f}%",
                    f"{p['pieces_per_document']:.2f}",
                    f"{1e3 * p['plan_s_per_million_tokens']:.2f}",
                ]
                for p in packed
            ],
        )
    )
    result = {
        "what": "loader",
        "date": time.strftime("%Y-%m-%d"),
        "cores": os.cpu_count(),
        "torch": torch.__version__,
        "commit": subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip(),
        "command": "python " + " ".join(sys.argv),
        "speed": speeds,
        "packing": packed,
    }
    if args.save:
        args.save.write_text(json.dumps(result, indent=1) + "\n")
    print()
    print(json.dumps(result))


if __name__ == "__main__":
    main()
