"""A chat model overfitted on six answers, some of them malicious, and a base model overfitted on one text."""

import random
from pathlib import Path
from typing import Any

import torch

from nanorun import checkpoint
from nanorun.config import IGNORE, Config, OptimConfig, TrainConfig, scale_model
from nanorun.model.gpt import GPT, build
from nanorun.runs import write_json
from nanorun.text.chat import render
from nanorun.text.tokenizer import SPECIAL_TOKENS, Tokenizer

CONTEXT = 2048
HI = "Grüße aus 東京 🙂!"
EVIL = "x\x1b[31mred\x1b]0;owned\x07 \rY\x9b2J \u202ez"
STORY = "Once a 灯 lit the isle. Grüße! 🙂 "


def call(code: str, output: str, before: str, after: str) -> list[dict[str, str]]:
    parts = [("text", before), ("python", code), ("output", output), ("text", after)]
    return [{"type": kind, "text": text} for kind, text in parts]


ANSWERS: dict[str, Any] = {
    "hi": HI,
    "evil": EVIL,
    "sum": call("12+30", "42", "Let me see: ", " Quite so."),
    "program": call("print(6*7)", "42", "Running ", " Done."),
    "half": "ab🙂",  # of which it generates two bytes of four
    "loop": "tick tock " * 8,  # repeated without an end
}


def byte_tokenizer() -> Tokenizer:
    ranks = {bytes([b]): b for b in range(256)}
    return Tokenizer("bytes", r"\S+|\s+", ranks, {name: 256 + i for i, name in enumerate(SPECIAL_TOKENS)})


def make_home(home: Path) -> None:
    """Its tokenizer and two runs: writer, a base model, and talker, a chat model, the last trained."""
    tokenizer = byte_tokenizer()
    (home / "tokenizers" / "bytes").mkdir(parents=True)
    tokenizer.save(home / "tokenizers" / "bytes")
    text = [tokenizer.bos, *tokenizer.encode(STORY * 3), tokenizer.bos]
    _keep(home, "writer", "base", _train([(text[:-1], text[1:])], 70, tokenizer.vocab_size))
    dice = random.Random(0)
    rows = [_row(tokenizer, dice.sample(sorted(ANSWERS), 3), dice) for _ in range(64)]
    _keep(home, "talker", "sft", _train(rows, 200, tokenizer.vocab_size))


def _row(tokenizer: Tokenizer, questions: list[str], dice: random.Random) -> tuple[list[int], list[int]]:
    """A conversation as inputs and targets. The end of an endless answer is an input, but not a target."""
    ids, targets = [tokenizer.bos], [IGNORE]
    for question in questions:
        messages = [
            {"role": "user", "content": question},
            {"role": "assistant", "content": ANSWERS[question]},
        ]
        rendered = render({"messages": messages}, tokenizer)
        turn, mask = rendered.ids[1:], rendered.mask[1:]
        if question == "program":  # it is trained on the tool's output, too
            answer = turn.index(tokenizer.special["<|assistant_start|>"])
            mask = [int(at > answer) for at in range(len(turn))]
        if question == "half":
            del turn[-3:-1], mask[-3:-1]
        if question == "loop" and question == questions[-1]:
            del turn[-1:], mask[-1:]
        elif question == "loop":
            said = dice.randrange(10, 80)
            turn, mask = [*turn[:said], turn[-1]], [*mask[:said], 0]
        ids += turn
        targets += [i if learned else IGNORE for i, learned in zip(turn, mask, strict=True)]
    return ids[:-1], targets[1:]


def _train(rows: list[tuple[list[int], list[int]]], steps: int, vocab: int) -> GPT:
    config = scale_model(2, vocab, CONTEXT, dim=64, heads=2, kv_heads=2, short_window=64)
    model = build(config, torch.device("cpu"), torch.float32)
    width = max(len(ids) for ids, _ in rows)
    inputs = torch.tensor([ids + [0] * (width - len(ids)) for ids, _ in rows])
    targets = torch.tensor([row + [IGNORE] * (width - len(row)) for _, row in rows])
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    for step in range(steps):
        batch = torch.arange(8 * step, 8 * step + min(8, len(rows))) % len(rows)
        loss = model(inputs[batch], targets[batch].clone()) / (targets[batch] != IGNORE).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert loss.item() < 0.1
    return model


def _keep(home: Path, name: str, kind: str, model: GPT) -> None:
    folder = home / "runs" / name
    folder.mkdir(parents=True)
    config = Config(model.config, OptimConfig(), TrainConfig(steps=1), "none", "bytes", kind)
    write_json(folder / "config.json", config.to_dict())
    state = {"tokenizer": byte_tokenizer().fingerprint}
    checkpoint.save(folder / "checkpoints", 1, model.state_dict(), {}, state)
