"""Training speed on one GPU: correctness of the kernels, throughput with each optimization switched off, time by
part of the step, and throughput of larger models.

    python benchmarks/speed.py WORK --minutes 18 [--parts check,rates,warm,levers,budget,depths,start] [--steps 8]

WORK is a NANORUN_HOME with text and tokenizer (--data, --tokenizer). Parts run in this order, each measurement
in its own process; one that fails or hangs is reported and the next one begins. Several variants start concurrently,
since startup needs cores and not the GPU, and wait; then they are timed one by one. Results are written as they
arrive, to WORK/results/levers-d12-GPU.json and budget-d12-GPU.json; tables go to stdout, and one JSON line last.
`--predict FILE` measures nothing and writes the predicted budget.

    check    the GPU tests of every kernel                                          about  90 s
    rates    GEMMs of a d12 in bf16 and FP8, both passes; bytes/s of the kernels    about  15 s
    warm     every variant once, to fill the compile caches                         a few minutes, not timed
    levers   all optimizations, then each one off, a few steps each                 about  15 s each
    budget   nanoseconds per token by part, predicted and profiled, all on and bf16 with the levers
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
ALL_ON: dict[str, Any] = {"fp8": "all", "inplace_embedding_grads": True}
# What each variant changes relative to "all on"; `options` are options of the run.
LEVERS: dict[str, dict[str, Any]] = {
    "all on": {},
    "all off but FlashAttention": {
        "fp8": "none", "fused_rope": False, "fused_loss": False, "inplace_embedding_grads": False,
    },
    "CUDA graphs off": {"options": {"graphs": False}},
    "fp8 none (bf16)": {"fp8": "none"},
    "fp8 mlp": {"fp8": "mlp"},
    "fp8 layers": {"fp8": "layers"},
    "fp8 head's gradients": {"fp8": "head"},
    "sparse tables off": {"inplace_embedding_grads": False},
    "fused rope off, fp8 mlp": {"fused_rope": False, "fp8": "mlp"},
    "fused add and norm off": {"fused_add_norm": False},
    "fused ReLU² off": {"fused_relu2": False},
    "fused residual off": {"fused_residual": False},
    "ping-pong products off": {"pingpong": False},
    "fused loss off, fp8 layers": {"fused_loss": False, "fp8": "layers"},
    "fused rope off (bf16)": {"fp8": "none", "fused_rope": False},
    "attention flex and cuDNN": {"options": {"backend": "auto"}, "without_flash": True},
    "micro-batches of 16 rows": {"options": {"device_batch": 16}},
}  # fmt: skip
DEPTHS = (20, 24)
PROFILED = ("all on", "fp8 none (bf16)")


class SpeedBenchmark:
    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.until = time.monotonic() + 60 * args.minutes
        self.folder = args.work / "results"
        self.folder.mkdir(parents=True, exist_ok=True)
        self.path = self.folder / f"levers-d{args.depth}-{args.gpu}.json"
        self.found: dict[str, Any] = {"what": "levers", "depth": args.depth, "rows": [], "failed": {}}
        self.budgets: dict[str, Any] = {}

    def seconds_left(self) -> float:
        return self.until - time.monotonic()

    def write(self, **found: Any) -> None:
        self.found |= found
        self.path.write_text(json.dumps(self.found, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")

    def run(self, task: dict[str, Any], seconds: float) -> dict[str, Any] | None:
        """One measurement in its own process; None, with the error recorded, if it fails."""
        return self.result_of(Child(self, task), seconds)

    def result_of(self, child: "Child", seconds: float) -> dict[str, Any] | None:
        try:
            return child.result(min(seconds, max(self.seconds_left(), 1)))
        except RuntimeError as error:
            self.record_failure(child.name, str(error))
            return None

    def record_failure(self, name: str, error: str) -> None:
        print(f"{name}: FAILED, {error}", flush=True)
        self.write(failed={**self.found["failed"], name: error})

    def task(self, do: str, name: str, changes: dict[str, Any], **more: Any) -> dict[str, Any]:
        args = self.args
        fields = ("data", "tokenizer", "depth", "steps", "batch_tokens")
        common = {key: getattr(args, key) for key in fields}
        return {"do": do, "name": name, "changes": {**ALL_ON, **changes}, **common, **more}

    # The parts

    def check(self) -> None:
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--durations=8"]
        command += [f"tests/gpu/test_{part}_on_gpu.py" for part in ("fp8", "residual_norm", "gemm")]
        command += ["tests/gpu/test_model_on_gpu.py", "-k", "not backends"]
        begin = time.monotonic()
        try:
            done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)
            output, code = done.stdout, done.returncode
        except subprocess.TimeoutExpired as error:
            output, code = str(error.stdout), -1
        (self.folder / "check.log").write_text(output)
        seconds = round(time.monotonic() - begin, 1)
        summary = output.strip().splitlines()[-1] if output.strip() else "no output"
        print(f"check: exit code {code} after {seconds} s: {summary}", flush=True)
        self.write(check={"code": code, "seconds": seconds, "summary": summary})

    def rates(self) -> None:
        found = self.run({"do": "rates"}, 90)
        if found is not None:
            self.write(rates=found)
            print("\nGEMM TFLOP/s (32,768 tokens)")
            for row in found["matmuls"]:
                print("  " + "  ".join(f"{key} {value}" for key, value in row.items()))
            print("kernels")
            for row in found["kernels"]:
                print(f"  {row['name']:<28} {row['us']:>8} µs  {row['tb_s']:>6} TB/s", flush=True)

    def warm(self) -> None:
        """Fills the compile caches with every variant; nothing is timed."""
        tasks = [self.task("warm", name, LEVERS[name]) for name in self.selected_levers()]
        tasks += [{**self.task("warm", f"d{depth} all on", {}), "depth": depth} for depth in DEPTHS]
        with ThreadPoolExecutor(self.args.together) as pool:
            list(pool.map(lambda task: self.run(task, 400), tasks))

    def selected_levers(self) -> list[str]:
        return self.args.levers.split(";") if self.args.levers else list(LEVERS)

    def levers(self) -> None:
        names = self.selected_levers()
        profiled = [name for name in names if name in PROFILED and "budget" in self.args.chosen]
        tasks = [self.task("timed", name, LEVERS[name], profile=name in profiled) for name in names]
        for first in range(0, len(tasks), self.args.together):
            self.time_variants(tasks[first : first + self.args.together], "rows")

    def depths(self) -> None:
        tasks = [{**self.task("timed", f"d{d} all on", {}), "depth": d, "steps": 4} for d in DEPTHS]
        self.time_variants(tasks, "depths")

    def time_variants(self, tasks: list[dict[str, Any]], into: str) -> None:
        """Start all variants concurrently, since startup needs cores and not the GPU; then time them one by one
        while the others wait."""
        if self.seconds_left() < 60:
            for task in tasks:
                self.record_failure(f"timed {task['name']}", "no time left")
            return
        begin = time.monotonic()
        children = [Child(self, task) for task in tasks]
        until = begin + min(300, self.seconds_left())
        for child in children:
            child.wait_until_ready(until - time.monotonic())
        print(f"{len(tasks)} variants ready after {time.monotonic() - begin:.0f} s", flush=True)
        for child in children:
            row = self.result_of(child, 60)
            if row is None:
                continue
            name = child.task["name"]
            budget = row.pop("budget", None)
            if budget is not None:
                self.budgets[name] = budget
                path = self.folder / f"budget-d{self.args.depth}-{self.args.gpu}.json"
                write_budget(path, self.budgets, self.args)
                print_budget(name, budget)
            self.write(**{into: [*self.found.get(into, []), {"name": name, **row}]})
            print(
                f"{name:<28} {row['tokens_per_s']:>9,} tokens/s  {row['peak_gib']:.1f} GiB  "
                f"loss {row['loss']:.3f}  first step {row['first_step_s']} s  {row['graphs']} graphs",
                flush=True,
            )

    def start(self) -> None:
        result = self.run(self.task("start", "", {}, steps=16), 300)
        if result is not None:
            path = self.folder / f"train-d{self.args.depth}-{self.args.gpu}.json"
            path.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
            print(
                f"start: {result['tokens_per_s']:,} tokens/s, {result['peak_gib'] or 0:.1f} GiB, first step after "
                f"{result['first_step_cold_s']} s cold, {result['first_step_warm_s']} s warm",
                flush=True,
            )


class Child:
    """A measurement in its own process. A timed one reports when it is ready and waits for the signal to start."""

    def __init__(self, bench: SpeedBenchmark, task: dict[str, Any]) -> None:
        self.task = task
        self.name = f"{task['do']} {task.get('name', '')}".strip()
        env = {**os.environ, "NANORUN_HOME": str(bench.args.work), "PYTHONUNBUFFERED": "1"}
        if task.get("changes", {}).get("without_flash"):
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
        self.output: queue.Queue[str | None] = queue.Queue()  # None: the end
        threading.Thread(target=self._read_output, daemon=True).start()
        self._send(json.dumps(task))

    def wait_until_ready(self, seconds: float) -> None:
        """Or until it has failed, which `result` reports."""
        try:
            line = self.output.get(timeout=max(seconds, 1))
        except queue.Empty:
            self.process.kill()
            line = None
        if line is None:
            self.output.put(None)

    def result(self, seconds: float) -> dict[str, Any]:
        self._send("go")
        last = ""
        try:
            while (line := self.output.get(timeout=seconds)) is not None:
                last = line
        except queue.Empty:
            self.process.kill()
            raise RuntimeError(f"timed out after {seconds:.0f} s") from None
        if self.process.wait() or not last.startswith("{"):
            lines = [line for line in self.log.read_text().splitlines() if line.strip()]
            raise RuntimeError(lines[-1][:300] if lines else f"exit code {self.process.returncode}")
        found: dict[str, Any] = json.loads(last)
        return found

    def _send(self, line: str) -> None:
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):  # it has exited, and `result` says how
            self.process.stdin.write(line + "\n")
            self.process.stdin.flush()

    def _read_output(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.output.put(line.strip())
        self.output.put(None)


def predicted_budgets(args: argparse.Namespace) -> dict[str, Any]:
    """The budgets of the profiled variants, without measurements."""
    from nanorun.bench import budget
    from nanorun.config import scale_model
    from nanorun.model.fast.recipe import Recipe

    found = {}
    for name in PROFILED:
        config, recipe = scale_model(args.depth, 32_768), Recipe(**{**ALL_ON, **LEVERS[name]})
        ns = budget.predict(config, 32 * config.context, args.batch_tokens, recipe)
        found[name] = {"parts": {p: {"predicted": ns.get(p), "measured": None} for p in budget.PARTS}}
    return found


def write_budget(path: Path, budgets: dict[str, Any], args: argparse.Namespace) -> None:
    from nanorun.provenance import record, write_result

    write_result(record("budget", depth=args.depth, step_tokens=args.batch_tokens, variants=budgets), path)


def print_budget(name: str, budget: dict[str, Any]) -> None:
    print(f"\nns/token, {name}: predicted, measured")
    for part, row in budget["parts"].items():
        print(f"  {part:<28} {row['predicted'] or 0:>8.1f} {row['measured'] or 0:>8.1f}")
    sums = [sum(row[k] or 0 for row in budget["parts"].values()) for k in ("predicted", "measured")]
    print(f"  {'sum':<28} {sums[0]:>8.1f} {sums[1]:>8.1f}\n", flush=True)


# In the measuring processes


def configured(task: dict[str, Any]) -> tuple[Any, Any]:
    from nanorun.config import Horizon
    from nanorun.model.fast.recipe import Recipe
    from nanorun.model.kernels import flash
    from nanorun.train import base

    if os.environ.get("NANORUN_WITHOUT_FLASH"):
        flash.is_supported = lambda device, head_dim: False  # type: ignore[assignment]
    changes = {k: v for k, v in task["changes"].items() if k not in ("options", "without_flash")}
    config = base.configure(
        task["depth"],
        horizon=Horizon(),
        batch_tokens=task["batch_tokens"],
        data=task["data"],
        tokenizer=task["tokenizer"],
    )
    recipe = Recipe(**changes)
    return config, base.BaseOptions(recipe=recipe, **task["changes"].get("options", {}))


def start(task: dict[str, Any]) -> dict[str, Any]:
    from nanorun.bench.train import bench_train

    config, options = configured(task)
    return bench_train(config, options, task["steps"])


def timed(task: dict[str, Any]) -> dict[str, Any]:
    """Time the steps of one variant; for `warm`, only the first."""
    import statistics
    import tempfile

    import torch
    from torch._dynamo.utils import counters

    from nanorun.runs import Run
    from nanorun.train import base, loop

    begin = time.perf_counter()
    config, options = configured(task)
    with tempfile.TemporaryDirectory() as folder:
        t = base.assemble(config, Run("bench", Path(folder)), options, None)
        with t.loader:
            loop.train_step(t)
            first = time.perf_counter() - begin
            if task["do"] == "warm":
                return {"first_step_s": round(first, 1)}
            print("ready", flush=True)
            if not sys.stdin.readline():
                sys.exit("the parent process has exited")
            steps = [loop.train_step(t) for _ in range(3 + task["steps"])][3:]
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
                "attention": sorted(set(t.model.batch_attention.backends)),
                "graphs": graphs,
                "changes": task["changes"],
            }
            if task.get("profile"):
                try:
                    row["budget"] = budget_of(t)
                except Exception:  # the speed is worth keeping without it
                    traceback.print_exc()
    return row


def budget_of(t: Any) -> dict[str, Any]:
    from nanorun.bench import budget

    micro_tokens = t.loader.rows * t.config.model.context
    predicted = budget.predict(t.model.config, micro_tokens, t.config.train.batch_tokens, t.recipe)
    measured = budget.measure(t)
    parts = {
        part: {"predicted": predicted.get(part), "measured": measured["ns"].get(part)}
        for part in budget.PARTS
    }
    return {"parts": parts, "kernels": measured["kernels"]}


def rates(task: dict[str, Any]) -> dict[str, Any]:
    from rates import measure_rates

    return measure_rates()


def main() -> None:
    from nanorun.bytecode import keep_bytecode

    keep_bytecode()
    if "--child" in sys.argv:
        task = json.loads(sys.stdin.readline())
        measure = {"rates": rates, "start": start}.get(task["do"], timed)
        print(json.dumps(measure(task)), flush=True)
        return
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("work", type=Path, nargs="?")
    parser.add_argument("--predict", type=Path, metavar="FILE")
    parser.add_argument("--minutes", type=float, default=18)
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--levers", help="only these variants, separated by semicolons")
    parser.add_argument("--depth", type=int, default=12)
    parser.add_argument("--batch-tokens", type=int, default=524_288)
    parser.add_argument("--steps", type=int, default=8, help="timed steps of each variant")
    parser.add_argument("--fp8", default="all", help="FP8 setting of the variant 'all on'")
    parser.add_argument(
        "--together", type=int, default=7, help="variants that start, and hold memory, concurrently"
    )
    parser.add_argument("--gpu", default="h200", help="name of the GPU in the file names")
    parser.add_argument("--data", default="shared-shared-32768")
    parser.add_argument("--tokenizer", default="shared-32768")
    args = parser.parse_args()
    ALL_ON["fp8"] = args.fp8
    args.chosen = args.parts.split(",")
    if unknown := set(args.chosen) - set(PARTS):
        parser.error(f"unknown parts: {', '.join(sorted(unknown))} (choose from {', '.join(PARTS)})")

    if args.predict:
        budgets = predicted_budgets(args)
        write_budget(args.predict, budgets, args)
        for name, budget in budgets.items():
            print_budget(name, budget)
        return

    if args.work is None or not args.work.is_dir():
        parser.error("WORK must be a NANORUN_HOME with text and tokenizer")
    args.work = args.work.resolve()
    from nanorun.provenance import record

    bench = SpeedBenchmark(args)
    bench.write(**{k: v for k, v in record("levers").items() if v is not None})
    for part in PARTS:
        if part in args.chosen and part != "budget":
            begin = time.monotonic()
            try:
                getattr(bench, part)()
            except Exception as error:  # the other parts still run
                traceback.print_exc()
                bench.record_failure(part, repr(error)[:300])
            print(
                f"-- {part}: {time.monotonic() - begin:.0f} s, {bench.seconds_left():.0f} s left", flush=True
            )
    print(json.dumps({"results": str(bench.path), "failed": bench.found["failed"]}))


if __name__ == "__main__":
    main()
