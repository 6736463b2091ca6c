"""What occupies GPU memory at the peak of a training step, by the line of code that allocated it.

    python benchmarks/peak.py WORK [--depth 12] [--rows 16] [--lines 40]

WORK is a NANORUN_HOME with text and tokenizer (--data, --tokenizer), as for benchmarks/speed.py. A first step
compiles. In the second, which launches each kernel by itself, every allocation is recorded with its stack. Memory
allocated earlier (weights, gradients, optimizer states) is one line, `before`. Compiled code is shown as Inductor
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
class Allocations:
    """The memory that one line of code holds at the peak."""

    line: str
    blocks: int
    size: int


def at_peak(trace: Iterable[Mapping[str, Any]]) -> tuple[int, list[Allocations]]:
    """The most bytes allocated at once since the trace began, and by which lines, the largest first.

    A block counts until the allocator can reuse it, which is after its owner is done with it on every stream
    ("free_completed"). A block from before the trace that is freed within it counts as negative.
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
    return most, group_by_line(live.values())


def group_by_line(blocks: Iterable[Mapping[str, Any]]) -> list[Allocations]:
    sizes_by_line: dict[str, list[int]] = defaultdict(list)
    for block in blocks:
        sizes_by_line[allocating_line(block.get("frames", []))].append(block["size"])
    found = [Allocations(line, len(sizes), sum(sizes)) for line, sizes in sizes_by_line.items()]
    return sorted(found, key=lambda allocations: -allocations.size)


def allocating_line(frames: list[Mapping[str, Any]]) -> str:
    """The innermost frame in nanorun or in compiled code, with its source line; else the innermost of all."""
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
        training = base.assemble(config, Run("peak", Path(folder)), options, None)
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
    most, allocations = at_peak(trace)
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
                "where": each.line,
                "blocks": each.blocks,
                "gib": each.size / 2**30,
                "bytes_a_token": round(each.size / tokens, 1),
            }
            for each in allocations
        ],
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("work", type=Path, metavar="WORK")
    parser.add_argument("--depth", type=int, default=12)
    parser.add_argument("--rows", type=int, default=16, help="rows of a micro-batch")
    parser.add_argument("--lines", type=int, default=40, help="lines of the table (the file has all)")
    parser.add_argument("--data", default="shared-shared-32768")
    parser.add_argument("--tokenizer", default="shared-32768")
    parser.add_argument("--batch-tokens", type=int, default=524_288)
    args = parser.parse_args()
    import torch

    if not torch.cuda.is_available():
        parser.error("No GPU found. Without one, benchmarks/fake_gpu.py measures the size of the peak.")
    os.environ["NANORUN_HOME"] = str(args.work)
    found = measure(args)
    print(f"{'GiB':>7} {'bytes/token':>14} {'blocks':>7}")
    print(f"{found['before_gib']:7.2f} {'':>14} {'':>7} before")
    for row in found["holdings"][: args.lines]:
        print(f"{row['gib']:7.2f} {row['bytes_a_token']:14,.0f} {row['blocks']:7} {row['where'][:150]}")
    print(f"{found['peak_gib']:7.2f} {'':>14} {'':>7} at the peak")
    path = args.work / "results" / f"peak-d{args.depth}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
