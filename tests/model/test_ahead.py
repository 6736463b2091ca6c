"""Helpers that compile kernels ahead are sent where something is to be compiled, and do what the model will ask for."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from nanorun.config import scale_model
from nanorun.model.kernels import ahead

HOPPER = torch.device("cuda")


@pytest.fixture
def tasks(monkeypatch, tmp_path):
    """What helpers were asked to do, on a pretended machine: a Hopper GPU, both packages, nothing compiled yet."""
    asked: list[str] = []
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(ahead, "find_spec", lambda name: name)
    monkeypatch.setattr(ahead, "usable_cores", lambda: 16)
    monkeypatch.setattr(ahead, "_started", asked.append)
    monkeypatch.setattr(ahead, "_helpers", [])
    monkeypatch.setenv("FLASH_ATTENTION_CUTE_DSL_CACHE_DIR", str(tmp_path / "flash"))
    monkeypatch.setenv("QUACK_CACHE_DIR", str(tmp_path / "quack"))
    monkeypatch.delenv("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", raising=False)
    return asked


def test_a_first_start_sends_helpers_for_each_window_for_our_kernels_and_for_the_products(tasks, monkeypatch):
    config = scale_model(12, 32_768)
    assert ahead.send_ahead(config, HOPPER) == len(tasks) == 6
    called = []
    for task in ("flash_task", "kernels_task", "products_task"):
        monkeypatch.setattr(ahead, task, lambda *shape: called.append(shape))
    for task in tasks:
        exec(f"ahead.{task}", {"ahead": ahead})
    short, full = config.window(0), config.context
    assert short < full
    attention = [(6, 6, 128, full, short), (6, 6, 128, full, full)]
    assert called == [*attention, (6, 6, 128, full, 768, 3072, 32_768, 32_768), (0,), (1,), (2,)]


def test_a_model_in_sixteen_bits_needs_attention_alone(tasks):
    assert ahead.send_ahead(replace(scale_model(12, 32_768), fp8="none"), HOPPER) == 2
    assert all(task.startswith("flash_task") for task in tasks)


@pytest.mark.skipif(find_spec("triton") is None, reason="kernels need Triton")
def test_our_own_kernels_are_called_ahead_as_a_first_step_calls_them():
    """Every launch of a step is recorded, not made: which kernel, with arguments of which kinds and sizes."""
    env = {**os.environ, "TRITON_INTERPRET": "0"}
    script = Path(__file__).with_name("launches_ahead.py")
    done = subprocess.run([sys.executable, str(script)], env=env, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert len(found["step"]) > 15
    assert not set(found["step"]) - set(found["ahead"])


def test_none_is_sent_where_kernels_are_there_or_cannot_be_used(tasks, monkeypatch, tmp_path):
    config = scale_model(12, 32_768)
    assert ahead.send_ahead(config, torch.device("cpu")) == 0
    monkeypatch.setattr(ahead, "usable_cores", lambda: 2)
    assert ahead.send_ahead(config, HOPPER) == 0, "two cores have enough to do"
    monkeypatch.setattr(ahead, "usable_cores", lambda: 16)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 0))
    assert ahead.send_ahead(config, HOPPER) == 0, "not a Hopper GPU"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setenv("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "0")
    assert ahead.send_ahead(config, HOPPER) == 0, "nothing would be kept"
    monkeypatch.delenv("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED")
    monkeypatch.setattr(ahead, "find_spec", lambda name: None)
    assert ahead.send_ahead(config, HOPPER) == 0, "not installed"
    monkeypatch.setattr(ahead, "find_spec", lambda name: name)
    for package in ("flash", "quack"):
        (tmp_path / package / "digest").mkdir(parents=True)
        (tmp_path / package / "digest" / "kernel.o").touch()
    assert ahead.send_ahead(config, HOPPER) == 0, "a second start"
    assert tasks == []


def test_the_first_run_in_eight_bits_after_one_in_sixteen_sends_for_what_is_new(tasks, tmp_path):
    (tmp_path / "flash").mkdir()
    (tmp_path / "flash" / "kernel.o").touch()
    assert ahead.send_ahead(scale_model(12, 32_768), HOPPER) == 4
    assert [task.split("(")[0] for task in tasks] == ["kernels_task"] + 3 * ["products_task"]


def test_helpers_at_work_are_ended_when_recalled(monkeypatch):
    helper = ahead._started("subprocess.time.sleep(60)")
    monkeypatch.setattr(ahead, "_helpers", [helper])
    assert ahead.recall()
    assert helper.poll() is not None
    assert not ahead.recall(), "there are none any more"


def test_a_helper_is_a_process_that_finds_this_package():
    assert ahead._started("usable_cores()").wait(60) == 0
    assert ahead._started("no_such_task()").wait(60) == 1
