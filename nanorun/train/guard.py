"""What watches over a run while nobody does: stop signals, bad steps, and lost speed.

`StopSignals` turns Ctrl-C and SIGTERM into a flag that the loop reads between two steps, so that a run
ends with a checkpoint and not in the middle of an update.

`Guard` judges every step by its loss and gradient norm. A step with NaN, or with a norm or loss far above
what the run has seen lately, is skipped: its update is not applied. Its `limits` are known before the step, so
a device can decide by itself, without a wait, and `judge` then comes to the same answer. Several
losses in a row that are bad mean that the weights themselves have gone wrong, so the run goes back to its last
checkpoint; if going back does not help either, the run ends and says what is likely. The guard sees two
numbers a step: it does not notice a slow drift, a wrong dataset, or damage smaller than its thresholds.

`SpeedWatch` compares the run with itself: when tokens per second stay well under the run's own median, it
says so once, with the likeliest cause among those it can see.
"""

import math
import os
import signal
import statistics
import struct
import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from types import FrameType, TracebackType
from typing import Any, Literal, Self

from nanorun import console
from nanorun.errors import UserError

Verdict = Literal["ok", "skip", "rollback"]
LARGEST = 3.4028234663852886e38  # of float32


class StopSignals:
    """`with StopSignals() as stop: ... if stop.requested: save and leave`.

    A second Ctrl-C raises KeyboardInterrupt at once. Python delivers signals only to the main thread;
    in any other this does nothing. Ranks get their signals one by one: agree on the flag before acting.
    """

    def __init__(self) -> None:
        self.requested: str | None = None  # the name of the signal that asked first
        self._interrupts = 0
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for which in (signal.SIGINT, signal.SIGTERM):
                self._before[which] = signal.signal(which, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for which, handler in self._before.items():
            signal.signal(which, signal.SIG_DFL if handler is None else handler)
        self._before.clear()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT:
            self._interrupts += 1
            if self._interrupts > 1:
                raise KeyboardInterrupt
        if self.requested is None:
            self.requested = signal.Signals(number).name
            again = " (Ctrl-C again stops at once, without saving)" if number == signal.SIGINT else ""
            line = f"{self.requested}: stopping, with a checkpoint{again}.\n"
            # Not `say`: the signal may have come in the middle of a print, and a stream is not reentrant.
            with suppress(OSError):
                os.write(2, line.encode())


class Guard:
    """Pure and deterministic: the same losses and norms give the same verdicts, also after a restore.

    The loop does what the verdict says: "ok" applies the update; "skip" drops it and goes on with the next
    batch; "rollback" loads the last checkpoint, hands its guard state to `rolled_back`, and had better go
    on behind the bad batches, since the same ones would give the same verdict.
    """

    def __init__(
        self,
        *,
        factor: float = 10.0,  # a spike is this many times the median norm
        loss_spread: float = 20.0,  # a jump is this many median deviations over the median loss ...
        loss_share: float = 0.5,  # ... and this share of it, and this many nats
        window: int = 100,  # accepted steps that are remembered
        warmup: int = 50,  # accepted steps before spikes are judged
        patience: int = 3,  # bad steps in a row before going back
        max_rollbacks: int = 3,
    ) -> None:
        if not 1 <= warmup <= window:
            raise ValueError(f"warmup {warmup} must lie between 1 and window {window}")
        self.factor, self.loss_spread, self.loss_share = factor, loss_spread, loss_share
        self.window, self.warmup, self.patience, self.max_rollbacks = window, warmup, patience, max_rollbacks
        self.reason = ""  # why the last step was not accepted
        self.skips = 0  # in all
        self._norms: deque[float] = deque(maxlen=window)
        self._losses: deque[float] = deque(maxlen=window)
        self._position = 0  # steps judged on the way from the start to here
        self._in_a_row = 0
        self._spikes_in_a_row = 0
        self._rollbacks = 0  # without progress
        self._trouble = 0  # the furthest position that sent us back

    def limits(self) -> tuple[float, float]:
        """The largest loss and gradient norm with which `judge` will say "ok" to the next step.

        Both are float32 numbers, so that a device that compares in float32 comes to the same answer.
        """
        loss = norm = LARGEST
        if len(self._losses) >= self.warmup:
            middle, room = self._usual_loss()
            loss = middle + room
        if len(self._norms) >= self.warmup and self._spikes_in_a_row + 1 < self.patience:
            usual = statistics.median(self._norms)
            norm = self.factor * usual if usual > 0 else LARGEST
        return _float32(loss), _float32(norm)

    def judge(self, loss: float, grad_norm: float) -> Verdict:
        largest_loss, largest_norm = self.limits()
        self._position += 1
        self.reason = self._find_fault(loss, grad_norm, largest_loss)
        if not self.reason and self._spikes(grad_norm):
            # One large gradient is an accident of the batch. Several in a row, with a loss as usual, are how
            # the run is now: they are remembered, so that what is usual follows, and no longer skipped.
            self._norms.append(float(grad_norm))
            self._spikes_in_a_row += 1
            if grad_norm > largest_norm:
                usual = statistics.median(self._norms)
                times = grad_norm / usual
                self.reason = f"the gradient norm is {grad_norm:.3g}, {times:.0f} times the usual {usual:.3g}"
                self.skips += 1
                return "skip"
            self._losses.append(float(loss))
            self._in_a_row = 0
            return "ok"
        self._spikes_in_a_row = 0
        if not self.reason:
            self._norms.append(float(grad_norm))
            self._losses.append(float(loss))
            self._in_a_row = 0
            if self._position > self._trouble + self.window:
                self._rollbacks = 0
            return "ok"
        self.skips += 1
        self._in_a_row += 1
        if self._in_a_row < self.patience:
            return "skip"
        if self._rollbacks >= self.max_rollbacks:
            raise UserError(
                f"Training went back to a checkpoint {self._rollbacks} times and failed each time "
                f"({self.reason}): look for broken documents in the data, start anew with another --seed or a larger "
                "--batch-tokens, or lower the rates in a copy of the run's config.json (--config)."
            )
        self._in_a_row = 0
        self._rollbacks += 1
        self._trouble = max(self._trouble, self._position)
        return "rollback"

    def rolled_back(self, state: Mapping[str, Any]) -> None:
        """Takes the view of the past from a checkpoint's guard state, but remembers having gone back."""
        skips, rollbacks, trouble = self.skips, self._rollbacks, self._trouble
        self.load_state_dict(state)
        self.skips, self._rollbacks, self._trouble, self._in_a_row = skips, rollbacks, trouble, 0

    def state_dict(self) -> dict[str, Any]:
        return {
            "norms": list(self._norms),
            "losses": list(self._losses),
            "position": self._position,
            "in_a_row": self._in_a_row,
            "spikes_in_a_row": self._spikes_in_a_row,
            "skips": self.skips,
            "rollbacks": self._rollbacks,
            "trouble": self._trouble,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._norms = deque(state["norms"], maxlen=self.window)
        self._losses = deque(state["losses"], maxlen=self.window)
        self._position, self._in_a_row = state["position"], state["in_a_row"]
        self._spikes_in_a_row = state["spikes_in_a_row"]
        self.skips, self._rollbacks, self._trouble = state["skips"], state["rollbacks"], state["trouble"]

    def _spikes(self, grad_norm: float) -> bool:
        usual = statistics.median(self._norms) if len(self._norms) >= self.warmup else 0.0
        return usual > 0 and grad_norm > _float32(self.factor * usual)

    def _usual_loss(self) -> tuple[float, float]:
        """The median of late, and how far above it a loss may lie."""
        middle = statistics.median(self._losses)
        spread = statistics.median(abs(past - middle) for past in self._losses)
        return middle, max(self.loss_spread * spread, self.loss_share * abs(middle), self.loss_share)

    def _find_fault(self, loss: float, grad_norm: float, largest_loss: float) -> str:
        if not math.isfinite(loss):
            return f"the loss is {loss}"
        if not math.isfinite(grad_norm):
            return f"the gradient norm is {grad_norm}"
        if loss > largest_loss:
            return f"the loss is {loss:.4g}, far above the usual {statistics.median(self._losses):.4g}"
        return ""


def _float32(value: float) -> float:
    return struct.unpack("f", struct.pack("f", min(value, LARGEST)))[0]


class LossScale:
    """For fp16, whose small numbers vanish: the loss is multiplied by a power of two, the gradients divided by it.

    The scale is halved when the gradients overflow (that step is skipped, and is no sign of trouble) and
    doubled after `patience` steps without. In other dtypes it stays 1.
    """

    def __init__(self, active: bool, patience: int = 500) -> None:
        self.active, self.patience = active, patience
        self.scale = 2.0**16 if active else 1.0
        self._good = 0

    def overflowed(self, loss: float, grad_norm: float) -> bool:
        """Looks at a step's numbers: whether its update is to be forgotten for no other reason than the scale."""
        if not self.active:
            return False
        if math.isfinite(loss) and not math.isfinite(grad_norm) and self.scale > 1:
            self.scale, self._good = self.scale / 2, 0
            return True
        self._good += 1
        if self._good >= self.patience:
            self.scale, self._good = min(self.scale * 2, 2.0**24), 0
        return False

    def state_dict(self) -> dict[str, Any]:
        return {"scale": self.scale, "good": self._good}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if self.active:
            self.scale, self._good = state["scale"], state["good"]


@dataclass(frozen=True)
class Machine:
    """What can be seen of the machine from here; None where it cannot be seen."""

    load: float | None = None  # processes that want a core, last minute
    cores: int = 1
    clock_mhz: float | None = None
    temperature: float | None = None


def look_at_machine() -> Machine:
    load = clock = temperature = None
    with suppress(OSError, AttributeError):
        load = os.getloadavg()[0]
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        with suppress(Exception):  # they need pynvml and a driver that answers
            clock = float(torch.cuda.clock_rate())
            temperature = float(torch.cuda.temperature())
    return Machine(load, os.cpu_count() or 1, clock, temperature)


class SpeedWatch:
    """`warning = watch.feed(tokens, seconds, waiting)` after each step; leave out evaluation and saving."""

    def __init__(
        self,
        *,
        floor: float = 0.85,  # of the run's own median
        in_a_row: int = 5,  # slow steps before a word is said
        every: int = 500,  # steps between two warnings
        ignore: int = 10,  # the first steps, which compile and warm up
        window: int = 256,
        look: Callable[[], Machine] = look_at_machine,
    ) -> None:
        self.floor, self.in_a_row, self.every, self.ignore, self._look = floor, in_a_row, every, ignore, look
        self._rates: deque[float] = deque(maxlen=window)
        self._waits: deque[float] = deque(maxlen=window)  # share of each step
        self._steps = 0
        self._slow = 0
        self._quiet_until = 0
        self._at_start: Machine | None = None

    def feed(self, tokens: int, seconds: float, waiting: float = 0.0) -> str | None:
        """`waiting` is the part of `seconds` spent waiting for data."""
        self._steps += 1
        if self._steps <= self.ignore or seconds <= 0:
            return None
        if self._at_start is None:
            self._at_start = self._look()
        rate = tokens / seconds
        usual = statistics.median(self._rates) if len(self._rates) >= 2 * self.in_a_row else None
        self._rates.append(rate)
        self._waits.append(waiting / seconds)
        self._slow = self._slow + 1 if usual is not None and rate < self.floor * usual else 0
        if usual is None or self._slow < self.in_a_row or self._steps < self._quiet_until:
            return None
        self._quiet_until = self._steps + self.every
        lately = statistics.median(list(self._rates)[-self.in_a_row :])
        return (
            f"Slower than before: {console.count(lately)} tokens/s, {lately / usual:.0%} of the usual "
            f"{console.count(usual)}; {self._likely_cause(1 - lately / usual)}."
        )

    def _likely_cause(self, lost: float) -> str:
        now, before = self._look(), self._at_start or Machine()
        waits = list(self._waits)
        lately = statistics.median(waits[-self.in_a_row :])
        earlier = statistics.median(waits[: -self.in_a_row])
        if lately - earlier > lost / 2:
            return (
                f"{lately:.0%} of each step is waiting for data, before {earlier:.0%}: the disk is slow or "
                "the cores that prepare batches are busy"
            )
        if now.clock_mhz and before.clock_mhz and now.clock_mhz < 0.9 * before.clock_mhz:
            heat = f" at {now.temperature:.0f} °C" if now.temperature is not None else ""
            return (
                f"the GPU runs at {now.clock_mhz:.0f} MHz{heat}, before at {before.clock_mhz:.0f}: it is "
                "throttled by heat or its power limit"
            )
        if now.load and now.load > now.cores and now.load > (before.load or 0) + now.cores / 4:
            return f"other processes want the cores (load {now.load:.1f} on {now.cores} cores)"
        return "no cause is visible from here: look for other work on this machine with top and nvidia-smi"
