"""Download of the named corpora from a hub that drops connections, sends wrong data or stops responding."""

import hashlib
import io
import json
import shutil
import urllib.parse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from bad_server import Act, BadServer, prepare_client

from nanorun.data.bins import check_bin
from nanorun.data.dataset import open_dataset
from nanorun.data.get import GPT2, get_dataset
from nanorun.data.hub import CORPORA, check_parquet, fetch_corpus, list_files
from nanorun.data.shards import read_texts
from nanorun.data.sources import open_source
from nanorun.errors import UserError
from nanorun.text.store import public_tokenizer

CLIMBMIX = CORPORA["climbmix"]


def parquet(number: int, column: str = "text", rows: int = 20) -> bytes:
    sink = io.BytesIO()
    texts = [f"document {row} of shard {number}" for row in range(rows)]
    pyarrow.parquet.write_table(pyarrow.table({column: pyarrow.array(texts, pyarrow.string())}), sink)
    return sink.getvalue()


def token_shard(tokens: int, magic: int = 20240520, version: int = 1) -> bytes:
    header = np.zeros(256, dtype="<i4")
    header[:3] = magic, version, tokens
    return header.tobytes() + np.arange(tokens, dtype="<u2").tobytes()


class Hub:
    """One dataset repository behind the hub's API, on the misbehaving server."""

    def __init__(self, server: BadServer, name: str) -> None:
        self.server, self.repo = server, CORPORA[name].repo
        self.entries: dict[str, Any] = {}
        self.paths_info = f"/api/datasets/{self.repo}/paths-info/main"
        server.posts[self.paths_info] = self.describe

    def describe(self, form: bytes) -> bytes:
        wanted = urllib.parse.parse_qs(form.decode())["paths"]
        return json.dumps([self.entries[path] for path in wanted if path in self.entries]).encode()

    def resolve(self, path: str) -> str:
        return f"/datasets/{self.repo}/resolve/main/{path}"

    def add(self, path: str, content: bytes, **changes: Any) -> None:
        self.server.files[self.resolve(path)] = content
        lfs = {"oid": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 134}
        entry = {"type": "file", "path": path, "size": len(content), "oid": "2" * 40, "lfs": lfs}
        self.entries[path] = entry | changes

    def fetched(self) -> set[str]:
        return {seen.path.rpartition("/")[2] for seen in self.server.seen if "/resolve/" in seen.path}


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[BadServer]:
    prepare_client(monkeypatch)
    with BadServer() as server:
        monkeypatch.setenv("HF_ENDPOINT", f"{server.url}/")
        yield server


@pytest.fixture
def climbmix(server: BadServer) -> Hub:
    repo = Hub(server, "climbmix")
    repo.add(CLIMBMIX.val, parquet(6542))
    for number in range(12):
        repo.add(f"shard_{number:05d}.parquet", parquet(number))
    return repo


def get(name: str, shards: int, home: Path, workers: int = 4) -> list[Path]:
    return fetch_corpus(CORPORA[name], shards, home / "data" / name, workers)


def shard_names(paths: list[Path]) -> list[str]:
    return [path.name for path in paths]


def visible(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()} - {".lock"}


def test_a_corpus_is_downloaded_and_extended(climbmix: Hub, home: Path) -> None:
    first = get("climbmix", 4, home)
    assert shard_names(first) == [*(f"shard_{i:05d}.parquet" for i in range(4)), "shard_06542.parquet"]
    assert pyarrow.parquet.read_table(first[2])["text"][1].as_py() == "document 1 of shard 2"
    climbmix.server.seen.clear()
    second = get("climbmix", 8, home)
    assert climbmix.fetched() == {f"shard_{i:05d}.parquet" for i in range(4, 8)}
    climbmix.server.seen.clear()
    assert get("climbmix", 2, home) == [*second[:2], second[-1]]
    assert not climbmix.fetched()
    assert visible(home / "data" / "climbmix") == set(shard_names(second)), "fewer shards remove none"


def test_token_shards_are_downloaded(server: BadServer, home: Path) -> None:
    repo = Hub(server, "fineweb10B")
    repo.add("fineweb_val_000000.bin", token_shard(100))
    for number in (1, 2, 3):
        repo.add(f"fineweb_train_{number:06d}.bin", token_shard(1000 + number))
    names = ["fineweb_train_000001.bin", "fineweb_train_000002.bin", "fineweb_val_000000.bin"]
    assert shard_names(get("fineweb10B", 2, home)) == names


def test_many_shards_are_listed_in_several_requests(server: BadServer) -> None:
    repo = Hub(server, "climbmix")
    names = CLIMBMIX.train_files(1200)
    for name in names:
        repo.add(name, name.encode())
    files = list_files(CLIMBMIX, names)
    assert [file.path for file in files] == names
    assert len(server.requests(repo.paths_info, "POST")) == 3


def test_a_corpus_becomes_a_dataset_that_grows_and_is_used_offline(climbmix: Hub, home: Path) -> None:
    options: dict[str, Any] = {"sample_bytes": 0, "seed": 0, "workers": 2}
    first = get_dataset("climbmix", 2, **options)
    assert (len(first.of("train")), first.total("documents"), first.shards[-1].split) == (2, 60, "val")
    texts = [f"document {row} of shard {shard}" for shard in (0, 1, 6542) for row in range(20)]
    assert sorted([*read_texts(first, "train"), *read_texts(first, "val")]) == sorted(texts)
    assert first.total("text_bytes") == sum(map(len, texts))
    assert len(get_dataset("climbmix", 3, **options).of("train")) == 3
    asked = len(climbmix.server.seen)
    assert get_dataset("climbmix", 3, **options) == open_dataset("climbmix")
    assert len(climbmix.server.seen) == asked, "what is here needs no hub"


def test_downloaded_token_shards_become_a_gpt2_dataset(server: BadServer, home: Path) -> None:
    repo = Hub(server, "fineweb10B")
    repo.add("fineweb_val_000000.bin", token_shard(60_000))
    repo.add("fineweb_train_000001.bin", token_shard(65_000))
    dataset = get_dataset("fineweb10B", 1, sample_bytes=0, seed=0, workers=1)
    assert dataset.tokenizer is not None
    assert (dataset.kind, dataset.tokenizer["bos"], dataset.total("tokens", "train")) == (
        "bin",
        50256,
        65_000,
    )
    assert open_source(dataset, "train", None).units == 1


def test_the_fingerprint_kept_for_gpt2_is_that_of_its_ranks(shared_data: Path) -> None:
    assert public_tokenizer("gpt2", shared_data / "gpt2.tiktoken").fingerprint == GPT2["fingerprint"]


def test_the_corpora_have_their_published_shards() -> None:
    assert set(CORPORA) == {"climbmix", "fineweb-edu", "fineweb10B"}
    for corpus in CORPORA.values():
        assert corpus.val not in corpus.train_files(corpus.shards), "validation text is never trained on"
    assert CORPORA["climbmix"].train_files(6542)[-1] == "shard_06541.parquet"
    assert CORPORA["fineweb-edu"].train_files(1822)[-1] == "shard_01821.parquet"
    assert CORPORA["fineweb10B"].train_files(103)[-1] == "fineweb_train_000103.bin"


def test_downloads_survive_drops_and_wrong_bytes(climbmix: Hub, home: Path) -> None:
    for number in range(8):
        climbmix.server.script(climbmix.resolve(f"shard_{number:05d}.parquet"), Act(drop_after=100 * number))
    val = climbmix.resolve(CLIMBMIX.val)
    climbmix.server.script(val, Act(corrupt=True), Act(drop_after=7), Act(status=503), Act(status=429))
    climbmix.server.script(f"HEAD {val}", Act(status=503), Act(status=429), Act(status=502))
    climbmix.server.script(f"POST {climbmix.paths_info}", Act(status=503), Act(drop_after=20))
    for path in get("climbmix", 8, home):
        assert path.read_bytes() == climbmix.server.files[climbmix.resolve(path.name)]


def test_a_dropped_connection_is_resumed_within_a_shard(server: BadServer, home: Path) -> None:
    repo = Hub(server, "fineweb10B")
    repo.add("fineweb_val_000000.bin", token_shard(60_000))
    repo.add("fineweb_train_000001.bin", token_shard(60_000))
    path = repo.resolve("fineweb_train_000001.bin")
    server.script(path, Act(drop_after=50_000), Act(drop_after=40_000))
    get("fineweb10B", 1, home)
    assert [seen.headers.get("range") for seen in server.requests(path)] == [
        None,
        "bytes=50000-",
        "bytes=90000-",
    ]


@pytest.mark.parametrize(
    ("act", "message"),
    [(Act(corrupt=True), "wrong bytes"), (Act(body=b"<html>"), "size"), (Act(status=404), "not found")],
    ids=["corrupt", "another length", "gone"],
)
def test_a_failed_shard_is_never_published_and_the_others_stay(
    climbmix: Hub, home: Path, act: Act, message: str
) -> None:
    bad = climbmix.resolve("shard_00003.parquet")
    climbmix.server.always[bad] = act
    with pytest.raises(UserError, match=message) as failure:
        get("climbmix", 4, home, workers=1)
    assert "\n" not in str(failure.value)
    folder = home / "data" / "climbmix"
    assert {f"shard_{i:05d}.parquet" for i in range(3)} == visible(folder) - {".download"}
    del climbmix.server.always[bad]
    climbmix.server.seen.clear()
    get("climbmix", 4, home)
    assert climbmix.fetched() == {"shard_00003.parquet", "shard_06542.parquet"}


def test_files_of_a_killed_process_are_cleared_and_shards_downloaded_in_parallel(
    climbmix: Hub, home: Path
) -> None:
    left = home / "data" / "climbmix" / ".download" / ".cache" / "huggingface" / "download"
    left.mkdir(parents=True)
    (left / "shard_00000.parquet.abc.incomplete").write_bytes(b"partial")
    (home / "data" / "climbmix" / "shard_00001.parquet").write_bytes(b"another length")
    for number in range(8):
        climbmix.server.always[climbmix.resolve(f"shard_{number:05d}.parquet")] = Act(hang=0.1)
    paths = get("climbmix", 8, home)
    assert visible(home / "data" / "climbmix") == set(shard_names(paths))
    assert paths[1].read_bytes() == climbmix.server.files[climbmix.resolve("shard_00001.parquet")]
    assert 2 <= climbmix.server.most_at_once <= 8


def test_the_token_is_sent_to_the_hub_and_not_to_its_storage(
    climbmix: Hub, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", " hf_secret\n")
    shard = climbmix.resolve("shard_00000.parquet")
    content = climbmix.server.files[shard]
    with BadServer() as storage:
        storage.files["/blob"] = content
        redirect = {
            "Location": f"{storage.url.replace('127.0.0.1', 'localhost')}/blob",  # another host
            "X-Linked-ETag": f'"{hashlib.sha256(content).hexdigest()}"',
            "X-Linked-Size": str(len(content)),
            "X-Repo-Commit": "3" * 40,
        }
        climbmix.server.always[f"HEAD {shard}"] = Act(status=302, headers=redirect)
        get("climbmix", 1, home)
        assert {seen.headers.get("authorization") for seen in storage.seen} == {None}
    assert {seen.headers.get("authorization") for seen in climbmix.server.seen} == {"Bearer hf_secret"}


@pytest.mark.parametrize(
    ("shards", "message"), [(-1, "out of range"), (0, "out of range"), (6543, "6542 training shards")]
)
def test_a_number_of_shards_out_of_range_is_refused(
    climbmix: Hub, home: Path, shards: int, message: str
) -> None:
    with pytest.raises(UserError, match=message):
        get("climbmix", shards, home)


def test_a_hub_without_a_shard_is_refused_before_any_download(climbmix: Hub, home: Path) -> None:
    with pytest.raises(UserError, match=r"has no shard_00012\.parquet"):
        get("climbmix", 13, home)
    assert not climbmix.fetched()


def test_too_little_space_is_reported_before_any_download(
    climbmix: Hub, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(home)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    with pytest.raises(UserError, match="only 1 kB are free"):
        get("climbmix", 2, home)
    assert not climbmix.fetched()


def test_an_unreachable_hub_is_an_error(monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
    prepare_client(monkeypatch)
    with BadServer() as gone:
        url = gone.url
    monkeypatch.setenv("HF_ENDPOINT", url)
    with pytest.raises(UserError, match=r"connection failed .*HF_ENDPOINT") as failure:
        get("climbmix", 1, home)
    assert "\n" not in str(failure.value)
    assert not (home / "data").exists()
    for nonsense in ("huggingface.co", "ftp://huggingface.co", "https://"):
        monkeypatch.setenv("HF_ENDPOINT", nonsense)
        with pytest.raises(UserError, match="HF_ENDPOINT is"):
            get("climbmix", 1, home)


@pytest.mark.parametrize(("status", "advice"), [(401, "HF_TOKEN"), (404, "check the name")])
def test_a_refusal_of_the_hub_is_reported_with_a_remedy(
    climbmix: Hub, home: Path, status: int, advice: str
) -> None:
    climbmix.server.script(f"POST {climbmix.paths_info}", Act(status=status))
    with pytest.raises(UserError, match=advice):
        get("climbmix", 1, home)


@pytest.mark.parametrize(
    "body", [b"<html>log in</html>", b"{}", b'["a"]', b"\xff\xfe", b"[" * 100_000, b"7"], ids=range(6)
)
def test_a_malformed_listing_is_an_error(climbmix: Hub, home: Path, body: bytes) -> None:
    climbmix.server.always[f"POST {climbmix.paths_info}"] = Act(body=body)
    with pytest.raises(
        UserError, match=r"not the response of a Hugging Face hub|has no shard_00000"
    ) as failure:
        get("climbmix", 1, home)
    assert "\n" not in str(failure.value)
    assert not (home / "data").exists()


@pytest.mark.parametrize("change", [{"size": -1}, {"size": "12"}, {"size": None}, {"size": True}])
def test_a_listing_without_valid_sizes_is_refused(climbmix: Hub, home: Path, change: dict[str, Any]) -> None:
    climbmix.add("shard_00000.parquet", parquet(0), **change)
    with pytest.raises(UserError, match="not the response of a Hugging Face hub"):
        get("climbmix", 1, home)


def test_unrequested_files_in_a_listing_are_ignored(climbmix: Hub, home: Path) -> None:
    evil = {"type": "file", "path": "../../evil", "size": 5, "oid": "2" * 40}
    wanted = [evil, *climbmix.entries.values()]
    climbmix.server.posts[climbmix.paths_info] = lambda form: json.dumps(wanted).encode()
    assert len(get("climbmix", 1, home)) == 2
    assert not (home / "evil").exists()


def test_a_server_that_is_not_a_hub_is_an_error(climbmix: Hub, home: Path) -> None:
    head = f"HEAD {climbmix.resolve('shard_00000.parquet')}"
    climbmix.server.always[head] = Act(status=200)  # without the headers of a hub
    with pytest.raises(UserError, match="X-Repo-Commit") as failure:
        get("climbmix", 1, home)
    assert "\n" not in str(failure.value)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"PAR1 but no more", "not a parquet file"),
        (b"", "not a parquet file"),
        (parquet(0, column="content"), "no column 'text', only content"),
        (parquet(0, rows=0), "no documents"),
        (parquet(0)[:-10], "not a parquet file"),
    ],
)
def test_a_shard_that_is_not_parquet_text_is_never_published(
    climbmix: Hub, home: Path, content: bytes, reason: str
) -> None:
    climbmix.add("shard_00000.parquet", content)
    with pytest.raises(UserError, match=f"cannot be used: .*{reason}"):
        get("climbmix", 1, home)
    assert not (home / "data" / "climbmix" / "shard_00000.parquet").exists()


def test_a_text_column_of_another_type_is_refused(tmp_path: Path) -> None:
    for kind, good in ((pyarrow.large_string(), True), (pyarrow.int64(), False)):
        values = ["a"] if good else [1]
        pyarrow.parquet.write_table(pyarrow.table({"text": pyarrow.array(values, kind)}), tmp_path / "shard")
        if good:
            check_parquet(tmp_path / "shard")
        else:
            with pytest.raises(ValueError, match="holds int64, not strings"):
                check_parquet(tmp_path / "shard")


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (token_shard(10, magic=20240521), "not a token shard"),
        (token_shard(10, version=2), "version 2, not 1"),
        (token_shard(10)[:-1], "announces 10 tokens, so 1044 bytes, but has 1043"),
        (token_shard(10) + b"\0\0", "but has 1046"),
        (token_shard(10)[:1000], "announces 10 tokens, so 1044 bytes, but has 1000"),
        (b"", "not a token shard"),
    ],
)
def test_a_token_shard_has_its_header_and_exactly_its_tokens(
    tmp_path: Path, content: bytes, reason: str
) -> None:
    (tmp_path / "shard").write_bytes(token_shard(10))
    check_bin(tmp_path / "shard")
    (tmp_path / "shard").write_bytes(content)
    with pytest.raises(ValueError, match=reason):
        check_bin(tmp_path / "shard")
