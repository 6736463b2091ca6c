"""A home with training data for a GPU test, and a model that is small enough to be trained many times."""

from dataclasses import replace
from pathlib import Path

import pytest

from nanorun.config import Config, OptimConfig, TrainConfig, scale_model
from nanorun.data.get import make_sample
from nanorun.text.tokenizer import PATTERN, SPECIAL_TOKENS, Tokenizer

STEPS = 120


def make_home(home: Path) -> Path:
    """A home with the sample world and a byte tokenizer, which needs no training."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NANORUN_HOME", str(home))
        make_sample(200_000)
    special = {name: 256 + i for i, name in enumerate(SPECIAL_TOKENS)}
    ranks = {bytes([i]): i for i in range(256)}
    (home / "tokenizers" / "bytes").mkdir(parents=True)
    Tokenizer("bytes", PATTERN, ranks, special).save(home / "tokenizers" / "bytes")
    return home


def small(steps: int = STEPS) -> Config:
    model = scale_model(
        3, 256 + len(SPECIAL_TOKENS), context=256, dim=128, heads=2, kv_heads=1, short_window=128
    )
    train = TrainConfig(steps=steps, batch_tokens=4096, eval_every=40, eval_tokens=8192, save_every=3)
    return Config(model, replace(OptimConfig(), warmup_steps=5), train, "sample", "bytes")
