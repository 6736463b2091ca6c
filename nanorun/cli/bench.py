"""`nanorun bench`: train, infer."""

from typing import Annotated

import typer

from nanorun.cli.options import (
    BackendName,
    BatchTokens,
    Compile,
    Context,
    Data,
    Depth,
    DeviceBatch,
    Draft,
    DtypeName,
    Fp8Name,
    Graphs,
    Int8,
    Json,
    Save,
    Speculate,
    TokenizerName,
    check_fp8,
    check_speculation,
    example,
    run_options,
    show,
)
from nanorun.errors import UserError

app = typer.Typer(help="Speed on this machine: training, generation.", no_args_is_help=True)


@app.command("train", epilog=example("nanorun bench train --depth 12 --json"))
def bench_train(
    depth: Depth = 12,
    steps: Annotated[int, typer.Option(min=1, help="Steps to time.")] = 20,
    batch_tokens: BatchTokens = None,
    device_batch: DeviceBatch = None,
    context: Context = 2048,
    data: Data = None,
    tokenizer: TokenizerName = None,
    attention: BackendName = "auto",
    dtype: DtypeName = "auto",
    fp8: Fp8Name = None,
    compiled: Compile = True,
    graphs: Graphs = True,
    fresh_caches: Annotated[
        bool,
        typer.Option(
            "--cold/--quick", help="With cold and warm starts, or with the compile caches as they are."
        ),
    ] = True,
    save: Save = None,
    as_json: Json = False,
) -> None:
    """Tokens/s, MFU, memory and the time to the first step, on real packed data."""
    from nanorun import tables
    from nanorun.bench.train import bench_train
    from nanorun.config import Horizon
    from nanorun.provenance import check_writable, write_result
    from nanorun.train import base

    check_writable(save)
    options = run_options(None, False, device_batch, attention, dtype, compiled, graphs)
    config = base.configure(
        depth,
        horizon=Horizon(),
        context=context,
        batch_tokens=batch_tokens,
        data=data,
        tokenizer=tokenizer,
        model_changes=check_fp8(fp8),
    )
    result = bench_train(config, options, steps, fresh_caches)
    write_result(result, save)
    show(result, as_json, tables.bench_train(result))


@app.command("infer", epilog=example("nanorun bench infer --depth 12 --batch 1,8,32,128 --json"))
def bench_infer(
    depth: Annotated[int, typer.Option(min=1, max=200, help="A model of this depth, random weights.")] = 12,
    model: Annotated[str | None, typer.Option(help="A trained run instead, and its own text.")] = None,
    batch: Annotated[str, typer.Option(help="Texts at a time: one or more numbers.")] = "1,8,32,128",
    prompt: Annotated[int, typer.Option(min=1, help="Tokens of each prompt.")] = 1024,
    new: Annotated[int, typer.Option(min=2, help="Tokens to generate.")] = 256,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token.")] = 0.0,
    int8: Int8 = False,
    speculate: Speculate = None,
    draft: Draft = None,
    guesses: Annotated[int, typer.Option(min=1, max=16, help="Tokens guessed at a time.")] = 4,
    save: Save = None,
    as_json: Json = False,
) -> None:
    """Time to the first token, ms a step, tokens/s, memory and the share of its bandwidth that is used."""
    from nanorun import tables
    from nanorun.bench.infer import Setting, bench_infer
    from nanorun.provenance import check_writable, write_result

    check_writable(save)
    speculation = check_speculation(speculate, draft)
    if draft and not model:
        raise UserError("--draft guesses for a trained run: name it with --model.")
    setting = Setting(_numbers(batch), prompt, new, temperature, int8, speculation, guesses)
    result = bench_infer(depth, model, setting, draft)
    write_result(result, save)
    show(result, as_json, tables.bench_infer(result))


def _numbers(text: str) -> list[int]:
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < 1 or max(numbers) > 4096:
        raise UserError(f"--batch is '{text}': give numbers from 1 to 4096, such as 1,8,32.")
    return numbers
