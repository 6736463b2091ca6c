"""Reading user files: every format gives the same documents, and every fault is one clear error."""

import gzip
import json
import lzma
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nanorun.data import readers
from nanorun.data.readers import collect_files, file_kind, read_documents
from nanorun.errors import UserError

TEXTS = [
    "one",
    "two\nlines",
    "line separators \u2028 and \u0085 stay inside",
    "ünïcødé 🐈",
    '"quoted" \\ \t',
] * 40


def compress(path: Path, content: bytes) -> Path:
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(content))
    elif path.suffix == ".xz":
        path.write_bytes(lzma.compress(content))
    elif path.suffix == ".zst":
        path.write_bytes(pa.compress(content, codec="zstd", asbytes=True))
    else:
        path.write_bytes(content)
    return path


def jsonl(texts: list[str], column: str = "text") -> bytes:
    return b"".join(json.dumps({column: t, "n": 1}, ensure_ascii=False).encode() + b"\n" for t in texts)


def fault(path: Path, **options) -> str:
    with pytest.raises(UserError) as caught:
        list(read_documents(path, **options))
    sentence = str(caught.value)
    assert path.name in sentence
    assert "\n" not in sentence
    return sentence


@pytest.mark.parametrize("suffix", ["", ".gz", ".xz", ".zst"])
def test_jsonl_plain_and_compressed_gives_the_documents(tmp_path, suffix):
    path = compress(tmp_path / f"a.jsonl{suffix}", jsonl(TEXTS))
    assert list(read_documents(path)) == TEXTS


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.dictionary(pa.int32(), pa.string())])
def test_parquet_of_any_string_type_gives_the_documents(tmp_path, kind):
    path = tmp_path / "a.parquet"
    pq.write_table(
        pa.table({"id": range(len(TEXTS)), "text": pa.array(TEXTS).cast(kind)}), path, row_group_size=30
    )
    assert list(read_documents(path)) == TEXTS


def test_another_column_can_be_named(tmp_path):
    path = compress(tmp_path / "a.jsonl", jsonl(TEXTS, "body"))
    assert list(read_documents(path, column="body")) == TEXTS
    pq.write_table(pa.table({"body": TEXTS}), tmp_path / "a.parquet")
    assert list(read_documents(tmp_path / "a.parquet", column="body")) == TEXTS


@pytest.mark.parametrize("suffix", ["", ".gz", ".xz", ".zst"])
def test_a_text_file_is_one_document(tmp_path, suffix):
    path = compress(tmp_path / f"a.txt{suffix}", "Erste Zeile\r\n\r\nzweite ü\n".encode())
    assert list(read_documents(path)) == ["Erste Zeile\r\n\r\nzweite ü\n"]


def test_a_long_text_file_is_cut_at_line_ends_without_losing_a_character(tmp_path, monkeypatch):
    monkeypatch.setattr(readers, "TXT_CUT", 1000)
    text = "".join(f"line {i} of a tale\n" + ("\n" if i % 7 == 0 else "") for i in range(900))
    path = compress(tmp_path / "a.txt", text.encode())
    documents = list(read_documents(path))
    assert "".join(documents) == text
    assert len(documents) > 5
    assert all(document.endswith("\n") for document in documents)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
@given(
    # no \r: before a line end of the separator it belongs to that, as on Windows
    st.lists(
        st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\r"), max_size=20), max_size=8
    ),
    st.sampled_from(["<|endoftext|>", "\n\n", "--\n--"]),
)
def test_text_split_at_a_separator_gives_what_str_split_gives(tmp_path, parts, separator):
    path = tmp_path / "a.txt"
    text = separator.join(parts)
    path.write_bytes(text.encode())
    expected = (
        [part for part in text.lstrip("\ufeff").split(separator) if part.strip()]
        if text[:1] == "\ufeff"
        else [part for part in text.split(separator) if part.strip()]
    )
    assert list(read_documents(path, separator=separator)) == expected


def test_a_separator_matches_windows_line_endings(tmp_path):
    path = compress(tmp_path / "a.txt", b"one\r\n\r\ntwo\r\n\r\nthree")
    assert list(read_documents(path, separator="\n\n")) == ["one", "two", "three"]


def test_utf16_and_chat_files_are_reported_as_such(tmp_path):
    assert "iconv -f utf-16" in fault(compress(tmp_path / "a.txt", "hello".encode("utf-16")))
    chat = json.dumps({"messages": [{"role": "user", "content": "hi"}]}).encode()
    assert "holds conversations" in fault(compress(tmp_path / "a.jsonl", chat))


def test_a_byte_order_mark_is_not_part_of_the_text(tmp_path):
    assert list(read_documents(compress(tmp_path / "a.txt", b"\xef\xbb\xbfhello"))) == ["hello"]
    assert list(read_documents(compress(tmp_path / "a.jsonl", b"\xef\xbb\xbf" + jsonl(["hi"])))) == ["hi"]


def test_empty_documents_and_blank_lines_are_skipped(tmp_path):
    path = compress(tmp_path / "a.jsonl", b'{"text": ""}\n\n{"text": null}\n{"text": "x"}')
    assert list(read_documents(path)) == ["x"]


@pytest.mark.parametrize("suffix", [".gz", ".xz", ".zst"])
def test_a_truncated_archive_is_refused(tmp_path, suffix):
    path = compress(tmp_path / f"a.jsonl{suffix}", jsonl([f"{i} {i * i}" for i in range(5000)]))
    path.write_bytes(path.read_bytes()[: path.stat().st_size * 2 // 3])
    assert "damaged or truncated" in fault(path)


@pytest.mark.parametrize("suffix", [".gz", ".xz", ".zst"])
def test_a_file_that_is_not_compressed_is_refused(tmp_path, suffix):
    path = tmp_path / f"a.txt{suffix}"
    path.write_bytes(b"this was never compressed")
    assert "damaged or truncated" in fault(path)


def test_a_truncated_parquet_is_refused(tmp_path):
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": TEXTS}), path)
    path.write_bytes(path.read_bytes()[:-20])
    assert "damaged or truncated" in fault(path)


def test_a_parquet_without_the_text_column_lists_those_it_has(tmp_path):
    pq.write_table(pa.table({"title": ["a"], "body": ["b"]}), tmp_path / "a.parquet")
    sentence = fault(tmp_path / "a.parquet")
    assert "no column 'text'" in sentence
    assert "'title', 'body'" in sentence
    assert "--column" in sentence


def test_a_column_that_is_not_text_is_refused(tmp_path):
    pq.write_table(pa.table({"text": [1, 2]}), tmp_path / "a.parquet")
    assert "is int, not text" in fault(tmp_path / "a.parquet")
    path = compress(tmp_path / "a.jsonl", b'{"text": 5}\n')
    assert "is int, not text" in fault(path)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b'{"text": "caf\xe9"}', "Line 3 of"),
        (b'{"text": "a"', "is not JSON"),
        (b"[1, 2]", "is not a JSON object"),
        (b'{"title": "a"}', "no column 'text'"),
        (b'{"text": "\\ud800"}', "lone surrogate"),
        (b"[" * 100_000, "is not JSON"),
    ],
)
def test_an_invalid_line_is_reported_with_its_number(tmp_path, line, words):
    path = compress(tmp_path / "a.jsonl", jsonl(["x", "y"]) + line + b"\n" + jsonl(["z"]))
    sentence = fault(path)
    assert words in sentence
    assert "ine 3 of" in sentence


def test_a_line_that_is_not_utf8_is_reported_with_its_number(tmp_path):
    sentence = fault(compress(tmp_path / "a.txt", b"fine\ncaf\xe9\n"))
    assert "Line 2" in sentence
    assert "0xe9" in sentence
    assert "iconv" in sentence


def test_folders_are_searched_except_for_hidden_files(tmp_path):
    for name in ("b/two.txt", "a/one.jsonl.xz", ".git/three.txt", "a/.hidden.txt", "picture.png"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"x")
    assert [p.name for p in collect_files([tmp_path])] == ["one.jsonl.xz", "two.txt"]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("nowhere.txt", "There is no file"),
        ("a.pdf", "no supported suffix"),
        ("empty", "holds no supported file"),
    ],
)
def test_unreadable_paths_are_refused_before_reading(tmp_path, name, words):
    (tmp_path / "a.pdf").write_bytes(b"%PDF")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=words):
        collect_files([tmp_path / name])


def test_a_file_named_twice_is_refused(tmp_path):
    path = compress(tmp_path / "a.txt", b"x")
    with pytest.raises(UserError, match="named twice"):
        collect_files([path, tmp_path])


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("a.jsonl.xz", ("jsonl", ".xz")),
        ("A.PARQUET", ("parquet", "")),
        ("b.tar.txt", ("txt", "")),
        ("c.parquet.gz", ("", "")),
        ("noending", ("", "")),
        ("x.gz", ("", "")),
    ],
)
def test_the_format_follows_from_the_suffixes(name, kind):
    assert file_kind(Path(name)) == kind
