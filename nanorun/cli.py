"""The command line: each verb parses its options, calls one function and prints what it returned.

Results go to stdout, everything else (progress, notes, errors) to stderr. With --json a verb prints one
JSON object as the last thing on stdout. A person's mistake gives one sentence and exit code 2.
"""

import errno
import json
import os
import signal
import sys
from io import TextIOWrapper
from pathlib import Path
from typing import Annotated, Any, NoReturn, cast

import typer

from nanorun import __version__, console
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
train_app = typer.Typer(help="Training: the base model.", no_args_is_help=True)
bench_app = typer.Typer(help="Speed on this machine: training, generation.", no_args_is_help=True)
eval_app = typer.Typer(help="How good a model is: bits per byte.", no_args_is_help=True)
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
        list[str], typer.Argument(metavar="NAME...", help="sample, climbmix, fineweb-edu or fineweb10B.")
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
    """Gets named corpora: the sample world is written here, the others are downloaded (and resumed)."""
    from nanorun import tables
    from nanorun.data import get

    datasets = [get.get_dataset(name, shards, get.parse_size(size), seed, workers, replace) for name in names]
    _show(
        {"datasets": [tables.dataset_record(d) for d in datasets]}, as_json, tables.datasets_table(datasets)
    )


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
    from nanorun.bench.record import keep
    from nanorun.bench.train import bench_train
    from nanorun.config import Horizon
    from nanorun.train import base

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
    from nanorun.bench.record import keep

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
    if name not in ("auto", "plain", "sdpa", "cudnn", "flex", "flash"):
        raise UserError(
            f"There is no attention backend '{name}': choose auto, plain, sdpa, cudnn, flex or flash."
        )
    return name


def _dtype(name: str) -> Any:
    if name not in ("auto", "bf16", "fp16", "fp32"):
        raise UserError(f"There is no dtype '{name}': choose auto, bf16, fp16 or fp32.")
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
