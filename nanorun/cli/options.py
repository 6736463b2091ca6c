"""What verbs share: the options that several of them take, how an option is checked, how a result is shown."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast, get_args

import typer

from nanorun.config import Backend, Dtype, Fp8
from nanorun.errors import UserError

if TYPE_CHECKING:
    from nanorun.train import base

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")]
Replace = Annotated[bool, typer.Option("--replace", help="Replace one of the same name.")]
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
Fp8Name = Annotated[
    str | None,
    typer.Option(
        "--fp8",
        help="8-bit matmuls: none, mlp, layers, head, all, or auto (default): all on Hopper from 768 wide on.",
    ),
]
TaskFiles = Annotated[
    Path | None,
    typer.Option("--task-files", help="Where the tasks' files are (default: tasks/ in the home)."),
]
Compile = Annotated[bool, typer.Option("--compile/--no-compile", help="torch.compile on CUDA.")]
Graphs = Annotated[
    bool, typer.Option("--graphs/--no-graphs", help="Micro-steps replayed as a CUDA graph, when compiled.")
]
Deterministic = Annotated[bool, typer.Option("--deterministic", help="The same bits every time.")]
Track = Annotated[str | None, typer.Option(help="Log to wandb or trackio as well.")]
Fresh = Annotated[bool, typer.Option("--fresh", help="Start the run anew if it exists.")]
Save = Annotated[Path | None, typer.Option(help="Keep the result in this file.")]
Int8 = Annotated[bool, typer.Option("--int8", help="Weights as int8.")]
Tools = Annotated[str, typer.Option(help="What answers may call: calculator, python or none.")]
Speculate = Annotated[str | None, typer.Option(help="Guess ahead: lookup or draft.")]
Draft = Annotated[str | None, typer.Option(help="The run that guesses, with --speculate draft.")]


def example(text: str) -> str:
    return f"\b\nExample:\n  {text}"  # \b keeps the lines as they are


def show(result: dict[str, Any], as_json: bool, text: str) -> None:
    print(json.dumps(result, ensure_ascii=False) if as_json else text, flush=True)


def run_options(
    name: str | None,
    fresh: bool,
    device_batch: int | None,
    attention: str,
    dtype: str,
    compiled: bool,
    graphs: bool = True,
    deterministic: bool = False,
    track: str | None = None,
) -> "base.Options":
    """How a run is to go: what the verbs that train have in common, checked before anything starts."""
    backend = cast(Backend, check_one_of(attention, get_args(Backend), "attention backend"))
    checked = check_dtype(dtype)

    from nanorun.train import base  # only now: this takes a second

    return base.Options(name, fresh, device_batch, backend, checked, compiled, graphs, deterministic, track)


def check_dtype(name: str) -> Dtype:
    return cast(Dtype, check_one_of(name, get_args(Dtype), "dtype"))


def check_fp8(name: str | None) -> dict[str, Any]:
    """The change of a model's configuration that it means."""
    return {} if name is None else {"fp8": check_one_of(name, get_args(Fp8), "setting of fp8")}


def check_tools(name: str) -> Any:
    return check_one_of(name, ("calculator", "python", "none"), "tool")


def check_speculation(kind: str | None, draft: str | None) -> Any:
    """--draft alone means to use it."""
    kind = kind or ("draft" if draft else None)
    if kind is not None:
        check_one_of(kind, ("lookup", "draft"), "speculation")
    if kind == "draft" and not draft:
        raise UserError("--speculate draft needs --draft, the name of a smaller run of the same tokenizer.")
    return kind


def check_one_of(name: str, choices: tuple[str, ...], what: str) -> str:
    if name not in choices:
        raise UserError(f"There is no {what} '{name}': choose {', '.join(choices[:-1])} or {choices[-1]}.")
    return name
