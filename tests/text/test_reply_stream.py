from hypothesis import given
from hypothesis import strategies as st

from nanorun.text.chat import ReplyStream
from nanorun.text.tokenizer import Tokenizer


def stream(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    reply = ReplyStream(tokenizer)
    return ["".join(text for _, text in pieces) for pieces in [*(reply.push(i) for i in ids), reply.flush()]]


# Single bytes are the first 256 ids, so half of these sequences are mostly broken UTF-8.
@given(ids=st.lists(st.integers(0, 511)) | st.lists(st.integers(120, 300)))
def test_streamed_text_is_the_decoded_text_for_any_ids(tokenizer: Tokenizer, ids: list[int]) -> None:
    ids = [i for i in ids if not tokenizer.is_special(i)]
    assert "".join(stream(tokenizer, ids)) == tokenizer.decode(ids)


@given(text=st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\ufffd")))
def test_no_half_character_is_ever_shown(tokenizer: Tokenizer, text: str) -> None:
    ids = [i for byte in text.encode() for i in byte_ids(tokenizer, byte)]
    shown = stream(tokenizer, ids)
    assert "".join(shown) == text
    assert "\ufffd" not in "".join(shown)
    assert shown[-1] == ""


def byte_ids(tokenizer: Tokenizer, byte: int) -> list[int]:
    return [next(i for i in range(256) if tokenizer.decode_bytes([i]) == bytes([byte]))]


def test_a_character_appears_with_its_last_byte(tokenizer: Tokenizer) -> None:
    ids = [i for byte in "é🎂".encode() for i in byte_ids(tokenizer, byte)]
    assert stream(tokenizer, ids) == ["", "é", "", "", "", "🎂", ""]


def test_an_incomplete_character_is_replaced_at_the_end_and_before_a_special_token(
    tokenizer: Tokenizer,
) -> None:
    half = [i for byte in "🎂".encode()[:3] for i in byte_ids(tokenizer, byte)]
    assert stream(tokenizer, half) == ["", "", "", "\ufffd"]
    end = tokenizer.special["<|assistant_end|>"]
    assert stream(tokenizer, [*half, end]) == ["", "", "", "\ufffd", ""]


def test_a_flushed_stream_decodes_the_next_character_afresh(tokenizer: Tokenizer) -> None:
    reply = ReplyStream(tokenizer)
    reply.push(byte_ids(tokenizer, 0xF0)[0])
    assert reply.flush() == [("text", "\ufffd")]
    assert reply.push(byte_ids(tokenizer, ord("a"))[0]) == [("text", "a")]
