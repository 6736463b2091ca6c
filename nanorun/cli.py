"""The command line: each verb parses its options, calls one function and prints what it returned.

Results go to stdout, everything else (progress, notes, errors) to stderr. With --json a verb prints one
JSON object as the last thing on stdout. A person's mistake gives one sentence and exit code 2.
"""

import errno
import functools
import json
import os
import signal
import sys
from io import TextIOWrapper
from pathlib import Path
from typing import Annotated, Any, NoReturn, cast, get_args

import typer

from nanorun import __version__, console
from nanorun.config import Backend, Dtype
from nanorun.errors import UserError

app = typer.Typer(
    help="Train your own language model from raw text.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
data_app = typer.Typer(help="Text to train on: get it, add your own, see what is here.", no_args_is_help=True)
tok_app = typer.Typer(help="The tokenizer: train one, compare it with others.", no_args_is_help=True)
train_app = typer.Typer(help="Training: the base model, conversation, reinforcement.", no_args_is_help=True)
bench_app = typer.Typer(help="Speed on this machine: training, generation.", no_args_is_help=True)
eval_app = typer.Typer(help="How good a model is: bits per byte, CORE, ChatCORE.", no_args_is_help=True)
app.add_typer(train_app, name="train")
app.add_typer(eval_app, name="eval")
app.add_typer(bench_app, name="bench")
app.add_typer(data_app, name="data")
app.add_typer(tok_app, name="tok")

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")]
Replace = Annotated[bool, typer.Option("--replace", help="Replace one of the same name.")]


def _example(text: str) -> str:
    return f"\b\nExample:\n  {text}"  # \b keeps the lines as they are


def _show(result: dict[str, Any], as_json: bool, text: str) -> None:
    print(json.dumps(result, ensure_ascii=False) if as_json else text, flush=True)


@app.callback(invoke_without_command=True)
def _root(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if version:
        print(f"nanorun {__version__}")
        raise typer.Exit


@app.command(epilog=_example("nanorun speedrun"))
def speedrun(as_json: Json = False) -> None:
    """The whole pipeline, from nothing. A finished stage is not done again; interrupted, it goes on."""
    from nanorun.speedrun import run, show

    result = run()
    _show(result, as_json, "" if as_json else show(result))


@app.command(epilog=_example("nanorun doctor --json"))
def doctor(as_json: Json = False) -> None:
    """What this machine has and what is missing. Exit code 1 when something needed is missing."""
    from nanorun import doctor, tables

    findings = doctor.examine()
    ready = all(finding.verdict != "missing" for finding in findings)
    _show({"ready": ready, "findings": [vars(f) for f in findings]}, as_json, tables.findings_table(findings))
    raise typer.Exit(0 if ready else 1)


@data_app.command("get", epilog=_example("nanorun data get fineweb-edu --shards 8"))
def data_get(
    names: Annotated[
        list[str],
        typer.Argument(metavar="NAME...", help="sample, climbmix, fineweb-edu, fineweb10B or core."),
    ],
    shards: Annotated[
        int | None, typer.Option(min=1, help="How many training shards (default: 8, about 1 GB).")
    ] = None,
    size: Annotated[str, typer.Option(help="How much of the sample world to write, such as 20MB.")] = "8MB",
    seed: Annotated[int, typer.Option(min=0, help="Another seed tells other stories of the same world.")] = 0,
    workers: Annotated[int, typer.Option(min=1, max=64, help="Downloads at a time.")] = 4,
    replace: Replace = False,
    as_json: Json = False,
) -> None:
    """Gets named corpora, or CORE's tasks: the sample world is written here, the others are downloaded (and
    resumed)."""
    from nanorun import tables
    from nanorun.data import get

    named = [name for name in names if name != "core"]
    datasets = [get.get_dataset(name, shards, get.parse_size(size), seed, workers, replace) for name in named]
    records: dict[str, Any] = {"datasets": [tables.dataset_record(d) for d in datasets]}
    text = tables.datasets_table(datasets) if datasets else ""
    if "core" in names:
        records["core"] = str(get.get_core_bundle(replace).where)
        text = f"{text}\n\nCORE's tasks are in {records['core']}: nanorun eval core".strip()
    _show(records, as_json, text)


@data_app.command(
    "add", epilog=_example("nanorun data add ~/notes more.jsonl.xz --name mine --val held-out.txt")
)
def data_add(
    paths: Annotated[
        list[Path],
        typer.Argument(
            metavar="PATH...", help="Files or folders: parquet, jsonl, txt; plain, .gz, .xz, .zst."
        ),
    ],
    name: Annotated[
        str | None, typer.Option(help="What to call it (default: after the file or folder).")
    ] = None,
    val: Annotated[
        Path | None, typer.Option(help="The validation text (default: one document in 100).")
    ] = None,
    column: Annotated[str, typer.Option(help="The column that holds the text.")] = "text",
    split: Annotated[
        str | None, typer.Option(help="Split txt files into documents at this text (\\n is a line end).")
    ] = None,
    replace: Replace = False,
    as_json: Json = False,
) -> None:
    """Makes a dataset of your own files."""
    from nanorun import tables
    from nanorun.data.add import add_files

    separator = split.replace("\\n", "\n").replace("\\t", "\t") if split is not None else None
    dataset = add_files(paths, name=name, val=val, column=column, separator=separator, replace=replace)
    _show(tables.dataset_record(dataset), as_json, tables.datasets_table([dataset]))


@data_app.command("ls", epilog=_example("nanorun data ls --verify"))
def data_ls(
    verify: Annotated[
        bool, typer.Option("--verify", help="Read every shard and compare its checksum.")
    ] = False,
    as_json: Json = False,
) -> None:
    """What data is here."""
    from nanorun import tables
    from nanorun.data.get import list_datasets

    datasets, broken = list_datasets(verify)
    records = [tables.dataset_record(d) for d in datasets]
    _show({"datasets": records, "broken": broken}, as_json, tables.datasets_table(datasets))
    for sentence in broken:
        console.say(sentence)
    raise typer.Exit(2 if broken else 0)


@data_app.command("tokenize", epilog=_example("nanorun data tokenize mine --tokenizer mine"))
def data_tokenize(
    dataset: Annotated[str | None, typer.Argument(help="A dataset of text (default: the newest).")] = None,
    tokenizer: Annotated[str | None, typer.Option(help="A tokenizer's name (default: the newest).")] = None,
    name: Annotated[
        str | None, typer.Option(help="What to call the result (default: DATASET-TOKENIZER).")
    ] = None,
    threads: Annotated[int, typer.Option(min=0, help="Threads; 0 is one a core.")] = 0,
    replace: Replace = False,
    as_json: Json = False,
) -> None:
    """Tokenizes a dataset once into memory-mapped .bin shards, so that training need not."""
    from nanorun import tables
    from nanorun.data.bins import tokenize_dataset
    from nanorun.data.get import newest_text
    from nanorun.text.store import open_tokenizer

    made = tokenize_dataset(
        newest_text(dataset), open_tokenizer(tokenizer), name=name, threads=threads, replace=replace
    )
    _show(tables.dataset_record(made), as_json, tables.datasets_table([made]))


@tok_app.command("train", epilog=_example("nanorun tok train --vocab 32768 --data mine"))
def tok_train(
    vocab: Annotated[int, typer.Option(help="Tokens in all, the nine special ones included.")] = 32768,
    data: Annotated[str | None, typer.Option(help="The dataset to learn from (default: the newest).")] = None,
    name: Annotated[
        str | None, typer.Option(help="What to call it (default: after the dataset and size).")
    ] = None,
    max_bytes: Annotated[
        str, typer.Option("--max-bytes", help="Text to learn from at most, such as 2GB.")
    ] = "2GB",
    replace: Replace = False,
    as_json: Json = False,
) -> None:
    """Trains a byte-level BPE tokenizer on the training text of a dataset."""
    from nanorun import tables
    from nanorun.data.get import newest_text, parse_size
    from nanorun.data.vocabulary import train_on

    result = train_on(newest_text(data), vocab, name=name, max_bytes=parse_size(max_bytes), replace=replace)
    _show(result, as_json, tables.trained_tokenizer(result))


@tok_app.command("eval", epilog=_example("nanorun tok eval --tokenizer mine-32768 --json"))
def tok_eval(
    tokenizer: Annotated[
        list[str] | None, typer.Option(help="Tokenizers to compare (default: the newest).")
    ] = None,
    data: Annotated[
        str | None, typer.Option(help="Whose validation text (default: what it was trained on).")
    ] = None,
    max_bytes: Annotated[str, typer.Option("--max-bytes", help="Text to encode at most.")] = "100MB",
    as_json: Json = False,
) -> None:
    """Compression and speed on validation text, beside GPT-2's and GPT-4's where their files are at hand."""
    from nanorun import tables
    from nanorun.data.get import parse_size
    from nanorun.data.vocabulary import evaluate

    result = evaluate(tokenizer or [], data, parse_size(max_bytes))
    _show(result, as_json, tables.tokenizers_table(result))


Depth = Annotated[
    int, typer.Option(min=1, max=200, help="The one dial: layers, and all that follows from them.")
]
Ratio = Annotated[float | None, typer.Option(help="Train on this many tokens per parameter (default: 10.5).")]
Tokens = Annotated[int | None, typer.Option(help="Train on this many tokens.")]
Flops = Annotated[float | None, typer.Option(help="Train with this many FLOPs, such as 1e18.")]
Steps = Annotated[int | None, typer.Option(help="Train for this many steps.")]
Context = Annotated[int, typer.Option(min=2, help="Tokens in a row.")]
BatchTokens = Annotated[int | None, typer.Option(min=1, help="Tokens in a step (default: by the horizon).")]
DeviceBatch = Annotated[int | None, typer.Option(min=1, help="Rows in a micro-batch (default: what fits).")]
Data = Annotated[str | None, typer.Option(help="The dataset (default: the newest).")]
TokenizerName = Annotated[
    str | None, typer.Option("--tokenizer", help="The tokenizer (default: the newest).")
]
BackendName = Annotated[str, typer.Option("--attention", help="auto, plain, sdpa, cudnn, flex or flash.")]
DtypeName = Annotated[str, typer.Option("--dtype", help="auto, bf16, fp16 or fp32.")]
TaskFiles = Annotated[
    Path | None,
    typer.Option("--task-files", help="Where the tasks' files are (default: tasks/ in the home)."),
]
Compile = Annotated[bool, typer.Option("--compile/--no-compile", help="torch.compile on CUDA.")]


@app.command(epilog=_example("nanorun plan --depth 24 --gpu h100 --gpus 8"))
def plan(
    depth: Depth = 12,
    vocab: Annotated[int, typer.Option(min=2, help="Tokens in the vocabulary.")] = 32768,
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
    from nanorun.config import Horizon, scale
    from nanorun.plan import make_plan, plan_record, plan_table

    horizon = Horizon(ratio, tokens, flops, steps)
    config = scale(depth, vocab, context=context, horizon=horizon, batch_tokens=batch_tokens)
    made = make_plan(config, gpu, gpus, device_batch)
    _show(plan_record(made), as_json, plan_table(made))


@train_app.command("base", epilog=_example("nanorun train base --depth 12 --data mine-mine-32768"))
def train_base(
    depth: Annotated[int | None, typer.Option(min=1, max=200, help="The one dial (default: 12).")] = None,
    name: Annotated[str | None, typer.Option(help="The run's name (default: base-dDEPTH).")] = None,
    ratio: Ratio = None,
    tokens: Tokens = None,
    flops: Flops = None,
    steps: Steps = None,
    batch_tokens: BatchTokens = None,
    device_batch: DeviceBatch = None,
    context: Annotated[int | None, typer.Option(min=2, help="Tokens in a row (default: 2048).")] = None,
    data: Data = None,
    tokenizer: TokenizerName = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Of weights and data order (default: 0).")] = None,
    save_every: Annotated[
        int | None, typer.Option(min=1, help="Steps between checkpoints (default: 500).")
    ] = None,
    eval_every: Annotated[
        int | None, typer.Option(min=0, help="Steps between evaluations (default: 250; 0: only at the end).")
    ] = None,
    recompute: Annotated[bool, typer.Option("--recompute", help="Less memory, a third more time.")] = False,
    deterministic: Annotated[bool, typer.Option("--deterministic", help="The same bits every time.")] = False,
    attention: BackendName = "auto",
    dtype: DtypeName = "auto",
    compiled: Compile = True,
    config_file: Annotated[
        Path | None, typer.Option("--config", help="Start from a run's config.json.")
    ] = None,
    track: Annotated[str | None, typer.Option(help="Log to wandb or trackio as well.")] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Start the run anew if it exists.")] = False,
    as_json: Json = False,
) -> None:
    """Pretrains a model. A run whose folder exists goes on where it stopped."""
    from nanorun import tables
    from nanorun.config import Horizon
    from nanorun.train import base

    train = {"seed": seed, "save_every": save_every, "eval_every": eval_every}
    if config_file is not None:
        if not all(value is None for value in (depth, context, ratio, tokens, flops)):
            raise UserError(
                "--depth, --context, --ratio, --tokens and --flops derive everything anew: leave out --config, or them."
            )
        config = base.override(
            base.read_config(config_file),
            {"recompute": recompute or None},
            {**train, "steps": steps, "batch_tokens": batch_tokens},
            data=data,
            tokenizer=tokenizer,
        )
    else:
        config = base.configure(
            depth or 12,
            horizon=Horizon(ratio, tokens, flops, steps),
            context=context or 2048,
            batch_tokens=batch_tokens,
            data=data,
            tokenizer=tokenizer,
            model_changes={"recompute": recompute},
            train_changes={key: value for key, value in train.items() if value is not None},
        )
    options = base.Options(
        name=name,
        fresh=fresh,
        device_batch=device_batch,
        backend=_backend(attention),
        dtype=_dtype(dtype),
        compile=compiled,
        deterministic=deterministic,
        track=track,
    )
    summary = base.train_base(config, options)
    _show(summary, as_json, tables.run_summary(summary))


@train_app.command("sft", epilog=_example("nanorun train sft --from base-d12 --mixture sft --task mine.py"))
def train_sft(
    parent: Annotated[
        str | None, typer.Option("--from", help="The run to begin from (default: the newest base model).")
    ] = None,
    mixture: Annotated[
        str, typer.Option(help="sft, mid, sample, sample-mid or a .json file (docs/tasks.md).")
    ] = "sft",
    task: Annotated[
        list[str] | None,
        typer.Option(help="A task of yours as well, FILE.py or FILE.py:Class. Its code is run."),
    ] = None,
    task_files: TaskFiles = None,
    name: Annotated[str | None, typer.Option(help="The run's name (default: after its parent).")] = None,
    epochs: Annotated[int | None, typer.Option(min=1, help="Passes over the mixture (default: 1).")] = None,
    steps: Steps = None,
    batch_tokens: Annotated[
        int | None,
        typer.Option(
            min=1, help="Tokens in a step (default: the parent's, less where that makes few steps)."
        ),
    ] = None,
    device_batch: DeviceBatch = None,
    context: Annotated[
        int | None, typer.Option(min=2, help="Tokens in a row (default: the parent's).")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the order of conversations.")] = 0,
    warm: Annotated[
        bool, typer.Option("--warm/--cold", help="With the parent's optimizer state, or without.")
    ] = True,
    save_every: Annotated[
        int | None, typer.Option(min=1, help="Steps between checkpoints (default: the parent's).")
    ] = None,
    eval_every: Annotated[
        int | None, typer.Option(min=0, help="Steps between evaluations (default: four in all).")
    ] = None,
    chat_every: Annotated[
        int, typer.Option(min=0, help="Steps between looks at ChatCORE, and one at the end; 0: none.")
    ] = 0,
    chat_problems: Annotated[int, typer.Option(min=1, help="Questions of each task at such a look.")] = 25,
    deterministic: Annotated[bool, typer.Option("--deterministic", help="The same bits every time.")] = False,
    attention: BackendName = "auto",
    dtype: DtypeName = "auto",
    compiled: Compile = True,
    track: Annotated[str | None, typer.Option(help="Log to wandb or trackio as well.")] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Start the run anew if it exists.")] = False,
    as_json: Json = False,
) -> None:
    """Teaches a base model to converse. A run whose folder exists goes on where it stopped."""
    from nanorun import tables
    from nanorun.train import base, sft

    if steps is not None and steps < 1:
        raise UserError(f"--steps is {steps}: it must be at least 1.")
    choices = sft.Choices(
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
    options = base.Options(
        name=name,
        fresh=fresh,
        device_batch=device_batch,
        backend=_backend(attention),
        dtype=_dtype(dtype),
        compile=compiled,
        deterministic=deterministic,
        track=track,
    )
    summary = sft.train_sft(choices, options)
    _show(summary, as_json, tables.run_summary(summary))


@train_app.command("rl", epilog=_example("nanorun train rl --task gsm8k --steps 200"))
def train_rl(
    task: Annotated[
        list[str] | None, typer.Option(help="What to learn: a name, or file.py:Class. May be given again.")
    ] = None,
    parent: Annotated[
        str | None, typer.Option("--from", help="The run to start from (default: the newest sft, or base).")
    ] = None,
    name: Annotated[str | None, typer.Option(help="The run's name (default: rl-dDEPTH).")] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Steps (default: all problems once).")] = None,
    problems: Annotated[int, typer.Option(min=1, help="Problems a step.")] = 16,
    samples: Annotated[int, typer.Option(min=1, max=1024, help="Replies to each problem.")] = 16,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens of a reply at most.")] = 256,
    temperature: Annotated[float, typer.Option(help="Of the samples.")] = 1.0,
    clip: Annotated[
        float | None, typer.Option(help="PPO's limit to the ratio, such as 0.2 (default: none).")
    ] = None,
    kl: Annotated[float, typer.Option(help="Pull towards the start, such as 0.01.")] = 0.0,
    inner_updates: Annotated[int, typer.Option(min=1, help="Updates by the samples of one step.")] = 1,
    normalize_std: Annotated[
        bool, typer.Option("--normalize-std", help="Divide advantages by their deviation.")
    ] = False,
    rate_share: Annotated[float, typer.Option(help="Learning rates, as a share of the parent's.")] = 0.05,
    eval_problems: Annotated[int, typer.Option(min=1, help="Held-out problems to evaluate on.")] = 64,
    device_batch: Annotated[int | None, typer.Option(min=1, help="Replies in a micro-batch.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the problems' order and the samples.")] = 0,
    save_every: Annotated[int, typer.Option(min=1, help="Steps between checkpoints.")] = 25,
    eval_every: Annotated[
        int, typer.Option(min=0, help="Steps between evaluations; 0: only at the end.")
    ] = 25,
    deterministic: Annotated[bool, typer.Option("--deterministic", help="The same bits every time.")] = False,
    dtype: DtypeName = "auto",
    compiled: Compile = True,
    files: TaskFiles = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Start the run anew if it exists.")] = False,
    as_json: Json = False,
) -> None:
    """Reinforcement learning: a chat model gets better at a task by trying. Goes on where it stopped."""
    from nanorun import tables
    from nanorun.evals.chat import open_task
    from nanorun.train import rl

    opener = functools.partial(open_task, folder=files)
    options = rl.Options(fresh, device_batch, _dtype(dtype), compiled, deterministic)
    run, config, learning = rl.configure(
        task or [],
        parent=parent,
        name=name,
        fresh=fresh,
        steps=steps,
        open_task=opener,
        train={"seed": seed, "save_every": save_every, "eval_every": eval_every},
        rate_share=rate_share,
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
    summary = rl.train_rl(run, config, learning, options, opener)
    _show(summary, as_json, tables.rl_summary(summary))


@eval_app.command("bpb", epilog=_example("nanorun eval bpb --model base-d12 --json"))
def eval_bpb(
    model: Annotated[str | None, typer.Option(help="A run's name (default: the newest).")] = None,
    data: Annotated[
        str | None, typer.Option(help="Whose validation text (default: what it was trained on).")
    ] = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Tokens at most (default: all).")] = None,
    as_json: Json = False,
) -> None:
    """Bits per byte of validation text: lower is better, and comparable between tokenizers."""
    from nanorun.evals.run import evaluate_run

    result = evaluate_run(model, data, max_tokens)
    text = f"{result['bpb']:.4f} bits per byte, loss {result['loss']:.4f}, on {result['tokens']:,} tokens"
    _show(result, as_json, f"{text} of '{result['data']}' ({result['model']}, step {result['step']})")


@app.command(epilog=_example('nanorun chat -p "What is 17 + 25?"'))
def chat(
    prompt: Annotated[
        str | None, typer.Option("-p", "--prompt", help="Ask this, print the answer and end; - reads stdin.")
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="A run's name (default: the newest chat model, else base model).")
    ] = None,
    system: Annotated[str | None, typer.Option(help="What a chat model is told before everything.")] = None,
    tools: Annotated[
        str, typer.Option(help="What answers may call: calculator, python or none.")
    ] = "calculator",
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token.")] = 0.8,
    top_k: Annotated[int, typer.Option(help="Only the k likeliest tokens; 0 is no limit.")] = 50,
    top_p: Annotated[float, typer.Option(help="Only the likeliest, up to this probability in all.")] = 1.0,
    min_p: Annotated[float, typer.Option(help="Only tokens this likely, relative to the likeliest.")] = 0.0,
    repetition_penalty: Annotated[float, typer.Option(help="Above 1, what was said gets less likely.")] = 1.0,
    seed: Annotated[int | None, typer.Option(help="The same one gives the same answers.")] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens of an answer at most.")] = 512,
    int8: Annotated[bool, typer.Option("--int8", help="Weights as int8.")] = False,
    speculate: Annotated[str | None, typer.Option(help="Guess ahead: lookup or draft.")] = None,
    draft: Annotated[str | None, typer.Option(help="The run that guesses, with --speculate draft.")] = None,
    verbose: Annotated[bool, typer.Option("--verbose", help="Say how fast each answer was.")] = False,
    as_json: Json = False,
) -> None:
    """Talk to a model: a chat model answers, a base model continues the text.

    In a conversation /help lists the commands. A question given with -p or on stdin is answered alone.
    """
    from nanorun.infer.request import Sampling

    if tools not in ("calculator", "python", "none"):
        raise UserError(f"There is no tool '{tools}': choose calculator, python or none.")
    sampling = Sampling(repetition_penalty, temperature, top_k, top_p, min_p, seed)
    speculation = _speculation(speculate or ("draft" if draft else None), "a trained one", draft)

    from nanorun.chat.conversation import Options  # only now: this takes a second
    from nanorun.chat.terminal import chat

    options = Options(model, sampling, max_tokens, system, cast(Any, tools), int8, speculation, draft)
    chat(options, prompt, as_json=as_json, verbose=verbose)


@eval_app.command("chat", epilog=_example("nanorun eval chat --tasks gsm8k,arc-easy --max-per-task 200"))
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
    from nanorun.evals.replies import Manner

    named = [name.strip() for name in tasks.split(",") if name.strip()] if tasks else []
    if judge is not None:
        if model or keep:
            raise UserError("--judge takes the model and its answers from the file: leave the others out.")
        result = chat.judge_file(judge, named, files)
    else:
        if temperature is None:
            temperature = 1.0 if samples > 1 else 0.0
        if samples > 1 and temperature == 0:
            raise UserError("--samples with --temperature 0 would say the same every time: raise one.")
        manner = Manner(max_tokens, temperature, samples, seed, batch)
        result = chat.evaluate_chat(chat.Options(model, named, split, max_per_task, manner, keep, files))
    _show(result, as_json, tables.chat_table(result))


@eval_app.command("core", epilog=_example("nanorun eval core --model base-d12 --max-per-task 500 --json"))
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
    save: Annotated[Path | None, typer.Option(help="Keep the result in this file.")] = None,
    as_json: Json = False,
) -> None:
    """The CORE score: 22 tasks for base models, 0 for guessing, GPT-2 XL has 0.2565."""
    from nanorun import tables
    from nanorun.bench.record import keep
    from nanorun.evals.core import Options, evaluate_hugging_face, evaluate_run_core
    from nanorun.report.core import check_suffix, plot_core

    if model is not None and hf is not None:
        raise UserError("--model names a run of yours and --hf a folder of another's: give one of them.")
    if plot is not None:
        check_suffix(plot)
    names = [name.strip() for name in tasks.split(",") if name.strip()] if tasks is not None else []
    if tasks is not None and not names:
        raise UserError("--tasks names no task: give some, such as hellaswag,arc, or leave it out for all.")
    options = Options(bundle, names, max_per_task, batch_tokens, mmlu)
    result = evaluate_hugging_face(hf, options) if hf is not None else evaluate_run_core(model, options)
    if result is None:
        return  # another rank says it
    keep(result, save)
    if plot is not None:
        plot_core(result, plot)
    _show(result, as_json, tables.core_table(result))


@app.command(epilog=_example("nanorun serve --port 8000"))
def serve(
    model: Annotated[
        str | None, typer.Option(help="A run's name (default: the newest chat model, else base model).")
    ] = None,
    host: Annotated[str, typer.Option(help="The address to listen on; 0.0.0.0 is all.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0 takes a free one.")] = 8000,
    api_key: Annotated[
        str | None, typer.Option(envvar="NANORUN_API_KEY", help="Clients must send this key.")
    ] = None,
    cors: Annotated[list[str] | None, typer.Option(help="An origin whose pages may call.")] = None,
    allow_host: Annotated[
        list[str] | None, typer.Option(help="Another name that a local server answers to.")
    ] = None,
    slots: Annotated[
        int | None, typer.Option(min=1, max=4096, help="Answers at a time on a device (GPU: 64, CPU: 8).")
    ] = None,
    queue: Annotated[int, typer.Option(min=1, help="Answers that may wait; more get 429.")] = 256,
    gpus: Annotated[int | None, typer.Option(min=1, help="How many GPUs (default: all).")] = None,
    tools: Annotated[
        str, typer.Option(help="What answers may call: calculator, python or none.")
    ] = "calculator",
    temperature: Annotated[float, typer.Option(help="Where a request does not say.")] = 0.8,
    top_k: Annotated[int, typer.Option(help="Where a request does not say; 0 is no limit.")] = 50,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Tokens of an answer at most.")] = None,
    max_body: Annotated[str, typer.Option(help="Bytes of a request at most, such as 2MB.")] = "2MB",
    timeout: Annotated[float, typer.Option(help="Seconds that an answer may take.")] = 600.0,
    stall: Annotated[float, typer.Option(help="Seconds that a reader may take nothing.")] = 60.0,
    drain: Annotated[float, typer.Option(min=0, help="Seconds for running answers to end.")] = 30.0,
    int8: Annotated[bool, typer.Option("--int8", help="Weights as int8.")] = False,
) -> None:
    """An OpenAI-compatible server, and the page to talk to the model in a browser."""
    from nanorun.data.get import parse_size
    from nanorun.infer.request import Sampling
    from nanorun.serve.options import Limits, Options

    if tools not in ("calculator", "python", "none"):
        raise UserError(f"There is no tool '{tools}': choose calculator, python or none.")
    options = Options(
        model=model,
        host=host,
        port=port,
        api_key=api_key,
        cors=tuple(cors or ()),
        allow_hosts=tuple(allow_host or ()),
        slots=slots,
        gpus=gpus,
        tools=cast(Any, tools),
        int8=int8,
        sampling=Sampling(temperature=temperature, top_k=top_k),
        drain_s=drain,
        limits=Limits(
            body_bytes=parse_size(max_body), tokens=max_tokens, queue=queue, answer_s=timeout, stall_s=stall
        ),
    )

    from nanorun.serve.run import serve  # only now: this takes a second

    serve(options)


@bench_app.command("train", epilog=_example("nanorun bench train --depth 12 --json"))
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
    compiled: Compile = True,
    fresh_caches: Annotated[
        bool,
        typer.Option(
            "--cold/--quick", help="With cold and warm starts, or with the compile caches as they are."
        ),
    ] = True,
    save: Annotated[Path | None, typer.Option(help="Keep the result in this file.")] = None,
    as_json: Json = False,
) -> None:
    """Tokens/s, MFU, memory and the time to the first step, on real packed data."""
    from nanorun import tables
    from nanorun.bench.record import check_path, keep
    from nanorun.bench.train import bench_train
    from nanorun.config import Horizon
    from nanorun.train import base

    check_path(save)
    config = base.configure(
        depth,
        horizon=Horizon(),
        context=context,
        batch_tokens=batch_tokens,
        data=data,
        tokenizer=tokenizer,
    )
    options = base.Options(
        device_batch=device_batch, backend=_backend(attention), dtype=_dtype(dtype), compile=compiled
    )
    result = bench_train(config, options, steps, fresh_caches)
    keep(result, save)
    _show(result, as_json, tables.bench_train(result))


@bench_app.command("infer", epilog=_example("nanorun bench infer --depth 12 --batch 1,8,32,128 --json"))
def bench_infer(
    depth: Annotated[int, typer.Option(min=1, max=200, help="A model of this depth, random weights.")] = 12,
    model: Annotated[str | None, typer.Option(help="A trained run instead, and its own text.")] = None,
    batch: Annotated[str, typer.Option(help="Texts at a time: one or more numbers.")] = "1,8,32,128",
    prompt: Annotated[int, typer.Option(min=1, help="Tokens of each prompt.")] = 1024,
    new: Annotated[int, typer.Option(min=2, help="Tokens to generate.")] = 256,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token.")] = 0.0,
    int8: Annotated[bool, typer.Option("--int8", help="Weights as int8.")] = False,
    speculate: Annotated[str | None, typer.Option(help="Guess ahead: lookup or draft.")] = None,
    draft: Annotated[str | None, typer.Option(help="The run that guesses, with --speculate draft.")] = None,
    guesses: Annotated[int, typer.Option(min=1, max=16, help="Tokens guessed at a time.")] = 4,
    save: Annotated[Path | None, typer.Option(help="Keep the result in this file.")] = None,
    as_json: Json = False,
) -> None:
    """Time to the first token, ms a step, tokens/s, memory and the share of its bandwidth that is used."""
    from nanorun import tables
    from nanorun.bench.infer import Setting, bench_infer
    from nanorun.bench.record import check_path, keep

    check_path(save)
    setting = Setting(
        _numbers(batch), prompt, new, temperature, int8, _speculation(speculate, model, draft), guesses
    )
    result = bench_infer(depth, model, setting, draft)
    keep(result, save)
    _show(result, as_json, tables.bench_infer(result))


def _numbers(text: str) -> list[int]:
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < 1 or max(numbers) > 4096:
        raise UserError(f"--batch is '{text}': give numbers from 1 to 4096, such as 1,8,32.")
    return numbers


def _speculation(kind: str | None, model: str | None, draft: str | None) -> Any:
    if kind not in (None, "lookup", "draft"):
        raise UserError(f"There is no speculation '{kind}': choose lookup or draft.")
    if kind == "draft" and model and not draft:
        raise UserError("--speculate draft needs --draft, the name of a smaller run of the same tokenizer.")
    return kind


def _backend(name: str) -> Any:
    return _one_of(name, get_args(Backend), "attention backend")


def _dtype(name: str) -> Any:
    return _one_of(name, get_args(Dtype), "dtype")


def _one_of(name: str, choices: tuple[str, ...], what: str) -> str:
    if name not in choices:
        raise UserError(f"There is no {what} '{name}': choose {', '.join(choices[:-1])} or {choices[-1]}.")
    return name


# typer carries its own copy of click in newer versions, so its base of all usage errors is found here
_ClickException: Any = typer.BadParameter.__mro__[2]


def main(args: list[str] | None = None) -> NoReturn:
    # Threads that wait asleep: spinning ones make training ten times slower as soon as anything else runs.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    signal.signal(signal.SIGTERM, _stop)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):  # a terminal without our signs shows others, it does not fail
            stream.reconfigure(errors="replace")
    try:
        code = app(args, standalone_mode=False, prog_name="nanorun")
    except UserError as error:
        _complain(str(error))
        sys.exit(error.exit_code)
    except _ClickException as error:
        code = _explain_usage(error)
    except (KeyboardInterrupt, typer.Abort):
        code = 130
    except OSError as error:
        if error.errno == errno.EPIPE:  # the reader of our output went away, as `| head` does
            os._exit(141)
        if error.errno != errno.ENOSPC:
            raise
        code = _complain("The output cannot be written, its disk is full.")
    if code == 130:  # also when typer itself has caught the interruption
        console.say("\nStopped. Nothing half-written was kept; the same command goes on or starts again.")
    sys.exit(code or 0)


def _explain_usage(error: Any) -> int:
    context, message = getattr(error, "ctx", None), error.format_message().strip()
    if message.startswith("Usage:"):  # nothing was asked for: show what there is
        print(message)
        return 0
    see = f" See {context.command_path} --help." if context is not None else ""
    return _complain(message.rstrip(".") + "." + see)


def _complain(sentence: str) -> int:
    console.say(f"nanorun: {sentence}")
    return 2


def _stop(signum: int, frame: object) -> NoReturn:
    raise KeyboardInterrupt
