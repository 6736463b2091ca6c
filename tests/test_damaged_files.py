"""A damaged, hostile or absurdly large file is one sentence that names it, whichever command reads it."""

import io
import json
import resource
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from nanorun import checkpoint, run_list, runs, tables
from nanorun.config import Config, OptimConfig, TrainConfig, scale_model
from nanorun.console import Progress
from nanorun.data.add import add_files, write_dataset
from nanorun.data.bundle import open_bundle
from nanorun.data.dataset import open_dataset
from nanorun.data.readers import LINE_LIMIT, read_documents
from nanorun.errors import UserError
from nanorun.evals.chat import read_replies
from nanorun.evals.core_tasks import read_tasks
from nanorun.infer.load import load_model
from nanorun.json_files import MAX_DEPTH, load_json, parse_json
from nanorun.model.gpt import build
from nanorun.runs import Run
from nanorun.tasks.catalogue import open_examples
from nanorun.tasks.mixture import find_mixture, prepare_mixture
from nanorun.text.store import open_tokenizer
from nanorun.text.tokenizer import PATTERN, SPECIAL_TOKENS, Tokenizer

DEEP = b"[" * 200_000
CONFIG = Config(
    scale_model(2, 265, context=32, dim=32, heads=2, kv_heads=1),
    OptimConfig(),
    TrainConfig(steps=4, batch_tokens=64),
    "text",
    "bytes",
)


def sentence(use: Callable[[], object]) -> str:
    with pytest.raises(UserError) as refused:
        use()
    text = str(refused.value)
    assert "\n" not in text
    assert len(text) < 700
    return text


@pytest.fixture
def furnished(home: Path) -> Path:
    """A home with a dataset, a tokenizer and a run of a tiny model."""
    texts = [f"{i} gulls sat on {i} masts." for i in range(20)]
    write_dataset("text", iter(texts[:15]), iter(texts[15:]), "made up", Progress("writing"))
    (home / "tokenizers" / "bytes").mkdir(parents=True)
    ranks = {bytes([b]): b for b in range(256)}
    tokenizer = Tokenizer("bytes", PATTERN, ranks, {name: 256 + i for i, name in enumerate(SPECIAL_TOKENS)})
    tokenizer.save(home / "tokenizers" / "bytes")
    model = build(CONFIG.model, torch.device("cpu"), torch.float32)
    for name in ("sound", "mine"):
        with Run.open(name, CONFIG.to_dict()) as run:
            for step in range(1, 5):
                run.log({"kind": "step", "step": step, "loss": 1.0})
            state = {"tokenizer": tokenizer.fingerprint}
            checkpoint.save(run.checkpoints, 4, model.state_dict(), {}, state)
            run.write_summary({"name": name, "steps": 4, "seconds": 1.0, "val_bpb": 1.5})
    return home


# -- the reader --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        (b"[" * MAX_DEPTH + b"]" * MAX_DEPTH, None),
        (b"[" * (MAX_DEPTH + 1) + b"]" * (MAX_DEPTH + 1), "nested more than 64"),
        (b'{"a":' * 100 + b"1" + b"}" * 100, "nested more than 64"),
        (b'["' + b"[" * 1000 + b'"]', None),
        (b'["' + b'\\"[{' * 1000 + b'"]', None),
        (b'["' + b"\\\\" * 1000 + b'", ' + b"[" * 70 + b"]" * 71, "nested more than 64"),
        (b"[" + b"[]," * (1 << 22) + b"1]", "more than 4,194,304 values"),
        (b"9" * 5000, "4300 digits"),
        (b"{'a': 1}", "line 1, column 2"),
        (b'{"a": 1}\xff', "UTF-8"),
        (b"", "line 1, column 1"),
    ],
)
def test_limits_hold_before_a_text_is_parsed(content, fault):
    if fault is None:
        parse_json(content)
        return
    with pytest.raises(ValueError, match=fault):
        parse_json(content)


def test_an_absurdly_large_file_is_not_read(tmp_path):
    with open(tmp_path / "a.json", "wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(ValueError, match="1,099,511,627,776 bytes, at most"):
        load_json(tmp_path / "a.json")


@pytest.mark.parametrize(
    ("shape", "value", "fault"),
    [
        ({"a": int}, {"a": True}, "a is true, not a whole number"),
        ({"a": int}, {"a": 1.0}, "a is 1.0, not a whole number"),
        ({"a": int}, {"a": 2**63}, "not a whole number"),
        ({"a": float}, {"a": float("inf")}, "a is Infinity, not a number"),
        ({"a": float}, {"a": 1}, None),
        ({"a": (str, None)}, {"a": None}, None),
        ({"a": (str, None)}, {"a": 1}, "a is 1, not text or null"),
        ({"a?": str}, {}, None),
        ({"a": str}, {}, "it has no 'a'"),
        ({"a": [{"b": [int]}]}, {"a": [{"b": []}, {"b": [1, "x"]}]}, 'a\\[1\\].b\\[1\\] is "x"'),
        ([int], {}, "it is {}, not a list"),
    ],
)
def test_a_value_of_another_type_is_named_with_its_place(tmp_path, shape, value, fault):
    (tmp_path / "a.json").write_text(json.dumps(value))
    if fault is None:
        assert load_json(tmp_path / "a.json", shape) == value
        return
    with pytest.raises(ValueError, match=fault):
        load_json(tmp_path / "a.json", shape)


# -- deep JSON in each of our files ------------------------------------------------------------------


FILES: dict[str, Callable[[Path], object]] = {
    "data/text/dataset.json": lambda home: open_dataset("text"),
    "tokenizers/bytes/tokenizer.json": lambda home: open_tokenizer("bytes"),
    "runs/mine/config.json": lambda home: load_model("mine"),
    "runs/mine/summary.json": lambda home: runs.read_summary(home / "runs" / "mine"),
    "runs/mine/checkpoints/000004/checksums.json": lambda home: load_model("mine"),
    "mixture.json": lambda home: find_mixture(str(home / "mixture.json")),
    "replies.jsonl": lambda home: read_replies(home / "replies.jsonl"),
    "talk.jsonl": lambda home: open_examples(str(home / "talk.jsonl")),
    "talk.json": lambda home: open_examples(str(home / "talk.json")),
}


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("content", [DEEP, b'{"a":' * 5000 + b"1" + b"}" * 5000, b"\x00\xff", b"12", b""])
def test_deep_or_odd_json_in_any_of_our_files_is_one_sentence(furnished, name, content):
    (furnished / name).write_bytes(content)
    assert Path(name).name in sentence(lambda: FILES[name](furnished))
    if name.startswith("runs/"):
        assert load_model(None).run in ("sound", "mine"), "a bad run breaks chat for no other"
        assert {record["name"] for record in run_list.list_records()} == {"sound", "mine"}


@pytest.mark.parametrize(
    "content", [b"{", b"[]", b'{"seconds": "long"}', b'{"samples": 3}', b'{"val_bpb": []}', DEEP]
)
def test_a_damaged_summary_is_reported_and_hides_nothing(furnished, content):
    path = furnished / "runs" / "mine" / "summary.json"
    path.write_bytes(content)
    records = run_list.list_records()
    shown = tables.runs_table(records)
    assert f"{path} is damaged (" in shown
    assert "the command that trained the run writes it again" in shown
    assert "mine" in runs.default_runs()
    tables.run_page(run_list.show_record("mine"))


@pytest.mark.parametrize(
    "line",
    [
        b"{",
        b"[]",
        b"null",
        b'{"kind": 5}',
        b'{"kind": "step", "step": "two"}',
        b'{"kind": "step", "step": 2, "loss": "low"}',
        b'{"kind": "step", "step": 2, "loss": [1]}',
        b'{"step": 1e99}',
        DEEP,
        b'"' + b"x" * (2 << 20) + b'"',
    ],
)
def test_damaged_lines_of_metrics_are_left_out_and_counted(furnished, line, capsys):
    folder = furnished / "runs" / "mine"
    lines = (folder / "metrics.jsonl").read_bytes().splitlines()
    (folder / "metrics.jsonl").write_bytes(b"\n".join([lines[0], line, *lines[1:]]) + b"\n")
    assert [record["step"] for record in runs.read_metrics(folder)] == [1, 2, 3, 4]
    tables.runs_table(run_list.list_records())
    with Run.open("mine", CONFIG.to_dict()):
        pass
    assert "metrics.jsonl: leaving out 1 damaged line\n" in capsys.readouterr().err
    assert (folder / "metrics.jsonl").read_bytes().splitlines() == lines


def test_a_checkpoint_of_another_depth_is_one_sentence(furnished):
    deeper = build(
        scale_model(3, 265, context=32, dim=32, heads=2, kv_heads=1), torch.device("cpu"), torch.float32
    )
    folder = furnished / "runs" / "mine" / "checkpoints"
    state = checkpoint.load_newest(folder).state
    checkpoint.save(folder, 4, deeper.state_dict(), {}, state)
    assert "not of the model that config.json describes" in sentence(lambda: load_model("mine"))


def test_a_state_of_another_step_is_a_damaged_checkpoint(furnished):
    folder = furnished / "runs" / "mine" / "checkpoints"
    (folder / "000004").rename(folder / "000007")
    assert "state.json is of step 4" in sentence(lambda: load_model("mine"))


def test_a_run_folder_removed_while_it_trains_is_one_sentence(home):
    run = Run.open("mine", CONFIG.to_dict())
    run.log({"kind": "step", "step": 1})
    shutil.rmtree(run.folder)
    assert "was removed while 'mine' was training" in sentence(lambda: run.log({"kind": "step", "step": 2}))
    assert "was removed while 'mine' was training" in sentence(run.fail_if_removed)
    run.close()
    assert not run.folder.exists(), "nothing is made anew in its place"


# -- datasets, mixtures and tasks --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("row_groups", 2**31, "counts of shard-00000.parquet are out of range"),
        ("row_groups", -1, "out of range"),
        ("row_groups", 1.5, "shards[0].row_groups is 1.5"),
        ("documents", "many", 'shards[0].documents is "many"'),
        ("sha256", "0" * 63, "SHA-256"),
        ("split", "test", "the split of a shard"),
        ("file", "x" * 300, "no name of a file"),
        ("file", "a\0b", "no name of a file"),
        ("file", "../../secret", "do not trust"),
    ],
)
def test_a_dataset_with_absurd_shards_is_one_sentence(furnished, field, value, words):
    path = furnished / "data" / "text" / "dataset.json"
    record = json.loads(path.read_text())
    record["shards"][0][field] = value
    path.write_text(json.dumps(record))
    text = sentence(lambda: open_dataset("text"))
    assert str(path) in text
    assert words in text


@pytest.mark.parametrize("repeat", [0, 10**12, "2"])
def test_a_mixture_cannot_repeat_without_bound(tmp_path, repeat):
    talk = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]}
    (tmp_path / "me.jsonl").write_text((json.dumps(talk) + "\n") * 4)
    (tmp_path / "mix.json").write_text(json.dumps({"train": [{"task": "me.jsonl", "repeat": repeat}]}))
    assert "repeat" in sentence(lambda: prepare_mixture(find_mixture(str(tmp_path / "mix.json"))))


GOOD_ROWS: dict[str, tuple[str, dict[str, Any]]] = {
    "mmlu": ("mmlu_test.jsonl", {"question": "Sky?", "choices": ["red", "blue"], "answer": 1}),
    "arc-easy": (
        "arc_easy_test.jsonl",
        {"question": "Sky?", "choices": {"text": ["red", "blue"], "label": ["A", "B"]}, "answerKey": "B"},
    ),
    "gsm8k": ("gsm8k_test.jsonl", {"question": "2+2?", "answer": "#### 4"}),
    "humaneval": (
        "humaneval.jsonl",
        {"prompt": "def f():\n", "canonical_solution": "    pass\n", "test": "", "entry_point": "f"},
    ),
}


@pytest.mark.parametrize("task", GOOD_ROWS)
@pytest.mark.parametrize("value", [None, 5, [], {}, [[]], True])
def test_task_rows_with_wrong_types_are_one_sentence(tmp_path, task, value):
    name, row = GOOD_ROWS[task]
    for field in row:
        if value == 5 and field in ("answer", "answerKey") and task in ("mmlu", "arc-easy"):
            continue  # a number may be an answer
        (tmp_path / name).write_text(json.dumps(row) + "\n" + json.dumps({**row, field: value}) + "\n")
        text = sentence(lambda: open_examples(task, "test", tmp_path)[1])
        assert text.startswith(f"Line 2 of {tmp_path / name}")


@pytest.mark.parametrize(
    "args",
    [
        ["chat", "-p", "Hi", "--model", "x" * 300],
        ["eval", "bpb", "--model", "x" * 300],
        ["eval", "bpb", "--model", "mine", "--data", "x" * 300],
        ["train", "base", "--name", "x" * 300],
        ["train", "base", "--data", "x" * 300],
        ["train", "base", "--tokenizer", "x" * 300],
        ["train", "sft", "--from", "x" * 300],
        ["train", "sft", "--mixture", "x" * 300],
        ["train", "sft", "--task", "x" * 300],
        ["train", "sft", "--task", "x" * 300 + ".jsonl"],
        ["eval", "core", "--bundle", "x" * 300],
        ["data", "add", "x" * 300 + ".txt"],
        ["data", "tokenize", "x" * 300],
        ["tok", "eval", "--tokenizer", "x" * 300],
        ["runs", "show", "x" * 300],
        ["runs", "rename", "mine", "x" * 300],
        ["runs", "remove", "x" * 300, "--yes"],
    ],
    ids=lambda args: " ".join(args)[:24],
)
def test_a_name_of_300_letters_is_one_sentence(furnished, args, mistake):
    assert "xxx" in mistake(args)


# -- archives and long lines -------------------------------------------------------------------------


def test_a_core_yaml_of_20_mib_is_not_parsed(tmp_path):
    (tmp_path / "core.yaml").write_bytes(b"icl_tasks:\n" + b"- {label: a, num_fewshot: [1]}\n" * (20 << 15))
    (tmp_path / "eval_meta_data.csv").write_text("Eval Task,Random baseline\n")
    bundle = open_bundle(tmp_path)
    assert "at most 256 kiB" in sentence(lambda: read_tasks(bundle))


@pytest.mark.parametrize(
    "tag", ["!!int ''", "!!float x", "!!timestamp x", "!!binary \xff", "&a [*a]", "? [a] : b"]
)
def test_yaml_with_odd_tags_is_one_sentence(tmp_path, tag):
    (tmp_path / "core.yaml").write_text(f"icl_tasks: {tag}\n")
    (tmp_path / "eval_meta_data.csv").write_text("Eval Task,Random baseline\n")
    assert "core.yaml" in sentence(lambda: read_tasks(open_bundle(tmp_path)))


@pytest.mark.parametrize("kind", [tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK, tarfile.XHDTYPE])
def test_a_name_of_a_tebibyte_in_a_tar_is_not_read(tmp_path, kind):
    header = tarfile.TarInfo("././@LongLink")
    header.type, header.size = kind, 1 << 40
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as tar:
        tar.addfile(tarfile.TarInfo("eval_bundle/core.yaml"))
    (tmp_path / "a.tar").write_bytes(header.tobuf(tarfile.GNU_FORMAT) + content.getvalue())
    assert "a header of 1,099,511,627,776 bytes" in sentence(lambda: open_bundle(tmp_path / "a.tar"))


def test_a_line_of_half_a_gibibyte_is_refused_in_little_memory(tmp_path):
    """In a process of its own, whose memory is measured."""
    path = tmp_path / "a.jsonl"
    with open(path, "wb") as file:
        file.write(b'{"text": "')
        file.truncate(500 << 20)
    code = (
        "import resource, sys; from pathlib import Path; from nanorun.data.readers import read_documents\n"
        "from nanorun.errors import UserError\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "try: list(read_documents(Path(sys.argv[1])))\n"
        "except UserError as error: print(error)\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, path], capture_output=True, text=True, check=True)
    said, grown = done.stdout.splitlines()
    assert f"Line 1 of {path} is longer than {LINE_LIMIT >> 20} MiB" in said
    assert int(grown) < 300 << 10


def test_a_line_with_too_many_values_is_refused_before_it_is_parsed(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": [' + b"{}," * (5 << 20) + b"1]}\n")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert "more than 4,194,304 values" in sentence(lambda: list(read_documents(path)))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 << 10


def test_a_long_line_of_plain_text_is_read_in_pieces(home, tmp_path):
    text = "héllo wörld " * 800_000  # 11 MB without a line break
    (tmp_path / "long.txt").write_text(text)
    documents = list(read_documents(tmp_path / "long.txt"))
    assert "".join(documents) == text
    assert max(map(len, documents)) <= 1 << 20
    assert add_files([tmp_path / "long.txt"]).total("text_bytes") == len(text.encode())
