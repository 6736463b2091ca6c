"""`nanorun bench`: train, infer."""

from typing import Annotated

import typer

from nanorun import tables
from nanorun.cli import options as opt
from nanorun.config import DEFAULT_RATIO, Horizon
from nanorun.errors import UserError
from nanorun.provenance import check_writable

app = typer.Typer(help="Throughput on this machine: training, generation.", no_args_is_help=True)


@app.command("train", epilog=opt.example("nanorun bench train --depth 12 --json"))
def bench_train(
    depth: opt.Depth = 12,
    steps: Annotated[int, typer.Option(min=1, help="Steps to time.")] = 20,
    batch_tokens: opt.BatchTokens = None,
    device_batch: opt.DeviceBatch = None,
    context: opt.Context = 2048,
    data: opt.Data = None,
    tokenizer: opt.TokenizerName = None,
    attention: opt.BackendName = "auto",
    dtype: opt.DtypeName = "auto",
    fp8: opt.Fp8Name = None,
    compiled: opt.Compile = True,
    graphs: opt.Graphs = True,
    fresh_caches: Annotated[
        bool,
        typer.Option(
            "--cold/--quick", help="Measure cold and warm starts, or use the existing compile caches."
        ),
    ] = True,
    save: opt.Save = None,
    as_json: opt.Json = False,
) -> None:
    """Measure tokens/s, MFU, peak memory and the time to the first step, on real packed data."""
    from nanorun.bench.train import bench_train
    from nanorun.train import base

    check_writable(save)
    options = base.BaseOptions(
        device_batch=device_batch,
        backend=attention,
        dtype=dtype,
        compile=compiled,
        graphs=graphs,
        recipe=opt.chosen_recipe(fp8),
    )
    config = base.configure(
        depth,
        horizon=Horizon(ratio=DEFAULT_RATIO),  # the batch size of a full run, however little text there is
        context=context,
        batch_tokens=batch_tokens,
        data=data,
        tokenizer=tokenizer,
    )
    result = bench_train(config, options, steps, fresh_caches)
    opt.show(result, as_json, tables.bench_train(result), save)


@app.command("infer", epilog=opt.example("nanorun bench infer --depth 12 --batch 1,8,32,128 --json"))
def bench_infer(
    depth: Annotated[int, typer.Option(min=1, max=200, help="Depth of a model with random weights.")] = 12,
    model: Annotated[
        str | None, typer.Option(help="A trained run instead, with its validation text as prompts.")
    ] = None,
    batch: Annotated[str, typer.Option(help="Batch sizes, separated by commas.")] = "1,8,32,128",
    prompt: Annotated[int, typer.Option(min=1, help="Tokens of each prompt.")] = 1024,
    new: Annotated[int, typer.Option(min=2, help="Tokens to generate.")] = 256,
    temperature: Annotated[float, typer.Option(help="0 is greedy decoding.")] = 0.0,
    int8: opt.Int8 = False,
    speculate: opt.Speculate = None,
    draft: opt.Draft = None,
    guesses: Annotated[int, typer.Option(min=1, max=16, help="Draft tokens per speculation step.")] = 4,
    save: opt.Save = None,
    as_json: opt.Json = False,
) -> None:
    """Measure time to first token, ms per step, tokens/s, peak memory and memory bandwidth utilization."""
    from nanorun.bench.infer import InferenceWorkload, bench_infer

    check_writable(save)
    speculation = opt.check_speculation(speculate, draft)
    if draft and not model:
        raise UserError("--draft drafts for a trained run: name it with --model.")
    workload = InferenceWorkload(_batch_sizes(batch), prompt, new, temperature, int8, speculation, guesses)
    result = bench_infer(depth, model, workload, draft)
    opt.show(result, as_json, tables.bench_infer(result), save)


def _batch_sizes(text: str) -> list[int]:
    try:
        sizes = [int(part) for part in text.split(",")]
    except ValueError:
        sizes = []
    if not sizes or min(sizes) < 1 or max(sizes) > 4096:
        raise UserError(f"--batch is '{text}': use numbers from 1 to 4096, such as 1,8,32.")
    return sizes
