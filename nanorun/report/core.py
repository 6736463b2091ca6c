"""A picture of a CORE evaluation: what each task gave, and the whole beside GPT-2's four sizes."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nanorun.errors import UserError
from nanorun.report.plots import _COLORS, _FAINT, _STYLE

OURS, THEIRS, BELOW = _COLORS[0], "#b5b5b5", _COLORS[1]


def plot_core(result: Mapping[str, Any], path: Path) -> Path:
    """Draws a result of `eval core` into a .png or .svg file."""
    check_suffix(path)
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UserError("Plots need matplotlib, which is not installed: pip install matplotlib.") from error

    path.parent.mkdir(parents=True, exist_ok=True)
    with rc_context(_STYLE):
        tall = 1.6 + 0.3 * len(result["tasks"])
        figure = Figure(figsize=(11, max(tall, 4)), facecolor="white", layout="constrained")
        few = f", at most {result['max_per_task']} examples a task" if result["max_per_task"] else ""
        figure.suptitle(f"CORE of {result['model']}{few}", fontsize=15, fontweight="bold", x=0.01, ha="left")
        whole = result["core"] is not None
        panels = figure.subplots(1, 2 if whole else 1, width_ratios=[3, 2] if whole else None, squeeze=False)[
            0
        ]
        _draw_tasks(panels[0], list(result["tasks"].values()))
        if whole:
            _draw_whole(panels[1], result)
        figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix.lower() == ".svg" else None)
    return path


def check_suffix(path: Path) -> None:
    if path.suffix.lower() not in (".png", ".svg"):
        raise UserError(f"A plot is a .png or a .svg file, and '{path.name}' is neither: choose one of them.")


def _draw_tasks(axes: Any, tasks: list[Mapping[str, Any]]) -> None:
    values = [task["centred"] for task in tasks]
    errors = [task["standard_error"] / (1 - task["baseline"]) for task in tasks]
    colors = [OURS if value >= 0 else BELOW for value in values]
    axes.barh(range(len(tasks)), values, xerr=errors, color=colors, error_kw={"ecolor": _FAINT})
    axes.set_yticks(range(len(tasks)), [task["name"] for task in tasks], fontsize=11)
    axes.invert_yaxis()
    axes.axvline(0, color=_FAINT, linewidth=1)
    axes.grid(visible=False, axis="y")
    axes.set_title("centred accuracy, ± one standard error", pad=8)
    for i, value in enumerate(values):
        below = value < 0
        at, aside, side = (value - errors[i], -4, "right") if below else (value + errors[i], 4, "left")
        shown = {"textcoords": "offset points", "va": "center", "ha": side, "fontsize": 10}
        axes.annotate(f"{value:.3f}", (at, i), (aside, 0), **shown)
    axes.margins(x=0.18)


def _draw_whole(axes: Any, result: Mapping[str, Any]) -> None:
    own = str(result["model"]).replace("-", "-\n")  # beside its neighbours', a long name needs lines
    names = [*(f"GPT-2\n{size}" for size in result["gpt2"]), own]
    values = [*result["gpt2"].values(), result["core"]]
    errors = [*[0.0] * len(result["gpt2"]), result["core_standard_error"]]
    colors = [*[THEIRS] * len(result["gpt2"]), OURS]
    axes.bar(range(len(values)), values, yerr=errors, color=colors, error_kw={"ecolor": _FAINT})
    axes.set_xticks(range(len(values)), names, fontsize=11)
    axes.grid(visible=False, axis="x")
    axes.axhline(0, color=_FAINT, linewidth=1)
    axes.set_title("CORE", pad=8)
    for i, value in enumerate(values):
        end, aside, side = (value - errors[i], -3, "top") if value < 0 else (value + errors[i], 3, "bottom")
        shown = {"textcoords": "offset points", "ha": "center", "va": side, "fontsize": 11}
        axes.annotate(f"{value:.4f}", (i, end), (0, aside), **shown)
    axes.margins(y=0.12)
