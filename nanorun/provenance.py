"""Provenance of a measurement: what was measured, when, on which hardware, at which commit, by which command.

The files in benchmarks/results/ are such JSON objects. benchmarks/tables.py generates the tables in the README and
the docs from them, so no figure is typed by hand.
"""

import json
import os
import shlex
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

from nanorun import console, hardware
from nanorun.errors import UserError


def record(what: str, **figures: Any) -> dict[str, Any]:
    machine = hardware.detect()
    return {
        "what": what,
        "date": time.strftime("%Y-%m-%d"),
        "device": machine.name,
        "cores": machine.cores,
        "gpu": machine.name if machine.device == "cuda" else None,
        "torch": version("torch"),
        "commit": commit(),
        "command": command(),
        **figures,
    }


def command() -> str:
    """The command line that started this process."""
    program = Path(sys.argv[0])
    ours = program.name in ("nanorun", "__main__.py")
    return shlex.join([*(["nanorun"] if ours else ["python", os.path.relpath(program)]), *sys.argv[1:]])


def commit() -> str | None:
    """The commit of this tree, marked "-dirty" if it has uncommitted changes.

    NANORUN_COMMIT overrides it where the tree is a copy without its history, such as on a remote GPU machine.
    """
    if override := os.environ.get("NANORUN_COMMIT"):
        return override
    describe = ["git", "describe", "--always", "--dirty", "--abbrev=10"]
    try:
        result = subprocess.run(
            describe, capture_output=True, text=True, cwd=Path(__file__).parent, timeout=10
        )
    except OSError:
        return None
    return result.stdout.strip() or None


def check_writable(path: Path | None) -> None:
    """Fails before minutes are spent on a measurement whose result cannot be written."""
    if path is not None and (path.is_dir() or not os.access(path.absolute().parent, os.W_OK)):
        raise UserError(
            f"The result cannot be written to {path}: name a file in a folder that you can write to."
        )


def write_result(result: dict[str, Any], path: Path | None) -> None:
    if path is None:
        return
    try:
        path.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    except OSError as error:
        text = json.dumps(result, ensure_ascii=False)
        raise UserError(f"{path} cannot be written ({error.strerror}). The result is: {text}") from error


def write_and_print_result(result: dict[str, Any], path: Path | None) -> None:
    """Writes the result to `path`, if any, and prints it as one line, the last on stdout."""
    write_result(result, path)
    console.show_json(result)
