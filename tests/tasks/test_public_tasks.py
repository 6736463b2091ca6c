"""Each public task in each layout it comes in, and the real files where this machine has them."""

import itertools
import json
import tarfile
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from nanorun.errors import UserError
from nanorun.tasks.catalogue import CHATCORE, open_examples, open_task
from nanorun.tasks.gsm8k import Gsm8k, final_number, with_calls
from nanorun.tasks.humaneval import HumanEval, checks, program
from nanorun.tasks.multiple_choice import LETTERS, arc, mmlu, parse_letter
from nanorun.tasks.spelling import SpellingBee
from nanorun.tasks.task import question_messages, reply_text
from nanorun.text.chat import parse_reply, render, render_prompt
from nanorun.tools.calculator import calculate
from nanorun.tools.sandbox import Sandbox, SandboxUnavailable


def text(words: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": words}]


def write_jsonl(path: Path, *records) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def write_parquet(path: Path, *records) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(list(records)), path)
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tasks")


@pytest.fixture
def real(shared_data: Path, folder: Path) -> Path:
    """The public files of ../shared/data, unpacked once."""
    for name in ("chat.tar.xz", "core.tar.xz") if not any(folder.iterdir()) else ():
        with tarfile.open(shared_data / name) as archive:
            wanted = [m for m in archive if "world_knowledge/arc" in m.name or m.name.startswith("chat/")]
            archive.extractall(folder, wanted, filter="data")
    return folder


SKY = {"id": "1", "question": "What colour is the sky?", "choices": ["red", "blue", "green"], "answer": 1}


def test_arc_reads_the_hubs_parquet_with_letters_or_numbers_as_labels(tmp_path):
    rows = [
        {
            "id": str(n),
            "question": "What colour is the sky?",
            "choices": {"text": ["red", "blue", "green"], "label": labels},
            "answerKey": labels[1],
        }
        for n, labels in enumerate((["A", "B", "C"], ["1", "2", "3"]))
    ]
    write_parquet(tmp_path / "ai2_arc" / "ARC-Easy" / "test-00000-of-00001.parquet", *rows)
    task = arc(tmp_path, "easy", "test")
    assert len(task) == 2
    for i in range(2):
        assert (
            question_messages(task[i])[0]["content"] == "What colour is the sky?\nA) red\nB) blue\nC) green"
        )
        assert task[i]["messages"][1]["content"] == "B"
        assert task.reward(i, text("B")) == 1
        assert task.reward(i, text("A")) == 0
    assert list(task.letters) == ["A", "B", "C"]


def test_arc_reads_jsonl_and_the_core_bundle(tmp_path):
    write_jsonl(tmp_path / "arc_challenge_train.jsonl", SKY)
    core = {"choices": ["red", "blue", "green"], "query": "Question: What colour is the sky?", "gold": 1}
    write_jsonl(tmp_path / "eval_data" / "world_knowledge" / "arc_challenge.jsonl", core)
    assert arc(tmp_path, "challenge", "train")[0] == arc(tmp_path, "challenge", "test")[0]
    assert arc(tmp_path / "arc_challenge_train.jsonl", "challenge")[0]["messages"][1]["content"] == "B"


def test_each_question_has_as_many_letters_as_choices(tmp_path):
    longer = {**SKY, "choices": ["a", "b", "c", "d", "e"], "answer": 4}
    task = arc(write_jsonl(tmp_path / "arc_easy_test.jsonl", SKY, longer))
    assert task.letters == "ABCDE"
    assert [task.letters_of(0), task.letters_of(1)] == ["ABC", "ABCDE"]


def test_a_missing_file_split_or_column_is_an_error(tmp_path):
    with pytest.raises(UserError, match=r"arc-easy's test files are not in"):
        arc(tmp_path)
    with pytest.raises(UserError, match="no split 'dev'"):
        arc(tmp_path, "easy", "dev")
    with pytest.raises(UserError, match="no 'answer'"):
        mmlu(write_jsonl(tmp_path / "mmlu_test.jsonl", {"question": "?", "choices": ["1", "2"]}))
    with pytest.raises(UserError, match="2 choices and answer 7"):
        mmlu(write_jsonl(tmp_path / "odd.jsonl", {"question": "?", "choices": ["1", "2"], "answer": 7}))


def test_mmlu_reads_the_hubs_parquet_its_wrapped_training_set_and_jsonl(tmp_path):
    row = {"question": "1 + 1?", "subject": "algebra", "choices": ["1", "2", "3", "4"], "answer": 1}
    write_parquet(tmp_path / "mmlu" / "all" / "test-00000-of-00001.parquet", row)
    write_parquet(tmp_path / "mmlu" / "auxiliary_train" / "train-00000-of-00001.parquet", {"train": row})
    write_jsonl(tmp_path / "mmlu_val.jsonl", row)
    tasks = [mmlu(tmp_path, split) for split in ("test", "train", "val")]
    assert tasks[0][0] == tasks[1][0] == tasks[2][0]
    assert tasks[0][0]["messages"][0]["content"] == "1 + 1?\nA) 1\nB) 2\nC) 3\nD) 4"


@pytest.mark.parametrize(
    ("reply", "letter"),
    [
        ("B", "B"),
        (" B", "B"),
        ("B) blue", "B"),
        ("(B)", "B"),
        ("B.", "B"),
        ("The answer is B", "B"),
        ("Not A, so the answer: (B).", "B"),
        ("A dog", None),
        ("", None),
        ("Blue", None),
    ],
)
def test_the_chosen_letter_is_parsed_from_a_reply(reply, letter):
    assert parse_letter(reply) == letter


def test_an_answer_is_one_token_of_the_letters_in_every_tokenizer(tokenizers):
    for tokenizer in tokenizers:
        ids = [token for letter in LETTERS for token in tokenizer.encode(letter)]
        assert len(ids) == len(set(ids)) == len(LETTERS)
        for letter, token in zip(LETTERS, ids, strict=True):
            messages = [{"role": "user", "content": "Which?"}, {"role": "assistant", "content": letter}]
            whole = render({"messages": messages}, tokenizer).ids
            prompt = render_prompt(messages[:1], tokenizer)
            assert whole[: len(prompt)] == prompt
            assert whole[len(prompt)] == token, "the answer's first token is the letter's own"


NATALIA = {
    "question": "How many clips?",
    "answer": "In May 48/2 = <<48/2=24>>24 clips.\nAltogether 48+24 = <<48+24=72>>72 clips.\n#### 72",
}


def test_gsm8k_annotations_become_calculator_calls(tmp_path):
    write_parquet(tmp_path / "gsm8k" / "main" / "train-00000-of-00001.parquet", NATALIA)
    write_jsonl(tmp_path / "gsm8k" / "test.jsonl", NATALIA)
    task, test = Gsm8k(tmp_path, "train"), Gsm8k(tmp_path, "test")
    assert task[0] == test[0]
    parts = task[0]["messages"][1]["content"]
    assert [(p["type"], p["text"]) for p in parts[:4]] == [
        ("text", "In May 48/2 = "),
        ("python", "48/2"),
        ("output", calculate("48/2")),
        ("text", "24 clips.\nAltogether 48+24 = "),
    ]
    assert task.reward(0, parts) == 1
    assert task.reward(0, text("#### 71")) == 0
    assert task.reward(0, text("72")) == 0, "the final answer stands behind ####"


def test_tool_outputs_are_those_of_our_calculator():
    assert with_calls("<<0.2*50=10>>")[1]["text"] == calculate("0.2*50")
    assert with_calls("<<5 apples=5>>")[1] == {"type": "output", "text": "5"}


@pytest.mark.parametrize(
    ("reply", "number"),
    [
        ("#### 72", 72),
        ("####72", 72),
        ("so\n#### $1,234.00.", 1234),
        ("#### -5", -5),
        ("#### -$5", -5),
        ("#### 0.50", Decimal("0.5")),
        ("#### .5", Decimal("0.5")),
        ("#### 50%", 50),
        ("#### 12 apples", 12),
        ("#### 1\n#### 2", 2),
        ("#### twelve 12", None),
        ("12", None),
        ("####", None),
    ],
)
def test_the_final_number_is_parsed_in_any_notation(reply, number):
    assert final_number(reply) == number


ADD = {
    "task_id": "HumanEval/0",
    "prompt": 'import math\n\ndef half(x):\n    return x / 2\n\ndef add(a, b):\n    """ Adds.\n    """\n',
    "canonical_solution": "    return a + b\n",
    "test": "def check(candidate):\n    assert candidate(1, 2) == 3\n    assert candidate(0, 0) == 0\n",
    "entry_point": "add",
}
GOOD = (
    "    return a + b",
    "return a + b",
    "if b:\n    return a + b\nreturn a",
    "def add(a, b):\n    return half(2 * (a + b))",
    "Here it is:\n```python\ndef add(a, b):\n    return a + b\n```\nIt adds.",
    "```\nreturn a + b\n```",
    "def helper(a, b):\n    return a + b\n\ndef add(a, b):\n    return helper(a, b)",
)
BAD = (
    "    return a - b",
    "",
    "def add(a, b):\n    return half(a + b)",
    "I do not know.",
    "import os; os._exit(0)",
    "class Any:\n    def __eq__(self, other):\n        return True\n\ndef add(a, b):\n    return Any()",
    "import os, sys\n\ndef add(a, b):\n    os._exit(int(sys.orig_argv[-4]))",
)


@pytest.mark.parametrize("reply", GOOD)
def test_a_body_or_a_whole_function_completes_the_program(reply):
    exec(compile(program(ADD, reply) + "\n\n" + checks(ADD), "program", "exec"), {})


@pytest.mark.parametrize("layout", ["parquet", "jsonl"])
def test_humaneval_grades_in_the_sandbox(tmp_path, layout):
    if layout == "parquet":
        write_parquet(tmp_path / "openai_humaneval" / "test-00000-of-00001.parquet", ADD)
    else:
        write_jsonl(tmp_path / "HumanEval.jsonl", ADD)
    task = HumanEval(tmp_path)
    try:
        Sandbox.probe()
    except SandboxUnavailable as problem:
        with pytest.raises(SandboxUnavailable):
            task.reward(0, text(GOOD[0]))
        pytest.skip(f"no sandbox on this machine: {problem}")
    assert [task.reward(0, text(reply)) for reply in GOOD] == [1.0] * len(GOOD)
    assert [task.reward(0, text(reply)) for reply in BAD] == [0.0] * len(BAD)
    assert (
        task.reward(0, task[0]["messages"][1:][0]["content"] and text(task[0]["messages"][1]["content"])) == 1
    )


def test_humaneval_without_a_sandbox_runs_nothing(tmp_path, monkeypatch):
    def none():
        raise SandboxUnavailable("there is none")

    monkeypatch.setattr(Sandbox, "probe", none)
    task = HumanEval(write_jsonl(tmp_path / "HumanEval.jsonl", ADD))
    with pytest.raises(SandboxUnavailable):
        task.reward(0, text(f"    open({str(tmp_path / 'mark')!r}, 'w')"))
    assert not (tmp_path / "mark").exists()


def test_the_spelling_bee_spells_counts_and_grades(tmp_path):
    words = tmp_path / "words_alpha.txt"
    words.write_text("\n".join(f"w{'abcdefghij'[i // 10]}{'klmnopqrst'[i % 10]}y" for i in range(100)))
    train, test = SpellingBee(tmp_path, "train"), SpellingBee(tmp_path, "test")
    kinds, seen = set(), {"train": set(), "test": set()}
    for task in (train, test):
        for i in range(256):
            prompt, reply = (message["content"] for message in task[i]["messages"])
            kinds.add(tuple(part["type"] for part in reply))
            assert task.reward(i, reply) == 1, (prompt, reply)
            assert task.reward(i, text("w-x-y-z #### 99")) == 0
            split = "train" if task is train else "test"
            seen[split] |= {word for word in words.read_text().split() if word in prompt}
            for part, after in itertools.pairwise(reply):
                if part["type"] == "python":
                    assert after["text"] == calculate(part["text"])
    assert kinds == {
        ("text",),
        ("text", "text"),
        ("text", "python", "output", "text"),
        ("python", "output", "text"),
    }
    assert not seen["train"] & seen["test"], "the test's words are not trained on"
    assert [train[i] for i in range(9)] == [SpellingBee(tmp_path, "train")[i] for i in range(9)]
    with pytest.raises(IndexError):
        test[256]


def test_the_spelling_bee_needs_no_file(tmp_path):
    assert len(open_examples("spelling", "test", tmp_path)) == 256


def test_only_the_final_count_is_graded(tmp_path):
    bee = SpellingBee(tmp_path, "test")
    i = next(i for i in range(len(bee)) if "####" in bee[i]["messages"][1]["content"][-1]["text"])
    right = bee[i]["messages"][1]["content"][-1]["text"].split()[-1]
    assert bee.reward(i, text(f"(1) (2) (3) {right}\n#### {int(right) + 1}")) == 0


@pytest.mark.parametrize("name", CHATCORE)
def test_reference_answers_of_the_real_files_are_graded_right(real, name, tokenizers):
    task: Any = open_task(name, "test", real)
    sizes = {"arc-easy": 2376, "arc-challenge": 1172, "mmlu": 14042, "gsm8k": 1319, "humaneval": 164}
    assert len(task) == sizes.get(name, 256)
    for i in range(0, len(task), max(len(task) // 40, 1)):
        conversation = task[i]
        rendered = render(conversation, tokenizers[0])
        asked = render_prompt(question_messages(conversation), tokenizers[0])
        reply = parse_reply(rendered.ids[len(asked) :], tokenizers[0])
        if name != "humaneval":
            assert task.reward(i, reply) == 1
        else:
            assert "def " in program(task._records[i], reply_text(reply))
            assert "check(" in checks(task._records[i])


def test_real_humaneval_solutions_pass_in_the_sandbox(real):
    try:
        Sandbox.probe()
    except SandboxUnavailable as problem:
        pytest.skip(f"no sandbox on this machine: {problem}")
    task: Any = open_task("humaneval", "test", real)
    for i in range(0, 164, 16):
        record = task._records[i]
        for reply in (task[i]["messages"][1]["content"], record["canonical_solution"]):
            assert task.reward(i, text(reply)) == 1, record["task_id"]


def test_the_calculator_evaluates_every_real_gsm8k_annotation(real):
    task, calls = open_task("gsm8k", "train", real), 0
    for i in range(0, len(task), 20):
        parts = task[i]["messages"][1]["content"]
        for part, output in itertools.pairwise(parts):
            if part["type"] == "python":
                calls += 1
                assert output["text"] == calculate(part["text"])
        assert task.reward(i, parts) == 1
    assert calls > 1000
