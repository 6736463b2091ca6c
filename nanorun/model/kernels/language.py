"""Triton, or a stand-in where it is not installed: a CPU build of torch has none, and importing the kernels must work
there all the same. The stand-in is enough to define a kernel, not to run it."""

import importlib
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

HAS_TRITON = find_spec("triton") is not None


def _define_only(function: Any = None, **options: Any) -> Any:
    return _define_only if function is None else function


triton: Any = importlib.import_module("triton") if HAS_TRITON else SimpleNamespace(jit=_define_only)
tl: Any = importlib.import_module("triton.language") if HAS_TRITON else SimpleNamespace(constexpr=None)
