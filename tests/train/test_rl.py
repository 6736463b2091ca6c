"""Reinforcement learning: it samples what it trains on, uses every sample once, learns, and loses nothing."""

import itertools
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from small_tasks import HERE, Echo, Spell, Sum, furnish, half_taught, open_task
from spike import poison

from nanorun import checkpoint, console, run_list
from nanorun.errors import UserError
from nanorun.optim import schedules
from nanorun.optim.optimizer import Optimizer
from nanorun.runs import Run, read_config, read_metrics
from nanorun.train import rl
from nanorun.train.policy import micro_batches, token_logprobs
from nanorun.train.rl_config import RLConfig
from nanorun.train.rollouts import open_tasks

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A home with three half-taught models."""
    home = tmp_path_factory.mktemp("home")
    patch = pytest.MonkeyPatch()
    patch.setenv("NANORUN_HOME", str(home))
    torch.set_num_threads(1)
    for name, kinds in (("spells", (Spell,)), ("sums", (Sum,)), ("echoes", (Echo,))):
        furnish(home, half_taught(kinds), name)
    patch.undo()
    return home


@pytest.fixture(autouse=True)
def one_thread(monkeypatch, world):
    monkeypatch.setenv("NANORUN_HOME", str(world))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def configured(name, tasks=("echo",), parent="echoes", steps=4, train=None, **changes):
    small = {"problems": 4, "samples": 6, "max_tokens": 8, "eval_problems": 4, **changes}
    train = {"eval_every": 0, "save_every": 2, **(train or {})}
    return rl.configure(
        tasks, parent=parent, name=name, fresh=True, steps=steps, open_task=open_task, train=train, **small
    )


def learn(name, *args, options=None, **changes):
    run, config, learning = configured(name, *args, **changes)
    return rl.train_rl(run, config, learning, options or rl.RLOptions(fresh=True), open_task)


def assembled(name, *args, options=None, **changes):
    run, config, learning = configured(name, *args, **changes)
    held = Run.open(run, config.to_dict(), fresh=True)
    tasks = open_tasks(learning, open_task)
    return *rl.assemble(config, learning, held, options or rl.RLOptions(), None, tasks), learning


def steps_of(home, name):
    return [record for record in read_metrics(home / "runs" / name) if record["kind"] == "step"]


def weights_of(home, name):
    return load_file(max((home / "runs" / name / "checkpoints").glob("0*")) / "model.safetensors")


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.6])
def test_the_trainer_and_the_engine_agree_on_what_was_sampled(temperature):
    """Sampled tokens, tool outputs between them, the token that ends a reply: equal up to rounding."""
    t, _, learning = assembled(
        f"agree{temperature}", ("sum",), "sums", temperature=temperature, max_tokens=12
    )
    with t.run, t.loader:
        samples = next(t.loader).rollouts
    assert any(not all(sample.is_sampled) for sample in samples), "tools spoke"
    assert any(sample.has_stopped for sample in samples)
    ending = t.loader.tokenizer.special["<|assistant_end|>"]
    for sample in samples:
        if sample.has_stopped:
            assert sample.is_sampled[-1], "what ends a reply is trained"
        for logprob, is_sampled in zip(sample.logprobs, sample.is_sampled, strict=True):
            assert is_sampled or logprob == 0
    assert any(sample.ids[-1] == ending for sample in samples)
    for batch in micro_batches(samples, 5):
        with torch.no_grad():
            now = token_logprobs(t.model, batch, learning.temperature)
        assert torch.allclose(now, batch.logprobs, atol=2e-5)
        assert batch.logprobs.std() > 0.1, "not all the same"


def test_three_problems_of_five_samples_on_a_micro_batch_of_two_use_every_sample_once(monkeypatch):
    seen, sampled = Counter(), Counter()
    t, reference, learning = assembled(
        "remainders", problems=3, samples=5, kl=0.01, options=rl.RLOptions(device_batch=2)
    )
    original, draw = token_logprobs, type(t.loader).__next__

    def counting(model, batch, temperature):
        if model is t.model:
            assert batch.tokens.size(0) <= 2
            seen.update(tuple(row) for row in batch.tokens.tolist())
        return original(model, batch, temperature)

    def drawing(rollouts):
        experience = draw(rollouts)
        sampled.update((*s.prompt, *s.ids) for s in experience.rollouts)
        return experience

    monkeypatch.setattr(rl, "token_logprobs", counting)
    monkeypatch.setattr(type(t.loader), "__next__", drawing)
    with t.run, t.loader:
        step = rl.rl_step(t, learning, reference)
    unpadded = Counter()
    for row, count in seen.items():
        unpadded[next(row[:n] for n in range(len(row), 0, -1) if row[:n] in sampled)] += count
    assert unpadded == sampled
    assert sampled.total() == 15
    assert step.tokens == sum(len(row) - 7 + 1 for row in sampled.elements()), "all tokens but the prompt"


def test_problems_come_once_a_pass_in_another_order_each_time_and_steps_may_cross_passes():
    t, _, _ = assembled("order", problems=16)
    with t.run, t.loader:
        rollouts = t.loader
        first, second = ([rollouts.problem(40 * p + i) for i in range(40)] for p in (0, 1))
        for _ in range(3):  # 48 of 40 problems
            next(rollouts)
    assert sorted(first) == sorted(second) == [("echo", i) for i in range(40)]
    assert first != second
    assert rollouts.state() == {"drawn": 48, "problems": 40, "held_out": 4}


def test_a_tiny_model_learns_a_tiny_task(world):
    begun = time.monotonic()
    summary = learn("learns", steps=140, problems=16, samples=16, eval_problems=16)
    rewards = [record["reward"] for record in steps_of(world, "learns")]
    assert sum(rewards[:5]) / 5 < 0.45, rewards
    assert sum(rewards[-10:]) / 10 > 0.8, rewards
    assert summary["val_reward"] > summary["val_reward_before"] + 0.2
    assert time.monotonic() - begun < 120
    gaps = [record["logprob_gap_max"] for record in steps_of(world, "learns")]
    assert max(gaps) < 1e-4
    assert (world / "runs" / "learns" / "reward.png").stat().st_size > 10_000
    assert summary == json.loads((world / "runs" / "learns" / "summary.json").read_text())


def test_graded_rewards_and_the_whole_of_grpo_learn_too(world):
    whole = {"clip": 0.2, "kl": 0.01, "inner_updates": 2, "normalize_std": True}
    learn("grpo", ("spell",), "spells", steps=40, problems=8, samples=8, **whole)
    records = steps_of(world, "grpo")
    rewards = [record["reward"] for record in records]
    assert sum(rewards[-8:]) > sum(rewards[:8]) + 0.8, rewards
    assert any(0 < reward < 1 and reward * 64 % 1 for reward in rewards), "thirds"
    assert any(record["clip_share"] > 0 for record in records)
    assert records[0]["kl"] < records[-1]["kl"], "0 at first but for the first inner update"
    assert (world / "runs" / "grpo" / "reference" / "000000").is_dir()


def test_several_tasks_are_learned_together(world):
    summary = learn("both", ("echo", "spell", "echo"))
    assert summary["tasks"] == ["echo", "spell", "echo"]
    before = summary["before"]
    assert before["val_reward"] == summary["val_reward_before"]
    assert before.keys() == {key for key in summary if key.startswith("val_")} - {"val_reward_before"}
    assert {"val_reward_echo", "val_reward_spell", "val_pass@1"} <= before.keys()
    t, _, _ = assembled("mixed", ("echo", "spell", "echo"))
    with t.run, t.loader:
        counts = Counter(t.loader.problem(i)[0] for i in range(120))
        assert {spec for spec, _, _ in t.loader.held_out} == {"echo", "spell"}
    assert counts == {"echo": 80, "spell": 40}


class Same(Echo):
    def reward(self, index, reply):
        return 0.1


def test_equal_rewards_change_nothing_and_nothing_is_divided_by_zero(world):
    before = weights_of(world, "echoes")
    run, config, learning = configured("nothing", normalize_std=True)
    rl.train_rl(run, config, learning, rl.RLOptions(fresh=True), lambda spec, split: Same(split))
    after = weights_of(world, "nothing")
    assert all(torch.equal(before[name], after[name]) for name in before)
    records = steps_of(world, "nothing")
    assert [record["telling"] for record in records] == [0.0] * 4
    assert not any(record["skipped"] for record in records)
    assert found_state(world, "nothing")["loader"]["drawn"] == 16


def found_state(home, name):
    return checkpoint.load_newest(home / "runs" / name / "checkpoints").state


def test_learning_rates_are_a_twentieth_of_the_parents_and_fall_linearly_to_zero(world):
    _, config, _ = configured("rates", steps=10)
    parents = read_config("echoes")["optim"]
    assert config.optim.matrix_lr == pytest.approx(0.05 * parents["matrix_lr"])
    assert config.optim.embedding_lr == pytest.approx(0.05 * parents["embedding_lr"])
    scales = [schedules.lr_scale(step, 10, config.optim) for step in range(11)]
    assert scales == pytest.approx([1 - step / 10 for step in range(11)])
    _, config, _ = rl.configure(["echo"], parent="echoes", open_task=open_task, problems=16)
    assert config.train.steps == 3, "all 40 problems once"
    _, bolder, _ = rl.configure(["echo"], parent="echoes", open_task=open_task, lr_fraction=0.2)
    assert bolder.optim.matrix_lr == pytest.approx(0.2 * parents["matrix_lr"])
    with pytest.raises(UserError, match="--lr-fraction is 0"):
        rl.configure(["echo"], parent="echoes", open_task=open_task, lr_fraction=0)


# -- resuming ---------------------------------------------------------------------------------


def command(home, name, *more):
    args = [sys.executable, "-m", "nanorun", "train", "rl", "--task", f"{HERE}:Sum", "--from", "sums"]
    small = "--problems 3 --samples 5 --max-tokens 12 --eval-problems 3 --save-every 3 --eval-every 10 --json"
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    env = {**os.environ, "NANORUN_HOME": str(home), "PYTHONPATH": paths}
    return [*args, "--name", name, *small.split(), *more], env


def logged(home, name):
    folder = home / "runs" / name
    return [r["step"] for r in read_metrics(folder) if r["kind"] == "step"] if folder.exists() else []


def test_a_killed_run_resumes_to_bit_identical_weights(world):
    whole = ("--steps", "60", "--kl", "0.01", "--clip", "0.2", "--inner-updates", "2")
    args, env = command(world, "untouched", *whole)
    subprocess.run(args, env=env, check=True, capture_output=True, timeout=240)
    args, env = command(world, "killed", *whole)
    dice = random.Random(7)
    for kill in range(3):
        child = subprocess.Popen(args, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        goal, until = 15 * kill + dice.randrange(5, 14), time.monotonic() + 90
        while max(logged(world, "killed"), default=0) < goal and time.monotonic() < until:
            time.sleep(0.005)
        time.sleep(dice.uniform(0, 0.05))
        assert child.poll() is None, "it must still have been running"
        child.send_signal(signal.SIGKILL)
        child.wait()
    args = [arg for i, arg in enumerate(args) if "--from" not in args[max(i - 1, 0) : i + 1]]  # it remembers
    subprocess.run(args, env=env, check=True, capture_output=True, timeout=240)
    one, other = weights_of(world, "untouched"), weights_of(world, "killed")
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert logged(world, "killed") == list(range(1, 61))
    same = ("step", "reward", "loss", "kl", "length", "grad_norm", "val_reward")
    runs = [
        [[r.get(key) for key in same] for r in read_metrics(world / "runs" / name)]
        for name in ("untouched", "killed")
    ]
    assert runs[0] == runs[1]


def test_a_signal_saves_and_says_how_to_resume(world):
    args, env = command(world, "signalled", "--steps", "5000")
    child = subprocess.Popen(args, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    until = time.monotonic() + 60
    while max(logged(world, "signalled"), default=0) < 4 and time.monotonic() < until:
        time.sleep(0.05)
    child.send_signal(signal.SIGTERM)
    _, errors = child.communicate(timeout=60)
    assert child.returncode == 130, errors
    assert "goes on from there" in errors
    assert "Traceback" not in errors
    saved = checkpoint.steps(world / "runs" / "signalled" / "checkpoints")[-1]
    assert logged(world, "signalled")[-1] == saved


def test_a_finished_run_is_not_repeated_and_keeps_its_parent(world):
    done = learn("done")
    assert learn_again("done") == done
    with pytest.raises(UserError, match=r"\(--clip was none and is now 0.1\)"):
        learn_again("done", clip=0.1)
    _, config, learning = configured("x", parent="echoes")
    with pytest.raises(UserError, match="start from itself"):
        rl.train_rl("echoes", config, learning, rl.RLOptions(), open_task)


def test_more_steps_make_a_finished_run_longer(world, capsys):
    done = learn("longer")
    more = learn_again("longer", steps=7)
    assert "'longer' becomes longer: 7 steps instead of 4" in capsys.readouterr().err
    assert (done["steps"], more["steps"]) == (4, 7)
    assert more["val_reward_before"] == done["val_reward_before"]
    records = steps_of(world, "longer")
    assert [record["step"] for record in records] == list(range(1, 8))
    assert [record["lr_scale"] for record in records[4:]] == pytest.approx([3 / 7, 2 / 7, 1 / 7])


def test_a_run_whose_parent_was_renamed_resumes(world):
    shutil.copytree(world / "runs" / "echoes", world / "runs" / "first-name")
    learn("renamed-child", parent="first-name")
    run_list.rename("first-name", "second-name")
    assert learn_again("renamed-child", steps=5)["parent"] == "second-name"


def learn_again(name, steps=4, **changes):
    small = {"problems": 4, "samples": 6, "max_tokens": 8, "eval_problems": 4, **changes}
    train = {"eval_every": 0, "save_every": 2}
    run = rl.configure(["echo"], name=name, steps=steps, open_task=open_task, train=train, **small)
    return rl.train_rl(*run, rl.RLOptions(), open_task)


class Fewer(Echo):
    def __init__(self, split):
        super().__init__(split)
        self.asked = self.asked[:30]


def test_a_task_whose_problems_changed_is_rejected(world):
    learn("fewer")
    (world / "runs" / "fewer" / "summary.json").unlink()
    run, config, learning = configured("fewer")
    with pytest.raises(UserError, match="40 problems, but echo now has 30"):
        rl.train_rl(run, config, learning, rl.RLOptions(), lambda spec, split: Fewer(split))


def test_a_reference_that_is_gone_is_a_sentence(world):
    furnish(world, half_taught(steps=2), "short-lived")
    run, config, learning = configured("orphan", parent="short-lived")
    for path in (world / "runs" / "short-lived" / "checkpoints").iterdir():
        path.rename(path.with_name("000099"))
    with pytest.raises(UserError, match="it is gone"):
        rl.train_rl(run, config, learning, rl.RLOptions(), open_task)


def test_a_nan_loss_is_skipped_and_repeated_ones_roll_back(world, monkeypatch, capsys):
    calls, original = [], token_logprobs

    def spiking(model, batch, temperature):
        calls.append(1)
        found = original(model, batch, temperature)
        return found * float("nan") if len(calls) in (4, 7, 8, 9) else found

    monkeypatch.setattr(rl, "token_logprobs", spiking)
    learn("spiky", steps=14, train={"save_every": 3}, options=rl.RLOptions(fresh=True, device_batch=99))
    records = steps_of(world, "spiky")
    assert sum(bool(record["skipped"]) for record in records) == 1, "the others were rolled back"
    assert "rolling back to step" in capsys.readouterr().err
    assert [record["step"] for record in records] == list(range(1, 15))
    assert found_state(world, "spiky")["loader"]["drawn"] > 14 * 4, "past the trouble"
    assert all(torch.isfinite(w).all() for w in weights_of(world, "spiky").values())


def test_a_run_that_cannot_save_its_weights_fails(world, monkeypatch):
    monkeypatch.setattr(rl, "rl_step", poison(rl.rl_step, range(3, 10**6)))
    with pytest.raises(UserError, match=r"3 times and failed each time \(embed.*the first in row \d+\)"):
        learn("dead", steps=4)
    assert not (world / "runs" / "dead" / "summary.json").exists()
    assert checkpoint.steps(world / "runs" / "dead" / "checkpoints") == [2]


def test_out_of_memory_halves_the_micro_batch_and_changes_nothing(world, monkeypatch, capsys):
    learn("roomy", options=rl.RLOptions(fresh=True, device_batch=3))
    original = token_logprobs

    events, zero_grad = [], Optimizer.zero_grad

    def small(model, batch, temperature):
        if batch.tokens.size(0) > 3:
            events.append("out of memory")
            raise torch.OutOfMemoryError("out of memory")
        events.append("forward")
        return original(model, batch, temperature)

    monkeypatch.setattr(rl, "token_logprobs", small)

    def watched_zero_grad(optimizer, **options):
        events.append("zero_grad")
        zero_grad(optimizer, **options)

    monkeypatch.setattr(Optimizer, "zero_grad", watched_zero_grad)
    learn("narrow", options=rl.RLOptions(fresh=True, device_batch=24))
    assert "continuing with 3" in capsys.readouterr().err
    one, other = weights_of(world, "roomy"), weights_of(world, "narrow")
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert found_state(world, "narrow")["rows"] == 3
    behind = [then for event, then in itertools.pairwise(events) if event == "out of memory"]
    assert set(behind) == {"zero_grad"}, "gradients of the failed attempt are dropped"
    monkeypatch.setattr(rl, "token_logprobs", lambda *_: (_ for _ in ()).throw(torch.OutOfMemoryError()))
    with pytest.raises(UserError, match="one reply at a time"):
        learn("hopeless")


def test_evaluations_during_training_change_nothing(world):
    learn("quiet", steps=6)
    learn("watched", steps=6, train={"eval_every": 1})
    one, other = weights_of(world, "quiet"), weights_of(world, "watched")
    assert all(torch.equal(one[name], other[name]) for name in one)
    evals = [r for r in read_metrics(world / "runs" / "watched") if r["kind"] == "eval"]
    assert [record["step"] for record in evals] == list(range(7))
    assert set(evals[0]) >= {"val_reward", "val_pass@1", "val_pass@2", "val_pass@4", "val_pass@6"}


def test_before_its_first_step_it_says_what_it_does_and_limits_the_time(world, monkeypatch, capsys):
    monkeypatch.setattr(console, "_PLAIN_INTERVAL_S", 0.0)
    monkeypatch.setattr(rl, "FIRST_EVALUATION_S", 0.0)
    few = learn("bounded", ("echo", "spell"), eval_problems=12, train={"eval_every": 2})
    said = capsys.readouterr().err
    assert "loading 'echoes': 4 problems a step, 6 replies each, at most 8 tokens" in said
    first = said.index("evaluating echoes on held-out problems: 1 of 72 reply, ")
    assert said.index("before the first step (on 4 problems, not 12, to keep it near 0 seconds)") > first
    assert re.search(r"training bounded: 0\.\d+ of 4 step, ", said), "progress within the first step"
    assert few["eval_problems"] == found_state(world, "bounded")["loader"]["held_out"] == 4
    assert {"val_reward_echo", "val_reward_spell"} <= few.keys(), "both tasks are among the first problems"
    monkeypatch.undo()
    monkeypatch.setenv("NANORUN_HOME", str(world))
    run, config, learning = configured(
        "bounded", ("echo", "spell"), eval_problems=12, steps=6, train={"eval_every": 2}
    )
    more = rl.train_rl(run, config, learning, rl.RLOptions(), open_task)
    assert more["eval_problems"] == 4, "later evaluations are comparable"


# -- the command line --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ([], "Name a task"),
        (["--task", "echo", "--samples", "1"], "at least 2"),
        (["--task", "echo", "--temperature", "0"], "more than 0"),
        (["--task", "echo", "--clip", "2"], "between 0 and 1"),
        (["--task", "echo", "--kl", "-1"], "0 or more"),
        (["--task", "echo", "--from", "nobody"], "There is no run 'nobody'"),
        (["--task", "echo", "--steps", "0"], "--steps"),
        (["--task", "echo", "--dtype", "fp7"], "'fp7' is not one of 'auto', 'bf16'"),
        (["--task", "gone.jsonl"], "There is no file gone.jsonl: check the name and the current folder."),
        (["--task", "gone.json"], "There is no file gone.json: check the name and the current folder."),
        (["--task", "gone.py:Sum"], "There is no file gone.py: check the name and the current folder."),
    ],
)
def test_a_mistake_is_one_sentence_and_code_2(world, args, words, mistake):
    assert words in mistake(["train", "rl", *args])


def test_a_task_that_is_not_there_leaves_no_run_behind(world):
    run, config, learning = configured("halfway")

    def only_train(spec, split):
        if split != "train":
            raise UserError("it has no such split")
        return open_task(spec, split)

    with pytest.raises(UserError, match="no such split"):
        rl.train_rl(run, config, learning, rl.RLOptions(), only_train)
    assert not (world / "runs" / "halfway").exists()


def test_a_start_that_was_not_taught_to_answer_is_named_once(world, capsys):
    shutil.copytree(world / "runs" / "echoes", world / "runs" / "untaught")
    config = world / "runs" / "untaught" / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "kind": "base"}))
    learn("from-base", parent="untaught", steps=1)
    assert capsys.readouterr().err.count("'untaught' is a base model, not trained to answer") == 1
    learn("from-taught", steps=1)
    assert "base model" not in capsys.readouterr().err


def test_an_empty_home_has_nothing_to_start_from(home):
    with pytest.raises(UserError, match="no model to start from"):
        rl.configure(["echo"], open_task=open_task)


def test_the_config_is_one_that_every_verb_reads(world):
    from nanorun.infer.load import load_model

    learn("readable")
    loaded = load_model("readable")
    config = loaded.config
    assert (loaded.run, loaded.step, config.kind) == ("readable", 4, "rl")
    assert RLConfig(**{**read_config("readable")["rl"], "tasks": ("echo",)}).parent == "echoes"
