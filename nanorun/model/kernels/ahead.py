"""Kernels that compile themselves, compiled ahead by other processes.

FlashAttention-4's kernels and quack's products are Python that is compiled when first called, one after the other, a
second or three each. On a first start that is half a minute of one core, while the others wait. So where their caches
on disk are empty, helpers are sent ahead: each calls some of the kernels on a handful of numbers, and the run, which
has its own compiling to do meanwhile, finds them in the cache when it comes to them. Nobody waits for a helper, and
nothing depends on one: what it has not compiled is compiled by the run.
"""

import getpass
import os
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

import torch

from nanorun.config import ModelConfig
from nanorun.model.kernels import flash, products

CORES = 6  # with fewer, helpers would only be in the way
_helpers: list[subprocess.Popen[bytes]] = []


def send_ahead(config: ModelConfig, device: torch.device) -> int:
    """Starts the helpers, where they help; how many."""
    if not worthwhile(device):
        return 0
    shape = f"{config.heads}, {config.kv_heads}, {config.head_dim}, {config.context}"
    windows = sorted({min(config.window(layer), config.context) for layer in range(config.depth)})
    tasks = [f"flash_task({shape}, {window})" for window in windows]
    if find_spec("quack") is not None:
        tasks.append("products_task()")
    _helpers.extend(_started(task) for task in tasks)
    return len(tasks)


def worthwhile(device: torch.device) -> bool:
    if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] != 9:
        return False
    enough = len(os.sched_getaffinity(0)) >= CORES
    return enough and find_spec("flash_attn") is not None and not any(cache().rglob("*.o"))


def cache() -> Path:
    """Where FlashAttention-4 keeps its kernels. Whoever has those has quack's."""
    told = os.environ.get("FLASH_ATTENTION_CUTE_DSL_CACHE_DIR")
    return (
        Path(told)
        if told
        else Path(tempfile.gettempdir()) / getpass.getuser() / "flash_attention_cute_dsl_cache"
    )


def _started(task: str) -> subprocess.Popen[bytes]:
    code = f"from nanorun.model.kernels import ahead; ahead.{task}"
    nowhere = subprocess.DEVNULL
    root = str(Path(__file__).resolve().parents[3])
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([root, *sys.path[1:]])}
    return subprocess.Popen(
        [sys.executable, "-c", code], env=env, stdin=nowhere, stdout=nowhere, stderr=nowhere
    )


# What helpers do


def flash_task(heads: int, kv_heads: int, head_dim: int, length: int, window: int) -> None:
    """Attention as a model of this shape asks for it, both ways."""
    os.environ.setdefault(flash.DISK_CACHE, "1")
    qkv = torch.zeros(1, length, heads + 2 * kv_heads, head_dim, device="cuda", dtype=torch.bfloat16)
    q, k, v = (each.requires_grad_() for each in qkv.split([heads, kv_heads, kv_heads], dim=2))
    flash.flash_attention(q, k, v, window).sum().backward()


def products_task() -> None:
    """From the last to the first, since the run itself begins with the first."""
    products.right(torch.device("cuda"), backwards=True)
