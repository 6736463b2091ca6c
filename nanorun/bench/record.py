"""How a measurement is kept: what was measured, with when, where and by which command, as one JSON object.

Files in bench/results/ are such objects. Tables in the README and the docs are made from them
(bench/tables.py), so no figure is ever typed.
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

from nanorun.errors import UserError


def record(what: str, **figures: Any) -> dict[str, Any]:
    from nanorun import hardware

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
    """What was typed."""
    program = Path(sys.argv[0])
    ours = program.name in ("nanorun", "__main__.py")
    return shlex.join([*(["nanorun"] if ours else ["python", os.path.relpath(program)]), *sys.argv[1:]])


def commit() -> str | None:
    """The commit of this tree, marked when there are changes that are not in it.

    NANORUN_COMMIT says it where the tree is a copy without its history, as on a lent GPU machine.
    """
    if named := os.environ.get("NANORUN_COMMIT"):
        return named
    try:
        describe = ["git", "describe", "--always", "--dirty", "--abbrev=10"]
        found = subprocess.run(
            describe, capture_output=True, text=True, cwd=Path(__file__).parent, timeout=10
        )
    except OSError:
        return None
    return found.stdout.strip() or None


def check_path(path: Path | None) -> None:
    """Before minutes are spent on what then cannot be kept."""
    if path is not None and (path.is_dir() or not os.access(path.absolute().parent, os.W_OK)):
        raise UserError(
            f"The result cannot be written to {path}: name a file in a folder that you can write to."
        )


def keep(result: dict[str, Any], path: Path | None) -> None:
    if path is None:
        return
    try:
        path.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    except OSError as error:
        found = json.dumps(result, ensure_ascii=False)
        raise UserError(
            f"{path} cannot be written ({error.strerror}), so here is the result: {found}"
        ) from error


def save(result: dict[str, Any], path: Path | None) -> None:
    """Keeps the result where asked, and prints it as one line, the last on stdout."""
    keep(result, path)
    print(json.dumps(result, ensure_ascii=False), flush=True)
