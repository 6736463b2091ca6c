"""A mixture shows every example exactly as often as it is listed, in one order for all processes."""

import json
import subprocess
import sys
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanorun.errors import UserError
from nanorun.tasks.mixture import (
    Mixture,
    MixtureEntry,
    MixtureSpec,
    Subset,
    choose_mixture,
    find_mixture,
    hold_out,
    prepare_mixture,
)

ROOT = Path(__file__).resolve().parents[2]


class Numbers:
    """Examples that say where they come from."""

    def __init__(self, name: str, length: int) -> None:
        self.name, self._length = name, length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int):
        assert 0 <= index < self._length
        return (self.name, index)


def all_of(examples) -> list:
    return [examples[i] for i in range(len(examples))]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("abcd"), st.integers(0, 40)), max_size=6), st.integers(0, 2**40))
def test_each_example_occurs_as_often_as_it_is_listed(parts, seed):
    listed = [Numbers(f"{name}{length}", length) for name, length in parts]
    seen = Counter(all_of(Mixture(listed, seed)))
    assert seen == Counter(example for part in listed for example in all_of(part))


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 60), st.integers(-70, 70), st.one_of(st.none(), st.integers(-70, 70)), st.integers(1, 7)
)
def test_a_subset_holds_the_examples_of_its_indices(length, start, stop, step):
    numbers = Numbers("n", length)
    assert all_of(Subset(numbers, range(length)[start:stop:step])) == all_of(numbers)[start:stop:step]


@settings(max_examples=60, deadline=None)
@given(st.one_of(st.integers(0, 200), st.integers(0, 20_000)))
def test_held_out_and_training_examples_partition_the_whole(length):
    examples = Numbers("n", length)
    trained, held_out = map(all_of, hold_out(examples))
    assert sorted(held_out + trained) == all_of(examples)
    assert bool(held_out) == (length > 1) <= bool(trained)
    gaps = [b - a for (_, a), (_, b) in pairwise(held_out)]
    assert not gaps or max(gaps) - min(gaps) <= 1, "evenly spaced"


@pytest.mark.parametrize(
    ("total", "held_out"),
    [(1, 0), (2, 1), (19, 1), (20, 3), (40, 4), (200, 20), (1000, 100), (5000, 100), (10_000, 200)],
)
def test_a_tenth_of_a_small_task_is_held_out_and_a_fiftieth_of_a_large_one(total, held_out):
    assert len(hold_out(Numbers("n", total))[1]) == held_out


def test_the_order_mixes_the_parts_and_changes_with_the_seed():
    parts = [Numbers("a", 500), Numbers("b", 500)]
    one, other = all_of(Mixture(parts, 1)), all_of(Mixture(parts, 2))
    assert one != other
    assert one == all_of(Mixture(parts, 1))
    assert 0.4 < sum(name == "a" for name, _ in one[:200]) / 200 < 0.6


def test_looking_up_an_example_reads_only_that_one():
    touched = []

    class Watched(Numbers):
        def __getitem__(self, index):
            touched.append(index)
            return super().__getitem__(index)

    Mixture([Watched("a", 10_000), Watched("b", 10_000)], 0)[77]
    assert len(touched) == 1


def test_an_index_out_of_range_raises_index_error():
    for examples in (Mixture([Numbers("a", 3)]), *hold_out(Numbers("a", 3))):
        with pytest.raises(IndexError):
            examples[len(examples)]
        with pytest.raises(IndexError):
            examples[-1]


def test_the_order_is_the_same_in_another_process():
    code = (
        "import json\nfrom nanorun.tasks.mixture import find_mixture, prepare_mixture\n"
        "_, train, val = prepare_mixture(find_mixture('sample'), seed=3)\n"
        "print(json.dumps([[m[i] for i in range(0, 400, 7)] for m in (train, val)]))"
    )
    environment = {"PYTHONPATH": str(ROOT), "PYTHONHASHSEED": "77", "PATH": "/usr/bin"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, check=True)
    _, train, val = prepare_mixture(find_mixture("sample"), seed=3)
    assert json.loads(done.stdout) == [[m[i] for i in range(0, 400, 7)] for m in (train, val)]


def chat(path: Path, n: int, word: str = "hello") -> Path:
    messages = [
        [{"role": "user", "content": f"{word} {i}"}, {"role": "assistant", "content": f"{word} to you"}]
        for i in range(n)
    ]
    path.write_text("".join(json.dumps({"messages": m}) + "\n" for m in messages), encoding="utf-8")
    return path


def first_words(mixture: Mixture) -> Counter:
    return Counter(mixture[i]["messages"][0]["content"] for i in range(len(mixture)))


def test_a_json_mixture_lists_tasks_with_slices_and_repeats(tmp_path, monkeypatch):
    chat(tmp_path / "me.jsonl", 100)
    mixture = {
        "train": [
            {"task": "me.jsonl", "start": 10, "stop": 20, "repeat": 3},
            {"task": "sample-sums", "stop": 5},
        ],
        "val": ["me.jsonl"],
    }
    (tmp_path / "mine.json").write_text(json.dumps(mixture))
    monkeypatch.chdir("/")
    used, train, val = prepare_mixture(find_mixture(str(tmp_path / "mine.json")))
    assert used.name == "mine"
    counts = first_words(train)
    assert [counts[f"hello {i}"] for i in (9, 10, 19, 20)] == [0, 3, 3, 0]
    assert (len(train), len(val)) == (35, 100)


def test_without_val_some_examples_are_held_out_despite_repeats(tmp_path):
    path = str(chat(tmp_path / "me.jsonl", 30))
    _, train, val = prepare_mixture(MixtureSpec("mine", (MixtureEntry(path, repeat=2),)))
    assert (len(train), len(val)) == (2 * 27, 3)
    assert set(first_words(val)) == {"hello 5", "hello 15", "hello 25"}
    assert not set(first_words(train)) & set(first_words(val))
    with pytest.raises(UserError, match="a single example of each task"):
        prepare_mixture(MixtureSpec("mine", (MixtureEntry(str(chat(tmp_path / "few.jsonl", 1))),)))


def test_own_conversations_are_the_mixture_unless_another_is_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = str(chat(tmp_path / "me.jsonl", 100))
    spec = choose_mixture(None, ["me.jsonl", "gsm8k"])
    assert (spec.name, [entry.task for entry in spec.train]) == ("me+gsm8k", [path, "gsm8k"])
    used, train, val = prepare_mixture(choose_mixture(None, ["me.jsonl"]), trusted=["me.jsonl"])
    assert ([entry.task for entry in used.train], len(train), len(val)) == ([path], 90, 10)
    assert choose_mixture("me.jsonl", []) == choose_mixture(None, ["me.jsonl"]) == used
    both, train, _ = prepare_mixture(choose_mixture("sample", ["me.jsonl"]), trusted=["me.jsonl"])
    assert [entry.label for entry in both.train] == ["sample-chat", "me.jsonl"]
    assert len(train) == 10_000 + 100, "the mixture has its own validation examples"
    assert choose_mixture(None, []).name == "sft"


def test_a_json_file_can_be_a_mixture_or_conversations(tmp_path):
    talk = [{"question": f"q {i}", "answer": "a"} for i in range(30)]
    (tmp_path / "talk.json").write_text(json.dumps(talk, indent=1))
    (tmp_path / "lines.json").write_text("".join(json.dumps(pair) + "\n" for pair in talk))
    (tmp_path / "list.json").write_text(json.dumps([{"task": "talk.json"}, {"task": "lines.json"}]))
    for name, tasks in (("talk", 1), ("lines", 1), ("list", 2)):
        used, train, val = prepare_mixture(find_mixture(str(tmp_path / f"{name}.json")))
        assert (used.name, len(used.train)) == (name, tasks)
        assert (len(train), len(val)) == (27 * tasks, 3 * tasks)


def test_the_part_of_each_example_is_known():
    mixture = Mixture([Numbers("a", 30), Numbers("b", 0), Numbers("c", 12)], seed=5)
    assert ["abc"[part] for part in mixture.part_of] == [name for name, _ in all_of(mixture)]


def test_a_file_that_is_missing_is_named_and_never_left_out(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    chat(tmp_path / "sft_lima.jsonl", 200)
    sentence = r"There is no file .*gone\.{}: check the name and the current folder\.$"
    for suffix in ("jsonl", "json", "csv", "parquet", "jsonl.zst", "py"):
        for mixture in (None, "sft"):
            with pytest.raises(UserError, match=sentence.format(suffix)):
                prepare_mixture(
                    choose_mixture(mixture, [f"gone.{suffix}"]), tmp_path, trusted=[f"gone.{suffix}"]
                )
        with pytest.raises(UserError, match=sentence.format(suffix)):
            prepare_mixture(choose_mixture(f"gone.{suffix}", []))


def test_own_conversations_do_not_make_up_for_the_files_of_a_named_mixture(tmp_path):
    path = str(chat(tmp_path / "me.jsonl", 100))
    (tmp_path / "tasks").mkdir()
    with pytest.raises(UserError, match="--task FILE without --mixture trains on that file alone"):
        prepare_mixture(choose_mixture("sft", [path]), tmp_path / "tasks", trusted=[path])


def test_a_named_mixture_skips_missing_tasks_and_reports_them(tmp_path, capsys):
    chat(tmp_path / "sft_lima.jsonl", 200)
    used, train, _ = prepare_mixture(find_mixture("sft"), tmp_path)
    assert [entry.task for entry in used.train] == ["spelling", "chat:sft_lima"]
    assert len(train) == 6000 - 120 + 180
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "left out of the mixture: arc-easy, arc-challenge, arc-easy (val)" in said


def test_a_mixture_without_any_files_is_an_error(tmp_path):
    for name in ("sft", "mid"):
        with pytest.raises(UserError, match=f"Nothing of the mixture '{name}' is in"):
            prepare_mixture(find_mixture(name), tmp_path)
    with pytest.raises(UserError, match="gsm8k's train files are not in"):
        prepare_mixture(MixtureSpec("x", (MixtureEntry("gsm8k"),)), tmp_path)


@pytest.mark.parametrize(
    "content",
    [
        "{",
        "[]",
        '{"val": []}',
        '{"train": [{"repeat": 2}]}',
        '{"train": [{"task": "gsm8k", "repeat": 0}]}',
        '{"train": [{"task": "gsm8k", "stop": "all"}]}',
        '{"train": [{"task": "gsm8k", "often": 2}]}',
        '{"train": [7]}',
        '{"train": ["gsm8k"], "test": []}',
    ],
)
def test_an_invalid_json_mixture_is_an_error(tmp_path, content):
    (tmp_path / "bad.json").write_text(content)
    with pytest.raises(UserError, match=r"bad\.json|repeat 0"):
        find_mixture(str(tmp_path / "bad.json"))


def test_unknown_names_list_the_known_ones():
    with pytest.raises(UserError, match="choose sample-mid, sample, mid, sft"):
        find_mixture("smft")
    with pytest.raises(UserError, match="There is no task 'arc'"):
        prepare_mixture(MixtureSpec("x", (MixtureEntry("arc"),)))
