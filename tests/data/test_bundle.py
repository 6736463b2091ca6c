"""A bundle is read the same from a folder, a zip or a tar, and never writes outside its own folder."""

import io
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from bad_server import Act, BadServer, prepare_client

from nanorun.data import bundle as bundles
from nanorun.data.bundle import core_folder, get_core, open_bundle
from nanorun.errors import UserError

FILES = {
    "core.yaml": b"icl_tasks: []\n",
    "eval_meta_data.csv": b"Eval Task,Random baseline\n",
    "eval_data/a/b.jsonl": b'{"query": "q"}\n',
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, content in FILES.items():
        path = tmp_path / "eval_bundle" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return tmp_path / "eval_bundle"


def zipped(extra: dict[str, bytes] | None = None, root: str = "eval_bundle/") -> bytes:
    sink = io.BytesIO()
    with zipfile.ZipFile(sink, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in FILES.items():
            archive.writestr(root + name, content)
        for name, content in (extra or {}).items():
            archive.writestr(name, content)
    return sink.getvalue()


def archive_of(folder: Path, kind: str) -> Path:
    path = folder.parent / f"bundle{kind}"
    if kind == ".zip":
        path.write_bytes(zipped({"__MACOSX/eval_bundle/core.yaml": b"x", "eval_bundle/.DS_Store": b"y"}))
    else:
        with tarfile.open(path, f"w:{kind.split('.')[-1]}" if kind != ".tar" else "w") as archive:
            archive.add(folder, "./eval_bundle")
    return path


@pytest.mark.parametrize("kind", ["folder", "parent", ".zip", ".tar", ".tar.xz", ".tar.gz"])
def test_every_format_holds_the_same_files(folder, kind):
    path = {"folder": folder, "parent": folder.parent}.get(kind) or archive_of(folder, kind)
    bundle = open_bundle(path)
    assert bundle.files == FILES
    with pytest.raises(UserError, match="has no 'eval_data/none"):
        bundle.read("eval_data/none.jsonl")


@pytest.mark.parametrize("name", ["../secret.jsonl", "/etc/passwd", "eval_data/../../secret.jsonl"])
def test_no_name_escapes_the_bundle(folder, name):
    (folder.parent / "secret.jsonl").write_text("secret")
    archive = folder.parent / "evil.zip"
    archive.write_bytes(zipped({"../secret.jsonl": b"overwritten", "/tmp/evil.jsonl": b"x"}))
    for path in (folder, archive):
        with pytest.raises(UserError, match="has no"):
            open_bundle(path).read(name)
    assert (folder.parent / "secret.jsonl").read_text() == "secret"
    assert not Path("/tmp/evil.jsonl").exists()


def test_a_symlink_out_of_the_folder_is_refused(folder):
    (folder.parent / "secret.jsonl").write_text("secret")
    (folder / "eval_data" / "link.jsonl").symlink_to(folder.parent / "secret.jsonl")
    with pytest.raises(UserError, match="leads out of"):
        open_bundle(folder).read("eval_data/link.jsonl")


@pytest.mark.parametrize("kind", [".zip", ".tar.xz"])
def test_an_archive_that_unpacks_to_too_many_bytes_is_refused(folder, monkeypatch, kind):
    (folder / "eval_data" / "zeros.jsonl").write_bytes(b"0" * 200_000)
    path = archive_of(folder, kind)
    if kind == ".zip":
        path.write_bytes(zipped({"eval_bundle/eval_data/zeros.jsonl": b"0" * 200_000}))
    assert path.stat().st_size < 5_000
    monkeypatch.setattr(bundles, "MAX_BYTES", 150_000)
    with pytest.raises(UserError, match="it is not a CORE bundle"):
        open_bundle(path)


@pytest.mark.parametrize("kind", [".zip", ".tar.xz", ".txt", "empty folder", "nothing"])
def test_an_invalid_bundle_is_an_error(folder, kind):
    path = folder.parent / f"bad{kind}"
    if kind == "empty folder":
        path.mkdir()
    elif kind == ".txt":
        path.write_text("hello")
    elif kind != "nothing":
        whole = archive_of(folder, kind).read_bytes()
        path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UserError) as error:
        open_bundle(path)
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)


def test_a_corrupt_zip_is_an_error(folder):
    path = archive_of(folder, ".zip")
    content = bytearray(path.read_bytes())
    with zipfile.ZipFile(path) as archive:
        info = archive.getinfo("eval_bundle/eval_data/a/b.jsonl")
    content[info.header_offset + 30 + len(info.filename) + 4] ^= 0xFF
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"is damaged .*eval_data/a/b\.jsonl"):
        open_bundle(path).read("eval_data/a/b.jsonl")


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[BadServer]:
    prepare_client(monkeypatch)
    with BadServer() as server:
        monkeypatch.setenv("NANORUN_CORE_URL", server.url + "/eval_bundle.zip")
        yield server


def test_the_public_bundle_is_fetched_once_through_dropped_connections(home, server):
    server.files["/eval_bundle.zip"] = zipped()
    server.script("/eval_bundle.zip", Act(drop_after=100), Act(status=503))
    first = get_core()
    asked = len(server.seen)
    assert first.read("core.yaml") == FILES["core.yaml"]
    assert get_core().where == open_bundle().where == core_folder() / "eval_bundle.zip"
    assert len(server.seen) == asked
    (core_folder() / "eval_bundle.zip").write_bytes(b"PK damaged")
    assert get_core().read("core.yaml") == FILES["core.yaml"]


def test_a_download_that_is_not_a_bundle_is_an_error(home, server):
    server.files["/eval_bundle.zip"] = b"<html>not found</html>"
    with pytest.raises(UserError, match="downloaded twice and cannot be used"):
        get_core()
    assert not (core_folder() / "eval_bundle.zip").exists()


def test_a_missing_bundle_is_reported_with_the_command_that_downloads_it(home):
    with pytest.raises(UserError, match="nanorun data get core"):
        open_bundle()
