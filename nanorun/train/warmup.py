"""`warmup`: compile ahead, so that the next run of this shape begins at once.

It is a run's own first step and first evaluation, on its own text, thrown away afterwards: what stays are the
compilers' caches on disk, which a run finds as long as torch, the model's code and the shapes are the same.
"""

import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from nanorun.config import Config
from nanorun.runs import Run
from nanorun.train import base, loop


def warm_up(config: Config, options: base.BaseOptions) -> dict[str, Any]:
    """Seconds until the first step is done, the second, and an evaluation of one batch."""
    config = replace(config, train=replace(config.train, eval_tokens=1))
    with started(config, options) as (training, begin):
        assembled = time.perf_counter() - begin
        loop.train_step(training)
        first = time.perf_counter() - begin
        loop.train_step(training)
        second = time.perf_counter() - begin
        training.evaluate()
        evaluated = time.perf_counter() - begin
    return {
        "depth": config.model.depth,
        "device": str(training.device),
        "torch": torch.__version__,
        "assembled_s": round(assembled, 2),
        "first_step_s": round(first, 2),
        "second_step_s": round(second - first, 2),
        "evaluation_s": round(evaluated - second, 2),
    }


@contextmanager
def started(config: Config, options: base.BaseOptions) -> Iterator[tuple[loop.Training, float]]:
    """A training in a temporary run folder, and when its assembly started."""
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        training = base.assemble(config, Run("temporary", Path(folder)), options, None)
        with training.loader:
            yield training, start
