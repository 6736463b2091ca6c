"""The named corpora, from a hub that lists, pages, lies and falls silent."""

import hashlib
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from bad_server import Act, BadServer

from nanorun.data import hub
from nanorun.data.dataset import open_dataset, read_texts
from nanorun.data.get import GPT2, get_dataset
from nanorun.data.hub import CORPORA, Fetched, check_bin, check_parquet, fetch_corpus, plan
from nanorun.data.sources import open_source
from nanorun.data.web import Session
from nanorun.errors import UserError
from nanorun.text.tokenizer import gpt2_tokenizer

VAL = {name: corpus.val for name, corpus in CORPORA.items()}


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
        self.entries: list[Any] = [{"type": "directory", "path": "extra", "size": 0, "oid": "1" * 40}]

    @property
    def listing(self) -> str:
        return f"/api/datasets/{self.repo}/tree/main?recursive=1"

    def resolve(self, path: str) -> str:
        return f"/datasets/{self.repo}/resolve/main/{path}"

    def add(self, path: str, content: bytes, **changes: Any) -> None:
        self.server.files[self.resolve(path)] = content
        lfs = {"oid": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 134}
        entry = {"type": "file", "path": path, "size": len(content), "oid": "2" * 40, "lfs": lfs}
        self.entries.append(entry | changes)

    def publish(self, per_page: int = 1000) -> None:
        pages = [self.entries[i : i + per_page] for i in range(0, len(self.entries), per_page)]
        for number, page in enumerate(pages):
            here = self.listing + (f"&cursor=page{number}" if number else "")
            self.server.files[here] = json.dumps(page).encode()
            if number + 1 < len(pages):
                # As a mirror does that passes the original hub's links on.
                following = f"https://huggingface.co{self.listing}&cursor=page{number + 1}"
                self.server.always[here] = Act(headers={"Link": f'<{following}>; rel="next"'})

    def fetched(self) -> set[str]:
        return {seen.path.rpartition("/")[2] for seen in self.server.seen if "/resolve/" in seen.path}


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[BadServer]:
    monkeypatch.setenv("no_proxy", "127.0.0.1,localhost")
    monkeypatch.delenv("HF_TOKEN", raising=False)
    with BadServer() as server:
        monkeypatch.setenv("HF_ENDPOINT", f"{server.url}/")
        yield server


@pytest.fixture
def climbmix(server: BadServer) -> Hub:
    repo = Hub(server, "climbmix")
    repo.add(".gitattributes", b"*.parquet filter=lfs", lfs=None)
    repo.add(VAL["climbmix"], parquet(6542))
    for number in reversed(range(12)):
        repo.add(f"shard_{number:05d}.parquet", parquet(number))
    repo.publish(per_page=5)
    return repo


def get(name: str, shards: int | None = None, **options: Any) -> Fetched:
    return fetch_corpus(name, shards, **{"timeout": 2.0, "backoff": lambda failures, after: 0.0, **options})


def shard_names(paths: tuple[Path, ...]) -> list[str]:
    return [path.name for path in paths]


def test_a_plan_names_the_first_shards_and_the_validation_shard_with_size_and_checksum(climbmix: Hub) -> None:
    wanted = plan("climbmix", 3)
    assert [file.path for file in wanted.train] == [f"shard_{i:05d}.parquet" for i in range(3)]
    assert wanted.val.path == "shard_06542.parquet"
    assert len(wanted.available) == 12
    assert wanted.val not in wanted.available
    for file in wanted.files:
        content = climbmix.server.files[climbmix.resolve(file.path)]
        assert (file.size, file.sha256) == (len(content), hashlib.sha256(content).hexdigest())
        assert file.url == climbmix.server.url + climbmix.resolve(file.path)
    assert wanted.size == sum(file.size or 0 for file in wanted.files)
    assert len(plan("climbmix").train) == 8
    assert not climbmix.fetched()


def test_a_corpus_arrives_and_grows_and_never_shrinks(climbmix: Hub, home: Path) -> None:
    first = get("climbmix", 4)
    assert first.folder == home / "data" / "climbmix"
    assert shard_names(first.train) == [f"shard_{i:05d}.parquet" for i in range(4)]
    assert shard_names(first.val) == ["shard_06542.parquet"]
    assert (first.kind, first.tokenizer) == ("parquet", None)
    assert first.files[-1] == (first.val[0], "val")
    assert len(first.files) == 5
    assert pyarrow.parquet.read_table(first.train[2])["text"][1].as_py() == "document 1 of shard 2"
    climbmix.server.seen.clear()
    second = get("climbmix", 8)
    assert climbmix.fetched() == {f"shard_{i:05d}.parquet" for i in range(4, 8)}
    assert len(second.train) == 8
    climbmix.server.seen.clear()
    assert get("climbmix", 2) == second
    assert not climbmix.fetched()
    assert {path.name for path in second.folder.iterdir()} == {path.name for path, _ in second.files}


def test_tokens_of_gpt2_arrive(server: BadServer, home: Path) -> None:
    repo = Hub(server, "fineweb10B")
    repo.add("fineweb_val_000000.bin", token_shard(100))
    for number in (1, 2, 3):
        repo.add(f"fineweb_train_{number:06d}.bin", token_shard(1000 + number))
    repo.publish()
    corpus = get("fineweb10B", 2)
    assert shard_names(corpus.train) == ["fineweb_train_000001.bin", "fineweb_train_000002.bin"]
    assert shard_names(corpus.val) == ["fineweb_val_000000.bin"]
    assert (corpus.kind, corpus.tokenizer) == ("bin", "gpt2")


def test_a_corpus_becomes_a_dataset_that_grows_and_is_used_offline(climbmix: Hub, home: Path) -> None:
    options: dict[str, Any] = {"sample_bytes": 0, "seed": 0, "workers": 2}
    first = get_dataset("climbmix", 2, **options)
    assert (len(first.of("train")), first.total("documents"), first.shards[-1].split) == (2, 60, "val")
    texts = [f"document {row} of shard {shard}" for shard in (0, 1, 6542) for row in range(20)]
    assert sorted(read_texts(first.files("train") + first.files("val"))) == sorted(texts)
    assert first.total("text_bytes") == sum(map(len, texts))
    assert len(get_dataset("climbmix", 3, **options).of("train")) == 3
    asked = len(climbmix.server.seen)
    assert get_dataset("climbmix", 3, **options) == open_dataset("climbmix")
    assert len(climbmix.server.seen) == asked, "what is here needs no hub"


def test_the_speedruns_tokens_become_a_dataset_of_gpt2(server: BadServer, home: Path) -> None:
    repo = Hub(server, "fineweb10B")
    repo.add("fineweb_val_000000.bin", token_shard(60_000))
    repo.add("fineweb_train_000001.bin", token_shard(65_000))
    repo.publish()
    dataset = get_dataset("fineweb10B", 1, sample_bytes=0, seed=0, workers=1)
    assert dataset.tokenizer is not None
    assert (dataset.kind, dataset.tokenizer["bos"], dataset.total("tokens", "train")) == (
        "bin",
        50256,
        65_000,
    )
    assert open_source(dataset, "train", None).units == 1


def test_the_fingerprint_kept_for_gpt2_is_that_of_its_ranks(shared_data: Path) -> None:
    assert gpt2_tokenizer(shared_data / "gpt2.tiktoken").fingerprint == GPT2["fingerprint"]


def test_the_corpora_are_what_the_readme_of_each_says() -> None:
    assert set(CORPORA) == {"climbmix", "fineweb-edu", "fineweb10B"}
    assert CORPORA["fineweb-edu"].val == "shard_01822.parquet"


def test_downloads_survive_drops_and_wrong_bytes(climbmix: Hub, home: Path) -> None:
    for number in range(8):
        climbmix.server.script(climbmix.resolve(f"shard_{number:05d}.parquet"), Act(drop_after=100 * number))
    climbmix.server.script(
        climbmix.resolve(VAL["climbmix"]), Act(corrupt=True), Act(drop_after=7), Act(status=503)
    )
    climbmix.server.script(climbmix.listing, Act(status=503), Act(drop_after=20))
    corpus = get("climbmix", 8)
    for path, _ in corpus.files:
        assert path.read_bytes() == climbmix.server.files[climbmix.resolve(path.name)]


def test_an_interrupted_corpus_shows_no_incomplete_shard(climbmix: Hub, home: Path) -> None:
    climbmix.server.always[climbmix.resolve("shard_00002.parquet")] = Act(corrupt=True)
    with pytest.raises(UserError, match="wrong bytes"):
        get("climbmix", 4)
    folder = home / "data" / "climbmix"
    assert "shard_00002.parquet" not in {path.name for path in folder.iterdir()}
    del climbmix.server.always[climbmix.resolve("shard_00002.parquet")]
    assert len(get("climbmix", 4).train) == 4


def test_the_token_is_sent_and_never_to_the_host_of_a_next_link(
    climbmix: Hub, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", " hf_secret\n")
    get("climbmix", 1)
    assert climbmix.server.seen
    assert {seen.headers.get("authorization") for seen in climbmix.server.seen} == {"Bearer hf_secret"}


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(UserError, match=r"'climbmux': choose one of climbmix, fineweb-edu, fineweb10B\."):
        plan("climbmux", 1)


@pytest.mark.parametrize(
    ("shards", "message"), [(0, "at least 1"), (-1, "at least 1"), (13, "12 training shards")]
)
def test_an_impossible_number_of_shards_is_refused(climbmix: Hub, shards: int, message: str) -> None:
    with pytest.raises(UserError, match=message):
        plan("climbmix", shards)


def test_a_dead_hub_is_one_sentence(monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
    with BadServer() as gone:
        url = gone.url
    monkeypatch.setenv("HF_ENDPOINT", url)
    with pytest.raises(UserError, match=r"connection to 127\.0\.0\.1:\d+ failed.*HF_ENDPOINT") as failure:
        get("climbmix", 1)
    assert "\n" not in str(failure.value)
    assert not (home / "data").exists()
    for nonsense in ("huggingface.co", "ftp://huggingface.co", "https://"):
        monkeypatch.setenv("HF_ENDPOINT", nonsense)
        with pytest.raises(UserError, match="HF_ENDPOINT is"):
            get("climbmix", 1)


@pytest.mark.parametrize(("status", "advice"), [(401, "HF_TOKEN"), (404, "check the name")])
def test_a_hub_that_refuses_says_what_to_do(climbmix: Hub, home: Path, status: int, advice: str) -> None:
    climbmix.server.script(climbmix.listing, Act(status=status))
    with pytest.raises(UserError, match=advice):
        get("climbmix", 1)


@pytest.mark.parametrize(
    "body", [b"<html>log in</html>", b"{}", b'["a"]', b"\xff\xfe", b"[" * 100_000], ids=range(5)
)
def test_a_listing_that_is_none_is_one_sentence(climbmix: Hub, home: Path, body: bytes) -> None:
    climbmix.server.script(climbmix.listing, Act(body=body))
    with pytest.raises(UserError, match="did not answer with a list of files"):
        get("climbmix", 1)


@pytest.mark.parametrize("path", ["../../shard_00000.parquet", "/etc/passwd", "a\\b", "a/../../b", ""])
def test_a_listing_with_malicious_paths_is_refused_whole(climbmix: Hub, home: Path, path: str) -> None:
    climbmix.entries.append({"type": "file", "path": path, "size": 5})
    climbmix.publish()
    climbmix.server.always.clear()
    with pytest.raises(UserError, match="not a plain relative path"):
        get("climbmix", 1)
    assert not (home / "data").exists()


@pytest.mark.parametrize(
    "change", [{"path": 7}, {"size": -1}, {"size": "12"}, {"size": None}, {"size": True}]
)
def test_a_listing_without_proper_names_and_sizes_is_refused(
    climbmix: Hub, home: Path, change: dict[str, Any]
) -> None:
    climbmix.entries.append({"type": "file", "path": "x", "size": 5} | change)
    climbmix.publish()
    climbmix.server.always.clear()
    with pytest.raises(UserError, match="without a proper name and size"):
        get("climbmix", 1)


def test_a_listing_without_end_or_too_long_is_refused(climbmix: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    circle = f'<{climbmix.server.url}{climbmix.listing}>; rel="next"'
    climbmix.server.always[climbmix.listing] = Act(headers={"Link": circle})
    monkeypatch.setattr(hub, "_MOST_PAGES", 20)
    with pytest.raises(UserError, match="does not end"):
        plan("climbmix", 1)
    monkeypatch.setattr(hub, "_MOST_FILES", 10)
    with pytest.raises(UserError, match="more than 10 files"):
        plan("climbmix", 1)
    monkeypatch.setattr(hub, "_PAGE_BYTES", 100)
    with pytest.raises(UserError, match="not a listing"):
        plan("climbmix", 1)


def test_a_file_listed_twice_is_taken_once(climbmix: Hub, home: Path) -> None:
    climbmix.entries.append(climbmix.entries[-1])
    climbmix.publish()
    climbmix.server.always.clear()
    assert len(get("climbmix", 2).train) == 2


def test_a_hub_without_the_validation_shard_is_refused(server: BadServer, home: Path) -> None:
    repo = Hub(server, "climbmix")
    repo.add("shard_00000.parquet", parquet(0))
    repo.publish()
    with pytest.raises(UserError, match=r"lists no shard_06542\.parquet"):
        get("climbmix", 1)


def test_names_are_quoted_in_addresses(server: BadServer) -> None:
    repo = Hub(server, "climbmix")
    repo.add("a b/ü#?.txt", b"")
    repo.publish()
    (file,) = hub.list_files(repo.repo, "main", Session())
    assert file.url.endswith("/resolve/main/a%20b/%C3%BC%23%3F.txt")


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
def test_a_shard_that_is_no_parquet_of_texts_is_never_visible(
    server: BadServer, home: Path, content: bytes, reason: str
) -> None:
    repo = Hub(server, "climbmix")
    repo.add(VAL["climbmix"], parquet(6542))
    repo.add("shard_00000.parquet", content)
    repo.publish()
    with pytest.raises(UserError, match=f"cannot be used: .*{reason}"):
        get("climbmix", 1)
    assert not (home / "data" / "climbmix" / "shard_00000.parquet").exists()


def test_texts_of_another_type_are_refused(tmp_path: Path) -> None:
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
