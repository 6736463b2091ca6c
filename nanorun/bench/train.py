"""`bench train`: training throughput on packed batches of real data, without checkpoints or evaluation.

The first step is timed separately, since it compiles: cold, with empty compile caches, and warm, in a second
process that finds the caches of the first. A few steps are discarded, and the median of the rest gives the
throughput. The loss is that of the last step: evidence that what was timed was training.
"""

import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, redirect_stderr
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from nanorun.config import Config
from nanorun.console import Progress, say, seconds
from nanorun.provenance import record
from nanorun.train import loop
from nanorun.train.base import BaseOptions
from nanorun.train.warmup import started

WARMUP_STEPS = 3
CACHE_VARIABLES = (
    "TORCHINDUCTOR_CACHE_DIR",
    "TRITON_CACHE_DIR",
    "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR",
    "QUACK_CACHE_DIR",
)


def bench_train(
    config: Config, options: BaseOptions, steps: int = 20, fresh_caches: bool = True
) -> dict[str, Any]:
    """`fresh_caches=False` uses the existing compile caches, for a quick look: neither a cold nor a warm start is
    measured."""
    if not fresh_caches:
        return _measure(config, options, steps)
    with empty_caches():
        result = _measure(config, options, steps)
        result["first_step_cold_s"] = result.pop("first_step_s")
        result["cold_start"] = result.pop("start")
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        say("again in a new process, with warm compile caches")
        warm = _first_step_in_new_process(config, options)
        result["first_step_warm_s"] = warm["total"] if warm is not None else None
        result["warm_start"] = warm
    return result


def _measure(config: Config, options: BaseOptions, steps: int) -> dict[str, Any]:
    with started(config, options) as (training, start):
        tokens = config.train.batch_tokens
        with Progress("timing steps", (1 + WARMUP_STEPS + steps) * tokens, "tok") as bar:
            # Off CUDA a step may take hours, so progress advances with each micro-batch.
            by_micro_batch = training.device.type != "cuda"
            if by_micro_batch:
                training.on_micro_batch = bar.advance
            first, startup = timed_first_step(training, start)
            bar.advance(0 if by_micro_batch else tokens)
            bar.note(f"first step after {seconds(startup['total'])}")
            done = []
            for _ in range(WARMUP_STEPS + steps):
                done.append(loop.train_step(training))
                speed = f"{done[-1].tokens / done[-1].seconds:,.0f} tokens/s"
                bar.advance(0 if by_micro_batch else tokens, speed)
    timed = done[WARMUP_STEPS:]
    median = statistics.median(step.seconds for step in timed)
    tokens_per_s = timed[0].tokens / median
    peak = training.peak_flops
    return record(
        "train",
        depth=config.model.depth,
        vocab_size=config.model.vocab_size,
        context=config.model.context,
        batch_tokens=config.train.batch_tokens,
        device_batch=training.loader.rows,
        attention=sorted(set(training.model.batch_attention.backends)),
        fp8=training.recipe.fp8,
        gemm_library="quack" if training.recipe.uses_quack else "torch",
        steps=steps,
        tokens_per_s=round(tokens_per_s),
        ms_per_step=round(1e3 * median, 2),
        mfu=config.model.flops_per_token * tokens_per_s / peak if peak else None,
        peak_gib=torch.cuda.max_memory_allocated() / 2**30 if training.device.type == "cuda" else None,
        first_step_s=startup["total"],
        start=startup,
        data_wait_share=sum(s.waited for s in timed) / sum(s.seconds for s in timed),
        first_loss=first.loss,
        loss=timed[-1].loss,
    )


@contextmanager
def empty_caches() -> Iterator[None]:
    """Points the compilers' caches to a temporary folder, empty at first."""
    before = {name: os.environ.get(name) for name in CACHE_VARIABLES}
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        os.environ.update({name: str(Path(folder) / name.lower()) for name in CACHE_VARIABLES})
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value


def _first_step_in_new_process(config: Config, options: BaseOptions) -> dict[str, float] | None:
    """Seconds from the start of assembly to the end of the first step, by part; None when the process fails."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        try:
            return pool.submit(_first_step, config, options).result()
        except Exception:
            return None


def _first_step(config: Config, options: BaseOptions) -> dict[str, float]:
    with (
        open(os.devnull, "w") as nowhere,
        redirect_stderr(nowhere),
        started(config, options) as (training, start),
    ):
        return timed_first_step(training, start)[1]


def timed_first_step(training: loop.Training, start: float) -> tuple[loop.Step, dict[str, float]]:
    """The first step, and the seconds since `start` by part: `total` and what it is made of."""
    times = [start, time.perf_counter()]
    on_micro_batch = training.on_micro_batch

    def timed_micro_batch(tokens: float) -> None:
        times.append(time.perf_counter())
        on_micro_batch(tokens)

    # After each micro-batch: the first compiles, and the host waits for that.
    training.on_micro_batch = timed_micro_batch
    step = loop.train_step(training)
    training.on_micro_batch = on_micro_batch
    times.append(time.perf_counter())
    ends = {"assemble": times[1], "first_micro": times[2], "other_micros": times[-2], "update": times[-1]}
    previous, parts = start, {}
    for name, end in ends.items():
        parts[name], previous = round(end - previous, 1), end
    return step, {"total": round(times[-1] - start, 1), **parts}
