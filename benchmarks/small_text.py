"""How good are the defaults for a little text and a little time? Bits per byte of `train base --minutes`, of the best
of a search, and of what the depth alone would choose.

    python benchmarks/small_text.py WORK --text FILE.jsonl [--cells 0.5x3,2x3,2x10] [--settings 12] [--jobs 1]
                                    [--speeds SPEEDS.json] [--val FILE.jsonl] [--seeds 0] [--best BEST.json]

A cell is megabytes of text × minutes of this machine. The text is the beginning of FILE, the validation text of the
search its last 400 kB, the same for all cells. In each cell three things are trained from scratch with the tokens that
the machine processes in the time:

    dial      what `nanorun train base --minutes` chooses, with the default vocabulary
    search    the best of --settings random settings by successive halving: all of them for an eighth of the time, the
              better half for a quarter of it, and so on. Each has a whole learning rate schedule. --best names a
              file of settings found otherwise, by cell, that are trained for all of the time in place of the search
    depth     what `train base --depth` chose before there was --minutes, for the deepest model of which the time allows
              one token per parameter

The finalists of each cell are also evaluated on --val, which no choice depends on.

Speed is measured for each setting before it is trained, by the probe of `nanorun plan`. On another machine, such as a
GPU, --speeds takes those that an earlier call measured (WORK/speeds.json), so that the search can run where it is
quick: losses do not depend on the device. The speed of a setting that is not among them is interpolated. Cells of at
least 100 MB are for a GPU: compiled, in its default precision, with larger models. Trials run in --jobs processes;
finished ones are skipped, so the script resumes. The last line printed is the JSON, which is also in
WORK/small-text.json.
"""

import argparse
import json
import math
import multiprocessing
import os
import random
import sys
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

VAL_BYTES = 400_000
WHOLE_VAL = "whole-val"
RUNGS = (0.125, 0.25, 0.5, 1.0)  # of the time; half of the settings go on to the next
LARGE_RUNGS = (0.125, 0.5, 1.0)  # a quarter goes on
SPACE: dict[str, list[Any]] = {
    "vocab": [512, 1024, 2048, 4096, 8192],
    "shape": [(2, 64), (2, 128), (2, 192), (4, 128), (4, 192), (4, 256), (6, 192), (6, 256), (6, 384)],
    "context": [128, 256, 512],
    "batch_tokens": [1024, 2048, 4096, 8192],
    "matrix_lr": [0.25, 0.5, 1.0, 2.0],  # times the default of OptimConfig
    "other_lr": [0.25, 0.5, 1.0, 2.0],
    "weight_decay": [0.03, 0.1, 0.3, 1.0],
    "dropout": [0.0, 0.1, 0.2, 0.3],
}
LARGE = 100  # MB
LARGE_SPACE: dict[str, list[Any]] = {
    "vocab": [8192, 16384, 32768],
    "shape": [(6, 384), (8, 512), (10, 640), (12, 768)],
    "context": [1024],
    "batch_tokens": [32_768, 65_536, 131_072],
    "matrix_lr": [0.25, 0.5, 1.0, 2.0],
    "other_lr": [0.25, 0.5, 1.0, 2.0],
    "weight_decay": [0.03, 0.1, 0.3, 1.0],
    "dropout": [0.0],  # the fast path has none
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


def draw(count: int, seed: int, size: float) -> list[Setting]:
    rng, space = random.Random(seed), LARGE_SPACE if size >= LARGE else SPACE
    return [{name: rng.choice(values) for name, values in space.items()} for _ in range(count)]


def configuration(setting: Setting, size: float, tokens: int) -> dict[str, Any]:
    """The configuration of a searched setting."""
    from nanorun.config import Config, OptimConfig, TrainConfig
    from nanorun.plan import dial

    depth, dim = setting["shape"]
    model = dial.shape(depth, dim, setting["vocab"], setting["context"])
    embeddings = setting.get("value_embeddings", True)
    model = replace(model, dropout=setting["dropout"], value_embeddings=embeddings)
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
    """Tokens per second of configurations: measured once each, or interpolated from those in a file."""

    def __init__(self, path: Path, given: Path | None) -> None:
        self.path = path
        self.known: dict[str, float] = json.loads(path.read_text()) if path.is_file() else {}
        self.fit = _fit(json.loads(given.read_text())) if given else None

    def __call__(self, config: Any) -> float:
        from nanorun.plan.estimate import make_plan

        model, train = config.model, config.train
        sizes = (model.depth, model.dim, model.context, model.vocab_size, train.batch_tokens)
        key = "-".join(map(str, sizes))
        if key not in self.known:
            tokens_per_s = make_plan(config).tokens_per_s if self.fit is None else self.fit(*sizes)
            self.known[key] = round(tokens_per_s)
            self.path.write_text(json.dumps(self.known, indent=1))
        return self.known[key]


def _features(depth: int, dim: int, context: int, vocab: int, batch_tokens: int) -> list[float]:
    """What the time of a token is a sum of: matrices, elementwise work, head, attention, and the update."""
    per_update = [depth * dim**2 / batch_tokens, vocab * dim / batch_tokens, depth / batch_tokens]
    return [depth * dim**2, depth * dim, vocab * dim, float(vocab), depth * dim * context, 1.0, *per_update]


def _fit(measured: dict[str, float]) -> Any:
    """Least squares in relative error."""
    import numpy as np

    rows = np.array([_features(*map(int, key.split("-"))) for key in measured])
    seconds = 1 / np.array(list(measured.values()))
    scale = rows.max(axis=0)
    weights, *_ = np.linalg.lstsq(rows / scale / seconds[:, None], np.ones(len(rows)), rcond=None)
    error = np.abs(rows / scale @ weights / seconds - 1)
    print(f"{len(rows)} speeds fitted: median error {np.median(error):.1%}, largest {error.max():.1%}")
    return lambda *sizes: float(1 / (np.array(_features(*sizes)) / scale @ weights))


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

    vocab, context = (32_768, 2048) if size >= LARGE else (8192 if size >= 2 else 4096, 512)
    chosen = None
    names = {"data": f"text-{size:g}", "tokenizer": tokenizer_of(size, vocab)}
    for depth in (8, 12) if size >= LARGE else (2, 4, 6, 8):
        tokens = round(speeds(scale(depth, vocab, context=context)) * minutes * 60)
        reference = 10.5 * scale(12, vocab, context=context).model.scaling_parameters
        batch_tokens = 2 ** round(math.log2(REFERENCE_BATCH * (tokens / reference) ** 0.383))
        horizon = Horizon(tokens=tokens)
        config = scale(depth, vocab, context=context, horizon=horizon, batch_tokens=batch_tokens, **names)
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


def start_worker(work: Path, threads: int) -> None:
    """In each process of the pool: its home, its threads, and a file for what it prints."""
    os.environ["NANORUN_HOME"] = str(work)
    import torch

    torch.set_num_threads(threads)
    log = open(work / f"log-{os.getpid()}", "a", buffering=1)  # noqa: SIM115 (open until the process ends)
    sys.stdout = sys.stderr = log


def trial(work: Path, name: str, config: dict[str, Any], large: bool) -> dict[str, Any]:
    """Trains in a process of the pool; returns the summary."""
    from nanorun.config import Config
    from nanorun.train import base

    chosen = Config.from_dict(config)
    train = replace(chosen.train, eval_every=0, eval_tokens=20_000_000, save_every=10**9, minutes=None)
    options = base.BaseOptions(name, samples=0)
    if not large:
        options = replace(options, compile=False, dtype="fp32")
    try:
        summary = base.train_base(replace(chosen, train=train), options)
    except Exception as error:
        print(f"{name}: {error!r}", file=sys.__stdout__, flush=True)
        return {"val_bpb": math.inf, "tokens": 0}
    kept = ("val_bpb", "train_loss", "tokens", "steps", "seconds", "tokens_per_s")
    with open(work / "trials.jsonl", "a") as file:
        file.write(json.dumps({"name": name, **{key: summary[key] for key in kept}, "config": config}) + "\n")
    return summary


def evaluate(name: str) -> float:
    """Bits per byte on the whole of another validation text."""
    from nanorun.evals.bpb import evaluate_run

    return float(evaluate_run(name, WHOLE_VAL, None)["bpb"])


class Bench:
    """One call of the script: its folder, its processes and its speeds."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.work: Path = args.work
        self.settings: int = args.settings
        self.best: dict[str, Setting] = json.loads(args.best.read_text()) if args.best else {}
        self.seeds = [int(seed) for seed in args.seeds.split(",")]
        self.speeds = Speeds(args.work / "speeds.json", args.speeds)
        context = multiprocessing.get_context("spawn")
        threads = args.threads or max((os.cpu_count() or 1) // args.jobs, 1)
        self.pool = ProcessPoolExecutor(args.jobs, context, start_worker, (args.work, threads))

    def train(self, named: dict[str, dict[str, Any]], size: float) -> dict[str, dict[str, Any]]:
        futures = {
            name: self.pool.submit(trial, self.work, name, config, size >= LARGE)
            for name, config in named.items()
        }
        return {name: future.result() for name, future in futures.items()}

    def search(self, size: float, minutes: float) -> tuple[str, Setting, float]:
        """Successive halving over the settings of all seeds; the name, setting and result of the best."""
        from nanorun.config import Config

        cell = f"{size:g}x{minutes:g}"
        settings = {
            f"{seed}-{number}": setting
            for seed in self.seeds
            for number, setting in enumerate(draw(self.settings, seed, size))
        }
        rungs: tuple[float, ...]
        rungs, divisor = (LARGE_RUNGS, 4) if size >= LARGE else (RUNGS, 2)
        if cell in self.best:
            settings, rungs = {"best": self.best[cell]}, (1.0,)
        for rung in rungs:
            named = {}
            for number, setting in settings.items():
                tokenizer_of(size, setting["vocab"])
                speed = self.speeds(Config.from_dict(configuration(setting, size, 10**6)))
                tokens = round(rung * speed * minutes * 60)
                named[f"search-{cell}-{number}-{rung:g}"] = configuration(setting, size, tokens)
            found = self.train(named, size)
            ranked = sorted(
                zip(found.items(), settings.items(), strict=True), key=lambda r: r[0][1]["val_bpb"]
            )
            (name, result), (_, best) = ranked[0]
            print(f"{cell}, {rung:g} of the time: {result['val_bpb']:.4f} with {best}", flush=True)
            settings = dict(each for _, each in ranked[: max(len(ranked) // divisor, 1)])
        return name, best, result["val_bpb"]

    def cell(self, size: float, minutes: float) -> dict[str, Any]:
        from nanorun.data.dataset import dataset_names, open_dataset

        cell = f"{size:g}x{minutes:g}"
        fixed = {
            f"dial-{cell}": by_dial(size, minutes, self.speeds),
            f"depth-{cell}": by_depth(size, minutes, self.speeds),
        }
        with ThreadPoolExecutor(1) as beside:  # so that the search does not wait
            training = beside.submit(self.train, fixed, size)
            searched, best, found = self.search(size, minutes)
            chosen = training.result()
        names = {**dict(zip(("dial", "depth"), fixed, strict=True)), "search": searched}
        bpb = {kind: chosen[name]["val_bpb"] for kind, name in names.items() if name in chosen}
        bpb["search"] = found
        row: dict[str, Any] = {
            "megabytes": size,
            "minutes": minutes,
            "text_bytes": open_dataset(f"text-{size:g}").total("text_bytes", "train"),
            "searched": best.pop("searched", self.settings * len(self.seeds)),
            "best": best,
            "dial": fixed[f"dial-{cell}"],
            "bpb": bpb,
        }
        if WHOLE_VAL in dataset_names():
            futures = {kind: self.pool.submit(evaluate, name) for kind, name in names.items()}
            row["val_bpb"] = {kind: future.result() for kind, future in futures.items()}
        print(cell, json.dumps(row.get("val_bpb", bpb)), flush=True)
        return row


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("work", type=Path)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--cells", default="0.5x3,2x3,10x3,0.5x10,2x10,10x10")
    parser.add_argument("--settings", type=int, default=12)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--speeds", type=Path)
    parser.add_argument("--val", type=Path)
    parser.add_argument("--best", type=Path)
    parser.add_argument("--seeds", default="0")
    parser.add_argument("--prepare", action="store_true", help="datasets and tokenizers only")
    args = parser.parse_args()
    os.environ["NANORUN_HOME"] = str(args.work)
    args.work.mkdir(parents=True, exist_ok=True)
    from nanorun.data.add import add_files
    from nanorun.data.dataset import dataset_names
    from nanorun.provenance import record
    from nanorun.tables import table

    cells = [tuple(map(float, cell.split("x"))) for cell in args.cells.split(",")]
    write_texts(args.work, args.text, sorted({size for size, _ in cells}))
    if args.val and WHOLE_VAL not in dataset_names():
        add_files([args.work / "val.jsonl"], name=WHOLE_VAL, val=args.val)
    if args.prepare:
        for size in {size for size, _ in cells}:
            for vocab in (LARGE_SPACE if size >= LARGE else SPACE)["vocab"]:
                tokenizer_of(size, vocab)
        return
    bench = Bench(args)
    with ThreadPoolExecutor(len(cells)) as threads:  # the cells share the processes
        rows = list(threads.map(lambda cell: bench.cell(*cell), cells))
    bench.pool.shutdown()
    result = record("small-text", rows=rows)
    (args.work / "small-text.json").write_text(json.dumps(result, indent=1))
    cells_of_table = []
    for row in rows:
        bpb = row.get("val_bpb", row["bpb"])
        figures = [f"{bpb[kind]:.4f}" for kind in ("dial", "search", "depth")]
        sizes = [f"{row['megabytes']:g}", f"{row['minutes']:g}"]
        cells_of_table.append([*sizes, *figures, f"{bpb['dial'] / bpb['search']:.3f}"])
    print(table(["MB", "minutes", "dial", "search", "depth", "dial / search"], cells_of_table))
    print(json.dumps(result))


if __name__ == "__main__":
    main()
