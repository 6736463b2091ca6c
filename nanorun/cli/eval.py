"""`nanorun eval`: bpb, chat, core."""

from pathlib import Path
from typing import Annotated

import typer

from nanorun import tables
from nanorun.cli.options import ChatModel, Json, Model, Save, TaskFiles, example, show
from nanorun.console import say
from nanorun.errors import UserError
from nanorun.provenance import check_writable

app = typer.Typer(help="Evaluate a model: bits per byte, CORE, ChatCORE.", no_args_is_help=True)


@app.command("bpb", epilog=example("nanorun eval bpb --model base-d12 --json"))
def eval_bpb(
    model: Model = None,
    data: Annotated[
        str | None, typer.Option(help="The dataset (default: the one the model was trained on).")
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option(min=1, help="Maximum number of tokens (default: all).")
    ] = None,
    as_json: Json = False,
) -> None:
    """Bits per byte on a validation split: lower is better, and comparable between tokenizers."""
    from nanorun.evals.bpb import evaluate_run

    result = evaluate_run(model, data, max_tokens)
    text = f"{result['bpb']:.4f} bits per byte, loss {result['loss']:.4f}, on {result['tokens']:,} tokens"
    show(result, as_json, f"{text} of '{result['data']}' ({result['model']}, step {result['step']})")


@app.command("chat", epilog=example("nanorun eval chat --tasks gsm8k,arc-easy --max-per-task 200"))
def eval_chat(
    model: ChatModel = None,
    tasks: Annotated[
        str | None,
        typer.Option(help="Comma-separated names or file.py:Class (default: the tasks of ChatCORE present)."),
    ] = None,
    max_per_task: Annotated[
        int | None, typer.Option(min=1, help="Maximum questions per task (default: all).")
    ] = None,
    samples: Annotated[int, typer.Option(min=1, max=1024, help="Replies per question, for pass@k.")] = 1,
    temperature: Annotated[
        float | None, typer.Option(min=0, max=100, help="Default: 0 (greedy); 1 with --samples.")
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Maximum tokens per reply.")] = 512,
    batch: Annotated[int, typer.Option(min=1, max=4096, help="Batch size in questions.")] = 64,
    split: Annotated[str, typer.Option(help="The split of each task.")] = "test",
    seed: Annotated[int, typer.Option(min=0, help="Seed of the samples.")] = 0,
    keep: Annotated[
        Path | None,
        typer.Option(help="Write the replies to this file; tasks that need a sandbox can be graded later."),
    ] = None,
    judge: Annotated[
        Path | None, typer.Option(help="Only grade the replies in a file that --keep wrote.")
    ] = None,
    files: TaskFiles = None,
    as_json: Json = False,
) -> None:
    """ChatCORE: the accuracy of a chat model on each task, with 95% confidence intervals."""
    from nanorun.evals import chat
    from nanorun.evals.replies import ReplySettings

    check_writable(keep)
    named = _split_names(tasks)
    if judge is not None:
        if model or keep:
            raise UserError("--judge reads model and replies from the file: leave the others out.")
        result = chat.grade_file(judge, named, files)
    else:
        if temperature is None:
            temperature = 1.0 if samples > 1 else 0.0
        if samples > 1 and temperature == 0:
            raise UserError(
                "--samples with --temperature 0 would be the same every time: raise the temperature."
            )
        settings = ReplySettings(max_tokens, temperature, samples, seed, batch)
        options = chat.ChatEvalOptions(model, named, split, max_per_task, settings, keep, files)
        result = chat.evaluate_chat(options)
    show(result, as_json, tables.chat_table(result))


@app.command("core", epilog=example("nanorun eval core --model base-d12 --max-per-task 500 --json"))
def eval_core(
    model: Model = None,
    hf: Annotated[
        Path | None,
        typer.Option(help="Instead of a run: the folder of a Hugging Face causal model with its tokenizer."),
    ] = None,
    bundle: Annotated[
        Path | None, typer.Option(help="The task bundle: a folder, .zip or .tar.xz (default: data/core).")
    ] = None,
    tasks: Annotated[
        str | None, typer.Option(help="Only these tasks, such as hellaswag,lambada,arc,mmlu.")
    ] = None,
    max_per_task: Annotated[
        int | None, typer.Option(min=1, help="Maximum examples per task (default: all).")
    ] = None,
    batch_tokens: Annotated[
        int | None,
        typer.Option(min=1, help="Maximum tokens per batch (default: 65536 on a GPU, 2048 on a CPU)."),
    ] = None,
    mmlu: Annotated[
        Path | None, typer.Option(help="MMLU's questions, if the bundle has none: mmlu_test.jsonl.")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Plot the result next to GPT-2's to this .png or .svg.")
    ] = None,
    save: Save = None,
    as_json: Json = False,
) -> None:
    """The CORE score of a base model on 22 tasks: 0 for guessing; GPT-2 XL has 0.2565."""
    from nanorun.evals.core import CoreOptions, evaluate_core
    from nanorun.report.core_plot import plot_core
    from nanorun.report.plots import check_suffix

    if model is not None and hf is not None:
        raise UserError("--model names a run and --hf a Hugging Face folder: give one of them.")
    if plot is not None:
        check_suffix(plot)
    names = _split_names(tasks)
    if tasks is not None and not names:
        raise UserError("--tasks names no task: give some, such as hellaswag,arc, or omit it for all.")
    options = CoreOptions(bundle, names, max_per_task, batch_tokens, mmlu)
    result = evaluate_core(model, hf, options)
    if result is None:
        return  # rank 0 prints the result
    show(result, as_json, tables.core_table(result), save)
    if plot is not None:
        say(f"plotted: {plot_core(result, plot)}")


def _split_names(names: str | None) -> list[str]:
    return [name.strip() for name in names.split(",") if name.strip()] if names else []
