"""Download files with huggingface_hub, verify them, and publish only whole, correct files.

huggingface_hub makes the requests: it resumes a dropped connection with a Range request, honors Retry-After,
and keeps the token away from other hosts. This module adds what it leaves to its caller:

- A file gets its final name only after its SHA-256 and its format were checked. Until then it has a hidden or
  `.part` name, so a killed process never leaves a partial file under a real name.
- Server errors (5xx) and failed connections are retried, with exponential backoff.
- Every failure is one sentence (UserError) that says what to do.

Limits: a killed `fetch` continues its `.part`. huggingface_hub keeps no partial file of a hub download across
processes, so a killed `data get` starts the shards in flight again (about 100 MB each); finished shards stay.
"""

import errno
import fcntl
import os
import queue
import random
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from nanorun.console import Progress, say, size
from nanorun.data.dataset import file_sha256
from nanorun.errors import UserError
from nanorun.home import sync

ATTEMPTS = 5  # huggingface_hub retries each of them on its own while bytes arrive
LONGEST_PAUSE = 30.0
_TRANSIENT = (408, 416, 425, 429, 500, 502, 503, 504)  # 416: `_receive` has discarded the outdated part
_NOT_FOUND = "not found: check the name and the revision, and HF_ENDPOINT if you set it"
_ADVICE = {
    401: "needs a valid token: check the name, or set HF_TOKEN to a token of yours",
    403: "access denied: accept the terms on its web page and set HF_TOKEN to a token of yours",
    404: _NOT_FOUND,
    410: _NOT_FOUND,
    429: "too many requests",
}

Check = Callable[[Path], object]  # raises ValueError with the reason when a complete file is not usable
Item = TypeVar("Item")
Result = TypeVar("Result")


def fetch(url: str, final: Path, *, check: Check, sha256: str | None = None, bar: Progress) -> Path:
    """Downloads a plain URL to `final`. A `.part` left by a killed process is continued."""
    part = final.with_name(f"{final.name}.part")
    with lock_folder(final.parent):
        if final.is_file() and _problem(final, check, sha256) is None:
            return final  # another process finished it while this one waited for the lock
        return download(lambda: _receive(url, part, bar), final, url, check=check, sha256=sha256)


def download(
    receive: Callable[[], Path], final: Path, source: str, *, check: Check, sha256: str | None
) -> Path:
    """Calls `receive` for a complete file, verifies the file and renames it to `final`.

    A file that fails verification is received once more: its beginning may come from an outdated part.
    """
    for _ in range(2):
        path = retry(receive, source)
        reason = _problem(path, check, sha256)
        if reason is None:
            sync(path)
            os.replace(path, final)
            sync(final.parent)
            return final
        path.unlink()
    raise UserError(
        f"{source} was downloaded twice and cannot be used: {reason}. Nothing was kept. Try again later or from "
        "another network; if it stays so, the file on the server is damaged or another one."
    )


def _problem(path: Path, check: Check, sha256: str | None) -> str | None:
    """Why a complete file is unusable, or None."""
    if sha256 is not None and (found := file_sha256(path)) != sha256:
        return f"wrong bytes (its SHA-256 is {found}, not {sha256})"
    try:
        check(path)
    except ValueError as reason:
        return str(reason)
    return None


def _receive(url: str, part: Path, bar: Progress) -> Path:
    """Downloads the rest of `part`, and returns it."""
    from huggingface_hub.errors import HfHubHTTPError
    from huggingface_hub.file_download import http_get

    with part.open("ab") as file:
        resume_size = file.tell()
        bar.advance(resume_size - bar.done)
        try:
            http_get(
                url,
                file,
                resume_size=resume_size,
                headers={"Accept-Encoding": "identity"},
                tqdm_class=tqdm_calling(bar.advance),
            )
        except HfHubHTTPError as error:
            if error.response.status_code == 416:  # the part is not the beginning of this file
                file.truncate(0)
            raise
    return part


# Requests


def retry(request: Callable[[], Result], source: str, attempts: int | None = None) -> Result:
    """Calls `request` up to `attempts` times. Its last failure, or one that will not pass, is a UserError."""
    from huggingface_hub.utils import logging

    logging.set_verbosity_error()  # its warnings about retries would break the progress bar
    attempts = attempts or ATTEMPTS
    for attempt in range(1, attempts + 1):
        try:
            return request()
        except (UserError, DownloadStopped):
            raise
        except Exception as error:  # the library lets through what httpx, json and the disk raise
            reason, is_transient = _explain(error)
            if not is_transient:
                raise UserError(f"{source}: {reason}.") from error
            if attempt == attempts:
                raise UserError(
                    f"Could not download {source}: {reason} (attempt {attempt} of {attempts}). Check the network, "
                    "and HF_ENDPOINT if you set it, then run the same command again."
                ) from error
            # Jitter keeps many clients from coming back at the same moment.
            time.sleep(min(LONGEST_PAUSE, 2.0 ** (attempt - 1)) * random.uniform(0.5, 1.5))
    raise AssertionError("unreachable")


def _explain(error: BaseException) -> tuple[str, bool]:
    """What went wrong, in words, and whether another attempt may succeed."""
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled

    if isinstance(error, LocalEntryNotFoundError) and error.__cause__ is not None:
        error = error.__cause__
    text = " ".join(str(error).split())[:300] or type(error).__name__
    if isinstance(error, OfflineModeIsEnabled):
        return "HF_HUB_OFFLINE is set, so nothing is downloaded: unset it", False
    if isinstance(error, HfHubHTTPError):
        status = error.response.status_code
        is_transient = status in _TRANSIENT
        other = "the server failed" if is_transient else "the server refused the request: check the address"
        return f"{_ADVICE.get(status, other)} (HTTP {status})", is_transient
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "the disk is full: free space or set NANORUN_HOME to another disk, then run it again", False
    if isinstance(error, OSError) and error.errno is not None:
        return f"cannot write ({error}): check the folder and its permissions", False
    if isinstance(error, ValueError | LookupError | TypeError | AttributeError | RecursionError):
        return f"not the response of a Hugging Face hub ({text}): check HF_ENDPOINT and the network", False
    return f"the connection failed ({text})", True


class DownloadStopped(Exception):
    """Another file failed, so this one is abandoned."""


def tqdm_calling(advance: Callable[[float], None]) -> type[Any]:
    """A tqdm class for huggingface_hub that shows nothing and passes the number of new bytes on."""
    from huggingface_hub.utils.tqdm import tqdm

    class ForwardingTqdm(tqdm):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            kwargs.pop("name", None)
            init: Any = super().__init__  # untyped
            init(*args, **{**kwargs, "disable": True})

        def update(self, n: float | None = 1) -> None:
            advance(n or 0)

    return ForwardingTqdm


# Many files, one disk


def run_parallel(
    work: Callable[[Item], object], items: Sequence[Item], workers: int, stop: threading.Event
) -> None:
    """`work(item)` for all items on `workers` threads. The first failure, or Ctrl-C, sets `stop` and is raised.

    The threads are daemons: one that waits for a silent server does not keep the program from ending.
    """
    pending = iter(items)  # shared: each item goes to one thread
    finished: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()

    def run() -> None:
        for item in pending:
            try:
                work(item)
            except BaseException as error:  # raised in the caller's thread, whatever it is
                finished.put(error)
                return
            finished.put(None)
            if stop.is_set():
                return

    for _ in range(min(workers, len(items))):
        threading.Thread(target=run, daemon=True).start()
    try:
        for _ in items:
            if (error := finished.get()) is not None:
                raise error
    finally:
        stop.set()


@contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Two processes that want the same files download them once: the second waits and finds them."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle = (folder / ".lock").open("w")
    except OSError as error:
        raise UserError(
            f"Cannot write into {folder} ({error}): check the folder and its permissions."
        ) from error
    with handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"Another process is downloading into {folder}: waiting for it.")
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def check_space(needed: int, folder: Path) -> None:
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise UserError(
            f"The download needs {size(needed)} in {folder}, but only {size(free)} are free there: ask for fewer "
            "files, free some space, or set NANORUN_HOME to another disk."
        )
