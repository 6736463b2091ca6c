"""Schedules start, turn and end where they should, for runs of every length and shape."""

from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from nanorun.config import OptimConfig
from nanorun.optim.schedules import (
    ScheduledHyperparameters,
    lr_scale,
    momentum,
    scheduled_hyperparameters,
    weight_decay_scale,
)

lengths = st.integers(1, 5000)
configs = st.builds(
    OptimConfig,
    warmup_steps=st.integers(0, 200),
    warmdown=st.floats(0, 1),
    final_lr_fraction=st.floats(0, 1),
)
TINY = 1e-9


@given(st.data(), lengths, configs)
def test_everything_stays_within_its_bounds(data, steps, config):
    step = data.draw(st.integers(0, steps))
    now = scheduled_hyperparameters(step, steps, config)
    assert 0 <= now.lr_scale <= 1
    assert 0.85 - TINY <= now.momentum <= 0.97 + TINY
    assert 0 <= now.weight_decay_scale <= 1
    if step < steps and (config.warmdown < 1 or step > 0 or config.final_lr_fraction > 0):
        assert now.lr_scale > 0  # every update changes something


@given(st.data(), lengths, configs)
@example(None, 1, OptimConfig(warmdown=0.5))
def test_nothing_jumps(data, steps, config):
    step = data.draw(st.integers(0, steps - 1)) if data else 0
    down = 1 / max(config.warmdown * steps, 1)
    up = 1 / config.warmup_steps if config.warmup_steps else 0
    change = abs(lr_scale(step + 1, steps, config) - lr_scale(step, steps, config))
    assert change <= max(up, down) + TINY
    ramp = 0.12 / max(min(400, steps // 4), 1)
    change = abs(momentum(step + 1, steps, config) - momentum(step, steps, config))
    assert change <= max(ramp, 0.07 * down) + TINY
    assert 0 <= weight_decay_scale(step, steps) - weight_decay_scale(step + 1, steps) <= 1.6 / steps


@given(lengths, configs)
def test_ends_are_exact(steps, config):
    end = scheduled_hyperparameters(steps, steps, config)
    if config.warmdown:
        rising = (steps + 1) / config.warmup_steps if config.warmup_steps else 1.0
        assert end.lr_scale == pytest.approx(min(config.final_lr_fraction, rising), abs=TINY)
        if steps >= 4:
            assert end.momentum == pytest.approx(0.90)
    assert end.weight_decay_scale == pytest.approx(0, abs=TINY)
    assert weight_decay_scale(0, steps) == 1
    assert scheduled_hyperparameters(
        2 * steps, steps, replace(config, warmup_steps=0)
    ) == scheduled_hyperparameters(steps, steps, replace(config, warmup_steps=0))


def test_the_default_run_of_2000_updates_number_by_number():
    config = OptimConfig()
    scales = {step: lr_scale(step, 2000, config) for step in (0, 19, 39, 40, 700, 1350, 1999)}
    assert scales == pytest.approx(
        {0: 1 / 40, 19: 0.5, 39: 1, 40: 1, 700: 1, 1350: 0.525, 1999: 0.05 + 0.95 / 1300}
    )
    momenta = {step: momentum(step, 2000, config) for step in (0, 200, 400, 700, 1350, 2000)}
    assert momenta == pytest.approx({0: 0.85, 200: 0.91, 400: 0.97, 700: 0.97, 1350: 0.935, 2000: 0.90})
    assert [weight_decay_scale(step, 2000) for step in (0, 1000, 2000)] == pytest.approx([1, 0.5, 0])


def test_a_short_run_shortens_the_momentum_ramp_to_a_quarter():
    config = OptimConfig()
    assert momentum(10, 40, config) == pytest.approx(0.97)
    assert momentum(5, 40, config) == pytest.approx(0.91)


def test_without_warmup_and_warmdown_the_learning_rate_is_constant():
    flat = OptimConfig(warmup_steps=0, warmdown=0.0)
    assert {lr_scale(step, 100, flat) for step in range(101)} == {1.0}
    assert scheduled_hyperparameters(0, 1, flat) == ScheduledHyperparameters(1.0, 0.97, 1.0)


def test_rl_falls_linearly_to_zero_and_its_last_update_still_trains():
    falling = OptimConfig(warmup_steps=0, warmdown=1.0, final_lr_fraction=0.0)
    assert [lr_scale(step, 4, falling) for step in range(5)] == pytest.approx([1, 0.75, 0.5, 0.25, 0])
