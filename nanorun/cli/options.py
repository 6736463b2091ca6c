"""What commands share: common options, their validation, and printing a result."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from nanorun import console
from nanorun.config import Backend, Dtype
from nanorun.errors import UserError
from nanorun.provenance import write_result

if TYPE_CHECKING:
    from nanorun.model.fast.recipe import Recipe

# As nanorun.model.fast.recipe and nanorun.infer have them, which import torch and take a second to load.
Fp8 = Literal["auto", "none", "mlp", "layers", "head", "all"]
Speculation = Literal["lookup", "draft"]

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")]
Replace = Annotated[bool, typer.Option("--replace", help="Replace one of the same name.")]
Depth = Annotated[
    int,
    typer.Option(min=1, max=200, help="Number of layers; sets width, batch size, tokens and learning rates."),
]
OptionalDepth = Annotated[
    int | None,
    typer.Option(
        min=1, max=200, help="Number of layers (default: from the text and --minutes, on a GPU 12)."
    ),
]
OptionalContext = Annotated[
    int | None, typer.Option(min=2, help="Context length (default: 2048, less for a small model).")
]
Minutes = Annotated[
    float | None,
    typer.Option(
        help="Train for about so long, a model that fits the text and the time (on a CPU the default: 10)."
    ),
]
Ratio = Annotated[float | None, typer.Option(help="Train on this many tokens per parameter (default: 10.5).")]
Tokens = Annotated[int | None, typer.Option(help="Train on this many tokens.")]
Flops = Annotated[float | None, typer.Option(help="Train with this many FLOPs, such as 1e18.")]
Steps = Annotated[int | None, typer.Option(min=1, help="Train for this many steps.")]
Context = Annotated[int, typer.Option(min=2, help="Context length: tokens per row.")]
BatchTokens = Annotated[
    int | None, typer.Option(min=1, help="Tokens per step (default: from the training horizon).")
]
DeviceBatch = Annotated[
    int | None, typer.Option(min=1, help="Rows per micro-batch (default: from the memory estimate).")
]
Data = Annotated[str | None, typer.Option(help="The dataset (default: the newest).")]
TokenizerName = Annotated[
    str | None, typer.Option("--tokenizer", help="The tokenizer (default: that of the dataset).")
]
BackendName = Annotated[Backend, typer.Option("--attention", help="Attention backend.")]
DtypeName = Annotated[Dtype, typer.Option("--dtype", help="Compute dtype.")]
Fp8Name = Annotated[
    Fp8 | None,
    typer.Option("--fp8", help="FP8 matmuls (default: auto, which is all on Hopper from width 768 on)."),
]
TaskFiles = Annotated[
    Path | None,
    typer.Option("--task-files", help="Folder of the tasks' files (default: tasks/ in the home)."),
]
Compile = Annotated[bool, typer.Option("--compile/--no-compile", help="Use torch.compile on CUDA.")]
Graphs = Annotated[
    bool, typer.Option("--graphs/--no-graphs", help="Replay micro-batches as a CUDA graph, when compiled.")
]
Deterministic = Annotated[
    bool, typer.Option("--deterministic", help="Bitwise reproducible, a little slower.")
]
Track = Annotated[Literal["wandb", "trackio"] | None, typer.Option(help="Log there as well.")]
Fresh = Annotated[bool, typer.Option("--fresh", help="Delete an existing run of this name and start over.")]
Save = Annotated[Path | None, typer.Option(help="Write the result to this file.")]
Model = Annotated[str | None, typer.Option(help="A run's name (default: the one trained last).")]
ChatModel = Annotated[
    str | None, typer.Option(help="A run's name (default: the chat model trained last, else base model).")
]
Int8 = Annotated[bool, typer.Option("--int8", help="Quantize weights to int8.")]
Tools = Annotated[Literal["calculator", "python", "none"], typer.Option(help="Tool that answers may call.")]
Speculate = Annotated[Speculation | None, typer.Option(help="Speculative decoding.")]
Draft = Annotated[str | None, typer.Option(help="The draft model's run, for --speculate draft.")]


def example(text: str) -> str:
    return f"\b\nExample:\n  {text}"  # \b keeps the line breaks


def show(result: dict[str, Any], as_json: bool, text: str, save: Path | None = None) -> None:
    """Prints the result, after writing it to the file of --save."""
    write_result(result, save)
    if as_json:
        console.show_json(result)
    else:
        console.show(text)


def chosen_recipe(fp8: Fp8 | None, recompute: bool = False) -> "Recipe | None":
    """The recipe that these flags ask for; None where they are not given, so that a resumed run keeps its own."""
    from nanorun.model.fast.recipe import Recipe

    return Recipe(fp8=fp8 or "auto", recompute=recompute) if fp8 is not None or recompute else None


def check_speculation(kind: Speculation | None, draft: str | None) -> Speculation | None:
    """--draft implies --speculate draft."""
    kind = kind or ("draft" if draft else None)
    if kind == "draft" and not draft:
        raise UserError("--speculate draft needs --draft, the name of a smaller run with the same tokenizer.")
    return kind
