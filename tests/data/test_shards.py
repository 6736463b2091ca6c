"""No shard is used unless it is the one that was written: whoever changed it, and whenever."""

import os
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from nanorun.console import Progress
from nanorun.data.add import write_dataset
from nanorun.data.bins import HEADER_BYTES, tokenize_dataset
from nanorun.data.dataset import Dataset, Shard, open_dataset
from nanorun.data.shards import SplitShards, read_texts
from nanorun.data.sources import open_source
from nanorun.errors import UserError
from nanorun.text.tokenizer import PATTERN, SPECIAL_TOKENS, Tokenizer

BYTES = Tokenizer(
    "bytes", PATTERN, {bytes([b]): b for b in range(256)}, {n: 256 + i for i, n in enumerate(SPECIAL_TOKENS)}
)


@pytest.fixture
def text(home: Path, monkeypatch: pytest.MonkeyPatch) -> Dataset:
    monkeypatch.setattr("nanorun.data.dataset.ROW_GROUP_DOCUMENTS", 5)
    monkeypatch.setattr("nanorun.data.dataset.SHARD_BYTES", 400)
    texts = [f"{i:03d} gulls sat on {i * 7919 % 1000:03d} masts" for i in range(60)]
    return write_dataset("text", iter(texts[:50]), iter(texts[50:]), "made up", Progress("writing"))


@pytest.fixture
def tokens(text: Dataset) -> Dataset:
    return tokenize_dataset(text, BYTES)


def keep_times(path: Path, content: bytes) -> None:
    """Writes other content of the same length, with the modification time that the file had."""
    before = path.stat()
    assert len(content) == before.st_size
    path.write_bytes(content)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def exchange_text(path: Path) -> None:
    """Another valid parquet shard with other documents of the same lengths, in as many bytes."""
    import pyarrow
    import pyarrow.parquet

    with pyarrow.parquet.ParquetFile(path) as file:
        groups = [file.read_row_group(i).column(0).to_pylist() for i in range(file.num_row_groups)]
    schema = pyarrow.schema([("text", pyarrow.large_string())])
    with pyarrow.parquet.ParquetWriter(path, schema, compression="none") as writer:
        for group in groups:
            writer.write_table(pyarrow.table([[each.replace("gulls", "crows") for each in group]], schema))


def flip_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[HEADER_BYTES + 3] ^= 1
    keep_times(path, bytes(content))


def exchange_tokens(path: Path) -> None:
    content = path.read_bytes()
    keep_times(path, content[:HEADER_BYTES] + content[HEADER_BYTES:].replace(b"g\0", b"c\0"))


def zero_tokens(path: Path) -> None:
    content = path.read_bytes()
    keep_times(path, content[:HEADER_BYTES] + bytes(len(content) - HEADER_BYTES))


@pytest.mark.parametrize("harm", [flip_bit, exchange_tokens, zero_tokens])
@pytest.mark.parametrize("split", ["train", "val"])
def test_a_token_shard_with_other_tokens_is_not_used(tokens, harm, split):
    harm(tokens.files(split)[-1])
    source = open_source(open_dataset(tokens.name), split, BYTES)
    with pytest.raises(UserError, match=r"checksum differs.*get the dataset"):
        source.load(range(source.units))


def test_text_exchanged_for_other_text_of_the_same_length_is_not_used(text):
    shard = text.files("train")[1]
    exchange_text(shard)  # the shard that the dataset was written with ...
    described = Shard.describe(shard, "train", 10, 300, row_groups=text.shards[1].row_groups)
    replace(text, shards=(text.shards[0], described, *text.shards[2:])).save()
    assert any("crows" in each for each in read_texts(open_dataset("text"), "train"))
    keep_times(shard, shard.read_bytes().replace(b"crows", b"ducks"))  # ... and what it is exchanged for
    dataset = open_dataset("text")  # sizes are right
    with pytest.raises(UserError, match=f"{shard.name} is damaged or was exchanged"):
        list(read_texts(dataset, "train"))
    source = open_source(dataset, "train", BYTES)
    with pytest.raises(UserError, match=f"{shard.name} is damaged or was exchanged"):
        source.load(range(source.units))


@pytest.mark.parametrize("way", ["in place", "by rename"])
def test_a_shard_exchanged_after_its_first_use_is_not_used_again(tokens, way):
    source = open_source(tokens, "train", BYTES)
    first = source.load([0])
    shard = tokens.files("train")[0]
    if way == "in place":
        exchange_tokens(shard)
    else:
        other = shard.with_name("other")
        other.write_bytes(shard.read_bytes())
        os.utime(other, ns=(shard.stat().st_atime_ns, shard.stat().st_mtime_ns))
        exchange_tokens(other)
        other.replace(shard)
    with pytest.raises(UserError, match="damaged or was exchanged"):
        source.load([0])
    assert len(first.tokens)


def test_a_shard_that_changes_while_it_is_read_is_not_used(tokens):
    with pytest.raises(UserError, match="changed while it was read"), SplitShards(tokens, "train").open(0):
        exchange_tokens(tokens.files("train")[0])


def test_an_unchanged_shard_is_hashed_once(tokens, monkeypatch):
    source = open_source(tokens, "train", BYTES)
    source.load(range(source.units))
    monkeypatch.setattr("hashlib.file_digest", None)  # any further call would fail
    os.utime(tokens.files("val")[0])
    source.load(range(source.units))
    with pytest.raises(TypeError):
        open_source(tokens, "val", BYTES).load([0])


def test_a_damaged_shard_is_found_in_the_background_before_its_turn(tokens):
    flip_bit(tokens.files("train")[-1])
    source = open_source(tokens, "train", BYTES, verify_all=True)

    def use_another_shard() -> None:
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            source.load([0])

    with pytest.raises(UserError, match=r"shard-0000\d\.bin is damaged"):
        use_another_shard()


@pytest.mark.parametrize("kind", ["text", "tokens"])
def test_a_shard_removed_in_the_middle_of_a_run_is_one_sentence(text, tokens, kind):
    dataset = text if kind == "text" else tokens
    source = open_source(dataset, "train", BYTES)
    source.load([0])
    dataset.files("train")[0].unlink()
    with pytest.raises(UserError, match=r"shard-00000\.\w+ cannot be read \(No such file"):
        source.load([0])


def rewrite(dataset: Dataset, content: bytes, **counts: int) -> Dataset:
    """The dataset with another first shard, and a manifest that agrees."""
    path, old = dataset.files("train")[0], dataset.shards[0]
    path.write_bytes(content)
    shard = Shard.describe(path, "train", old.documents, old.text_bytes, **counts)
    replace(dataset, shards=(shard, *dataset.shards[1:])).save()
    return open_dataset(dataset.name)


def test_tokens_past_the_vocabulary_are_one_sentence(tokens):
    content = bytearray(tokens.files("train")[0].read_bytes())
    content[HEADER_BYTES + 20 : HEADER_BYTES + 22] = np.uint16(265).tobytes()
    source = open_source(rewrite(tokens, bytes(content), tokens=tokens.shards[0].tokens), "train", BYTES)
    with pytest.raises(UserError, match="holds the token 265, but the vocabulary has 265 tokens"):
        source.load(range(source.units))


def odd_parquet(path: Path, column: str, values: list, **options) -> bytes:
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.table({column: values}), path, **options)
    return path.read_bytes()


@pytest.mark.parametrize(
    ("content", "groups"),
    [
        (lambda path: odd_parquet(path, "body", ["a"]), 1),
        (lambda path: odd_parquet(path, "text", [1, 2]), 1),
        (lambda path: odd_parquet(path, "text", [["a"]]), 1),
        (lambda path: odd_parquet(path, "text", [b"\xff\xfe"]), 1),
        (lambda path: odd_parquet(path, "text", ["a"] * 9, row_group_size=3), 4),
        (lambda path: odd_parquet(path, "text", ["a"] * 9, row_group_size=3), 2),
        (lambda path: b"PAR1" + bytes(200) + b"PAR1", 1),
        (lambda path: b"plain text" * 20, 1),
    ],
)
def test_an_odd_parquet_shard_is_one_sentence(text, tmp_path, content, groups):
    dataset = rewrite(text, content(tmp_path / "odd.parquet"), row_groups=groups)
    with pytest.raises(UserError, match=r"is not what dataset\.json says"):
        list(read_texts(dataset, "train"))
