"""What a helper compiles ahead is what a model then finds in the caches."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from nanorun.model.kernels import flash, products

ROOT = Path(__file__).resolve().parents[2]
CUDA = torch.device("cuda")
AS_A_MODEL_DOES = """
import torch
from nanorun.model.kernels import flash
assert flash.works(torch.device("cuda"), 128)
qkv = torch.randn(2, 512, 18, 128, device="cuda").bfloat16().requires_grad_()
flash.flash_attention(*qkv.split(6, dim=2), {window}).sum().backward()
"""


def run(code: str, folder: Path) -> set[str]:
    """Names of the kernels in the caches, after a process has run this."""
    caches = {"FLASH_ATTENTION_CUTE_DSL_CACHE_DIR": str(folder / "f"), "QUACK_CACHE_DIR": str(folder / "q")}
    env = {**os.environ, **caches, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    subprocess.run([sys.executable, "-c", code], env=env, check=True, timeout=200)
    return {str(file) for file in folder.rglob("*.o")}


@pytest.mark.parametrize("window", [128, 512])
def test_attention_is_found_both_ways(tmp_path, window):
    if not flash.works(CUDA, 128):
        pytest.skip("FlashAttention-4 does not run here")
    model = AS_A_MODEL_DOES.format(window=window)
    task = f"from nanorun.model.kernels import ahead; ahead.flash_task(6, 6, 128, 512, {window})"
    first = run(task, tmp_path)
    checked = run(
        "import torch; from nanorun.model.kernels import flash; flash.works(torch.device('cuda'), 128)",
        tmp_path,
    )
    assert first
    assert run(model, tmp_path) == checked


def test_products_are_found(tmp_path):
    if not products.work(CUDA):
        pytest.skip("quack's products do not run here")
    first = run("from nanorun.model.kernels import ahead; ahead.products_task()", tmp_path)
    found = run(
        "import torch; from nanorun.model.kernels import products; assert products.work(torch.device('cuda'))",
        tmp_path,
    )
    assert first
    assert found == first
