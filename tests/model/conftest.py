"""Triton's interpreter truncates to FP8 where a GPU rounds to nearest; these fixtures make it round, and give it fewer
programs to run."""

import numpy as np
import pytest
import torch
from interpreter import accept_array_loop_bounds

accept_array_loop_bounds()
FP8_DTYPES = {"fp8e4nv": torch.float8_e4m3fn, "fp8e5": torch.float8_e5m2}


@pytest.fixture(autouse=True)
def rounding_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        from triton.runtime import interpreter
    except ImportError:
        return
    truncate = interpreter._convert_float

    def convert(data, of, to, rounding):
        if str(of) != "fp32" or str(to) not in FP8_DTYPES:
            return truncate(data, of, to, rounding)
        dtype = FP8_DTYPES[str(to)]
        limit = torch.finfo(dtype).max
        value = torch.from_numpy(np.ascontiguousarray(data, dtype=np.float32))
        return value.clamp(-limit, limit).to(dtype).view(torch.uint8).numpy()

    monkeypatch.setattr(interpreter, "_convert_float", convert)


@pytest.fixture(autouse=True)
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter is slow for each program, and the amax of FP8 weights is computed often."""
    if not torch.cuda.is_available():
        monkeypatch.setattr("nanorun.model.kernels.fp8.kernel.AMAX_ROWS", 64)
