"""The first verbs: the whole pipeline, what the machine has, what a run would take."""

from typing import Annotated

import typer

from nanorun.cli.options import (
    BackendName,
    BatchTokens,
    Context,
    Data,
    Depth,
    DeviceBatch,
    Flops,
    Fp8Name,
    Json,
    Ratio,
    Steps,
    TokenizerName,
    Tokens,
    check_fp8,
    example,
    run_options,
    show,
)

app = typer.Typer()


@app.command(epilog=example("nanorun speedrun"))
def speedrun(as_json: Json = False) -> None:
    """The whole pipeline, from nothing. A finished stage is not done again; interrupted, it goes on."""
    from nanorun import speedrun

    result = speedrun.run()
    show(result, as_json, "" if as_json else speedrun.show(result))


@app.command(epilog=example("nanorun doctor --json"))
def doctor(as_json: Json = False) -> None:
    """What this machine has and what is missing. Exit code 1 when something needed is missing."""
    from nanorun import doctor

    findings = doctor.examine()
    ready = all(finding.verdict != "missing" for finding in findings)
    show({"ready": ready, "findings": [vars(f) for f in findings]}, as_json, doctor.findings_table(findings))
    raise typer.Exit(0 if ready else 1)


@app.command(epilog=example("nanorun plan --depth 24 --gpu h100 --gpus 8"))
def plan(
    depth: Depth = 12,
    vocab: Annotated[
        int | None,
        typer.Option(min=2, help="Tokens in the vocabulary (default: 32768)."),
    ] = None,
    context: Context = 2048,
    ratio: Ratio = None,
    tokens: Tokens = None,
    flops: Flops = None,
    steps: Steps = None,
    batch_tokens: BatchTokens = None,
    device_batch: DeviceBatch = None,
    gpu: Annotated[
        str | None, typer.Option(help="A GPU's name, such as h100 (default: this machine).")
    ] = None,
    gpus: Annotated[int, typer.Option(min=1, help="How many of them.")] = 1,
    as_json: Json = False,
) -> None:
    """Parameters, tokens, memory, minutes and cost of a run, before anything starts."""
    from nanorun.config import Horizon
    from nanorun.plan.display import plan_record, plan_table
    from nanorun.plan.estimate import plan_here

    horizon = Horizon(ratio, tokens, flops, steps)
    made = plan_here(depth, vocab, context, horizon, batch_tokens, gpu, gpus, device_batch)
    show(plan_record(made), as_json, plan_table(made))


@app.command(epilog=example("nanorun warmup --depth 12 --fp8 all"))
def warmup(
    depth: Depth = 12,
    batch_tokens: BatchTokens = None,
    device_batch: DeviceBatch = None,
    context: Context = 2048,
    data: Data = None,
    tokenizer: TokenizerName = None,
    attention: BackendName = "auto",
    fp8: Fp8Name = None,
    as_json: Json = False,
) -> None:
    """Compiles ahead: the next run of this shape on this machine begins at once."""
    from nanorun import tables
    from nanorun.config import Horizon
    from nanorun.train import base, warmup

    options = run_options(None, False, device_batch, attention, "auto", True)
    config = base.configure(
        depth,
        horizon=Horizon(),
        context=context,
        batch_tokens=batch_tokens,
        data=data,
        tokenizer=tokenizer,
        model_changes=check_fp8(fp8),
    )
    result = warmup.warm_up(config, options)
    show(result, as_json, tables.warmup_table(result))
