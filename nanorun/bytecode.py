"""Python's compiled modules, kept where Python itself does not keep them.

torch is some two thousand modules. Python compiles each when it is first imported and writes the result beside the
source; in many containers it does not (PYTHONDONTWRITEBYTECODE is set, or the packages are read-only), and every
start then compiles them all again: 9 s of the 32 that a d12's second start took on an H200.
"""

import importlib.util
import os
import sys
from pathlib import Path


def keep_bytecode() -> None:
    """From now on, and in processes started from here. Call it before torch is imported."""
    found = importlib.util.find_spec("torch")
    if (
        sys.pycache_prefix
        or found is None
        or found.origin is None
        or _kept_already(found.origin, found.cached)
    ):
        return
    try:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "nanorun" / "bytecode"
    except RuntimeError:  # a user without a home
        return
    sys.pycache_prefix = os.environ["PYTHONPYCACHEPREFIX"] = str(folder)
    sys.dont_write_bytecode = False
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)


def _kept_already(source: str, compiled: str | None) -> bool:
    """Or will be, after this import."""
    if compiled is not None and Path(compiled).exists():
        return True
    return not sys.dont_write_bytecode and os.access(Path(source).parent, os.W_OK)
