"""The first commands: speedrun, doctor, plan, warmup."""

from typing import Annotated

import typer

from nanorun import tables
from nanorun.cli import options as opt
from nanorun.config import Horizon

app = typer.Typer()


@app.command(epilog=opt.example("nanorun speedrun"))
def speedrun(as_json: opt.Json = False) -> None:
    """Run the whole pipeline from nothing. Finished stages are skipped; an interrupted one resumes."""
    from nanorun import speedrun

    result = speedrun.run()
    opt.show(result, as_json, "" if as_json else speedrun.show(result))


@app.command(epilog=opt.example("nanorun doctor --json"))
def doctor(as_json: opt.Json = False) -> None:
    """Report what this machine has and what is missing. Exit code 1 when something needed is missing."""
    from nanorun import doctor

    findings = doctor.examine()
    ready = all(finding.verdict != "missing" for finding in findings)
    result = {"ready": ready, "findings": [vars(finding) for finding in findings]}
    opt.show(result, as_json, doctor.findings_table(findings))
    raise typer.Exit(0 if ready else 1)


@app.command(epilog=opt.example("nanorun plan --depth 24 --gpu h100 --gpus 8"))
def plan(
    depth: opt.OptionalDepth = None,
    vocab: Annotated[
        int | None,
        typer.Option(min=2, help="Vocabulary size (default: that of the tokenizer here, or 32768)."),
    ] = None,
    context: opt.OptionalContext = None,
    minutes: opt.Minutes = None,
    ratio: opt.Ratio = None,
    tokens: opt.Tokens = None,
    flops: opt.Flops = None,
    steps: opt.Steps = None,
    batch_tokens: opt.BatchTokens = None,
    device_batch: opt.DeviceBatch = None,
    data: opt.Data = None,
    tokenizer: opt.TokenizerName = None,
    gpu: Annotated[
        str | None, typer.Option(help="A GPU's name, such as h100 (default: this machine's).")
    ] = None,
    gpus: Annotated[int, typer.Option(min=1, help="Number of GPUs.")] = 1,
    as_json: opt.Json = False,
) -> None:
    """Estimate parameters, tokens, memory, time and cost of a run before it starts."""
    from nanorun.plan.dial import plan_here
    from nanorun.plan.display import plan_record, plan_table

    plan = plan_here(
        depth,
        vocab,
        Horizon(ratio, tokens, flops, steps, minutes),
        data=data,
        tokenizer=tokenizer,
        context=context,
        batch_tokens=batch_tokens,
        gpu=gpu,
        gpus=gpus,
        device_batch=device_batch,
    )
    opt.show(plan_record(plan), as_json, plan_table(plan))


@app.command(epilog=opt.example("nanorun warmup --depth 12 --fp8 all"))
def warmup(
    depth: opt.Depth = 12,
    batch_tokens: opt.BatchTokens = None,
    device_batch: opt.DeviceBatch = None,
    context: opt.Context = 2048,
    data: opt.Data = None,
    tokenizer: opt.TokenizerName = None,
    attention: opt.BackendName = "auto",
    fp8: opt.Fp8Name = None,
    as_json: opt.Json = False,
) -> None:
    """Compile ahead of time: fill the caches, so that the next run of this shape starts at once."""
    from nanorun.train import base, warmup

    options = base.BaseOptions(device_batch=device_batch, backend=attention, recipe=opt.chosen_recipe(fp8))
    config = base.configure(depth, context=context, batch_tokens=batch_tokens, data=data, tokenizer=tokenizer)
    result = warmup.warm_up(config, options)
    opt.show(result, as_json, tables.warmup_table(result))
