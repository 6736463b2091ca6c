"""The bundle of CORE's tasks: a folder, a .zip or a .tar (plain, .gz, .bz2, .xz), read into memory.

The public CORE bundle is a zip of `eval_bundle/`, with `core.yaml`, `eval_meta_data.csv` and `eval_data/`: 33 MB in
all. `data get core` stores that zip unchanged as data/core/eval_bundle.zip. Archives are never unpacked, so no name
inside one can lead to a path on this disk; a link that leads out of a folder is rejected. The total size is limited,
whatever an archive claims.
"""

import lzma
import os
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Self

from nanorun.console import Progress, command
from nanorun.data.download import fetch
from nanorun.errors import UserError
from nanorun.home import data_dir

CORE_URL = "https://karpathy-public.s3.us-west-2.amazonaws.com/eval_bundle.zip"
MARKER = "core.yaml"  # the file at the root of a bundle
_STORED_AS = "eval_bundle.zip"
_ARCHIVE_SUFFIXES = (".zip", ".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".txz")
_MAX_FILES = 20_000
MAX_BYTES = 2**28  # of all files together
_MAX_HEADER = 2**20  # bytes of a name in a tar
_READ_ERRORS = (
    *(zipfile.BadZipFile, tarfile.TarError, lzma.LZMAError, zlib.error, EOFError, OSError),
    *(RuntimeError, NotImplementedError),  # zipfile, for passwords and unknown compression methods
    *(ValueError, LookupError, struct.error, MemoryError, OverflowError),  # headers that make no sense
)


@dataclass(frozen=True)
class Bundle:
    where: Path
    files: Mapping[str, bytes]  # by name, relative to the folder that holds core.yaml, with '/'

    def read(self, name: str) -> bytes:
        if name not in self.files:
            raise UserError(
                f"{self.where} has no {name[:200]!r}: download the bundle again, or name a complete one."
            )
        return self.files[name]


def core_folder() -> Path:
    return data_dir() / "core"


def get_core(*, replace: bool = False) -> Bundle:
    """The public CORE bundle in data/core/, downloaded unless it is there. NANORUN_CORE_URL names a mirror.

    The server publishes no checksum. The zip holds one for each of its files; reading them verifies it.
    """
    url = os.environ.get("NANORUN_CORE_URL") or CORE_URL
    archive = core_folder() / _STORED_AS
    if archive.is_file() and not replace:
        with suppress(UserError):  # damaged: it is downloaded again
            return open_bundle(archive)
    archive.unlink(missing_ok=True)
    with Progress("downloading core", None, "B") as bar:
        fetch(url, archive, check=_check_archive, bar=bar)
    return open_bundle(archive)


def _check_archive(path: Path) -> None:
    """ValueError unless `path` is a CORE bundle whose files match their checksums."""
    try:
        open_bundle(path)
    except UserError as error:
        raise ValueError(str(error).rstrip(".")) from error


def open_bundle(path: Path | None = None) -> Bundle:
    """The bundle at `path`, a folder or an archive; by default what `data get core` stored."""
    if path is None:
        path = core_folder()
        if not path.exists():
            raise UserError(f"There is no CORE bundle in {path}: {_hint()}")
    if not os.path.exists(path):
        raise UserError(f"There is no {path}: --bundle names a folder with core.yaml, a .zip or a .tar.xz.")
    if path.is_dir():
        inside = [folder for folder in (path, path / "eval_bundle") if (folder / MARKER).is_file()]
        inside += [file for file in sorted(path.iterdir()) if file.name.endswith(_ARCHIVE_SUFFIXES)]
        if not inside:
            raise UserError(
                f"{path} has no {MARKER}: name the folder (or archive) that holds it, or {_hint()}"
            )
        path = inside[0]
    try:
        return _read_bundle(path)
    except _READ_ERRORS as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise UserError(f"{path} is damaged ({reason:.200}): download it again.") from error


def _hint() -> str:
    near = Path("..") / "shared" / "data" / "core.tar.xz"
    other = f"--bundle {near}" if near.is_file() else "--bundle PATH (a folder, .zip or .tar.xz)"
    return f"{command('data get core')} downloads it, or name one with {other}."


def _read_bundle(path: Path) -> Bundle:
    """Reads the files below the folder that holds core.yaml."""
    contents: dict[str, bytes] = {}
    size = 0
    for count, (name, unpacked, file) in enumerate(_open_files(path), 1):
        if name.endswith((".yaml", ".csv", ".jsonl")) and not name.startswith("__MACOSX/"):
            contents[name] = file.read(MAX_BYTES - size + 1)
            size += len(contents[name])
        if count > _MAX_FILES or max(size, unpacked) > MAX_BYTES:
            raise UserError(
                f"{path} unpacks to more than {_MAX_FILES:,} files or {MAX_BYTES >> 20:,} MiB: it is not a "
                "CORE bundle."
            )
    roots = [name.removesuffix(MARKER) for name in contents if name.split("/")[-1] == MARKER]
    if not roots:
        raise UserError(f"{path} has no {MARKER} inside: name a CORE bundle, or {_hint()}")
    root = min(roots, key=len)
    below = {name.removeprefix(root): text for name, text in contents.items() if name.startswith(root)}
    return Bundle(path, below)


class _TarHeader(tarfile.TarInfo):
    """tarfile reads a long name whole, into memory, however long it claims to be."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> Self:
        header = super().frombuf(buf, encoding, errors)
        if header.size > _MAX_HEADER and header.type not in tarfile.REGULAR_TYPES:
            raise tarfile.TarError(f"a header of {header.size:,} bytes, at most {_MAX_HEADER:,} are expected")
        return header


def _open_files(path: Path) -> Iterator[tuple[str, int, IO[bytes]]]:
    """Each file's name, the bytes of a tar that are unpacked to reach its end, and its open content."""
    if path.is_dir():
        for file in path.rglob("*"):
            if file.is_file():
                if not file.resolve().is_relative_to(path.resolve()):
                    raise UserError(f"{file} leads out of {path} through a link: remove the link.")
                with open(file, "rb") as content:
                    yield file.relative_to(path).as_posix(), 0, content
    elif zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            for entry in archive.infolist():
                with archive.open(entry) as content:
                    yield entry.filename, 0, content
    else:
        with _open_tar(path) as tar:
            for member in tar:
                extracted = tar.extractfile(member) if member.isfile() else None
                if extracted is not None:
                    yield member.name.removeprefix("./"), member.offset_data + member.size, extracted


def _open_tar(path: Path) -> tarfile.TarFile:
    try:
        return tarfile.open(path, tarinfo=_TarHeader)
    except tarfile.ReadError as error:
        raise UserError(
            f"{path} is neither a folder, a .zip nor a .tar (.gz, .bz2, .xz): name a bundle."
        ) from error
