"""What commands share: common options, their validation, and printing a result."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast, get_args

import typer

from nanorun.config import Backend, Config, Dtype, Horizon
from nanorun.errors import UserError

if TYPE_CHECKING:
    from nanorun.model.fast.recipe import Recipe
    from nanorun.train import base

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")]
Replace = Annotated[bool, typer.Option("--replace", help="Replace one of the same name.")]
Depth = Annotated[
    int,
    typer.Option(min=1, max=200, help="Number of layers; sets width, batch size, tokens and learning rates."),
]
Ratio = Annotated[float | None, typer.Option(help="Train on this many tokens per parameter (default: 10.5).")]
Tokens = Annotated[int | None, typer.Option(help="Train on this many tokens.")]
Flops = Annotated[float | None, typer.Option(help="Train with this many FLOPs, such as 1e18.")]
Steps = Annotated[int | None, typer.Option(help="Train for this many steps.")]
Context = Annotated[int, typer.Option(min=2, help="Context length: tokens per row.")]
BatchTokens = Annotated[
    int | None, typer.Option(min=1, help="Tokens per step (default: from the training horizon).")
]
DeviceBatch = Annotated[
    int | None, typer.Option(min=1, help="Rows per micro-batch (default: from the memory estimate).")
]
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
        help="FP8 matmuls: none, mlp, layers, head, all, or auto (default): all on Hopper from width 768 on.",
    ),
]
TaskFiles = Annotated[
    Path | None,
    typer.Option("--task-files", help="Folder of the tasks' files (default: tasks/ in the home)."),
]
Compile = Annotated[bool, typer.Option("--compile/--no-compile", help="Use torch.compile on CUDA.")]
Graphs = Annotated[
    bool, typer.Option("--graphs/--no-graphs", help="Replay micro-steps as a CUDA graph, when compiled.")
]
Deterministic = Annotated[
    bool, typer.Option("--deterministic", help="Bitwise reproducible, a little slower.")
]
Track = Annotated[str | None, typer.Option(help="Log to wandb or trackio as well.")]
Fresh = Annotated[bool, typer.Option("--fresh", help="Delete an existing run of this name and start over.")]
Save = Annotated[Path | None, typer.Option(help="Write the result to this file.")]
Int8 = Annotated[bool, typer.Option("--int8", help="Quantize weights to int8.")]
Tools = Annotated[str, typer.Option(help="Tools that answers may call: calculator, python or none.")]
Speculate = Annotated[str | None, typer.Option(help="Speculative decoding: lookup or draft.")]
Draft = Annotated[str | None, typer.Option(help="The draft model's run, for --speculate draft.")]


def example(text: str) -> str:
    return f"\b\nExample:\n  {text}"  # \b keeps the line breaks


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
    recipe: "Recipe | None" = None,
) -> "base.BaseOptions":
    """The options that training commands share, validated before anything starts."""
    backend = cast(Backend, check_one_of(attention, get_args(Backend), "attention backend"))
    checked = check_dtype(dtype)

    from nanorun.train import base  # imported late: it takes a second

    return base.BaseOptions(
        name, fresh, device_batch, backend, checked, compiled, graphs, recipe, deterministic, track
    )


def default_config(
    depth: int,
    context: int,
    batch_tokens: int | None,
    data: str | None,
    tokenizer: str | None,
) -> Config:
    """The configuration of a depth with the default horizon."""
    from nanorun.train import base

    return base.configure(
        depth,
        horizon=Horizon(),
        context=context,
        batch_tokens=batch_tokens,
        data=data,
        tokenizer=tokenizer,
    )


def check_dtype(name: str) -> Dtype:
    return cast(Dtype, check_one_of(name, get_args(Dtype), "dtype"))


def chosen_recipe(fp8: str | None, recompute: bool = False) -> "Recipe | None":
    """The recipe that these flags ask for; None where they are not given, so that a resumed run keeps its own."""
    from nanorun.model.fast.recipe import Fp8, Recipe

    if fp8 is None and not recompute:
        return None
    mode = cast(Fp8, check_one_of(fp8 or "auto", get_args(Fp8), "setting of fp8"))
    return Recipe(fp8=mode, recompute=recompute)


def check_tools(name: str) -> Any:
    return check_one_of(name, ("calculator", "python", "none"), "tool")


def check_speculation(kind: str | None, draft: str | None) -> Any:
    """--draft implies --speculate draft."""
    kind = kind or ("draft" if draft else None)
    if kind is not None:
        check_one_of(kind, ("lookup", "draft"), "speculation")
    if kind == "draft" and not draft:
        raise UserError("--speculate draft needs --draft, the name of a smaller run with the same tokenizer.")
    return kind


def check_one_of(name: str, choices: tuple[str, ...], what: str) -> str:
    if name not in choices:
        raise UserError(f"There is no {what} '{name}': choose {', '.join(choices[:-1])} or {choices[-1]}.")
    return name
