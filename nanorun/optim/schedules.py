"""Schedules: what the hyperparameters are at each update, as pure functions of its number.

`step` counts the updates already done, from 0. Everything that falls reaches its last value at `step == steps`,
just after the run: the last update still learns, even when the rate falls to 0.
"""

import math
from dataclasses import dataclass

from nanorun.config import OptimConfig

MOMENTUM_START, MOMENTUM_PEAK, MOMENTUM_END = 0.85, 0.97, 0.90
MOMENTUM_STEPS = 400


@dataclass(frozen=True)
class Rates:
    """What changes from update to update. Momentum and decay are Muon's; AdamW keeps its own fixed."""

    rate_scale: float  # of every group's rate
    momentum: float
    decay_scale: float  # of Muon's weight decay


def rates(step: int, steps: int, config: OptimConfig) -> Rates:
    return Rates(
        rate_scale(step, steps, config), momentum(step, steps, config), decay_scale(step, steps, config)
    )


def rate_scale(step: int, steps: int, config: OptimConfig) -> float:
    """Up in a line over the first `warmup_steps`, 1, and in a line to `final_rate` over the last part."""
    rising = (step + 1) / config.warmup_steps if config.warmup_steps else 1.0
    falling = 1.0 - (1.0 - config.final_rate) * _warmdown(step, steps, config)
    return min(rising, falling, 1.0)


def momentum(step: int, steps: int, config: OptimConfig) -> float:
    """Short memory while the weights change fast, long in the middle, shorter again as the rate falls."""
    ramp = min(MOMENTUM_STEPS, steps // 4)
    rising = MOMENTUM_START + (MOMENTUM_PEAK - MOMENTUM_START) * (step / ramp if ramp else 1.0)
    falling = MOMENTUM_PEAK - (MOMENTUM_PEAK - MOMENTUM_END) * _warmdown(step, steps, config)
    return min(rising, falling)


def decay_scale(step: int, steps: int, config: OptimConfig) -> float:
    """Half a cosine wave from 1 to 0."""
    return 0.5 * (1.0 + math.cos(math.pi * min(step / steps, 1.0)))


def _warmdown(step: int, steps: int, config: OptimConfig) -> float:
    """How far into the warmdown: 0 before it, 1 at the end of the run and after."""
    if not config.warmdown:
        return 0.0
    left = max(1.0 - step / steps, 0.0)
    return max(1.0 - left / config.warmdown, 0.0)
