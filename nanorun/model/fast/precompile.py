"""Compiles kernels ahead, in other processes, where the caches on disk are empty.

FlashAttention-4's kernels, quack's GEMMs and our own are Python that is compiled when first called, one after the
other, while all cores but one wait. So a first start launches processes that call them: one per attention window, a
few for the GEMMs, and one that trains a small model of the same widths for one step, which calls every kernel of ours
with the specializations that the run will ask for. The run compiles its graphs meanwhile, and finds the kernels in the
cache when it comes to them. What is not compiled by then the run compiles itself; a run that needs the GPU's last
gigabytes stops the processes (`stop`).
"""

import getpass
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from nanorun.config import ModelConfig
from nanorun.hardware import usable_cores
from nanorun.model.fast.path import FastPath
from nanorun.model.fast.recipe import Recipe, default_fp8, resolve
from nanorun.model.gpt import build
from nanorun.model.kernels import flash, gemm

MIN_CORES = 8  # with fewer, the processes would slow down the run
GEMM_PROCESSES = 3  # the run tests its GEMMs before it has anything else to compile
_processes: list[subprocess.Popen[bytes]] = []


def start(config: ModelConfig, recipe: Recipe, device: torch.device) -> int:
    """Starts the processes for a model that attends by FlashAttention-4, where they help; returns how many."""
    if not is_worthwhile(device):
        return 0
    calls = []
    if _is_empty("flash_attention_cute_dsl_cache", "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR"):
        shape = f"{config.heads}, {config.kv_heads}, {config.head_dim}, {config.context}"
        windows = sorted({min(config.window(layer), config.context) for layer in range(config.depth)})
        calls += [f"compile_attention({shape}, {window})" for window in windows]
    runs_fp8 = recipe.fp8 == "all" or (recipe.fp8 == "auto" and default_fp8(config, pays=True) == "all")
    if runs_fp8 and _is_installed("quack") and _is_empty("quack_cache", "QUACK_CACHE_DIR"):
        calls.append(f"compile_kernels({asdict(config)!r}, {recipe.to_dict()!r})")
        calls += [f"compile_gemms({part})" for part in range(GEMM_PROCESSES)]
    _processes.extend(_launch(call) for call in calls)
    return len(calls)


def stop() -> bool:
    """Ends the processes that are still running; whether there were any."""
    running = [process for process in _processes if process.poll() is None]
    for process in running:
        process.kill()
        process.wait()
    _processes.clear()
    return bool(running)


def is_worthwhile(device: torch.device) -> bool:
    """On a Hopper GPU with enough cores, where FlashAttention-4 is installed and caches its kernels on disk."""
    if (
        device.type != "cuda"
        or torch.cuda.get_device_capability(device)[0] != 9
        or usable_cores() < MIN_CORES
    ):
        return False
    return os.environ.get(flash.DISK_CACHE, "1") == "1" and _is_installed("flash_attn.cute")


def _is_installed(package: str) -> bool:
    try:
        return find_spec(package) is not None
    except Exception:  # the parent package is missing or fails to import
        return False


def _is_empty(default: str, variable: str) -> bool:
    """Whether a package has cached nothing in the folder that the variable names, or in its default folder."""
    try:
        folder = os.environ.get(variable) or Path(tempfile.gettempdir()) / getpass.getuser() / default
    except Exception:  # a user without a name
        return False
    return not any(Path(folder).rglob("*.o"))


def _launch(call: str) -> subprocess.Popen[bytes]:
    code = f"from nanorun.model.fast import precompile; precompile.{call}"
    root = str(Path(__file__).resolve().parents[3])
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([root, *sys.path[1:]])}
    null = subprocess.DEVNULL
    return subprocess.Popen([sys.executable, "-c", code], env=env, stdin=null, stdout=null, stderr=null)


# What the processes run


def compile_attention(heads: int, kv_heads: int, head_dim: int, length: int, window: int) -> None:
    """FlashAttention-4, forward and backward, for one window of a model of this shape."""
    os.environ.setdefault(flash.DISK_CACHE, "1")
    qkv = torch.zeros(1, length, heads + 2 * kv_heads, head_dim, device="cuda", dtype=torch.bfloat16)
    q, k, v = (each.requires_grad_() for each in qkv.split([heads, kv_heads, kv_heads], dim=2))
    flash.flash_attention(q, k, v, window).sum().backward()


def compile_kernels(config: dict[str, Any], recipe: dict[str, Any]) -> None:
    """One step of a smaller model of the same widths, on a short row: our own kernels."""
    model = ModelConfig(**config)
    device = torch.device("cuda")
    resolved = resolve(Recipe.from_dict(recipe), model, device, torch.bfloat16, strict=False)
    train_one_step(smaller(model), resolved, device)


def compile_gemms(part: int) -> None:
    """Every third GEMM of ours; the run waits for one that it reaches meanwhile."""
    gemm.self_test(torch.device("cuda"), slice(part, None, GEMM_PROCESSES))


def smaller(config: ModelConfig) -> ModelConfig:
    """The same widths and vocabulary, with layers of every kind: with and without a value embedding, before, at and
    after mid-depth, with λ and μ at addresses of the same alignment (which kernels specialize on)."""
    return replace(config, depth=min(config.depth, 4 + (config.depth - 4) % 8))


def train_one_step(config: ModelConfig, recipe: Recipe, device: torch.device, length: int = 256) -> None:
    """Forward and backward without torch.compile, on a row of zeros."""
    path = FastPath(build(config, device, torch.bfloat16), recipe)
    tokens = torch.zeros(1, min(length, config.context), dtype=torch.int32, device=device)
    path(tokens, tokens.long()).backward()
