"""Against a server that misbehaves, a download ends with the right file or one clear sentence and no file."""

import errno
import fcntl
import hashlib
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path
from typing import Any

import pytest
from bad_server import Act, BadServer
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nanorun.console import Progress
from nanorun.data import download
from nanorun.data.download import RemoteFile, fetch, fetch_all, safe_path
from nanorun.data.web import Session, _target, wait_before_retry
from nanorun.errors import UserError

CONTENT = random.Random(1).randbytes(300_000)
OTHER = random.Random(2).randbytes(300_000)


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "127.0.0.1,localhost")


@pytest.fixture
def server() -> Iterator[BadServer]:
    with BadServer() as server:
        server.files["/f"] = CONTENT
        yield server


def remote(server: BadServer, path: str = "/f", *, sized: bool = True, hashed: bool = True) -> RemoteFile:
    content = server.files[path]
    return RemoteFile(
        url=server.url + path,
        size=len(content) if sized else None,
        sha256=hashlib.sha256(content).hexdigest() if hashed else None,
        path=path.strip("/"),
    )


def get(file: RemoteFile, into: Path, **options: Any) -> Path:
    """`fetch` without its pauses."""
    return fetch(file, into, **{"timeout": 2.0, "backoff": lambda failures, after: 0.0, **options})


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def leave_part(server: BadServer, into: Path, n: int, **kind: Any) -> None:
    """What a process leaves that lost its connection after `n` bytes and gave up."""
    server.script("/f", Act(drop_after=n))
    with pytest.raises(UserError):
        get(remote(server, **kind), into, attempts=1)
    assert names(into) == {"f.part", "f.part.json"}
    assert (into / "f.part").stat().st_size == n


KINDS = pytest.mark.parametrize(
    "kind",
    [
        pytest.param({}, id="size+sha256"),
        pytest.param({"hashed": False}, id="size"),
        pytest.param({"sized": False, "hashed": False}, id="neither"),
    ],
)


@KINDS
def test_a_file_arrives_under_its_name_and_nothing_else_remains(
    server: BadServer, tmp_path: Path, kind: dict[str, bool]
) -> None:
    path = get(remote(server, **kind), tmp_path)
    assert path.read_bytes() == CONTENT
    assert names(tmp_path) == {"f"}
    assert server.requests("/f")[0].headers["accept-encoding"] == "identity"


def test_an_empty_file_arrives(server: BadServer, tmp_path: Path) -> None:
    server.files["/f"] = b""
    assert get(remote(server), tmp_path).read_bytes() == b""
    assert names(tmp_path) == {"f"}


@KINDS
def test_dropped_connections_are_continued_where_they_ended(
    server: BadServer, tmp_path: Path, kind: dict[str, bool]
) -> None:
    server.script("/f", *(Act(drop_after=n) for n in (1, 10_000, 16_384, 100_000, 70_000)))
    assert get(remote(server, **kind), tmp_path, attempts=2).read_bytes() == CONTENT
    starts = [int(seen.headers.get("range", "bytes=0-")[6:-1]) for seen in server.requests("/f")]
    assert starts == [0, 1, 10_001, 26_385, 126_385, 196_385]
    assert all(seen.headers["if-range"] == server.etag("/f") for seen in server.requests("/f")[1:])
    assert server.sent["/f"] == len(CONTENT)


def test_progress_starts_the_count_of_attempts_again_and_its_absence_ends_it(
    server: BadServer, tmp_path: Path
) -> None:
    server.script("/f", *[Act(drop_after=20_000), Act(status=500)] * 10)
    assert get(remote(server), tmp_path, attempts=3).read_bytes() == CONTENT
    (tmp_path / "f").unlink()
    server.always["/f"] = Act(drop_after=5_000, ignore_range=True)  # always the same 5,000 bytes
    with pytest.raises(UserError, match=r"after 5000 of 300000 bytes \(attempt 3 of 3\)"):
        get(remote(server), tmp_path, attempts=3)
    assert "f" not in names(tmp_path)


@settings(
    max_examples=25,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    drops=st.lists(st.integers(0, 120_000), max_size=6),
    resets=st.booleans(),
    chunked=st.booleans(),
    kind=st.sampled_from([{}, {"hashed": False}, {"sized": False, "hashed": False}]),
    seed=st.integers(0, 2**32),
    size=st.integers(0, 120_000),
)
def test_any_sequence_of_drops_gives_the_right_bytes(
    server: BadServer,
    drops: list[int],
    resets: bool,
    chunked: bool,
    kind: dict[str, bool],
    seed: int,
    size: int,
) -> None:
    path = f"/{seed}-{size}"
    server.files[path] = random.Random(seed).randbytes(size)
    server.script(path, *(Act(drop_after=n, reset=resets, chunked=chunked) for n in drops))
    with tempfile.TemporaryDirectory() as into:
        result = get(remote(server, path, **kind), Path(into), attempts=len(drops) + 1)
        assert result.read_bytes() == server.files[path]
        assert names(Path(into)) == {path[1:]}


@KINDS
def test_a_server_that_ignores_ranges_makes_it_start_over_and_not_append(
    server: BadServer, tmp_path: Path, kind: dict[str, bool]
) -> None:
    leave_part(server, tmp_path, 120_000, **kind)
    server.script("/f", Act(ignore_range=True))
    assert get(remote(server, **kind), tmp_path).read_bytes() == CONTENT


@pytest.mark.parametrize(
    "act",
    [
        pytest.param(Act(shift_range=7), id="begins-late"),
        pytest.param(Act(headers={"Content-Range": "bytes 0-299999/300000"}), id="begins-at-zero"),
        pytest.param(Act(headers={"Content-Range": "bytes 120000-299999/299999"}), id="other-total"),
        pytest.param(Act(headers={"Content-Range": "nonsense"}), id="nonsense"),
    ],
)
def test_a_wrong_content_range_is_never_appended(server: BadServer, tmp_path: Path, act: Act) -> None:
    leave_part(server, tmp_path, 120_000, hashed=False)
    server.script("/f", act)
    assert get(remote(server, hashed=False), tmp_path).read_bytes() == CONTENT
    assert "range" not in server.requests("/f")[-1].headers


@KINDS
@pytest.mark.parametrize("obeys", [True, False], ids=["obeys-if-range", "ignores-if-range"])
def test_a_file_that_changed_between_attempts_is_not_mixed(
    server: BadServer, tmp_path: Path, kind: dict[str, bool], obeys: bool
) -> None:
    leave_part(server, tmp_path, 120_000, **kind)
    server.files["/f"] = OTHER
    server.script("/f", Act(ignore_if_range=not obeys))
    assert get(remote(server, **kind), tmp_path).read_bytes() == OTHER


def test_without_a_checksum_or_a_strong_etag_a_part_is_not_continued(
    server: BadServer, tmp_path: Path
) -> None:
    for etag in ("", 'W/"weak"'):
        server.etags["/f"] = etag
        server.script("/f", Act(drop_after=120_000))
        assert get(remote(server, hashed=False), tmp_path).read_bytes() == CONTENT
        assert "range" not in server.requests("/f")[-1].headers
        (tmp_path / "f").unlink()


@pytest.mark.parametrize("content", [CONTENT, OTHER], ids=["complete", "stale"])
def test_a_complete_part_of_unknown_length_is_settled_by_416(
    server: BadServer, tmp_path: Path, content: bytes
) -> None:
    (tmp_path / "f.part").write_bytes(content)
    assert get(remote(server, sized=False), tmp_path).read_bytes() == CONTENT
    assert server.requests("/f")[0].headers["range"] == "bytes=300000-"
    assert server.sent["/f"] == (0 if content == CONTENT else len(CONTENT))


def test_a_part_longer_than_the_file_now_is_on_the_server_starts_over(
    server: BadServer, tmp_path: Path
) -> None:
    server.files["/f"] = CONTENT[:1000]
    (tmp_path / "f.part").write_bytes(CONTENT)
    assert get(remote(server, sized=False), tmp_path).read_bytes() == CONTENT[:1000]


def test_a_stale_part_is_not_settled_by_416_without_a_checksum(server: BadServer, tmp_path: Path) -> None:
    leave_part(server, tmp_path, 120_000, sized=False, hashed=False)
    server.files["/f"] = OTHER[:1000]
    server.script("/f", Act(ignore_if_range=True))
    (tmp_path / "f.part.json").write_text(
        (tmp_path / "f.part.json").read_text().replace('"size": 300000', '"size": null')
    )
    assert get(remote(server, sized=False, hashed=False), tmp_path).read_bytes() == OTHER[:1000]


@pytest.mark.parametrize("notes", ['{"url": "http://', "[]", None], ids=["cut", "list", "absent"])
def test_damaged_notes_only_cost_bytes(server: BadServer, tmp_path: Path, notes: str | None) -> None:
    leave_part(server, tmp_path, 120_000, hashed=False)
    (tmp_path / "f.part.json").unlink()
    if notes is not None:
        (tmp_path / "f.part.json").write_text(notes)
    assert get(remote(server, hashed=False), tmp_path).read_bytes() == CONTENT


def test_damaged_bytes_in_a_part_are_noticed(server: BadServer, tmp_path: Path) -> None:
    leave_part(server, tmp_path, 120_000)
    with (tmp_path / "f.part").open("r+b") as part:
        part.write(b"damaged")
    assert get(remote(server), tmp_path).read_bytes() == CONTENT


def test_wrong_bytes_once_are_fetched_again_from_zero(server: BadServer, tmp_path: Path) -> None:
    server.script("/f", Act(corrupt=True))
    assert get(remote(server), tmp_path).read_bytes() == CONTENT
    assert [seen.headers.get("range") for seen in server.requests("/f")] == [None, None]


def test_wrong_bytes_always_end_in_one_sentence_and_no_file(server: BadServer, tmp_path: Path) -> None:
    server.always["/f"] = Act(corrupt=True)
    with pytest.raises(UserError, match="came twice with the wrong bytes"):
        get(remote(server), tmp_path)
    assert names(tmp_path) == set()
    assert len(server.requests("/f")) == 2


@pytest.mark.parametrize("header", ["X-Linked-ETag", "ETag"])
def test_a_checksum_that_the_server_names_is_used(server: BadServer, tmp_path: Path, header: str) -> None:
    digest = {header: f'"{hashlib.sha256(CONTENT).hexdigest()}"'}
    server.script("/f", Act(corrupt=True, headers=digest), Act(headers=digest))
    assert get(remote(server, hashed=False), tmp_path).read_bytes() == CONTENT
    server.always["/f"] = Act(headers={header: f'"{"0" * 64}"'})
    (tmp_path / "f").unlink()
    with pytest.raises(UserError, match="wrong bytes"):
        get(remote(server, hashed=False), tmp_path)
    assert names(tmp_path) == set()


def test_a_file_that_the_hub_has_replaced_since_the_listing_is_refused_unread(
    server: BadServer, tmp_path: Path
) -> None:
    server.always["/f"] = Act(headers={"X-Linked-ETag": f'"{"0" * 64}"'})
    with pytest.raises(UserError, match="changed since it was listed"):
        get(remote(server), tmp_path)
    assert names(tmp_path) == set()


@KINDS
def test_a_body_shorter_than_announced_is_continued(
    server: BadServer, tmp_path: Path, kind: dict[str, bool]
) -> None:
    server.script("/f", Act(body=CONTENT[:1000], headers={"Content-Length": "300000"}))
    assert get(remote(server, **kind), tmp_path).read_bytes() == CONTENT


def test_another_length_than_listed_is_not_taken(server: BadServer, tmp_path: Path) -> None:
    server.script("/f", Act(body=b"<html>Please log in</html>"), Act(body=CONTENT + b"more"))
    assert get(remote(server, hashed=False), tmp_path).read_bytes() == CONTENT
    (tmp_path / "f").unlink()
    server.always["/f"] = Act(body=b"<html>Please log in</html>")
    with pytest.raises(UserError, match="offers 26 bytes where 300000 were listed"):
        get(remote(server, hashed=False), tmp_path)
    assert names(tmp_path) == set()


@pytest.mark.parametrize("manner", [{"no_length": True}, {"chunked": True}], ids=["no-length", "chunked"])
def test_a_body_longer_than_listed_is_not_taken(
    server: BadServer, tmp_path: Path, manner: dict[str, Any]
) -> None:
    server.script("/f", Act(extra=b"more", **manner))
    assert get(remote(server, hashed=False), tmp_path).read_bytes() == CONTENT


def test_a_file_of_unknown_length_without_checksum_is_refused(server: BadServer, tmp_path: Path) -> None:
    server.always["/f"] = Act(no_length=True)
    with pytest.raises(UserError, match="without a length and without a checksum"):
        get(remote(server, sized=False, hashed=False), tmp_path)
    assert names(tmp_path) == set()


def test_chunked_bodies_work_and_a_cut_one_is_noticed(server: BadServer, tmp_path: Path) -> None:
    server.script("/f", Act(chunked=True, drop_after=120_000), Act(chunked=True))
    assert get(remote(server, sized=False, hashed=False), tmp_path).read_bytes() == CONTENT


def test_content_encoding_is_never_applied(server: BadServer, tmp_path: Path) -> None:
    server.script("/f", Act(headers={"Content-Encoding": "gzip"}))
    assert get(remote(server), tmp_path).read_bytes() == CONTENT


def test_a_stall_times_out_and_is_continued(server: BadServer, tmp_path: Path) -> None:
    server.script("/f", Act(stall_after=50_000), Act(hang=20))
    assert get(remote(server), tmp_path, timeout=0.3).read_bytes() == CONTENT
    assert server.requests("/f")[-1].headers["range"] == "bytes=50000-"


@pytest.mark.parametrize("status", [408, 429, 500, 502, 503, 504])
def test_passing_trouble_is_waited_for(server: BadServer, tmp_path: Path, status: int) -> None:
    waits: list[tuple[int, float | None]] = []

    def backoff(failures: int, after: float | None) -> float:
        waits.append((failures, after))
        return 0.0

    date = format_datetime(datetime.now(UTC) + timedelta(seconds=60), usegmt=True)
    server.script(
        "/f",
        Act(status=status, headers={"Retry-After": "7"}),
        Act(status=status, headers={"Retry-After": date}),
        Act(status=status, headers={"Retry-After": "soon"}),
    )
    assert get(remote(server), tmp_path, backoff=backoff).read_bytes() == CONTENT
    assert [failures for failures, _ in waits] == [1, 2, 3]
    assert waits[0][1] == 7
    assert 50 < (waits[1][1] or 0) <= 60
    assert waits[2][1] is None


def test_the_pause_grows_is_spread_and_bounded() -> None:
    pauses = [[wait_before_retry(failures, None) for _ in range(200)] for failures in (1, 3, 50)]
    assert all(0.5 <= pause <= 1.5 for pause in pauses[0])
    assert all(2 <= pause <= 6 for pause in pauses[1])
    assert all(15 <= pause <= 45 for pause in pauses[2])
    assert len(set(pauses[0])) > 100
    assert wait_before_retry(1, 60) == 60
    assert wait_before_retry(1, 86_400) == 120


def test_the_pause_is_really_made(server: BadServer, tmp_path: Path) -> None:
    server.script("/f", Act(status=503))
    begin = time.monotonic()
    get(remote(server), tmp_path, backoff=lambda failures, after: 0.3)
    assert time.monotonic() - begin >= 0.3


@pytest.mark.parametrize(
    ("status", "advice"),
    [
        (401, "HF_TOKEN"),
        (403, "accept its terms"),
        (404, "check the name"),
        (410, "check the name"),
        (400, "address"),
    ],
)
def test_a_refusal_is_not_retried_and_says_what_to_do(
    server: BadServer, tmp_path: Path, status: int, advice: str
) -> None:
    server.always["/f"] = Act(status=status)
    with pytest.raises(UserError, match=advice) as failure:
        get(remote(server), tmp_path)
    assert f"HTTP {status}" in str(failure.value)
    assert len(server.requests("/f")) == 1
    assert names(tmp_path) == set()


def test_a_dead_host_is_one_sentence(tmp_path: Path) -> None:
    with BadServer() as gone:
        url = gone.url
    with pytest.raises(UserError, match="Connection refused") as failure:
        get(RemoteFile(url + "/f", 5, None, "f"), tmp_path)
    assert "\n" not in str(failure.value)
    assert names(tmp_path) == set()


def test_the_token_goes_to_its_own_host_and_to_no_other(server: BadServer, tmp_path: Path) -> None:
    with BadServer() as elsewhere:
        elsewhere.files["/f"] = CONTENT
        server.script("/start", Act(status=302, headers={"Location": "/again"}))
        server.script("/again", Act(status=307, headers={"Location": f"{elsewhere.url}/back"}))
        elsewhere.script("/back", Act(status=308, headers={"Location": f"{server.url}/f?signed=1 2"}))
        server.files["/f?signed=1%202"] = CONTENT
        file = RemoteFile(f"{server.url}/start", len(CONTENT), None, "f")
        assert get(file, tmp_path, token="secret").read_bytes() == CONTENT
        sent = {seen.path: seen.headers.get("authorization") for seen in server.seen + elsewhere.seen}
    assert sent == {
        "/start": "Bearer secret",
        "/again": "Bearer secret",
        "/back": None,
        "/f?signed=1%202": None,
    }


def test_a_redirected_download_is_continued_too(server: BadServer, tmp_path: Path) -> None:
    server.always["/start"] = Act(status=302, headers={"Location": "/f"})
    server.script("/f", Act(drop_after=100_000))
    get(RemoteFile(f"{server.url}/start", len(CONTENT), None, "f"), tmp_path)
    assert (tmp_path / "f").read_bytes() == CONTENT
    assert server.sent["/f"] == len(CONTENT)


def test_redirects_end_and_lead_only_where_they_may(server: BadServer, tmp_path: Path) -> None:
    server.always["/f"] = Act(status=302, headers={"Location": "/f"})
    with pytest.raises(UserError, match="redirects more than 5 times"):
        get(remote(server), tmp_path)
    assert len(server.requests("/f")) == 6
    for location in ("file:///etc/passwd", "ftp://127.0.0.1/f", ""):
        server.always["/f"] = Act(status=302, headers={"Location": location})
        with pytest.raises(UserError, match="not a web address"):
            get(remote(server), tmp_path)
    with pytest.raises(UserError, match="from https to plain http"):
        _target("https://hub.example/f", "http://hub.example/f")
    assert _target("http://hub.example/f", "https://hub.example/f") == "https://hub.example/f"
    assert names(tmp_path) == set()


def test_a_token_with_a_line_break_is_refused_and_not_shown(server: BadServer, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="HF_TOKEN") as failure:
        get(remote(server), tmp_path, token="secret\nX-Evil: 1")
    assert "secret" not in str(failure.value)


def test_a_file_that_is_here_is_verified_and_not_fetched_again(server: BadServer, tmp_path: Path) -> None:
    file = remote(server)
    (tmp_path / "f").write_bytes(CONTENT)
    assert get(file, tmp_path, verify="full") == get(file, tmp_path) == tmp_path / "f"
    (tmp_path / "f").write_bytes(OTHER)  # of the same size
    assert get(file, tmp_path, verify="size").read_bytes() == OTHER
    assert not server.seen
    assert get(file, tmp_path, verify="full").read_bytes() == CONTENT
    (tmp_path / "f").write_bytes(CONTENT[:-1])
    assert get(file, tmp_path).read_bytes() == CONTENT


def test_a_wrong_file_that_is_here_does_not_stay_when_the_right_one_cannot_be_had(
    server: BadServer, tmp_path: Path
) -> None:
    (tmp_path / "f").write_bytes(CONTENT[:-1])
    server.always["/f"] = Act(status=404)
    with pytest.raises(UserError):
        get(remote(server), tmp_path)
    assert names(tmp_path) == set()


def test_what_does_not_pass_the_check_is_never_visible(server: BadServer, tmp_path: Path) -> None:
    def check(path: Path) -> None:
        assert path.name == "f.part"
        raise ValueError("it is not a shard")

    with pytest.raises(UserError, match="cannot be used: it is not a shard"):
        get(remote(server), tmp_path, check=check)
    assert names(tmp_path) == set()


@pytest.mark.parametrize(
    "path",
    [
        "../f",
        "a/../../f",
        "/etc/f",
        "a\\f",
        "..\\f",
        "",
        ".",
        "a//f",
        "a/",
        "a\0f",
        "a\nf",
        "\ud800",
        "x" * 201,
        "f.part",
        "f.part.json",
    ],
)
def test_names_that_lead_elsewhere_are_refused(server: BadServer, tmp_path: Path, path: str) -> None:
    with pytest.raises(UserError, match="not a plain relative path"):
        get(RemoteFile(f"{server.url}/f", None, None, path), tmp_path / "into")
    assert not server.seen
    assert names(tmp_path) == set()


def test_links_that_lead_elsewhere_are_refused(server: BadServer, tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    (tmp_path / "into").mkdir()
    (tmp_path / "into" / "sub").symlink_to(tmp_path / "outside")
    with pytest.raises(UserError, match="leads out of"):
        get(RemoteFile(f"{server.url}/f", None, None, "sub/f"), tmp_path / "into")
    (tmp_path / "into" / "f.part").symlink_to(tmp_path / "outside" / "victim")
    with pytest.raises(UserError, match="Cannot write"):
        get(remote(server), tmp_path / "into")
    assert names(tmp_path / "outside") == set()


def test_folders_in_a_name_are_made(server: BadServer, tmp_path: Path) -> None:
    server.files["/a/b/f"] = CONTENT
    assert get(remote(server, "/a/b/f"), tmp_path) == safe_path(tmp_path, "a/b/f")
    assert (tmp_path / "a" / "b" / "f").read_bytes() == CONTENT


def test_too_little_space_is_said_before_anything_is_fetched(
    server: BadServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(download.shutil, "disk_usage", lambda path: usage._replace(free=400_000))
    server.files["/g"] = OTHER
    with pytest.raises(UserError, match=r"600 kB are still to be downloaded .* only 400 kB are free"):
        fetch_all([remote(server), remote(server, "/g")], tmp_path / "into")
    assert not server.seen
    (tmp_path / "f.part").write_bytes(CONTENT[:250_000])  # what is here already needs no space
    fetch_all([remote(server), remote(server, "/g")], tmp_path)


def test_a_disk_that_fills_up_is_one_sentence_and_the_part_stays(
    server: BadServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.pwrite

    def pwrite(handle: int, data: Any, at: int) -> int:
        if at > 100_000:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(handle, bytes(data)[:50_000], at)

    monkeypatch.setattr(download.os, "pwrite", pwrite)
    with pytest.raises(UserError, match=r"The disk that holds .* is full"):
        get(remote(server), tmp_path)
    monkeypatch.undo()
    assert names(tmp_path) == {"f.part", "f.part.json"}
    assert get(remote(server), tmp_path).read_bytes() == CONTENT


def test_a_folder_that_cannot_be_written_is_one_sentence(server: BadServer, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(UserError, match="Cannot write into"):
        get(remote(server), tmp_path / "file")


def test_progress_ends_at_the_size_of_the_file_whatever_happened(server: BadServer, tmp_path: Path) -> None:
    leave_part(server, tmp_path, 120_000)
    server.script("/f", Act(drop_after=50_000), Act(ignore_range=True, drop_after=9_000), Act(corrupt=True))
    with Progress("test", len(CONTENT), "B") as bar:
        get(remote(server), tmp_path, bar=bar)
        assert bar.done == len(CONTENT)
        get(remote(server), tmp_path, bar=bar)
        assert bar.done == 2 * len(CONTENT)


# Many files, many processes


def many(server: BadServer, n: int, act: Act) -> list[RemoteFile]:
    for i in range(n):
        server.files[f"/{i}"] = random.Random(i).randbytes(100_000 + i)
        server.always[f"/{i}"] = act
    return [remote(server, f"/{i}") for i in range(n)]


def test_files_come_in_parallel_and_in_order(server: BadServer, tmp_path: Path) -> None:
    files = many(server, 12, Act(pause=0.01))
    for i in range(12):
        server.script(f"/{i}", Act(drop_after=1000 * i, pause=0.01))
    paths = fetch_all(files, tmp_path, workers=4, backoff=lambda failures, after: 0.0)
    assert [path.name for path in paths] == [str(i) for i in range(12)]
    assert all(path.read_bytes() == server.files[f"/{path.name}"] for path in paths)
    assert 2 <= server.most_at_once <= 6  # a handler or two may still be closing when the next begins
    assert names(tmp_path) == {str(i) for i in range(12)}


def test_one_failure_stops_the_others_and_keeps_their_parts(server: BadServer, tmp_path: Path) -> None:
    files = many(server, 4, Act(stall_after=20_000))
    server.always["/3"] = Act(status=404, hang=0.3)
    begin = time.monotonic()
    with pytest.raises(UserError, match="/3 does not exist"):
        fetch_all(files, tmp_path, workers=4, timeout=5)
    assert time.monotonic() - begin < 4.5, "and not after the 5 s of a stall"
    assert {"0.part", "1.part", "2.part"} <= names(tmp_path)
    assert not any(name.isdecimal() for name in names(tmp_path))


def test_after_a_failure_the_others_write_nothing_more(server: BadServer, tmp_path: Path) -> None:
    files = many(server, 3, Act(pause=0.1))
    server.always["/2"] = Act(status=404, hang=0.15)
    with pytest.raises(UserError, match="/2 does not exist"):
        fetch_all(files, tmp_path, workers=3)
    before = {path.name: path.stat().st_size for path in tmp_path.iterdir()}
    time.sleep(0.3)
    assert {path.name: path.stat().st_size for path in tmp_path.iterdir()} == before
    assert not any(name.isdecimal() for name in before)


def test_a_name_listed_twice_is_refused(server: BadServer, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="listed twice"):
        fetch_all([remote(server), remote(server)], tmp_path)


PROGRAM = textwrap.dedent(
    """
    import sys
    from pathlib import Path
    from nanorun.data.download import RemoteFile, fetch, fetch_all
    url, size, sha256, into, manner = sys.argv[1:]
    file = RemoteFile(url, int(size), sha256, "f")
    print("ready", flush=True)
    try:
        if manner == "all":
            fetch_all([file], Path(into))
        else:
            fetch(file, Path(into))
    except KeyboardInterrupt:
        sys.exit(130)
    """
)


def start(server: BadServer, into: Path, manner: str = "one") -> subprocess.Popen[str]:
    file = remote(server)
    command = [sys.executable, "-c", PROGRAM, file.url, str(file.size), str(file.sha256), str(into), manner]
    root = str(Path(download.__file__).parents[2])
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": root},
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def wait_for_bytes(part: Path, n: int) -> None:
    deadline = time.monotonic() + 20
    while not part.exists() or part.stat().st_size < n:
        assert time.monotonic() < deadline, "the download does not move"
        time.sleep(0.002)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_killed_download_is_finished_by_the_next_process(
    server: BadServer, tmp_path: Path, seed: int
) -> None:
    server.files["/f"] = random.Random(seed).randbytes(4_000_000)
    server.always["/f"] = Act(pause=0.002)
    point = random.Random(seed).randrange(100_000, 3_000_000)
    process = start(server, tmp_path)
    wait_for_bytes(tmp_path / "f.part", point)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    process.communicate()
    assert names(tmp_path) == {"f.part", "f.part.json"}
    kept = (tmp_path / "f.part").stat().st_size
    while server.at_once:  # it notices a little later that nobody listens any more
        time.sleep(0.002)
    server.always["/f"], before = Act(), server.sent["/f"]
    assert get(remote(server), tmp_path).read_bytes() == server.files["/f"]
    assert server.sent["/f"] - before == 4_000_000 - kept < 4_000_000 - point + 1
    assert names(tmp_path) == {"f"}


@pytest.mark.parametrize("manner", ["one", "all"])
def test_ctrl_c_stops_at_once_even_in_a_stall_and_leaves_a_part(
    server: BadServer, tmp_path: Path, manner: str
) -> None:
    server.always["/f"] = Act(stall_after=100_000)
    process = start(server, tmp_path, manner)
    wait_for_bytes(tmp_path / "f.part", 100_000)
    begin = time.monotonic()
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=10)
    assert process.returncode == 130
    assert "Traceback" not in errors
    assert time.monotonic() - begin < 4.5, "and not after the 5 s of a stall"
    del server.always["/f"]
    assert get(remote(server), tmp_path).read_bytes() == CONTENT
    assert server.requests("/f")[-1].headers["range"] == "bytes=100000-"


def test_two_processes_at_once_fetch_the_file_once(server: BadServer, tmp_path: Path) -> None:
    server.always["/f"] = Act(pause=0.03)
    first, second = start(server, tmp_path), start(server, tmp_path)
    outcomes = [process.communicate(timeout=20) for process in (first, second)]
    assert (first.returncode, second.returncode) == (0, 0)
    assert sum("Another process is downloading" in errors for _, errors in outcomes) == 1
    assert (tmp_path / "f").read_bytes() == CONTENT
    assert server.sent["/f"] == len(CONTENT)
    assert names(tmp_path) == {"f"}


def test_a_part_that_goes_away_between_opening_and_locking_is_opened_again(
    server: BadServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = fcntl.flock, []

    def flock(handle: int, operation: int) -> None:
        if not calls:
            (tmp_path / "f.part").unlink()  # as its former holder does, or renames it
        calls.append(handle)
        real(handle, operation)

    monkeypatch.setattr(download.fcntl, "flock", flock)
    assert get(remote(server), tmp_path).read_bytes() == CONTENT
    assert len(calls) == 2


def test_who_waits_takes_over_when_the_other_is_killed(server: BadServer, tmp_path: Path) -> None:
    server.script("/f", Act(stall_after=100_000))
    holder = start(server, tmp_path)
    wait_for_bytes(tmp_path / "f.part", 100_000)
    done: list[Path] = []
    waiter = threading.Thread(target=lambda: done.append(get(remote(server), tmp_path)))
    waiter.start()
    time.sleep(0.2)
    assert not done
    holder.kill()
    holder.communicate()
    waiter.join(10)
    assert done[0].read_bytes() == CONTENT
    assert server.sent["/f"] == len(CONTENT)


def test_a_short_answer_is_read_whole_and_a_long_one_refused(server: BadServer) -> None:
    session = Session(timeout=2.0, backoff=lambda failures, after: 0.0)
    server.script("/f", Act(status=503), Act(drop_after=10))
    assert session.read_small(f"{server.url}/f", len(CONTENT))[0] == CONTENT
    with pytest.raises(UserError, match="not a listing"):
        session.read_small(f"{server.url}/f", len(CONTENT) - 1)
