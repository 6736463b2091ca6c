"""Kernels written by hand in Triton, each with its plain PyTorch reference. Where there is no Triton, none is used."""

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any, TypeVar

import torch

from nanorun.errors import UserError

F = TypeVar("F", bound=Callable[..., Any])
WHOLE: list[Callable[..., Any]] = []


def whole(function: F) -> F:
    """Marks a function of tensors and constants that the tracer need not look into: it hides a gradient written by
    hand, and following one takes as long as all the rest of a layer. compiling.py tells torch of them."""
    WHOLE.append(function)
    return function


def no_memory() -> UserError:
    """Where kernels are tried: a full GPU does not mean that they do not work."""
    return UserError(
        "The GPU has no memory left to begin with: other programs hold it, nvidia-smi lists them."
    )


def kernels_run_on(device: torch.device) -> bool:
    return device.type == "cuda" and find_spec("triton") is not None
