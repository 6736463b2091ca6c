"""Tests in this folder need a CUDA device; everywhere else they are skipped, and say so."""

import os

import pytest
import torch

os.environ.setdefault(
    "CUBLAS_WORKSPACE_CONFIG", ":4096:8"
)  # what deterministic tests need, before cuBLAS begins


@pytest.fixture(autouse=True)
def needs_cuda() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device here (make test-gpu runs these on a machine that has one)")
