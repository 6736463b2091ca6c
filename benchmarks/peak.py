"""What lies in a GPU's memory when most of it is taken, by the line that asked for it.

    python benchmarks/peak.py WORK [--depth 12] [--rows 16] [--lines 40]

WORK is a NANORUN_HOME with text and tokenizer (--data, --tokenizer), as for benchmarks/speed.py. A first step
compiles; of the second, launched kernel by kernel, every request for memory is recorded with its stack. What was
there before (weights, gradients, the optimizer's states) is one line, `before`. Compiled code is shown as the compiler
wrote it.
"""

import argparse
import itertools
import json
import linecache
import os
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))


@dataclass(frozen=True)
class Holding:
    """What one line of code holds at the peak."""

    where: str
    blocks: int
    size: int


def at_peak(trace: Iterable[Mapping[str, Any]]) -> tuple[int, list[Holding]]:
    """The most bytes held at once beyond what was there before the trace, and by whom, the largest first.

    A block is held until it can be given to another, which is after the one that has it is done with it on every
    stream ("free_completed"). Blocks from before the trace that are freed within it count as less than nothing.
    """
    events = [event for event in trace if event["action"] in ("alloc", "free_completed")]
    sums = [0, *itertools.accumulate(e["size"] if e["action"] == "alloc" else -e["size"] for e in events)]
    most = max(sums)
    live: dict[int, Mapping[str, Any]] = {}
    for event in events[: sums.index(most)]:
        if event["action"] == "alloc":
            live[event["addr"]] = event
        else:
            live.pop(event["addr"], None)
    return most, grouped(live.values())


def grouped(blocks: Iterable[Mapping[str, Any]]) -> list[Holding]:
    sums: dict[str, list[int]] = defaultdict(list)
    for block in blocks:
        sums[where(block.get("frames", []))].append(block["size"])
    found = [Holding(name, len(sizes), sum(sizes)) for name, sizes in sums.items()]
    return sorted(found, key=lambda holding: -holding.size)


def where(frames: list[Mapping[str, Any]]) -> str:
    """The innermost frame of ours, or of code that the compiler wrote, with its text; else the innermost at all."""
    for frame in frames:  # innermost first
        path = Path(frame["filename"])
        compiled = frame["name"] == "call" and "torch/" not in path.as_posix()
        if compiled or ROOT / "nanorun" in path.parents:
            text = linecache.getline(str(path), frame["line"]).strip()
            place = "compiled" if compiled else path.relative_to(ROOT).as_posix()
            return f"{place}:{frame['line']} {frame['name']}: {text}"
    return f"{frames[0]['filename']}:{frames[0]['line']}" if frames else "unknown"


def measure(args: argparse.Namespace) -> dict[str, Any]:
    import tempfile

    import torch
    from speed import configured

    from nanorun.provenance import record
    from nanorun.runs import Run
    from nanorun.train import base, loop

    changes = {"options": {"device_batch": args.rows, "graphs": False}}
    config, options = configured({**vars(args), "changes": changes})
    with tempfile.TemporaryDirectory() as folder:
        training = base.assemble(config, Run("peak", Path(folder), {}, None), options, None)
        with training.loader:
            loop.train_step(training)
            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            torch.cuda.memory._record_memory_history(max_entries=4_000_000, stacks="python")
            loop.train_step(training)
            torch.cuda.synchronize()
            trace = torch.cuda.memory._snapshot()["device_traces"][torch.cuda.current_device()]
            torch.cuda.memory._record_memory_history(enabled=None)
    most, holdings = at_peak(trace)
    tokens = args.rows * config.model.context
    return record(
        "peak",
        depth=args.depth,
        device_batch=args.rows,
        peak_gib=torch.cuda.max_memory_allocated() / 2**30,
        before_gib=before / 2**30,
        traced_gib=most / 2**30,
        holdings=[
            {
                "where": holding.where,
                "blocks": holding.blocks,
                "gib": holding.size / 2**30,
                "bytes_a_token": round(holding.size / tokens, 1),
            }
            for holding in holdings
        ],
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("work", type=Path, metavar="WORK")
    parser.add_argument("--depth", type=int, default=12)
    parser.add_argument("--rows", type=int, default=16, help="rows of a micro-batch")
    parser.add_argument("--lines", type=int, default=40, help="lines of the table; the file has all")
    parser.add_argument("--data", default="shared-shared-32768")
    parser.add_argument("--tokenizer", default="shared-32768")
    parser.add_argument("--batch-tokens", type=int, default=524_288)
    args = parser.parse_args()
    import torch

    if not torch.cuda.is_available():
        parser.error("There is no GPU here; benchmarks/pretend.py tells the peak without one.")
    os.environ["NANORUN_HOME"] = str(args.work)
    found = measure(args)
    print(f"{'GiB':>7} {'bytes a token':>14} {'blocks':>7}")
    print(f"{found['before_gib']:7.2f} {'':>14} {'':>7} before")
    for row in found["holdings"][: args.lines]:
        print(f"{row['gib']:7.2f} {row['bytes_a_token']:14,.0f} {row['blocks']:7} {row['where'][:150]}")
    print(f"{found['peak_gib']:7.2f} {'':>14} {'':>7} at the peak")
    path = args.work / "results" / f"peak-d{args.depth}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
