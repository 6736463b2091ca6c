"""Compiling a model, and not compiling it again.

torch keeps what it compiled on disk, in three layers: graphs as autograd split them, kernels as Inductor wrote
them, and what Triton made of those. Two settings are ours. The first layer passes over every graph with a
hand-written backward pass, as all of ours have, unless told otherwise; traced anew, a warm start costs most of
what a cold one does. And since it does not look into operators, the text of our own model is made part of its
key: whoever edits a kernel's gradient does not meet the graph from before. It stands in the environment, too, since
torch's compile workers are processes of their own, and what they tune is looked up under that key. (With the key in
one place only, every start timed 170 ways to run the optimizer's kernels again: 5 seconds.)

What precedes the first layer is tracing: torch reads the model's Python, at every start. It is quick where it finds
operators and slow where it finds gradients written by hand, so those are marked (`kernels.opaque_to_dynamo`) and
passed over; autograd follows them later, and its work is kept on disk.

And one thing is mended. When torch 2.11 meets an operator for the first time it describes it for its log, whether
anybody reads that or not: its inputs, their inputs, and so on back to the tokens, once for every way there. At the end
of twelve layers that text is never done. (2.13 is quick.)
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
    """The model, compiled for each shape it meets, when it meets it."""
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
