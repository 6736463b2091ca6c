"""Bytecode is cached where Python writes none, and only there."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

IMPORT = "from nanorun.bytecode import keep_bytecode; keep_bytecode(); import torch, sys; print(sys.pycache_prefix)"
ROOT = Path(__file__).parents[1]


@pytest.fixture
def start(tmp_path):
    """Starts Python with a torch of one line. Returns its output and the folders of the cached bytecode."""
    package = tmp_path / "packages" / "torch"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("stand_in = True\n")

    def run(**settings):
        hidden = ("PYTHONDONTWRITEBYTECODE", "PYTHONPYCACHEPREFIX", "XDG_CACHE_HOME")
        env = {k: v for k, v in os.environ.items() if k not in hidden}
        env |= {"PYTHONPATH": f"{package.parent}:{ROOT}", "HOME": str(tmp_path / "me"), **settings}
        done = subprocess.run([sys.executable, "-c", IMPORT], env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        kept = [p.relative_to(tmp_path) for p in tmp_path.rglob("*.pyc") if "packages/torch" in str(p)]
        return done.stdout.strip(), [str(p.parent) for p in kept]

    return run


def test_bytecode_is_cached_where_python_writes_none(start, tmp_path):
    said, kept = start(PYTHONDONTWRITEBYTECODE="1")
    assert said == str(tmp_path / "me/.cache/nanorun/bytecode")
    assert len(kept) == 1
    assert kept[0].startswith("me/.cache/nanorun/bytecode")


def test_nothing_changes_where_python_caches_bytecode(start):
    for _ in range(2):
        assert start() == ("None", ["packages/torch/__pycache__"])
    assert start(PYTHONDONTWRITEBYTECODE="1") == ("None", ["packages/torch/__pycache__"])


def test_a_configured_cache_folder_is_kept(start, tmp_path):
    said, kept = start(PYTHONPYCACHEPREFIX=str(tmp_path / "mine"))
    assert said == str(tmp_path / "mine")
    assert all(place.startswith("mine") for place in kept)
    assert kept
