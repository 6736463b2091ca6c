"""SFT trains on all assistant tokens, once an epoch, at every context length, and resumes bit-identically."""

import json
import math
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from spike import Spike, poison

from nanorun import checkpoint, run_list
from nanorun.config import IGNORE, Config, OptimConfig, TrainConfig, scale, scale_model
from nanorun.data.conversations import render_all
from nanorun.data.get import make_sample
from nanorun.data.loader import Loader, to_device
from nanorun.data.rows import RowOrder
from nanorun.data.sample.letters import COMMON
from nanorun.data.vocabulary import train_on
from nanorun.errors import UserError
from nanorun.infer.load import load_model, newest_checkpoint
from nanorun.model.gpt import GPT
from nanorun.runs import Run, read_config, read_metrics
from nanorun.tasks.mixture import choose_mixture, find_mixture, prepare_mixture
from nanorun.text.chat import render
from nanorun.text.store import open_tokenizer
from nanorun.train import base, loop, sft
from nanorun.train.base import BaseOptions, Material, train_base
from nanorun.train.sft import SFTOptions, train_sft

ROOT = Path(__file__).resolve().parents[2]
WORDS = "the lantern island harbour of a small light candle window is green and old boats come home".split()


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home with a small base model and a mixture of long and short conversations, made once."""
    home = tmp_path_factory.mktemp("home")
    patch = pytest.MonkeyPatch()
    patch.setenv("NANORUN_HOME", str(home))
    patch.setenv("OMP_NUM_THREADS", "1")
    train_on(make_sample(60_000), 300, name="sample", max_bytes=10**6)
    model = scale_model(2, 300, context=64, dim=32, heads=2, kv_heads=1)
    train = TrainConfig(steps=8, batch_tokens=512, eval_every=0, eval_tokens=2048, save_every=4)
    train_base(Config(model, OptimConfig(warmup_steps=3), train), BaseOptions(name="tiny-base", samples=1))
    write_mixture(home)
    patch.undo()
    return home


def write_mixture(home: Path) -> None:
    """Conversations of one to five questions, of a few tokens up to thousands, some with calls."""
    dice = random.Random(5)

    def words(most: int) -> str:
        return " ".join(dice.choices(WORDS, k=dice.randrange(1, most)))

    def turn(most: int) -> list[dict]:
        answer: Any = words(most)
        if dice.random() < 0.3:
            answer = [
                {"type": "text", "text": answer},
                {"type": "python", "text": "1+1"},
                {"type": "output", "text": "2"},
                {"type": "text", "text": "it is 2"},
            ]
        return [{"role": "user", "content": words(most)}, {"role": "assistant", "content": answer}]

    with open(home / "talk.jsonl", "w", encoding="utf-8") as file:
        for i in range(160):
            most = (12, 12, 12, 60, 300, 900)[i % 6] if i < 90 else 12
            messages = [m for _ in range(dice.randrange(1, 6)) for m in turn(most)]
            file.write(json.dumps({"messages": messages}) + "\n")
    mixture = {
        "train": [{"task": "talk.jsonl", "stop": 140, "repeat": 2}],
        "val": [{"task": "talk.jsonl", "start": 140}],
    }
    (home / "mixture.json").write_text(json.dumps(mixture))


def choices(world: Path, **changes) -> SFTOptions:
    length = {} if "steps" in changes else {"epochs": 1}
    mixture = str(world / "mixture.json")
    return SFTOptions(**{"mixture": mixture, "save_every": 3, "batch_tokens": 512, **length, **changes})


def steps_of(world: Path, name: str) -> list[dict]:
    return [r for r in read_metrics(world / "runs" / name) if r["kind"] == "step"]


def final_weights(world: Path, name: str) -> dict[str, torch.Tensor]:
    return load_file(max((world / "runs" / name / "checkpoints").glob("0*")) / "model.safetensors")


def spoken_tokens(world: Path, context: int) -> int:
    """What must be trained in an epoch, counted conversation by conversation."""
    tokenizer, total = open_tokenizer("sample"), 0
    lines = (world / "talk.jsonl").read_text().splitlines()[:140]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for line in lines:
            total += 2 * sum(render(json.loads(line), tokenizer, context + 1).mask)
    return total


@pytest.mark.parametrize("context", [32, 128, 512, 2048])
def test_at_every_context_losses_are_finite_and_an_epoch_trains_exactly_its_tokens(world, context):
    summary = train_sft(choices(world, context=context), BaseOptions(name=f"c{context}", fresh=True))
    records = steps_of(world, f"c{context}")
    assert all(math.isfinite(r["loss"]) and r["loss"] > 0 and not r["skipped"] for r in records)
    assert summary["tokens"] == records[-1]["tokens"] == spoken_tokens(world, context)
    assert summary["steps"] == len(records) == read_config(f"c{context}")["train"]["steps"]
    assert math.isfinite(summary["val_bpb"])
    longest = max(len(line) for line in (world / "talk.jsonl").read_text().splitlines())
    assert longest > 2048, "some conversation is longer than the context"
    assert summary["conversations_cut"] + summary["conversations_left_out"] > 0
    assert all(torch.isfinite(w).all() for w in final_weights(world, f"c{context}").values())


def test_two_epochs_train_twice_the_tokens_and_steps_end_it_anywhere(world):
    two = train_sft(choices(world, epochs=2, context=128), BaseOptions(name="two", fresh=True))
    assert two["tokens"] == 2 * spoken_tokens(world, 128)
    five = train_sft(choices(world, steps=5), BaseOptions(name="five", fresh=True))
    assert five["steps"] == 5
    with pytest.raises(UserError, match="one of --steps and --epochs"):
        SFTOptions(steps=5, epochs=1)


def test_how_a_step_is_cut_up_changes_only_rounding_also_in_the_last_short_step(world):
    results = {}
    for rows in (8, 4, 1):
        train_sft(choices(world), BaseOptions(name=f"rows{rows}", fresh=True, device_batch=rows))
        results[rows] = steps_of(world, f"rows{rows}")
    for rows in (4, 1):
        assert [r["tokens"] for r in results[rows]] == [r["tokens"] for r in results[8]]
        losses = [[r["loss"] for r in results[n]] for n in (8, rows)]
        assert losses[1][:3] == pytest.approx(losses[0][:3], rel=1e-4)
        assert losses[1][-1] == pytest.approx(losses[0][-1], rel=0.05)


def spoken_by_markers(row: list[int], special: dict[str, int]) -> list[bool]:
    """Which tokens of a row the assistant says, told by the special tokens alone."""
    speaking, tool, out = False, False, []
    for token in row:
        if token == special["<|output_start|>"]:
            tool = True
        out.append(speaking and not tool)
        if token == special["<|output_end|>"]:
            tool = False
        if token == special["<|assistant_start|>"]:
            speaking = True
        elif token == special["<|assistant_end|>"]:
            speaking = False
    return out


def material_of(world: Path, context: int, epochs: int | None = 1) -> Material:
    tokenizer = open_tokenizer("sample")
    _, train, val = prepare_mixture(find_mixture(str(world / "mixture.json")))
    learned, measured = (render_all(m, tokenizer, context) for m in (train, val))
    order = RowOrder("padded", epochs=epochs)
    return Material(learned.source(tokenizer.bos), order, measured.source(tokenizer.bos))


def test_only_what_the_assistant_says_is_trained(world):
    special, material = open_tokenizer("sample").special, material_of(world, 256)
    checked = 0
    with Loader(material.train, rows=4, context=256, order=material.order) as loader:
        for batch in loader:
            for inputs, targets in zip(batch.inputs.tolist(), batch.targets.tolist(), strict=True):
                said = spoken_by_markers([*inputs, 0], special)[1:]
                for at in range(255):
                    assert targets[at] == (inputs[at + 1] if said[at] else IGNORE)
                    checked += said[at]
    assert checked > 5000


def assembled(world: Path, name: str, **changes) -> loop.Training:
    chosen = choices(world, **changes)
    parent = Config.from_dict(read_config("tiny-base"))
    material = material_of(world, chosen.context or 64, chosen.epochs or 1)
    config = sft.configure(parent, chosen, material)
    begin = newest_checkpoint("tiny-base")
    run = Run.open(name, config.to_dict(), fresh=True)
    return base.assemble(config, run, BaseOptions(device_batch=4), None, material, begin, chosen.warm)


def test_the_loss_is_the_mean_over_the_steps_trained_tokens_and_the_users_do_not_count(world):
    t, other = assembled(world, "mean"), assembled(world, "mean-other")
    with t.loader, t.run, other.loader, other.run:
        batches = [next(other.loader) for _ in range(other.grad_accum_steps)]
        total, count = 0.0, 0
        for batch in batches:
            logits = other.model.logits(batch.inputs).double()
            for row, targets in zip(logits, batch.targets, strict=True):
                spoken = targets != IGNORE
                chosen = torch.log_softmax(row[spoken], -1).gather(1, targets[spoken, None])
                total, count = total - chosen.sum().item(), count + int(spoken.sum())
        step = loop.train_step(t)
    assert step.tokens == count
    assert step.loss == pytest.approx(total / count, rel=1e-5)


@torch.no_grad()
def test_conversations_in_a_row_do_not_see_each_other(world):
    """Without the mask a model of 200 conversations answered 38 of them, with it 174: it had learned which one follows
    which."""
    t = assembled(world, "apart", epochs=2)
    with t.loader, t.run:
        batches = (to_device(batch, t.device, t.config.model.document_mask) for batch in t.loader)
        tokens, targets, docs = next(b for b in batches if (b[2][:, 0] != b[2][:, -1]).any())
    row = int((docs[:, 0] != docs[:, -1]).nonzero()[0])  # of more than one conversation
    last = docs[row] == docs[row, -1]
    losses = t.model(tokens, targets, docs, per_token=True)[row]
    alone = t.model(*(x[row : row + 1, last] for x in (tokens, targets, docs)), per_token=True)[0]
    assert torch.allclose(losses[last], alone, atol=1e-4)


def test_it_starts_with_the_parents_weights_and_optimizer_and_0_8_of_its_learning_rates(world):
    parent = newest_checkpoint("tiny-base")
    for warm in (True, False):
        t = assembled(world, f"warm-{warm}", warm=warm)
        with t.loader, t.run:
            weights, state = t.model.state_dict(), t.optimizer.state_dict()
            assert all(torch.equal(weights[name], parent.model[name]) for name in parent.model)
            kept = {n: s for n, s in parent.optimizer.items() if not n.startswith("rng.")}
            assert all(torch.equal(state[n], kept[n]) for n in kept) == warm
    old, new = Config.from_dict(read_config("tiny-base")).optim, t.config.optim
    assert new.matrix_lr == pytest.approx(0.8 * old.matrix_lr)
    assert new.embedding_lr == pytest.approx(0.8 * old.embedding_lr)
    assert (new.warmup_steps, new.warmdown, new.final_lr_fraction) == (0, 0.5, 0.0)


def test_a_small_mixture_gets_a_smaller_batch_and_learning_rates_scaled_to_it(world):
    parent = Config.from_dict(read_config("tiny-base"))
    few = sft.configure(parent, choices(world, context=256, batch_tokens=None), material_of(world, 256))
    asked = sft.configure(parent, choices(world, context=256, batch_tokens=2048), material_of(world, 256))
    assert few.train.steps >= sft.MIN_STEPS or few.train.batch_tokens == 256
    assert asked.train.batch_tokens == 2048
    assert asked.optim.matrix_lr == pytest.approx(0.8 * parent.optim.matrix_lr * math.sqrt(2048 / 512))


def test_learning_rates_are_constant_and_then_fall_linearly_to_zero(world):
    train_sft(choices(world, steps=20), BaseOptions(name="rates", fresh=True))
    lrs = [r["lr_scale"] for r in steps_of(world, "rates")]
    assert lrs[:11] == [1.0] * 11
    assert lrs[11:] == pytest.approx([1 - i / 10 for i in range(1, 10)])


def command(world: Path, name: str, **flags) -> tuple[list[str], dict[str, str]]:
    given = [word for flag, value in flags.items() for word in (f"--{flag.replace('_', '-')}", str(value))]
    mixture = ["--mixture", str(world / "mixture.json"), "--batch-tokens", "512"]
    if not {"epochs", "steps"} & flags.keys():
        mixture += ["--epochs", "1"]
    args = [sys.executable, "-m", "nanorun", "train", "sft", "--name", name, *mixture, *given, "--json"]
    return args, {**os.environ, "NANORUN_HOME": str(world), "PYTHONPATH": str(ROOT)}


def logged(world: Path, name: str) -> list[int]:
    return [r["step"] for r in steps_of(world, name)] if (world / "runs" / name).exists() else []


def test_killed_at_random_moments_it_ends_with_bit_identical_weights(world):
    flags = {"epochs": 2, "save_every": 3, "eval_every": 40}
    args, env = command(world, "untouched", **flags)
    whole = json.loads(subprocess.run(args, env=env, check=True, capture_output=True, timeout=240).stdout)
    args, env = command(world, "killed", **flags)
    dice = random.Random(3)
    for kill in range(4):
        child = subprocess.Popen(args, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        goal = whole["steps"] * kill // 5 + dice.randrange(4, 12)
        until = time.monotonic() + 90
        while max(logged(world, "killed"), default=0) < goal and time.monotonic() < until:
            time.sleep(0.005)
        time.sleep(dice.uniform(0, 0.05))
        assert child.poll() is None, "it must still have been running"
        child.send_signal(signal.SIGKILL)
        child.wait()
    again = json.loads(subprocess.run(args, env=env, check=True, capture_output=True, timeout=240).stdout)
    one, other = final_weights(world, "untouched"), final_weights(world, "killed")
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert logged(world, "killed") == list(range(1, whole["steps"] + 1)), "each step is logged once"
    assert [r["loss"] for r in steps_of(world, "killed")] == [r["loss"] for r in steps_of(world, "untouched")]
    assert (again["tokens"], again["val_bpb"]) == (whole["tokens"], whole["val_bpb"])
    assert whole["tokens"] == 2 * spoken_tokens(world, 64)


def test_a_signal_saves_and_the_same_command_resumes(world):
    args, env = command(world, "stopped", epochs=40)
    child = subprocess.Popen(args, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    until = time.monotonic() + 60
    while len(logged(world, "stopped")) < 5 and time.monotonic() < until:
        time.sleep(0.02)
    child.send_signal(signal.SIGTERM)
    _, errors = child.communicate(timeout=60)
    assert child.returncode == 130
    assert "goes on from there" in errors
    assert checkpoint.steps(world / "runs" / "stopped" / "checkpoints")[-1] == logged(world, "stopped")[-1]


def test_after_a_rollback_the_epoch_ends_where_its_data_ends(world):
    t = assembled(world, "back")
    t.forward = Spike(t.forward, {2 * t.grad_accum_steps + i * t.grad_accum_steps for i in range(5, 8)})
    with t.loader, t.run:
        assert loop.train(t) is True
        assert next(t.loader, None) is None, "all of the epoch was used"
    assert t.step < t.config.train.steps, "steps were given back, and no data was used twice"
    records = list(read_metrics(world / "runs" / "back"))
    assert [r["step"] for r in records if r["kind"] == "eval"][-1] == t.step
    assert checkpoint.steps(world / "runs" / "back" / "checkpoints")[-1] == t.step


def test_a_run_that_cannot_save_its_weights_fails(world, monkeypatch):
    monkeypatch.setattr(loop.train, "__defaults__", (poison(loop.train_step, range(10**6)),))
    for _ in range(2):
        with pytest.raises(UserError, match=r"is not saved: embed.*the first in row 319\).*starts over"):
            train_sft(choices(world, steps=4), BaseOptions(name="dead"))
    assert not (world / "runs" / "dead" / "summary.json").exists()


def test_a_finished_run_is_not_repeated_and_other_conversations_are_rejected(world):
    train_sft(choices(world, steps=4), BaseOptions(name="done", fresh=True))
    before = (world / "runs" / "done" / "metrics.jsonl").read_bytes()
    train_sft(choices(world, steps=4), BaseOptions(name="done"))
    assert (world / "runs" / "done" / "metrics.jsonl").read_bytes() == before
    with pytest.raises(UserError, match="mixture"):
        train_sft(choices(world, steps=4, mixture="sample"), BaseOptions(name="done"))


def test_more_epochs_make_a_finished_run_longer(world, capsys):
    once = train_sft(choices(world, epochs=1, batch_tokens=None), BaseOptions(name="epochs", fresh=True))
    batch = read_config("epochs")["train"]["batch_tokens"]
    more = train_sft(choices(world, epochs=3, batch_tokens=None), BaseOptions(name="epochs"))
    assert "'epochs' becomes longer" in capsys.readouterr().err
    assert read_config("epochs")["train"]["batch_tokens"] == batch, "though more epochs allow a larger one"
    assert 2.9 * once["tokens"] < more["tokens"] <= 3 * once["tokens"]
    assert [r["step"] for r in steps_of(world, "epochs")] == list(range(1, more["steps"] + 1))
    again = train_sft(choices(world, epochs=3, batch_tokens=None), BaseOptions(name="epochs"))
    assert again == more
    with pytest.raises(UserError, match=r"\(--seed was 0 and is now 1"):
        train_sft(choices(world, epochs=3, seed=1), BaseOptions(name="epochs"))


def test_a_run_whose_parent_was_renamed_resumes_and_loads(world):
    shutil.copytree(world / "runs" / "tiny-base", world / "runs" / "first-name")
    train_sft(choices(world, steps=3, parent="first-name"), BaseOptions(name="renamed-child", fresh=True))
    run_list.rename("first-name", "second-name")
    assert load_model("renamed-child").step == 3
    longer = train_sft(choices(world, steps=5), BaseOptions(name="renamed-child"))
    assert (longer["steps"], longer["parent"]) == (5, "second-name"), "without --from it keeps its parent"
    assert run_list.show_record("renamed-child")["lineage"] == ["second-name", "renamed-child"]
    run_list.remove(["renamed-child", "second-name"])  # other tests start from the only base model


def test_the_run_remembers_its_parent_and_mixture_and_loads_as_a_model(world):
    train_sft(choices(world, steps=3, context=32), BaseOptions(name="child", fresh=True))
    record = read_config("child")
    assert (record["kind"], record["parent"], record["mixture"]["name"]) == ("sft", "tiny-base", "mixture")
    assert record["mixture"]["train"][0]["repeat"] == 2
    child = load_model("child")
    step, config, model = child.step, child.config, child.model
    assert (step, config.model.context) == (3, 32)
    assert isinstance(model, GPT)
    grandchild = train_sft(
        choices(world, steps=2, parent="child"), BaseOptions(name="grandchild", fresh=True)
    )
    assert grandchild["parent"] == "child"


@pytest.mark.parametrize(
    ("parent", "mixture", "name"),
    [
        ("base-d12", "sft", "sft-d12"),
        ("base-d12", "mid", "mid-d12"),
        ("mid-d12", "sft", "sft-d12"),
        ("sample-base", "sample-mid", "sample-mid"),
        ("sample-mid", "sample", "sample-sft"),
        ("sample-base", "sample", "sample-sft"),
        ("mine", "talk", "sft-mine"),
        ("mine", "pyramid", "sft-mine"),
    ],
)
def test_a_run_is_named_after_its_parent(parent, mixture, name):
    assert sft.default_name(parent, mixture) == name


def test_what_is_missing_is_one_sentence(world, tmp_path, monkeypatch):
    with pytest.raises(UserError, match="no run 'nobody'"):
        train_sft(choices(world, parent="nobody"), BaseOptions(name="x"))
    with pytest.raises(UserError, match="None of the 280 conversations"):
        train_sft(choices(world, context=3), BaseOptions(name="x"))
    monkeypatch.setenv("NANORUN_HOME", str(tmp_path))
    with pytest.raises(UserError, match="no base model"):
        train_sft(choices(world), BaseOptions(name="x"))


def test_a_users_own_task_trains_from_the_command_line(world, tmp_path):
    page = (ROOT / "docs" / "tasks.md").read_text(encoding="utf-8")
    (tmp_path / "twice.py").write_text(page.split("```python\n")[1].split("```")[0])
    args, env = command(world, "own", steps=3, task="twice.py")
    done = subprocess.run(args, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["conversations"] == 280 + 10 * len(COMMON[::2])
    assert read_config("own")["mixture"]["train"][-1]["task"] == str(tmp_path / "twice.py")
    args, env = command(world, "bad", steps=3, task="gone.py")
    done = subprocess.run(args, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "There is no file" in done.stderr
    assert "gone.py: check the name and the current folder." in done.stderr


def few_conversations(path: Path, count: int) -> Path:
    dice = random.Random(7)
    pairs = [
        (f"Say {' '.join(dice.choices(WORDS, k=8))}.", " ".join(dice.choices(WORDS, k=12)))
        for _ in range(count)
    ]
    path.write_text("".join(json.dumps({"question": q, "answer": a}) + "\n" for q, a in pairs))
    return path


def test_own_conversations_are_trained_on_alone_and_counted_before_the_start(world, tmp_path):
    path = few_conversations(tmp_path / "mine.jsonl", 60)
    args = [sys.executable, "-m", "nanorun", "train", "sft", "--from", "tiny-base", "--task", "mine.jsonl"]
    env = {**os.environ, "NANORUN_HOME": str(world), "PYTHONPATH": str(ROOT)}
    args += ["--name", "alone", "--batch-tokens", "1024", "--json"]
    done = subprocess.run(args, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert re.search(r"^mine\.jsonl +54 +\d+ +[\d,]+$", done.stderr, re.MULTILINE), done.stderr
    assert "6 other conversations for validation" in done.stderr
    assert json.loads(done.stdout)["conversations"] == 54
    assert [entry["task"] for entry in read_config("alone")["mixture"]["train"]] == [str(path)]


def test_a_mixture_and_own_conversations_are_mixed_if_both_are_named(world, tmp_path, capsys):
    path = few_conversations(tmp_path / "mine.jsonl", 60)
    train_sft(choices(world, steps=2, tasks=[str(path)]), BaseOptions(name="both", fresh=True))
    shown = capsys.readouterr().err
    assert re.search(r"^talk\.jsonl +140 .*\nmine\.jsonl +60 ", shown, re.MULTILINE), shown


@pytest.mark.parametrize(
    ("count", "least"), [(12, 10), (60, 50), (200, sft.MIN_STEPS), (9000, sft.MIN_STEPS)]
)
def test_few_conversations_get_small_batches_and_several_epochs(world, tmp_path, count, least):
    """The length that follows from the number of conversations, without training."""
    path = few_conversations(tmp_path / "mine.jsonl", count)
    tokenizer, options = open_tokenizer("sample"), SFTOptions(tasks=[str(path)])
    _, mixture, _ = prepare_mixture(choose_mixture(None, [str(path)]))
    train = render_all(mixture, tokenizer, 256)
    epochs = sft.choose_epochs(options, train, 256)
    source = train.source(tokenizer.bos)
    material = Material(source, RowOrder("padded", epochs=epochs), source)
    parent = scale(4, 300, context=256)
    config = sft.configure(parent, options, material)
    assert parent.train.batch_tokens >= 4096
    assert config.train.steps >= least
    assert config.train.batch_tokens >= 256
    assert 1 <= epochs <= sft.MAX_EPOCHS
    assert (epochs > 1) == (count < 9000)
    assert sft.choose_epochs(SFTOptions(epochs=2), train, 256) == 2
    assert sft.choose_epochs(SFTOptions(steps=2), train, 256) is None


def test_the_trained_tokens_of_each_conversation_are_counted(world):
    _, train, _ = prepare_mixture(find_mixture(str(world / "mixture.json")))
    rendered = render_all(train, open_tokenizer("sample"), 64)
    counts = [sum(rendered[i][1]) for i in range(len(rendered))]
    assert rendered.trained_per_conversation.tolist() == counts
    assert 0 in counts, "some do not fit"


def chat_records(world: Path, name: str) -> list[dict]:
    return [r for r in read_metrics(world / "runs" / name) if r["kind"] == "chat"]


def test_chatcore_during_training_is_logged_and_changes_nothing(world):
    alike = {"steps": 7, "eval_every": 4}
    train_sft(choices(world, **alike), BaseOptions(name="unasked", fresh=True))
    asked = train_sft(
        choices(world, **alike, chat_every=3, chat_problems=2), BaseOptions(name="asked", fresh=True)
    )
    records = chat_records(world, "asked")
    assert [r["step"] for r in records] == [3, 6, 7], "at the given interval, and at the end"
    assert {"chatcore", "chat_sample-facts", "chat_sample-sums"} <= records[0].keys()
    assert asked["chatcore"] == records[-1]["chatcore"]
    assert chat_records(world, "unasked") == []
    one, other = final_weights(world, "unasked"), final_weights(world, "asked")
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_chatcore_evaluation_that_a_kill_prevented_runs_after_the_resume(world):
    args = choices(world, steps=6, chat_every=3, chat_problems=1)
    train_sft(args, BaseOptions(name="unlooked", fresh=True))
    path = world / "runs" / "unlooked" / "metrics.jsonl"
    kept = [line for line in path.read_text().splitlines() if '"chat"' not in line]
    path.write_text("".join(f"{line}\n" for line in kept))
    (world / "runs" / "unlooked" / "summary.json").unlink()
    again = train_sft(args, BaseOptions(name="unlooked"))
    assert [r["step"] for r in chat_records(world, "unlooked")] == [6]
    assert again["chatcore"] is not None


def test_chatcore_during_training_leaves_out_what_cannot_be_graded_here(world):
    from nanorun.evals import chat
    from nanorun.tasks.sample import SampleQuestions
    from nanorun.tools.sandbox import SandboxUnavailable

    class Program(SampleQuestions):
        def reward(self, index, reply):
            raise SandboxUnavailable("there is none")

    model = load_model("tiny-base").model
    tasks = {"facts": SampleQuestions("sample-facts"), "program": Program("sample-sums")}
    marks = chat.chat_evaluator(open_tokenizer("sample"), tasks, 2)(model)
    assert marks.figures().keys() == {"chatcore", "chat_facts"}
    assert marks.sentence().startswith("ChatCORE 0.000 (facts 0%)")


def test_midtraining_learns_from_the_public_tasks_files(world, tmp_path, shared_data):
    """Real files: those that are there are mixed, the others are named and left out."""
    with tarfile.open(shared_data / "chat.tar.xz") as archive:
        wanted = ("gsm8k", "arc_", "words_alpha", "mmlu_dev")
        members = [m for m in archive if m.isfile() and any(word in m.name for word in wanted)]
        archive.extractall(tmp_path, members, filter="data")
    args, env = command(world, "mid-tiny", steps=2, context=256, task_files=tmp_path)
    args = [word if word != str(world / "mixture.json") else "mid" for word in args]
    done = subprocess.run(args, env=env, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert "left out of the mixture: " in done.stderr
    learned = {entry["task"] for entry in read_config("mid-tiny")["mixture"]["train"]}
    assert learned >= {"arc-easy", "arc-challenge", "gsm8k", "spelling"}
    summary = json.loads(done.stdout)
    assert summary["conversations"] > 15_000
    assert summary["fp8"] == "none"
    assert math.isfinite(summary["val_bpb"])
