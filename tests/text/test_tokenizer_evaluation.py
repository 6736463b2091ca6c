from collections.abc import Callable

import pytest

from nanorun.errors import UserError
from nanorun.hardware import usable_cores
from nanorun.text.evaluate import SAMPLES, bytes_per_token, evaluate_tokenizers
from nanorun.text.tokenizer import PATTERN, Tokenizer, special_ids_from


@pytest.fixture
def bytes_only() -> Tokenizer:
    return Tokenizer("bytes", PATTERN, {bytes([b]): b for b in range(256)}, special_ids_from(256))


def test_a_tokenizer_without_merges_has_one_byte_a_token(bytes_only: Tokenizer) -> None:
    (report,) = evaluate_tokenizers(["één woord", "twee  woorden hier"], [bytes_only])
    assert report["tokens"] == 29
    assert report["bytes_per_token"] == 1
    assert report["chars_per_token"] == pytest.approx(27 / 29)
    assert report["fertility"] == pytest.approx(29 / 5)
    assert report["roundtrip"]
    assert report["kinds"] == dict.fromkeys(SAMPLES, 1)


def test_reports_compare_tokenizers_on_the_same_texts(
    tokenizer: Tokenizer, bytes_only: Tokenizer, made_text: Callable[..., list[str]]
) -> None:
    texts = made_text(20, seed=7)
    small, plain = evaluate_tokenizers(texts, [tokenizer, bytes_only])
    assert (small["name"], plain["name"]) == ("small", "bytes")
    assert (small["vocab_size"], plain["vocab_size"]) == (512, 265)
    assert small["bytes_per_token"] == pytest.approx(bytes_per_token(tokenizer, texts))
    assert small["bytes_per_token"] > 2 * plain["bytes_per_token"]
    assert small["tokens"] == sum(len(tokenizer.encode(text)) for text in texts)
    for report in (small, plain):
        assert report["mb_per_s"] > 0
        assert report["mb_per_s_all"] > 0
        assert report["threads"] == usable_cores()
        assert report["roundtrip"]
        assert set(report["kinds"]) == set(SAMPLES)


def test_text_that_is_not_given_back_exactly_is_reported(tokenizer: Tokenizer) -> None:
    (report,) = evaluate_tokenizers(["fine", "lone \ud800 surrogate"], [tokenizer])
    assert not report["roundtrip"]


@pytest.mark.parametrize("texts", [[], [""]])
def test_nothing_to_evaluate_on_is_a_clear_error(tokenizer: Tokenizer, texts: list[str]) -> None:
    with pytest.raises(UserError, match="no text"):
        evaluate_tokenizers(texts, [tokenizer])
