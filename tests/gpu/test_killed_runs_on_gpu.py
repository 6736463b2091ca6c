"""On a GPU, too, a run loses nothing: with --deterministic it ends with the very weights of an undisturbed one."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from small_home import STEPS, make_home, small

from nanorun.runs import read_metrics

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device here")
    return make_home(tmp_path_factory.mktemp("home"))


def weights(home: Path, name: str) -> dict[str, torch.Tensor]:
    return load_file(max((home / "runs" / name / "checkpoints").glob("0*")) / "model.safetensors")


def logged_steps(home: Path, name: str) -> list[int]:
    folder = home / "runs" / name
    return [r["step"] for r in read_metrics(folder) if r["kind"] == "step"] if folder.exists() else []


def learned(home: Path, name: str) -> list[tuple[int, float, float]]:
    """Each step's loss and gradient norm."""
    steps = [r for r in read_metrics(home / "runs" / name) if r["kind"] == "step"]
    return [(r["step"], r["loss"], r["grad_norm"]) for r in steps]


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("how", "kills"), [("--no-compile", 5), ("--compile", 2)])
def test_killed_at_random_moments_it_ends_with_bit_identical_weights(world, how, kills):
    config = world / "config.json"
    config.write_text(json.dumps(small().to_dict()))
    env = {**os.environ, "NANORUN_HOME": str(world), "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}

    said = world / f"said{how}.txt"

    def start(name: str) -> subprocess.Popen[bytes]:
        options = ["--config", str(config), "--name", f"{name}{how}", "--deterministic", how, "--json"]
        command = [sys.executable, "-m", "nanorun", "train", "base", *options]
        with said.open("a") as errors:
            return subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=errors)

    untouched = start("untouched")
    dice, goals = random.Random(5), []
    for kill in range(kills):
        child = start("killed")
        goals.append(goal := (STEPS - 30) * kill // kills + dice.randrange(6, 15))
        until = time.monotonic() + 120
        while max(logged_steps(world, f"killed{how}"), default=0) < goal and time.monotonic() < until:
            time.sleep(0.005)
        time.sleep(dice.uniform(0, 0.05))
        assert child.poll() is None, "it must still have been running"
        child.send_signal(signal.SIGKILL)
        child.wait()
    assert start("killed").wait() == 0
    assert untouched.wait() == 0
    assert logged_steps(world, f"killed{how}") == list(range(1, STEPS + 1))
    steps = [learned(world, f"{name}{how}") for name in ("untouched", "killed")]
    unlike = [(one, other) for one, other in zip(*steps, strict=True) if one != other]
    lines = [line for line in said.read_text().splitlines() if "tok/s" not in line]
    assert not unlike, f"killed about steps {goals}; these differ: {unlike[:3]}. They said: {lines[-12:]}"
    assert not any("out of memory" in line for line in lines), "smaller micro-batches round otherwise"
    one, other = weights(world, f"untouched{how}"), weights(world, f"killed{how}")
    assert all(torch.equal(one[name], other[name]) for name in one)
