"""A text and some minutes give a configuration that fits both."""

import json
import math

import pytest

from nanorun.config import Config, Horizon, OptimConfig, scale
from nanorun.data.vocabulary import size_for
from nanorun.errors import UserError
from nanorun.hardware import GPUS, Gpu
from nanorun.plan import dial
from nanorun.plan.dial import TextSize
from nanorun.plan.estimate import make_plan

LAPTOP = Gpu("two cores", "", 0.1, 16, None, None, device="cpu")


def laptop_speed(config: Config) -> float:
    """Tokens per second of two cores: about 70 GFLOP/s."""
    return 7e10 / config.model.flops_per_token


def configured(megabytes: float, minutes: float, **options: object) -> Config:
    vocab = size_for(int(megabytes * 1e6))
    text = TextSize(round(megabytes * 1e6 / 2.8), round(megabytes * 5e4 / 2.8))
    return dial.configure(
        options.pop("depth", None),
        text,
        vocab,
        Horizon(minutes=minutes),
        gpu=LAPTOP,
        tokens_per_s=laptop_speed,
        **options,
    )


@pytest.mark.parametrize("megabytes", [0.1, 0.5, 2, 10, 100])
@pytest.mark.parametrize("minutes", [1, 3, 10, 60])
def test_a_run_takes_the_time_given_in_hundreds_of_steps_unless_the_text_is_exhausted(megabytes, minutes):
    config = configured(megabytes, minutes)
    seconds = config.tokens / laptop_speed(config)
    passes = config.tokens / (megabytes * 1e6 / 2.8)
    assert passes <= dial.MAX_PASSES * 1.05
    assert seconds <= 60 * minutes
    assert seconds >= 60 * minutes * 0.85 or passes >= dial.MAX_PASSES * 0.95
    assert config.train.steps >= 250
    evaluations = math.ceil(config.train.steps / config.train.eval_every)
    assert 4 <= evaluations <= 10
    assert evaluations * config.train.eval_tokens / 3 <= 0.06 * config.tokens + 10 * config.model.context


def test_more_time_gives_a_larger_model_and_more_text_a_larger_vocabulary():
    sizes = [configured(10, minutes).model.scaling_parameters for minutes in (1, 10, 100)]
    assert sizes == sorted(sizes)
    assert sizes[0] < sizes[-1]
    vocabularies = [size_for(size) for size in (1_000, 500_000, 2_000_000, 10_000_000, 650_000_000, 10**12)]
    assert vocabularies == [512, 512, 1024, 4096, 32768, 32768]


def test_a_narrow_model_is_regularized_the_more_the_oftener_it_reads_its_text():
    once, often, very_often = (configured(megabytes, 10) for megabytes in (20, 2, 0.2))
    assert (once.model.dropout, once.model.value_embeddings) == (0.0, True)
    assert 0 < often.model.dropout < very_often.model.dropout <= 0.3
    assert not very_often.model.value_embeddings
    assert once.optim.embedding_lr > often.optim.embedding_lr > very_often.optim.embedding_lr
    assert once.optim.matrix_lr == very_often.optim.matrix_lr == 2 * OptimConfig.matrix_lr
    wide = dial.configure(8, TextSize(100_000, 5_000), 512, Horizon(tokens=4_000_000), gpu=LAPTOP)
    assert (wide.model.dropout, wide.model.value_embeddings) == (0.0, True)


def test_a_depth_that_is_given_is_kept_and_only_its_length_follows_from_the_time():
    config = configured(2, 10, depth=4, context=512)
    assert (config.model.depth, config.model.dim, config.model.context) == (4, 256, 512)
    assert config.tokens / laptop_speed(config) == pytest.approx(600 * 0.95, rel=0.02)
    assert config.train.minutes == 10


def test_without_a_length_the_text_is_not_read_a_hundred_times():
    """Depth 4 on 635 thousand tokens used to be 69 passes, without a word."""
    text = TextSize(635_000, 9_000)
    config = dial.configure(4, text, 8192, Horizon(), gpu=LAPTOP)
    assert config.tokens <= 8.1 * text.train_tokens
    assert config.train.steps >= 250
    assert "passes over 635k tokens" in dial.passes_sentence(config, text.train_tokens)
    asked = dial.configure(4, text, 8192, Horizon(tokens=40_000_000), gpu=LAPTOP)
    assert asked.tokens == pytest.approx(40_000_000, rel=0.01)
    assert "63" in dial.passes_sentence(asked, text.train_tokens)
    assert dial.passes_sentence(config, 10**9) == ""


def test_a_short_run_has_hundreds_of_steps():
    """1.2 million tokens used to be 37 steps of 32,768, and 1.263 bits per byte instead of 1.062."""
    config = scale(4, 8192, context=512, horizon=Horizon(tokens=1_200_000))
    assert config.train.batch_tokens <= 4096
    assert config.train.steps >= 290
    assert scale(12, 32768).train.batch_tokens == 2**19


def test_an_h100_is_planned_with_what_an_h200_measured(tmp_path):
    record = {
        "what": "train",
        "depth": 12,
        "gpu": "NVIDIA H200",
        "mfu": 0.7,
        "date": "2026-11-16",
        "fp8": "all",
    }
    (tmp_path / "train-d12-h200.json").write_text(json.dumps(record))
    plan = make_plan(scale(12, 32768), "h100", results=tmp_path)
    assert 0.55 < plan.mfu < 0.7
    assert "h200" in plan.mfu_from
    assert make_plan(scale(12, 32768), "a100-80", results=tmp_path).mfu == GPUS["a100-80"].mfu


def test_minutes_without_text_are_rejected(tmp_path, monkeypatch):
    monkeypatch.setenv("NANORUN_HOME", str(tmp_path))
    with pytest.raises(UserError, match="needs text"):
        dial.plan_here(None, None, Horizon(minutes=5))
