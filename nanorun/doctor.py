"""`nanorun doctor`: what this machine has and what is missing, each with what to do about it."""

import os
import sys
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Literal

from nanorun import __version__, hardware, home
from nanorun.console import size
from nanorun.tables import table

Verdict = Literal["ok", "note", "missing"]
PACKAGES = {
    "torch": "trains the model",
    "numpy": "holds tokens",
    "pyarrow": "reads and writes parquet",
    "tiktoken": "runs the tokenizer",
    "rustbpe": "trains the tokenizer",
    "rich": "draws progress bars",
}


@dataclass(frozen=True)
class Finding:
    what: str
    verdict: Verdict  # "note" works with a drawback; "missing" disables something that nanorun does
    detail: str
    advice: str = ""


def examine() -> list[Finding]:
    return [
        Finding("Python", "ok", f"nanorun {__version__}, Python {sys.version.split()[0]}"),
        *(_package(name, use) for name, use in PACKAGES.items()),
        *_device(),
        _memory(),
        _disk(),
        _home(),
        _sandbox(),
        _serve(),
    ]


def findings_table(findings: list[Finding]) -> str:
    marks = {"ok": "ok", "note": "note", "missing": "MISSING"}
    rows = [[marks[f.verdict], f.what, f.detail + (f" → {f.advice}" if f.advice else "")] for f in findings]
    return table(["", "what", "what was found"], rows)


def _package(name: str, use: str) -> Finding:
    try:
        return Finding(name, "ok", f"{version(name)}, {use}")
    except PackageNotFoundError:
        return Finding(name, "missing", f"not installed; it {use}", f"pip install {name}")


def _note_unless(is_ok: bool, what: str, detail: str, advice: str) -> Finding:
    return Finding(what, "ok", detail) if is_ok else Finding(what, "note", detail, advice)


def _device() -> list[Finding]:
    machine = hardware.detect()
    many = f"{machine.devices} × " if machine.devices > 1 else ""
    detail = f"{machine.device}: {many}{machine.name}, {size(machine.memory_bytes)}"
    for_cpus = "sufficient for the sample world; real models need a GPU"
    bf16 = Finding("bf16", "ok", "in hardware")
    if not machine.native_bf16:
        bf16 = Finding("bf16", "note", "not in hardware: training uses fp32 here (fp16 on an older GPU)")
    triton = Finding("Triton", "ok", "compiles kernels for the GPU")
    if find_spec("triton") is None:
        verdict: Verdict = "missing" if machine.device == "cuda" else "note"
        advice = "pip install triton on a GPU machine"
        triton = Finding("Triton", verdict, "not installed; only GPU training needs it", advice)
    return [_note_unless(machine.device != "cpu", "device", detail, for_cpus), bf16, triton]


def _memory() -> Finding:
    memory = hardware.machine_memory()
    detail = f"{hardware.usable_cores()} cores, {size(memory)} of memory"
    advice = "under 4 GB even the sample world may run out of memory"
    return _note_unless(memory >= 4e9 or not memory, "machine", detail, advice)


def _disk() -> Finding:
    free = hardware.free_disk(home.home())
    advice = "set NANORUN_HOME to a larger disk before real training"
    return _note_unless(free >= 5e9, "disk", f"{size(free)} free", advice)


def _home() -> Finding:
    folder = home.home().resolve()
    is_set = os.environ.get("NANORUN_HOME")
    source = "NANORUN_HOME" if is_set else "the current folder; NANORUN_HOME selects another"
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    advice = "set NANORUN_HOME to a folder of yours"
    if not existing.is_dir():
        return Finding("home", "missing", f"{folder} is not a folder: {existing} is a file", advice)
    if not os.access(existing, os.W_OK):
        return Finding("home", "missing", f"{folder} is not writable", advice)
    if existing != folder:
        detail = f"{folder} ({source}) does not exist yet"
        return Finding("home", "note", detail, "the first command creates it")
    counts = [
        f"{kind} {len(list((folder / kind).glob('[!.]*/')))}" for kind in ("data", "tokenizers", "runs")
    ]
    return Finding("home", "ok", f"{folder} ({source}): {', '.join(counts)}")


def _sandbox() -> Finding:
    from nanorun.tools.sandbox import Sandbox, SandboxUnavailable

    try:
        Sandbox.probe()
    except SandboxUnavailable as error:
        detail = f"{error.problem}; only running programs that a model writes needs it"
        return Finding("sandbox", "note", detail, error.advice)
    return Finding("sandbox", "ok", "isolates programs that a model writes; attack tests passed just now")


def _serve() -> Finding:
    if find_spec("fastapi") and find_spec("uvicorn"):
        return Finding("serve extra", "ok", "fastapi and uvicorn are installed")
    detail = "not installed; only the web server needs it"
    return Finding("serve extra", "note", detail, "pip install 'nanorun[serve]'")
