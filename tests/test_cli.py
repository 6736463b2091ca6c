"""The command line in real processes: output, exit codes and files."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from nanorun.evals.chat import SAMPLE_TASKS
from nanorun.runs import read_metrics

ROOT = Path(__file__).resolve().parents[1]


def nanorun(home: Path, *args: str | Path, code: int = 0) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, "-m", "nanorun", *map(str, args)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "NANORUN_HOME": str(home)},
        timeout=240,
    )
    assert done.returncode == code, done.stderr + done.stdout
    assert "Traceback" not in done.stderr
    return done


def complaint(home: Path, *args: str | Path) -> str:
    """The one sentence of a user error, with nothing on stdout."""
    done = nanorun(home, *args, code=2)
    assert done.stdout == ""
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith("nanorun: ")
    return lines[0]


def last_json(done: subprocess.CompletedProcess[str]) -> dict:
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    path = tmp_path / "tales.jsonl"
    lines = [
        json.dumps({"text": f"The {w} cat number {i} sat on a mat, humming."})
        for i in range(300)
        for w in "abc"
    ]
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """A speedrun with a few steps per stage."""
    monkeypatch.setenv("NANORUN_SPEEDRUN_STEPS", "6")


@pytest.fixture(scope="module")
def raced(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """A home whose speedrun was killed during SFT and run again, and the output of the second run."""
    home = tmp_path_factory.mktemp("raced")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NANORUN_SPEEDRUN_STEPS", "6")
        patch.setenv("NANORUN_HOME", str(home))
        child = subprocess.Popen(
            [sys.executable, "-m", "nanorun", "speedrun"], cwd=ROOT, stderr=subprocess.PIPE
        )
        # No limit of its own: on a busy machine the earlier stages take minutes.
        while len(steps_of(home, "sample-sft")) < 3 and child.poll() is None:
            time.sleep(0.005)
        child.kill()
        _, errors = child.communicate()
        assert not (home / "runs" / "sample-sft" / "summary.json").exists(), errors.decode()
        return home, nanorun(home, "speedrun")


def steps_of(home: Path, run: str) -> list[int]:
    records = read_metrics(home / "runs" / run)
    return [record["step"] for record in records if record["kind"] == "step"]


@pytest.mark.timeout(900)  # with the two speedruns of its fixture
def test_a_speedrun_killed_during_sft_resumes_there(raced):
    home, again = raced
    assert "3/6 the base model is trained already" in again.stderr
    assert "4/6 midtraining is done already" in again.stderr
    assert "resuming 'sample-sft' from step" in again.stderr
    for run in ("sample-base", "sample-mid", "sample-sft", "sample-rl"):
        assert steps_of(home, run) == list(range(1, 7))


def test_a_speedrun_prints_its_results_and_where_they_are(raced):
    home, again = raced
    for words in (
        "bits per byte",
        "after SFT",
        "after RL",
        "> What is 12 + 30?",
        "nanorun chat",
        "reward.png",
    ):
        assert words in again.stdout
    assert (home / "runs" / "sample-rl" / "reward.png").is_file()
    assert len(again.stdout.splitlines()) < 60, "one or two screens"


def test_a_finished_speedrun_repeats_no_stage(raced, quick):
    home, _ = raced
    before = {path: path.stat().st_mtime_ns for path in home.rglob("*") if path.is_file()}
    again = last_json(nanorun(home, "speedrun", "--json"))
    assert [stage["did"] for stage in again["stages"]] == ["already done"] * 6
    assert {path: path.stat().st_mtime_ns for path in home.rglob("*") if path.is_file()} == before
    asked = [[row["task"] for row in exam["tasks"]] for exam in again["exams"].values()]
    assert asked == [list(SAMPLE_TASKS)] * 2
    assert {"val_reward", "val_pass@1"} <= again["rl"]["before"].keys() & again["rl"].keys()
    judged = last_json(
        nanorun(home, "eval", "bpb", "--model", "sample-base", "--max-tokens", "150000", "--json")
    )
    assert judged["bpb"] == pytest.approx(again["base"]["val_bpb"], rel=1e-6)


def test_a_speedrun_rebuilds_damaged_results(raced, quick, tmp_path):
    home = shutil.copytree(raced[0], tmp_path / "damaged")
    (home / "tokenizers" / "sample" / "ranks.tiktoken").unlink()
    shard = next((home / "data" / "sample").glob("*.parquet"))
    shard.write_bytes(shard.read_bytes()[:-5])
    (home / "runs" / "sample-rl" / "exam.json").unlink()
    again = last_json(nanorun(home, "speedrun", "--json"))
    idle = [stage["did"] == "already done" for stage in again["stages"]]
    assert idle == [False, False, True, True, True, False]


def test_getting_the_sample_again_is_an_error_only_if_it_differs(home):
    nanorun(home, "data", "get", "sample", "--size", "20kB")
    assert "already here" in nanorun(home, "data", "get", "sample", "--size", "20kB").stderr
    assert "--replace" in complaint(home, "data", "get", "sample", "--size", "30kB")
    nanorun(home, "data", "get", "sample", "--size", "30kB", "--replace")


def test_training_in_an_empty_home_builds_the_sample_world_first(home):
    small = ["--depth", "1", "--context", "32", "--batch-tokens", "64", "--steps", "2", "--save-every", "1"]
    trained = last_json(nanorun(home, "train", "base", *small, "--name", "first", "--json"))
    assert trained["steps"] == 2
    config = home / "runs" / "first" / "config.json"
    again = last_json(
        nanorun(home, "train", "base", "--config", config, "--steps", "3", "--name", "second", "--json")
    )
    assert again["steps"] == 3
    record = json.loads(config.read_text())
    for change, words in (
        ({"depth": "x"}, 'depth is "x": it must be a whole number'),
        ({"heads": 3}, "evenly"),
        ({"kv_heads": 0}, "kv_heads is 0: it must be from 1"),
    ):
        config.write_text(json.dumps({**record, "model": {**record["model"], **change}}))
        assert words in complaint(home, "train", "base", "--config", config, "--name", "third")
    assert not (home / "runs" / "third").exists()


@pytest.fixture
def small_world(home) -> Path:
    """A home with a little data and a tokenizer of 300 tokens."""
    nanorun(home, "data", "get", "sample", "--size", "20kB")
    nanorun(home, "tok", "train", "--vocab", "300", "--name", "small")
    return home


def test_a_run_of_many_days_needs_confirmation_before_it_starts(small_world):
    sentence = complaint(small_world, "train", "base", "--depth", "14", "--ratio", "10.5")
    assert re.search(r"about [\d,]+ d .*--depth \d+, about .*--yes", sentence), sentence
    assert not (small_world / "runs").exists()
    meant = subprocess.Popen(
        [sys.executable, "-m", "nanorun", *"train base --depth 14 --ratio 10.5 --yes".split()],
        cwd=ROOT,
        env={**os.environ, "NANORUN_HOME": str(small_world)},
        stderr=subprocess.PIPE,
        text=True,
    )
    assert re.search(r"about [\d,]+ d by the plan", meant.stderr.readline())
    meant.kill()
    meant.communicate()


def test_a_plan_is_of_the_text_and_the_tokenizer_that_training_would_use(small_world, tmp_path):
    said = nanorun(small_world, "plan", "--depth", "4", "--gpu", "h100").stdout
    assert "of the tokenizer 'small'; the text is 'sample'" in " ".join(said.split())
    here = last_json(nanorun(small_world, "plan", "--depth", "4", "--gpu", "h100", "--json"))
    assert here["vocab_size"] == 300
    assert here["eval_tokens"] < 100_000, "no more than the text that is held out"
    asked = last_json(nanorun(small_world, "plan", "--gpu", "h100", "--vocab", "500", "--json"))
    assert asked["vocab_size"] == 500
    empty = tmp_path / "empty"
    empty.mkdir()
    assert last_json(nanorun(empty, "plan", "--gpu", "h100", "--json"))["vocab_size"] == 32_768


def test_own_text_is_added_tokenized_and_listed(home, corpus):
    added = last_json(nanorun(home, "data", "add", corpus, "--json"))
    assert (added["name"], added["documents"], added["shards"]) == ("tales", 900, 2)
    listed = last_json(nanorun(home, "data", "ls", "--verify", "--json"))
    assert listed["datasets"][0]["bytes"] == added["bytes"]
    trained = last_json(nanorun(home, "tok", "train", "--vocab", "300", "--json"))
    assert trained["vocab_size"] == 300
    judged = last_json(nanorun(home, "tok", "eval", "--json"))
    assert judged["tokenizers"][0]["roundtrip"] is True
    assert judged["tokenizers"][0]["bytes_per_token"] > 1
    tokens = last_json(nanorun(home, "data", "tokenize", "--json"))
    assert tokens["kind"] == "bin"
    assert tokens["documents"] == 900
    assert "tales-tales-300" in nanorun(home, "data", "ls").stdout


def test_training_takes_the_tokenizer_of_its_dataset(home, corpus):
    nanorun(home, "data", "add", corpus)
    nanorun(home, "tok", "train", "--vocab", "300", "--name", "small")
    nanorun(home, "data", "tokenize", "--name", "tokens")
    nanorun(home, "data", "get", "sample", "--size", "20kB")
    nanorun(home, "tok", "train", "--vocab", "320", "--data", "sample")
    tiny = ["--depth", "1", "--context", "32", "--batch-tokens", "64", "--steps", "2", "--name", "mine"]
    for data, said in (
        ("tales", "using the tokenizer 'small', trained on 'tales' (--tokenizer chooses another)"),
        ("tokens", ""),
    ):
        done = nanorun(home, "train", "base", *tiny, "--data", data, "--fresh")
        assert said in done.stderr
        assert json.loads((home / "runs" / "mine" / "config.json").read_text())["tokenizer"] == "small"
    shutil.rmtree(home / "runs")
    wrong = complaint(home, "train", "base", *tiny, "--data", "tokens", "--tokenizer", "sample-320")
    assert "were made by tokenizer 'small', not by 'sample-320'" in wrong
    assert not (home / "runs").exists(), "nothing that refuses the right command"
    nanorun(home, "data", "add", corpus, "--name", "others")
    done = nanorun(home, "data", "tokenize", "others")
    assert "using the newest tokenizer, 'sample-320', since none was trained on 'others'" in done.stderr


def test_doctor_reports_the_machine(home):
    found = last_json(nanorun(home, "doctor", "--json"))
    assert found["ready"] is True
    assert {"torch", "device", "disk", "home", "sandbox"} <= {
        finding["what"] for finding in found["findings"]
    }
    assert "torch" in nanorun(home, "doctor").stdout


def test_a_home_that_is_a_file_is_reported_and_rejected(tmp_path):
    file = tmp_path / "file"
    file.touch()
    for home in (file, file / "below"):
        found = last_json(nanorun(home, "doctor", "--json", code=1))
        (about,) = [finding for finding in found["findings"] if finding["what"] == "home"]
        assert about["verdict"] == "missing"
        assert "is a file" in about["detail"]
    assert "is a file" in complaint(file, "data", "get", "sample", "--size", "1kB")


def test_creating_a_missing_home_is_reported(tmp_path):
    home = tmp_path / "tpyo"
    assert "There is no trained model" in complaint(home, "eval", "bpb")
    assert not home.exists()
    assert f"creating {home}" in nanorun(home, "data", "get", "sample", "--size", "1kB").stderr
    assert "creating" not in nanorun(home, "data", "get", "sample", "--size", "1kB").stderr


def test_a_damaged_dataset_hides_no_other(small_world, corpus):
    nanorun(small_world, "data", "add", corpus, "--name", "bad")
    manifest = small_world / "data" / "bad" / "dataset.json"
    sound = json.loads(manifest.read_text())
    for broken in ("{", "[]", json.dumps({**sound, "shards": [{**sound["shards"][0], "documents": "x"}]})):
        manifest.write_text(broken)
        listed = nanorun(small_world, "data", "ls", code=2)
        assert "sample" in listed.stdout
        assert listed.stderr.startswith(f"{manifest} is damaged (")
        assert not re.search("NoneType|__init__|indices|Expecting", listed.stderr)


def test_doctor_reports_what_the_sandbox_needs(home, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    found = last_json(nanorun(home, "doctor", "--json"))
    (sandbox,) = [finding for finding in found["findings"] if finding["what"] == "sandbox"]
    assert found["ready"] is True
    assert (sandbox["verdict"], sandbox["advice"]) == ("note", "apt install bubblewrap")
    assert "bubblewrap is not installed" in sandbox["detail"]


VERBS = [
    "",
    "speedrun",
    "doctor",
    "plan",
    "data",
    "data add",
    "data get",
    "data ls",
    "data tokenize",
    "tok train",
]
VERBS += ["tok eval", "train base", "eval bpb", "eval core", "bench train", "bench infer", "chat"]
VERBS += ["runs", "runs list", "runs show", "runs rename", "runs remove"]


@pytest.mark.parametrize("verb", VERBS)
def test_every_command_has_help_with_an_example(home, verb):
    shown = nanorun(home, *verb.split(), "--help").stdout
    assert "Usage: nanorun" in shown
    assert "Example:" in shown or verb in ("", "data")


def test_without_a_command_the_help_is_shown(home):
    assert nanorun(home).stdout == nanorun(home, "--help").stdout


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["frobnicate"], "No such command"),
        (["data", "add"], "Missing argument"),
        (["data", "add", "nowhere.txt"], "There is no file nowhere.txt"),
        (["data", "add", "LICENSE", "--nope"], "No such option"),
        (["data", "add", "LICENSE"], "has no supported suffix"),
        (["data", "get", "everything"], "There is no corpus 'everything'"),
        (["data", "get", "sample", "--size", "huge"], "is not a size"),
        (["data", "get", "climbmix", "--shards", "0"], "--shards"),
        (["data", "tokenize"], "There is no data"),
        (["tok", "train"], "There is no data"),
        (["tok", "eval"], "There is no tokenizer"),
        (["eval", "bpb"], "There is no trained model"),
        (["eval", "core"], "There is no CORE bundle"),
        (["plan", "--gpu", "abacus"], "abacus"),
        (["plan", "--steps", "5", "--ratio", "3"], "Give one of --ratio, --steps"),
        (["train", "base", "--data", "none"], "There is no dataset 'none'"),
        (["train", "base", "--flops", "nan"], "must be a number more than 0"),
        (["train", "base", "--ratio", "inf"], "must be a number more than 0"),
        (["train", "base", "--config", "LICENSE", "--depth", "3"], "derive a new configuration"),
        (["train", "base", "--config", "LICENSE"], "is not a configuration (line 1"),
        (["bench", "infer", "--speculate", "draft"], "--speculate draft needs --draft"),
        (["bench", "infer", "--draft", "small"], "name it with --model"),
        (["bench", "infer", "--depth", "1", "--batch", "128", "--new", "2"], "too few to time"),
        (["tok", "eval", "--tokenizer", "none"], "There is no tokenizer 'none'"),
    ],
)
def test_a_user_error_prints_one_sentence_and_exits_with_2(home, args, words):
    assert words in complaint(home, *args)
    assert [path.name for path in home.rglob("*") if path.is_file()] == []


def test_a_vocabulary_too_large_for_the_text_is_explained(home, corpus):
    nanorun(home, "data", "add", corpus)
    assert "too few for a vocabulary" in complaint(home, "tok", "train", "--vocab", "60000")
    assert not (home / "tokenizers").exists() or list((home / "tokenizers").iterdir()) == []


@pytest.mark.parametrize("fault", ["truncated xz", "no text column", "missing", "not utf-8"])
def test_bad_input_to_data_add_leaves_no_partial_files(home, tmp_path, corpus, fault):
    import lzma

    bad = tmp_path / {"truncated xz": "bad.jsonl.xz", "no text column": "bad.parquet"}.get(fault, "bad.jsonl")
    if fault == "truncated xz":
        bad.write_bytes(lzma.compress(corpus.read_bytes())[:-200])
    elif fault == "no text column":
        pq.write_table(pa.table({"title": ["a"], "n": [1]}), bad)
    elif fault == "not utf-8":
        bad.write_bytes(corpus.read_bytes() + b'{"text": "na\xefve"}\n')
    assert "bad." in complaint(home, "data", "add", corpus, bad, "--name", "mine")
    assert [path for path in home.rglob("*") if path.name != "data"] == []


def test_sigterm_cleans_up_and_reports_it(home, tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-m", "nanorun", "data", "get", "sample", "--size", "2GB"],
        cwd=ROOT,
        env={**os.environ, "NANORUN_HOME": str(home)},
        stderr=subprocess.PIPE,
        text=True,
    )
    until = time.monotonic() + 60
    while not list(home.glob("data/.sample.writing-*/*.parquet")) and time.monotonic() < until:
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Interrupted" in errors
    assert "Traceback" not in errors
    assert list((home / "data").iterdir()) == []


def test_a_closed_pipe_gives_no_traceback(home):
    nanorun(home, "data", "get", "sample", "--size", "1kB")
    for verb in ("data ls", "--help", "plan --gpu h100 --json"):
        shell = f"{sys.executable} -m nanorun {verb} | true; exit ${{PIPESTATUS[0]}}"
        env = {**os.environ, "NANORUN_HOME": str(home)}
        done = subprocess.run(
            ["bash", "-c", shell], capture_output=True, text=True, cwd=ROOT, env=env, timeout=120
        )
        assert done.stderr == ""
        assert done.returncode == 141, "as one whom SIGPIPE ended"


def test_importing_the_command_line_is_quick_and_has_no_side_effects(home):
    code = "import sys, nanorun.cli; print([m for m in ('torch', 'pyarrow', 'rich') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert "torch" not in done.stdout
    assert "pyarrow" not in done.stdout
    assert list(home.iterdir()) == []


def test_a_suggested_command_works_from_the_same_shell(home, tmp_path):
    script = tmp_path / "venv" / "bin" / "nanorun"
    script.parent.mkdir(parents=True)
    script.write_text(f"#!{sys.executable}\nfrom nanorun.cli import main\nmain()\n")
    script.chmod(0o755)
    env = {name: value for name, value in os.environ.items() if name != "UV_RUN_RECURSION_DEPTH"}
    env |= {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"}
    on_path = {"PATH": f"{script.parent}:/usr/bin:/bin"}
    outside = tmp_path / "elsewhere"
    outside.mkdir()
    for started, folder, extra, suggested in (
        ("venv/bin/nanorun", tmp_path, {}, "venv/bin/nanorun"),  # as `make speedrun` starts it
        (str(script), outside, {}, str(script)),
        ("nanorun", tmp_path, on_path, "nanorun"),  # in an activated environment
        (f"{sys.executable} -m nanorun", outside, {}, f"{sys.executable} -m nanorun"),
        ("venv/bin/nanorun", tmp_path, {"UV_RUN_RECURSION_DEPTH": "1"}, "uv run nanorun"),
    ):
        done = subprocess.run(
            f"{started} data ls", shell=True, capture_output=True, text=True, cwd=folder, env={**env, **extra}
        )
        assert f"yet: {suggested} data add FILE..., or {suggested} data get sample" in done.stdout
        done = subprocess.run(
            f"{started} data add",
            shell=True,
            capture_output=True,
            text=True,
            cwd=folder,
            env={**env, **extra},
        )
        assert f" See {suggested} data add --help." in done.stderr
