"""Fetch files over HTTP: under a file's final name there is ever only the whole, right file, or nothing.

Bytes go to NAME.part. When a connection drops, stalls or ends early, or the process dies, the next request
asks for the rest (`Range: bytes=N-`), on condition that the file is still the same one (`If-Range` with the
ETag kept in NAME.part.json). An answer that does not begin exactly where the part ends is never appended; the
part is emptied instead. When all bytes are here their SHA-256 is compared, the part is synced to disk and
renamed. The part is locked (flock) while somebody works on it, so two processes that want the same file fetch
it once.

Where the SHA-256 comes from: the listing (`RemoteFile.sha256`), else the server's X-Linked-ETag, else an ETag
of 64 hex digits. Without any of these only the length is checked, so bytes altered on the way go unnoticed;
and a part is then continued only where a strong ETag vouches for it. A server that sends a byte now and then
never trips the timeout, which is for one silent read.
"""

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import queue
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from nanorun.console import Progress, say, size
from nanorun.data.web import (
    Backoff,
    Session,
    Stopped,
    TryAgain,
    announced_length,
    read_some,
    sha256_in,
    wait_before_retry,
)
from nanorun.errors import UserError

_CHUNK = 256 * 1024
_CONTENT_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+|\*)")

Verify = Literal["full", "size"]
Check = Callable[
    [Path], object
]  # raises ValueError with the reason when a whole file is not what it should be


@dataclass(frozen=True)
class RemoteFile:
    url: str
    size: int | None
    sha256: str | None
    path: str  # relative, with '/' between folders: what it is saved under


@dataclass(frozen=True)
class _Options:
    session: Session
    verify: Verify
    check: Check | None
    bar: Progress | None


def fetch(
    file: RemoteFile,
    into: Path,
    *,
    attempts: int = 6,
    timeout: float = 30.0,
    bar: Progress | None = None,
    token: str | None = None,
    verify: Verify = "size",
    check: Check | None = None,
    backoff: Backoff = wait_before_retry,
) -> Path:
    """`into / file.path`, downloaded unless it is there already and passes `verify` and `check`.

    `attempts` counts failures in a row; an attempt that brought new bytes starts the count again.
    """
    _check_space([file], into)
    session = Session(attempts, timeout, token, backoff)
    return _fetch(file, into, _Options(session, verify, check, bar))


def fetch_all(
    files: Sequence[RemoteFile],
    into: Path,
    *,
    workers: int = 4,
    attempts: int = 6,
    timeout: float = 30.0,
    bar: Progress | None = None,
    token: str | None = None,
    verify: Verify = "size",
    check: Check | None = None,
    backoff: Backoff = wait_before_retry,
) -> list[Path]:
    """Many files at once, `workers` at a time; the paths come back in the order of `files`.

    The first failure, or Ctrl-C, stops the others within a second; their parts stay to be continued.
    """
    finals = [safe_path(into, file.path) for file in files]
    if len(set(finals)) < len(finals):
        twice = next(file.path for file in files if finals.count(safe_path(into, file.path)) > 1)
        raise UserError(f"{twice!r} is listed twice: every file needs a name of its own.")
    _check_space(files, into)
    sizes = [file.size for file in files]
    total = None if None in sizes else sum(filter(None, sizes))
    with contextlib.ExitStack() as stack:
        if bar is None:
            bar = stack.enter_context(Progress("downloading", total, "B"))
        session = Session(attempts, timeout, token, backoff)
        _fetch_in_threads(files, into, _Options(session, verify, check, bar), workers)
    return finals


def safe_path(into: Path, path: str) -> Path:
    """`into / path`, or a UserError when a name from a server would lead anywhere else."""
    check_plain(path)
    final = into / path
    if not final.parent.resolve().is_relative_to(into.resolve()):
        raise UserError(f"{final.parent} leads out of {into} through a link: remove the link and try again.")
    return final


def check_plain(path: str) -> None:
    """UserError unless `path` is a relative path without tricks, and not a name that a part could have."""
    if (
        not path.isprintable()  # also keeps out what UTF-8 cannot encode
        or "\\" in path
        or any(part in ("", ".", "..") or len(part.encode()) > 200 for part in path.split("/"))
        or path.endswith((".part", ".part.json"))
    ):
        raise UserError(
            f"The server names a file {path[:200]!r}, which is not a plain relative path: refused, and "
            "nothing was written. Check that the address is the right one."
        )


# The workers


def _fetch_in_threads(files: Sequence[RemoteFile], into: Path, options: _Options, workers: int) -> None:
    waiting: queue.SimpleQueue[RemoteFile] = queue.SimpleQueue()
    done: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
    for file in files:
        waiting.put(file)

    def work() -> None:
        while not options.session.stop.is_set():
            try:
                file = waiting.get_nowait()
            except queue.Empty:
                return
            try:
                _fetch(file, into, options)
                done.put(None)
            except BaseException as error:  # handed to the caller's thread, whatever it is
                done.put(error)

    # Daemons: a worker inside a silent read must not keep the program from ending. It writes nothing more,
    # because it looks at `stop` between the read and the write.
    threads = [threading.Thread(target=work, daemon=True) for _ in range(max(1, min(workers, len(files))))]
    for thread in threads:
        thread.start()
    try:
        for _ in files:
            if (error := done.get()) is not None:
                raise error
    finally:
        options.session.stop.set()
        deadline = time.monotonic() + 1.0
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))


# One file


def _fetch(file: RemoteFile, into: Path, options: _Options) -> Path:
    final = safe_path(into, file.path)
    with _disk_errors(into):
        if _is_whole(final, file, options):
            return final
        final.parent.mkdir(parents=True, exist_ok=True)
        with _locked(final.with_name(f"{final.name}.part"), options.session.stop) as (part, handle):
            if _is_whole(final, file, options):  # another process finished it while we waited for the lock
                return final
            final.unlink(missing_ok=True)  # a wrong file must not be taken for the right one meanwhile
            download = _Download(file, part, handle, options)
            # A checksum that does not match may come from an old part, so one fresh start is fair.
            for _ in range(2):
                options.session.keep_trying(download.receive, lambda: download.at, file.url)
                if download.is_right():
                    download.publish(final)
                    return final
                expected = download.sha256
                download.start_over()
        raise UserError(
            f"{file.url} came twice with the wrong bytes (SHA-256 not {expected}): nothing was kept. "
            "Try again later or from another network; if it stays so, the file on the server is damaged."
        )


def _is_whole(final: Path, file: RemoteFile, options: _Options) -> bool:
    if not final.is_file():
        return False
    here = final.stat().st_size
    if file.size is not None and here != file.size:
        return False
    if file.sha256 and (options.verify == "full" or file.size is None):
        with final.open("rb") as stream:
            if hashlib.file_digest(stream, "sha256").hexdigest() != file.sha256:
                return False
    if options.check is not None:
        try:
            options.check(final)
        except ValueError:
            return False
    if options.bar is not None:
        options.bar.advance(here)
    return True


class _Download:
    """What is known about one file while its bytes come in. `hash` covers exactly the first `at` bytes."""

    def __init__(self, file: RemoteFile, part: Path, handle: int, options: _Options) -> None:
        self.file, self.part, self.handle, self.options = file, part, handle, options
        self.notes = part.with_name(f"{part.name}.json")
        self.size, self.sha256, self.etag = file.size, file.sha256, ""
        self.at = 0
        self.hash = hashlib.sha256()
        self._take_up()

    def receive(self) -> None:
        """One request. Returns when every byte is here; after TryAgain the part can be continued."""
        if self.at and not self.etag and not self.sha256:
            self.start_over()  # nothing could tell whether the rest belongs to the same file
        if self.at and self.at == self.size:
            return
        headers = {}
        if self.at:
            headers["Range"] = f"bytes={self.at}-"
            if self.etag:
                headers["If-Range"] = self.etag
        response, linked = self.options.session.open(self.file.url, headers)
        with response:
            if linked and self.file.sha256 and linked != self.file.sha256:
                raise UserError(
                    f"{self.file.url} has changed since it was listed: run the same command again."
                )
            if response.status == 200:
                self._begin(response, linked)
                self._store(response)
            elif response.status == 206:
                self._go_on(response)
                self._store(response)
            else:
                self._nothing_more(response)

    def start_over(self) -> None:
        os.ftruncate(self.handle, 0)
        self.notes.unlink(missing_ok=True)
        self._advance(-self.at)
        self.at, self.hash = 0, hashlib.sha256()
        self.size, self.sha256, self.etag = self.file.size, self.file.sha256, ""

    def is_right(self) -> bool:
        return self.sha256 is None or self.hash.hexdigest() == self.sha256

    def publish(self, final: Path) -> None:
        os.fsync(self.handle)
        if self.options.check is not None:
            try:
                self.options.check(self.part)
            except ValueError as reason:
                self.start_over()
                raise UserError(
                    f"{self.file.url} arrived whole but cannot be used: {reason}. Nothing was kept; "
                    "check that the name and the server are the right ones."
                ) from reason
        os.replace(self.part, final)
        self.notes.unlink(missing_ok=True)
        folder = os.open(final.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def _take_up(self) -> None:
        """Goes on from the part on disk if it can belong to this file; empties it otherwise."""
        here = os.fstat(self.handle).st_size
        notes = self._read_notes()
        same_url = notes.get("url") == self.file.url
        for known, noted in ((self.size, notes.get("size")), (self.sha256, notes.get("sha256"))):
            if known is not None and noted is not None and known != noted:
                return self.start_over()
        if same_url:
            self.etag = str(notes.get("etag") or "")
            self.size = self.size if self.size is not None else notes.get("size")
            self.sha256 = self.sha256 or notes.get("sha256")
        if not here or not (self.etag or self.sha256) or (self.size is not None and here > self.size):
            return self.start_over()
        while self.at < here:
            chunk = os.pread(self.handle, min(_CHUNK, here - self.at), self.at)
            self.hash.update(chunk)
            self.at += len(chunk)
        return self._advance(self.at)

    def _read_notes(self) -> dict[str, Any]:
        try:
            notes = json.loads(self.notes.read_text())
        except (FileNotFoundError, ValueError):
            return {}
        return notes if isinstance(notes, dict) else {}

    def _write_notes(self) -> None:
        notes = {"url": self.file.url, "etag": self.etag, "size": self.size, "sha256": self.sha256}
        self.notes.write_text(json.dumps(notes))  # cut short, they do not parse and count as absent

    def _begin(self, response: Any, linked: str | None) -> None:
        """200: the file from its first byte, whatever we asked for."""
        announced = announced_length(response)
        if self.file.size is not None and announced is not None and announced != self.file.size:
            raise TryAgain(f"the server offers {announced} bytes where {self.file.size} were listed")
        self.start_over()
        etag = response.headers.get("ETag") or ""
        self.etag = "" if etag.startswith("W/") else etag
        self.size = self.file.size if self.file.size is not None else announced
        self.sha256 = self.file.sha256 or linked or sha256_in(self.etag)
        if self.size is None and self.sha256 is None and not response.chunked:
            raise UserError(
                f"{self.file.url} comes without a length and without a checksum, so a part of it would look "
                "like the whole: download it by other means and add it with `nanorun data add`."
            )
        self._write_notes()

    def _go_on(self, response: Any) -> None:
        """206: the rest, which is taken only if it begins where the part ends and is of the same file."""
        found = _CONTENT_RANGE.fullmatch(response.headers.get("Content-Range") or "")
        etag = response.headers.get("ETag")
        same_file = not etag or not self.etag or etag == self.etag
        if self.at and found and int(found[1]) == self.at and same_file:
            total = None if found[3] == "*" else int(found[3])
            if total is not None and self.size is None:
                self.size = total
            if self.size is not None and total in (None, self.size):
                return
        self.start_over()
        raise TryAgain("the server continued with another part of the file than was asked for")

    def _nothing_more(self, response: Any) -> None:
        """416: the server has nothing after our last byte. All is here, or the part is of another file."""
        total = (response.headers.get("Content-Range") or "").removeprefix("bytes */")
        if self.at and total == str(self.at) and self.size in (None, self.at):
            self.size = self.at
            return
        self.start_over()
        raise TryAgain("the server does not have the rest of the file as it was")

    def _store(self, response: Any) -> None:
        while chunk := read_some(response):
            if self.options.session.stop.is_set():
                raise Stopped
            if self.size is not None and self.at + len(chunk) > self.size:
                self.start_over()
                raise TryAgain("the server sent more bytes than the file has")
            rest = memoryview(chunk)
            while rest:
                written = os.pwrite(self.handle, rest, self.at)
                self.hash.update(rest[:written])
                self.at += written
                rest = rest[written:]
            self._advance(len(chunk))
        if self.size is None:
            self.size = self.at
        if self.at < self.size:
            raise TryAgain(f"the connection closed after {self.at} of {self.size} bytes")

    def _advance(self, n: int) -> None:
        if self.options.bar is not None and n:
            self.options.bar.advance(n)


@contextlib.contextmanager
def _locked(part: Path, stop: threading.Event) -> Iterator[tuple[Path, int]]:
    """The part, open and locked; an empty one is removed at the end, and so are its notes."""
    told = False
    while True:
        handle = os.open(part, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
        try:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if not told:
                    say(f"Another process is downloading {part.with_suffix('')}: waiting for it.")
                    told = True
                if stop.wait(0.1):
                    raise Stopped from None
                continue
            try:
                mine = os.path.samestat(os.fstat(handle), os.stat(part, follow_symlinks=False))
            except FileNotFoundError:
                mine = False
            if not mine:  # its former holder renamed or removed the file we opened: look again
                continue
            try:
                yield part, handle
            finally:
                # Renamed, the part is the final file: only what is still called .part may be removed.
                with contextlib.suppress(FileNotFoundError):
                    left = os.stat(part, follow_symlinks=False)
                    if left.st_size == 0 and os.path.samestat(left, os.fstat(handle)):
                        part.with_name(f"{part.name}.json").unlink(missing_ok=True)
                        part.unlink()
            return
        finally:
            os.close(handle)


@contextlib.contextmanager
def _disk_errors(into: Path) -> Iterator[None]:
    """The network's errors never get here, so an OSError is the disk's."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise UserError(
                f"The disk that holds {into} is full: free some space there or set NANORUN_HOME to another "
                "disk, then run the same command again (what has arrived is kept)."
            ) from error
        raise UserError(
            f"Cannot write into {into} ({error}): check the folder and its permissions."
        ) from error


def _check_space(files: Sequence[RemoteFile], into: Path) -> None:
    missing = 0
    for file in files:
        final = safe_path(into, file.path)
        if file.size is None or (final.is_file() and final.stat().st_size == file.size):
            continue
        part = final.with_name(f"{final.name}.part")
        missing += max(0, file.size - (part.stat().st_size if part.is_file() else 0))
    there = into.resolve()
    while not there.exists():
        there = there.parent
    free = shutil.disk_usage(there).free
    if missing > free:
        raise UserError(
            f"{size(missing)} are still to be downloaded into {into}, but only {size(free)} are free there: "
            "ask for fewer files, free some space, or set NANORUN_HOME to another disk."
        )
