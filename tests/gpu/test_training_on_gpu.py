"""On a GPU, too, a run loses nothing: with --deterministic it ends with the very weights of an undisturbed one."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from nanorun.config import Config, OptimConfig, TrainConfig, scale_model
from nanorun.data.get import make_sample
from nanorun.runs import read_metrics
from nanorun.text.tokenizer import PATTERN, SPECIAL_TOKENS, Tokenizer
from nanorun.train import base, loop
from nanorun.train.base import Options

ROOT = Path(__file__).resolve().parents[2]
STEPS = 120


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home with the sample world and a tokenizer of single bytes, which needs no trainer."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device here")
    home = tmp_path_factory.mktemp("home")
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
@pytest.mark.parametrize(("how", "kills"), [("--no-compile", 10), ("--compile", 2)])
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


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_sixteen_bits_learn_as_fp32_does(world, monkeypatch, dtype):
    monkeypatch.setenv("NANORUN_HOME", str(world))
    losses = {}
    for kind in ("fp32", dtype):
        options = Options(name=f"as-{kind}", fresh=True, dtype=kind, samples=2, compile=kind != "fp32")
        summary = base.train_base(small(30), options)
        losses[kind] = [r["loss"] for r in read_metrics(world / "runs" / f"as-{kind}") if r["kind"] == "step"]
        assert summary["samples"][0]["text"]
    # Only the first steps: then rounding is amplified (Adam makes full steps of gradients that are zero at first).
    assert losses[dtype][:3] == pytest.approx(losses["fp32"][:3], abs=0.02)
    assert losses[dtype][-1] < 3.0 < losses[dtype][0]


@pytest.mark.parametrize("graphs", [False, True])
def test_a_bad_step_is_skipped_on_the_device_without_a_wait(world, monkeypatch, graphs):
    monkeypatch.setenv("NANORUN_HOME", str(world))
    config = small()
    with base.Run.open(f"skips-{graphs}", config.to_dict(), fresh=True) as run:
        t = base.assemble(config, run, Options(graphs=graphs), None)
        with t.loader:
            for _ in range(4):  # of one micro-batch each: by then it is recorded
                loop.train_step(t)
            assert (getattr(t.learn, "graph", None) is not None) == graphs
            before = [p.detach().clone() for p in t.model.parameters()]
            with torch.no_grad():
                t.model.head.weight.mul_(float("nan"))
            t.model.renew()
            assert loop.train_step(t).verdict == "skip"
            with torch.no_grad():
                head = next(p for name, p in zip(names(t), before, strict=True) if name == "head.weight")
                t.model.head.weight.copy_(head)
            t.model.renew()
            assert all(torch.equal(p, q) for p, q in zip(t.model.parameters(), before, strict=True))
            assert loop.train_step(t).verdict == "ok"


def names(t: loop.Training) -> list[str]:
    return [name for name, _ in t.model.named_parameters()]
