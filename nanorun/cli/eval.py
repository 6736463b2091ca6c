"""`nanorun eval`: bpb, chat, core."""

from pathlib import Path
from typing import Annotated

import typer

from nanorun.cli.options import Json, Save, TaskFiles, example, show
from nanorun.errors import UserError

app = typer.Typer(help="How good a model is: bits per byte, CORE, ChatCORE.", no_args_is_help=True)


@app.command("bpb", epilog=example("nanorun eval bpb --model base-d12 --json"))
def eval_bpb(
    model: Annotated[str | None, typer.Option(help="A run's name (default: the newest).")] = None,
    data: Annotated[
        str | None, typer.Option(help="Whose validation text (default: what it was trained on).")
    ] = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Tokens at most (default: all).")] = None,
    as_json: Json = False,
) -> None:
    """Bits per byte of validation text: lower is better, and comparable between tokenizers."""
    from nanorun.evals.bpb import evaluate_run

    result = evaluate_run(model, data, max_tokens)
    text = f"{result['bpb']:.4f} bits per byte, loss {result['loss']:.4f}, on {result['tokens']:,} tokens"
    show(result, as_json, f"{text} of '{result['data']}' ({result['model']}, step {result['step']})")


@app.command("chat", epilog=example("nanorun eval chat --tasks gsm8k,arc-easy --max-per-task 200"))
def eval_chat(
    model: Annotated[
        str | None, typer.Option(help="A run's name (default: the newest chat model, or the newest).")
    ] = None,
    tasks: Annotated[
        str | None,
        typer.Option(help="Names or file.py:Class, with commas (default: those of ChatCORE that are here)."),
    ] = None,
    max_per_task: Annotated[int | None, typer.Option(min=1, help="Questions at most (default: all).")] = None,
    samples: Annotated[int, typer.Option(min=1, max=1024, help="Replies to each question, for pass@k.")] = 1,
    temperature: Annotated[
        float | None, typer.Option(min=0, max=100, help="Default: 0, the likeliest; 1 with --samples.")
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens of a reply at most.")] = 512,
    batch: Annotated[int, typer.Option(min=1, max=4096, help="Questions at a time.")] = 64,
    split: Annotated[str, typer.Option(help="Which questions.")] = "test",
    seed: Annotated[int, typer.Option(min=0, help="Of the samples.")] = 0,
    keep: Annotated[
        Path | None, typer.Option(help="Keep the answers here; what needs a sandbox may be judged later.")
    ] = None,
    judge: Annotated[Path | None, typer.Option(help="Only judge the answers that --keep wrote.")] = None,
    files: TaskFiles = None,
    as_json: Json = False,
) -> None:
    """ChatCORE: how often a chat model answers rightly, task by task, with 95% intervals."""
    from nanorun import tables
    from nanorun.evals import chat
    from nanorun.evals.replies import ReplySettings

    named = [name.strip() for name in tasks.split(",") if name.strip()] if tasks else []
    if judge is not None:
        if model or keep:
            raise UserError("--judge takes the model and its answers from the file: leave the others out.")
        result = chat.grade_file(judge, named, files)
    else:
        if temperature is None:
            temperature = 1.0 if samples > 1 else 0.0
        if samples > 1 and temperature == 0:
            raise UserError("--samples with --temperature 0 would say the same every time: raise one.")
        settings = ReplySettings(max_tokens, temperature, samples, seed, batch)
        options = chat.ChatEvalOptions(model, named, split, max_per_task, settings, keep, files)
        result = chat.evaluate_chat(options)
    show(result, as_json, tables.chat_table(result))


@app.command("core", epilog=example("nanorun eval core --model base-d12 --max-per-task 500 --json"))
def eval_core(
    model: Annotated[str | None, typer.Option(help="A run's name (default: the newest).")] = None,
    hf: Annotated[
        Path | None, typer.Option(help="A Hugging Face causal model instead: its folder, with its tokenizer.")
    ] = None,
    bundle: Annotated[
        Path | None, typer.Option(help="The tasks: a folder, .zip or .tar.xz (default: data/core).")
    ] = None,
    tasks: Annotated[
        str | None, typer.Option(help="Some tasks only, such as hellaswag,lambada,arc,mmlu.")
    ] = None,
    max_per_task: Annotated[
        int | None, typer.Option(min=1, help="Examples of each task at most (default: all).")
    ] = None,
    batch_tokens: Annotated[
        int | None, typer.Option(min=1, help="Tokens in a batch (default: 65536 on a GPU, 2048 on a CPU).")
    ] = None,
    mmlu: Annotated[
        Path | None, typer.Option(help="MMLU's questions, for a bundle without them: mmlu_test.jsonl.")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Draw the result beside GPT-2's into this .png or .svg.")
    ] = None,
    save: Save = None,
    as_json: Json = False,
) -> None:
    """The CORE score: 22 tasks for base models, 0 for guessing, GPT-2 XL has 0.2565."""
    from nanorun import tables
    from nanorun.console import say
    from nanorun.evals.core import CoreOptions, evaluate_hugging_face, evaluate_run_core
    from nanorun.provenance import write_result
    from nanorun.report.core_plot import plot_core
    from nanorun.report.plots import check_suffix

    if model is not None and hf is not None:
        raise UserError("--model names a run of yours and --hf a folder of another's: give one of them.")
    if plot is not None:
        check_suffix(plot)
    names = [name.strip() for name in tasks.split(",") if name.strip()] if tasks is not None else []
    if tasks is not None and not names:
        raise UserError("--tasks names no task: give some, such as hellaswag,arc, or leave it out for all.")
    options = CoreOptions(bundle, names, max_per_task, batch_tokens, mmlu)
    result = evaluate_hugging_face(hf, options) if hf is not None else evaluate_run_core(model, options)
    if result is None:
        return  # another rank says it
    write_result(result, save)
    if plot is not None:
        say(f"drawn: {plot_core(result, plot)}")
    show(result, as_json, tables.core_table(result))
