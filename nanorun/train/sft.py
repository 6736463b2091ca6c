"""`train sft`: a base model learns to converse. The loop is base's; what differs is here.

    material    a mixture of conversations, rendered whole, packed by best fit with padding, an epoch at a time
    loss        on what the assistant says, divided by how many such tokens the step has
    start       the parent's weights and its optimizer's state, so that nothing has to be found out again
    rates       the parent's times 0.8 (and the root of the batches' ratio, where they differ), level for the first
                half, then in a line to 0

Midtraining is the same with another mixture (`--mixture mid`).
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from nanorun import checkpoint, hardware, home
from nanorun.config import Config
from nanorun.console import say
from nanorun.data.conversations import Conversations, render_all
from nanorun.data.rows import RowOrder, count_rows
from nanorun.errors import UserError
from nanorun.evals.chat import ChatEvalOptions, chat_evaluator, open_tasks
from nanorun.infer.load import newest_checkpoint
from nanorun.model.attention import choose_backends
from nanorun.runs import Run, newest_run, read_config, read_metrics
from nanorun.tasks.mixture import find_mixture, prepare_mixture
from nanorun.text.store import open_tokenizer
from nanorun.text.tokenizer import Tokenizer
from nanorun.train import base, loop
from nanorun.train.base import Interrupted, Material, Options, Parent
from nanorun.train.track import require

RATE_SHARE = 0.8  # of the parent's rates
WARMDOWN = 0.5  # the last part of the run, in which they fall to 0
FEWEST_STEPS = 100  # a batch that leaves fewer is halved, unless it was asked for
EVALUATIONS = 4  # in a run, unless told otherwise


@dataclass(frozen=True)
class Choices:
    """What `train sft` can be told about what to learn; None leaves it to the parent or the mixture."""

    parent: str | None = None  # a run; None: the newest base model
    mixture: str = "sft"
    tasks: Sequence[str] = ()  # code of the user's, trusted because the command line names it
    folder: Path | None = None  # where the public tasks' files are
    warm: bool = True
    context: int | None = None
    batch_tokens: int | None = None
    steps: int | None = None
    epochs: int | None = None
    seed: int = 0
    save_every: int | None = None
    eval_every: int | None = None
    chat_every: int = 0  # steps between questions to the model; 0: none
    chat_problems: int = 25  # of each task

    def __post_init__(self) -> None:
        if self.steps is not None and self.epochs is not None:
            raise UserError("Give one of --steps and --epochs: each of them fixes how long to train.")


def train_sft(choices: Choices, options: Options) -> dict[str, Any]:
    """Trains, or goes on training; returns the summary that is also kept in the run's folder."""
    if options.deterministic:
        base.make_deterministic()
    if options.track:
        require(options.track)
    parent = find_parent(choices.parent)
    begun_from = Config.from_dict(read_config(parent))
    spec, train, val = prepare_mixture(
        find_mixture(choices.mixture), choices.folder, choices.seed, choices.tasks
    )
    tokenizer = open_tokenizer(begun_from.tokenizer)
    context = choices.context or begun_from.model.context
    learned, measured = (render_all(mixture, tokenizer, context) for mixture in (train, val))
    tell(learned, context)
    epochs = None if choices.steps is not None else choices.epochs or 1
    material = Material(
        learned.source(tokenizer.bos),
        RowOrder("padded", seed=choices.seed, epochs=epochs),
        measured.source(tokenizer.bos),
        exam_on_the_way(choices, tokenizer, begun_from.data),
    )
    config = configure(begun_from, choices, material)
    choose_backends(config.model, torch.device(hardware.detect().device), options.backend)
    name = options.name or name_after(parent, spec.name)
    record = {
        **config.to_dict(),
        "parent": parent,
        "warm_start": choices.warm,
        "epochs": epochs,
        "mixture": {**spec.to_dict(), "fingerprint": learned.fingerprint},
    }
    with Run.open(name, record, fresh=options.fresh) as run:
        found = checkpoint.load_newest(run.checkpoints)
        if found is None:
            run.rewind_metrics(0)  # what a session logged that was killed before its first checkpoint
        elif (run.folder / "summary.json").is_file():
            say(f"run '{name}' is finished already, at step {found.step}")
            summary: dict[str, Any] = json.loads((run.folder / "summary.json").read_text(encoding="utf-8"))
            return summary
        begin = Parent(newest_checkpoint(parent), choices.warm) if found is None else None
        training, finished = base.train_within_memory(config, run, options, found, material, begin)
        if not finished:
            raise Interrupted(name, training.step, config.train.steps)
        return finish(training, parent, learned)


def find_parent(name: str | None) -> str:
    name = name or newest_run("base", with_checkpoint=True)
    if name is None:
        raise UserError(
            f"There is no base model in {home.runs_dir()} to begin from: nanorun train base or nanorun speedrun "
            "makes one."
        )
    return name


def name_after(parent: str, mixture: str) -> str:
    """sft-d12 for base-d12, sample-sft for sample-base, mid-d12 with a mixture for midtraining."""
    stage = "mid" if mixture.endswith("mid") else "sft"
    for old in ("base", "mid"):
        if old in parent:
            return parent.replace(old, stage)
    return f"{stage}-{parent}"


def configure(parent: Config, choices: Choices, material: Material) -> Config:
    """The run's configuration: the parent's, with the batch, the rates and the length of this stage."""
    context = choices.context or parent.model.context
    short = parent.model.short_window or -(-parent.model.context // 4 // 128) * 128
    # Its layers see as far as they did. So little text needs no haste: sixteen bits.
    model = replace(parent.model, context=context, short_window=short, fp8="none")
    rows, steps = how_long(parent, choices, material, context)
    train = replace(
        parent.train,
        steps=steps,
        batch_tokens=rows * context,
        seed=choices.seed,
        packing="padded",
        save_every=choices.save_every or parent.train.save_every,
        eval_every=-(-steps // EVALUATIONS) if choices.eval_every is None else choices.eval_every,
    )
    share = RATE_SHARE if parent.kind == "base" else 1.0  # a parent after midtraining has that share already
    share *= math.sqrt(train.batch_tokens / parent.train.batch_tokens)
    return replace(
        parent, model=model, optim=parent.optim.fine_tuning(share, WARMDOWN), train=train, kind="sft"
    )


def how_long(parent: Config, choices: Choices, material: Material, context: int) -> tuple[int, int]:
    """The rows of a step, and the steps: as many as were asked for, or as the epochs have."""
    rows = max((choices.batch_tokens or parent.train.batch_tokens) // context, 1)
    if choices.steps is not None:
        return rows, choices.steps
    total = count_rows(material.train, material.order, context)
    while choices.batch_tokens is None and rows > 1 and total / rows < FEWEST_STEPS:
        rows //= 2
    return rows, math.ceil(total / rows)


def exam_on_the_way(choices: Choices, tokenizer: Tokenizer, data: str) -> loop.Exam | None:
    """ChatCORE on a few questions of each task that is here and that this machine can judge."""
    if not choices.chat_every:
        return None
    tasks = open_tasks(ChatEvalOptions(folder=choices.folder), data)
    return loop.Exam(choices.chat_every, chat_evaluator(tokenizer, tasks, choices.chat_problems))


def tell(learned: Conversations, context: int) -> None:
    words = f"{len(learned):,} conversations, {learned.trained_tokens:,} tokens of answers"
    if learned.cut or learned.left_out:
        words += (
            f" ({learned.cut:,} lost their end and {learned.left_out:,} are left out to fit {context} tokens)"
        )
    say(words)


def finish(t: loop.Training, parent: str, learned: Conversations) -> dict[str, Any]:
    """The summary and the plot of a run that reached its end."""
    from nanorun.report.plots import plot_loss

    records = list(read_metrics(t.run.folder))
    asked = [r for r in records if r["kind"] == "chat"][-1:]
    summary = {
        **base.summarize(t),
        **{key: value for r in asked for key, value in r.items() if key.startswith("chat")},
        "parent": parent,
        "conversations": len(learned),
        "conversations_cut": learned.cut,
        "conversations_left_out": learned.left_out,
    }
    t.run.write_summary(summary)
    plot_loss([(t.run.name, records)], t.run.folder / "loss.png")
    return summary
