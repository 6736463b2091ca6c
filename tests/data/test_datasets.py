"""Datasets are complete or absent, and their manifests are correct."""

import json
import os
import platform
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from nanorun import home as home_module
from nanorun.data import bins
from nanorun.data import dataset as dataset_module
from nanorun.data.add import add_files, default_name
from nanorun.data.bins import BinWriter, read_bin
from nanorun.data.dataset import open_dataset
from nanorun.data.get import list_datasets, parse_size
from nanorun.data.shards import read_texts
from nanorun.errors import UserError


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    path = tmp_path / "corpus.jsonl"
    path.write_text("".join(json.dumps({"text": f"document {i} ü"}) + "\n" for i in range(2500)))
    return path


def test_a_dataset_holds_the_documents_of_its_file(home, corpus):
    added = add_files([corpus])
    assert added.name == "corpus"
    found = open_dataset("corpus")
    assert found.total("documents") == 2500
    assert found.total("text_bytes") == sum(len(f"document {i} ü".encode()) for i in range(2500))
    train, val = list(read_texts(found, "train")), list(read_texts(found, "val"))
    assert sorted(train + val) == sorted(f"document {i} ü" for i in range(2500))
    assert len(val) == 250, "a tenth of a small text"
    assert found.shards[-1].split == "val", "the last shard is validation"


def test_row_groups_and_shards_have_the_documented_sizes(home, corpus, monkeypatch):
    monkeypatch.setattr(dataset_module, "SHARD_BYTES", 14_000)
    added = add_files([corpus])
    assert len(added.of("train")) == 3
    for shard in added.shards:
        file = pq.ParquetFile(added.folder / shard.file)
        assert file.num_row_groups == shard.row_groups
        assert file.metadata.num_rows == shard.documents
        assert max(file.metadata.row_group(i).num_rows for i in range(file.num_row_groups)) <= 1000
        assert file.schema_arrow.names == ["text"]


def test_a_validation_file_can_be_named_and_is_not_trained_on(home, corpus, tmp_path):
    val = tmp_path / "val.txt"
    val.write_text("held out")
    added = add_files([tmp_path], val=val, name="mine")
    assert list(read_texts(added, "val")) == ["held out"]
    assert "held out" not in set(read_texts(added, "train"))
    assert added.total("documents", "train") == 2500


def test_a_single_document_is_split_for_validation(home, tmp_path):
    text = "\n".join(f"line {i}" for i in range(100))
    (tmp_path / "poem.txt").write_text(text)
    added = add_files([tmp_path / "poem.txt"])
    (train,), (val,) = read_texts(added, "train"), read_texts(added, "val")
    assert train + val == text
    assert 0.85 < len(train) / len(text) < 0.95


def held_out(folder: Path, sizes: list[int]) -> tuple[list[str], float]:
    """The validation documents of a text with documents of these sizes, and their share of it."""
    folder.mkdir(exist_ok=True)
    rows = (
        json.dumps({"text": f"document {i:06d} " + "word " * (size // 5 - 3)}) for i, size in enumerate(sizes)
    )
    (folder / "text.jsonl").write_text("\n".join(rows))
    added = add_files([folder], name="held", replace=True)
    assert added.total("text_bytes") == sum(len(row) for row in read_texts(added, "train")) + sum(
        len(row) for row in read_texts(added, "val")
    )
    val = list(read_texts(added, "val"))
    return val, sum(map(len, val)) / added.total("text_bytes")


@pytest.mark.parametrize(
    ("documents", "size", "low", "high"),
    [
        (2000, 200, 0.09, 0.11),  # 0.4 MB
        (1000, 1000, 0.09, 0.11),
        (107, 24_000, 0.035, 0.06),  # 2.6 MB, a folder of notes
        (3000, 3_000, 0.015, 0.025),  # 9 MB
        (12_000, 2_000, 0.009, 0.011),  # 24 MB
        (4, 9_000_000, 0.009, 0.011),
    ],
)
def test_the_smaller_the_text_the_more_of_it_is_held_out(home, tmp_path, documents, size, low, high):
    val, share = held_out(tmp_path / "a", [size] * documents)
    assert low < share < high
    assert len(val) >= min(documents, 5)


def test_validation_text_is_spread_evenly_over_the_documents(home, tmp_path):
    for count, size in ((900, 900), (12_000, 2_000)):
        val, _ = held_out(tmp_path / "a", [size] * count)
        places = sorted(int(text.split()[1]) for text in val)
        gaps = np.diff([0, *places, count])
        assert gaps.max() <= 2.5 * count / len(places)


def test_of_a_few_dozen_documents_a_handful_is_held_out(home, tmp_path):
    assert len(held_out(tmp_path / "a", [300] * 36)[0]) >= 5
    assert len(held_out(tmp_path / "a", [30_000] * 36)[0]) >= 5


def test_few_long_documents_lose_their_ends_and_none_is_lost_whole(home, tmp_path):
    val, share = held_out(tmp_path / "a", [300_000] * 6)
    assert len(val) == 6
    assert not any("document" in text for text in val), "the beginnings are trained on"
    assert 0.05 < share < 0.1
    val, share = held_out(tmp_path / "a", [100] * 30 + [2_000_000])
    assert 0.04 < share < 0.08, "neither the long document nor all short ones"
    assert len(val) == 5


def test_notes_of_very_different_lengths_are_held_out_in_proportion(home, tmp_path):
    sizes = [int(300 * 1.07 ** (37 * i % 80)) for i in range(107)]
    val, share = held_out(tmp_path / "a", sizes)
    assert 0.07 < share < 0.13
    assert sum("document" not in text for text in val) >= 3, "the ends of long ones"
    assert sum("document" in text for text in val) >= 5, "short ones"


def test_the_same_files_give_the_same_dataset(home, tmp_path):
    held_out(tmp_path / "a", [700, 9_000, 40_000] * 500)
    first = open_dataset("held").fingerprint
    held_out(tmp_path / "a", [700, 9_000, 40_000] * 500)
    assert open_dataset("held").fingerprint == first


def test_a_few_characters_are_too_few_for_a_dataset(home, tmp_path):
    (tmp_path / "a.txt").write_text("x")
    with pytest.raises(UserError, match="add more text"):
        add_files([tmp_path / "a.txt"])


def leftovers(home: Path) -> list[str]:
    return [str(path.relative_to(home)) for path in home.rglob("*")] if home.exists() else []


@pytest.mark.parametrize("fault", ["bad line", "missing val", "empty"])
def test_a_failed_add_leaves_nothing_behind(home, corpus, tmp_path, fault):
    options = {}
    if fault == "bad line":
        corpus.write_bytes(corpus.read_bytes() + b'{"text": "\xff"}\n')
    elif fault == "missing val":
        options["val"] = tmp_path / "nowhere.txt"
    else:
        corpus.write_bytes(b"\n\n")
    with pytest.raises(UserError):
        add_files([corpus], **options)
    assert [name for name in leftovers(home) if name != "data"] == []


def test_an_existing_dataset_is_kept_unless_replaced(home, corpus, tmp_path):
    add_files([corpus])
    other = tmp_path / "other" / "corpus.jsonl"
    other.parent.mkdir()
    other.write_text('{"text": "new one"}\n{"text": "new two"}\n')
    with pytest.raises(UserError, match="--replace"):
        add_files([other])
    other_bad = tmp_path / "bad" / "corpus.jsonl"
    other_bad.parent.mkdir()
    other_bad.write_text("no json")
    with pytest.raises(UserError):
        add_files([other_bad], replace=True)
    assert open_dataset("corpus").total("documents") == 2500, "a failed replacement keeps the old one"
    add_files([other], replace=True)
    assert open_dataset("corpus").total("documents") == 2
    assert leftovers(home / "data" / "corpus") != []
    assert not [name for name in os.listdir(home / "data") if name.startswith(".")]


def test_a_killed_writer_leaves_no_dataset_and_the_next_one_cleans_up(home, tmp_path):
    code = """if True:
        import time
        from nanorun.home import data_dir, new_folder
        with new_folder(data_dir() / "slow") as folder:
            (folder / "shard-00000.parquet").write_bytes(b"half")
            print("writing", flush=True)
            time.sleep(60)"""
    env = {**os.environ, "NANORUN_HOME": str(home)}
    child = subprocess.Popen([sys.executable, "-c", code], env=env, stdout=subprocess.PIPE)
    assert child.stdout is not None
    assert child.stdout.readline() == b"writing\n"
    child.kill()
    child.communicate()
    assert list(home.glob("data/.slow.writing-*")), "the test must have killed it in the middle"
    assert not (home / "data" / "slow").exists()
    (tmp_path / "slow.jsonl").write_text('{"text": "a"}\n{"text": "b"}\n')
    add_files([tmp_path / "slow.jsonl"])
    assert os.listdir(home / "data") == ["slow"]


def test_a_replacement_killed_between_its_two_renames_is_rolled_back(home, corpus):
    add_files([corpus])
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    old = home / "data" / f".corpus.old-{platform.node()}-{dead.pid}"
    (home / "data" / "corpus").rename(old)
    with pytest.raises(UserError, match="exists already"):
        add_files([corpus])
    assert open_dataset("corpus").total("documents") == 2500


def test_a_writer_removes_leftovers_and_restores_moved_datasets(home, corpus):
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    me = f"{platform.node()}-{dead.pid}"
    for name in (
        f".a.writing-{me}",
        f".a.b.old-{me}",
        f".c.writing-elsewhere-{dead.pid}",
        f".d.writing-{platform.node()}-1",
    ):
        (home / "data" / name).mkdir(parents=True)
    add_files([corpus], name="a")
    kept = {
        f".c.writing-elsewhere-{dead.pid}",
        f".d.writing-{platform.node()}-1",
    }  # other machines, the living
    assert set(os.listdir(home / "data")) == {"a", "a.b"} | kept


@pytest.mark.parametrize("where", ["/proc/nowhere", "/dev/null"])
def test_an_unwritable_home_is_an_error(monkeypatch, corpus, where):
    monkeypatch.setenv("NANORUN_HOME", where)
    with pytest.raises(UserError, match=f"NANORUN_HOME is {where}, which .*folder"):
        add_files([corpus])


def test_the_path_of_a_home_can_contain_a_tilde_or_a_colon(monkeypatch, tmp_path, corpus):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NANORUN_HOME", "~/my home")
    assert add_files([corpus]).folder == tmp_path / "my home" / "data" / "corpus"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NANORUN_HOME", "s3:x")
    add_files([corpus])
    assert open_dataset("corpus").total("documents") == 2500


def test_text_without_spaces_or_line_breaks_is_accepted(home, tmp_path):
    (tmp_path / "zh.txt").write_text("港口的清晨很安静" * 80_000)
    added = add_files([tmp_path / "zh.txt"])
    texts = [*read_texts(added, "train"), *read_texts(added, "val")]
    assert Counter("".join(texts)) == Counter("港口的清晨很安静" * 80_000)
    (tmp_path / "one.jsonl").write_text(json.dumps({"text": "a" * 10_000}))
    added = add_files([tmp_path / "one.jsonl"])
    assert [len(text) for s in ("train", "val") for text in read_texts(added, s)] == [9000, 1000]


def test_empty_and_unsupported_files_of_a_folder_are_skipped_with_a_notice(home, tmp_path, capsys):
    notes = tmp_path / "notes"
    notes.mkdir()
    for name, text in {
        "a.md": "one\n",
        "b.txt": "",
        "c.txt": "two\n",
        "d.json": "{}",
        "e.html": "<p>",
    }.items():
        (notes / name).write_text(text)
    assert add_files([notes]).total("documents") == 2
    said = capsys.readouterr().err
    assert "skipped 2 files of unsupported kinds" in said
    assert "b.txt holds no text" in said
    with pytest.raises(UserError, match="remove it"):
        add_files([notes / "b.txt"])


def test_validation_stays_evenly_spread_when_it_exceeds_a_shard(home, tmp_path, monkeypatch):
    monkeypatch.setattr("nanorun.data.add.SHARD_BYTES", 500)
    path = tmp_path / "sorted.jsonl"
    path.write_text("".join(json.dumps({"text": f"document {i:06d}"}) + "\n" for i in range(20_000)))
    added = add_files([path])
    held = [int(text.split()[1]) for text in read_texts(added, "val")]
    assert added.total("documents") == 20_000
    assert 10 < len(held) <= 32
    gaps = np.diff([0, *sorted(held), 20_000])
    assert gaps.max() < 3 * 20_000 / len(held)


def test_two_writers_of_one_name_do_not_mix(home):
    final = home / "data" / "x"

    def write_while_another_does() -> None:
        with home_module.new_folder(final) as work:
            (work / "mine").write_text("1")
            final.mkdir()
            (final / "theirs").write_text("2")

    with pytest.raises(UserError, match="exists already"):
        write_while_another_does()
    assert os.listdir(final) == ["theirs"]


def test_a_full_disk_is_an_error_and_leaves_nothing(home):
    def fill_the_disk():
        raise OSError(28, "No space left on device")

    with pytest.raises(UserError, match="full"), home_module.new_folder(home / "data" / "x"):
        fill_the_disk()
    assert os.listdir(home / "data") == []


@pytest.mark.parametrize("damage", ["truncate", "remove", "manifest", "outside"])
def test_opening_a_damaged_dataset_is_an_error(home, corpus, damage):
    added = add_files([corpus])
    shard, manifest = added.files("train")[0], added.folder / "dataset.json"
    if damage == "truncate":
        shard.write_bytes(shard.read_bytes()[:-1])
    elif damage == "remove":
        shard.unlink()
    elif damage == "manifest":
        manifest.write_text(manifest.read_text()[:-30])
    else:
        manifest.write_text(manifest.read_text().replace(shard.name, "../../secret"))
    with pytest.raises(UserError):
        open_dataset("corpus")
    datasets, broken = list_datasets()
    assert (len(datasets), len(broken)) == (0, 1)


def test_verification_detects_a_changed_byte(home, corpus):
    added = add_files([corpus])
    assert list_datasets(verify=True)[1] == []
    path = added.files("train")[0]
    content = bytearray(path.read_bytes())
    content[100] ^= 1
    path.write_bytes(content)
    assert "checksum" in list_datasets(verify=True)[1][0]


def test_names_that_could_escape_the_home_are_refused(home, corpus):
    for name in ("../x", "a/b", ".hidden", "", "x" * 65):
        with pytest.raises(UserError, match="cannot name a dataset"):
            add_files([corpus], name=name or " ")


def test_the_default_name_is_that_of_the_file_or_its_folder(tmp_path):
    (tmp_path / "my notes").mkdir()
    (tmp_path / "my notes" / "a.txt.gz").write_text("")
    assert default_name([tmp_path / "my notes" / "a.txt.gz"]) == "a"
    assert default_name([tmp_path / "my notes"]) == "my-notes"
    assert default_name([tmp_path / "my notes" / "a.txt.gz", tmp_path / "b"]) == "my-notes"


def test_bin_shards_round_trip_and_never_split_a_document(tmp_path, monkeypatch):
    monkeypatch.setattr(bins, "SHARD_TOKENS", 100)
    writer = BinWriter(tmp_path, "train", bos=999)
    lengths = [30, 60, 5, 150, 20, 99]
    tokens = np.arange(sum(lengths), dtype=np.uint16)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    writer.add(tokens, offsets, [1] * len(lengths))
    shards = writer.finish()
    assert [shard.documents for shard in shards] == [3, 1, 1, 1]
    whole = np.concatenate([read_bin(tmp_path / shard.file) for shard in shards])
    assert whole[whole != 999].tolist() == tokens.tolist()
    raw = (tmp_path / shards[0].file).read_bytes()
    assert np.frombuffer(raw[:12], "<i4").tolist() == [20240520, 1, 98]
    assert len(raw) == 1024 + 2 * 98


@pytest.mark.parametrize("damage", ["magic", "short", "tiny"])
def test_an_invalid_bin_shard_is_refused(tmp_path, damage):
    header = np.zeros(256, "<i4")
    header[:3] = 20240520, 1, 10
    content = header.tobytes() + bytes(20)
    path = tmp_path / "a.bin"
    path.write_bytes({"magic": b"x" + content[1:], "short": content[:-1], "tiny": content[:50]}[damage])
    with pytest.raises(UserError, match=r"a\.bin"):
        read_bin(path)


def test_sizes_are_parsed_with_units():
    assert [parse_size(text) for text in ("500", "500kB", "1.5 MB", "2GB", "3m")] == [
        500,
        500_000,
        1_500_000,
        2 * 10**9,
        3 * 10**6,
    ]
    for text in ("", "MB", "-3MB", "3TBx", "1e9"):
        with pytest.raises(UserError, match="not a size"):
            parse_size(text)


def test_the_counts_of_the_shared_corpus_are_right(home, shared_data):
    val = shared_data / "pretrain" / "val.jsonl.xz"
    added = add_files([val], name="val")
    import lzma

    with lzma.open(val) as lines:
        texts = [json.loads(line)["text"] for line in lines]
    assert added.total("documents") == len(texts)
    assert added.total("text_bytes") == sum(len(text.encode()) for text in texts)
