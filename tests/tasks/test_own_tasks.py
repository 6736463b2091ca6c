"""The user's own data: conversations in a file, and a task in a few lines of Python."""

import json
import re
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from nanorun.data.sample.world import FACTS
from nanorun.errors import UserError
from nanorun.tasks.catalogue import open_examples, open_task, read_conversations
from nanorun.tasks.mixture import MixtureEntry, MixtureSpec, find_mixture, prepare_mixture
from nanorun.tasks.sample import TASKS as SAMPLE_TASKS
from nanorun.tasks.task import question_messages

ROOT = Path(__file__).resolve().parents[2]
HELLO = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello!"}]}


def test_conversations_are_read_from_jsonl_and_from_parquet(tmp_path):
    (tmp_path / "a.jsonl").write_text(json.dumps({**HELLO, "source": "me"}) + "\n\n" + json.dumps(HELLO))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([HELLO]), tmp_path / "b.parquet")
    assert [read_conversations(tmp_path / "a.jsonl")[i] for i in range(2)] == [HELLO, HELLO]
    assert read_conversations(tmp_path / "b.parquet")[0] == HELLO
    assert len(read_conversations(tmp_path)) == 3
    assert len(open_examples(str(tmp_path / "a.jsonl"))) == 2
    assert len(open_examples("chat:a*", folder=tmp_path)) == 2


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ('{"messages": "hi"}', "must be a list"),
        ('{"text": "hi"}', 'no "messages"'),
        ('{"messages": [{"role": "assistant", "content": "Hi"}]}', "expected 'user'"),
        ('{"messages": [{"role": "user", "content": 7}]}', "content 7"),
        ("[1]", 'messages[0] must be an object with "role" and "content"'),
        ("7", "it is 7, not an object"),
        ("{", "not JSON"),
    ],
)
def test_an_invalid_conversation_is_reported_with_its_line(tmp_path, line, problem):
    (tmp_path / "a.jsonl").write_text(json.dumps(HELLO) + "\n" + line + "\n")
    with pytest.raises(UserError, match=rf"(?s)Line 2 of .*a\.jsonl.*{re.escape(problem)}"):
        read_conversations(tmp_path / "a.jsonl")


def test_an_empty_missing_or_unsupported_file_is_an_error(tmp_path):
    (tmp_path / "a.jsonl").write_text("")
    (tmp_path / "a.txt").write_text("hello")
    for name, problem in (
        ("a.jsonl", "no conversations"),
        ("b.jsonl", "no file"),
        ("a.txt", "no conversations by its suffix"),
    ):
        with pytest.raises(UserError, match=problem):
            read_conversations(tmp_path / name)


def from_the_docs() -> str:
    """The task that docs/tasks.md shows."""
    page = (ROOT / "docs" / "tasks.md").read_text(encoding="utf-8")
    return re.search(r"```python\n(# twice\.py.*?)```", page, re.DOTALL)[1]


def test_the_task_in_the_docs_trains_and_grades(tmp_path):
    code = from_the_docs()
    assert len([line for line in code.splitlines() if line.strip()]) <= 14
    path = tmp_path / "twice.py"
    path.write_text(code)
    for spec in (str(path), f"{path}:Twice"):
        task = open_task(spec, "test", trusted=[spec])
        answer = task[0]["messages"][-1]["content"]
        assert task.reward(0, [{"type": "text", "text": answer}]) == 1
        assert task.reward(0, [{"type": "text", "text": "no"}]) == 0
        assert question_messages(task[0])[-1]["role"] == "user"
        used, train, _ = prepare_mixture(
            MixtureSpec("x", (MixtureEntry("sample-sums", stop=100),)), trusted=[spec]
        )
        assert [entry.task for entry in used.train] == ["sample-sums", spec]
        assert any(train[i] == train.parts[1][0] for i in range(len(train)))


def test_a_json_mixture_can_slice_and_repeat_a_task_named_on_the_command_line(tmp_path, monkeypatch):
    (tmp_path / "twice.py").write_text(from_the_docs())
    (tmp_path / "m.json").write_text(json.dumps([{"task": "twice.py", "stop": 100, "repeat": 3}]))
    with pytest.raises(UserError, match="add --task"):
        prepare_mixture(find_mixture(str(tmp_path / "m.json")))
    monkeypatch.chdir(tmp_path)
    used, train, val = prepare_mixture(find_mixture("m.json"), trusted=["twice.py"])
    assert (len(used.train), len(train), len(val)) == (1, 3 * 90, 10)


def test_code_runs_only_when_the_command_line_names_it(tmp_path):
    path = tmp_path / "evil.py"
    path.write_text(f"open({str(tmp_path / 'mark')!r}, 'w')\nclass A:\n    def __getitem__(self, i): ...\n")
    with pytest.raises(UserError, match="is code, which runs only when you say so: add --task"):
        prepare_mixture(MixtureSpec("x", (MixtureEntry(str(path)),)))
    assert not (tmp_path / "mark").exists()


@pytest.mark.parametrize(
    ("code", "problem"),
    [
        ("def f(:\n", "SyntaxError at line 1"),
        ("x = 1\nraise ValueError('no')\n", r"ValueError at line 2 \(no\)"),
        ("x = 1\n", r"or none \(none\)"),
        ("class A:\n    def __getitem__(self, i): ...\nclass B(A): ...\n", r"several classes .* \(A, B\)"),
        ("class A:\n    def __getitem__(self, i): ...\n", r"cannot make a A\('test'\)"),
        ("class A(list): ...\n", "has no name"),
    ],
)
def test_a_broken_task_is_an_error(tmp_path, code, problem):
    path = tmp_path / "mine.py"
    path.write_text(code)
    with pytest.raises(UserError, match=problem):
        open_examples(str(path), "test", trusted=[str(path)])
    with pytest.raises(UserError, match="no file"):
        open_examples("gone.py", trusted=["gone.py"])


OWN = """
class Own:
    name = "own"
    def __init__(self, split): self.words = ["a", "b"]
    def __len__(self): return 2
    def __getitem__(self, i): return {"messages": [{"role": "user", "content": self.words[i]}]}
    def reward(self, i, reply): return 1.0
"""


@pytest.mark.parametrize(
    ("right", "wrong", "problem"),
    [
        ("return 1.0", "return None", "with None: it must be a number"),
        ("return 1.0", "return 'yes'", "with 'yes': it must be a number"),
        ("return 1.0", "return {}[2]", r"cannot grade a reply to question 0: KeyError at line 7 \(2\)"),
        ("(self, i, reply)", "(self, reply)", "cannot grade a reply to question 0: TypeError"),
        ("self.words[i]}]}", "self.wrds[i]}]}", "cannot give example 0: AttributeError at line 6"),
        ('{"messages": [', "[[", "gives a list as example 0: it must be a conversation"),
    ],
)
def test_a_mistake_in_a_task_is_reported_before_anything_starts(tmp_path, right, wrong, problem):
    path = tmp_path / "own.py"
    path.write_text(OWN)
    assert len(open_task(str(path), "test", trusted=[str(path)])) == 2
    code = OWN.replace(right, wrong)
    path.write_text(code if wrong != "[[" else code.replace("}]}", "}]]"))
    with pytest.raises(UserError, match=problem):
        open_task(str(path), "test", trusted=[str(path)])
    with pytest.raises(UserError, match=r"has no class Wrong .*: it has Own"):
        open_task(f"{path}:Wrong", "test", trusted=[f"{path}:Wrong"])


def test_examples_without_a_reward_are_not_a_task(tmp_path):
    (tmp_path / "a.jsonl").write_text(json.dumps(HELLO))
    with pytest.raises(UserError, match="no `reward` to grade"):
        open_task(str(tmp_path / "a.jsonl"))
    with pytest.raises(UserError, match="no `reward` to grade"):
        open_task("sample-chat")


@pytest.mark.parametrize("name", SAMPLE_TASKS)
def test_reference_answers_of_the_sample_world_are_graded_right_and_others_wrong(name):
    task = open_task(name, "test")
    for i in range(0, len(task), 5):
        reply = task[i]["messages"][-1]["content"]
        assert task.reward(i, [{"type": "text", "text": reply}] if isinstance(reply, str) else reply) == 1
        assert task.reward(i, [{"type": "text", "text": "I do not know."}]) == 0


def test_test_questions_of_the_sample_world_use_phrasings_unseen_in_training():
    trained = open_examples("sample-chat", "train")
    asked = {m["content"] for i in range(len(trained)) for m in trained[i]["messages"] if m["role"] == "user"}
    for name in SAMPLE_TASKS:
        task = open_task(name, "test")
        prompts = [task[i]["messages"][0]["content"] for i in range(len(task))]
        assert not asked & set(prompts), name
    assert "What is 12 + 30?" not in asked
    facts: Any = open_task("sample-facts", "test")
    assert {q.answer for q in facts.questions} <= {fact.answer for fact in FACTS}


def test_a_lucky_count_in_a_misspelled_word_gets_no_reward():
    task: Any = open_task("sample-counting", "test")
    index = next(i for i, q in enumerate(task.questions) if q.word == "lily" and q.answer == "2")
    for word, reward in (("lily", 1), ("l-i-l-y", 1), ("luly", 0), ("l-u-l-y", 0)):
        call = [{"type": "python", "text": f"'{word}'.count('l')"}, {"type": "output", "text": "2"}]
        assert task.reward(index, [*call, {"type": "text", "text": " The answer is 2."}]) == reward


@pytest.mark.parametrize("name", ["sample-spelling-unseen", "sample-world"])
def test_the_exam_asks_no_unseen_word_and_no_question_about_the_world_twice(name):
    task = open_task(name, "test")
    prompts = [task[i]["messages"][0]["content"] for i in range(len(task))]
    assert len(set(prompts)) == len(prompts) >= 80


def test_validation_questions_differ_from_test_questions():
    way, test = open_task("sample-facts", "val"), open_task("sample-facts", "test")
    assert way[0] != test[0]
    _, train, val = prepare_mixture(find_mixture("sample"))
    assert len(train) > 1000
    assert len(val) >= 200
