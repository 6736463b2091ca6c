"""Triton's interpreter cuts numbers off where a GPU rounds them to the nearest 8-bit float; here it rounds, too, and
has fewer programs to go through."""

import numpy as np
import pytest
import torch

EIGHT_BITS = {"fp8e4nv": torch.float8_e4m3fn, "fp8e5": torch.float8_e5m2}


@pytest.fixture(autouse=True)
def rounding_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        from triton.runtime import interpreter
    except ImportError:
        return
    cut_off = interpreter._convert_float

    def convert(data, of, to, rounding):
        if str(of) != "fp32" or str(to) not in EIGHT_BITS:
            return cut_off(data, of, to, rounding)
        dtype = EIGHT_BITS[str(to)]
        most = torch.finfo(dtype).max
        value = torch.from_numpy(np.ascontiguousarray(data, dtype=np.float32))
        return value.clamp(-most, most).to(dtype).view(torch.uint8).numpy()

    monkeypatch.setattr(interpreter, "_convert_float", convert)


@pytest.fixture(autouse=True)
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter takes long for each, and a model's copies of weights are measured often."""
    if not torch.cuda.is_available():
        monkeypatch.setattr("nanorun.model.kernels.fp8.kernel.AMAX_ROWS", 64)
