# mypy: disallow-untyped-defs=False
"""Triton where it is installed, and programmatic dependent launch.

With TRITON_INTERPRET=1 in the environment before the first import, kernels run on the CPU, slowly, and tests use
that.

**Programmatic dependent launch** (PDL; Hopper and later). A kernel launched with `launch_pdl=True` may begin once
every program of the previous kernel has called `launch_dependents()`. What it does up to its own
`grid_dependency_wait()` overlaps with the previous kernel; after it, everything that kernel wrote is visible. Two
rules keep this correct here:
- Before the wait a kernel only reads what no kernel of this step writes: weights, and what was on the device
  before the step (tokens, positions, the cache of earlier positions). The first kernel of a step is launched
  without PDL, so all of that is complete before any kernel of the step begins.
- Every kernel of a step waits, but the first, which is launched without PDL. The end of one then implies the end of
  all before it.
"""

import importlib
from typing import Any

import torch

from nanorun.errors import UserError
from nanorun.model.kernels.language import HAS_TRITON, tl, triton

cuda: Any = importlib.import_module("triton.language.extra.cuda") if HAS_TRITON else None


@triton.jit
def launch_dependents(PDL: tl.constexpr):
    if PDL:
        cuda.gdc_launch_dependents()


@triton.jit
def grid_dependency_wait(PDL: tl.constexpr):
    if PDL:
        cuda.gdc_wait()


def supports_pdl(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 9


def require_triton() -> None:
    if not HAS_TRITON:
        raise UserError("The decode kernels need Triton, which is not installed: pip install triton (Linux).")


def dot_dtype(dtype: torch.dtype) -> Any:
    """The operand dtype for tensor cores: the dtype itself, and for int8 bf16, which represents it exactly.

    Triton's interpreter multiplies the bits of bf16 as if they were integers: there it is fp32.
    """
    if dtype == torch.float32 or triton.knobs.runtime.interpret:
        return tl.float32
    return tl.float16 if dtype == torch.float16 else tl.bfloat16
