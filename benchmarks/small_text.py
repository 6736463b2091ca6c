"""How good are the defaults for a little text and a little time? Bits per byte of `train base --minutes`, of the best
of a search, and of what the depth alone would choose.

    python benchmarks/small_text.py WORK --text FILE.jsonl [--cells 0.5x3,2x3,2x10] [--settings 12] [--jobs 1]
                                    [--speeds SPEEDS.json] [--seed 0]

A cell is megabytes of text × minutes of this machine. The text is the beginning of FILE, the validation text its last
400 kB, the same for all cells. In each cell three things are trained from scratch with the tokens that the machine
processes in the time:

    dial      what `nanorun train base --minutes` chooses, with the default vocabulary
    search    the best of --settings random settings by successive halving: all of them for a quarter of the time, the
              better half for half of it, the best quarter for all of it
    depth     what `train base --depth` chose before there was --minutes, for the deepest model of which the time allows
              one token per parameter

Speed is measured for each setting before it is trained, by the probe of `nanorun plan`. On another machine, such as a
GPU, --speeds takes those that an earlier call measured (WORK/speeds.json), so that the search can run where it is
quick: losses do not depend on the device. Every trial is a process; finished ones are skipped, so the script resumes.
The last line printed is the JSON, which is also in WORK/small-text.json.
"""

import argparse
import json
import math
import os
import random
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

VAL_BYTES = 400_000
RUNGS = (0.25, 0.5, 1.0)  # of the time; half of the settings go on to the next
SPACE: dict[str, list[Any]] = {
    "vocab": [512, 1024, 2048, 4096, 8192],
    "shape": [(2, 64), (2, 128), (4, 128), (4, 192), (6, 192), (6, 256)],
    "context": [128, 256, 512],
    "batch_tokens": [1024, 2048, 4096, 8192],
    "matrix_lr": [0.25, 0.5, 1.0, 2.0],  # times the default of OptimConfig
    "other_lr": [0.25, 0.5, 1.0, 2.0],
    "weight_decay": [0.03, 0.1, 0.3, 1.0],
}
Setting = dict[str, Any]


def write_texts(work: Path, source: Path, sizes: list[float]) -> None:
    """Datasets text-SIZE with the beginnings of the source, and its end as validation text of all."""
    from nanorun.data.add import add_files
    from nanorun.data.dataset import dataset_names
    from nanorun.data.readers import read_documents

    documents = list(read_documents(source))
    val, taken = work / "val.jsonl", 0
    with open(val, "w", encoding="utf-8") as file:
        while taken < VAL_BYTES:
            text = documents.pop()
            taken += len(text.encode())
            file.write(json.dumps({"text": text}) + "\n")
    for size in sizes:
        name, taken = f"text-{size:g}", 0
        if name in dataset_names():
            continue
        path = work / f"{name}.jsonl"
        with open(path, "w", encoding="utf-8") as file:
            for text in documents:
                if taken >= size * 1e6:
                    break
                taken += len(text.encode())
                file.write(json.dumps({"text": text}) + "\n")
        if taken < size * 1e6:
            raise SystemExit(f"{source} has only {taken / 1e6:.1f} MB of text for a cell of {size:g} MB")
        add_files([path], name=name, val=val)


def tokenizer_of(size: float, vocab: int) -> str:
    from nanorun.data.dataset import open_dataset
    from nanorun.data.vocabulary import train_on
    from nanorun.text.store import tokenizer_names

    name = f"text-{size:g}-{vocab}"
    if name not in tokenizer_names():
        train_on(open_dataset(f"text-{size:g}"), vocab, name=name, max_bytes=2**31)
    return name


def draw(count: int, seed: int) -> list[Setting]:
    rng = random.Random(seed)
    return [{name: rng.choice(values) for name, values in SPACE.items()} for _ in range(count)]


def configuration(setting: Setting, size: float, tokens: int) -> dict[str, Any]:
    """The configuration of a searched setting."""
    from nanorun.config import Config, OptimConfig, TrainConfig
    from nanorun.plan import dial

    depth, dim = setting["shape"]
    model = dial.shape(depth, dim, setting["vocab"], setting["context"])
    batch_tokens = max(setting["batch_tokens"], setting["context"])
    steps, default = max(tokens // batch_tokens, 1), OptimConfig()
    lrs = {name: lr * setting["other_lr"] for name, lr in default.learning_rates().items()}
    optim = replace(
        default,
        **{**lrs, "matrix_lr": default.matrix_lr * setting["matrix_lr"]},
        matrix_weight_decay=setting["weight_decay"],
        warmup_steps=min(40, max(steps // 20, 1)),
    )
    train = TrainConfig(steps, batch_tokens, eval_every=0, save_every=10**9)
    return Config(model, optim, train, f"text-{size:g}", f"text-{size:g}-{setting['vocab']}").to_dict()


class Speeds:
    """Tokens per second of configurations, measured once each or read from a file."""

    def __init__(self, path: Path, given: Path | None) -> None:
        self.path = path
        self.known: dict[str, float] = json.loads(given.read_text()) if given else {}
        if path.is_file():
            self.known |= json.loads(path.read_text())

    def __call__(self, config: Any) -> float:
        from nanorun.plan.estimate import make_plan

        model, train = config.model, config.train
        key = f"d{model.depth}-{model.dim}-{model.context}-{model.vocab_size}-{train.batch_tokens}"
        if key not in self.known:
            self.known[key] = round(make_plan(config).tokens_per_s)
            self.path.write_text(json.dumps(self.known, indent=1))
        return self.known[key]


def by_dial(size: float, minutes: float, speeds: Speeds) -> dict[str, Any]:
    from nanorun.config import Horizon
    from nanorun.data.dataset import open_dataset
    from nanorun.data.vocabulary import size_for
    from nanorun.plan import dial
    from nanorun.text.store import open_tokenizer

    dataset = open_dataset(f"text-{size:g}")
    tokenizer = tokenizer_of(size, size_for(dataset.total("text_bytes", "train")))
    text = open_tokenizer(tokenizer)
    config = dial.configure(
        None, dial.text_size(dataset, text), text.vocab_size, Horizon(minutes=minutes), tokens_per_s=speeds
    )
    return replace(config, data=dataset.name, tokenizer=tokenizer).to_dict()


def by_depth(size: float, minutes: float, speeds: Speeds) -> dict[str, Any]:
    """As `train base --depth` was before: batch and learning rates of large models, scaled down."""
    from nanorun.config import REFERENCE_BATCH, Config, Horizon, OptimConfig, scale

    vocab, chosen = 8192 if size >= 2 else 4096, None
    names = {"data": f"text-{size:g}", "tokenizer": tokenizer_of(size, vocab)}
    for depth in (2, 4, 6, 8):
        tokens = round(speeds(scale(depth, vocab, context=512)) * minutes * 60)
        reference = 10.5 * scale(12, vocab, context=512).model.scaling_parameters
        batch_tokens = 2 ** round(math.log2(REFERENCE_BATCH * (tokens / reference) ** 0.383))
        horizon = Horizon(tokens=tokens)
        config = scale(depth, vocab, context=512, horizon=horizon, batch_tokens=batch_tokens, **names)
        by_batch, by_width = (batch_tokens / REFERENCE_BATCH) ** 0.5, (config.model.dim / 768) ** -0.5
        default = OptimConfig()
        lrs = {name: lr * by_batch * by_width for name, lr in default.learning_rates().items()}
        optim = replace(
            default,
            **{**lrs, "matrix_lr": default.matrix_lr * by_batch},
            matrix_weight_decay=1.0,
            warmup_steps=min(default.warmup_steps, max(config.train.steps // 10, 1)),
        )
        if chosen is None or tokens >= config.model.scaling_parameters:
            chosen = replace(config, optim=optim)
    assert isinstance(chosen, Config)
    return chosen.to_dict()


def trial(work: Path, name: str, config: dict[str, Any], threads: int) -> dict[str, Any]:
    """Trains in a process of its own; returns the summary."""
    summary = work / "runs" / name / "summary.json"
    if not summary.is_file():
        path = work / f"{name}.json"
        path.write_text(json.dumps(config))
        command = [sys.executable, "-m", "nanorun", "train", "base", "--config", str(path), "--name", name]
        environment = {**os.environ, "NANORUN_HOME": str(work), "PYTHONPATH": str(ROOT)}
        environment["OMP_NUM_THREADS"] = str(threads)
        options = ["--no-compile", "--dtype", "fp32", "--yes", "--json"]
        done = subprocess.run(command + options, env=environment, capture_output=True, text=True)
        if done.returncode:
            print(f"{name}: {done.stderr.strip().splitlines()[-1]}", flush=True)
            return {"val_bpb": math.inf, "tokens": 0}
    result: dict[str, Any] = json.loads(summary.read_text())
    return result


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("work", type=Path)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--cells", default="0.5x3,2x3,10x3,0.5x10,2x10,10x10")
    parser.add_argument("--settings", type=int, default=12)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--speeds", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    os.environ["NANORUN_HOME"] = str(args.work)
    args.work.mkdir(parents=True, exist_ok=True)
    from nanorun.config import Config
    from nanorun.data.dataset import open_dataset
    from nanorun.provenance import record
    from nanorun.tables import table

    cells = [tuple(map(float, cell.split("x"))) for cell in args.cells.split(",")]
    write_texts(args.work, args.text, sorted({size for size, _ in cells}))
    speeds = Speeds(args.work / "speeds.json", args.speeds)
    rows = []
    with ThreadPoolExecutor(args.jobs) as pool:

        def run_all(named: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
            results = pool.map(lambda name: trial(args.work, name, named[name], args.threads), named)
            return dict(zip(named, results, strict=True))

        for size, minutes in cells:
            cell = f"{size:g}x{minutes:g}"
            fixed = {
                f"dial-{cell}": by_dial(size, minutes, speeds),
                f"depth-{cell}": by_depth(size, minutes, speeds),
            }
            chosen = run_all(fixed)
            settings = dict(enumerate(draw(args.settings, args.seed)))
            for rung in RUNGS:
                named = {}
                for number, setting in settings.items():
                    tokenizer_of(size, setting["vocab"])
                    tokens = speeds(Config.from_dict(configuration(setting, size, 10**6))) * minutes * 60
                    config = configuration(setting, size, round(rung * tokens))
                    named[f"search-{cell}-{args.seed}-{number}-{rung:g}"] = config
                found = run_all(named)
                ranked = sorted(
                    zip(found.values(), settings.items(), strict=True), key=lambda r: r[0]["val_bpb"]
                )
                best_result, (_, best) = ranked[0]
                settings = dict(each for _, each in ranked[: max(len(ranked) // 2, 1)])
                print(f"{cell}, {rung:g} of the time: {best_result['val_bpb']:.4f} with {best}", flush=True)
            text_bytes = open_dataset(f"text-{size:g}").total("text_bytes", "train")
            dial_run, depth_run = chosen[f"dial-{cell}"], chosen[f"depth-{cell}"]
            rows.append(
                {
                    "megabytes": size,
                    "minutes": minutes,
                    "text_bytes": text_bytes,
                    "dial_bpb": dial_run["val_bpb"],
                    "search_bpb": best_result["val_bpb"],
                    "depth_bpb": depth_run["val_bpb"],
                    "searched": args.settings,
                    "best": best,
                    "dial": fixed[f"dial-{cell}"],
                }
            )
            result = record("small-text", rows=rows)
            (args.work / "small-text.json").write_text(json.dumps(result, indent=1))
    print(
        table(
            ["MB", "minutes", "dial", "search", "depth", "dial / search"],
            [
                [
                    f"{row['megabytes']:g}",
                    f"{row['minutes']:g}",
                    *(f"{row[name]:.4f}" for name in ("dial_bpb", "search_bpb", "depth_bpb")),
                    f"{row['dial_bpb'] / row['search_bpb']:.3f}",
                ]
                for row in rows
            ],
        )
    )
    print(json.dumps(result))


if __name__ == "__main__":
    main()
