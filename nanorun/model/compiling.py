"""torch.compile for the model, with compile caches that survive a restart.

torch caches compiled code on disk in three layers: AOTAutograd's graphs, Inductor's kernels, and Triton's binaries. Two
settings are needed. AOTAutograd's cache bypasses every graph that contains a custom autograd.Function, as all of ours
do, unless told otherwise; without it a warm start costs almost as much as a cold one. And since the cache does not look
into custom operators, a digest of the source of nanorun/model is part of its key: an edited kernel never meets a stale
graph. The key is set in the environment as well, because torch's compile workers are processes of their own, and
autotuning results are looked up under it. (With the key in one place only, every start autotuned the optimizer's
kernels again: 170 configurations, 5 seconds.)

Tracing precedes these caches and runs at every start. It is fast for operators and slow for hand-written gradients, so
functions that wrap one are marked (`kernels.opaque_to_dynamo`) and not traced by Dynamo; AOTAutograd traces them later,
and its result is cached.

torch 2.11 has one defect that is patched here: for each operator it formats a description for its log, needed or not,
including all inputs recursively. The text grows exponentially with depth and never completes for a d12.
"""

import functools
import hashlib
import os
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from nanorun.model.kernels import OPAQUE_FUNCTIONS

KEY = "TORCH_COMPILE_CACHE_KEY_TAG"


def compiled(model: nn.Module) -> Callable[..., Tensor]:
    """The model, compiled once per input shape, at the first call with that shape."""
    import torch._functorch.config as functorch
    import torch._inductor.config as inductor

    describe_briefly()
    functorch.autograd_cache_allow_custom_autograd_functions = True
    os.environ[KEY] = torch.compiler.config.cache_key_tag = source_digest()
    for function in OPAQUE_FUNCTIONS:
        torch.compiler.allow_in_graph(function)
        inductor.unsafe_marked_cacheable_functions[f"{function.__module__}.{function.__name__}"] = (
            source_digest()
        )
    forward: Callable[..., Tensor] = torch.compile(model, dynamic=False)
    return forward


def share_triton_cache(device: torch.device) -> None:
    """Triton's kernels, torch's and ours, in one place, for this process and those it starts. torch would move there at
    some moment between, and ours would be compiled again."""
    from torch._inductor.runtime.cache_dir_utils import triton_cache_dir

    os.environ.setdefault("TRITON_CACHE_DIR", triton_cache_dir(device.index or 0))


def describe_briefly() -> None:
    """For this process: in torch's messages an operator is its name, without where its inputs come from."""
    if torch.__version__ >= "2.13":  # by numbers: it is no plain string
        return
    from torch._inductor.exc import OperatorIssue

    OperatorIssue.operator_str = staticmethod(lambda target, args, kwargs: str(target))  # type: ignore[method-assign]


@functools.cache
def source_digest() -> str:
    """A short name for the text of everything that goes into a compiled graph."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.rglob("*.py")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]
