"""`nanorun runs`: what was trained, what it came from, and other names for it."""

import json
import os
import pty
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from small_tasks import tiny_config

from nanorun import checkpoint, run_list
from nanorun.errors import UserError
from nanorun.runs import Run, read_config, write_json

ROOT = Path(__file__).resolve().parents[1]
STEPS = 4


def add_run(name: str, kind: str, second: int, *, finished: bool = True, **record: Any) -> Path:
    """A run with a small checkpoint; it finished at that second."""
    config = {**tiny_config(STEPS).to_dict(), "kind": kind, **record}
    with Run.open(name, config) as run:
        run.log({"kind": "eval", "step": 2, "val_bpb": 1.25})
        checkpoint.save(run.checkpoints, STEPS if finished else 2, {"w": torch.zeros(100)}, {}, {})
        if finished:
            figures = {"val_bpb": 1.5} if kind != "rl" else {"val_reward_before": 0.25, "val_reward": 0.5}
            finished_at = f"2026-11-17T02:00:{second:02d}Z"
            parent = record.get("parent") or record.get("rl", {}).get("parent")
            run.write_summary(
                {"name": name, "steps": STEPS, "finished": finished_at, "parent": parent, **figures}
            )
    return run.folder


@pytest.fixture
def family(home: Path) -> Path:
    """base → mid → sft → rl, and a newer base model of its own."""
    add_run("a-base", "base", 1)
    add_run("a-mid", "sft", 2, parent="a-base", mixture={"name": "sample-mid"})
    add_run("a-sft", "sft", 3, parent="a-mid", mixture={"name": "sample"})
    add_run("a-rl", "rl", 4, rl={"parent": "a-sft", "parent_step": STEPS, "tasks": ["echo"]})
    add_run("mine", "base", 5)
    return home


def nanorun(home: Path, *args: str, code: int = 0) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, "-m", "nanorun", *args],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "NANORUN_HOME": str(home)},
        stdin=subprocess.DEVNULL,
        timeout=120,
    )
    assert done.returncode == code, done.stderr + done.stdout
    assert "Traceback" not in done.stderr
    return done


def test_the_list_shows_stages_scores_sizes_lineage_and_what_chat_takes(family):
    write_json(family / "runs" / "a-sft" / "exam.json", {"step": STEPS, "chatcore": 0.875, "tasks": []})
    write_json(family / "runs" / "a-mid" / "exam.json", {"step": 1, "chatcore": 0.5, "tasks": []})
    shown = nanorun(family, "runs").stdout
    assert shown == nanorun(family, "runs", "list").stdout
    records = json.loads(nanorun(family, "runs", "--json").stdout)["runs"]
    assert [(r["name"], r["stage"]) for r in records] == [
        ("mine", "base"),
        ("a-rl", "rl"),
        ("a-sft", "sft"),
        ("a-mid", "mid"),
        ("a-base", "base"),
    ]
    assert records[1]["lineage"] == ["a-base", "a-mid", "a-sft", "a-rl"]
    assert records[1]["scores"] == {"val_reward_before": 0.25, "val_reward": 0.5}
    assert records[2]["scores"] == {"val_bpb": 1.5, "chatcore": 0.875}
    assert records[3]["scores"] == {"val_bpb": 1.5}, "that exam was of an earlier checkpoint"
    assert all(r["bytes"] > 1000 for r in records)
    assert [r["name"] for r in records if r["is_default"]] == ["mine"]
    assert "nanorun chat takes 'mine', a base model: it continues text; --model NAME" in shown
    assert "a-base → a-mid → a-sft" in shown
    assert "ChatCORE 0.875" in shown
    assert "reward 0.25 → 0.50" in shown


def test_an_unfinished_run_shows_how_far_it_is_and_how_to_resume(family, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["nanorun", "train", "base", "--name", "new", "--fresh"])
    add_run("new", "base", 0, finished=False)
    record = run_list.show_record("new")
    assert (record["steps"], record["planned_steps"], record["finished"]) == (2, STEPS, False)
    assert record["scores"] == {"val_bpb": 1.25}, "of its last evaluation"
    assert record["commands"]["resume"] == "nanorun train base --name new", (
        "not --fresh, which would delete it"
    )
    shown = nanorun(family, "runs", "show", "new").stdout
    assert "2 of 4" in shown
    assert "nanorun chat --model new" in shown
    assert str(family / "runs" / "new" / "metrics.jsonl") in shown
    with Run.open("new", read_config("new")):
        assert "in use by" in nanorun(family, "runs", "show", "new").stdout


@pytest.mark.parametrize("damage", ["config", "no config", "unreadable config", "settings", "weights"])
def test_a_damaged_run_is_explained_and_hides_no_other(family, damage):
    folder = family / "runs" / "mine"
    if damage == "weights":
        weights = next(folder.glob("checkpoints/*/model.safetensors"))
        weights.write_bytes(weights.read_bytes()[:-1])
    elif damage in ("no config", "unreadable config"):
        (folder / "config.json").unlink()
        if damage == "unreadable config":
            (folder / "config.json").mkdir()
    else:
        (folder / "config.json").write_text("{" if damage == "config" else '{"kind": "base"}')
    shown = nanorun(family, "runs").stdout
    assert shown.count("'mine' is damaged: ") == 1
    assert "nanorun chat takes 'a-rl', a chat model" in shown, "which chat would skip to"
    assert nanorun(family, "runs", "remove", "mine", "--yes").stdout.startswith("removed 'mine' (")


def test_a_renamed_run_is_the_parent_of_its_children_under_its_new_name(family):
    result = run_list.rename("a-mid", "notes")
    assert result["children"] == ["a-sft"]
    assert run_list.show_record("a-rl")["lineage"] == ["a-base", "notes", "a-sft", "a-rl"]
    run_list.rename("a-sft", "talks")
    assert run_list.show_record("a-rl")["lineage"] == ["a-base", "notes", "talks", "a-rl"]
    assert read_config("a-rl")["rl"]["parent"] == run_list.show_record("a-rl")["summary"]["parent"] == "talks"
    assert run_list.show_record("talks")["summary"]["name"] == "talks"
    assert sorted(os.listdir(family / "runs")) == ["a-base", "a-rl", "mine", "notes", "talks"]


def test_the_command_that_resumes_a_run_follows_its_name(family, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["nanorun", "train", "sft", "--from", "mine", "--mixture", "x"])
    add_run("sft-mine", "sft", 6, finished=False, parent="mine", mixture={"name": "x"})
    run_list.rename("mine", "notes")
    resume = run_list.show_record("sft-mine")["commands"]["resume"]
    assert resume == "nanorun train sft --from notes --mixture x --name sft-mine"
    run_list.rename("sft-mine", "talks")
    resume = run_list.show_record("talks")["commands"]["resume"]
    assert resume == "nanorun train sft --from notes --mixture x --name talks"


DYING = """
import os, signal, sys
from nanorun import run_list
left = int(sys.argv[1])
def watch(event, arguments):
    global left
    if event == "os.rename":
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
sys.addaudithook(watch)
run_list.rename("a-base", "notes")
"""


def test_a_rename_that_was_killed_anywhere_is_completed_by_the_same_command(family, tmp_path):
    add_run("other", "sft", 6, parent="a-base", mixture={"name": "sample"})
    killed = 0
    for stop_at in range(1, 20):
        copy = tmp_path / f"home{stop_at}"
        shutil.copytree(family, copy)
        env = {**os.environ, "NANORUN_HOME": str(copy)}
        died = subprocess.run([sys.executable, "-c", DYING, str(stop_at)], cwd=ROOT, env=env)
        if died.returncode == 0:
            break
        killed += 1
        nanorun(copy, "runs", "rename", "a-base", "notes")
        records = json.loads(nanorun(copy, "runs", "--json").stdout)["runs"]
        lineages = {r["name"]: r["lineage"] for r in records}
        assert lineages["a-rl"] == ["notes", "a-mid", "a-sft", "a-rl"]
        assert lineages["other"] == ["notes", "other"]
        assert not any(r["error"] for r in records)
    assert killed >= 5, "two children with a config and a summary each, and the folder"


def test_removing_asks_says_what_it_frees_and_needs_yes_without_a_terminal(family):
    refused = nanorun(family, "runs", "remove", "mine", code=2)
    assert "This would delete 'mine' (" in refused.stderr
    assert "add --yes" in refused.stderr
    for answer, stays in ((b"n\n", True), (b"y\n", False)):
        inside, outside = pty.openpty()
        os.write(inside, answer)
        env = {**os.environ, "NANORUN_HOME": str(family)}
        done = subprocess.run(
            [sys.executable, "-m", "nanorun", "runs", "remove", "mine"],
            stdin=outside,
            stdout=subprocess.PIPE,
            stderr=outside,
            cwd=ROOT,
            env=env,
            timeout=60,
        )
        os.close(inside)
        os.close(outside)
        assert done.returncode == (2 if stays else 0)
        assert (family / "runs" / "mine").exists() == stays
    assert done.stdout.strip().startswith(b"removed 'mine' (")
    assert sorted(os.listdir(family / "runs")) == ["a-base", "a-mid", "a-rl", "a-sft"]


def test_a_parent_that_an_unfinished_run_needs_is_not_removed(family):
    add_run("half", "sft", 6, finished=False, parent="a-base", mixture={"name": "sample"})
    refused = nanorun(family, "runs", "remove", "a-base", "--yes", code=2)
    assert "'a-base' is the parent of 'half', which has not finished" in refused.stderr
    done = nanorun(family, "runs", "remove", "a-base", "half", "--yes", "--json")
    assert "'a-mid' came from it" in done.stderr
    result = json.loads(done.stdout)
    assert (result["removed"], result["children"]) == (["a-base", "half"], ["a-mid"])
    assert result["bytes"] > 2000
    assert run_list.show_record("a-mid")["lineage"] == ["a-base", "a-mid"]


def test_a_run_in_use_is_neither_renamed_nor_removed(family):
    with Run.open("a-sft", read_config("a-sft")):
        for command in (["rename", "a-sft", "x"], ["rename", "a-mid", "x"], ["remove", "a-sft", "--yes"]):
            refused = nanorun(family, "runs", *command, code=2).stderr
            assert "The run 'a-sft' is in use by process" in refused, command
        assert "a-sft" in [r["name"] for r in run_list.list_records() if r["in_use_by"]]
    assert read_config("a-sft")["parent"] == "a-mid"


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["show", "nobody"], "There is no run 'nobody'"),
        (["remove", "nobody", "--yes"], "There is no run 'nobody'"),
        (["rename", "nobody", "x"], "There is no run 'nobody'"),
        (["rename", "mine", "a-rl"], "There is a run 'a-rl' already"),
        (["rename", "mine", "../x"], "cannot name a run"),
        (["rename", "mine"], "Missing argument"),
    ],
)
def test_a_mistake_is_one_sentence(family, args, words, mistake):
    assert words in mistake(["runs", *args])
    assert len(os.listdir(family / "runs")) == 5


def test_an_empty_home_says_how_to_begin(home):
    assert "nothing is trained here yet: " in nanorun(home, "runs").stdout
    with pytest.raises(UserError, match="existing runs: none yet"):
        run_list.show_record("mine")
