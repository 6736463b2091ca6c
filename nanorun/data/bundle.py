"""The bundle of CORE's tasks: a folder, a .zip or a .tar (plain, .gz, .bz2, .xz), read without unpacking.

The public CORE bundle is a zip of `eval_bundle/`, with `core.yaml`, `eval_meta_data.csv` and `eval_data/`. `data get
core` stores that zip unchanged as data/core/eval_bundle.zip. Archives are read in memory and never unpacked, so no
name inside one can lead to a path on this disk; a name in the yaml that leads out of a folder is rejected. Files of a
zip are read one by one on demand; a tar has no index, so all relevant files are read at once. The total size is
limited, whatever an archive claims.
"""

import lzma
import os
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from nanorun.console import Progress
from nanorun.data.download import fetch
from nanorun.errors import UserError
from nanorun.home import data_dir

CORE_URL = "https://karpathy-public.s3.us-west-2.amazonaws.com/eval_bundle.zip"
MARKER = "core.yaml"  # the file at the root of a bundle
_STORED_AS = "eval_bundle.zip"
_SUFFIXES = (".zip", ".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".txz")
_RELEVANT_SUFFIXES = (".yaml", ".csv", ".jsonl")
_MAX_MEMBERS = 20_000
_MAX_MEMBER_BYTES = 256 * 2**20
_MAX_BYTES = 2**30
_READ_ERRORS = (
    *(zipfile.BadZipFile, tarfile.TarError, lzma.LZMAError, zlib.error, EOFError, OSError),
    *(RuntimeError, NotImplementedError),  # zipfile, for passwords and unknown compression methods
)


@dataclass(frozen=True)
class Bundle:
    where: Path
    names: frozenset[str]  # relative to the folder that holds core.yaml, with '/'
    _read: Callable[[str], bytes]

    def read(self, name: str) -> bytes:
        if name not in self.names:
            raise UserError(
                f"{self.where} has no {name[:200]!r}: download the bundle again, or name a complete one."
            )
        try:
            return self._read(name)
        except _READ_ERRORS as error:
            raise UserError(f"{self.where} is damaged at {name!r} ({error}): download it again.") from error


def core_folder() -> Path:
    return data_dir() / "core"


def get_core(*, replace: bool = False) -> Bundle:
    """The public CORE bundle in data/core/, downloaded unless it is there. NANORUN_CORE_URL names a mirror.

    The server publishes no checksum. The zip holds one for each of its files; all of them are verified.
    """
    url = os.environ.get("NANORUN_CORE_URL") or CORE_URL
    archive = core_folder() / _STORED_AS
    if replace or not _is_usable(archive):
        archive.unlink(missing_ok=True)
        with Progress("downloading core", None, "B") as bar:
            fetch(url, archive, check=_check_archive, bar=bar)
    return open_bundle(archive)


def open_bundle(path: Path | None = None) -> Bundle:
    """The bundle at `path`, a folder or an archive; by default what `data get core` stored."""
    if path is None:
        path = core_folder()
        if not path.exists():
            raise UserError(f"There is no CORE bundle in {path}: {_hint()}")
    if not path.exists():
        raise UserError(f"There is no {path}: --bundle names a folder with core.yaml, a .zip or a .tar.xz.")
    for folder in (path, path / "eval_bundle"):
        if (folder / MARKER).is_file():
            return _open_folder(folder)
    archive = _archive_in(path) if path.is_dir() else path
    if archive is None:
        raise UserError(f"{path} has no {MARKER}: name the folder (or archive) that holds it, or {_hint()}")
    try:
        if zipfile.is_zipfile(archive):
            return _open_zip(archive)
        if tarfile.is_tarfile(archive):
            return _open_tar(archive)
    except _READ_ERRORS as error:
        raise UserError(f"{archive} is damaged ({error}): download it again.") from error
    raise UserError(f"{archive} is neither a folder, a .zip nor a .tar (.gz, .bz2, .xz): name a bundle.")


def _hint() -> str:
    near = Path("..") / "shared" / "data" / "core.tar.xz"
    other = f"--bundle {near}" if near.is_file() else "--bundle PATH (a folder, .zip or .tar.xz)"
    return f"nanorun data get core downloads it, or name one with {other}."


def _archive_in(folder: Path) -> Path | None:
    return next((path for path in sorted(folder.iterdir()) if path.name.endswith(_SUFFIXES)), None)


def _is_usable(archive: Path) -> bool:
    try:
        return MARKER in open_bundle(archive).names
    except UserError:
        return False


def _check_archive(path: Path) -> None:
    """ValueError unless `path` is a CORE bundle whose files match their checksums."""
    try:
        bundle = open_bundle(path)
        for name in bundle.names:
            bundle.read(name)
    except UserError as error:
        raise ValueError(str(error).rstrip(".")) from error


# The three formats


def _open_folder(folder: Path) -> Bundle:
    root = folder.resolve()

    def read(name: str) -> bytes:
        path = folder / name
        if not path.resolve().is_relative_to(root):
            raise UserError(f"{path} leads out of {folder} through a link: remove the link.")
        _check_member(folder, name, path.stat().st_size)
        return path.read_bytes()

    found = (path for path in folder.rglob("*") if path.suffix in _RELEVANT_SUFFIXES and path.is_file())
    return Bundle(folder, frozenset(path.relative_to(folder).as_posix() for path in found), read)


def _open_zip(path: Path) -> Bundle:
    with zipfile.ZipFile(path) as archive:
        members = archive.infolist()
        sizes = {member.filename: member.file_size for member in members if _is_relevant(member.filename)}
        _check_total(path, len(members), sum(sizes.values()))

    def read(name: str) -> bytes:
        _check_member(path, name, sizes[name])
        with zipfile.ZipFile(path) as archive, archive.open(name) as file:
            content = file.read(_MAX_MEMBER_BYTES + 1)
            _check_member(path, name, len(content))
            return content

    return _below_root(path, sizes, read)


def _open_tar(path: Path) -> Bundle:
    contents: dict[str, bytes] = {}
    with tarfile.open(path) as archive:
        for count, member in enumerate(archive, 1):
            _check_total(path, count, member.offset_data + member.size)  # bytes decompressed so far
            if member.isfile() and _is_relevant(member.name):
                _check_member(path, member.name, member.size)
                file = archive.extractfile(member)
                contents[member.name.removeprefix("./")] = file.read() if file is not None else b""
    return _below_root(path, contents, contents.__getitem__)


def _is_relevant(name: str) -> bool:
    return name.endswith(_RELEVANT_SUFFIXES) and not name.startswith("__MACOSX/")


def _below_root(path: Path, names: Iterable[str], read: Callable[[str], bytes]) -> Bundle:
    """The bundle below the folder inside the archive that holds core.yaml."""
    roots = [name.removesuffix(MARKER) for name in names if name.split("/")[-1] == MARKER]
    if not roots:
        raise UserError(f"{path} has no {MARKER} inside: name a CORE bundle, or {_hint()}")
    root = min(roots, key=len)
    below = frozenset(name.removeprefix(root) for name in names if name.startswith(root))
    return Bundle(path, below, lambda name: read(root + name))


def _check_total(path: Path, members: int, size: int) -> None:
    if members > _MAX_MEMBERS or size > _MAX_BYTES:
        raise UserError(
            f"{path} unpacks to more than {_MAX_MEMBERS:,} files or {_MAX_BYTES >> 20:,} MiB: it is not a CORE bundle."
        )


def _check_member(path: Path, name: str, size: int) -> None:
    if size > _MAX_MEMBER_BYTES:
        raise UserError(
            f"{name} in {path} has {size} bytes (at most {_MAX_MEMBER_BYTES:,}): it is not a CORE bundle."
        )
