"""A run's folder: its configuration, its metrics, and its lock."""

import json
import math
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nanorun.config import Config, Horizon, scale
from nanorun.errors import UserError
from nanorun.runs import Run, default_runs, list_runs, newest_run, read_config, read_metrics

CONFIG = {"kind": "base", "model": {"depth": 4, "windows": ["S", "L"]}, "train": {"steps": 10, "seed": 0}}

HOLDER = """
import os, sys, time
from nanorun.runs import Run
run = Run.open("mine", {"a": 1})
if "fork" in sys.argv:
    ready, write = os.pipe()
    if os.fork() == 0:
        os.write(write, b".")
        time.sleep(60)
    os.read(ready, 1)  # the child has run what it registered to run after a fork
run.log({"step": 1})
print(os.getpid(), flush=True)
time.sleep(60)
"""


DYING = """
import os, signal, sys
from nanorun.runs import Run
left = int(sys.argv[1])
def watch(event, arguments):
    global left
    if event in ("os.rename", "os.mkdir", "os.rmdir", "os.remove", "shutil.rmtree"):
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
sys.addaudithook(watch)
Run.open("mine", {"a": 2}, fresh=True).close()
"""


def start_holder(*arguments: str) -> subprocess.Popen[str]:
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, *arguments],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        cwd=Path(__file__).parents[1],
    )
    assert holder.stdout is not None
    assert holder.stdout.readline().strip() == str(holder.pid)
    return holder


def metrics_of(folder: Path) -> list[int]:
    return [record["step"] for record in read_metrics(folder)]


def test_a_run_resumes_with_the_same_config(home):
    with Run.open("mine", CONFIG) as run:
        run.log({"step": 1})
    with Run.open("mine", {**CONFIG, "model": {"depth": 4, "windows": ("S", "L")}}) as run:
        run.log({"step": 2})
        assert run.checkpoints.is_dir()
    assert read_config("mine") == CONFIG
    assert metrics_of(home / "runs" / "mine") == [1, 2]


def begin(name: str, config: dict[str, Any]) -> Path:
    """A run that has logged a step."""
    with Run.open(name, config) as run:
        run.log({"step": 1})
    return run.folder


def test_another_config_is_rejected_with_the_differences(home):
    begin("mine", CONFIG)
    other = {"kind": "base", "model": {"depth": 6, "windows": ["S"]}, "train": {"steps": 10, "new": True}}
    with pytest.raises(UserError) as refused:
        Run.open("mine", other)
    assert "(--depth was 4 and is now 6; --seed was 0 and is now absent; train.new was" in str(refused.value)
    assert "and 1 more" in str(refused.value)
    assert "--fresh" in str(refused.value)
    assert "--name" in str(refused.value)
    Run.open("mine", CONFIG).close()  # the refused one left no lock behind


def test_options_are_listed_before_derived_fields(home):
    begun = scale(4, 1024)
    begin("mine", begun.to_dict())
    with pytest.raises(UserError, match=r"other settings \(--depth was 4 and is now 6; --steps was"):
        Run.open("mine", scale(6, 1024).to_dict())
    with pytest.raises(UserError, match=r"other settings \(--data was \"sample\" and is now \"other\"\)"):
        Run.open("mine", replace(begun, data="other").to_dict())


def test_a_run_may_become_longer_and_save_more_often_but_not_shorter(home, capsys):
    begun = scale(4, 1024, horizon=Horizon(steps=100))
    folder = begin("mine", begun.to_dict())
    (folder / "summary.json").write_text("{}")
    longer = replace(begun, train=replace(begun.train, steps=2000, save_every=7))
    longer = replace(longer, optim=replace(begun.optim, warmup_steps=40))  # it may follow the length
    Run.open("mine", longer.to_dict()).close()
    assert Config.from_dict(read_config("mine")) == longer
    assert "'mine' becomes longer: 2,000 steps instead of 100" in capsys.readouterr().err
    assert not (folder / "summary.json").exists(), "it is not finished any more"
    assert metrics_of(folder) == [1]
    Run.open("mine", replace(longer, train=replace(longer.train, eval_every=9)).to_dict()).close()
    assert capsys.readouterr().err == ""
    assert read_config("mine")["train"]["eval_every"] == 9
    with pytest.raises(UserError, match="--steps was 2000 and is now 100"):
        Run.open("mine", begun.to_dict())
    other = replace(longer, train=replace(longer.train, steps=3000, batch_tokens=4096))
    with pytest.raises(UserError, match="--batch-tokens was"):
        Run.open("mine", other.to_dict())


@pytest.mark.parametrize(
    ("kind", "change", "words"),
    [
        ("sft", {"parent": "other"}, '(--from was "mine" and is now "other")'),
        ("sft", {"epochs": 1}, "(--epochs was 2 and is now 1)"),
        ("sft", {"mixture": {"name": "x", "fingerprint": "f"}}, '(--mixture (mixture.name) was "sft" and is'),
        ("rl", {"rl": {"parent": "mine", "max_tokens": 8}}, "(--max-tokens was 4 and is now 8)"),
        ("rl", {"optim": {"head_lr": 2, "mu_lr": 2}}, "(--lr-fraction (optim.head_lr) was 1 and is now 2)"),
    ],
)
def test_a_rejection_names_only_options_of_the_verb(home, kind, change, words):
    config = {"kind": kind, "train": {"steps": 10}, "optim": {"head_lr": 1, "mu_lr": 1}}
    if kind == "sft":
        config |= {"parent": "mine", "epochs": 2, "mixture": {"name": "sft", "fingerprint": "f"}}
    else:
        config |= {"rl": {"parent": "mine", "max_tokens": 4}}
    begin("chat", config)
    with pytest.raises(UserError) as refused:
        Run.open("chat", {**config, **change})
    assert words in str(refused.value)
    assert "--config" not in str(refused.value)


def test_a_start_that_fails_before_the_first_step_leaves_nothing(home):
    def fail_after(step: int) -> None:
        with Run.open("mine", CONFIG) as run:
            run.log({"step": step})
            raise UserError("no such data")

    with pytest.raises(UserError, match="no such data"):
        fail_after(step=0)
    assert os.listdir(home / "runs") == []
    with pytest.raises(UserError, match="no such data"):
        fail_after(step=1)
    assert metrics_of(home / "runs" / "mine") == [1], "what has trained stays"


def test_a_run_that_was_killed_before_its_first_step_does_not_reject_another_config(home):
    Run.open("mine", CONFIG).close()
    (home / "runs" / "mine" / "plan.json").write_text("{}")
    Run.open("mine", {"a": 2}).close()
    assert read_config("mine") == {"a": 2}
    assert sorted(os.listdir(home / "runs" / "mine")) == ["checkpoints", "config.json", "lock"]


def test_a_config_with_earlier_field_names_loads_and_its_run_resumes(home):
    old = json.loads((Path(__file__).parent / "config_before_lr_names.json").read_text())
    config = Config.from_dict(old)
    assert config.optim.matrix_lr == old["optim"]["matrix_rate"]
    assert config.optim.final_lr_fraction == old["optim"]["final_rate"]
    assert config.optim.matrix_weight_decay == old["optim"]["matrix_decay"]
    begin("mine", old)
    Run.open("mine", config.to_dict()).close()
    other = replace(config, optim=replace(config.optim, head_lr=1.0))
    with pytest.raises(UserError, match=r"optim\.head_lr was"):
        Run.open("mine", other.to_dict())


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda r: r.pop("model"), "it has no model: use a run's config.json"),
        (lambda r: (r.pop("model"), r.pop("kind")), "it has no model and no kind"),
        (lambda r: r.update(train=3), "The configuration's train is 3: it must hold settings by name"),
        (lambda r: r["train"].pop("steps"), "The configuration's train has no steps"),
        (lambda r: r["train"].update(steps="many"), 'steps is "many": it must be a whole number'),
        (lambda r: r["train"].update(steps=2.5), "steps is 2.5: it must be a whole number"),
        (lambda r: r["optim"].update(max_grad_norm="x"), 'max_grad_norm is "x": it must be a number'),
        (lambda r: r["model"].update(smear=1), "smear is 1: it must be true or false"),
        (lambda r: r.update(data=None), "data is null: it must be text"),
    ],
)
def test_an_invalid_configuration_is_explained(change, sentence):
    record = scale(4, 1024).to_dict()
    change(record)
    with pytest.raises(UserError) as refused:
        Config.from_dict(record)
    assert sentence in str(refused.value)


def test_a_damaged_run_is_skipped_and_reported(home, capsys):
    for age, name in enumerate(("sound", "damaged")):
        with Run.open(name, {"kind": "base"}) as run:
            add_checkpoint(run, 1000 + age)
    assert newest_run("base") == "damaged"
    (home / "runs" / "damaged" / "config.json").write_text('{"kind":')
    assert newest_run("base") == default_runs()[0] == "sound"
    assert "skipping the run 'damaged'" in capsys.readouterr().err


def test_fresh_replaces_everything_and_leaves_nothing_hidden(home):
    with Run.open("mine", CONFIG) as run:
        run.log({"step": 1})
        (run.checkpoints / "000001").mkdir()
    with Run.open("mine", {"a": 2}, fresh=True) as run:
        assert list(read_metrics(run.folder)) == []
        assert list(run.checkpoints.iterdir()) == []
        with pytest.raises(UserError, match="in use"):
            Run.open("mine", {"a": 2})
    assert read_config("mine") == {"a": 2}
    assert os.listdir(home / "runs") == ["mine"]


def test_a_fresh_start_killed_at_any_time_leaves_the_old_run_or_the_new(home):
    with Run.open("mine", CONFIG) as run:
        for step in range(1, 4):
            run.log({"step": step})
        (run.checkpoints / "000003").mkdir()
        run.write_summary({"done": True})
    (home / "runs" / ".mine.older.old-x").mkdir()  # belongs to a run called mine.older
    old = sorted(os.listdir(run.folder))
    outcomes = set()
    for stop_at in range(1, 12):  # the process dies at its first, second, ... change of the file system
        died = subprocess.run([sys.executable, "-c", DYING, str(stop_at)], cwd=Path(__file__).parents[1])
        assert died.returncode in (0, -signal.SIGKILL)
        stored = run.folder / "config.json"
        config = {"a": 2} if stored.exists() and read_config("mine") != CONFIG else CONFIG
        with Run.open("mine", config) as run:
            if config == CONFIG:
                assert sorted(os.listdir(run.folder)) == old
                assert metrics_of(run.folder) == [1, 2, 3]
            else:
                assert metrics_of(run.folder) == []
        assert sorted(os.listdir(home / "runs")) == [".mine.older.old-x", "mine"]
        outcomes.add((died.returncode, len(config)))
        if config != CONFIG:
            break
    assert outcomes == {(-signal.SIGKILL, len(CONFIG)), (-signal.SIGKILL, 1)}


def test_concurrent_processes_exclude_each_other(home):
    code = (
        "import os, sys, time; from nanorun.errors import UserError; from nanorun.runs import Run\n"
        "won, end = 0, time.monotonic() + 1\n"
        "while time.monotonic() < end:\n"
        "    try: run = Run.open('mine', {'a': 1}, fresh=won % 2 == 0)\n"
        "    except UserError as error: assert 'in use' in str(error); continue\n"
        "    with run: os.mkdir('inside'); time.sleep(0.001); os.rmdir('inside')\n"
        "    won += 1\n"
        "print(won)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, cwd=home, env=environment
        )
        for _ in range(3)
    ]
    assert all(int(process.communicate(timeout=30)[0]) >= 0 for process in processes)
    assert [process.returncode for process in processes] == [0, 0, 0]
    assert os.listdir(home / "runs") == ["mine"]


def test_a_fresh_start_does_not_touch_a_run_in_use(home):
    with Run.open("mine", CONFIG) as run:
        run.log({"step": 1})
        with pytest.raises(UserError, match="in use"):
            Run.open("mine", CONFIG, fresh=True)
        assert metrics_of(run.folder) == [1]


def test_a_name_outside_the_folder_is_rejected(home):
    with pytest.raises(UserError, match="cannot name a run"):
        Run.open("../elsewhere", CONFIG)


@pytest.mark.parametrize("forked", [False, True])
def test_a_second_process_is_rejected_until_the_first_is_killed(home, forked):
    holder = start_holder(*["fork"] * forked)
    try:
        with pytest.raises(UserError) as refused:
            Run.open("mine", {"a": 1})
        assert f"in use by process {holder.pid} on {os.uname().nodename} since 20" in str(refused.value)
        assert "nanorun.runs" in str(refused.value), "the command is reported"
        os.kill(holder.pid, signal.SIGKILL)  # only the holder: a forked worker of it lives on
        holder.wait()
        with Run.open("mine", {"a": 1}) as run:
            assert json.loads((run.folder / "lock").read_text())["pid"] == os.getpid()
            assert metrics_of(run.folder) == [1], "the log of a killed process survives"
    finally:
        os.killpg(holder.pid, signal.SIGKILL) if forked or holder.poll() is None else None
        holder.wait()


def test_every_line_is_valid_json_whatever_is_logged(home):
    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is not JSON")

    with Run.open("mine", CONFIG) as run:
        run.log({"step": 1, "loss": math.nan, "norm": math.inf, "low": -math.inf, "text": "ü\n\ud800"})
        run.log({"step": np.int64(2), "loss": np.float32("nan"), "all": np.arange(2), "path": Path("x")})
        lines = (run.folder / "metrics.jsonl").read_text().splitlines()
        records = [json.loads(line, parse_constant=refuse) for line in lines]
        assert records[0]["loss"] == "NaN"
        assert records[1] == {"step": 2, "loss": "NaN", "all": [0, 1], "path": "x"}
        first = next(read_metrics(run.folder))
        assert math.isnan(first["loss"])
        assert (first["norm"], first["low"]) == (math.inf, -math.inf)


def test_resuming_rewinds_the_metrics_and_drops_a_partial_line(home):
    with Run.open("mine", CONFIG) as run:
        run.log({"event": "start"})
        for step in range(1, 8):
            run.log({"step": step, "loss": 1 / step})
        run.log({"step": 5, "val": 3.0})
    path = home / "runs" / "mine" / "metrics.jsonl"
    with open(path, "ab") as file:
        file.write(b'{"step": 5, "lo')
    assert len(list(read_metrics(path.parent))) == 9, "a reader skips the partial line"
    with Run.open("mine", CONFIG) as run:
        assert run.rewind_metrics(5) == 2
        assert run.rewind_metrics(5) == 0
        run.log({"step": 6})
        assert [record.get("step") for record in read_metrics(run.folder)] == [None, 1, 2, 3, 4, 5, 5, 6]
    assert path.read_bytes().count(b"\n") == 8
    assert sorted(os.listdir(path.parent)) == ["checkpoints", "config.json", "lock", "metrics.jsonl"]


def test_a_partial_line_is_dropped_when_a_run_resumes_without_rewinding(home):
    with Run.open("mine", CONFIG) as run:
        run.log({"step": 1})
    with open(home / "runs" / "mine" / "metrics.jsonl", "ab") as file:
        file.write(b'{"step": 2, "text": "' + b"x" * 200_000)
    with Run.open("mine", CONFIG) as run:
        run.log({"step": 2})
        assert metrics_of(run.folder) == [1, 2]


def test_a_full_disk_leaves_complete_lines_and_is_reported(home):
    code = (
        "import resource; from nanorun.runs import Run\n"
        "run = Run.open('mine', {'a': 1}); resource.setrlimit(resource.RLIMIT_FSIZE, (4000, 4000))\n"
        "for step in range(1000): run.log({'step': step, 'text': 'x' * 100})\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=Path(__file__).parents[1]
    )
    assert "UserError" in result.stderr
    assert "metrics.jsonl cannot be written (File too large)" in result.stderr
    lines = (home / "runs" / "mine" / "metrics.jsonl").read_text().splitlines(keepends=True)
    assert [json.loads(line)["step"] for line in lines] == list(range(len(lines)))
    assert len(lines) > 20


def test_the_summary_is_valid_json(home):
    with Run.open("mine", CONFIG) as run:
        run.write_summary({"bpb": 1.5, "worst": math.inf})
        assert json.loads((run.folder / "summary.json").read_text()) == {"bpb": 1.5, "worst": "Infinity"}


def add_checkpoint(run: Run, trained_at: float) -> None:
    path = run.checkpoints / "000007"
    path.mkdir()
    os.utime(path, (trained_at, trained_at))


def test_the_newest_run_is_the_last_trained_whenever_its_files_were_written(home):
    assert newest_run("base") is None
    for age, (name, kind) in enumerate([("old", "base"), ("chat", "sft"), ("mine", "base"), ("new", "base")]):
        with Run.open(name, {"kind": kind}) as run:
            run.log({"step": 1})
            if name != "new":
                add_checkpoint(run, 1000 + age)
    assert default_runs() == ["mine", "chat", "old"], "the newest of all has no checkpoint yet"
    assert default_runs(prefer_chat=True) == ["chat", "mine", "old"]
    assert (newest_run("base"), newest_run("sft"), newest_run("rl")) == ("mine", "chat", None)
    with Run.open("chat", {"kind": "sft"}) as run:
        run.log({"step": 2})
        (run.folder / "exam.json").write_text("{}")
    assert default_runs()[0] == "mine", "it has not trained further"
    with Run.open("old", {"kind": "base"}) as run:
        run.write_summary({"steps": 7, "finished": "2026-01-01T00:00:00Z"})
    assert default_runs()[0] == "old", "when it finished, though its files are older"
    assert [(run.name, run.checkpoint) for run in list_runs()][:2] == [("new", None), ("old", 7)]


def test_of_stages_trained_at_the_same_time_the_last_is_the_newest(home):
    mixtures = {"a-sft": "sft", "z-mid": "sample-mid"}
    for name, kind in (("z-base", "base"), ("a-sft", "sft"), ("z-mid", "sft"), ("b-rl", "rl")):
        with Run.open(name, {"kind": kind, "mixture": {"name": mixtures.get(name, "")}}) as run:
            add_checkpoint(run, 1000)
    assert default_runs() == ["b-rl", "a-sft", "z-mid", "z-base"]


def test_a_damaged_config_is_reported_and_fresh_replaces_it(home):
    begin("mine", CONFIG)
    (home / "runs" / "mine" / "config.json").write_text('{"a":')
    with pytest.raises(UserError, match=r"config\.json is damaged"):
        Run.open("mine", CONFIG)
    Run.open("mine", CONFIG, fresh=True).close()
    assert read_config("mine") == CONFIG
