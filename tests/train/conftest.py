"""Fixtures of the tests that train."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch


@pytest.fixture
def one_thread(monkeypatch: pytest.MonkeyPatch, world: Path) -> Iterator[None]:
    """In the module's `world`. Sums in one order, here and in child processes, and no fight for the cores."""
    monkeypatch.setenv("NANORUN_HOME", str(world))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
