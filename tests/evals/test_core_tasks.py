"""CORE's prompts are everyone's: the same examples, shots, delimiters and tokens."""

import json
import random

import numpy as np
import pytest
from core_worlds import byte_tokenizer, questions, small_bundle, task, write_bundle

from nanorun.data.bundle import open_bundle
from nanorun.errors import UserError
from nanorun.evals.core_prompts import cache_folder, common_prefix, encode_examples, encode_task, scored_spans
from nanorun.evals.core_tasks import (
    apply_cap,
    display_name,
    draw_shots,
    find_tasks,
    open_mmlu,
    read_examples,
    read_tasks,
    render_prompts,
)


def test_a_multiple_choice_prompt_has_solved_examples_the_delimiter_and_each_choice():
    pool = [
        {"query": "1+1?", "choices": ["2", "3"], "gold": 0},
        {"query": "2+2?", "choices": ["5", "4"], "gold": 1},
    ]
    asked = render_prompts(task("multiple_choice", shots=1, delimiter="\nAnswer: "), pool, 0)
    assert asked == ["2+2?\nAnswer: 4\n\n1+1?\nAnswer: 2", "2+2?\nAnswer: 4\n\n1+1?\nAnswer: 3"]


def test_a_schema_prompt_has_each_context_and_the_common_end():
    pool = [
        {"context_options": ["It rained", "It shone"], "continuation": "so we got wet.", "gold": 0},
        {"context_options": ["He", "She"], "continuation": "left.", "gold": 1},
    ]
    assert render_prompts(task("schema", shots=1), pool, 0) == [
        "She left.\n\nIt rained so we got wet.",
        "She left.\n\nIt shone so we got wet.",
    ]


def test_a_language_modeling_prompt_is_rendered_without_and_with_its_continuation():
    pool = [
        {"context": "  The sky is\n", "continuation": "blue"},
        {"context": "Grass is ", "continuation": "green"},
    ]
    assert render_prompts(task("language_modeling", shots=1), pool, 0) == [
        "Grass is green\n\nThe sky is",
        "Grass is green\n\nThe sky is blue",
    ]
    assert render_prompts(task("language_modeling", shots=0, delimiter="\nA: "), pool, 1) == [
        "Grass is\nA:",
        "Grass is\nA: green",
    ]


@pytest.mark.parametrize(("count", "shots"), [(4, 3), (12, 5), (40, 10), (1000, 10), (5, 0)])
def test_shots_follow_the_published_rule(count, shots):
    pool = [{"query": str(i)} for i in range(count)]
    for index in {0, 1, count // 2, count - 1}:
        others = [i for i in range(count) if i != index]
        drawn = random.Random(1234 + index).sample(others, shots)
        assert draw_shots(task("multiple_choice", shots), pool, index) == [pool[i] for i in drawn]


def test_examples_are_shuffled_before_the_cap_and_shots_come_from_under_it(tmp_path):
    examples = [{"context": f"{i} and", "continuation": f"{i + 1}"} for i in range(50)]
    about = {"icl_task_type": "language_modeling", "num_fewshot": [3], "examples": examples}
    bundle = open_bundle(write_bundle(tmp_path, {"count": about}))
    (only,) = read_tasks(bundle)
    expected = list(examples)
    random.Random(1337).shuffle(expected)
    assert read_examples(bundle, only) == expected
    assert apply_cap(only, expected, 20) == (20, expected[:20])
    assert apply_cap(only, expected, 2) == (2, expected[:4])  # enough for three shots, and no more
    assert apply_cap(only, expected, None) == (50, expected)


def as_text(tokens: np.ndarray) -> str:
    tokenizer = byte_tokenizer()
    return tokenizer.decode([int(t) for t in tokens if t != tokenizer.bos])


def test_scored_tokens_are_those_that_choices_do_not_share():
    pool = [{"query": "Is it", "choices": ["blue sky", "blue sea"], "gold": 1}]
    encoded = encode_examples(task("multiple_choice"), pool, 1, byte_tokenizer())
    ((prefix, suffixes, scored),) = encoded.examples()
    assert prefix[0] == byte_tokenizer().bos
    assert as_text(prefix) == "Is it blue s"
    assert [as_text(suffix) for suffix in suffixes] == ["ky", "ea"]
    assert scored == [2, 2]
    assert encoded.gold.tolist() == [1]


def test_scored_tokens_of_a_schema_are_the_common_suffix():
    pool = [{"context_options": ["Sam", "Ann B"], "continuation": "ran", "gold": 0}]
    ((prefix, suffixes, scored),) = encode_examples(task("schema"), pool, 1, byte_tokenizer()).examples()
    assert as_text(prefix) == ""
    assert [as_text(suffix) for suffix in suffixes] == ["Sam ran", "Ann B ran"]
    assert scored == [4, 4]  # " ran"


def test_scored_tokens_of_a_continuation_follow_the_prompt():
    pool = [{"context": "2, 3,", "continuation": "4"}]
    ((prefix, suffixes, scored),) = encode_examples(
        task("language_modeling"), pool, 1, byte_tokenizer()
    ).examples()
    assert (as_text(prefix), as_text(suffixes[0]), scored) == ("2, 3,", " 4", [2])


def test_every_choice_has_a_scored_token_even_a_prefix_of_another():
    short, long = np.array([9, 1, 2]), np.array([9, 1, 2, 3])
    assert scored_spans("multiple_choice", [short, long])[1] == [2, 2]
    assert scored_spans("multiple_choice", [short, short])[1] == [2, 2]
    assert scored_spans("schema", [short, short])[1] == [1, 1]  # never the first token: nothing predicts it
    assert common_prefix([short, long]) == 3


def test_prompts_are_encoded_once_per_tokenizer_task_and_cap(home, tmp_path):
    bundle = open_bundle(small_bundle(tmp_path / "bundle"))
    first, *_ = read_tasks(bundle)
    made, of = encode_task(bundle, first, byte_tokenizer(), 5)
    (stored,) = cache_folder().iterdir()
    written = stored.stat().st_mtime_ns
    again, _ = encode_task(bundle, first, byte_tokenizer(), 5)
    assert (len(made), of) == (5, 12)
    assert all(np.array_equal(vars(made)[name], vars(again)[name]) for name in vars(made))
    assert stored.stat().st_mtime_ns == written
    encode_task(bundle, first, byte_tokenizer(), 6)
    assert len(list(cache_folder().iterdir())) == 2
    stored.write_bytes(stored.read_bytes()[:200])  # damaged: made again
    repaired, _ = encode_task(bundle, first, byte_tokenizer(), 5)
    assert np.array_equal(repaired.tokens, made.tokens)


def test_tasks_are_selected_by_name_or_first_part(tmp_path):
    bundle = open_bundle(small_bundle(tmp_path))
    tasks = read_tasks(bundle)

    def chosen(*names):
        return [each.label for each in find_tasks(bundle, tasks, names)]

    assert chosen("next", "choose") == ["next", "choose"]
    twins = [t for t in tasks if t.label == "choose_blind"]
    assert [t.label for t in find_tasks(bundle, twins, ["choose"])] == ["choose_blind"]
    with pytest.raises(UserError, match="no task 'chess'"):
        chosen("chess")
    with pytest.raises(UserError, match="has no MMLU: --mmlu"):
        chosen("mmlu")


def test_mmlu_in_its_own_format_becomes_a_question_answered_by_a_letter(tmp_path):
    lines = [{"question": f"{i}?", "choices": ["w", "x", "y", "z"], "answer": i % 4} for i in range(9)]
    (tmp_path / "mmlu_test.jsonl").write_text("\n".join(map(json.dumps, lines)))
    bundle, mmlu = open_mmlu(tmp_path / "mmlu_test.jsonl")
    example = next(e for e in read_examples(bundle, mmlu) if e["query"].startswith("6?"))
    assert example == {"query": "6?\nA. w\nB. x\nC. y\nD. z\nAnswer:", "choices": list("ABCD"), "gold": 2}
    assert not mmlu.in_core
    assert len(draw_shots(mmlu, read_examples(bundle, mmlu), 0)) == 5


def test_the_stand_in_for_coqa_is_labelled():
    assert display_name("coqa", 495) == "coqa (stand-in)"
    assert display_name("coqa", 7983) == "coqa"
    assert display_name("boolq", 495) == "boolq"


MISTAKES = {
    "no yaml": (lambda f: (f / "core.yaml").unlink(), "has no core.yaml"),
    "not yaml": (lambda f: (f / "core.yaml").write_text("a: [b"), "is not YAML"),
    "no tasks": (lambda f: (f / "core.yaml").write_text("tasks: 3"), "no list 'icl_tasks'"),
    "no csv": (lambda f: (f / "eval_meta_data.csv").unlink(), "eval_meta_data.csv"),
    "bad csv": (lambda f: (f / "eval_meta_data.csv").write_text("a,b\n1,2"), "is not a table"),
    "no baseline": (
        lambda f: (f / "eval_meta_data.csv").write_text("Eval Task,Random baseline\nwho,50"),
        "no baseline for 'choose'",
    ),
    "a baseline of 100": (
        lambda f: (f / "eval_meta_data.csv").write_text("Eval Task,Random baseline\nchoose,100"),
        "not from 0 to 100",
    ),
    "an unknown type": (
        lambda f: (f / "core.yaml").write_text(
            (f / "core.yaml").read_text().replace('"schema"', '"generate"')
        ),
        "not one of CORE's three",
    ),
    "shots that are no number": (
        lambda f: (f / "core.yaml").write_text((f / "core.yaml").read_text().replace("[2]", '["x"]')),
        "num_fewshot",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_an_invalid_bundle_is_a_user_error(tmp_path, mistake):
    break_it, words = MISTAKES[mistake]
    break_it(small_bundle(tmp_path))
    with pytest.raises(UserError) as error:
        read_tasks(open_bundle(tmp_path))
    assert words in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("kind", "line", "words"),
    [
        ("multiple_choice", "{", "is not JSON"),
        ("multiple_choice", "[]", "is not an object"),
        ("multiple_choice", '{"query": "a", "choices": ["b"], "gold": 0}', "two or more"),
        ("multiple_choice", '{"query": "a", "choices": ["b", "c"], "gold": 2}', "none of its 2"),
        ("multiple_choice", '{"choices": ["b", "c"], "gold": 1}', "no text 'query'"),
        ("schema", '{"context_options": ["b", "c"], "continuation": "", "gold": 1}', "no 'continuation'"),
        ("language_modeling", '{"context": "b", "continuation": "  "}', "no 'continuation'"),
        ("language_modeling", '{"context": "b", "continuation": 8}', "no text 'continuation'"),
    ],
)
def test_an_invalid_example_is_reported_with_its_line(tmp_path, kind, line, words):
    about = {"icl_task_type": kind, "num_fewshot": [0], "examples": questions(kind, 2)}
    folder = write_bundle(tmp_path, {"t": about})
    file = tmp_path / "eval_data" / "some" / "t.jsonl"
    file.write_text(file.read_text() + "\n" + line)
    bundle = open_bundle(folder)
    with pytest.raises(UserError, match=rf"Line 4 of eval_data/some/t\.jsonl .*{words}"):
        read_examples(bundle, read_tasks(bundle)[0])


def test_too_few_examples_for_the_shots_are_a_user_error(tmp_path):
    about = {"icl_task_type": "schema", "num_fewshot": [5], "examples": questions("schema", 5)}
    bundle = open_bundle(write_bundle(tmp_path, {"t": about}))
    with pytest.raises(UserError, match="has 5 examples, too few for 5 shots"):
        read_examples(bundle, read_tasks(bundle)[0])
