"""Everything about training speed in one lease of a GPU: are the kernels right, what does each lever give, where
does the time go, how fast are the larger models.

    python benchmarks/speed.py WORK --minutes 18 [--parts check,rates,warm,levers,budget,depths,start] [--steps 8]

WORK is a NANORUN_HOME with text and tokenizer (--data, --tokenizer). Parts run in this order, each measurement
in a process of its own, which may fail or hang: it is reported and the next one begins. Variants start several at a
time, since that needs cores and not the GPU, and wait; only then is one after the other timed. Results are written
as they come, to WORK/results/levers-d12-GPU.json and budget-d12-GPU.json; tables for people go to stdout,
one JSON line last. `--predict FILE` measures nothing and writes what the budget should be.

    check    the GPU tests of every kernel                                          about  90 s
    rates    matmuls of a d12 in bf16 and fp8, both passes; bytes/s of the kernels  about  15 s
    warm     every variant once, so that what follows finds it compiled             a few minutes, not timed
    levers   all on, then each off (and some instead), a few steps each             about  15 s each
    budget   nanoseconds a token by part, predicted and profiled, all on and bf16   with the levers
    depths   d20 and d24, all on                                                    about  30 s each
    start    as `nanorun bench train`, all on: cold and warm seconds to the first step   about 120 s
"""

import argparse
import json
import os
import queue
import subprocess
import sys
import threading
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

PARTS = ("check", "rates", "warm", "levers", "budget", "depths", "start")
ALL_ON: dict[str, Any] = {"fp8": "all", "sparse_tables": True}
# What each variant changes against all on; `options` are how to run, the rest is of the model.
LEVERS: dict[str, dict[str, Any]] = {
    "all on": {},
    "all off but FlashAttention": {
        "fp8": "none", "fused_qkv": False, "fused_rope": False, "fused_loss": False, "sparse_tables": False,
    },
    "CUDA graphs off": {"options": {"graphs": False}},
    "fp8 none (bf16)": {"fp8": "none"},
    "fp8 mlp": {"fp8": "mlp"},
    "fp8 layers": {"fp8": "layers"},
    "fp8 head's gradients": {"fp8": "head"},
    "bf16, cast once": {"fp8": "none", "cast_once": True},
    "sparse tables off": {"sparse_tables": False},
    "fused rope off": {"fused_rope": False},
    "fused stream off": {"fused_stream": False},
    "fused ReLU² off": {"fused_relu2": False},
    "fused residual off": {"fused_residual": False},
    "ping-pong products off": {"pingpong": False},
    "fused loss off, fp8 layers": {"fused_loss": False, "fp8": "layers"},
    "fused qkv off (bf16)": {"fp8": "none", "fused_qkv": False, "fused_rope": False},
    "attention flex and cuDNN": {"options": {"backend": "auto"}, "without_flash": True},
    "micro-batches of 16 rows": {"options": {"device_batch": 16}},
}  # fmt: skip
DEPTHS = (20, 24)
PROFILED = ("all on", "fp8 none (bf16)")


class Bench:
    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.until = time.monotonic() + 60 * args.minutes
        self.folder = args.work / "results"
        self.folder.mkdir(parents=True, exist_ok=True)
        self.path = self.folder / f"levers-d{args.depth}-{args.gpu}.json"
        self.found: dict[str, Any] = {"what": "levers", "depth": args.depth, "rows": [], "failed": {}}
        self.budgets: dict[str, Any] = {}

    def left(self) -> float:
        return self.until - time.monotonic()

    def keep(self, **found: Any) -> None:
        self.found |= found
        self.path.write_text(json.dumps(self.found, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")

    def child(self, ask: dict[str, Any], seconds: float) -> dict[str, Any] | None:
        """One measurement elsewhere; None, and the reason kept, when it fails."""
        return self.result_of(Child(self, ask), seconds)

    def result_of(self, child: "Child", seconds: float) -> dict[str, Any] | None:
        try:
            return child.go(min(seconds, max(self.left(), 1)))
        except RuntimeError as error:
            return self.failed(child.name, str(error))

    def failed(self, name: str, why: str) -> None:
        print(f"{name}: FAILED, {why}", flush=True)
        self.keep(failed={**self.found["failed"], name: why})

    def ask(self, do: str, name: str, changes: dict[str, Any], **more: Any) -> dict[str, Any]:
        args = self.args
        fields = ("data", "tokenizer", "depth", "steps", "batch_tokens")
        common = {key: getattr(args, key) for key in fields}
        return {"do": do, "name": name, "changes": {**ALL_ON, **changes}, **common, **more}

    # The parts

    def check(self) -> None:
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--durations=8"]
        command += [f"tests/gpu/test_{part}_on_gpu.py" for part in ("fp8", "stream", "products")]
        command += ["tests/gpu/test_model_on_gpu.py", "-k", "not backends"]
        begin = time.monotonic()
        try:
            done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)
            said, code = done.stdout, done.returncode
        except subprocess.TimeoutExpired as error:
            said, code = str(error.stdout), -1
        (self.folder / "check.log").write_text(said)
        took = round(time.monotonic() - begin, 1)
        summary = said.strip().splitlines()[-1] if said.strip() else "nothing said"
        print(f"check: exit code {code} after {took} s: {summary}", flush=True)
        self.keep(check={"code": code, "seconds": took, "summary": summary})

    def rates(self) -> None:
        found = self.child({"do": "rates"}, 90)
        if found is not None:
            self.keep(rates=found)
            print("\nmatmul TFLOP/s (32,768 tokens)")
            for row in found["matmuls"]:
                print("  " + "  ".join(f"{key} {value}" for key, value in row.items()))
            print("kernels")
            for row in found["kernels"]:
                print(f"  {row['name']:<28} {row['us']:>8} µs  {row['tb_s']:>6} TB/s", flush=True)

    def warm(self) -> None:
        """Fills the compile caches with every variant; nothing is timed."""
        asks = [self.ask("warm", name, LEVERS[name]) for name in self.wanted()]
        asks += [{**self.ask("warm", f"d{depth} all on", {}), "depth": depth} for depth in DEPTHS]
        with ThreadPoolExecutor(self.args.together) as pool:
            list(pool.map(lambda ask: self.child(ask, 400), asks))

    def wanted(self) -> list[str]:
        return self.args.levers.split(";") if self.args.levers else list(LEVERS)

    def levers(self) -> None:
        wanted = self.wanted()
        profiled = [name for name in wanted if name in PROFILED and "budget" in self.args.chosen]
        asks = [self.ask("timed", name, LEVERS[name], profile=name in profiled) for name in wanted]
        for first in range(0, len(asks), self.args.together):
            self.lot(asks[first : first + self.args.together], "rows")

    def depths(self) -> None:
        self.lot(
            [{**self.ask("timed", f"d{d} all on", {}), "depth": d, "steps": 4} for d in DEPTHS], "depths"
        )

    def lot(self, asks: list[dict[str, Any]], into: str) -> None:
        """Some variants: all start together, since starting needs cores and not the GPU, and wait; then each is timed
        while the others do nothing."""
        if self.left() < 60:
            for ask in asks:
                self.failed(f"timed {ask['name']}", "no time left")
            return
        begin = time.monotonic()
        children = [Child(self, ask) for ask in asks]
        until = begin + min(300, self.left())
        for child in children:
            child.wait_until_ready(until - time.monotonic())
        print(f"{len(asks)} variants ready after {time.monotonic() - begin:.0f} s", flush=True)
        for child in children:
            row = self.result_of(child, 60)
            if row is None:
                continue
            name = child.ask["name"]
            budget = row.pop("budget", None)
            if budget is not None:
                self.budgets[name] = budget
                path = self.folder / f"budget-d{self.args.depth}-{self.args.gpu}.json"
                write_budget(path, self.budgets, self.args)
                show_budget(name, budget)
            self.keep(**{into: [*self.found.get(into, []), {"name": name, **row}]})
            print(
                f"{name:<28} {row['tokens_per_s']:>9,} tokens/s  {row['peak_gib']:.1f} GiB  "
                f"loss {row['loss']:.3f}  first step {row['first_step_s']} s  {row['graphs']} graphs",
                flush=True,
            )

    def start(self) -> None:
        result = self.child(self.ask("start", "", {}, steps=16), 300)
        if result is not None:
            path = self.folder / f"train-d{self.args.depth}-{self.args.gpu}.json"
            path.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
            print(
                f"start: {result['tokens_per_s']:,} tokens/s, {result['peak_gib'] or 0:.1f} GiB, first step after "
                f"{result['first_step_cold_s']} s cold, {result['first_step_warm_s']} s warm",
                flush=True,
            )


class Child:
    """A measurement in a process of its own. A timed one says when it is ready, and waits to be told to go."""

    def __init__(self, bench: Bench, ask: dict[str, Any]) -> None:
        self.ask = ask
        self.name = f"{ask['do']} {ask.get('name', '')}".strip()
        env = {**os.environ, "NANORUN_HOME": str(bench.args.work), "PYTHONUNBUFFERED": "1"}
        if ask.get("changes", {}).get("without_flash"):
            env["NANORUN_WITHOUT_FLASH"] = "1"
        self.log = bench.folder / f"{self.name.replace(' ', '-').replace(',', '')}.log"
        with self.log.open("w") as errors:
            self.process = subprocess.Popen(
                [sys.executable, __file__, "--child"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=env,
                cwd=ROOT,
            )
        self.said: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=self._listen, daemon=True).start()
        self._tell(json.dumps(ask))

    def wait_until_ready(self, seconds: float) -> None:
        """Or until it has failed, which `go` finds out."""
        try:
            line = self.said.get(timeout=max(seconds, 1))
        except queue.Empty:
            self.process.kill()
            line = None
        if line is None:
            self.said.put(None)

    def go(self, seconds: float) -> dict[str, Any]:
        self._tell("go")
        last = ""
        try:
            while (line := self.said.get(timeout=seconds)) is not None:
                last = line
        except queue.Empty:
            self.process.kill()
            raise RuntimeError(f"not done after {seconds:.0f} s") from None
        if self.process.wait() or not last.startswith("{"):
            lines = [line for line in self.log.read_text().splitlines() if line.strip()]
            raise RuntimeError(lines[-1][:300] if lines else f"exit code {self.process.returncode}")
        found: dict[str, Any] = json.loads(last)
        return found

    def _tell(self, line: str) -> None:
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):  # it has ended, and `go` says how
            self.process.stdin.write(line + "\n")
            self.process.stdin.flush()

    def _listen(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.said.put(line.strip())
        self.said.put(None)


def predicted(args: argparse.Namespace) -> dict[str, Any]:
    """The budgets of the profiled variants, with nothing measured."""
    from nanorun.bench import budget
    from nanorun.config import scale_model

    found = {}
    for name in PROFILED:
        config = scale_model(args.depth, 32_768, **{**ALL_ON, **LEVERS[name]})
        ns = budget.predict(config, budget.Shape(32 * config.context, args.batch_tokens))
        found[name] = {"parts": {p: {"predicted": ns.get(p), "measured": None} for p in budget.PARTS}}
    return found


def write_budget(path: Path, budgets: dict[str, Any], args: argparse.Namespace) -> None:
    from nanorun.provenance import record, write_result

    write_result(record("budget", depth=args.depth, step_tokens=args.batch_tokens, variants=budgets), path)


def show_budget(name: str, budget: dict[str, Any]) -> None:
    print(f"\nns a token, {name}: predicted, measured")
    for part, row in budget["parts"].items():
        print(f"  {part:<28} {row['predicted'] or 0:>8.1f} {row['measured'] or 0:>8.1f}")
    sums = [sum(row[k] or 0 for row in budget["parts"].values()) for k in ("predicted", "measured")]
    print(f"  {'sum':<28} {sums[0]:>8.1f} {sums[1]:>8.1f}\n", flush=True)


# In the processes that measure


def configured(ask: dict[str, Any]) -> tuple[Any, Any]:
    from nanorun.config import Horizon
    from nanorun.model.kernels import flash
    from nanorun.train import base

    if os.environ.get("NANORUN_WITHOUT_FLASH"):
        flash.works = lambda device, head_dim: False  # type: ignore[assignment]
    changes = {k: v for k, v in ask["changes"].items() if k not in ("options", "without_flash")}
    config = base.configure(
        ask["depth"],
        horizon=Horizon(),
        batch_tokens=ask["batch_tokens"],
        data=ask["data"],
        tokenizer=ask["tokenizer"],
        model_changes=changes,
    )
    return config, base.Options(**ask["changes"].get("options", {}))


def start(ask: dict[str, Any]) -> dict[str, Any]:
    from nanorun.bench.train import bench_train

    config, options = configured(ask)
    return bench_train(config, options, ask["steps"])


def timed(ask: dict[str, Any]) -> dict[str, Any]:
    """One variant: steps, and for `warm` the first one alone."""
    import statistics
    import tempfile

    import torch
    from torch._dynamo.utils import counters

    from nanorun.runs import Run
    from nanorun.train import base, loop

    begin = time.perf_counter()
    config, options = configured(ask)
    with tempfile.TemporaryDirectory() as folder:
        t = base.assemble(config, Run("bench", Path(folder), {}, None), options, None)
        with t.loader:
            loop.train_step(t)
            first = time.perf_counter() - begin
            if ask["do"] == "warm":
                return {"first_step_s": round(first, 1)}
            print("ready", flush=True)
            if not sys.stdin.readline():
                sys.exit("nobody waits for this any more")
            steps = [loop.train_step(t) for _ in range(3 + ask["steps"])][3:]
            graphs = counters["stats"]["unique_graphs"]
            speed = steps[0].tokens / statistics.median(s.seconds for s in steps)
            row = {
                "tokens_per_s": round(speed),
                "mfu": t.config.model.flops_per_token * speed / t.peak_flops if t.peak_flops else None,
                "ms_per_step": round(1e3 * statistics.median(s.seconds for s in steps), 2),
                "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if t.device.type == "cuda" else 0.0,
                "loss": steps[-1].loss,
                "first_step_s": round(first, 1),
                "device_batch": t.loader.rows,
                "attention": sorted({layer.attention.backend for layer in t.model.layers()}),
                "graphs": graphs,
                "changes": ask["changes"],
            }
            if ask.get("profile"):
                try:
                    row["budget"] = budget_of(t)
                except Exception:  # the speed is worth keeping without it
                    traceback.print_exc()
    return row


def budget_of(t: Any) -> dict[str, Any]:
    from nanorun.bench import budget

    tokens = t.config.train.batch_tokens
    shape = budget.Shape(t.loader.rows * t.config.model.context, tokens)
    predicted, measured = budget.predict(t.model.config, shape), budget.measure(t)
    parts = {
        part: {"predicted": predicted.get(part), "measured": measured["ns"].get(part)}
        for part in budget.PARTS
    }
    return {"parts": parts, "kernels": measured["kernels"]}


def rates(ask: dict[str, Any]) -> dict[str, Any]:
    from rates import measured_rates  # benchmarks/rates.py, which lies beside this script

    return measured_rates()


def main() -> None:
    from nanorun.bytecode import keep_bytecode

    keep_bytecode()
    if "--child" in sys.argv:
        ask = json.loads(sys.stdin.readline())
        measure = {"rates": rates, "start": start}.get(ask["do"], timed)
        print(json.dumps(measure(ask)), flush=True)
        return
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("work", type=Path, nargs="?")
    parser.add_argument("--predict", type=Path, metavar="FILE")
    parser.add_argument("--minutes", type=float, default=18)
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--levers", help="only these, by name, with semicolons")
    parser.add_argument("--depth", type=int, default=12)
    parser.add_argument("--batch-tokens", type=int, default=524_288)
    parser.add_argument("--steps", type=int, default=8, help="timed, of each variant")
    parser.add_argument("--fp8", default="all", help="what is meant by all on, should the loss ask for less")
    parser.add_argument(
        "--together", type=int, default=7, help="variants that start, and hold memory, at a time"
    )
    parser.add_argument("--gpu", default="h200", help="its name in the file's")
    parser.add_argument("--data", default="shared-shared-32768")
    parser.add_argument("--tokenizer", default="shared-32768")
    args = parser.parse_args()
    ALL_ON["fp8"] = args.fp8
    args.chosen = args.parts.split(",")
    if unknown := set(args.chosen) - set(PARTS):
        parser.error(f"no such part: {', '.join(sorted(unknown))}")

    if args.predict:
        budgets = predicted(args)
        write_budget(args.predict, budgets, args)
        for name, budget in budgets.items():
            show_budget(name, budget)
        return

    if args.work is None or not args.work.is_dir():
        parser.error("WORK must be a folder with text and tokenizer, as NANORUN_HOME is")
    args.work = args.work.resolve()
    from nanorun.provenance import record

    bench = Bench(args)
    bench.keep(**{k: v for k, v in record("levers").items() if v is not None})
    for part in PARTS:
        if part in args.chosen and part != "budget":
            begin = time.monotonic()
            try:
                getattr(bench, part)()
            except Exception as error:  # a part that fails must not cost the others
                traceback.print_exc()
                bench.failed(part, repr(error)[:300])
            print(f"-- {part}: {time.monotonic() - begin:.0f} s, {bench.left():.0f} s left", flush=True)
    print(json.dumps({"results": str(bench.path), "failed": bench.found["failed"]}))


if __name__ == "__main__":
    main()
