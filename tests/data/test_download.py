"""Against a server that misbehaves, a download ends with the right file or one clear sentence and no file."""

import errno
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
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from bad_server import Act, BadServer, prepare_client
from huggingface_hub import constants
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nanorun.console import Progress
from nanorun.data import download
from nanorun.data.download import ATTEMPTS, check_space, fetch, run_parallel
from nanorun.errors import UserError

CONTENT = random.Random(1).randbytes(300_000)
OTHER = random.Random(2).randbytes(300_000)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[BadServer]:
    prepare_client(monkeypatch)
    with BadServer() as server:
        server.files["/f"] = CONTENT
        yield server


def get(server: BadServer, into: Path, path: str = "/f", **options: Any) -> bytes:
    content = server.files.get(path, b"")
    options.setdefault("sha256", hashlib.sha256(content).hexdigest())
    options.setdefault("check", lambda path: None)
    with Progress("test") as bar:
        final = fetch(server.url + path, into / path.strip("/"), bar=bar, **options)
        assert bar.done == len(final.read_bytes())
    assert names(into) == {final.name}
    return final.read_bytes()


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()} - {".lock"}


def ranges(server: BadServer, path: str = "/f") -> list[str | None]:
    return [seen.headers.get("range") for seen in server.requests(path)]


def test_a_file_arrives_under_its_name_and_nothing_else_remains(server: BadServer, tmp_path: Path) -> None:
    assert get(server, tmp_path / "new" / "folder") == CONTENT
    assert server.requests("/f")[0].headers["accept-encoding"] == "identity"
    assert get(server, tmp_path / "other", sha256=None) == CONTENT


def test_an_empty_file_is_downloaded(server: BadServer, tmp_path: Path) -> None:
    server.files["/f"] = b""
    assert get(server, tmp_path) == b""


def test_dropped_connections_resume_where_they_ended(server: BadServer, tmp_path: Path) -> None:
    server.script("/f", *(Act(drop_after=n) for n in (10_000, 20_000, 100_000, 70_000)))
    assert get(server, tmp_path) == CONTENT
    assert ranges(server) == [None, "bytes=10000-", "bytes=30000-", "bytes=130000-", "bytes=200000-"]


def test_attempts_are_counted_since_the_last_new_byte(server: BadServer, tmp_path: Path) -> None:
    server.script("/f", *[Act(drop_after=20_000), Act(drop_after=0)] * 10)
    assert get(server, tmp_path) == CONTENT
    (tmp_path / "f").unlink()
    server.always["/f"] = Act(drop_after=0)
    with pytest.raises(UserError, match=rf"connection failed .* \(attempt {ATTEMPTS} of {ATTEMPTS}\)"):
        get(server, tmp_path)
    assert "f" not in names(tmp_path)


@settings(
    max_examples=15,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    drops=st.lists(st.integers(0, 120_000), max_size=5),
    resets=st.booleans(),
    chunked=st.booleans(),
    seed=st.integers(0, 2**32),
    size=st.integers(0, 120_000),
)
def test_any_sequence_of_drops_gives_the_right_bytes(
    server: BadServer, drops: list[int], resets: bool, chunked: bool, seed: int, size: int
) -> None:
    path = f"/{seed}-{size}"
    server.files[path] = random.Random(seed).randbytes(size)
    server.script(path, *(Act(drop_after=n, reset=resets, chunked=chunked) for n in drops))
    with tempfile.TemporaryDirectory() as into:
        assert get(server, Path(into), path) == server.files[path]


@pytest.mark.parametrize("sha256", [hashlib.sha256(CONTENT).hexdigest(), None], ids=["hashed", "unhashed"])
def test_a_server_that_ignores_ranges_restarts_the_file_and_appends_nothing(
    server: BadServer, tmp_path: Path, sha256: str | None
) -> None:
    server.script("/f", Act(drop_after=120_000), Act(ignore_range=True))
    assert get(server, tmp_path, sha256=sha256) == CONTENT


@pytest.mark.parametrize(
    "act", [Act(shift_range=7), Act(corrupt=True), Act(body=OTHER)], ids=["begins late", "corrupt", "changed"]
)
def test_wrong_bytes_once_are_downloaded_again_from_the_start(
    server: BadServer, tmp_path: Path, act: Act
) -> None:
    server.script("/f", Act(drop_after=120_000), act)
    assert get(server, tmp_path) == CONTENT
    assert ranges(server)[-1] is None


def test_permanently_wrong_bytes_are_an_error_and_leave_no_file(server: BadServer, tmp_path: Path) -> None:
    server.always["/f"] = Act(corrupt=True)
    with pytest.raises(UserError, match="downloaded twice and cannot be used: wrong bytes") as failure:
        get(server, tmp_path)
    assert "\n" not in str(failure.value)
    assert names(tmp_path) == set()
    assert len(server.requests("/f")) == 2


@pytest.mark.parametrize("part", [CONTENT, CONTENT + b"more", OTHER], ids=["complete", "longer", "outdated"])
def test_a_part_of_the_wrong_length_or_file_is_discarded(
    server: BadServer, tmp_path: Path, part: bytes
) -> None:
    (tmp_path / "f.part").write_bytes(part)
    assert get(server, tmp_path) == CONTENT


def test_damaged_bytes_in_a_part_are_detected(server: BadServer, tmp_path: Path) -> None:
    (tmp_path / "f.part").write_bytes(b"damaged" + CONTENT[7:120_000])
    assert get(server, tmp_path) == CONTENT
    assert ranges(server) == ["bytes=120000-", None]


@pytest.mark.parametrize(
    "act",
    [
        Act(body=CONTENT[:1000], headers={"Content-Length": "300000"}),
        Act(no_length=True, drop_after=1000),
        Act(chunked=True, drop_after=120_000),
        Act(stall_after=50_000),
        Act(hang=20),
    ],
    ids=["shorter than announced", "without a length", "cut chunks", "stall", "silence"],
)
def test_an_incomplete_response_is_detected(server: BadServer, tmp_path: Path, act: Act) -> None:
    server.script("/f", act)
    assert get(server, tmp_path) == CONTENT


@pytest.mark.parametrize("status", [408, 429, 500, 502, 503, 504])
def test_transient_errors_are_retried(server: BadServer, tmp_path: Path, status: int) -> None:
    server.script("/f", Act(drop_after=50_000), *[Act(status=status, headers={"Retry-After": "2"})] * 3)
    assert get(server, tmp_path) == CONTENT
    assert ranges(server)[-1] == "bytes=50000-", "what has arrived is kept"


def test_retries_back_off_with_jitter_up_to_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    monkeypatch.setattr(time, "sleep", pauses.append)
    monkeypatch.setattr(download, "ATTEMPTS", 10)

    def fail() -> None:
        raise OSError("the consistency check failed")

    for _ in range(20):
        with pytest.raises(UserError, match="attempt 10 of 10"):
            download.retry(fail, "x")
    first, third, last = pauses[0::9], pauses[2::9], pauses[8::9]
    assert all(0.5 <= pause <= 1.5 for pause in first)
    assert len(set(first)) > 10
    assert all(2 <= pause <= 6 for pause in third)
    assert all(15 <= pause <= 45 for pause in last)


@pytest.mark.parametrize(
    ("status", "advice"),
    [
        (401, "HF_TOKEN"),
        (403, "accept the terms"),
        (404, "check the name"),
        (410, "check the name"),
        (400, "check the address"),
        (451, "check the address"),
    ],
)
def test_a_permanent_refusal_is_an_error_without_retries(
    server: BadServer, tmp_path: Path, status: int, advice: str
) -> None:
    server.always["/f"] = Act(status=status)
    with pytest.raises(UserError, match=rf"{advice}.*\(HTTP {status}\)") as failure:
        get(server, tmp_path)
    assert "\n" not in str(failure.value)
    assert len(server.requests("/f")) == 1
    assert "f" not in names(tmp_path)


def test_an_unreachable_server_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prepare_client(monkeypatch)
    with BadServer() as gone:
        pass
    with pytest.raises(UserError, match="Connection refused") as failure:
        get(gone, tmp_path)
    assert "\n" not in str(failure.value)
    assert "f" not in names(tmp_path)


def test_offline_mode_is_an_error(server: BadServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match="HF_HUB_OFFLINE is set"):
        get(server, tmp_path)
    assert not server.seen


def test_a_redirected_download_resumes(server: BadServer, tmp_path: Path) -> None:
    server.files["/start"] = CONTENT
    server.always["/start"] = Act(status=302, headers={"Location": "/f"})
    server.script("/f", Act(drop_after=100_000))
    assert get(server, tmp_path, "/start") == CONTENT
    assert ranges(server) == [None, "bytes=100000-"]


def test_redirects_are_limited_in_number_and_to_http(server: BadServer, tmp_path: Path) -> None:
    for location in ("/f", "file:///etc/passwd", "ftp://127.0.0.1/f"):
        server.always["/f"] = Act(status=302, headers={"Location": location})
        with pytest.raises(UserError) as failure:
            get(server, tmp_path)
        assert "\n" not in str(failure.value)
        assert "f" not in names(tmp_path)


def test_a_file_that_fails_its_check_is_never_published(server: BadServer, tmp_path: Path) -> None:
    def check(path: Path) -> None:
        assert path.name == "f.part"
        raise ValueError("it is not a shard")

    with pytest.raises(UserError, match="cannot be used: it is not a shard"):
        get(server, tmp_path, check=check)
    assert names(tmp_path) == set()


def test_too_little_space_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=400_000))
    with pytest.raises(UserError, match=r"needs 600 kB in .* only 400 kB are free"):
        check_space(600_000, tmp_path)
    check_space(300_000, tmp_path)


def test_a_disk_that_fills_up_is_an_error(
    server: BadServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(download, "_receive", lambda url, part, bar: full(part))
    with pytest.raises(UserError, match="the disk is full"):
        get(server, tmp_path)


def test_an_unwritable_folder_is_an_error(server: BadServer, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(UserError, match="Cannot write into"):
        get(server, tmp_path / "file")


# Many items, many processes


def test_items_run_in_parallel_and_the_first_failure_stops_the_rest() -> None:
    stop, started = threading.Event(), []

    def work(item: int) -> None:
        started.append(item)
        if item == 2:
            raise UserError("item 2 failed")
        stop.wait(10)

    begin = time.monotonic()
    with pytest.raises(UserError, match="item 2 failed"):
        run_parallel(work, range(20), 3, stop)
    assert time.monotonic() - begin < 5, "it does not wait for the others"
    assert sorted(started) == [0, 1, 2]
    done: list[int] = []
    run_parallel(done.append, range(20), 4, threading.Event())
    assert sorted(done) == list(range(20))


PROGRAM = textwrap.dedent(
    """
    import sys
    from pathlib import Path
    from huggingface_hub import constants
    from nanorun.console import Progress
    from nanorun.data.download import fetch
    constants.DOWNLOAD_CHUNK_SIZE = 10_000
    url, sha256, final = sys.argv[1:]
    print("ready", flush=True)
    try:
        with Progress("test") as bar:
            fetch(url, Path(final), check=lambda path: None, sha256=sha256, bar=bar)
    except KeyboardInterrupt:
        sys.exit(130)
    """
)


@pytest.fixture
def start(server: BadServer, tmp_path: Path) -> Iterator[Callable[[], subprocess.Popen[str]]]:
    started: list[subprocess.Popen[str]] = []

    def begin() -> subprocess.Popen[str]:
        sha256 = hashlib.sha256(server.files["/f"]).hexdigest()
        command = [sys.executable, "-c", PROGRAM, f"{server.url}/f", sha256, str(tmp_path / "f")]
        env = {**os.environ, "PYTHONPATH": str(Path(download.__file__).parents[2])}
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env
        )
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        return process

    yield begin
    for process in started:
        process.kill()
        process.communicate()


def wait_for_bytes(part: Path, n: int) -> None:
    deadline = time.monotonic() + 20
    while not part.exists() or part.stat().st_size < n:
        assert time.monotonic() < deadline, "the download does not move"
        time.sleep(0.002)


def test_a_killed_download_is_resumed_by_the_next_process(
    server: BadServer, tmp_path: Path, start: Callable[[], subprocess.Popen[str]]
) -> None:
    server.files["/f"] = random.Random(3).randbytes(4_000_000)
    server.always["/f"] = Act(pause=0.002)
    process = start()
    wait_for_bytes(tmp_path / "f.part", 1_000_000)
    process.kill()
    process.wait()
    assert names(tmp_path) == {"f.part"}
    kept = (tmp_path / "f.part").stat().st_size
    server.always["/f"] = Act()
    assert get(server, tmp_path) == server.files["/f"]
    assert ranges(server)[-1] == f"bytes={kept}-"


def test_ctrl_c_stops_a_stalled_download_at_once_and_keeps_its_part(
    server: BadServer, tmp_path: Path, start: Callable[[], subprocess.Popen[str]]
) -> None:
    server.always["/f"] = Act(stall_after=100_000)
    process = start()
    wait_for_bytes(tmp_path / "f.part", 80_000)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=5)
    assert process.returncode == 130
    assert "Traceback" not in errors
    del server.always["/f"]
    assert get(server, tmp_path) == CONTENT


def test_concurrent_processes_download_a_file_once(
    server: BadServer, tmp_path: Path, start: Callable[[], subprocess.Popen[str]]
) -> None:
    server.always["/f"] = Act(pause=0.05)
    first, second = start(), start()
    outcomes = [process.communicate(timeout=20) for process in (first, second)]
    assert (first.returncode, second.returncode) == (0, 0)
    assert sum("Another process is downloading" in errors for _, errors in outcomes) == 1
    assert (tmp_path / "f").read_bytes() == CONTENT
    assert server.sent["/f"] == len(CONTENT)
