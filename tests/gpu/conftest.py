"""Tests in this folder need a CUDA device and are skipped without one."""

import os

import pytest
import torch

# Deterministic tests need this before cuBLAS is initialized.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


@pytest.fixture(autouse=True)
def needs_cuda() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device (make test-gpu runs these on a machine that has one)")
