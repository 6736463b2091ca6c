"""`bench train`: the speed of training as it is, on packed batches of real data, without saving or evaluating.

The first step is timed by itself, since it compiles; then a few are thrown away, and the median of the rest
is the speed. Loss is that of the last step: a sign that what was timed was training.
"""

import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from nanorun.bench.record import record
from nanorun.config import Config
from nanorun.runs import Run
from nanorun.train import loop
from nanorun.train.base import Options, assemble

WARM_STEPS = 3


def bench_train(config: Config, options: Options, steps: int = 20) -> dict[str, Any]:
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        training = assemble(config, Run("bench", Path(folder), {}, None), options, None)
        with training.loader:
            first = loop.train_step(training)
            until_first = time.perf_counter() - begin
            timed = [loop.train_step(training) for _ in range(WARM_STEPS + steps)][WARM_STEPS:]
    seconds = statistics.median(step.seconds for step in timed)
    speed = timed[0].tokens / seconds
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
        steps=steps,
        tokens_per_s=round(speed),
        ms_per_step=round(1e3 * seconds, 2),
        mfu=config.model.flops_per_token * speed / peak if peak else None,
        peak_gib=torch.cuda.max_memory_allocated() / 2**30 if cuda else None,
        seconds_before_first_step=round(until_first, 1),
        data_wait_share=sum(s.waited for s in timed) / sum(s.seconds for s in timed),
        first_loss=first.loss,
        loss=timed[-1].loss,
    )
