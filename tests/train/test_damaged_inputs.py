"""A run trains on its own data with its own tokenizer, or says in one sentence why it does not."""

import json
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from nanorun import checkpoint, cli
from nanorun.config import Config, OptimConfig, TrainConfig, scale_model
from nanorun.data.dataset import open_dataset
from nanorun.data.get import make_sample
from nanorun.data.vocabulary import train_on
from nanorun.errors import UserError
from nanorun.evals.bpb import evaluate_run
from nanorun.infer.load import ServedModel, load_model
from nanorun.text.store import open_tokenizer
from nanorun.text.tokenizer import train_tokenizer
from nanorun.train import loop
from nanorun.train.base import BaseOptions, train_base
from nanorun.train.sft import SFTOptions, train_sft

pytestmark = pytest.mark.usefixtures("one_thread", "unharmed")


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home with a base model of three steps."""
    home = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NANORUN_HOME", str(home))
        patch.setattr("nanorun.data.dataset.ROW_GROUP_DOCUMENTS", 4)
        train_on(make_sample(20_000), 300, name="sample", max_bytes=10**6)
        train(3)
    talk = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]}
    (home / "talk.jsonl").write_text((json.dumps(talk) + "\n") * 4)
    return home


@pytest.fixture
def unharmed(world: Path, tmp_path: Path) -> Iterator[None]:
    """Restores the home after a test that damages it."""
    shutil.copytree(world, tmp_path / "copy")
    yield
    shutil.rmtree(world)
    shutil.move(tmp_path / "copy", world)


def train(steps: int, name: str = "tiny") -> dict:
    model = scale_model(2, 300, context=32, dim=32, heads=2, kv_heads=1)
    length = TrainConfig(steps=steps, batch_tokens=256, eval_every=0, eval_tokens=512, save_every=100)
    config = Config(model, OptimConfig(warmup_steps=1), length, "sample", "sample")
    return train_base(config, BaseOptions(name=name, samples=1))


def flip_bit(path: Path) -> None:
    before, content = path.stat(), bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def exchange_tokenizer(home: Path) -> None:
    """Another tokenizer of the same name and size, as if `tok train --replace` had been run on other text."""
    texts = ["quick brown foxes jump over the lazy dogs of the old mill while 1234 owls look on. " * 4]
    old, new = open_tokenizer("sample"), train_tokenizer(texts, 300, "sample")
    assert (new.vocab_size, new.name) == (old.vocab_size, old.name)
    assert new.fingerprint != old.fingerprint
    new.save(home / "tokenizers" / "sample")


def test_a_run_does_not_start_with_a_damaged_shard(world):
    flip_bit(open_dataset("sample").files("train")[0])
    with pytest.raises(UserError, match=r"shard-00000\.parquet is damaged or was exchanged"):
        train(3, "other")
    assert not (world / "runs" / "other").exists()


def test_a_run_does_not_resume_with_a_damaged_shard(world):
    flip_bit(open_dataset("sample").files("train")[0])
    with pytest.raises(UserError, match=r"shard-00000\.parquet is damaged or was exchanged"):
        train(6)
    assert checkpoint.steps(world / "runs" / "tiny" / "checkpoints") == [3]


def test_a_flipped_bit_in_a_validation_shard_is_one_sentence(world):
    flip_bit(open_dataset("sample").files("val")[0])
    with pytest.raises(UserError, match="damaged or was exchanged"):
        evaluate_run("tiny", None, None)


def test_when_a_shard_is_removed_in_the_middle_of_a_run_its_steps_are_saved(world, monkeypatch):
    shard, take_step = open_dataset("sample").files("train")[0], loop.train_step

    def remove_at_step_5(t: loop.Training) -> loop.Step:
        if t.step == 5:
            shard.unlink(missing_ok=True)
        return take_step(t)

    monkeypatch.setattr(loop.train, "__defaults__", (remove_at_step_5,))
    with pytest.raises(UserError, match="cannot be read"):
        train(1000, "cut")
    (saved,) = checkpoint.steps(world / "runs" / "cut" / "checkpoints")
    assert 5 <= saved < 1000


def test_weights_record_the_tokenizer_they_were_trained_with(world):
    recorded = checkpoint.load_newest(world / "runs" / "tiny" / "checkpoints").state["tokenizer"]
    assert recorded == open_tokenizer("sample").fingerprint


@pytest.mark.parametrize(
    "use",
    [
        lambda home: load_model("tiny"),
        lambda home: ServedModel("tiny"),
        lambda home: evaluate_run("tiny", None, None),
        lambda home: train_sft(SFTOptions("tiny", tasks=[str(home / "talk.jsonl")]), BaseOptions(name="sft")),
        lambda home: train(6),
    ],
    ids=["eval", "chat and serve", "eval bpb", "train sft", "resume"],
)
def test_a_tokenizer_of_equal_size_exchanged_under_a_run_is_noticed(world, use):
    exchange_tokenizer(world)
    with pytest.raises(UserError, match="trained with another tokenizer than 'sample' is now"):
        use(world)
    assert not (world / "runs" / "sft").exists()


@pytest.mark.parametrize("verb", [["chat", "-p", "Hi"], ["serve", "--port", "0"]])
def test_chat_and_serve_say_in_one_sentence_that_the_tokenizer_was_exchanged(
    world, verb, capsys, monkeypatch
):
    exchange_tokenizer(world)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    with pytest.raises(SystemExit) as exit_info:
        cli.main(verb)
    *progress, sentence = capsys.readouterr().err.splitlines()
    assert exit_info.value.code == 2
    assert progress in ([], ["Loading the model ..."])
    assert "trained with another tokenizer" in sentence


def test_an_older_run_that_does_not_record_its_tokenizer_loads_with_one_line(world, capsys):
    folder = world / "runs" / "tiny" / "checkpoints"
    found = checkpoint.load_newest(folder)
    state = {name: value for name, value in found.state.items() if name != "tokenizer"}
    checkpoint.save(folder, found.step, found.model, found.optimizer, state)
    capsys.readouterr()
    assert load_model("tiny").step == 3
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "does not record its tokenizer: using 'sample' as it is now" in said
