"""`train sft`: supervised fine-tuning of a base model on conversations. The loop is base's; what differs is here.

    data            a mixture of conversations, rendered whole, packed by best fit with padding, epoch by epoch; the
                    user's own conversations are the mixture unless another is named
    length          one epoch in batches of the parent's size; a small mixture gets smaller batches and several epochs
    loss            on the assistant's tokens, divided by their number in the step
    start           the parent's weights and its optimizer state, so that moments need no new warmup
    learning rates  the parent's times 0.8 (and the root of the ratio of batch sizes), constant for the first half, then
                    falling linearly to 0

Midtraining is the same with another mixture (`--mixture mid`).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from nanorun import hardware, home
from nanorun.config import NARROW, Config
from nanorun.console import command, say
from nanorun.data.conversations import Conversations, render_all
from nanorun.data.rows import RowOrder, count_rows
from nanorun.errors import UserError
from nanorun.evals.chat import ChatEvalOptions, chat_evaluator, open_tasks
from nanorun.infer.load import newest_checkpoint
from nanorun.model.attention import choose_backends
from nanorun.model.fast.recipe import Recipe
from nanorun.runs import Run, load_config, newest_run, read_metrics, trained_config
from nanorun.tables import table
from nanorun.tasks.mixture import Mixture, MixtureSpec, choose_mixture, prepare_mixture
from nanorun.text.store import open_tokenizer
from nanorun.text.tokenizer import Tokenizer
from nanorun.train import base, loop
from nanorun.train.base import BaseOptions, Interrupted, Material
from nanorun.train.track import require

LR_FRACTION = 0.8  # of the parent's learning rates
WARMDOWN = 0.5  # fraction of the run over which they fall to 0
MIN_STEPS = 100  # a default batch size that leaves fewer steps is halved
# A small mixture is trained on for sqrt(2500 / rows) epochs. By then the loss on held-out conversations is about 10%
# above its minimum, but at its minimum few of the answers that were trained can be repeated (docs/lab-notebook.md).
REPEATED_ROWS = 2500
MAX_EPOCHS = 10  # by default
EVALUATIONS = 4  # in a run, by default


@dataclass(frozen=True)
class SFTOptions:
    """What to train on, and how long. None: as the parent or the mixture has it."""

    parent: str | None = None  # a run; None: the newest base model
    mixture: str | None = None  # None: the user's own tasks alone or, without any, sft
    # The user's own: conversations, or code, trusted because the command line names it.
    tasks: Sequence[str] = ()
    folder: Path | None = None  # of the public tasks' files
    warm: bool = True  # start with the parent's optimizer state
    context: int | None = None
    batch_tokens: int | None = None
    steps: int | None = None
    epochs: int | None = None
    seed: int = 0
    save_every: int | None = None
    eval_every: int | None = None
    chat_every: int = 0  # steps between ChatCORE evaluations; 0: none
    chat_problems: int = 25  # per task

    def __post_init__(self) -> None:
        if self.steps is not None and self.epochs is not None:
            raise UserError("Give one of --steps and --epochs: each fixes the length of the run.")


def train_sft(sft: SFTOptions, options: BaseOptions) -> dict[str, Any]:
    """Trains, or resumes; returns the summary that is also written to the run's folder."""
    if options.deterministic:
        base.make_deterministic()
    if options.track:
        require(options.track)
    earlier = trained_config(options.name) if options.name and not options.fresh else {}
    parent = sft.parent or earlier.get("parent") or newest_run("base")
    if parent is None:
        raise UserError(
            f"There is no base model in {home.runs_dir()} to start from: run {command('train base')} or "
            f"{command('speedrun')}."
        )
    inherited = load_config(parent)
    tokenizer, context = open_tokenizer(inherited.tokenizer), sft.context or inherited.model.context
    spec, *mixtures = prepare_mixture(choose_mixture(sft.mixture, sft.tasks), sft.folder, sft.seed, sft.tasks)
    name = options.name or default_name(parent, spec.name)
    earlier_model = None
    if not options.fresh and trained_config(name):  # what depends on the length stays if it becomes longer
        earlier_model, train_config = load_config(name).model, load_config(name).train
        sft = replace(sft, batch_tokens=sft.batch_tokens or train_config.batch_tokens)
    train, val = (render_all(mixture, tokenizer, context) for mixture in mixtures)
    epochs = choose_epochs(sft, train, context)
    material = Material(
        train.source(tokenizer.bos),
        RowOrder("padded", seed=sft.seed, epochs=epochs),
        val.source(tokenizer.bos),
        make_exam(sft, tokenizer, inherited.data),
    )
    config = configure(inherited, sft, material)
    if earlier_model is not None:
        config = replace(config, model=replace(config.model, document_mask=earlier_model.document_mask))
    log_mixture(spec, mixtures[0], train, val, config, epochs or config.tokens / len(train.tokens))
    choose_backends(config.model, torch.device(hardware.detect().device), options.backend)
    record = {
        **config.to_dict(),
        "parent": parent,
        "warm_start": sft.warm,
        "epochs": epochs,
        "mixture": {**spec.to_dict(), "fingerprint": train.fingerprint},
    }
    with Run.open(name, record, fresh=options.fresh) as run:
        found, summary = base.find_progress(run, finished_at=0)  # epochs may end early, after a rollback
        if summary is not None:
            return summary
        start = newest_checkpoint(parent) if found is None else None
        if start is not None and options.recipe is None:
            # So little text needs no FP8.
            recompute = loop.recorded_recipe(start).recompute
            options = replace(options, recipe=Recipe(fp8="none", recompute=recompute))
        training, finished = base.train_within_memory(config, run, options, found, material, start, sft.warm)
        if not finished:
            raise Interrupted(run, training.step, config.train.steps)
        return finish(training, parent, train)


def default_name(parent: str, mixture: str) -> str:
    """sft-d12 for base-d12, sample-sft for sample-base, mid-d12 with a mixture for midtraining."""
    stage = "mid" if mixture == "mid" or mixture.endswith("-mid") else "sft"
    for old in ("base", "mid"):
        if old in parent:
            return parent.replace(old, stage)
    return f"{stage}-{parent}"


def configure(parent: Config, sft: SFTOptions, material: Material) -> Config:
    """The run's configuration: the parent's, with the batch size, learning rates and length of this stage."""
    context = sft.context or parent.model.context
    # The sliding windows stay as they were.
    short_window = parent.model.short_window or -(-parent.model.context // 4 // 128) * 128
    rows, steps = training_length(parent, sft, material, context)
    train = replace(
        parent.train,
        steps=steps,
        minutes=None,
        batch_tokens=rows * context,
        seed=sft.seed,
        packing="padded",
        save_every=sft.save_every or parent.train.save_every,
        eval_every=-(-steps // EVALUATIONS) if sft.eval_every is None else sft.eval_every,
    )
    lr_fraction = LR_FRACTION if parent.kind == "base" else 1.0  # midtraining has applied it already
    lr_fraction *= math.sqrt(train.batch_tokens / parent.train.batch_tokens)
    model = replace(
        parent.model,
        context=context,
        short_window=short_window,
        dropout=0.0,
        # Over several epochs a small model learns which conversation follows which, and relies on the one before it in
        # the row, which is not there in a chat. Large ones keep attention that FlashAttention supports.
        document_mask=parent.model.document_mask
        or (parent.model.dim <= NARROW and (material.order.epochs or 1) > 1),
    )
    return replace(
        parent,
        model=model,
        optim=parent.optim.fine_tuning(lr_fraction, WARMDOWN),
        train=train,
        kind="sft",
    )


def choose_epochs(sft: SFTOptions, train: Conversations, context: int) -> int | None:
    """As given, or the more the fewer rows there are. None: as many as the given steps take."""
    if sft.steps is not None:
        return None
    rows = len(train.tokens) / context  # without padding
    return sft.epochs or min(max(math.floor(math.sqrt(REPEATED_ROWS / rows)), 1), MAX_EPOCHS)


def training_length(parent: Config, sft: SFTOptions, material: Material, context: int) -> tuple[int, int]:
    """Rows per step, and steps: as given, or as many as the epochs have."""
    rows = max((sft.batch_tokens or parent.train.batch_tokens) // context, 1)
    if sft.steps is not None:
        return rows, sft.steps
    total = count_rows(material.train, material.order, context)
    while sft.batch_tokens is None and rows > 1 and total / rows < MIN_STEPS:
        rows //= 2
    return rows, math.ceil(total / rows)


def make_exam(sft: SFTOptions, tokenizer: Tokenizer, data: str) -> loop.Exam | None:
    """ChatCORE during training, on a few questions of each task that is here and that this machine can grade."""
    if not sft.chat_every:
        return None
    tasks = open_tasks(ChatEvalOptions(folder=sft.folder), data)
    return loop.Exam(sft.chat_every, chat_evaluator(tokenizer, tasks, sft.chat_problems))


def log_mixture(
    spec: MixtureSpec,
    mixture: Mixture,
    train: Conversations,
    val: Conversations,
    config: Config,
    epochs: float,
) -> None:
    """What is trained on, and how often, before it begins."""
    repeats = np.array([entry.repeat for entry in spec.train])
    entry_of = np.repeat(np.arange(len(repeats)), repeats)[mixture.part_of]
    counts = np.bincount(entry_of, minlength=len(repeats)) // repeats
    trained = np.bincount(entry_of, train.trained_per_conversation, len(repeats)) / repeats
    rows = [
        [entry.label, f"{count:,}", f"{epochs * entry.repeat:.3g}", f"{tokens:,.0f}"]
        for entry, count, tokens in zip(spec.train, counts, trained, strict=True)
    ]
    say(table(["task", "conversations", "epochs", "assistant tokens"], rows))
    length, context = config.train, config.model.context
    if train.cut or train.left_out:
        say(f"{train.cut:,} conversations truncated and {train.left_out:,} left out to fit {context} tokens")
    say(
        f"{length.steps:,} steps of {length.batch_tokens:,} tokens; {len(val):,} other conversations for validation "
        "(--epochs, --steps and --batch-tokens set another length)"
    )


def finish(t: loop.Training, parent: str, train: Conversations) -> dict[str, Any]:
    """Writes the summary and the plot of a finished run."""
    from nanorun.report.plots import plot_loss

    records = list(read_metrics(t.run.folder))
    exams = [r for r in records if r.get("kind") == "chat"][-1:]
    summary = {
        **base.summarize(t),
        **{key: value for r in exams for key, value in r.items() if key.startswith("chat")},
        "parent": parent,
        "conversations": len(train),
        "conversations_cut": train.cut,
        "conversations_left_out": train.left_out,
    }
    t.run.write_summary(summary)
    plot_loss(t.run.name, records, t.run.folder / "loss.png")
    return summary
