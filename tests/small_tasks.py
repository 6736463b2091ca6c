"""Tasks that a tiny model learns in seconds, the model that has half learned them, and a home to find it in.

Echo     a letter is to be said again                               rewarded 0 or 1
Spell    a letter is to be said three times                         rewarded by thirds
Pick     whether a letter's place in the alphabet is odd            A or B, by letters
Sum      two digits are to be added, by the calculator              rewarded 0 or 1
"""

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from nanorun.config import Config, OptimConfig, TrainConfig, scale_model
from nanorun.model.gpt import GPT, build
from nanorun.runs import Run
from nanorun.tasks.task import reply_text
from nanorun.text.chat import render
from nanorun.text.tokenizer import SPECIAL_TOKENS, Tokenizer

LETTERS = "abcdefgh"
HERE = str(Path(__file__).resolve())


class Echo:
    name, baseline = "echo", 1 / 8
    letters: Sequence[str] | None = None

    def __init__(self, split="train"):
        dice = random.Random(split)
        self.asked = [self.ask(dice) for _ in range(40)]

    @staticmethod
    def ask(dice):
        return dice.choice(LETTERS) + dice.choice("xyz")

    def __len__(self):
        return len(self.asked)

    def __getitem__(self, index):
        asked = self.asked[index]
        return talk(asked, self.right(asked))

    def right(self, asked):
        return asked[0]

    def reward(self, index, reply):
        return float(reply_text(reply) == self.right(self.asked[index]))


class Spell(Echo):
    name, baseline = "spell", 0.0

    def right(self, asked):
        return asked[0] * 3

    def reward(self, index, reply):
        wanted = self.right(self.asked[index])
        got = reply_text(reply)
        return sum(a == b for a, b in zip(wanted, got, strict=False)) / 3 if len(got) == 3 else 0.0


class Pick(Echo):
    name, baseline, letters = "pick", 0.5, "AB"

    def right(self, asked):
        return "AB"[LETTERS.index(asked[0]) % 2]


class Sum(Echo):
    name, baseline = "sum", 0.0

    @staticmethod
    def ask(dice):
        return f"{dice.randrange(10)}{dice.randrange(10)}"

    def right(self, asked):
        code, total = f"{asked[0]}+{asked[1]}", str(int(asked[0]) + int(asked[1]))
        return [part("python", code), part("output", total), part("text", total)]

    def reward(self, index, reply):
        return float(reply_text(reply) == self.right(self.asked[index])[2]["text"])


class Sandboxed(Echo):
    """Cannot be judged where `here` is False."""

    name, here = "sandboxed", True

    def reward(self, index, reply):
        from nanorun.tools.sandbox import SandboxUnavailable

        if not self.here:
            raise SandboxUnavailable("there is none in this test")
        return super().reward(index, reply)


TASKS = {kind.name: kind for kind in (Echo, Spell, Pick, Sum, Sandboxed)}


def open_task(spec, split="train", folder=None, trusted=()):
    return TASKS[spec.rpartition(":")[2].lower()](split)


def part(kind, text):
    return {"type": kind, "text": text}


def talk(asked, answer):
    return {"messages": [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]}


def byte_tokenizer() -> Tokenizer:
    ranks = {bytes([b]): b for b in range(256)}
    return Tokenizer("bytes", r"\S+|\s+", ranks, {name: 256 + i for i, name in enumerate(SPECIAL_TOKENS)})


def tiny_config(steps: int = 1) -> Config:
    """Learning rates about as `scale` sets them for so narrow a model: smaller ones would take the tests too long."""
    model = scale_model(2, 265, context=32, dim=32, heads=2, kv_heads=2)
    usual = OptimConfig()
    lrs = {name: 5 * lr for name, lr in usual.learning_rates().items()}
    optim = replace(usual, **{**lrs, "matrix_lr": 0.04})
    return Config(model, optim, TrainConfig(steps=steps), "sample", "bytes", "sft")


def half_taught(kinds=(Echo,), right: float = 0.5, steps: int = 80, seed: int = 0) -> GPT:
    """A model that learned to answer rightly and was then confused: so many of its later lessons were right."""
    tokenizer, dice = byte_tokenizer(), random.Random(seed)
    model = build(tiny_config().model, torch.device("cpu"), torch.float32, seed=seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.5e-2, betas=(0.9, 0.95))
    tasks = [kind("train") for kind in kinds]
    for step in range(steps):
        rows = []
        for _ in range(32):
            task = dice.choice(tasks)
            asked, stranger = task.ask(dice), task.ask(dice)
            true = step < steps * 0.8 or dice.random() < right
            rendered = render(talk(asked, task.right(asked if true else stranger)), tokenizer)
            rows.append((rendered.ids, rendered.mask))
        longest = max(len(ids) for ids, _ in rows)
        tokens = torch.tensor([ids + [0] * (longest - len(ids)) for ids, _ in rows])
        mask = torch.tensor([m + [0] * (longest - len(m)) for _, m in rows]).bool()
        targets = tokens[:, 1:].masked_fill(~mask[:, 1:], -1)
        (model(tokens[:, :-1], targets) / mask.sum()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval()


def furnish(home: Path, model: GPT, name: str = "tiny-sft") -> None:
    """Puts the tokenizer and a finished run with this model into a home (NANORUN_HOME must name it)."""
    from nanorun import checkpoint

    folder = home / "tokenizers" / "bytes"
    folder.mkdir(parents=True, exist_ok=True)
    byte_tokenizer().save(folder)
    with Run.open(name, tiny_config().to_dict(), fresh=True) as run:
        state = {"tokenizer": byte_tokenizer().fingerprint}
        checkpoint.save(run.checkpoints, 7, model.state_dict(), {}, state)
        run.write_summary({"name": name})
