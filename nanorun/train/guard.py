"""Protection of an unattended run: stop signals, bad steps, and lost throughput.

`StopSignals` turns Ctrl-C and SIGTERM into a flag that the loop reads before each micro-batch, so that a run ends
with a checkpoint and not in the middle of an update.

`TrainingGuard` checks every step by its loss and gradient norm. A step with NaN, a loss spike or a gradient norm far
above the recent median is skipped: its update is not applied. The `limits` are known before the step, so the device
decides by itself, without a sync, and `check` then comes to the same verdict. Several bad losses in a row mean that the
weights themselves are damaged, so the run rolls back to its last checkpoint; if rolling back does not help either, the
run ends with the likely causes. The guard sees two numbers a step: it does not notice a slow drift, a wrong dataset, or
damage smaller than its thresholds. NaN in weights that a step does not use, such as the embedding of a rare token, is
found by the next save, and rolls back, too.

`ThroughputMonitor` compares the run with itself: when tokens per second stay well below the run's own median, it warns
once, with what it can observe of the cause: time spent waiting for data, the GPU's clock, the load.
"""

import math
import os
import signal
import statistics
import struct
import threading
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields, replace
from types import FrameType
from typing import Any, Literal, Self

import torch

from nanorun import console
from nanorun.errors import UserError

StepVerdict = Literal["ok", "skip", "rollback"]
FLOAT32_MAX = 3.4028234663852886e38
LOSS_DEVIATIONS = 20.0  # a loss spike is this many median absolute deviations above the median loss ...
LOSS_MARGIN = 0.5  # ... and this fraction of it, and this many nats


class StopSignals:
    """`with StopSignals() as stop: ... if stop.requested: save and leave`.

    A second Ctrl-C raises KeyboardInterrupt at once. Python delivers signals only to the main thread; in any other
    thread this does nothing. Each rank gets its own signals: agree on the flag before acting.
    """

    def __init__(self) -> None:
        self.requested: str | None = None  # the name of the first signal
        self._interrupts = 0
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._previous.clear()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT:
            self._interrupts += 1
            if self._interrupts > 1:
                raise KeyboardInterrupt
        if self.requested is None:
            self.requested = signal.Signals(number).name
            again = " (Ctrl-C again stops at once, without saving)" if number == signal.SIGINT else ""
            line = f"{self.requested}: stopping, with a checkpoint{again}.\n"
            # Not `say`: the signal may arrive in the middle of a print, and a stream is not reentrant.
            with suppress(OSError):
                os.write(2, line.encode())


@dataclass
class _GuardState:
    """What a checkpoint keeps. The field names are those on disk."""

    norms: list[float] = field(default_factory=list)  # of recent accepted steps, as are the losses
    losses: list[float] = field(default_factory=list)
    position: int = 0  # steps checked
    in_a_row: int = 0  # bad steps
    spikes_in_a_row: int = 0  # of the gradient norm alone
    skips: int = 0  # in total
    rollbacks: int = 0  # without progress in between
    trouble: int = 0  # the furthest position that caused a rollback


class TrainingGuard:
    """Deterministic: the same losses and norms give the same verdicts, also after a restore.

    The verdict repeats what the device has decided by `limits`: "ok", the update was applied; "skip", it was not, and
    training continues with the next batch. At "rollback" the loop loads the last checkpoint, passes its guard state to
    `load_rolled_back_state`, and should continue after the bad batches: the same ones would give the same verdict.
    """

    def __init__(
        self,
        *,
        norm_factor: float = 10.0,  # a gradient norm spike is this many times the median norm
        window: int = 100,  # accepted steps that medians are taken over
        warmup: int = 50,  # accepted steps before spikes are detected
        patience: int = 3,  # bad steps in a row before a rollback
        max_rollbacks: int = 3,
    ) -> None:
        if not 1 <= warmup <= window:
            raise ValueError(f"warmup is {warmup}: it must lie between 1 and window ({window})")
        self.norm_factor, self.window, self.warmup = norm_factor, window, warmup
        self.patience, self.max_rollbacks = patience, max_rollbacks
        self.reason = ""  # why the last step was not accepted
        self._state = _GuardState()

    @property
    def skips(self) -> int:
        return self._state.skips

    def limits(self) -> tuple[float, float]:
        """The largest loss and gradient norm for which `check` will accept the next step.

        Both are float32 numbers, so that a device that compares in float32 comes to the same verdict.
        """
        losses, max_loss = self._state.losses, FLOAT32_MAX
        if len(losses) >= self.warmup:
            median = statistics.median(losses)
            deviation = statistics.median(abs(loss - median) for loss in losses)
            max_loss = median + max(LOSS_DEVIATIONS * deviation, LOSS_MARGIN * abs(median), LOSS_MARGIN)
        # One norm spike is an accident of the batch. Several in a row with an ordinary loss are the new normal.
        is_accepting_spikes = self._state.spikes_in_a_row + 1 >= self.patience
        return _float32(max_loss), FLOAT32_MAX if is_accepting_spikes else self._norm_limit()

    def check(self, loss: float, grad_norm: float) -> StepVerdict:
        state, (max_loss, max_norm) = self._state, self.limits()
        state.position += 1
        self.reason = self._find_fault(loss, grad_norm, max_loss)
        if self.reason:
            state.spikes_in_a_row = 0
            state.skips += 1
            state.in_a_row += 1
            if state.in_a_row < self.patience:
                return "skip"
            self.count_rollback(self.reason)
            return "rollback"
        is_spike = grad_norm > self._norm_limit()
        state.spikes_in_a_row = state.spikes_in_a_row + 1 if is_spike else 0
        self._remember(state.norms, grad_norm)  # also of a skipped spike, so that the median follows
        if grad_norm > max_norm:
            median = statistics.median(state.norms)
            times = grad_norm / median
            self.reason = f"the gradient norm is {grad_norm:.3g}, {times:.0f} times the median {median:.3g}"
            state.skips += 1
            return "skip"
        self._remember(state.losses, loss)
        state.in_a_row = 0
        if not is_spike and state.position > state.trouble + self.window:
            state.rollbacks = 0
        return "ok"

    def count_rollback(self, reason: str) -> None:
        """Raises a UserError if rolling back has not helped before."""
        state = self._state
        if state.rollbacks >= self.max_rollbacks:
            raise UserError(
                f"Training rolled back to a checkpoint {state.rollbacks} times and failed each time ({reason}): look "
                "for broken documents in the data, start anew with another --seed or a larger --batch-tokens, or "
                "lower the learning rates in a copy of the run's config.json (--config)."
            )
        state.in_a_row = 0
        state.rollbacks += 1
        state.trouble = max(state.trouble, state.position)

    def load_rolled_back_state(self, saved: Mapping[str, Any]) -> None:
        """Restores the history of a checkpoint, but keeps the count of skips and rollbacks."""
        now = self._state
        self.load_state_dict(saved)
        self._state = replace(
            self._state, skips=now.skips, rollbacks=now.rollbacks, trouble=now.trouble, in_a_row=0
        )

    def state_dict(self) -> dict[str, Any]:
        return asdict(self._state)

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        histories = {name: list(saved[name])[-self.window :] for name in ("norms", "losses")}
        counts = {f.name: saved[f.name] for f in fields(_GuardState) if f.name in saved}
        self._state = _GuardState(**{**counts, **histories})

    def _norm_limit(self) -> float:
        norms = self._state.norms
        median = statistics.median(norms) if len(norms) >= self.warmup else 0.0
        return _float32(self.norm_factor * median) if median > 0 else FLOAT32_MAX

    def _remember(self, history: list[float], value: float) -> None:
        history.append(float(value))
        del history[: -self.window]

    def _find_fault(self, loss: float, grad_norm: float, max_loss: float) -> str:
        if not math.isfinite(loss):
            return f"the loss is {loss}"
        if not math.isfinite(grad_norm):
            return f"the gradient norm is {grad_norm}"
        if loss > max_loss:
            return f"the loss is {loss:.4g}, far above the median {statistics.median(self._state.losses):.4g}"
        return ""


def _float32(value: float) -> float:
    return float(struct.unpack("f", struct.pack("f", min(value, FLOAT32_MAX)))[0])


class LossScaler:
    """Loss scaling for fp16, whose small gradients underflow: the loss is multiplied by a power of two and the
    gradients are divided by it.

    The scale is halved when the gradients overflow (that step is skipped, and is no sign of trouble) and doubled after
    `patience` steps without. In other dtypes it stays 1.
    """

    def __init__(self, active: bool, patience: int = 500) -> None:
        self.active, self.patience = active, patience
        self.scale = 2.0**16 if active else 1.0
        self._good_steps = 0

    def update(self, loss: float, grad_norm: float) -> bool:
        """Adjusts the scale after a step in fp16. True when the gradients overflowed: the step must be skipped."""
        if math.isfinite(loss) and not math.isfinite(grad_norm) and self.scale > 1:
            self.scale, self._good_steps = self.scale / 2, 0
            return True
        self._good_steps += 1
        if self._good_steps >= self.patience:
            self.scale, self._good_steps = min(self.scale * 2, 2.0**24), 0
        return False

    def state_dict(self) -> dict[str, Any]:
        return {"scale": self.scale, "good": self._good_steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if self.active:
            self.scale, self._good_steps = state.get("scale", self.scale), state.get("good", 0)


def describe_machine() -> str:
    """What slows a run down, as far as it can be observed: other processes, a throttled GPU."""
    facts = []
    with suppress(OSError, AttributeError):
        facts.append(f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    if torch.cuda.is_initialized():
        with suppress(Exception):  # these need pynvml and a driver that answers
            facts.append(f"GPU at {torch.cuda.clock_rate()} MHz and {torch.cuda.temperature()} °C")
    return ", ".join(facts)


class ThroughputMonitor:
    """`warning = monitor.record(tokens, seconds, data_wait)` after each step, without evaluation and saving."""

    IGNORED_STEPS = 10  # at the start, which compile and warm up
    SLOW_STEPS = 5  # in a row before a warning
    WINDOW = 256  # steps that the median is taken over

    def __init__(
        self,
        *,
        min_fraction: float = 0.85,  # of the run's own median; below it a step is slow
        steps_between_warnings: int = 500,
    ) -> None:
        self.min_fraction, self.steps_between_warnings = min_fraction, steps_between_warnings
        self._speeds: deque[float] = deque(maxlen=self.WINDOW)
        self._data_waits: deque[float] = deque(maxlen=self.WINDOW)  # fraction of each step
        self._steps = self._slow_steps = self._quiet_until = 0
        self._at_start = ""

    def record(self, tokens: int, seconds: float, data_wait: float = 0.0) -> str | None:
        """`data_wait` is the part of `seconds` spent waiting for data."""
        self._steps += 1
        if self._steps <= self.IGNORED_STEPS or seconds <= 0:
            return None
        self._at_start = self._at_start or describe_machine()
        speed = tokens / seconds
        median = statistics.median(self._speeds) if len(self._speeds) >= 2 * self.SLOW_STEPS else None
        self._speeds.append(speed)
        self._data_waits.append(data_wait / seconds)
        is_slow = median is not None and speed < self.min_fraction * median
        self._slow_steps = self._slow_steps + 1 if is_slow else 0
        if median is None or self._slow_steps < self.SLOW_STEPS or self._steps < self._quiet_until:
            return None
        self._quiet_until = self._steps + self.steps_between_warnings
        recent = statistics.median(list(self._speeds)[-self.SLOW_STEPS :])
        waits = list(self._data_waits)
        wait_now, wait_before = (
            statistics.median(part) for part in (waits[-self.SLOW_STEPS :], waits[: -self.SLOW_STEPS])
        )
        return (
            f"Throughput dropped to {console.count(recent)} tokens/s, {recent / median:.0%} of the median "
            f"{console.count(median)}. Waiting for data: {wait_now:.0%} of each step, before {wait_before:.0%}. "
            f"The machine: {describe_machine()}; at the start: {self._at_start}. top and nvidia-smi show more."
        )
