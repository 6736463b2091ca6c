"""Signals end a run with a checkpoint, bad steps are skipped and ordinary ones are not, lost throughput is reported."""

import json
import math
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nanorun.errors import UserError
from nanorun.train.guard import (
    LossScaler,
    StopSignals,
    ThroughputMonitor,
    TrainingGuard,
)

ROOT = Path(__file__).parents[2]

WAITER = """
import time
from nanorun.train.guard import StopSignals
try:
    with StopSignals() as stop:
        print("ready", flush=True)
        for _ in range(3000):
            time.sleep(0.01)
            if stop.requested and not KEEP_ON:
                break
            if stop.requested:
                print("asked", flush=True)
        print("saved after", stop.requested, flush=True)
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""


def start_waiter(keep_on: bool) -> subprocess.Popen[str]:
    waiter = subprocess.Popen(
        [sys.executable, "-c", WAITER.replace("KEEP_ON", str(keep_on))],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    assert waiter.stdout is not None
    assert waiter.stdout.readline() == "ready\n"
    return waiter


@pytest.mark.parametrize("which", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_asks_for_an_orderly_end_and_says_so_once(which):
    waiter = start_waiter(keep_on=False)
    waiter.send_signal(which)
    out, err = waiter.communicate(timeout=20)
    assert out == f"saved after {which.name}\n"
    assert err.startswith(f"{which.name}: stopping, with a checkpoint")
    assert err.count("\n") == 1
    assert waiter.returncode == 0


def test_a_second_interrupt_stops_at_once_and_a_second_sigterm_does_not():
    waiter = start_waiter(keep_on=True)
    assert waiter.stdout is not None
    for which in (signal.SIGTERM, signal.SIGTERM, signal.SIGINT):
        waiter.send_signal(which)
        assert waiter.stdout.readline() == "asked\n"
    while "interrupted" not in (line := waiter.stdout.readline()):
        assert line == "asked\n"
        waiter.send_signal(signal.SIGINT)
    _, err = waiter.communicate(timeout=20)
    assert err.count("\n") == 1


def test_handlers_are_restored_and_other_threads_are_left_alone():
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with StopSignals():
        assert signal.getsignal(signal.SIGTERM) != before[1]
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before
    seen = []

    def elsewhere() -> None:
        with StopSignals() as stop:
            seen.append((signal.getsignal(signal.SIGINT), stop.requested))

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert seen == [(before[0], None)]


def warmed_up(**options: int) -> TrainingGuard:
    guard = TrainingGuard(**options)
    for index in range(60):
        assert guard.check(3.0 + 0.01 * (index % 7), 0.5 + 0.01 * (index % 5)) == "ok"
    return guard


ordinary = st.tuples(st.floats(2.6, 3.4), st.floats(0.3, 2.9))
bad = st.sampled_from([(math.nan, 1.0), (3.0, math.inf), (3.0, 1000.0), (90.0, 1.0)])


@given(st.lists(ordinary, max_size=200))
@settings(max_examples=50, deadline=None)
def test_ordinary_noise_is_never_touched(steps):
    guard = TrainingGuard(warmup=5, window=50)
    assert all(guard.check(loss, norm) == "ok" for loss, norm in steps)


@pytest.mark.parametrize(
    ("loss", "norm", "why"),
    [
        (math.nan, 0.5, "the loss is nan"),
        (math.inf, 0.5, "the loss is inf"),
        (3.0, math.nan, "the gradient norm is nan"),
        (3.0, 6.0, "12 times the median"),
        (6.0, 0.5, "far above the median"),
    ],
)
def test_bad_steps_are_skipped_with_a_reason(loss, norm, why):
    guard = warmed_up()
    assert guard.check(loss, norm) == "skip"
    assert why in guard.reason
    assert guard.check(3.0, 0.5) == "ok"
    assert guard.skips == 1


def test_before_the_warm_up_only_nan_is_bad():
    guard = TrainingGuard()
    assert [guard.check(11.0, 1.0), guard.check(30.0, 500.0), guard.check(math.nan, 1.0)] == [
        "ok",
        "ok",
        "skip",
    ]


def test_a_norm_that_stays_high_with_an_ordinary_loss_becomes_the_new_median():
    guard = warmed_up()
    assert [guard.check(3.0, 10.0) for _ in range(5)] == ["skip", "skip", "ok", "ok", "ok"]
    assert guard.check(3.0, 0.5) == "ok"
    for _ in range(100):
        guard.check(3.0, 10.0)
    assert guard.check(3.0, 11.0) == "ok", "and then a little more is no spike"


def test_a_norm_that_rises_slowly_while_the_loss_falls_never_ends_a_run():
    guard = warmed_up()
    found = [guard.check(3.0 - step / 500, 0.5 * 1.04**step * (1 + step % 3)) for step in range(150)]
    assert set(found) <= {"ok", "skip"}
    assert found.count("skip") < 75


def test_three_bad_steps_in_a_row_roll_back_and_repeated_rollbacks_end_the_run():
    guard = warmed_up()
    at_checkpoint = guard.state_dict()
    for _ in range(3):
        assert [guard.check(math.nan, 1.0) for _ in range(3)] == ["skip", "skip", "rollback"]
        guard.load_rolled_back_state(at_checkpoint)
        assert guard.check(3.0, 0.5) == "ok"  # a good step is not yet progress
    assert [guard.check(math.nan, 1.0) for _ in range(2)] == ["skip", "skip"]
    with pytest.raises(UserError, match=r"3 times and failed each time \(the loss is nan\).*--config"):
        guard.check(math.nan, 1.0)
    assert guard.skips == 12


def test_rolling_back_far_and_failing_at_the_same_place_is_no_progress():
    guard = warmed_up()
    at_checkpoint = guard.state_dict()
    for attempt in range(4):
        for _ in range(500):  # far more than the window, but the same 500 steps each time
            assert guard.check(3.0, 0.5) == "ok"
        end = verdicts(guard, [(math.nan, 1.0)] * 3)
        assert end == ["skip", "skip", "rollback" if attempt < 3 else "error"]
        guard.load_rolled_back_state(at_checkpoint)


def test_progress_past_the_failure_resets_the_rollback_count():
    guard = warmed_up()
    for _ in range(20):
        assert [guard.check(math.nan, 1.0) for _ in range(3)][-1] == "rollback"
        assert {guard.check(3.0, 0.5) for _ in range(101)} == {"ok"}


def verdicts(guard: TrainingGuard, steps: list[tuple[float, float]]) -> list[str]:
    found: list[str] = []
    for loss, norm in steps:
        try:
            found.append(guard.check(loss, norm))
        except UserError:
            found.append("error")
            break
    return found


@given(st.lists(st.one_of(ordinary, bad), max_size=150), st.integers(0, 150))
@settings(max_examples=100, deadline=None)
def test_a_restored_guard_gives_the_same_verdicts(steps, cut):
    options = {"warmup": 4, "window": 8}
    whole = verdicts(TrainingGuard(**options), steps)
    first = TrainingGuard(**options)
    before = verdicts(first, steps[:cut])
    if "error" in before:
        assert before == whole
        return
    second = TrainingGuard(**options)
    second.load_state_dict(json.loads(json.dumps(first.state_dict(), allow_nan=False)))
    assert before + verdicts(second, steps[cut:]) == whole


@given(st.lists(st.one_of(ordinary, bad), max_size=150))
@settings(max_examples=100, deadline=None)
def test_nothing_infinite_is_accepted_and_three_in_a_row_always_roll_back(steps):
    found = verdicts(TrainingGuard(warmup=4, window=8), steps)
    skipped = infinite = 0  # in a row
    for (loss, norm), verdict in zip(steps, found, strict=False):
        finite = math.isfinite(loss) and math.isfinite(norm)
        assert finite or verdict != "ok"
        infinite = 0 if finite else infinite + 1
        skipped = 0 if verdict == "ok" else skipped + 1
        if verdict in ("rollback", "error"):
            assert skipped >= 3
            skipped = infinite = 0
        assert infinite < 3


def record(watch: ThroughputMonitor, speeds: list[float], waiting: float = 0.0) -> list[str]:
    warnings = [watch.record(1000, 1000 / speed, waiting * 1000 / speed) for speed in speeds]
    return [line for line in warnings if line]


TYPICAL = [1000.0, 990.0, 1010.0] * 20


def test_throughput_that_stays_low_is_reported_once():
    watch = ThroughputMonitor()
    assert record(watch, TYPICAL) == []
    assert record(watch, [100.0, 1000.0] * 20) == [], "single slow steps are nothing"
    assert record(watch, [800.0] * 4) == []
    (line,) = record(watch, [800.0] * 20)
    assert "800 tokens/s, 80% of the median" in line


def test_the_first_steps_and_small_losses_are_nothing():
    watch = ThroughputMonitor()
    assert record(watch, [1e6] * 10 + TYPICAL + [900.0] * 50) == []


def test_a_warning_comes_again_after_a_while():
    watch = ThroughputMonitor(steps_between_warnings=30)
    assert len(record(watch, TYPICAL + [500.0] * 40)) == 2


def test_a_warning_reports_what_can_be_observed_of_the_cause():
    watch = ThroughputMonitor()
    assert record(watch, TYPICAL) == []
    (line,) = record(watch, [500.0] * 10, waiting=0.5)
    assert "Waiting for data: 50% of each step, before 0%" in line
    assert line.count(f"on {os.cpu_count()} cores") == 2, "the load now and at the start"


@given(
    steps=st.lists(
        st.tuples(
            st.floats(0.5, 50, width=32) | st.sampled_from([math.nan, math.inf]),
            st.floats(2**-10, 1000, width=32) | st.sampled_from([math.nan, math.inf]),
        ),
        max_size=120,
    )
)
@settings(max_examples=200, deadline=None)
def test_the_limits_before_a_step_are_those_of_the_verdict_after_it(steps):
    guard = TrainingGuard(warmup=5, window=20, max_rollbacks=10**6)
    for loss, norm in steps:
        largest_loss, largest_norm = guard.limits()
        on_device = bool((torch.tensor(loss) <= largest_loss) & (torch.tensor(norm) <= largest_norm))
        assert on_device == (guard.check(loss, norm) == "ok")


def test_the_loss_scale_falls_at_overflow_and_rises_after_steps_without_overflow():
    scale = LossScaler(active=True, patience=3)
    assert scale.update(2.0, math.inf)
    assert scale.update(2.0, math.nan)
    assert scale.scale == 2.0**14
    assert [scale.update(2.0, 1.0) for _ in range(3)] == [False] * 3
    assert scale.scale == 2.0**15
    assert not scale.update(math.nan, math.nan), "a NaN loss is not the scale's fault"
    again = LossScaler(active=True)
    again.load_state_dict(scale.state_dict())
    assert again.state_dict() == scale.state_dict()
    assert LossScaler(active=False).scale == 1.0
