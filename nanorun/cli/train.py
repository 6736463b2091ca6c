"""`nanorun train`: base, sft, rl."""

import functools
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from nanorun import console, tables
from nanorun.cli import options as opt
from nanorun.errors import UserError

app = typer.Typer(
    help="Pretraining, supervised fine-tuning and reinforcement learning.", no_args_is_help=True
)


@app.command("base", epilog=opt.example("nanorun train base --depth 12 --data mine-mine-32768"))
def train_base(
    depth: opt.OptionalDepth = None,
    name: Annotated[
        str | None, typer.Option(help="Run name (default: base-dDEPTH, or base-DATA without --depth).")
    ] = None,
    minutes: opt.Minutes = None,
    ratio: opt.Ratio = None,
    tokens: opt.Tokens = None,
    flops: opt.Flops = None,
    steps: opt.Steps = None,
    batch_tokens: opt.BatchTokens = None,
    device_batch: opt.DeviceBatch = None,
    context: opt.OptionalContext = None,
    data: opt.Data = None,
    tokenizer: opt.TokenizerName = None,
    seed: Annotated[
        int | None, typer.Option(min=0, help="Seed of weights and data order (default: 0).")
    ] = None,
    save_every: Annotated[
        int | None, typer.Option(min=1, help="Steps between checkpoints (default: 500).")
    ] = None,
    eval_every: Annotated[
        int | None, typer.Option(min=0, help="Steps between evaluations; 0: at the end only (default: 250).")
    ] = None,
    recompute: Annotated[
        bool, typer.Option("--recompute", help="Activation checkpointing, a third slower.")
    ] = False,
    fp8: opt.Fp8Name = None,
    deterministic: opt.Deterministic = False,
    attention: opt.BackendName = "auto",
    dtype: opt.DtypeName = "auto",
    compiled: opt.Compile = True,
    graphs: opt.Graphs = True,
    config_file: Annotated[
        Path | None, typer.Option("--config", help="Read the configuration from a run's config.json.")
    ] = None,
    track: opt.Track = None,
    fresh: opt.Fresh = False,
    yes: Annotated[bool, typer.Option("--yes", help="Also if the estimate is over a day.")] = False,
    as_json: opt.Json = False,
) -> None:
    """Pretrain a base model. An existing run resumes from its last checkpoint."""
    from nanorun.config import Horizon
    from nanorun.hardware import detect
    from nanorun.plan.dial import default_horizon
    from nanorun.plan.estimate import PlanTooLong
    from nanorun.train import base

    recipe = opt.chosen_recipe(fp8, recompute)
    if config_file is not None:
        if not all(value is None for value in (depth, context, minutes, ratio, tokens, flops)):
            raise UserError(
                "--depth, --context, --minutes, --ratio, --tokens and --flops derive a new configuration: give them or "
                "--config."
            )
        changes = {"steps": steps, "batch_tokens": batch_tokens}
        config = base.override(base.read_config(config_file), changes, data=data, tokenizer=tokenizer)
    else:
        horizon = Horizon(ratio, tokens, flops, steps, minutes)
        horizon = default_horizon(depth, horizon, detect().device)
        name = name or base.default_name(depth, horizon, data)
        config = base.configure(
            depth,
            name=None if fresh else name,
            horizon=horizon,
            context=context,
            batch_tokens=batch_tokens,
            data=data,
            tokenizer=tokenizer,
        )
    config = base.override(config, {"seed": seed, "save_every": save_every, "eval_every": eval_every})
    options = base.BaseOptions(
        name, fresh, device_batch, attention, dtype, compiled, graphs, recipe, deterministic, track
    )
    try:
        summary = base.train_base(config, replace(options, max_days=None if yes else 1.0))
    except PlanTooLong as error:
        if not (sys.stdin.isatty() and sys.stderr.isatty()):
            raise
        console.say(str(error))
        if not typer.confirm("Train anyway?", err=True):
            raise typer.Exit(2) from None
        summary = base.train_base(config, options)
    opt.show(summary, as_json, tables.run_summary(summary))


@app.command("sft", epilog=opt.example("nanorun train sft --from base-d12 --task mine.jsonl"))
def train_sft(
    parent: Annotated[
        str | None, typer.Option("--from", help="Run to start from (default: the newest base model).")
    ] = None,
    mixture: Annotated[
        str | None,
        typer.Option(
            help="Mixture: sft, mid, sample, sample-mid, or a file: a .json mixture or your own conversations "
            "(default: what --task names, else sft)."
        ),
    ] = None,
    task: Annotated[
        list[str] | None,
        typer.Option(
            help="Your own conversations (.jsonl, .json, .csv, .parquet; docs/tasks.md) or task (FILE.py or "
            "FILE.py:Class, whose code runs). Alone, or added to --mixture. Repeatable."
        ),
    ] = None,
    task_files: opt.TaskFiles = None,
    name: Annotated[str | None, typer.Option(help="Run name (default: derived from the parent's).")] = None,
    epochs: Annotated[
        int | None,
        typer.Option(min=1, help="Epochs over the mixture (default: 1, or up to 10 if it is small)."),
    ] = None,
    steps: opt.Steps = None,
    batch_tokens: Annotated[
        int | None,
        typer.Option(min=1, help="Tokens per step (default: the parent's, or less to make enough steps)."),
    ] = None,
    device_batch: opt.DeviceBatch = None,
    context: Annotated[
        int | None, typer.Option(min=2, help="Context length (default: the parent's).")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the data order.")] = 0,
    warm: Annotated[
        bool, typer.Option("--warm/--cold", help="Start with the parent's optimizer state, or without.")
    ] = True,
    save_every: Annotated[
        int | None, typer.Option(min=1, help="Steps between checkpoints (default: the parent's).")
    ] = None,
    eval_every: Annotated[
        int | None, typer.Option(min=0, help="Steps between evaluations (default: four in total).")
    ] = None,
    chat_every: Annotated[
        int, typer.Option(min=0, help="Steps between ChatCORE evaluations, and one at the end; 0: none.")
    ] = 0,
    chat_problems: Annotated[int, typer.Option(min=1, help="Questions per task in each of them.")] = 25,
    deterministic: opt.Deterministic = False,
    attention: opt.BackendName = "auto",
    dtype: opt.DtypeName = "auto",
    compiled: opt.Compile = True,
    graphs: opt.Graphs = True,
    track: opt.Track = None,
    fresh: opt.Fresh = False,
    as_json: opt.Json = False,
) -> None:
    """Fine-tune a base model on conversations. An existing run resumes from its last checkpoint."""
    from nanorun.train import base, sft

    options = base.BaseOptions(
        name, fresh, device_batch, attention, dtype, compiled, graphs, None, deterministic, track
    )
    sft_options = sft.SFTOptions(
        parent=parent,
        mixture=mixture,
        tasks=task or (),
        folder=task_files,
        warm=warm,
        context=context,
        batch_tokens=batch_tokens,
        steps=steps,
        epochs=epochs,
        seed=seed,
        save_every=save_every,
        eval_every=eval_every,
        chat_every=chat_every,
        chat_problems=chat_problems,
    )
    summary = sft.train_sft(sft_options, options)
    opt.show(summary, as_json, tables.run_summary(summary))


@app.command("rl", epilog=opt.example("nanorun train rl --task gsm8k --steps 200"))
def train_rl(
    task: Annotated[
        list[str] | None, typer.Option(help="Task to train on: a name, or file.py:Class. Repeatable.")
    ] = None,
    parent: Annotated[
        str | None, typer.Option("--from", help="Run to start from (default: the newest sft, or base).")
    ] = None,
    name: Annotated[str | None, typer.Option(help="Run name (default: rl-dDEPTH).")] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Number of steps (default: one epoch).")] = None,
    problems: Annotated[int, typer.Option(min=1, help="Problems per step.")] = 16,
    samples: Annotated[int, typer.Option(min=1, max=1024, help="Rollouts per problem.")] = 16,
    max_tokens: Annotated[int, typer.Option(min=1, help="Maximum tokens of a reply.")] = 256,
    temperature: Annotated[float, typer.Option(help="Sampling temperature.")] = 1.0,
    clip: Annotated[float | None, typer.Option(help="PPO clip of the importance ratio, such as 0.2.")] = None,
    kl: Annotated[float, typer.Option(help="Weight of the KL penalty to the parent, such as 0.01.")] = 0.0,
    inner_updates: Annotated[int, typer.Option(min=1, help="Updates with the rollouts of one step.")] = 1,
    normalize_std: Annotated[
        bool, typer.Option("--normalize-std", help="Divide advantages by their standard deviation.")
    ] = False,
    lr_fraction: Annotated[
        float,
        typer.Option("--lr-fraction", "--rate-share", help="Fraction of the parent's learning rates."),
    ] = 0.05,
    eval_problems: Annotated[int, typer.Option(min=1, help="Held-out problems to evaluate on.")] = 64,
    device_batch: Annotated[int | None, typer.Option(min=1, help="Rollouts per micro-batch.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of problem order and sampling.")] = 0,
    save_every: Annotated[int, typer.Option(min=1, help="Steps between checkpoints.")] = 25,
    eval_every: Annotated[
        int, typer.Option(min=0, help="Steps between evaluations; 0: at the end only.")
    ] = 25,
    deterministic: opt.Deterministic = False,
    dtype: opt.DtypeName = "auto",
    compiled: opt.Compile = True,
    files: opt.TaskFiles = None,
    fresh: opt.Fresh = False,
    as_json: opt.Json = False,
) -> None:
    """Reinforcement learning on a task's rewards. An existing run resumes from its last checkpoint."""
    from nanorun.evals.chat import open_task
    from nanorun.train import rl

    opener = functools.partial(open_task, folder=files)
    options = rl.RLOptions(fresh, device_batch, dtype, compiled, deterministic)
    run, config, rl_config = rl.configure(
        task or [],
        parent=parent,
        name=name,
        fresh=fresh,
        steps=steps,
        open_task=opener,
        train={"seed": seed, "save_every": save_every, "eval_every": eval_every},
        lr_fraction=lr_fraction,
        problems=problems,
        samples=samples,
        max_tokens=max_tokens,
        temperature=temperature,
        clip=clip,
        kl=kl,
        inner_updates=inner_updates,
        normalize_std=normalize_std,
        eval_problems=eval_problems,
    )
    summary = rl.train_rl(run, config, rl_config, options, opener)
    opt.show(summary, as_json, tables.rl_summary(summary))
