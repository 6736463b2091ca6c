"""The named corpora: what they are, which of their files to download, and what each file must be.

A corpus is a dataset repository on a Hugging Face hub. The hub states the size and the SHA-256 of each file
before the download, so every byte is verified. The first N training shards and the one validation shard go to
data/NAME/. A later request for more shards downloads those that are missing; a request for fewer removes none.

HF_ENDPOINT names another hub or a mirror, HF_TOKEN a token for it.
"""

import os
import shutil
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal
from urllib.parse import urlsplit

from nanorun.console import Progress
from nanorun.data.bins import check_bin
from nanorun.data.download import (
    DownloadStopped,
    check_space,
    download,
    lock_folder,
    retry,
    run_parallel,
    tqdm_calling,
)
from nanorun.errors import UserError

if TYPE_CHECKING:
    from huggingface_hub import RepoFile

Kind = Literal["parquet", "bin"]

TEXT_COLUMN = "text"
DEFAULT_SHARDS = 8  # about a gigabyte: enough for a first real run, small enough for any disk
_STAGING = ".download"  # in the corpus's folder: files that are not verified yet
_PATHS_PER_REQUEST = 500
_LISTING_TIMEOUT = 30.0


@dataclass(frozen=True)
class Corpus:
    repo: str
    kind: Kind  # text, or GPT-2's tokens
    train: str  # the format of a training shard's name
    first: int  # the number of the first training shard
    shards: int  # the number of training shards
    val: str

    def train_files(self, shards: int) -> list[str]:
        return [self.train.format(number) for number in range(self.first, self.first + shards)]


def _shuffled(repo: str, shards: int) -> Corpus:
    """A corpus in nanochat's layout: numbered shards of text, the last of which is for validation."""
    numbered = "shard_{:05d}.parquet"
    return Corpus(repo, "parquet", train=numbered, first=0, shards=shards, val=numbered.format(shards))


CORPORA = {
    # 400B tokens of ClimbMix web text, shuffled: nanochat's pretraining corpus
    "climbmix": _shuffled("karpathy/climbmix-400b-shuffle", 6542),
    # 100B tokens of educational web text, shuffled: nanochat's first pretraining corpus
    "fineweb-edu": _shuffled("karpathy/fineweb-edu-100b-shuffle", 1822),
    # 10B tokens of FineWeb, already in GPT-2's tokens: the corpus of the NanoGPT speedruns
    "fineweb10B": Corpus(
        "kjj0/fineweb10B-gpt2",
        "bin",
        train="fineweb_train_{:06d}.bin",
        first=1,
        shards=103,
        val="fineweb_val_000000.bin",
    ),
}


def fetch_corpus(corpus: Corpus, shards: int, folder: Path, workers: int = 4) -> list[Path]:
    """Downloads the first `shards` training shards and the validation shard, `workers` files at a time.

    Returns their paths, the validation shard last. Files that are complete are not downloaded again.
    """
    if not 1 <= shards <= corpus.shards:
        raise UserError(f"{corpus.repo} has {corpus.shards} training shards: {shards} is out of range.")
    files = list_files(corpus, [*corpus.train_files(shards), corpus.val])
    stop = threading.Event()
    with lock_folder(folder):
        shutil.rmtree(folder / _STAGING, ignore_errors=True)  # left by a killed process
        sizes = {path.name: path.stat().st_size for path in folder.iterdir() if path.is_file()}
        missing = [file for file in files if sizes.get(file.path) != file.size]
        total = sum(file.size for file in missing)
        check_space(total, folder)
        with Progress(f"downloading {folder.name}", total, "B") as bar:
            run_parallel(lambda file: _fetch_file(corpus, file, folder, bar, stop), missing, workers, stop)
        shutil.rmtree(folder / _STAGING, ignore_errors=True)
    return [folder / file.path for file in files]


def _fetch_file(corpus: Corpus, file: "RepoFile", folder: Path, bar: Progress, stop: threading.Event) -> None:
    from huggingface_hub import hf_hub_download

    received = 0.0

    def advance(n: float) -> None:
        nonlocal received
        if stop.is_set():
            raise DownloadStopped
        received += n
        bar.advance(n)

    def receive() -> Path:
        advance(-received)  # the bytes of a failed attempt
        path = hf_hub_download(
            corpus.repo,
            file.path,
            repo_type="dataset",
            endpoint=endpoint(),
            local_dir=folder / _STAGING,
            tqdm_class=tqdm_calling(advance),
        )
        return Path(path)

    source = f"{endpoint()}/datasets/{corpus.repo}/{file.path}"
    check = check_parquet if corpus.kind == "parquet" else check_bin
    download(receive, folder / file.path, source, check=check, sha256=file.lfs.sha256 if file.lfs else None)


def list_files(corpus: Corpus, paths: list[str]) -> "list[RepoFile]":
    """What the hub states about these files: size and SHA-256."""
    from huggingface_hub import HfApi, RepoFile, get_session

    found: dict[str, RepoFile] = {}
    for start in range(0, len(paths), _PATHS_PER_REQUEST):
        some = paths[start : start + _PATHS_PER_REQUEST]

        def request(some: list[str] = some) -> dict[str, RepoFile]:
            get_session().timeout = _LISTING_TIMEOUT  # the library sets none
            listed = HfApi(endpoint()).get_paths_info(corpus.repo, some, repo_type="dataset")
            files = [file for file in listed if isinstance(file, RepoFile)]
            if any(type(file.size) is not int or file.size < 0 for file in files):
                raise ValueError("a file without a size")
            return {file.path: file for file in files}

        # Few attempts: without a network, the error should come soon.
        found |= retry(request, f"{endpoint()}/datasets/{corpus.repo}", attempts=3)
    for path in paths:
        if path not in found:
            raise UserError(
                f"{endpoint()} has no {path} in {corpus.repo}: check HF_ENDPOINT, or wait until the mirror is complete."
            )
    return [found[path] for path in paths]


def endpoint() -> str:
    address = (os.environ.get("HF_ENDPOINT") or "https://huggingface.co").rstrip("/")
    if urlsplit(address).scheme not in ("http", "https") or not urlsplit(address).hostname:
        raise UserError(f"HF_ENDPOINT is {address!r}: give a whole address, such as https://huggingface.co.")
    return address


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
