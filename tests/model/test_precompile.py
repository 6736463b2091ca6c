"""Kernels are precompiled where the caches are empty, and those are the kernels that a first step launches."""

import json
import os
import subprocess
import sys
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from nanorun.config import scale_model
from nanorun.model.fast import precompile
from nanorun.model.fast.recipe import DEFAULT_RECIPE, Recipe

HOPPER = torch.device("cuda")


@pytest.fixture
def tasks(monkeypatch, tmp_path):
    """What helpers were asked to do, on a pretended machine: a Hopper GPU, both packages, nothing compiled yet."""
    asked: list[str] = []
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(precompile, "find_spec", lambda name: name)
    monkeypatch.setattr(precompile, "usable_cores", lambda: 16)
    monkeypatch.setattr(precompile, "_launch", asked.append)
    monkeypatch.setattr(precompile, "_processes", [])
    monkeypatch.setenv("FLASH_ATTENTION_CUTE_DSL_CACHE_DIR", str(tmp_path / "flash"))
    monkeypatch.setenv("QUACK_CACHE_DIR", str(tmp_path / "quack"))
    monkeypatch.delenv("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", raising=False)
    return asked


def test_a_first_start_sends_helpers_for_each_window_for_our_kernels_and_for_the_products(tasks, monkeypatch):
    config = scale_model(12, 32_768)
    assert precompile.start(config, DEFAULT_RECIPE, HOPPER) == len(tasks) == 6
    called = []
    for name in ("compile_attention", "compile_kernels", "compile_gemms"):
        monkeypatch.setattr(precompile, name, lambda *arguments: called.append(arguments))
    for task in tasks:
        exec(f"precompile.{task}", {"precompile": precompile})
    short, full = config.window(0), config.context
    assert short < full
    attention = [(6, 6, 128, full, short), (6, 6, 128, full, full)]
    kernels = (asdict(config), DEFAULT_RECIPE.to_dict())
    assert called == [*attention, kernels, (0,), (1,), (2,)]


def test_a_recipe_without_fp8_needs_attention_alone(tasks):
    assert precompile.start(scale_model(12, 32_768), Recipe(fp8="none"), HOPPER) == 2
    assert all(task.startswith("compile_attention") for task in tasks)


@pytest.mark.skipif(find_spec("triton") is None, reason="kernels need Triton")
def test_our_own_kernels_are_called_ahead_as_a_first_step_calls_them():
    """Every launch of a step is recorded, not made: which kernel, with arguments of which kinds and sizes."""
    env = {**os.environ, "TRITON_INTERPRET": "0"}
    script = Path(__file__).with_name("record_launches.py")
    done = subprocess.run([sys.executable, str(script)], env=env, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert len(found["step"]) > 15
    assert not set(found["step"]) - set(found["ahead"])


def test_none_is_sent_where_kernels_are_there_or_cannot_be_used(tasks, monkeypatch, tmp_path):
    config = scale_model(12, 32_768)
    assert precompile.start(config, DEFAULT_RECIPE, torch.device("cpu")) == 0
    monkeypatch.setattr(precompile, "usable_cores", lambda: 2)
    assert precompile.start(config, DEFAULT_RECIPE, HOPPER) == 0, "two cores have enough to do"
    monkeypatch.setattr(precompile, "usable_cores", lambda: 16)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 0))
    assert precompile.start(config, DEFAULT_RECIPE, HOPPER) == 0, "not a Hopper GPU"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setenv("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "0")
    assert precompile.start(config, DEFAULT_RECIPE, HOPPER) == 0, "nothing would be kept"
    monkeypatch.delenv("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED")
    monkeypatch.setattr(precompile, "find_spec", lambda name: None)
    assert precompile.start(config, DEFAULT_RECIPE, HOPPER) == 0, "not installed"
    monkeypatch.setattr(precompile, "find_spec", lambda name: name)
    for package in ("flash", "quack"):
        (tmp_path / package / "digest").mkdir(parents=True)
        (tmp_path / package / "digest" / "kernel.o").touch()
    assert precompile.start(config, DEFAULT_RECIPE, HOPPER) == 0, "a second start"
    assert tasks == []


def test_the_first_run_in_eight_bits_after_one_in_sixteen_sends_for_what_is_new(tasks, tmp_path):
    (tmp_path / "flash").mkdir()
    (tmp_path / "flash" / "kernel.o").touch()
    assert precompile.start(scale_model(12, 32_768), DEFAULT_RECIPE, HOPPER) == 4
    assert [task.split("(")[0] for task in tasks] == ["compile_kernels"] + 3 * ["compile_gemms"]


def test_processes_at_work_are_stopped(monkeypatch):
    process = precompile._launch("subprocess.time.sleep(60)")
    monkeypatch.setattr(precompile, "_processes", [process])
    assert precompile.stop()
    assert process.poll() is not None
    assert not precompile.stop(), "there are none any more"


def test_a_process_finds_this_package():
    assert precompile._launch("usable_cores()").wait(60) == 0
    assert precompile._launch("no_such_function()").wait(60) == 1
