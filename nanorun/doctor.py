"""`nanorun doctor`: what this machine has and what is missing, in plain words, each with what to do."""

import importlib.util
import os
import sys
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Literal

from nanorun import __version__, hardware, home
from nanorun.console import size
from nanorun.tables import table

Verdict = Literal["ok", "note", "missing"]


@dataclass(frozen=True)
class Finding:
    what: str
    verdict: Verdict  # "note" works with a drawback; "missing" stops something that nanorun does
    detail: str
    advice: str = ""


def examine() -> list[Finding]:
    return [
        _python(),
        *_packages(),
        _device(),
        _bf16(),
        _compiler(),
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


def _python() -> Finding:
    return Finding("Python", "ok", f"nanorun {__version__}, Python {sys.version.split()[0]}")


def _packages() -> list[Finding]:
    findings = []
    uses = {
        "torch": "trains the model",
        "numpy": "holds tokens",
        "pyarrow": "reads and writes parquet",
        "tiktoken": "runs the tokenizer",
        "rustbpe": "trains the tokenizer",
        "rich": "draws progress bars",
    }
    for package, use in uses.items():
        try:
            findings.append(Finding(package, "ok", f"{version(package)}, {use}"))
        except PackageNotFoundError:
            findings.append(Finding(package, "missing", f"not installed; it {use}", f"pip install {package}"))
    return findings


def _device() -> Finding:
    found = hardware.detect()
    many = f"{found.devices} × " if found.devices > 1 else ""
    detail = f"{found.device}: {many}{found.name}, {size(found.memory_bytes)}"
    if found.device == "cpu":
        return Finding("device", "note", detail, "fine for the sample world; real models want a GPU")
    return Finding("device", "ok", detail)


def _bf16() -> Finding:
    if hardware.detect().native_bf16:
        return Finding("bf16", "ok", "in hardware")
    return Finding("bf16", "note", "not in hardware, so training here uses fp32 (or fp16 on an older GPU)")


def _compiler() -> Finding:
    if importlib.util.find_spec("triton") is not None:
        return Finding("Triton", "ok", "compiles kernels for the GPU")
    verdict: Verdict = "missing" if hardware.detect().device == "cuda" else "note"
    return Finding(
        "Triton", verdict, "not installed; only GPU training needs it", "pip install triton on a GPU machine"
    )


def _memory() -> Finding:
    cores, memory = hardware.usable_cores(), hardware.machine_memory()
    detail = f"{cores} cores, {size(memory)} of memory"
    if 0 < memory < 4e9:
        return Finding("machine", "note", detail, "under 4 GB even the sample world may run short")
    return Finding("machine", "ok", detail)


def _disk() -> Finding:
    free = hardware.free_disk(home.home())
    if free < 5e9:
        return Finding(
            "disk", "note", f"{size(free)} free", "set NANORUN_HOME to a larger disk before real training"
        )
    return Finding("disk", "ok", f"{size(free)} free")


def _home() -> Finding:
    folder = home.home().resolve()
    where = (
        "NANORUN_HOME"
        if os.environ.get("NANORUN_HOME")
        else "the current folder; NANORUN_HOME chooses another"
    )
    there = folder
    while not there.exists():
        there = there.parent
    advice = "set NANORUN_HOME to a folder of yours"
    if not there.is_dir():
        return Finding("home", "missing", f"{folder} is no folder: {there} is a file", advice)
    if not os.access(there, os.W_OK):
        return Finding("home", "missing", f"{folder} cannot be written", advice)
    if there != folder:
        return Finding("home", "note", f"{folder} ({where}) does not exist yet", "the first verb creates it")
    held = [f"{kind} {_count(kind)}" for kind in ("data", "tokenizers", "runs")]
    return Finding("home", "ok", f"{folder} ({where}): {', '.join(held)}")


def _count(kind: str) -> int:
    folder = home.home() / kind
    return (
        sum(1 for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))
        if folder.is_dir()
        else 0
    )


def _sandbox() -> Finding:
    from nanorun.tools.sandbox import Sandbox, SandboxUnavailable

    try:
        Sandbox.probe()
    except SandboxUnavailable as error:
        detail = f"{error.problem}; only running programs that a model writes needs it"
        return Finding("sandbox", "note", detail, error.advice)
    return Finding(
        "sandbox", "ok", "programs that a model writes run in it; it was attacked just now and held"
    )


def _serve() -> Finding:
    if importlib.util.find_spec("fastapi") and importlib.util.find_spec("uvicorn"):
        return Finding("serve extra", "ok", "fastapi and uvicorn are here")
    return Finding(
        "serve extra", "note", "not installed; only the web server needs it", "pip install 'nanorun[serve]'"
    )
