import itertools
import warnings
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nanorun.errors import UserError
from nanorun.text.chat import (
    ConversationCut,
    Rendered,
    ReplyStream,
    fit_prompt,
    parse_reply,
    render,
    render_prompt,
)
from nanorun.text.tokenizer import SPECIAL_TOKENS, Tokenizer

Message = dict[str, Any]

text = st.lists(
    st.sampled_from([*SPECIAL_TOKENS, "<|endoftext|>", "<|", "|>", "user_end", " ", "\n"])
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=8),
    max_size=5,
).map("".join)
part = st.fixed_dictionaries({"type": st.sampled_from(["text", "python", "output"]), "text": text})
answer = text | st.lists(part, max_size=4)
pair = st.tuples(text, answer)


@st.composite
def conversations(draw: st.DrawFn, *, open_end: bool = False) -> list[Message]:
    messages: list[Message] = []
    if draw(st.booleans()):
        messages.append({"role": "system", "content": draw(text)})
    for question, reply in draw(st.lists(pair, min_size=0 if open_end else 1, max_size=4)):
        messages.append({"role": "user", "content": question})
        messages.append({"role": "assistant", "content": reply})
    if open_end:
        messages.append({"role": "user", "content": draw(text)})
    return messages


def user(content: Any) -> Message:
    return {"role": "user", "content": content}


def assistant(content: Any) -> Message:
    return {"role": "assistant", "content": content}


def system(content: Any) -> Message:
    return {"role": "system", "content": content}


def quietly(*args: Any) -> Rendered:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConversationCut)
        return render(*args)


# -- layout and mask ---------------------------------------------------------------------------------


def test_a_conversation_is_laid_out_with_its_markers_and_mask(tokenizer: Tokenizer) -> None:
    code = [
        {"type": "text", "text": "Let me see."},
        {"type": "python", "text": "6*7"},
        {"type": "output", "text": "42"},
        {"type": "text", "text": "It is 42."},
    ]
    rendered = render({"messages": [user("6*7?"), assistant(code)]}, tokenizer)
    assert rendered.dropped == 0
    assert tokenizer.decode(rendered.ids) == (
        "<|bos|><|user_start|>6*7?<|user_end|><|assistant_start|>Let me see.<|python_start|>6*7<|python_end|>"
        "<|output_start|>42<|output_end|>It is 42.<|assistant_end|>"
    )
    runs = [
        (mask, tokenizer.decode(i for i, _ in group))
        for mask, group in itertools.groupby(
            zip(rendered.ids, rendered.mask, strict=True), key=lambda pair: pair[1]
        )
    ]
    assert runs == [
        (0, "<|bos|><|user_start|>6*7?<|user_end|><|assistant_start|>"),
        (1, "Let me see.<|python_start|>6*7<|python_end|>"),
        (0, "<|output_start|>42<|output_end|>"),
        (1, "It is 42.<|assistant_end|>"),
    ]


def test_a_system_message_goes_before_the_first_user_message(tokenizer: Tokenizer) -> None:
    messages = [system("Be brief."), user("Hi"), assistant("Hello"), user("Bye")]
    assert tokenizer.decode(render({"messages": messages}, tokenizer).ids) == (
        "<|bos|><|user_start|>Be brief.\n\nHi<|user_end|><|assistant_start|>Hello<|assistant_end|>"
        "<|user_start|>Bye<|user_end|>"
    )


def test_texts_in_parts_are_one_user_message(tokenizer: Tokenizer) -> None:
    parts = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]
    assert render({"messages": [user(parts)]}, tokenizer) == render(
        {"messages": [user("one two")]}, tokenizer
    )


def learned_by_hand(messages: list[Message], tokenizer: Tokenizer) -> list[int]:
    """The tokens that carry mask 1, from the definition."""
    ids = []
    for message in messages:
        if message["role"] == "assistant":
            content = message["content"]
            for p in [{"type": "text", "text": content}] if isinstance(content, str) else content:
                inside = tokenizer.encode(p["text"])
                if p["type"] == "text":
                    ids += inside
                elif p["type"] == "python":
                    ids += [tokenizer.special["<|python_start|>"], *inside]
                    ids += [tokenizer.special["<|python_end|>"]]
            ids.append(tokenizer.special["<|assistant_end|>"])
    return ids


@given(messages=conversations())
def test_the_mask_covers_exactly_what_the_assistant_produces(
    tokenizer: Tokenizer, messages: list[Message]
) -> None:
    rendered = render({"messages": messages}, tokenizer)
    assert len(rendered.ids) == len(rendered.mask)
    assert set(rendered.mask) <= {0, 1}
    learned = [i for i, m in zip(rendered.ids, rendered.mask, strict=True) if m]
    assert learned == learned_by_hand(messages, tokenizer)


def count_of_markers(messages: list[Message]) -> dict[str, int]:
    users = sum(m["role"] == "user" for m in messages)
    answers = [m["content"] for m in messages if m["role"] == "assistant"]
    kinds = [p["type"] for content in answers if not isinstance(content, str) for p in content]
    return {
        "bos": 1,
        "user": users,
        "assistant": len(answers),
        "python": kinds.count("python"),
        "output": kinds.count("output"),
    }


def markers_in(ids: list[int], tokenizer: Tokenizer) -> dict[str, int]:
    def both(name: str) -> int:
        starts = ids.count(tokenizer.special[f"<|{name}_start|>"])
        assert starts == ids.count(tokenizer.special[f"<|{name}_end|>"])
        return starts

    return {"bos": ids.count(tokenizer.bos)} | {
        name: both(name) for name in ("user", "assistant", "python", "output")
    }


@given(messages=conversations())
def test_special_tokens_come_from_the_layout_and_never_from_the_text(
    tokenizer: Tokenizer, messages: list[Message]
) -> None:
    ids = render({"messages": messages}, tokenizer).ids
    assert markers_in(ids, tokenizer) == count_of_markers(messages)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(messages=conversations())
def test_special_tokens_never_come_from_the_text_with_gpt2(gpt2: Tokenizer, messages: list[Message]) -> None:
    ids = render({"messages": messages}, gpt2).ids
    assert ids[0] == 50_256
    assert markers_in(ids, gpt2) == count_of_markers(messages)


# -- conversations that are too long -----------------------------------------------------------------


@given(messages=conversations(), max_tokens=st.integers(0, 120))
def test_a_long_conversation_is_cut_at_a_message_boundary_after_an_answer(
    tokenizer: Tokenizer, messages: list[Message], max_tokens: int
) -> None:
    whole = render({"messages": messages}, tokenizer)
    cut = quietly({"messages": messages}, tokenizer, max_tokens)
    assert len(cut.ids) == len(cut.mask) <= max_tokens
    if len(whole.ids) <= max_tokens:
        assert cut == whole
        return
    kept = messages[: len(messages) - cut.dropped]
    if not kept:
        assert cut.ids == []
        first_pair = messages[: 3 if messages[0]["role"] == "system" else 2]
        assert len(render({"messages": first_pair}, tokenizer).ids) > max_tokens
        return
    assert kept[-1]["role"] == "assistant"
    assert cut.ids == render({"messages": kept}, tokenizer).ids
    longer = messages[: len(kept) + 2]
    assert len(render({"messages": longer}, tokenizer).ids) > max_tokens


def test_cutting_warns_with_what_was_left_out(tokenizer: Tokenizer) -> None:
    messages = [user("a"), assistant("b"), user("c" * 100), assistant("d")]
    with pytest.warns(ConversationCut, match=r"its last 2 of 4 messages \(\d+ tokens\)"):
        cut = render({"messages": messages}, tokenizer, 30)
    assert cut.dropped == 2
    assert tokenizer.decode(cut.ids).endswith("b<|assistant_end|>")
    with pytest.warns(ConversationCut, match="its last 4 of 4 messages"):
        assert render({"messages": messages}, tokenizer, 5) == Rendered([], [], 4)


def test_a_question_without_answer_is_dropped_only_when_something_must_go(tokenizer: Tokenizer) -> None:
    messages = [user("a"), assistant("b"), user("c")]
    whole = render({"messages": messages}, tokenizer)
    assert render({"messages": messages}, tokenizer, len(whole.ids)) == whole
    with pytest.warns(ConversationCut):
        assert render({"messages": messages}, tokenizer, len(whole.ids) - 1).dropped == 1


# -- prompts -----------------------------------------------------------------------------------------


@given(messages=conversations(open_end=True))
def test_a_prompt_is_the_rendered_conversation_and_the_start_of_an_answer(
    tokenizer: Tokenizer, messages: list[Message]
) -> None:
    prompt = render_prompt(messages, tokenizer)
    assert prompt == [
        *render({"messages": messages}, tokenizer).ids,
        tokenizer.special["<|assistant_start|>"],
    ]


@given(messages=conversations(open_end=True), max_tokens=st.integers(1, 120))
def test_a_long_prompt_loses_its_oldest_pairs_and_keeps_the_system_text(
    tokenizer: Tokenizer, messages: list[Message], max_tokens: int
) -> None:
    head = messages[:1] if messages[0]["role"] == "system" else []
    turns = messages[len(head) :]
    shorter = [render_prompt(head + turns[start:], tokenizer) for start in range(0, len(turns), 2)]
    fitting = [prompt for prompt in shorter if len(prompt) <= max_tokens]
    prompt = fitting[0] if fitting else shorter[-1]  # the newest message stays, however long it is
    assert fit_prompt(messages, tokenizer, max_tokens) == (prompt, 2 * shorter.index(prompt))


def test_a_shortened_prompt_tells_how_many_messages_it_lost(tokenizer: Tokenizer) -> None:
    messages = [system("S"), user("old"), assistant("x" * 50), user("new")]
    prompt, dropped = fit_prompt(messages, tokenizer, 20)
    assert dropped == 2
    assert tokenizer.decode(prompt) == "<|bos|><|user_start|>S\n\nnew<|user_end|><|assistant_start|>"


def test_a_prompt_must_end_with_the_user(tokenizer: Tokenizer) -> None:
    with pytest.raises(UserError, match=r"messages\[1\] is an assistant message"):
        render_prompt([user("a"), assistant("b")], tokenizer)


# -- replies -----------------------------------------------------------------------------------------


def normal(content: str | list[dict[str, str]]) -> list[dict[str, str]]:
    """Parts with neighbouring texts joined and empty texts gone."""
    parts: list[dict[str, str]] = []
    for p in [{"type": "text", "text": content}] if isinstance(content, str) else content:
        if p["type"] == "text" and not p["text"]:
            continue
        if parts and parts[-1]["type"] == p["type"] == "text":
            parts[-1] = {"type": "text", "text": parts[-1]["text"] + p["text"]}
        else:
            parts.append(dict(p))
    return parts


@given(content=answer)
def test_a_rendered_answer_is_parsed_back(tokenizer: Tokenizer, content: Any) -> None:
    ids = render({"messages": [user(""), assistant(content)]}, tokenizer).ids
    reply = ids[3:]
    assert reply[0] == tokenizer.special["<|assistant_start|>"]
    for form in (reply, reply[1:], reply[1:-1]):  # as rendered; as generated; without its end
        assert parse_reply(form, tokenizer) == normal(content)


@given(ids=st.lists(st.integers(0, 511) | st.integers(500, 511), max_size=40))
def test_any_generated_ids_can_be_parsed(tokenizer: Tokenizer, ids: list[int]) -> None:
    for p in parse_reply(ids, tokenizer):
        assert p["type"] in ("text", "python", "output")
        assert isinstance(p["text"], str)


def test_replies_that_break_the_layout_are_still_read(tokenizer: Tokenizer) -> None:
    def parse(*pieces: str) -> list[tuple[str, str]]:
        ids = [
            i
            for piece in pieces
            for i in ([tokenizer.special[piece]] if piece in tokenizer.special else tokenizer.encode(piece))
        ]
        return [(p["type"], p["text"]) for p in parse_reply(ids, tokenizer)]

    assert parse() == []
    assert parse("a", "<|python_start|>", "1+1") == [("text", "a"), ("python", "1+1")]
    assert parse("<|python_start|>", "1", "<|output_start|>", "2") == [("python", "1"), ("output", "2")]
    assert parse("a", "<|python_end|>", "b") == [("text", "ab")]
    assert parse("a", "<|assistant_end|>", "b") == [("text", "a")]
    assert parse("a", "<|user_start|>", "b") == [("text", "a")]
    assert parse("a", "<|bos|>", "b") == [("text", "a")]


def test_a_reply_comes_in_pieces_of_whole_characters_until_another_message_begins(
    tokenizer: Tokenizer,
) -> None:
    special, stream = tokenizer.special, ReplyStream(tokenizer)
    start, end = special["<|python_start|>"], special["<|python_end|>"]
    sign = tokenizer.encode("𒐫")
    assert len(sign) > 1, "it must take several tokens"
    ids = [*sign, start, *tokenizer.encode("1"), end, sign[0], special["<|user_start|>"], *sign]
    pieces = [stream.push(i) for i in ids]
    assert pieces[: len(sign)] == [*[[]] * (len(sign) - 1), [("text", "𒐫")]]
    assert pieces[len(sign) :] == [
        [("python", "")],
        [("python", "1")],
        [],
        [],
        [("text", "\ufffd")],
        *[[]] * len(sign),
    ]
    assert stream.ended


# -- bad conversations -------------------------------------------------------------------------------

bad: dict[str, tuple[Any, str]] = {
    "no object": ([], 'an object with "messages"'),
    "no messages": ({}, 'an object with "messages"'),
    "messages is text": ({"messages": "hi"}, "must be a list"),
    "messages is null": ({"messages": None}, "must be a list"),
    "empty": ({"messages": []}, "at least one user message"),
    "only system": ({"messages": [system("s")]}, "at least one user message"),
    "message is text": ({"messages": ["hi"]}, "messages[0] must be an object"),
    "no role": ({"messages": [{"content": "x"}]}, "messages[0] has role None"),
    "unknown role": (
        {"messages": [user("a"), {"role": "tool", "content": ""}]},
        "messages[1] has role 'tool'",
    ),
    "assistant first": ({"messages": [assistant("a")]}, "messages[0] has role 'assistant', expected 'user'"),
    "assistant after system": (
        {"messages": [system(""), assistant("a")]},
        "messages[1] has role 'assistant'",
    ),
    "two users": ({"messages": [user("a"), user("b")]}, "messages[1] has role 'user', expected 'assistant'"),
    "late system": (
        {"messages": [user("a"), system("b")]},
        "messages[1] has role 'system', expected 'assistant'",
    ),
    "no content": ({"messages": [{"role": "user"}]}, "messages[0] has content None"),
    "content is a number": ({"messages": [user("a"), assistant(5)]}, "messages[1] has content 5"),
    "part is text": ({"messages": [user("a"), assistant(["b"])]}, "messages[1] has part 'b'"),
    "part without text": ({"messages": [user("a"), assistant([{"type": "text"}])]}, "messages[1] has part"),
    "unknown part": (
        {"messages": [user("a"), assistant([{"type": "image", "text": ""}])]},
        "messages[1] has a part of type 'image'",
    ),
    "user runs code": (
        {"messages": [user([{"type": "python", "text": "1"}])]},
        "messages[0] has a part of type 'python'",
    ),
}


@pytest.mark.parametrize("fault", bad)
def test_a_bad_conversation_is_one_clear_error(tokenizer: Tokenizer, fault: str) -> None:
    conversation, message = bad[fault]
    with pytest.raises(UserError) as error:
        render(conversation, tokenizer)
    assert message in str(error.value)
    assert "\n" not in str(error.value)
