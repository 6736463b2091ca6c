"""benchmarks/peak.py attributes the memory that is allocated at the peak, and only that, to lines of code."""

import importlib.util
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
spec = importlib.util.spec_from_file_location("peak", ROOT / "benchmarks" / "peak.py")
peak = importlib.util.module_from_spec(spec)
spec.loader.exec_module(peak)


def frame(file, line=1, name="call"):
    return {"filename": str(file), "line": line, "name": name}


def event(action, addr, size, *frames):
    return {"action": action, "addr": addr, "size": size, "frames": list(frames)}


def test_allocations_at_the_peak_are_grouped_by_line(tmp_path):
    code = tmp_path / "cabc.py"
    code.write_text("buf0 = empty_strided_cuda((8,), (1,))\nbuf1 = empty_strided_cuda((2,), (1,))\n")
    first, second = frame(code, 1), frame(code, 2)
    most, held = peak.at_peak(
        [
            event("segment_alloc", 0, 1 << 20),  # the allocator asks the driver: no tensor
            event("alloc", 1, 100, first),
            event("alloc", 2, 30, second),
            event("free_requested", 1, 100),
            event("free_completed", 1, 100),
            event("alloc", 1, 50, second),  # the same address, another tensor
            event("alloc", 3, 60, first),
            event("alloc", 4, 5, first),  # here: 30 + 50 + 60 + 5
            event("free_completed", 3, 60),
            event("alloc", 5, 20, first),
        ]
    )
    assert most == 145
    assert [(each.blocks, each.size) for each in held] == [(2, 80), (2, 65)]
    assert "buf1 = empty_strided_cuda" in held[0].line


def test_memory_allocated_before_the_trace_counts_when_it_is_freed():
    most, held = peak.at_peak(
        [event("free_completed", 9, 1000), event("alloc", 1, 400), event("alloc", 2, 700)]
    )
    assert most == 100
    assert sum(each.size for each in held) == 1100


def test_a_line_of_nanorun_is_named_rather_than_its_callees_and_callers():
    ours = ROOT / "nanorun" / "model" / "kernels" / "fp8" / "kernel.py"
    below, above = frame("/site/torch/_ops.py", 5, "__call__"), frame("/site/cache/cxyz.py", 7)
    assert peak.allocating_line([below, frame(ours, 1, "quantize"), above]).startswith(
        "nanorun/model/kernels/fp8/kernel.py:1 quantize"
    )
    assert peak.allocating_line([below]) == "/site/torch/_ops.py:5"
    assert peak.allocating_line([]) == "unknown"
