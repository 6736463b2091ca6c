"""Training kernels, one folder each: `kernel.py` is the fast version, `reference.py` the same function in plain
PyTorch, which the tests compare it with. Kernels are functions of tensors. They need Triton; without it, or on
another device than a CUDA GPU, the model does not call them."""

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any, TypeVar

import torch

from nanorun.errors import UserError

F = TypeVar("F", bound=Callable[..., Any])
OPAQUE_FUNCTIONS: list[Callable[..., Any]] = []


def opaque_to_dynamo(function: F) -> F:
    """Marks a function of tensors and constants that Dynamo puts into the graph without tracing it. It calls an
    autograd.Function, and tracing one takes as long as all the rest of a layer. compiling.py registers these functions
    with torch."""
    OPAQUE_FUNCTIONS.append(function)
    return function


def passes(self_test: Callable[[], bool]) -> bool:
    """Whether kernels of an optional package run here and give the right results. Running out of memory does not mean
    that they are unsupported, and is an error."""
    try:
        return self_test()
    except torch.OutOfMemoryError as error:
        raise UserError(
            "No free GPU memory for the kernel self-test: other processes use it all. nvidia-smi lists them."
        ) from error
    except Exception:  # not installed; or whatever a young compiler raises on an untested machine
        return False


def kernels_run_on(device: torch.device) -> bool:
    return device.type == "cuda" and find_spec("triton") is not None
