"""`nanorun data`: get, add, ls, tokenize."""

from pathlib import Path
from typing import Annotated, Any

import typer

from nanorun import console
from nanorun.cli.options import Json, Replace, example, show

app = typer.Typer(help="Training data: download it, add your own, list it.", no_args_is_help=True)


@app.command("get", epilog=example("nanorun data get fineweb-edu --shards 8"))
def data_get(
    names: Annotated[
        list[str],
        typer.Argument(metavar="NAME...", help="sample, climbmix, fineweb-edu, fineweb10B or core."),
    ],
    shards: Annotated[
        int | None, typer.Option(min=1, help="Number of training shards (default: 8, about 1 GB).")
    ] = None,
    size: Annotated[str, typer.Option(help="Size of the sample world, such as 20MB.")] = "8MB",
    seed: Annotated[
        int, typer.Option(min=0, help="Seed of the sample world: other texts about the same facts.")
    ] = 0,
    workers: Annotated[int, typer.Option(min=1, max=64, help="Parallel downloads.")] = 4,
    replace: Replace = False,
    as_json: Json = False,
) -> None:
    """Gets named corpora, or CORE's tasks. The sample world is generated, the others are downloaded (and resumed)."""
    from nanorun.data import bundle, get

    named = [name for name in names if name != "core"]
    datasets = [get.get_dataset(name, shards, get.parse_size(size), seed, workers, replace) for name in named]
    records: dict[str, Any] = {"datasets": [get.dataset_record(d) for d in datasets]}
    text = get.datasets_table(datasets) if datasets else ""
    if "core" in names:
        records["core"] = str(bundle.get_core(replace=replace).where)
        text = f"{text}\n\nCORE's tasks are in {records['core']}: {console.command('eval core')}".strip()
    show(records, as_json, text)


@app.command("add", epilog=example("nanorun data add ~/notes more.jsonl.xz --name mine --val held-out.txt"))
def data_add(
    paths: Annotated[
        list[Path],
        typer.Argument(
            metavar="PATH...", help="Files or folders: parquet, jsonl, json, csv, txt; plain, .gz, .xz, .zst."
        ),
    ],
    name: Annotated[
        str | None, typer.Option(help="Name of the dataset (default: that of the file or folder).")
    ] = None,
    val: Annotated[
        Path | None,
        typer.Option(help="File with validation text (default: 10% of a small text, 1% from 20 MB on)."),
    ] = None,
    column: Annotated[str, typer.Option(help="Column with the text.")] = "text",
    split: Annotated[
        str | None, typer.Option(help="Split txt files into documents at this text (\\n is a line break).")
    ] = None,
    replace: Replace = False,
    as_json: Json = False,
) -> None:
    """Makes a dataset from your own files."""
    from nanorun.data.add import add_files
    from nanorun.data.get import dataset_record, datasets_table

    separator = split.replace("\\n", "\n").replace("\\t", "\t") if split is not None else None
    dataset = add_files(paths, name=name, val=val, column=column, separator=separator, replace=replace)
    show(dataset_record(dataset), as_json, datasets_table([dataset]))


@app.command("ls", epilog=example("nanorun data ls --verify"))
def data_ls(
    verify: Annotated[
        bool, typer.Option("--verify", help="Read every shard and compare its checksum.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Lists the datasets of this home."""
    from nanorun.data.get import dataset_record, datasets_table, list_datasets

    datasets, broken = list_datasets(verify)
    records = [dataset_record(d) for d in datasets]
    show({"datasets": records, "broken": broken}, as_json, datasets_table(datasets))
    for sentence in broken:
        console.say(sentence)
    raise typer.Exit(2 if broken else 0)


@app.command("tokenize", epilog=example("nanorun data tokenize mine --tokenizer mine"))
def data_tokenize(
    dataset: Annotated[str | None, typer.Argument(help="A dataset of text (default: the newest).")] = None,
    tokenizer: Annotated[
        str | None, typer.Option(help="A tokenizer's name (default: the newest that was trained on it).")
    ] = None,
    name: Annotated[str | None, typer.Option(help="Name of the result (default: DATASET-TOKENIZER).")] = None,
    threads: Annotated[int, typer.Option(min=0, help="Threads (0: one per core).")] = 0,
    replace: Replace = False,
    as_json: Json = False,
) -> None:
    """Tokenizes a dataset once into memory-mapped .bin shards, so that training does not have to."""
    from nanorun.data.bins import tokenize_dataset
    from nanorun.data.get import dataset_record, datasets_table, newest_text
    from nanorun.data.vocabulary import tokenizer_for
    from nanorun.text.store import open_tokenizer

    source = newest_text(dataset)
    chosen = open_tokenizer(tokenizer) if tokenizer is not None else tokenizer_for(source)
    made = tokenize_dataset(source, chosen, name=name, threads=threads, replace=replace)
    show(dataset_record(made), as_json, datasets_table([made]))
