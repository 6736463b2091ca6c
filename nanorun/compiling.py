"""Compiling a model, and not compiling it again.

torch keeps what it compiled on disk, in three layers: graphs as autograd split them, kernels as Inductor wrote
them, and what Triton made of those. Two settings are ours. The first layer passes over every graph with a
hand-written backward pass, as all of ours have, unless told otherwise; traced anew, a warm start costs most of
what a cold one does. And since it does not look into operators, the text of our own model is made part of its
key: whoever edits a kernel's gradient does not meet the graph from before.
"""

import functools
import hashlib
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn


def compiled(model: nn.Module) -> Callable[..., Tensor]:
    """The model, compiled for each shape it meets, when it meets it."""
    import torch._functorch.config as functorch

    functorch.autograd_cache_allow_custom_autograd_functions = True
    torch.compiler.config.cache_key_tag = source_digest()
    forward: Callable[..., Tensor] = torch.compile(model, dynamic=False)
    return forward


@functools.cache
def source_digest() -> str:
    """A short name for the text of everything that goes into a compiled graph."""
    digest = hashlib.sha256()
    for path in sorted((Path(__file__).parent / "model").rglob("*.py")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]
