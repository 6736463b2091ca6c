"""`nanorun data add` for every format and compression, on a terminal and off it, and folders that cannot be read."""

import csv
import gzip
import io
import json
import lzma
import os
import pty
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from nanorun import cli
from nanorun.data.dataset import open_dataset
from nanorun.data.shards import read_texts

ROOT = Path(__file__).resolve().parents[2]
TEXTS = [f'{kind} {i}: "ünïcødé" 🐈, a, b; c\nand a line' for i in range(60) for kind in ("one", "two")]


def as_csv(texts: Sequence[str]) -> bytes:
    out = io.StringIO()
    rows = csv.writer(out)
    rows.writerow(["n", "text"])
    rows.writerows(enumerate(texts))
    return out.getvalue().encode()


def as_parquet(texts: Sequence[str]) -> bytes:
    out = io.BytesIO()
    pq.write_table(pa.table({"n": range(len(texts)), "text": texts}), out)
    return out.getvalue()


FORMATS: dict[str, Callable[[Sequence[str]], bytes]] = {
    "txt": lambda texts: "<end>".join(texts).encode(),
    "jsonl": lambda texts: "\n".join(json.dumps({"text": text}) for text in texts).encode(),
    "json": lambda texts: json.dumps([{"text": text} for text in texts], indent=1).encode(),
    "csv": as_csv,
    "parquet": as_parquet,
}
COMPRESSIONS: dict[str, Callable[[bytes], bytes]] = {
    "": lambda content: content,
    ".gz": gzip.compress,
    ".xz": lzma.compress,
    ".zst": lambda content: pa.compress(content, codec="zstd", asbytes=True),
}
COMBINATIONS = [
    (kind, suffix) for kind in FORMATS for suffix in COMPRESSIONS if kind != "parquet" or not suffix
]


@pytest.mark.parametrize(("kind", "suffix"), COMBINATIONS)
def test_every_format_and_compression_gives_the_documents(home, tmp_path, monkeypatch, kind, suffix):
    path = tmp_path / f"mine.{kind}{suffix}"
    path.write_bytes(COMPRESSIONS[suffix](FORMATS[kind](TEXTS)))
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    with pytest.raises(SystemExit) as exit_info:
        cli.main(["data", "add", str(path), *(["--split", "<end>"] if kind == "txt" else [])])
    assert exit_info.value.code == 0
    added = open_dataset("mine")
    train, val = (list(read_texts(added, split)) for split in ("train", "val"))
    assert sorted(train + val) == sorted(TEXTS)
    assert len(val) == 12


@pytest.mark.parametrize("suffix", COMPRESSIONS)
def test_on_a_terminal_with_a_progress_bar_too(home, tmp_path, suffix):
    path = tmp_path / f"mine.jsonl{suffix}"
    path.write_bytes(COMPRESSIONS[suffix](FORMATS["jsonl"](TEXTS)))
    screen, terminal = pty.openpty()
    env = {**os.environ, "TERM": "xterm", "PYTHONPATH": str(ROOT)}
    args = [sys.executable, "-m", "nanorun", "data", "add", str(path)]
    done = subprocess.run(args, env=env, stderr=terminal, stdout=subprocess.PIPE, timeout=120)
    os.close(terminal)
    shown = os.read(screen, 100_000).decode()
    os.close(screen)
    assert done.returncode == 0, shown
    assert "adding mine" in shown
    assert open_dataset("mine").total("documents") == len(TEXTS)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.csv", "n,text\n1,one\n2,two,three\n", "Line 3 of {}/a.csv has 3 fields, but its header 2"),
        ("a.csv", 'n,text\n1,"one\n2,two\n', "is not CSV (unexpected end of data)"),
        ("a.csv", "n,body\n1,one\n", "There is no column 'text' in line 2 of {}/a.csv (it has 'n', 'body')"),
        ("a.json", '[{"text": "a"},\n {"text": }]', "Line 2 of {}/a.json is not JSON"),
        ("a.json", '[{"text": "a"}, 7]', "Record 2 of {}/a.json is not a JSON object"),
        ("a.json", '{"text":\n "a"}', "Line 1 of {}/a.json is not JSON"),
    ],
)
def test_a_mistake_in_a_file_is_named_with_its_place(home, tmp_path, mistake, name, content, words):
    (tmp_path / name).write_text(content)
    assert words.format(tmp_path) in mistake(["data", "add", str(tmp_path / name)])


def test_a_csv_of_a_spreadsheet_may_use_semicolons_and_json_lines_may_be_called_json(home, tmp_path):
    (tmp_path / "a.csv").write_text("\ufeffn;text\n1;one, two\n\n2;three\n")
    (tmp_path / "b.json").write_text('{"text": "four"}\n{"text": "five"}\n')
    with pytest.raises(SystemExit):
        cli.app(["data", "add", str(tmp_path / "a.csv"), str(tmp_path / "b.json"), "--name", "mine"])
    added = open_dataset("mine")
    texts = [*read_texts(added, "train"), *read_texts(added, "val")]
    assert sorted(texts) == ["five", "four", "one, two", "three"]


def without_privileges(*args: str | Path) -> subprocess.CompletedProcess[str]:
    """The command as a user who must have the permission to read a folder, which root need not."""
    drop = ["setpriv", "--bounding-set", "-dac_override,-dac_read_search"] if os.geteuid() == 0 else []
    args = (*drop, sys.executable, "-m", "nanorun", *args)
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run([*map(str, args)], env=env, capture_output=True, text=True, timeout=120)


@pytest.fixture
def notes(home, tmp_path):
    """A folder with a text and two folders that cannot be read: one not listed, the other listed only."""
    if os.geteuid() == 0 and shutil.which("setpriv") is None:
        pytest.skip("root can read every folder, and there is no setpriv here to run as less")
    folder = tmp_path / "notes"
    for name in ("open", "closed", "listed"):
        (folder / name).mkdir(parents=True)
        (folder / name / "a.txt").write_text(f"the text of {name}\n" * 20)
    (folder / "closed").chmod(0o000)
    (folder / "listed").chmod(0o444)
    yield folder
    for name in ("closed", "listed"):
        (folder / name).chmod(0o755)


def test_an_unreadable_folder_inside_an_added_one_is_reported(home, notes):
    done = without_privileges("data", "add", notes)
    assert done.returncode == 0, done.stderr
    for name in ("closed", "listed"):
        assert f"skipped the folder {notes / name}, which cannot be read: Permission denied\n" in done.stderr
    assert open_dataset("notes").total("documents") == 2, "one text, the end of which is validation"


@pytest.mark.parametrize("name", ["closed", "listed"])
def test_an_unreadable_folder_or_file_that_was_named_is_an_error(home, notes, name):
    for path in (notes / name, notes / name / "a.txt"):
        done = without_privileges("data", "add", notes / "open", path)
        assert done.returncode == 2
        assert re.fullmatch(rf"nanorun: .*{path}.* (not readable|Permission denied).*\n", done.stderr)
