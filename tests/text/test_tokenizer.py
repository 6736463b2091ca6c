import base64
import functools
import hashlib
import json
import os
import random
import re
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nanorun.errors import UserError
from nanorun.text.store import GPT4_PATTERN, find_ranks, public_tokenizer
from nanorun.text.tokenizer import (
    _BLOCK,
    _NEVER_ALLOWED,
    CHAT_TOKENS,
    SPECIAL_TOKENS,
    Tokenizer,
    special_ids_from,
    train_tokenizer,
)

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=200)

# Whole special tokens and pieces of them, in any order, and the one string that tiktoken is told about.
pieces = [
    *SPECIAL_TOKENS,
    *_NEVER_ALLOWED,
    "<|endoftext|>",
    "<|",
    "|>",
    "<",
    "|",
    ">",
    "user",
    "_start",
    "bos",
    " ",
    "\n",
    "\0",
]
hostile = st.lists(st.sampled_from(pieces) | texts, max_size=12).map("".join)


MakeText = Callable[..., list[str]]


# -- ids ---------------------------------------------------------------------------------------------


def test_special_tokens_are_the_last_nine_ids_in_their_fixed_order(tokenizer: Tokenizer) -> None:
    assert tokenizer.vocab_size == 512
    assert [tokenizer.special[name] for name in SPECIAL_TOKENS] == list(range(503, 512))
    assert tokenizer.bos == 503
    assert [i for i in range(512) if tokenizer.is_special(i)] == list(range(503, 512))


@pytest.mark.parametrize(("vocab_size", "dtype"), [(2**16, np.uint16), (2**16 + 1, np.uint32)])
def test_tokens_take_16_bits_exactly_when_the_vocabulary_allows(vocab_size: int, dtype: type) -> None:
    ranks = {bytes([b]): b for b in range(256)}
    ranks |= {b"a" + i.to_bytes(3, "big"): i for i in range(256, vocab_size - 9)}
    large = Tokenizer("large", "(?s:.)", ranks, special_ids_from(len(ranks)))
    assert large.vocab_size == vocab_size
    tokens, _ = large.encode_documents(["abc"])
    assert large.dtype == tokens.dtype == dtype
    assert tokens.tolist() == [97, 98, 99]


def test_token_bytes_counts_bytes_and_gives_0_to_specials_and_padding(
    tokenizer: Tokenizer, made_text: MakeText
) -> None:
    lengths = tokenizer.token_bytes(padded_to=640)
    assert lengths.dtype == np.int32
    assert lengths.shape == (640,)
    assert (lengths[:503] > 0).all()
    assert (lengths[503:] == 0).all()
    text = "".join(made_text(3, seed=5))
    assert lengths[tokenizer.encode(text)].sum() == len(text.encode())
    assert np.array_equal(tokenizer.token_bytes(), lengths[:512])
    with pytest.raises(ValueError):
        tokenizer.token_bytes(padded_to=511)


# -- encoding and decoding ---------------------------------------------------------------------------


@given(text=texts)
def test_decode_gives_back_what_was_encoded(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


@given(text=hostile)
def test_no_text_becomes_a_special_token(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert all(0 <= i < 503 for i in ids)
    assert tokenizer.decode(ids) == text
    assert tokenizer.encode_documents([text])[0].tolist() == ids


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=hostile)
def test_no_text_becomes_a_special_token_of_gpt2(gpt2: Tokenizer, text: str) -> None:
    ids = gpt2.encode(text)
    assert all(0 <= i < 50_256 for i in ids)
    assert gpt2.decode(ids) == text
    assert gpt2.encode_documents([text])[0].tolist() == ids


@given(batch=st.lists(hostile, max_size=20), threads=st.integers(1, 4))
def test_encode_documents_is_encode_of_each_text(
    tokenizer: Tokenizer, batch: list[str], threads: int
) -> None:
    tokens, offsets = tokenizer.encode_documents(batch, threads)
    assert tokens.dtype == tokenizer.dtype
    assert offsets.dtype == np.int64
    assert len(offsets) == len(batch) + 1
    assert offsets[0] == 0
    assert offsets[-1] == len(tokens)
    for text, a, b in zip(batch, offsets[:-1], offsets[1:], strict=True):
        assert tokens[a:b].tolist() == tokenizer.encode(text)


def test_encode_documents_does_not_depend_on_the_number_of_threads(
    tokenizer: Tokenizer, made_text: MakeText
) -> None:
    batch = made_text(300, seed=3)
    one = tokenizer.encode_documents(batch, 1)
    for threads in (2, 3):
        for a, b in zip(one, tokenizer.encode_documents(batch, threads), strict=True):
            assert np.array_equal(a, b)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_threads_work_in_a_forked_child_too(tokenizer: Tokenizer, made_text: MakeText) -> None:
    batch = made_text(20)
    expected = tokenizer.encode_documents(batch, 2)[0]
    child = os.fork()
    if child == 0:
        os._exit(0 if np.array_equal(tokenizer.encode_documents(batch, 2)[0], expected) else 1)
    deadline = time.monotonic() + 20
    while (done := os.waitpid(child, os.WNOHANG))[0] == 0 and time.monotonic() < deadline:
        time.sleep(0.01)
    if done[0] == 0:
        os.kill(child, 9)
        os.waitpid(child, 0)
    assert done == (child, 0)


def test_lone_surrogates_become_the_replacement_sign_and_pairs_are_joined(tokenizer: Tokenizer) -> None:
    for text, meant in [
        ("a\ud800b", "a\ufffdb"),
        ("\udc00", "\ufffd"),
        ("x\ud83c\udf82y", "x🎂y"),
        ("\ufeff\ud800", "\ufeff\ufffd"),
        ("\ud800" + " " * 200_000, "\ufffd" + " " * 200_000),
    ]:
        assert tokenizer.encode(text) == tokenizer.encode(meant)
        assert tokenizer.decode(tokenizer.encode(text)) == meant
        assert tokenizer.encode_documents([text])[0].tolist() == tokenizer.encode(meant)


@functools.cache
def extreme_texts() -> dict[str, str]:
    rng = random.Random(0)
    unicode = (c for c in iter(lambda: rng.randrange(0x110000), None) if not 0xD800 <= c < 0xE000)
    return {
        "empty": "",
        "nul": "\0" * 1000 + "\0<|never|>\0",
        "spaces": " " * 5_000_000,
        "spaces, then a word": " " * 1_500_000 + "x",
        "tabs and spaces": "x" + " \t" * 1_000_000 + "y",
        "wide spaces": "\u3000" * 1_200_000,
        "newlines": "\n" * 1_500_000,
        "one letter": "a" * 5_000_000,
        "random unicode": "".join(chr(next(unicode)) for _ in range(250_000)),
        "digits": "".join(rng.choices("0123456789", k=1_000_000)),
        "signs": "!?" * 500_000,
    }


@pytest.mark.parametrize("kind", extreme_texts())
@pytest.mark.parametrize("which", ["small", "gpt2"])
def test_extreme_texts_encode_in_reasonable_time_and_come_back(
    kind: str, which: str, tokenizer: Tokenizer, request: pytest.FixtureRequest
) -> None:
    used = tokenizer if which == "small" else request.getfixturevalue("gpt2")
    text = extreme_texts()[kind]
    start = time.process_time()
    tokens, _ = used.encode_documents([text])
    assert time.process_time() - start < 2 + 3e-6 * len(
        text
    )  # several times what it takes; quadratic is hours
    assert used.decode(tokens.tolist()) == text
    assert used.encode(text) == tokens.tolist()


def test_texts_without_a_blank_block_are_encoded_as_tiktoken_does(
    gpt2: Tokenizer, shared_data: Path, made_text: MakeText
) -> None:
    import tiktoken
    from tiktoken.load import load_tiktoken_bpe

    plain = tiktoken.Encoding(
        "plain",
        pat_str=gpt2.pattern,
        mergeable_ranks=load_tiktoken_bpe(str(shared_data / "gpt2.tiktoken")),
        special_tokens={},
    )
    for text in ["\n".join(made_text(400)), "word " * _BLOCK, "a" + " " * (_BLOCK - 2) + "b" * _BLOCK]:
        assert gpt2.encode(text) == plain.encode_ordinary(text)


def test_decode_shows_special_tokens_by_name_and_broken_characters_as_replacement(
    tokenizer: Tokenizer,
) -> None:
    ids = [tokenizer.bos, *tokenizer.encode("hi"), tokenizer.special["<|user_end|>"]]
    assert tokenizer.decode(ids) == "<|bos|>hi<|user_end|>"
    assert tokenizer.decode(np.array(ids, dtype=np.uint16)) == "<|bos|>hi<|user_end|>"
    euro = "€".encode()
    single = [next(i for i in range(256) if tokenizer.decode_bytes([i]) == bytes([b])) for b in euro]
    assert tokenizer.decode_bytes(single) == euro
    assert tokenizer.decode(single[:2]) == "\ufffd"


@pytest.mark.parametrize("bad", [512, 70_000, -1])
def test_decoding_an_id_outside_the_vocabulary_is_a_clear_error(tokenizer: Tokenizer, bad: int) -> None:
    with pytest.raises(UserError, match="outside the vocabulary of 'small'"):
        tokenizer.decode([1, bad])


# -- training ----------------------------------------------------------------------------------------


def test_the_same_text_gives_the_same_tokenizer(tokenizer: Tokenizer, made_text: MakeText) -> None:
    again = train_tokenizer(iter(made_text()), 512, "again")
    assert again.fingerprint == tokenizer.fingerprint
    other = train_tokenizer(made_text(seed=1), 512, "small")
    assert other.fingerprint != tokenizer.fingerprint


def test_training_records_what_it_was_trained_on(tokenizer: Tokenizer, made_text: MakeText) -> None:
    record = tokenizer.trained_on
    assert record["dataset"] == "made"
    assert record["bytes"] == sum(len(text.encode()) for text in made_text())
    assert record["seconds"] > 0
    assert record["trainer"] == "rustbpe"
    assert record["trainer_version"]


def test_too_little_text_says_which_vocabulary_it_fills() -> None:
    with pytest.raises(UserError, match=r"they fill (\d+)") as error:
        train_tokenizer(["hello hello hello"], 1000, "tiny")
    reachable = int(str(error.value).split("at most ")[1].split(",")[0])
    assert train_tokenizer(["hello hello hello"], reachable, "tiny").vocab_size == reachable


@pytest.mark.parametrize("vocab_size", [0, 265, 2**20 + 1])
def test_impossible_vocabulary_sizes_are_refused(vocab_size: int) -> None:
    with pytest.raises(UserError, match="266 to 1048576"):
        train_tokenizer(["text"], vocab_size, "bad")


def test_training_survives_extreme_text(made_text: MakeText) -> None:
    odd = [*made_text(), " " * 1_500_000, "a" * 1_000_000, "x\ud800y", "", "\0"]
    trained = train_tokenizer(odd, 300, "odd")
    assert trained.decode(trained.encode("x\0 y")) == "x\0 y"


def test_training_reads_long_texts_to_their_end() -> None:
    trained = train_tokenizer(["a b " * _BLOCK + "zebra " * 1000], 272, "long")
    assert len(trained.encode(" zebra")) == 1


def test_training_without_rustbpe_names_the_pip_command(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "rustbpe", None)
    with pytest.raises(UserError, match="pip install rustbpe"):
        train_tokenizer(["text"], 300, "none")


# -- files -------------------------------------------------------------------------------------------


@pytest.fixture
def saved(tokenizer: Tokenizer, tmp_path: Path) -> Path:
    tokenizer.save(tmp_path)
    return tmp_path


def test_a_loaded_tokenizer_is_the_saved_one(tokenizer: Tokenizer, saved: Path, made_text: MakeText) -> None:
    loaded = Tokenizer.load(saved)
    assert sorted(path.name for path in saved.iterdir()) == ["ranks.tiktoken", "tokenizer.json"]
    assert loaded.fingerprint == tokenizer.fingerprint
    assert (loaded.name, loaded.vocab_size, loaded.bos) == ("small", 512, 503)
    assert loaded.special == tokenizer.special
    assert loaded.trained_on == tokenizer.trained_on
    for text in made_text(5, seed=9):
        assert loaded.encode(text) == tokenizer.encode(text)


def test_the_ranks_file_is_what_tiktoken_itself_reads(tokenizer: Tokenizer, saved: Path) -> None:
    from tiktoken.load import load_tiktoken_bpe

    ranks = load_tiktoken_bpe(str(saved / "ranks.tiktoken"))
    assert {rank: token for token, rank in ranks.items()} == {
        i: tokenizer.decode_bytes([i]) for i in range(503)
    }


def change_config(folder: Path, **changes: object) -> None:
    path = folder / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text("utf-8")) | changes), "utf-8")


def change_ranks(folder: Path, lines: list[bytes]) -> None:
    """Ranks that say something else, with the checksum to match."""
    content = b"\n".join(lines) + b"\n"
    (folder / "ranks.tiktoken").write_bytes(content)
    change_config(folder, ranks_sha256=hashlib.sha256(content).hexdigest())


def test_a_changed_ranks_file_is_found_by_its_checksum(saved: Path) -> None:
    path = saved / "ranks.tiktoken"
    content = bytearray(path.read_bytes())
    content[100] ^= 1
    path.write_bytes(content)
    with pytest.raises(UserError, match="damaged"):
        Tokenizer.load(saved)
    path.write_bytes(content[:-20])
    with pytest.raises(UserError, match="damaged"):
        Tokenizer.load(saved)


@pytest.mark.parametrize("name", ["tokenizer.json", "ranks.tiktoken"])
def test_a_missing_file_is_named(saved: Path, name: str) -> None:
    (saved / name).unlink()
    with pytest.raises(UserError, match=f"{name}.*No such file"):
        Tokenizer.load(saved)


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"\xff\xfe", b"[" * 100_000, b"[]", b"null", b'{"format": "other"}'],
    ids=["empty", "half", "no utf-8", "deep", "list", "null", "other format"],
)
def test_a_config_that_is_none_is_refused(saved: Path, content: bytes) -> None:
    (saved / "tokenizer.json").write_bytes(content)
    with pytest.raises(UserError, match=r"tokenizer\.json is (damaged|not a nanorun)"):
        Tokenizer.load(saved)


def test_files_of_absurd_size_are_not_read(saved: Path) -> None:
    with (saved / "tokenizer.json").open("ab") as file:
        file.truncate(2**33)
    with pytest.raises(UserError, match="bytes, at most"):
        Tokenizer.load(saved)


special = special_ids_from(503)
config_damage: dict[str, tuple[dict[str, object], str]] = {
    "newer version": ({"version": 2}, "has version 2"),
    "pattern does not compile": ({"pattern": "("}, "not a valid regular expression"),
    "pattern is empty": ({"pattern": ""}, "matches the empty string"),
    "pattern may match nothing": ({"pattern": r"\S+|x*"}, "matches the empty string"),
    "pattern skips characters": ({"pattern": r"\w+"}, "leaves out characters"),
    "pattern is no text": ({"pattern": None}, "pattern is null, not text"),
    "vocab_size differs": ({"vocab_size": 600}, "vocab_size 600"),
    "vocab_size is a truth value": ({"vocab_size": True}, "vocab_size is true, not a whole number"),
    "special missing": ({"special_tokens": {"<|bos|>": 503}}, "lacks the special token '<|user_start|>'"),
    "no specials": ({"special_tokens": {}}, "lacks the special token"),
    "special id is ordinary": ({"special_tokens": special | {"<|bos|>": 5}}, "id 5, which is an ordinary"),
    "special id negative": ({"special_tokens": special | {"<|bos|>": -1}}, "id -1"),
    "special id twice": ({"special_tokens": special | {"<|bos|>": 504}}, "the same id"),
    "special id huge": ({"special_tokens": special | {"<|bos|>": 2**40}}, "above the limit"),
    "special id is text": (
        {"special_tokens": special | {"<|bos|>": "503"}},
        '<|bos|> is "503", not a whole number',
    ),
    "special with an odd name": ({"special_tokens": special | {"\ud800": 512}}, "special token named"),
    "bos unknown": ({"bos": "<|other|>"}, "lacks the special token '<|other|>'"),
    "name is a path": ({"name": "../x"}, "cannot name a tokenizer"),
    "checksum missing": ({"ranks_sha256": None}, "ranks_sha256 is null, not text"),
}


@pytest.mark.parametrize("damage", config_damage)
def test_an_inconsistent_config_is_one_clear_error(saved: Path, damage: str) -> None:
    changes, message = config_damage[damage]
    change_config(saved, **changes)
    with pytest.raises(UserError, match=re.escape(message)):
        Tokenizer.load(saved)


def rank_damage() -> dict[str, tuple[list[bytes], str]]:
    lines = [b"%s %d" % (base64.b64encode(bytes([b])), b) for b in range(256)]
    return {
        "gap": ([*lines, b"YWI= 300"], "not 0 to 256"),
        "byte missing": ([*lines[1:], b"YWI= 0"], "lacks 1 of the 256"),
        "negative": ([*lines, b"YWI= -1"], "not 0 to"),
        "no base64": ([*lines, b"*** 256"], "line 257"),
        "no number": ([*lines, b"YWI= x"], "line 257"),
        "three columns": ([*lines, b"YWI= 256 7"], "line 257"),
        "empty": ([], "lacks 256"),
    }


@pytest.mark.parametrize("damage", rank_damage())
def test_inconsistent_ranks_are_one_clear_error(saved: Path, damage: str) -> None:
    lines, message = rank_damage()[damage]
    change_ranks(saved, lines)
    with pytest.raises(UserError, match=message):
        Tokenizer.load(saved)


def test_a_token_with_two_ranks_is_refused(saved: Path) -> None:
    lines = (saved / "ranks.tiktoken").read_bytes().split(b"\n")[:-1]
    token = lines[300].split(b" ")[0]
    change_ranks(saved, [*lines[:400], token + b" 400", *lines[401:]])
    with pytest.raises(UserError, match="not 0 to"):
        Tokenizer.load(saved)


def test_fingerprint_tells_apart_what_encodes_differently(tokenizer: Tokenizer) -> None:
    ranks = {tokenizer.decode_bytes([i]): i for i in range(503)}
    swapped = ranks | {tokenizer.decode_bytes([400]): 401, tokenizer.decode_bytes([401]): 400}
    assert Tokenizer("x", tokenizer.pattern, ranks, special).fingerprint == tokenizer.fingerprint
    for pattern, other_ranks, other_special in [
        ("(?s:.)", ranks, special),
        (tokenizer.pattern, swapped, special),
        (tokenizer.pattern, ranks, {k: v + 1 for k, v in special.items()}),
    ]:
        assert Tokenizer("x", pattern, other_ranks, other_special).fingerprint != tokenizer.fingerprint


# -- GPT-2's and GPT-4's -----------------------------------------------------------------------------


def test_gpt2_has_its_known_ids_and_the_chat_tokens_after_them(gpt2: Tokenizer, tmp_path: Path) -> None:
    assert gpt2.vocab_size == 50_265
    assert gpt2.dtype == np.uint16
    assert gpt2.bos == gpt2.special["<|endoftext|>"] == 50_256
    assert [gpt2.special[name] for name in CHAT_TOKENS] == list(range(50_257, 50_265))
    assert gpt2.encode("Hello world") == [15496, 995]
    assert gpt2.encode("<|endoftext|>") == [27, 91, 437, 1659, 5239, 91, 29]
    assert gpt2.decode([50_256, 15496]) == "<|endoftext|>Hello"
    gpt2.save(tmp_path)
    loaded = Tokenizer.load(tmp_path)
    assert loaded.fingerprint == gpt2.fingerprint
    assert loaded.bos == 50_256


def test_ranks_of_another_vocabulary_are_not_taken_for_gpts(saved: Path) -> None:
    for name in ("gpt2", "gpt4"):
        with pytest.raises(UserError, match="does not hold the ranks of"):
            public_tokenizer(name, saved / "ranks.tiktoken")


def test_gpt4_has_its_known_ids_where_its_ranks_are_here() -> None:
    found = find_ranks("gpt4")
    if found is None:
        pytest.skip("no cl100k_base.tiktoken on this machine")
    gpt4 = public_tokenizer("gpt4", found)
    assert (gpt4.vocab_size, gpt4.bos, gpt4.dtype) == (100_285, 100_257, np.uint32)
    assert gpt4.special["<|user_start|>"] == 100_277
    assert gpt4.encode("Hello world") == [9906, 1917]


@pytest.mark.parametrize("text", [" " * 2_000_000, " " * 2_000_000 + "x", "\r\n" * 600_000, "7" * 600_000])
def test_gpt4s_pattern_takes_long_runs_too(text: str) -> None:
    plain = Tokenizer("plain", GPT4_PATTERN, {bytes([b]): b for b in range(256)}, special_ids_from(256))
    assert plain.decode(plain.encode_documents([text])[0].tolist()) == text


def test_ids_in_the_gaps_before_the_special_tokens_are_empty() -> None:
    ranks = {bytes([b]): b for b in range(256)}
    gaps = {"<|endoftext|>": 257} | {name: 277 + i for i, name in enumerate(CHAT_TOKENS)}
    gapped = Tokenizer("gaps", "(?s:.)", ranks, gaps, bos="<|endoftext|>")
    assert gapped.vocab_size == 285
    assert gapped.decode([65, 256, 260, 66]) == "AB"
    assert not gapped.is_special(260)
    assert gapped.token_bytes()[256:].sum() == 0


def test_ranks_are_looked_for_in_home_then_in_tiktokens_cache_then_in_the_shared_folder(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    work, cache = tmp_path / "work", tmp_path / "cache"
    work.mkdir()
    cache.mkdir()
    monkeypatch.chdir(work)
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(cache))
    assert find_ranks("gpt2") is None
    places = [
        tmp_path / "shared" / "data" / "gpt2.tiktoken",
        cache
        / hashlib.sha1(
            b"https://openaipublic.blob.core.windows.net/encodings/r50k_base.tiktoken"
        ).hexdigest(),
        home / "tokenizers" / "gpt2.tiktoken",
    ]
    for place in places:  # each is preferred to the one before
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(b"")
        found = find_ranks("gpt2")
        assert found is not None
        assert found.resolve() == place.resolve()
    assert find_ranks("gpt4") is None
