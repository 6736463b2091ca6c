"""Does the fast path reach the same loss? The same run with all optimizations and in plain bf16, for several seeds.

    python benchmarks/same_loss.py WORK [--tokens 60000000] [--seeds 3] [--together 3] [--minutes 16] [--depth 12]
                                   [--bf16-of benchmarks/results/same-loss-d12-h200.json]

WORK is a NANORUN_HOME with text and tokenizer. Each run is a process, `nanorun train base`; finished runs are
skipped, so the script resumes after an interruption. Several share the GPU, since none is timed. Results
are written as they arrive, to WORK/results/same-loss-dDEPTH-GPU.json and .png (both curves, mean and range over
seeds); the last line printed is the JSON. A seed sets the weights and the order of the data, so the two variants are
compared seed by seed: the result is the mean difference in final validation loss, with its standard error.
After a change of the fast path alone, `--bf16-of` takes the plain runs from an earlier result on the same data.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

VARIANTS: dict[str, dict[str, Any]] = {
    "bf16": {
        "fp8": "none", "fused_rope": False, "fused_loss": False, "inplace_embedding_grads": False,
    },
    "fast": {"fp8": "all"},
}  # fmt: skip
EVALUATIONS = 6
EVAL_TOKENS = 1_000_000


def configuration(args: argparse.Namespace, variant: str, seed: int) -> dict[str, Any]:
    from nanorun.config import Horizon
    from nanorun.train import base

    config = base.configure(
        args.depth,
        horizon=Horizon(tokens=args.tokens),
        batch_tokens=args.batch_tokens,
        data=args.data,
        tokenizer=args.tokenizer,
    )
    every = max(config.train.steps // EVALUATIONS, 1)
    changes = {"seed": seed, "eval_tokens": EVAL_TOKENS, "save_every": 10_000, "eval_every": every}
    return base.override(config, changes).to_dict()


def run_name(args: argparse.Namespace, variant: str, seed: int) -> str:
    return f"same-{variant}-{seed}" if variant == "bf16" else f"same-{args.fp8}-{seed}"


def train(args: argparse.Namespace, variant: str, seed: int, seconds: float) -> str | None:
    """Train one run; returns the error message, if any."""
    name = run_name(args, variant, seed)
    config = args.work / "results" / f"{name}.json"
    config.write_text(json.dumps(configuration(args, variant, seed)))
    code = (
        "import json, sys; from pathlib import Path; from nanorun.model.fast.recipe import Recipe; "
        "from nanorun.train.base import BaseOptions, read_config, train_base; config, name, recipe = sys.argv[1:]; "
        "train_base(read_config(Path(config)), BaseOptions(name=name, recipe=Recipe(**json.loads(recipe))))"
    )
    command = [sys.executable, "-c", code, str(config), name, json.dumps(VARIANTS[variant])]
    log = args.work / "results" / f"{name}.log"
    try:
        with log.open("w") as output:
            process = subprocess.run(
                command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, timeout=max(seconds, 1)
            )
    except subprocess.TimeoutExpired:
        return f"timed out after {seconds:.0f} s"
    lines = [line for line in log.read_text().splitlines() if line.strip()]
    return None if process.returncode == 0 else (lines or ["no output"])[-1][:300]


def evaluations(args: argparse.Namespace, variant: str, seed: int) -> list[tuple[int, float]]:
    """Tokens and validation loss of the evaluations so far."""
    from nanorun.runs import read_metrics

    folder = args.work / "runs" / run_name(args, variant, seed)
    if not folder.exists():
        return []
    return [(r["tokens"], r["val_loss"]) for r in read_metrics(folder) if r["kind"] == "eval"]


def result(args: argparse.Namespace) -> dict[str, Any]:
    from nanorun.provenance import record

    curves = {
        variant: {seed: found for seed in range(args.seeds) if (found := evaluations(args, variant, seed))}
        for variant in VARIANTS
    }
    earlier = {}
    if args.bf16_of:
        curves["bf16"] |= {int(seed): curve for seed, curve in args.bf16_of["curves"]["bf16"].items()}
        earlier = {"bf16_of": args.bf16_of.get("bf16_of", args.bf16_of["commit"])}
    finals = {
        variant: {seed: curve[-1][1] for seed, curve in by_seed.items() if curve[-1][0] >= 0.98 * args.tokens}
        for variant, by_seed in curves.items()
    }
    both = sorted(finals["bf16"].keys() & finals["fast"].keys())
    gaps = [finals["fast"][seed] - finals["bf16"][seed] for seed in both]
    return record(
        "same loss",
        depth=args.depth,
        tokens=args.tokens,
        batch_tokens=args.batch_tokens,
        **earlier,
        ways=VARIANTS,
        curves=curves,
        final=finals,
        seeds=both,
        mean_difference=statistics.mean(gaps) if gaps else None,
        standard_error=statistics.stdev(gaps) / len(gaps) ** 0.5 if len(gaps) > 1 else None,
    )


def draw(found: dict[str, Any], path: Path) -> None:
    """Plot both curves, which should coincide, and below them their difference."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 6.5), layout="constrained")
    axes, below = figure.subplots(2, sharex=True, height_ratios=(3, 2))
    for variant, colour, line in (("bf16", "#3b6fb6", "-"), ("fast", "#d1603d", "--")):
        by_seed = list(found["curves"][variant].values())
        shared = min((len(curve) for curve in by_seed), default=0)
        if not shared:
            continue
        tokens = [at / 1e6 for at, _ in by_seed[0][:shared]]
        losses = [[curve[i][1] for curve in by_seed] for i in range(shared)]
        label = f"{'plain bf16' if variant == 'bf16' else 'every fast path on'}, mean and range of {len(by_seed)} seeds"
        axes.plot(tokens, [statistics.mean(row) for row in losses], line, color=colour, label=label, lw=1.8)
        axes.fill_between(
            tokens, [min(r) for r in losses], [max(r) for r in losses], color=colour, alpha=0.2, lw=0
        )
    farthest = 0.01
    for seed in found["seeds"]:
        pair = [
            {str(k): v for k, v in found["curves"][variant].items()}[str(seed)]
            for variant in ("bf16", "fast")
        ]
        points = [(one[0] / 1e6, other[1] - one[1]) for one, other in zip(*pair, strict=False)]
        below.plot(*zip(*points, strict=True), "o-", lw=1, ms=4, label=f"seed {seed}")
        farthest = max(farthest, *(abs(gap) for _, gap in points))
    below.axhline(0, color="black", lw=0.8)
    below.set_ylim(-1.1 * farthest, 1.1 * farthest)
    below.set_ylabel("fast minus bf16")
    below.set_xlabel("million tokens")
    axes.set_ylabel("validation loss, nats a token")
    if found["mean_difference"] is not None:
        axes.set_title(
            f"d{found['depth']}: fast minus bf16 at the end {found['mean_difference']:+.4f}", loc="left"
        )
        below.legend(frameon=False, ncols=3)
    for each in (axes, below):
        each.grid(alpha=0.25)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=150)


def read_result(path: str) -> dict[str, Any]:
    """An earlier result of this script."""
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
        found["curves"]["bf16"], found["curves"]["fast"], found["seeds"]
        found["commit"], found["tokens"], found["depth"], found["ways"]["bf16"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise argparse.ArgumentTypeError(f"{path} is not a result of this script") from error
    return dict(found)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("work", type=Path, nargs="?")
    parser.add_argument(
        "--redraw", type=Path, nargs=2, metavar=("JSON", "PNG"), help="only plot an earlier result"
    )
    parser.add_argument("--tokens", type=int, default=60_000_000)
    parser.add_argument("--batch-tokens", type=int, default=None, help="default: set by the horizon")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--together", type=int, default=3, help="concurrent runs")
    parser.add_argument("--minutes", type=float, default=16)
    parser.add_argument("--depth", type=int, default=12)
    parser.add_argument(
        "--fp8", default="all", help="what the fast runs compute in FP8: none, mlp, layers, head or all"
    )
    parser.add_argument(
        "--bf16-of", type=read_result, metavar="JSON", help="take the plain runs from this earlier result"
    )
    parser.add_argument("--gpu", default="h200", help="name of the GPU in the file name")
    parser.add_argument("--data", default="shared-shared-32768")
    parser.add_argument("--tokenizer", default="shared-32768")
    args = parser.parse_args()
    if args.redraw:
        try:
            draw(read_result(str(args.redraw[0])), args.redraw[1])
        except argparse.ArgumentTypeError as error:
            parser.error(str(error))
        return
    if args.work is None or not args.work.is_dir():
        parser.error("WORK must be a NANORUN_HOME with text and tokenizer")
    if args.bf16_of:
        asked = {"tokens": args.tokens, "depth": args.depth, "batch_tokens": args.batch_tokens}
        if any(args.bf16_of.get(field) != value for field, value in asked.items()):
            parser.error("--bf16-of was measured with a different --depth, --tokens or --batch-tokens")
        if args.bf16_of["ways"]["bf16"] != VARIANTS["bf16"]:
            parser.error("--bf16-of was measured with different settings of plain bf16")
    VARIANTS["fast"]["fp8"] = args.fp8
    args.work = args.work.resolve()
    os.environ["NANORUN_HOME"] = str(args.work)
    results = args.work / "results"
    results.mkdir(parents=True, exist_ok=True)
    path = results / f"same-loss-d{args.depth}-{args.gpu}.json"
    until = time.monotonic() + 60 * args.minutes
    writing = threading.Lock()

    def one(seed: int, variant: str) -> None:
        begin = time.monotonic()
        if until - begin < 60:
            print(f"{variant}, seed {seed}: skipped, no time left", flush=True)
            return
        error = train(args, variant, seed, until - begin)
        with writing:
            found = result(args)
            final = found["final"][variant].get(seed)
            print(
                f"{variant}, seed {seed}: {error or f'validation loss {final}'}, {time.monotonic() - begin:.0f} s",
                flush=True,
            )
            path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
            draw(found, path.with_suffix(".png"))

    done = result(args)["final"]
    with ThreadPoolExecutor(args.together) as pool:
        for seed in range(args.seeds):
            for variant in VARIANTS:
                if seed not in done[variant]:
                    pool.submit(one, seed, variant)
    found = result(args)
    print(json.dumps({k: v for k, v in found.items() if k != "curves"}))


if __name__ == "__main__":
    main()
