import random
import time
import warnings

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nanorun.text.chat import parse_reply
from nanorun.text.tokenizer import SPECIAL_TOKENS, Tokenizer, train_tokenizer
from nanorun.tools import calls as calls_module
from nanorun.tools.calculator import MAX_SIZE
from nanorun.tools.calls import ToolCall, ToolError, ToolState, calculate

# -- the calculator ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("12+30", "42"),
        ("48/2", "24"),
        ("7/2", "3.5"),
        ("6/2", "3"),
        ("0.1+0.2", "0.3"),
        ("1/3", "0.333333333333"),
        ("10**15/1", "1000000000000000.0"),
        ("123456789012345.0", "123456789012345"),
        ("-0.0", "0"),
        ("2.5e-7", "2.5e-07"),
        ("2**100", "1267650600228229401496703205376"),
        ("-7//2", "-4"),
        ("-7 % 3", "2"),
        ("  5*(3+2) = ", "25"),
        ("3 × 4 ÷ 2 − 1", "5"),
        ("round(2.567, 2)", "2.57"),
        ("round(2.5)", "2"),
        ("round(1234, -2)", "1200"),
        ("max(1,200)", "200"),
        ("min([3, 1, 2]) + sum([1, 2])", "4"),
        ("sqrt(2)**2", "2"),
        ("abs(-3) + int('12') + float('0.5')", "15.5"),
        ("3 < 4 <= 4 != 5", "True"),
        ("not 3 or 0 and 1/0", "0"),
        ("'strawberry'.count('r')", "3"),
        ("len('strawberry')", "10"),
        ("'strawberry'[::-1]", "yrrebwarts"),
        ("'strawberry'[2] + \"abc\"[-1]", "rc"),
        ("'Hello'.upper().replace('L', 'l')", "HEllO"),
        ("'straw' in 'strawberry'", "True"),
        ("'-'.join(sorted('cab'))", "a-b-c"),
        ("len('a b c'.split())", "3"),
        ("list('abc')", "['a', 'b', 'c']"),
        ("'ab' * 3", "ababab"),
        ("str(3.0) + str(2)", "3.02"),
    ],
)
def test_the_calculator_evaluates(expression: str, value: str) -> None:
    assert calculate(expression) == value


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("1,000+5", "1005"),
        ("1,234,567*2", "2469134"),
        ("(1,000+2,000)/3", "1000"),
        ("12,500.50*2", "25001"),
        ("max(1,200)", "200"),
        ("'1,000'.count(',')", "1"),
    ],
)
def test_thousands_separators_are_accepted_where_unambiguous(expression: str, value: str) -> None:
    assert calculate(expression) == value


UNKNOWN, LARGE = "not an expression the calculator knows", "too large"


@pytest.mark.parametrize(
    ("expression", "reason"),
    [
        ("1/0", "division by zero"),
        ("5 % 0", "division by zero"),
        ("0 ** -1", "division by zero"),
        ("9**9**9", LARGE),
        ("2**1024", LARGE),
        ("10**300 * 10**300", LARGE),
        ("1e308*10", LARGE),
        ("float('inf')", LARGE),
        ("float('nan')", "not a real number"),
        ("(-8)**0.5", "not a real number"),
        ("'a'*10**10", LARGE),
        ("10**10*'a'", LARGE),
        ("('a'*4000)+'a'", LARGE),
        ("'a'.replace('a','b'*10**6)", LARGE),
        ("('a'*2000).replace('a','b'*2000)", LARGE),
        ("('a'*60).replace('','b'*100)", LARGE),
        ("('a'*2000).join('b'*2000)", LARGE),
        ("round(5, -10**9)", LARGE),
        ("str(10**1000)", LARGE),
        ("int('9'*4000)", LARGE),
        ("list('a'*4000)", LARGE),
        ("'ß'*4000 and ('ß'*4000).upper()", LARGE),
        ("+".join("1" * 300), LARGE),
        ("'a'.ljust(10**9)", UNKNOWN),
        ("'a'.zfill(10**9)", UNKNOWN),
        ("'a\\tb'.expandtabs(10**9)", UNKNOWN),
        ("1<<10**9", UNKNOWN),
        ("f'{1:>1000000000}'", UNKNOWN),
        ("'{:>1000000000}'.format(1)", UNKNOWN),
        ("'%1000000000d' % 1", "not the right kind of value"),
        ("[1]*10**9", "not the right kind of value"),
        ("[[1]]", UNKNOWN),
        ("[list('ab')]", UNKNOWN),
        ("().__class__.__base__.__subclasses__()", UNKNOWN),
        ("''.__class__", UNKNOWN),
        ("abs.__self__", UNKNOWN),
        ("len.__call__('a')", UNKNOWN),
        ("__import__('os').system('id')", UNKNOWN),
        ("open('/etc/passwd').read()", UNKNOWN),
        ("eval('1')", UNKNOWN),
        ("print(1)", UNKNOWN),
        ("(lambda: 1)()", UNKNOWN),
        ("[x for x in 'abc']", UNKNOWN),
        ("(x := 1)", UNKNOWN),
        ("max(*[1, 2])", UNKNOWN),
        ("max([1], key=abs)", UNKNOWN),
        ("import os", UNKNOWN),
        ("x", UNKNOWN),
        ("1j", UNKNOWN),
        ("b'a'", UNKNOWN),
        ("None", UNKNOWN),
        ("", UNKNOWN),
        ("3 +", UNKNOWN),
        ("1 2", UNKNOWN),
        ("12,34", UNKNOWN),
        ("1,0000", UNKNOWN),
        ("\0", UNKNOWN),
        ("\udc80", UNKNOWN),
        ("(" * 500 + "1" + ")" * 400, UNKNOWN),
        ("-" * 900 + "1", LARGE),
        ("1" * 1001, "too long"),
        ("'abc'[7]", "index out of range"),
        ("'abc'.index('z')", "substring not found"),
        ("1 + 'a'", "unsupported operand type(s) for +: 'int' and 'str'"),
    ],
)
def test_the_calculator_refuses_with_a_reason(expression: str, reason: str) -> None:
    with pytest.raises(ToolError) as refused:
        calculate(expression)
    assert str(refused.value) == reason


def seconds(expression: str) -> float:
    """CPU time of a calculation; fails on anything but a short text or a ToolError with a reason."""
    start = time.thread_time()
    try:
        said = calculate(expression)
    except ToolError as error:
        said = str(error) or pytest.fail("no reason")
    assert len(said) <= MAX_SIZE
    return time.thread_time() - start


def in_time(expression: str) -> None:
    assert any(seconds(expression) < 0.05 for _ in range(3))  # again when a garbage collection came between


atoms = st.sampled_from(
    "0 1 7 -3 2.5 1e308 9**9 10**300 True 'a' '' 'strawberry' 'ß'*999 'ab'*2000 [1,2] ['a','b'] [] (1) x "
    "1,000 __import__ ().__class__ f'{1:>99999}' '%999999d'%1 lambda:1 None 1j {} {1:2} \\ # 1if".split()
)


def compound(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    operators = st.sampled_from("+ - * / // % ** < == in << and or , = if @ & . :=".split())
    names = st.sampled_from(
        "abs round min max sum len int float str sqrt sorted list reversed eval "
        "'a'.count 'a'.replace 'ab'.join 'a'.ljust 'a'.split [1].index x.__class__".split()
    )
    return (
        st.tuples(inner, operators, inner).map(lambda t: f"({t[0]}){t[1]}({t[2]})")
        | st.tuples(names, inner, inner).map(lambda t: f"{t[0]}({t[1]},{t[2]})")
        | st.tuples(names, inner).map(lambda t: f"{t[0]}({t[1]})")
        | st.tuples(inner, inner, inner).map(lambda t: f"({t[0]})[{t[1]}:{t[2]}]")
        | st.tuples(st.sampled_from(["-", "not ", "~", "*", "[", "("]), inner).map("".join)
    )


@settings(max_examples=1000, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.recursive(atoms, compound, max_leaves=12))
def test_any_expression_ends_soon_with_a_value_or_tool_error(expression: str) -> None:
    in_time(expression)


@settings(max_examples=500, deadline=None)
@given(st.text(max_size=1200) | st.text("0123456789+-*/.,()[]{}'\"= \n<>%ae_:\\", max_size=200))
def test_any_text_ends_soon_with_a_value_or_tool_error(text: str) -> None:
    in_time(text)


@pytest.mark.parametrize("piece", ["(", "[", "{", "-", "not ", "f(", "{1:", "(1for ", "lambda:", "1if ", "'"])
@pytest.mark.parametrize("times", [20, 40, 200, 1000])
def test_deep_nesting_is_answered_at_once_and_without_warnings(piece: str, times: int) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for ending in ("", "1", ":", "1" + ")" * times):
            in_time(piece * times + ending)
            in_time((piece * times)[:900] + ending)
    assert caught == []


def test_arithmetic_agrees_with_python() -> None:
    rng = random.Random(0)
    for _ in range(500):
        numbers = [rng.choice([rng.randrange(1, 100), round(rng.uniform(0.1, 99), 2)]) for _ in range(4)]
        a, b, c, d = numbers
        p, q, r = rng.choices(["+", "-", "*", "/", "//", "%"], k=3)
        expression = rng.choice(
            [f"{a}{p}{b}{q}{c}{r}{d}", f"({a}{p}{b}){q}({c}*{d})", f"-{a}{p}({b}*{c}){r}{d}"]
        )
        assert float(calculate(expression)) == pytest.approx(eval(expression), rel=1e-11, abs=1e-11)


# -- calls in a reply --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer(
        ["12 + 30 = 42, 'strawberry'.count('r') error: division by zero"] * 9, 300, "tools"
    )


def ids(tokenizer: Tokenizer, text: str) -> list[int]:
    """Tokens of a reply in which the names of special tokens are special tokens."""
    found = []
    while text:
        starts = [(text.find(name), name) for name in SPECIAL_TOKENS if name in text]
        at, name = min(starts, default=(len(text), ""))
        found += tokenizer.encode(text[:at]) + ([tokenizer.special[name]] if name else [])
        text = text[at + len(name) :]
    return found


def converse(tokenizer: Tokenizer, sampled: str) -> str:
    """The whole reply when the model samples this and the calculator answers, as text."""
    state, reply = ToolState(tokenizer), list[int]()
    for token_id in ids(tokenizer, sampled):
        reply.append(token_id)
        call = state.push(token_id)
        if call:
            reply += state.answer(call)
    return tokenizer.decode(reply)


def test_a_call_is_followed_by_its_output(tokenizer: Tokenizer) -> None:
    reply = converse(tokenizer, "It is <|python_start|>12+30<|python_end|> then.<|assistant_end|>")
    assert reply == (
        "It is <|python_start|>12+30<|python_end|><|output_start|>42<|output_end|> then.<|assistant_end|>"
    )


def test_a_reply_with_a_call_parses_into_its_parts(tokenizer: Tokenizer) -> None:
    reply = converse(tokenizer, "So <|python_start|>6*7<|python_end|>: 42<|assistant_end|>")
    parts = parse_reply(ids(tokenizer, reply), tokenizer)
    assert [part["type"] for part in parts] == ["text", "python", "output", "text"]
    assert parts[2]["text"] == "42"


def test_text_without_a_call_forces_nothing(tokenizer: Tokenizer) -> None:
    said = "12+30 <|python_end|> and <|output_start|>7<|output_end|>"
    assert converse(tokenizer, said) == said


def test_an_error_becomes_an_output(tokenizer: Tokenizer) -> None:
    reply = converse(tokenizer, "<|python_start|>1/0<|python_end|>")
    assert reply.endswith("<|output_start|>error: division by zero<|output_end|>")


def test_a_restarted_call_begins_at_its_last_start(tokenizer: Tokenizer) -> None:
    reply = converse(tokenizer, "<|python_start|>9**<|python_start|>1+1<|python_end|>")
    assert reply.endswith("1+1<|python_end|><|output_start|>2<|output_end|>")


@pytest.mark.parametrize("other", [name for name in SPECIAL_TOKENS if "python" not in name])
def test_another_special_token_ends_an_open_call_without_running_it(tokenizer: Tokenizer, other: str) -> None:
    said = f"<|python_start|>1+1{other}2<|python_end|>"
    assert converse(tokenizer, said) == said


def test_an_output_written_by_the_model_is_not_taken_for_the_tools(tokenizer: Tokenizer) -> None:
    said = "<|output_start|>9<|output_end|><|python_start|>1+1<|python_end|>"
    assert converse(tokenizer, said) == said + "<|output_start|>2<|output_end|>"


def test_a_call_that_is_too_long_is_closed_and_not_run(tokenizer: Tokenizer) -> None:
    state = ToolState(tokenizer, lambda code: pytest.fail("it was run"))
    state.push(tokenizer.special["<|python_start|>"])
    digit = tokenizer.encode("1")[0]
    calls = [call for call in (state.push(digit) for _ in range(5000)) if call]
    assert [call.closed for call in calls] == [False]
    forced = tokenizer.decode(state.answer(calls[0]))
    said = "error: the code is longer than 1024 tokens"
    assert forced == f"<|python_end|><|output_start|>{said}<|output_end|>"


def test_the_number_of_calls_in_a_reply_is_limited(tokenizer: Tokenizer) -> None:
    reply = converse(tokenizer, "<|python_start|>1+1<|python_end|>" * 18)
    assert reply.count("<|output_start|>2<|output_end|>") == 16
    assert reply.count("error: only 16 calls are run in a reply") == 2


def test_output_is_truncated_at_its_limit(tokenizer: Tokenizer) -> None:
    state = ToolState(tokenizer)
    assert len(state.result(ToolCall("x"), "42 " * 100_000)) == 256 + 2
    assert len(state.result(ToolCall("x"), "")) == 2


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.sampled_from(SPECIAL_TOKENS) | st.text(max_size=9), max_size=6).map("".join))
def test_output_never_becomes_special_tokens(tokenizer: Tokenizer, text: str) -> None:
    forced = ToolState(tokenizer).result(ToolCall("x"), text)
    assert [tokenizer.is_special(i) for i in forced] == [True, *[False] * (len(forced) - 2), True]


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_any_sequence_of_tokens_is_accepted(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, data: st.DataObject
) -> None:
    monkeypatch.setattr(calls_module, "MAX_CODE_TOKENS", 5)
    monkeypatch.setattr(calls_module, "MAX_CALLS", 3)
    any_id = st.integers(0, tokenizer.vocab_size - 1) | st.sampled_from(sorted(tokenizer.special.values()))
    state, calls = ToolState(tokenizer), 0
    for token_id in data.draw(st.lists(any_id, max_size=60)):
        call = state.push(token_id)
        if call:
            calls += not call.refused
            forced = state.answer(call)
            assert sum(map(tokenizer.is_special, forced)) == (2 if call.closed else 3)
    assert calls <= 3
