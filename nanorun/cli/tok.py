"""`nanorun tok`: train, eval."""

from typing import Annotated

import typer

from nanorun import tables
from nanorun.cli.options import Json, Replace, example, show

app = typer.Typer(help="Tokenizers: train one, compare it with others.", no_args_is_help=True)


@app.command("train", epilog=example("nanorun tok train --data mine"))
def tok_train(
    vocab: Annotated[
        int | None,
        typer.Option(
            help="Vocabulary size, the nine special tokens included (default: from the size of the text)."
        ),
    ] = None,
    data: Annotated[str | None, typer.Option(help="Dataset to train on (default: the newest).")] = None,
    name: Annotated[str | None, typer.Option(help="Name of the tokenizer (default: DATASET-VOCAB).")] = None,
    max_bytes: Annotated[
        str, typer.Option("--max-bytes", help="Maximum amount of training text, such as 2GB.")
    ] = "2GB",
    replace: Replace = False,
    as_json: Json = False,
) -> None:
    """Trains a byte-level BPE tokenizer on the training text of a dataset."""
    from nanorun.data.get import newest_text, parse_size
    from nanorun.data.vocabulary import train_on

    result = train_on(newest_text(data), vocab, name=name, max_bytes=parse_size(max_bytes), replace=replace)
    show(result, as_json, tables.trained_tokenizer(result))


@app.command("eval", epilog=example("nanorun tok eval --tokenizer mine-32768 --json"))
def tok_eval(
    tokenizer: Annotated[
        list[str] | None, typer.Option(help="Tokenizers to compare (default: the newest).")
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(help="Dataset with the validation text (default: the one it was trained on)."),
    ] = None,
    max_bytes: Annotated[
        str, typer.Option("--max-bytes", help="Maximum amount of text to encode.")
    ] = "100MB",
    as_json: Json = False,
) -> None:
    """Compression and throughput on validation text, beside GPT-2's and GPT-4's if their files are available."""
    from nanorun.data.get import parse_size
    from nanorun.data.vocabulary import evaluate

    result = evaluate(tokenizer or [], data, parse_size(max_bytes))
    show(result, as_json, tables.tokenizers_table(result))
