"""The plot of a CORE evaluation: the score of each task, and the total next to GPT-2's four sizes."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nanorun.report.plots import BLUE, FAINT, ORANGE, new_figure

OURS, THEIRS, BELOW_BASELINE = BLUE, "#b5b5b5", ORANGE


def plot_core(result: Mapping[str, Any], path: Path) -> Path:
    """Plots a result of `eval core` to a .png or .svg file."""
    tasks, complete = list(result["tasks"].values()), result["core"] is not None
    with new_figure(path, (11, max(1.6 + 0.3 * len(tasks), 4))) as figure:
        cap = f", at most {result['max_per_task']} examples a task" if result["max_per_task"] else ""
        figure.suptitle(f"CORE of {result['model']}{cap}", fontsize=15, fontweight="bold", x=0.01, ha="left")
        widths = [3, 2] if complete else [1]
        panels = figure.subplots(1, len(widths), width_ratios=widths, squeeze=False)[0]
        _draw_tasks(panels[0], tasks)
        if complete:
            _draw_total(panels[1], result)
    return path


def _draw_tasks(axes: Any, tasks: Sequence[Mapping[str, Any]]) -> None:
    values = [task["centred"] for task in tasks]
    errors = [task["standard_error"] / (1 - task["baseline"]) for task in tasks]
    colors = [OURS if value >= 0 else BELOW_BASELINE for value in values]
    bars = axes.barh(range(len(tasks)), values, xerr=errors, color=colors, error_kw={"ecolor": FAINT})
    axes.bar_label(bars, fmt="%.3f", padding=4, fontsize=10)
    axes.set_yticks(range(len(tasks)), [task["name"] for task in tasks], fontsize=11)
    axes.invert_yaxis()
    axes.axvline(0, color=FAINT, linewidth=1)
    axes.grid(visible=False, axis="y")
    axes.set_title("centred accuracy, ± one standard error", pad=8)
    axes.margins(x=0.18)


def _draw_total(axes: Any, result: Mapping[str, Any]) -> None:
    own_name = str(result["model"]).replace("-", "-\n")  # a long name needs several lines
    names = [*(f"GPT-2\n{size}" for size in result["gpt2"]), own_name]
    values = [*result["gpt2"].values(), result["core"]]
    errors = [*[0.0] * len(result["gpt2"]), result["core_standard_error"]]
    colors = [*[THEIRS] * len(result["gpt2"]), OURS]
    bars = axes.bar(range(len(values)), values, yerr=errors, color=colors, error_kw={"ecolor": FAINT})
    axes.bar_label(bars, fmt="%.4f", padding=3, fontsize=11)
    axes.set_xticks(range(len(values)), names, fontsize=11)
    axes.grid(visible=False, axis="x")
    axes.axhline(0, color=FAINT, linewidth=1)
    axes.set_title("CORE", pad=8)
    axes.margins(y=0.12)
