"""`bench train`: the speed of training as it is, on packed batches of real data, without saving or evaluating.

The first step is timed by itself, since it compiles: cold, with empty compile caches, and warm, in a second
process that finds what the first one left there. A few steps are thrown away, and the median of the rest is
the speed. Loss is that of the last step: a sign that what was timed was training.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from nanorun.config import Config
from nanorun.console import Progress, say, seconds
from nanorun.provenance import record
from nanorun.runs import Run
from nanorun.train import loop
from nanorun.train.base import Options, assemble

WARM_STEPS = 3
CACHES = (
    "TORCHINDUCTOR_CACHE_DIR",
    "TRITON_CACHE_DIR",
    "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR",
    "QUACK_CACHE_DIR",
)


def bench_train(
    config: Config, options: Options, steps: int = 20, fresh_caches: bool = True
) -> dict[str, Any]:
    """`fresh_caches=False` uses the compile caches as they are, for a quick look: no cold or warm start is told."""
    if not fresh_caches:
        return _timed(config, options, steps)
    with empty_caches():
        result = _timed(config, options, steps)
        result["first_step_cold_s"] = result.pop("first_step_s")
        result["cold_start"] = result.pop("start")
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        say("once more in a fresh process, with warm compile caches")
        warm = _first_step_elsewhere(config, options)
        result["first_step_warm_s"] = warm["total"] if warm is not None else None
        result["warm_start"] = warm
    return result


def _timed(config: Config, options: Options, steps: int) -> dict[str, Any]:
    start = Start()
    with tempfile.TemporaryDirectory() as folder:
        training = assemble(config, Run("bench", Path(folder), {}, None), options, None)
        tokens = config.train.batch_tokens
        with training.loader, Progress("timing steps", (1 + WARM_STEPS + steps) * tokens, "tok") as bar:
            pulses = training.device.type != "cuda"  # there a step may take hours, and says how far it is
            training.pulse = bar.advance if pulses else training.pulse
            first = start.first_step(training)
            took = start.spent()
            bar.advance(0 if pulses else tokens)
            bar.note(f"first step after {seconds(took['total'])}")
            done = []
            for _ in range(WARM_STEPS + steps):
                done.append(loop.train_step(training))
                bar.advance(0 if pulses else tokens, f"{done[-1].tokens / done[-1].seconds:,.0f} tokens/s")
    timed = done[WARM_STEPS:]
    median = statistics.median(step.seconds for step in timed)
    speed = timed[0].tokens / median
    cuda = training.device.type == "cuda"
    peak = training.peak_flops
    return record(
        "train",
        depth=config.model.depth,
        vocab_size=config.model.vocab_size,
        context=config.model.context,
        batch_tokens=config.train.batch_tokens,
        device_batch=training.loader.rows,
        attention=sorted({layer.attention.backend for layer in training.model.layers()}),
        fp8=training.model.config.fp8,
        products=loop.means(training)["products"],
        steps=steps,
        tokens_per_s=round(speed),
        ms_per_step=round(1e3 * median, 2),
        mfu=config.model.flops_per_token * speed / peak if peak else None,
        peak_gib=torch.cuda.max_memory_allocated() / 2**30 if cuda else None,
        first_step_s=took["total"],
        start=took,
        data_wait_share=sum(s.waited for s in timed) / sum(s.seconds for s in timed),
        first_loss=first.loss,
        loss=timed[-1].loss,
    )


@contextmanager
def empty_caches() -> Iterator[None]:
    """What compilers keep goes to a folder of its own, empty at first and gone afterwards."""
    before = {name: os.environ.get(name) for name in CACHES}
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        os.environ.update({name: str(Path(folder) / name.lower()) for name in CACHES})
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value


def _first_step_elsewhere(config: Config, options: Options) -> dict[str, float] | None:
    """Seconds from a fresh process's start of assembling to the end of its first step, and what they went to; None
    when it fails."""
    code = "import json, sys; from nanorun.bench.train import first_step; first_step(json.load(sys.stdin))"
    asked = json.dumps({"config": config.to_dict(), "options": asdict(options)})
    child = subprocess.run([sys.executable, "-c", code], input=asked, capture_output=True, text=True)
    if child.returncode != 0:
        return None
    took: dict[str, float] = json.loads(child.stdout.splitlines()[-1])
    return took


def first_step(asked: dict[str, Any]) -> None:
    config, options = Config.from_dict(asked["config"]), Options(**asked["options"])
    start = Start()
    with tempfile.TemporaryDirectory() as folder:
        training = assemble(config, Run("bench", Path(folder), {}, None), options, None)
        with training.loader:
            start.first_step(training)
    print(json.dumps(start.spent()))


class Start:
    """What the time until the end of the first step is spent on."""

    def __init__(self) -> None:
        self.marks = [time.perf_counter()]

    def first_step(self, training: loop.Training) -> loop.Step:
        self.mark()
        pulse = training.pulse

        def marked(tokens: int) -> None:
            self.mark()
            pulse(tokens)

        training.pulse = marked  # after each micro-batch: the first compiles, and the host waits for that
        done = loop.train_step(training)
        training.pulse = pulse
        self.mark()
        return done

    def mark(self) -> None:
        self.marks.append(time.perf_counter())

    def spent(self) -> dict[str, float]:
        """Seconds in all, and of them in parts."""
        marks = self.marks
        ends = {"assemble": marks[1], "first_micro": marks[2], "other_micros": marks[-2], "update": marks[-1]}
        before, took = marks[0], {}
        for name, at in ends.items():
            took[name], before = round(at - before, 1), at
        return {"total": round(marks[-1] - marks[0], 1), **took}
