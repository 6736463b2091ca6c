"""The kernels of a decode step on this GPU: error and speed, one by one and together.

    python benchmarks/decode_kernels.py
    python benchmarks/decode_kernels.py --depths 12 --batches 1 128 --context 1024

Every figure is the median of CUDA-graph replays. A kernel alone is timed back to back over enough copies of
its weights (or slots of the cache) to exceed L2, so its GB/s are those of device memory; with programmatic
dependent launch (PDL) such a chain overlaps as a step does. Each kernel is timed with a few tilings; the step with
the tilings of `step.tune` ("default") and then "tuned": each kernel in turn gets the tiling that makes the step
fastest, which can differ from the one fastest alone. A worker process for each model and batch size first compiles
into Triton's cache; what is not compiled or measured within --seconds is skipped, with a note. Prints a table of the
best tilings (--all: every one) and, last, one JSON line with the steps; --save writes everything to a file.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from nanorun.config import ModelConfig, scale_model
from nanorun.infer.cache import Cache
from nanorun.infer.forward import decode
from nanorun.infer.kernels.attention import KVSplit, combine_and_project, rope_cache_attention
from nanorun.infer.kernels.decode import FastDecode, Tuning, tune
from nanorun.infer.kernels.elementwise import relu2_, residual_norm, softcap
from nanorun.infer.kernels.linear import Tile, linear_residual, norm_linear, padded
from nanorun.infer.kernels.weights import DecodeWeights
from nanorun.infer.model import Matrix, inference_copy
from nanorun.model.gpt import GPT, build
from nanorun.provenance import record, write_result

CUDA = torch.device("cuda")
BEYOND_L2 = 300_000_000  # bytes; an H200 has 60 MB
VOCAB = 32_768


@dataclass(frozen=True)
class Candidate:
    kernel: str
    label: str
    bytes: int
    call: Callable[[int], Any]  # launches the kernel on the i-th copy of its data
    copies: int
    choice: Any = None  # the Tile or KVSplit, for the tuned step
    way: str = ""  # how GEMMs are computed: gemv, gemm or cublas


def replay_us(launches: Callable[[], Any], count: int, replays: int = 15) -> float:
    """Median microseconds of one of `count` launches, by graph replay."""
    launches()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launches()
    times = []
    for _ in range(replays + 2):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return sorted(times[2:])[replays // 2] * 1000 / count


@torch.no_grad()
def random_model(depth: int) -> GPT:
    """With weights that are exact in bf16."""
    model = build(scale_model(depth, VOCAB), CUDA, torch.bfloat16)
    for name, parameter in model.named_parameters():
        if parameter.ndim == 2:
            parameter.normal_(std=1.0 if "embed" in name else parameter.size(1) ** -0.5)
        parameter.copy_(parameter.bfloat16())
    return model


@torch.no_grad()
def full_cache(config: ModelConfig, slots: int) -> Cache:
    cache = Cache(config, slots, CUDA, torch.bfloat16)
    for keys, values in zip(cache.k, cache.v, strict=True):
        keys.copy_(torch.nn.functional.rms_norm(torch.randn_like(keys), (config.head_dim,)) * config.qk_gain)
        values.normal_()
    cache.tokens.random_(0, VOCAB)
    return cache


def matrix_tiles(batch: int, tensor_cores: bool, kernel: str) -> list[Tile]:
    if tensor_cores:
        at_once = 4096 // padded(batch)
        if kernel == "head":
            return [Tile(64, min(at_once, 128), 4, 4), Tile(128, min(at_once, 64), 4, 4)]
        tiles = [Tile(16, at_once, 4, 4), Tile(32, at_once, 4, 3)]
        return [replace(t, inputs=2 * t.inputs) for t in tiles] if kernel == "down" else tiles
    if kernel == "head":
        return [Tile(16, 256, 4), Tile(8, 256, 4)]
    if kernel == "out":
        return [Tile(4, 128, 4), Tile(8, 128, 4), Tile(4, 128, 8)]
    return [Tile(4, 256, 4), Tile(8, 256, 8), Tile(8, 256, 4)]


def splits_to_try(batch: int) -> list[KVSplit]:
    if batch <= 8:
        few, some, many = (4, 8, 16) if batch == 1 else (1, 2, 4)
        wide = [KVSplit(count, 64, 4, 2, preload=True) for count in (some, few, many)]
        dense = [KVSplit(count, 64, 4, 2, preload=True, tensor_cores=True) for count in (some, many)]
        return [
            *wide,
            *dense,
            KVSplit(some, 64, 8, 2, preload=True),
            KVSplit(many, 32, 4, 2, preload=True, tensor_cores=True),
        ]
    if batch < 100:
        return [
            KVSplit(count, 64, 4, 3, tensor_cores=tensor_cores)
            for count in (1, 2, 4)
            for tensor_cores in (False, True)
        ]
    shapes = [(64, 4, 3, False), (64, 4, 3, True), (64, 4, 4, True), (32, 4, 5, False), (128, 8, 3, False)]
    return [
        KVSplit(1, keys, warps, stages, tensor_cores=tensor_cores)
        for keys, warps, stages, tensor_cores in shapes
    ]


def copies_of(rows: int, inputs: int) -> list[Matrix]:
    count = min(max(BEYOND_L2 // (rows * inputs * 2), 2), 128)
    stack = torch.empty(count, rows, inputs, dtype=torch.bfloat16, device=CUDA).normal_(std=inputs**-0.5)
    return [Matrix(weight) for weight in stack]


def candidates(weights: DecodeWeights, batch: int, context: int, pdl: bool) -> list[Candidate]:
    """Every kernel of a step with each of its tilings."""
    config = weights.config
    width, hidden = config.dim, config.mlp_ratio * config.dim
    x = torch.randn(batch, width, device=CUDA)
    extra = torch.randn_like(x)
    h = torch.randn(batch, hidden, device=CUDA, dtype=torch.bfloat16)
    narrow = h[:, :width].contiguous()
    rows = weights.qkv_rows(config.depth - 1)
    qkv = torch.randn(batch, weights.qkv[-1].weight.size(0), device=CUDA, dtype=torch.bfloat16)
    logits = torch.empty(batch, VOCAB, device=CUDA)
    sizes = {
        "qkv": (qkv.size(1), width),
        "out": (width, width),
        "up": (hidden, width),
        "down": (width, hidden),
    }
    made: list[Candidate] = []

    for kernel, (outputs, inputs) in (sizes | {"head": (VOCAB, width)}).items():
        matrices = copies_of(outputs, inputs)
        count, size = len(matrices), outputs * inputs * 2
        for tensor_cores in [False] * (batch <= 8) + [True] * (8 <= batch <= 64):
            for tile in matrix_tiles(batch, tensor_cores, kernel):
                if kernel == "qkv":

                    def call(i, m=matrices, t=tile, d=tensor_cores):
                        norm_linear(x, m[i], qkv, tile=t, rows=rows, tensor_cores=d, pdl=pdl)
                elif kernel == "up":

                    def call(i, m=matrices, t=tile, d=tensor_cores):
                        norm_linear(x, m[i], h, tile=t, activation="relu2", tensor_cores=d, pdl=pdl)
                elif kernel == "head":

                    def call(i, m=matrices, t=tile, d=tensor_cores):
                        norm_linear(
                            x, m[i], logits, tile=t, activation="softcap", cap=15.0, tensor_cores=d, pdl=pdl
                        )
                elif kernel == "out" and not tensor_cores:
                    splits = 8 if batch == 1 else 4
                    partial = torch.randn(
                        batch, config.heads, splits, config.head_dim, device=CUDA
                    ).bfloat16()
                    denominators = torch.rand(batch, config.heads, splits, device=CUDA) + 1

                    def call(i, m=matrices, t=tile, s=partial, n=denominators):
                        combine_and_project(s, n, m[i], x, extra, tile=t, pdl=pdl)
                else:

                    def call(i, m=matrices, t=tile, d=tensor_cores, source=h if kernel == "down" else narrow):
                        linear_residual(
                            source,
                            m[i],
                            x,
                            extra,
                            tile=t,
                            alpha=0.5,
                            beta=0.1,
                            extra=extra,
                            tensor_cores=d,
                            pdl=pdl,
                        )

                way = "gemm" if tensor_cores else "gemv"
                label = f"{way} {tile.rows}x{tile.inputs} w{tile.warps} s{tile.stages}"
                made.append(Candidate(kernel, label, size, call, count, tile, way))
        if batch >= 8:
            source = h if kernel == "down" else narrow
            y = torch.empty(batch, outputs, device=CUDA, dtype=torch.bfloat16)

            def product(i, m=matrices, source=source, y=y):
                torch.mm(source, m[i].weight.T, out=y)

            made.append(Candidate(kernel, "cublas", size, product, count, None, "cublas"))

    token = torch.zeros(batch, dtype=torch.int32, device=CUDA)
    positions = torch.full((batch,), context - 1, dtype=torch.int32, device=CUDA)
    for window in sorted({config.window(layer) for layer in range(config.depth)}):
        seen = min(window, context)
        row_bytes = 2 * config.kv_heads * config.head_dim * 2
        count = min(max(BEYOND_L2 // (batch * seen * row_bytes), 2), 128)
        shape = (count * batch, config.kv_heads, window, config.head_dim)
        keys = torch.empty(shape, dtype=torch.bfloat16, device=CUDA).uniform_(-1, 1)
        values = torch.empty(shape, dtype=torch.bfloat16, device=CUDA).normal_()
        slots = torch.randperm(count * batch, device=CUDA).view(count, batch).int()
        for split in splits_to_try(batch):
            partial = torch.empty(batch, config.heads, split.splits, config.head_dim, device=CUDA).bfloat16()
            denominators = torch.empty(batch, config.heads, split.splits, device=CUDA)

            def attend(i, s=split, o=partial, n=denominators, k=keys, v=values, at=slots, w=window):
                rope_cache_attention(
                    qkv, k, v, at[i], positions, weights.cos, weights.sin, weights.heads, w, o, n,
                    token, weights.value_embeds[config.depth - 1], split=s, pdl=pdl,
                )  # fmt: skip

            label = f"{split.splits} x {split.keys} keys w{split.warps} s{split.stages}"
            label += " preload" * split.preload + " tensor cores" * split.tensor_cores
            name = f"attention {window}"
            made.append(Candidate(name, label, batch * seen * row_bytes, attend, count, split))

    raw, normed = logits.bfloat16(), torch.empty_like(narrow)
    small: dict[str, Callable[[int], Any]] = {}
    if batch > 8:
        small["residual_norm"] = lambda i: residual_norm(x, narrow, extra, normed, pdl=pdl)
        ones = torch.ones_like(h)  # a fixed point of this in-place kernel
        small["relu2"] = lambda i: relu2_(ones, pdl=pdl)
        small["softcap"] = lambda i: softcap(raw, logits, 15.0, pdl=pdl)
    made += [Candidate(name, "", 0, call, 20) for name, call in small.items()]
    torch.cuda.synchronize()  # a kernel launched with PDL reads slots and positions before it waits
    return made


def tuned_step(
    base: Tuning, tried: list[Candidate], time_of: Callable[[Tuning], float], deadline: float
) -> Tuning:
    """Set each kernel's tiling in turn to the one that makes the whole step fastest."""
    best, best_us = base, time_of(base)
    for candidate in tried:
        if time.monotonic() > deadline:
            break
        window = candidate.kernel.removeprefix("attention ")
        if window != candidate.kernel:
            changed = replace(best, splits={**best.splits, int(window): candidate.choice})
        elif candidate.choice is not None and candidate.way == base.matmul:
            changed = replace(best, **{candidate.kernel: candidate.choice})
        else:
            continue
        us = time_of(changed)
        if us < best_us * 0.998:
            best, best_us = changed, us
    return best


@torch.no_grad()
def step_us(weights: DecodeWeights, cache: Cache, batch: int, context: int, tuning: Tuning) -> float:
    fast = FastDecode(weights, cache, tuning)
    slots = torch.arange(batch, device=CUDA, dtype=torch.int32)
    tokens = torch.randint(0, VOCAB, (batch,), device=CUDA, dtype=torch.int32)
    positions = torch.full((batch,), context - 1, device=CUDA, dtype=torch.int32)

    def run() -> None:
        fast(slots, tokens, positions)

    return replay_us(run, 1, replays=40)


def run_once(weights: DecodeWeights, cache: Cache, batch: int, tuning: Tuning) -> float:
    """Only to compile the kernels."""
    rows = torch.arange(batch, device=CUDA, dtype=torch.int32)
    FastDecode(weights, cache, tuning)(rows, rows, rows)
    return 0.0


@torch.no_grad()
def step_error(model: GPT, weights: DecodeWeights, cache: Cache, batch: int, tuning: Tuning) -> float:
    """‖fast - float64‖ / ‖float64‖ of the logits, at odd lengths."""
    slots = torch.randperm(batch, device=CUDA)
    tokens = torch.randint(0, VOCAB, (batch,), device=CUDA)
    positions = torch.randint(0, weights.config.context, (batch,), device=CUDA)
    exact = Cache(cache.config, cache.slots, CUDA, torch.float64)
    for mine, theirs in zip(
        (*exact.k, *exact.v, exact.tokens), (*cache.k, *cache.v, cache.tokens), strict=True
    ):
        mine.copy_(theirs)
    fast = FastDecode(weights, cache, tuning)(slots, tokens, positions).double()
    truth = decode(inference_copy(model, torch.float64), exact, slots, tokens, positions)
    return ((fast - truth).norm() / truth.norm()).item()


def step_bytes(config: ModelConfig, batch: int, context: int) -> int:
    """Bytes that a step reads: the weights, and the keys and values within each layer's window."""
    seen = sum(min(config.window(layer), context) for layer in range(config.depth))
    return 2 * config.scaling_parameters + batch * seen * 2 * config.kv_heads * config.head_dim * 2


def tunings(config: ModelConfig, batch: int) -> dict[str, Tuning]:
    base = tune(config, batch, CUDA)
    ways: dict[str, Tuning] = {"default": base, "default, no PDL": replace(base, pdl=False)}
    if batch <= 8:
        ways["gemv"] = replace(tune(config, 1, CUDA), splits=base.splits)
    if 4 <= batch <= 64:
        ways["gemm"] = replace(tune(config, batch, CUDA, int8=True), splits=base.splits, matmul="gemm")
        ways["cublas"] = replace(tune(config, 128, CUDA), splits=base.splits)
    return {way: t for way, t in ways.items() if way.startswith("default") or t.matmul != base.matmul}


def measure(
    model: GPT, weights: DecodeWeights, batch: int, context: int, deadline: float, compile_only: bool
) -> list[dict[str, Any]]:
    config = weights.config
    cache = full_cache(config, batch)
    found: list[dict[str, Any]] = []
    shape = {"depth": config.depth, "batch": batch}
    ways = tunings(config, batch)

    def time_step(label: str, tuning: Tuning) -> float:
        us = step_us(weights, cache, batch, context, tuning)
        label = f"{label} ({tuning.matmul})"
        size = step_bytes(config, batch, context)
        found.append({**shape, "kernel": "STEP", "label": label, "us": us, "bytes": size, "best": True})
        return us

    if not compile_only:
        error = step_error(model, weights, cache, batch, ways["default"])
        found.append({**shape, "kernel": "ERROR", "label": "step against float64", "error": error})
    step_times = {label: time_step(label, tuning) for label, tuning in ways.items()}
    fastest: dict[str, dict[str, Any]] = {}
    tried = candidates(weights, batch, context, ways["default"].pdl)
    for candidate in tried:
        if time.monotonic() > deadline:
            found.append({**shape, "kernel": "NOTE", "label": "out of time: the sweep was cut short"})
            return found
        if compile_only:
            candidate.call(0)
            continue

        def chain(candidate: Candidate = candidate) -> None:
            for i in range(candidate.copies):
                candidate.call(i)

        us = replay_us(chain, candidate.copies)
        row = {
            **shape,
            "kernel": candidate.kernel,
            "label": candidate.label,
            "us": us,
            "bytes": candidate.bytes,
        }
        found.append(row)
        key = f"{candidate.kernel} {candidate.way}"
        if key not in fastest or us < fastest[key]["us"]:
            fastest[key] = row
    for row in fastest.values():
        row["best"] = True
    if compile_only:
        for way in (tuning for tuning in ways.values() if tuning.pdl):
            tuned_step(way, tried, lambda tuning: run_once(weights, cache, batch, tuning), deadline)
    else:
        start = ways[min(step_times, key=lambda label: step_times[label])]
        tuned = tuned_step(
            start, tried, lambda tuning: step_us(weights, cache, batch, context, tuning), deadline
        )
        time_step("tuned", tuned)
        found[-1]["tuning"] = str(tuned)
    return found


def print_table(found: list[dict[str, Any]], bandwidth: float) -> None:
    print(f"{'d':>3} {'B':>4} {'kernel':<15} {'tiling':<32} {'µs':>8} {'GB/s':>6} {'of copy':>7}")
    for row in found:
        start = f"{row['depth']:>3} {row['batch']:>4} {row['kernel']:<15} {row['label']:<32}"
        if "us" not in row:
            print(f"{start} {row.get('error', float('nan')):>8.4f}")
            continue
        speed = row["bytes"] / row["us"] / 1e3
        tail = f"{speed:>6.0f} {speed / bandwidth:>7.0%}" if row["bytes"] else ""
        print(f"{start} {row['us']:>8.2f} {tail}")


def copy_bandwidth() -> float:
    """GB/s of a device copy, bytes read and written both counted."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device=CUDA)
    target = torch.empty_like(source)
    return 2 * source.numel() / replay_us(lambda: target.copy_(source), 1) / 1e3


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--depths", type=int, nargs="+", default=[12, 20])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32, 128])
    parser.add_argument("--context", type=int, default=1024, help="tokens in each sequence")
    parser.add_argument("--seconds", type=float, default=85.0, help="sweeps stop after this long")
    parser.add_argument("--all", action="store_true", help="print every tiling, not only the best")
    parser.add_argument("--compile-only", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--save", type=Path)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("No GPU found.")
    begin = time.monotonic()
    cells = [(depth, batch) for depth in args.depths for batch in args.batches]
    if not args.compile_only:
        command = [sys.executable, __file__, "--compile-only", "--seconds", str(args.seconds / 2)]
        workers = [
            subprocess.Popen([*command, "--depths", str(depth), "--batches", str(batch)])
            for depth, batch in cells
        ]
        for worker in workers:
            worker.wait()
        print(f"{len(cells)} workers compiled for {time.monotonic() - begin:.0f} s", flush=True)
    found: list[dict[str, Any]] = []
    model: GPT | None = None
    for left, (depth, batch) in zip(range(len(cells), 0, -1), cells, strict=True):
        if model is None or model.config.depth != depth:
            model = random_model(depth)
            weights = DecodeWeights.of(inference_copy(model))
        now = time.monotonic()
        deadline = now + (begin + args.seconds - now) / left
        found += measure(model, weights, batch, args.context, deadline, args.compile_only)
        torch.cuda.empty_cache()
    if args.compile_only:
        return
    bandwidth = copy_bandwidth()
    shown = [row for row in found if args.all or "us" not in row or row.get("best")]
    print_table(shown, bandwidth)
    result = record("decode kernels", context=args.context, copy_gb_per_s=bandwidth, rows=found)
    write_result(result, args.save)
    steps = [row for row in found if row["kernel"] in ("STEP", "ERROR")]
    print(json.dumps({**result, "rows": steps}, ensure_ascii=False), flush=True)
    inaccurate = [row for row in steps if row.get("error", 0.0) > 0.03]
    if inaccurate:
        sys.exit(f"{len(inaccurate)} steps differ from float64 by more than 3%.")


if __name__ == "__main__":
    main()
