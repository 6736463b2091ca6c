"""The named corpora: what they are, which of their files to fetch, and that each file is what it should be.

A corpus lives in a dataset repository of a Hugging Face hub. The hub's listing names a size and a SHA-256 for
each file, so every byte is checked against something that did not come with it. The first N training shards
and the one validation shard go to data/NAME/; asking for more later fetches what is missing, and asking for
fewer removes nothing.

HF_ENDPOINT names another hub or a mirror, HF_TOKEN a token for it.
"""

import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from urllib.parse import quote, urlsplit

from nanorun.console import Progress
from nanorun.data.bins import check_bin
from nanorun.data.dataset import Split
from nanorun.data.download import RemoteFile, check_plain, fetch_all, safe_path
from nanorun.data.web import Backoff, Session, sha256_in, wait_before_retry
from nanorun.errors import UserError
from nanorun.home import data_dir

Kind = Literal["parquet", "bin"]

TEXT_COLUMN = "text"
DEFAULT_SHARDS = 8  # about a gigabyte: a real start, and nobody's disk fills by surprise
_PAGE_BYTES = 32 * 1024 * 1024
_MOST_PAGES = 500
_MOST_FILES = 100_000
_NEXT = re.compile(r'<([^<>]*)>\s*;\s*rel="?next"?')


@dataclass(frozen=True)
class Corpus:
    name: str
    about: str
    repo: str
    kind: Kind
    train: str  # a pattern for the names of all shards; the validation shard is never trained on
    val: str
    tokenizer: str | None = None  # of shards that hold tokens instead of text
    revision: str = "main"


CORPORA = {
    corpus.name: corpus
    for corpus in (
        Corpus(
            name="climbmix",
            about="400B tokens of ClimbMix web text, shuffled: nanochat's pretraining corpus",
            repo="karpathy/climbmix-400b-shuffle",
            kind="parquet",
            train=r"shard_\d{5}\.parquet",
            val="shard_06542.parquet",
        ),
        Corpus(
            name="fineweb-edu",
            about="100B tokens of educational web text, shuffled: nanochat's first pretraining corpus",
            repo="karpathy/fineweb-edu-100b-shuffle",
            kind="parquet",
            train=r"shard_\d{5}\.parquet",
            val="shard_01822.parquet",
        ),
        Corpus(
            name="fineweb10B",
            about="10B tokens of FineWeb, already in GPT-2's tokens: the corpus of the NanoGPT speedruns",
            repo="kjj0/fineweb10B-gpt2",
            kind="bin",
            train=r"fineweb_train_\d{6}\.bin",
            val="fineweb_val_000000.bin",
            tokenizer="gpt2",
        ),
    )
}


@dataclass(frozen=True)
class Plan:
    """What a request means in files, before any of them is fetched."""

    corpus: Corpus
    train: tuple[RemoteFile, ...]  # the shards asked for
    val: RemoteFile
    available: tuple[RemoteFile, ...]  # every training shard the hub has, in order

    @property
    def files(self) -> tuple[RemoteFile, ...]:
        return (self.val, *self.train)

    @property
    def size(self) -> int | None:
        sizes = [file.size for file in self.files]
        return None if None in sizes else sum(filter(None, sizes))


@dataclass(frozen=True)
class Fetched:
    """A corpus on this machine: every complete shard in `folder`, in the hub's order."""

    folder: Path
    train: tuple[Path, ...]
    val: tuple[Path, ...]
    kind: Kind
    tokenizer: str | None

    @property
    def files(self) -> list[tuple[Path, Split]]:
        return [*((path, "train") for path in self.train), *((path, "val") for path in self.val)]


def find(name: str) -> Corpus:
    if name not in CORPORA:
        raise UserError(f"There is no corpus named {name!r}: choose one of {', '.join(CORPORA)}.")
    return CORPORA[name]


def plan(
    name: str,
    shards: int | None = None,
    *,
    attempts: int = 3,
    timeout: float = 30.0,
    backoff: Backoff = wait_before_retry,
) -> Plan:
    """The validation shard and the first `shards` training shards (eight, if None), as the hub lists them."""
    corpus = find(name)
    if shards is not None and shards < 1:
        raise UserError(f"{shards} shards of {name} cannot be fetched: ask for at least 1.")
    session = Session(attempts, timeout, token(), backoff)
    listed = {file.path: file for file in list_files(corpus.repo, corpus.revision, session)}
    if corpus.val not in listed:
        raise UserError(
            f"{endpoint()} lists no {corpus.val} in {corpus.repo}, its validation shard: check HF_ENDPOINT, "
            "or wait until the mirror is complete."
        )
    names = sorted(path for path in listed if re.fullmatch(corpus.train, path) and path != corpus.val)
    if shards is None:
        shards = min(DEFAULT_SHARDS, len(names))
    if shards > len(names) or not names:
        raise UserError(f"{name} has {len(names)} training shards on {endpoint()}: {shards} are too many.")
    available = tuple(listed[path] for path in names)
    return Plan(corpus, available[:shards], listed[corpus.val], available)


def fetch_corpus(
    name: str,
    shards: int | None = None,
    *,
    workers: int = 4,
    folder: Path | None = None,
    bar: Progress | None = None,
    attempts: int = 6,
    timeout: float = 30.0,
    backoff: Backoff = wait_before_retry,
) -> Fetched:
    """Fetches what `plan` says into `folder` (data/NAME) and returns all complete shards found there then."""
    wanted = plan(name, shards, attempts=min(attempts, 3), timeout=timeout, backoff=backoff)
    corpus = wanted.corpus
    folder = folder or data_dir() / name
    check = check_parquet if corpus.kind == "parquet" else check_bin
    fetch_all(
        wanted.files,
        folder,
        workers=workers,
        attempts=attempts,
        timeout=timeout,
        bar=bar,
        token=token(),
        check=check,
        backoff=backoff,
    )
    return Fetched(
        folder=folder,
        train=tuple(_complete(wanted.available, folder)),
        val=tuple(_complete([wanted.val], folder)),
        kind=corpus.kind,
        tokenizer=corpus.tokenizer,
    )


def endpoint() -> str:
    address = (os.environ.get("HF_ENDPOINT") or "https://huggingface.co").rstrip("/")
    if urlsplit(address).scheme not in ("http", "https") or not urlsplit(address).hostname:
        raise UserError(f"HF_ENDPOINT is {address!r}: give a whole address, such as https://huggingface.co.")
    return address


def token() -> str | None:
    return os.environ.get("HF_TOKEN", "").strip() or None


def list_files(repo: str, revision: str, session: Session) -> list[RemoteFile]:
    """Every file of a dataset repository, with its size and, where the hub knows it, its SHA-256."""
    base = f"{endpoint()}/api/datasets/{repo}/tree/{quote(revision, safe='')}"
    query: str | None = "recursive=1"
    files: list[RemoteFile] = []
    for _ in range(_MOST_PAGES):
        body, headers = session.read_small(f"{base}?{query}", _PAGE_BYTES)
        files += [_remote_file(entry, repo, revision) for entry in _entries(body)]
        if len(files) > _MOST_FILES:
            raise UserError(f"{repo} lists more than {_MOST_FILES} files on {endpoint()}: refused.")
        # Only the query of the next page's address is used: the token never goes to a host that a listing
        # names, and mirrors whose listings point back at the original hub work.
        following = _NEXT.search(", ".join(headers.get_all("Link") or []))
        query = urlsplit(following[1]).query if following else None
        if not query:
            return files
    raise UserError(f"The listing of {repo} on {endpoint()} does not end: check HF_ENDPOINT.")


def check_parquet(path: Path) -> None:
    """ValueError unless `path` is a parquet file with documents in a column of strings named `text`."""
    import pyarrow
    import pyarrow.parquet

    try:
        shard = pyarrow.parquet.ParquetFile(path)
    except (pyarrow.ArrowException, OSError) as error:
        raise ValueError(f"it is not a parquet file ({str(error).splitlines()[0]})") from error
    with shard:
        schema = shard.schema_arrow
        if TEXT_COLUMN not in schema.names:
            raise ValueError(f"it has no column {TEXT_COLUMN!r}, only {', '.join(schema.names) or 'none'}")
        kind = schema.field(TEXT_COLUMN).type
        if not (pyarrow.types.is_string(kind) or pyarrow.types.is_large_string(kind)):
            raise ValueError(f"its column {TEXT_COLUMN!r} holds {kind}, not strings")
        if shard.metadata.num_rows == 0:
            raise ValueError("it holds no documents")


def _complete(files: Sequence[RemoteFile], folder: Path) -> list[Path]:
    paths = [(file, safe_path(folder, file.path)) for file in files]
    return [
        path
        for file, path in paths
        if path.is_file() and path.stat().st_size == (file.size or path.stat().st_size)
    ]


def _entries(body: bytes) -> list[dict[str, Any]]:
    try:
        entries = json.loads(body)
        if isinstance(entries, list) and all(isinstance(entry, dict) for entry in entries):
            return [entry for entry in entries if entry.get("type") == "file"]
    except (ValueError, RecursionError):
        pass
    raise UserError(f"{endpoint()} did not answer with a list of files: check HF_ENDPOINT and the network.")


def _remote_file(entry: dict[str, Any], repo: str, revision: str) -> RemoteFile:
    path, length, lfs = entry.get("path"), entry.get("size"), entry.get("lfs")
    if not isinstance(path, str) or type(length) is not int or length < 0:
        raise UserError(
            f"{endpoint()} lists a file without a proper name and size in {repo}: check HF_ENDPOINT."
        )
    check_plain(path)
    oid = lfs.get("oid") if isinstance(lfs, dict) else None
    url = f"{endpoint()}/datasets/{repo}/resolve/{quote(revision, safe='')}/{quote(path)}"
    return RemoteFile(url, length, sha256_in(oid) if isinstance(oid, str) else None, path)
