"""A bytecode cache for environments in which Python writes none.

torch has about two thousand modules. Python compiles each at its first import and caches the bytecode beside the
source. In many containers it does not (PYTHONDONTWRITEBYTECODE is set, or the packages are read-only), and every
start compiles all of them again: 9 s of the 32 that the second start of a d12 took on an H200.
"""

import importlib.util
import os
import sys
from pathlib import Path


def keep_bytecode() -> None:
    """Enables the cache for this process and its children. Call it before torch is imported."""
    torch = importlib.util.find_spec("torch")
    if sys.pycache_prefix or torch is None or torch.origin is None or _is_cached(torch.origin, torch.cached):
        return
    try:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "nanorun" / "bytecode"
    except RuntimeError:  # a user without a home folder
        return
    sys.pycache_prefix = os.environ["PYTHONPYCACHEPREFIX"] = str(folder)
    sys.dont_write_bytecode = False
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)


def _is_cached(source: str, compiled: str | None) -> bool:
    """Whether Python caches this module, or will after this import."""
    if compiled is not None and Path(compiled).exists():
        return True
    return not sys.dont_write_bytecode and os.access(Path(source).parent, os.W_OK)
