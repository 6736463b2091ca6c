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

from nanorun import console
from nanorun.errors import UserError

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def home() -> Path:
    named = os.environ.get("NANORUN_HOME")
    return Path(named).expanduser().absolute() if named else Path()


def make_home() -> None:
    """Before the first thing is written there. One that was named and is not here may be a slip of the pen: say it."""
    folder = home()
    if folder.is_dir():
        return
    if folder.exists():
        raise UserError(f"NANORUN_HOME is {folder}, which is a file: name a folder.")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"NANORUN_HOME is {folder}, which cannot be made ({error.strerror}): name a folder of yours."
        ) from error
    console.say(f"creating {folder}, which NANORUN_HOME names")


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
    make_home()
    taken = UserError(f"{final} exists already: choose another name, or replace it with --replace.")
    me = f"{platform.node()}-{os.getpid()}"
    work = final.parent / f".{final.name}.writing-{me}"
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        _sweep(final.parent)
        if final.exists() and not replace:
            raise taken
        work.mkdir()
        yield work
        _sync_files(work)
        if final.exists() and not replace:  # another process was faster
            raise taken
        if final.exists():
            old = final.parent / f".{final.name}.old-{me}"
            final.rename(old)
            work.rename(final)
            sync(final.parent)
            shutil.rmtree(old)
        else:
            work.rename(final)
            sync(final.parent)
    except OSError as error:
        raise _explained(error, final) from error
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _explained(error: OSError, final: Path) -> Exception:
    """What the operating system refused, as a sentence; anything else stays what it is."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return UserError(
            f"The disk that holds {final.parent} is full: free some space there or set NANORUN_HOME to "
            "another disk, then try again (nothing was kept of this attempt)."
        )
    if error.errno is not None:
        return UserError(
            f"{final} cannot be written ({os.strerror(error.errno)}): set NANORUN_HOME to a folder of yours "
            "that can (nothing was kept of this attempt)."
        )
    return error


def replace_file(path: Path, content: bytes) -> None:
    """Writes a file atomically: at every moment it is the old one or the new one, complete and on disk."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    sync(path.parent)


def newest(folder: Path, marker: str) -> str | None:
    """The name of the entry of `folder` whose `marker` file was written last, or None."""
    found = [(path.stat().st_mtime, path.parent.name) for path in folder.glob(f"[!.]*/{marker}")]
    return max(found)[1] if found else None


def _sweep(folder: Path) -> None:
    """Clears up after writers on this machine that no longer run; a folder put aside goes back to its name."""
    left = re.compile(rf"\.(.+)\.(writing|old)-{re.escape(platform.node())}-(\d+)")
    for path in folder.iterdir():
        match = left.fullmatch(path.name)
        # our own number on a folder is that of a process before us, in a restarted container
        if match is None or (int(match[3]) != os.getpid() and _alive(int(match[3]))):
            continue
        if match[2] == "old" and not (folder / match[1]).exists():
            path.rename(folder / match[1])
        else:
            shutil.rmtree(path, ignore_errors=True)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _sync_files(folder: Path) -> None:
    """Files first, then the folder that names them, so that the rename publishes what is on disk."""
    for path in [*folder.iterdir(), folder]:
        sync(path)


def sync(path: Path) -> None:
    """Waits until a file, or a folder's list of names, is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
