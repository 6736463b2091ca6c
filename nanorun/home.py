"""Where a person's data, tokenizers and runs live: the folder named by NANORUN_HOME, or the current one.

Folders in it are made whole or not at all. A writer works in a hidden folder beside the final one and
renames it into place as its last act (`new_folder`), so a killed process leaves nothing half-written
under a real name; what it leaves under a hidden name is swept away by the next writer.
"""

import errno
import os
import platform
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from nanorun.errors import UserError

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def home() -> Path:
    return Path(os.environ.get("NANORUN_HOME") or ".")


def data_dir() -> Path:
    return home() / "data"


def tokenizers_dir() -> Path:
    return home() / "tokenizers"


def runs_dir() -> Path:
    return home() / "runs"


def check_name(name: str, what: str) -> str:
    if not _NAME.fullmatch(name):
        raise UserError(
            f"{name!r} cannot name a {what}: use letters, digits, '.', '_' and '-', beginning with a letter "
            "or digit, at most 64."
        )
    return name


@contextmanager
def new_folder(final: Path, *, replace: bool = False) -> Iterator[Path]:
    """A folder to write in, which becomes `final` when the block ends well and vanishes when it does not.

    Only whole folders ever appear under `final`. With `replace`, the old one stays until the new one is
    ready; a machine that dies between the two renames of a replacement leaves the old one under a hidden
    name, and the next writer puts it back.
    """
    taken = UserError(f"{final} exists already: choose another name, or replace it with --replace.")
    final.parent.mkdir(parents=True, exist_ok=True)
    _sweep(final)
    if final.exists() and not replace:
        raise taken
    me = f"{platform.node()}-{os.getpid()}"
    work = final.parent / f".{final.name}.writing-{me}"
    work.mkdir()
    try:
        yield work
        _sync_folder(work)
        if final.exists() and not replace:  # another process was faster
            raise taken
        if final.exists():
            old = final.parent / f".{final.name}.old-{me}"
            final.rename(old)
            work.rename(final)
            _sync(final.parent)
            shutil.rmtree(old)
        else:
            work.rename(final)
            _sync(final.parent)
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise UserError(
                f"The disk that holds {final.parent} is full: free some space there or set NANORUN_HOME to "
                "another disk, then try again (nothing was kept of this attempt)."
            ) from error
        raise
    finally:
        shutil.rmtree(work, ignore_errors=True)


def newest(folder: Path, marker: str) -> str | None:
    """The name of the entry of `folder` whose `marker` file was written last, or None."""
    found = [(path.stat().st_mtime, path.parent.name) for path in folder.glob(f"[!.]*/{marker}")]
    return max(found)[1] if found else None


def _sweep(final: Path) -> None:
    """Clears up after writers of `final` on this machine that no longer run."""
    for left in final.parent.glob(f".{final.name}.*-{platform.node()}-*"):
        pid = left.name.rpartition("-")[2]
        if not pid.isdigit() or (int(pid) != os.getpid() and _alive(int(pid))):
            continue  # our own number on a folder is that of a process before us, in a restarted container
        if left.name.startswith(f".{final.name}.old-") and not final.exists():
            left.rename(final)
        else:
            shutil.rmtree(left, ignore_errors=True)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _sync_folder(folder: Path) -> None:
    """Files first, then the folder that names them, so that the rename publishes what is on disk."""
    for path in [*folder.iterdir(), folder]:
        _sync(path)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
