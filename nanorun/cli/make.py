"""`nanorun make`: from your own text, and conversations, to a model to talk to. It runs the commands that it prints."""

import shlex
import time
from collections.abc import Callable
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Annotated, Any

import typer

from nanorun import home
from nanorun.cli import options as opt
from nanorun.console import command, say
from nanorun.errors import UserError
from nanorun.runs import read_figures

app = typer.Typer()

BASE_SHARE = 0.8  # of the time, where conversations follow
QUESTIONS = 2  # that the result answers at the end


@app.command(epilog=opt.example("nanorun make ~/notes --conversations mine.jsonl --minutes 15"))
def make(
    paths: Annotated[
        list[Path], typer.Argument(metavar="PATH...", help="Files or folders of text, as for data add.")
    ],
    conversations: Annotated[
        Path | None,
        typer.Option(help="Conversations that teach it to answer (.jsonl, .json, .csv; docs/tasks.md)."),
    ] = None,
    minutes: Annotated[float, typer.Option(min=0.1, help="About how long to train.")] = 30.0,
    name: Annotated[
        str | None, typer.Option(help="Name of dataset, tokenizer and runs (default: of the file or folder).")
    ] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Start over: the text has changed.")] = False,
    as_json: opt.Json = False,
) -> None:
    """Make a model from your own text, by the commands that it prints. Finished ones are skipped.

    Without conversations the result continues text; with them it answers.
    """
    from nanorun.cli import app as nanorun
    from nanorun.data.add import default_name
    from nanorun.data.dataset import dataset_names
    from nanorun.text.store import tokenizer_names

    for path in [*paths, *([conversations] if conversations else [])]:
        if not path.exists():
            raise UserError(f"There is no {path}: name files or folders that exist.")
    name = home.check_name(name or default_name(paths)[:56], "dataset")  # base-NAME is a name as well
    base, chat = f"base-{name}", f"sft-{name}"
    replace, over = (["--replace"] if fresh else []), (["--fresh"] if fresh else [])
    base_minutes = minutes * (BASE_SHARE if conversations else 1)
    stages: list[tuple[bool, list[str]]] = [
        (name in dataset_names(), ["data", "add", *map(str, paths), "--name", name, *replace]),
        (name in tokenizer_names(), ["tok", "train", "--data", name, "--name", name, *replace]),
        (False, ["train", "base", "--data", name, "--minutes", f"{base_minutes:g}", "--name", base, *over]),
    ]
    if conversations:
        stages.append(
            (False, ["train", "sft", "--from", base, "--task", str(conversations), "--name", chat, *over])
        )

    start = time.perf_counter()
    for number, (is_done, arguments) in enumerate(stages, 1):
        line = f"{number}/{len(stages)} {command(shlex.join(arguments))}"
        if is_done and not fresh:
            say(f"{line}  (done already; --fresh does all of it again)")
            continue
        say(line)
        _run(nanorun, arguments, as_json)
    model = chat if conversations else base
    answers = []
    for question in _questions(model, conversations):
        arguments = ["chat", "--model", model, "-p", question]
        say(command(shlex.join(arguments)))
        answers.append({"question": question, "answer": _run(nanorun, arguments, as_json)})
    summaries = {run: read_figures(home.runs_dir() / run) for run in {base, model}}
    result = {
        "what": "make",
        "model": model,
        "val_bpb": summaries[base]["val_bpb"],
        "runs": summaries,
        "answers": answers,
        "seconds": round(time.perf_counter() - start, 1),
    }
    opt.show(result, as_json, f"\n{command('chat')} talks to it, {command('serve')} shows it in a browser.")


def _run(nanorun: Callable[..., Any], arguments: list[str], quiet: bool) -> str:
    """Runs a command in this process. Its output is returned instead of printed where only ours may be printed."""
    output = StringIO()
    if quiet:
        with redirect_stdout(output):
            nanorun(arguments, standalone_mode=False)
    else:
        nanorun(arguments, standalone_mode=False)
    return output.getvalue().strip()


def _questions(model: str, conversations: Path | None) -> list[str]:
    """What to ask at the end: the first questions of the conversations; of a base model, to continue a text."""
    from nanorun.tasks.catalogue import open_examples

    if conversations is None:
        samples = read_figures(home.runs_dir() / model).get("samples", [])
        return [sample["prompt"] for sample in samples[:QUESTIONS]]
    examples = open_examples(str(conversations))
    first = (examples[index] for index in range(min(QUESTIONS, len(examples))))
    asked = (next(m["content"] for m in each["messages"] if m["role"] == "user") for each in first)
    return [content for content in asked if isinstance(content, str)]
