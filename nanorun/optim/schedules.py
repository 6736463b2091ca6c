"""Schedules: the value of each scheduled hyperparameter at a step, as a pure function of the step number.

`step` counts completed updates, from 0. A falling schedule reaches its final value at `step == steps`, just after
the run, so the last update still trains even when the learning rate falls to 0.
"""

import math
from dataclasses import dataclass

from nanorun.config import OptimConfig

MOMENTUM_START, MOMENTUM_PEAK, MOMENTUM_END = 0.85, 0.97, 0.90
MOMENTUM_WARMUP_STEPS = 400


@dataclass(frozen=True)
class ScheduledHyperparameters:
    """What changes from step to step. Momentum and weight decay are Muon's; AdamW's are constant."""

    lr_scale: float  # multiplies every group's learning rate
    momentum: float
    weight_decay_scale: float


def scheduled_hyperparameters(step: int, steps: int, config: OptimConfig) -> ScheduledHyperparameters:
    """Of step `step` of `steps`: the learning rate warms up and falls linearly, Muon's momentum rises and falls, its
    weight decay falls by half a cosine. Numbers that depend on nothing else."""
    return ScheduledHyperparameters(
        lr_scale(step, steps, config), momentum(step, steps, config), weight_decay_scale(step, steps)
    )


def lr_scale(step: int, steps: int, config: OptimConfig) -> float:
    """Linear warmup over `warmup_steps`, constant at 1, then a linear warmdown to `final_lr_fraction`."""
    rising = (step + 1) / config.warmup_steps if config.warmup_steps else 1.0
    falling = 1.0 - (1.0 - config.final_lr_fraction) * _warmdown_progress(step, steps, config)
    return min(rising, falling, 1.0)


def momentum(step: int, steps: int, config: OptimConfig) -> float:
    """Low while the weights change fast, high in the middle, lower again as the learning rate falls."""
    warmup = min(MOMENTUM_WARMUP_STEPS, steps // 4)
    rising = MOMENTUM_START + (MOMENTUM_PEAK - MOMENTUM_START) * (step / warmup if warmup else 1.0)
    falling = MOMENTUM_PEAK - (MOMENTUM_PEAK - MOMENTUM_END) * _warmdown_progress(step, steps, config)
    return min(rising, falling)


def weight_decay_scale(step: int, steps: int) -> float:
    """Half a cosine from 1 to 0."""
    return 0.5 * (1.0 + math.cos(math.pi * min(step / steps, 1.0)))


def _warmdown_progress(step: int, steps: int, config: OptimConfig) -> float:
    """0 before the warmdown begins, 1 at the end of the run and after."""
    if not config.warmdown:
        return 0.0
    remaining = max(1.0 - step / steps, 0.0)
    return max(1.0 - remaining / config.warmdown, 0.0)
