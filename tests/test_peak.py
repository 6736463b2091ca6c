"""benchmarks/peak.py names what is held when most is, and nothing that was given back before or asked for after."""

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


def test_what_is_held_at_the_highest_point_is_told_by_line(tmp_path):
    code = tmp_path / "cabc.py"
    code.write_text("buf0 = empty_strided_cuda((8,), (1,))\nbuf1 = empty_strided_cuda((2,), (1,))\n")
    first, second = frame(code, 1), frame(code, 2)
    most, held = peak.at_peak(
        [
            event("segment_alloc", 0, 1 << 20),  # a request to the driver, which is no tensor's
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
    assert "buf1 = empty_strided_cuda" in held[0].where


def test_memory_from_before_that_is_freed_makes_room():
    most, held = peak.at_peak(
        [event("free_completed", 9, 1000), event("alloc", 1, 400), event("alloc", 2, 700)]
    )
    assert most == 100
    assert sum(each.size for each in held) == 1100


def test_a_line_of_ours_is_named_before_those_below_and_above_it():
    ours = ROOT / "nanorun" / "model" / "kernels" / "fp8.py"
    below, above = frame("/site/torch/_ops.py", 5, "__call__"), frame("/site/cache/cxyz.py", 7)
    assert peak.where([below, frame(ours, 1, "measure"), above]).startswith(
        "nanorun/model/kernels/fp8.py:1 measure"
    )
    assert peak.where([below]) == "/site/torch/_ops.py:5"
    assert peak.where([]) == "unknown"
