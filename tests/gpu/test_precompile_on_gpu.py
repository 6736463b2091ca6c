"""What a helper compiles ahead is what a model then finds in the caches."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from nanorun.model.kernels import flash, gemm

ROOT = Path(__file__).resolve().parents[2]
CUDA = torch.device("cuda")
AS_A_MODEL_DOES = """
import torch
from nanorun.model.kernels import flash
assert flash.is_supported(torch.device("cuda"), 128)
qkv = torch.randn(2, 512, 18, 128, device="cuda").bfloat16().requires_grad_()
flash.flash_attention(*qkv.split(6, dim=2), {window}).sum().backward()
"""


PRECOMPILED = """
from dataclasses import asdict
from nanorun.config import scale_model
from nanorun.model.fast import precompile
config = scale_model(6, 1000, context=256, dim=256, heads=2, kv_heads=2, short_window=128)
precompile.compile_kernels(asdict(config), {"fp8": "all"})
"""


A_FIRST_STEP = """
import torch
from nanorun.config import scale_model
from nanorun.model.attention import choose_backends
from nanorun.model.fast.path import FastPath
from nanorun.model.fast.recipe import Recipe, resolve
from nanorun.model.gpt import build
cuda = torch.device("cuda")
config = scale_model(6, 1000, context=256, dim=256, heads=2, kv_heads=2, short_window=128)
model = build(config, cuda, torch.bfloat16, choose_backends(config, cuda, compiled=False))
path = FastPath(model, resolve(Recipe(fp8="all"), config, cuda, torch.bfloat16))
tokens = torch.zeros(2, 256, device=cuda, dtype=torch.int32)
(path(tokens, tokens.long()) / 512).backward()
"""


def run(code: str, folder: Path) -> set[str]:
    """Names of the kernels in the caches, after a process has run this."""
    places = {"FLASH_ATTENTION_CUTE_DSL": "f", "QUACK": "q", "TRITON": "t"}
    caches = {f"{package}_CACHE_DIR": str(folder / name) for package, name in places.items()}
    env = {**os.environ, **caches, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    subprocess.run([sys.executable, "-c", code], env=env, check=True, timeout=200)
    return {str(file) for kind in ("*.o", "*.cubin") for file in folder.rglob(kind)}


@pytest.mark.parametrize("window", [128, 512])
def test_attention_is_found_both_ways(tmp_path, window):
    if not flash.is_supported(CUDA, 128):
        pytest.skip("FlashAttention-4 does not run here")
    model = AS_A_MODEL_DOES.format(window=window)
    task = (
        f"from nanorun.model.fast import precompile; precompile.compile_attention(6, 6, 128, 512, {window})"
    )
    first = run(task, tmp_path)
    checked = run(
        "import torch; from nanorun.model.kernels import flash; flash.is_supported(torch.device('cuda'), 128)",
        tmp_path,
    )
    assert first
    assert run(model, tmp_path) == checked


def test_products_are_found(tmp_path):
    if not gemm.is_supported(CUDA):
        pytest.skip("quack's products do not run here")
    parts = "[precompile.compile_gemms(part) for part in range(precompile.GEMM_PROCESSES)]"
    first = run(f"from nanorun.model.fast import precompile; {parts}", tmp_path)
    found = run(
        "import torch; from nanorun.model.kernels import gemm; assert gemm.is_supported(torch.device('cuda'))",
        tmp_path,
    )
    assert first
    assert found == first


def test_our_own_kernels_are_found(tmp_path):
    if not gemm.is_supported(CUDA):
        pytest.skip("quack's products do not run here")
    first = run(PRECOMPILED, tmp_path)
    found = run(A_FIRST_STEP, tmp_path)
    assert len(first) > 15
    assert {name for name in found if name.endswith(".cubin")} == {
        name for name in first if name.endswith(".cubin")
    }
