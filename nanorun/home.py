"""The folder of data, tokenizers and runs: NANORUN_HOME, or the current folder.

Its subfolders are created atomically. A writer works in a hidden folder beside the final one and renames it as
its last step (`new_folder`), so a killed process leaves nothing incomplete under a final name; the next writer
removes what it left under a hidden name.
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
    """Creates the home before the first write. Reports it, since a missing NANORUN_HOME may be a typing error."""
    folder = home()
    if folder.is_dir():
        return
    if folder.exists():
        raise UserError(f"NANORUN_HOME is {folder}, which is a file: set it to a folder.")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"NANORUN_HOME is {folder}, which cannot be created ({error.strerror}): set it to a folder of yours."
        ) from error
    console.say(f"creating {folder} (NANORUN_HOME)")


def data_dir() -> Path:
    return home() / "data"


def tokenizers_dir() -> Path:
    return home() / "tokenizers"


def runs_dir() -> Path:
    return home() / "runs"


def check_name(name: str, what: str) -> str:
    if not _NAME.fullmatch(name):
        raise UserError(
            f"{name!r:.100} cannot name a {what}: use at most 64 letters, digits, '.', '_' and '-', starting with a "
            "letter or digit."
        )
    return name


@contextmanager
def new_folder(final: Path, *, replace: bool = False) -> Iterator[Path]:
    """A folder to write in, which becomes `final` when the block succeeds and is removed when it fails.

    Only complete folders appear under `final`. With `replace`, the old one stays until the new one is ready; a
    machine that crashes between the two renames of a replacement leaves the old one under a hidden name, and the
    next writer restores it.
    """
    make_home()
    taken = UserError(f"{final} exists already: choose another name, or replace it with --replace.")
    me = f"{platform.node()}-{os.getpid()}"
    work = final.parent / f".{final.name}.writing-{me}"
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(final.parent)
        if final.exists() and not replace:
            raise taken
        work.mkdir()
        yield work
        for path in [*work.iterdir(), work]:  # the files first: the rename publishes what is on disk
            sync(path)
        if final.exists() and not replace:  # another process was first
            raise taken
        old = final.parent / f".{final.name}.old-{me}"
        if final.exists():
            final.rename(old)
        work.rename(final)
        sync(final.parent)
        shutil.rmtree(old, ignore_errors=True)
    except OSError as error:
        raise _as_user_error(error, final) from error
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _as_user_error(error: OSError, final: Path) -> Exception:
    """An error of the operating system as a message to the user; any other error unchanged."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return UserError(
            f"The disk that holds {final.parent} is full: free some space there or set NANORUN_HOME to "
            "another disk, then try again (nothing of this attempt remains)."
        )
    if error.errno is not None:
        return UserError(
            f"{final} cannot be written ({os.strerror(error.errno)}): set NANORUN_HOME to a writable folder "
            "(nothing of this attempt remains)."
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
    """The name of the subfolder of `folder` whose `marker` file is the newest, or None."""
    found = [(path.stat().st_mtime, path.parent.name) for path in folder.glob(f"[!.]*/{marker}")]
    return max(found)[1] if found else None


def _remove_leftovers(folder: Path) -> None:
    """Cleans up after writers on this machine that no longer run; an old folder moved aside is restored."""
    leftover = re.compile(rf"\.(.+)\.(writing|old)-{re.escape(platform.node())}-(\d+)")
    for path in folder.iterdir():
        match = leftover.fullmatch(path.name)
        # our own pid on a folder is that of an earlier process, in a restarted container
        if match is None or (int(match[3]) != os.getpid() and _is_running(int(match[3]))):
            continue
        if match[2] == "old" and not (folder / match[1]).exists():
            path.rename(folder / match[1])
        else:
            shutil.rmtree(path, ignore_errors=True)


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # another user's
    return True


def sync(path: Path) -> None:
    """Flushes a file, or a folder's entries, to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
