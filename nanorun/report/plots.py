"""Plots of a run, from its metrics.

One figure of four panels: training loss, validation bits per byte, throughput, and the gradient norm
(ChatCORE if it was evaluated during training). For reinforcement learning: reward, held-out pass@k, the length of
replies, and their entropy. Each measurement is drawn lightly with its moving median on top; the last value is at
the end of its line. A loss that is NaN, infinite or missing leaves a gap. A run that rolled back to a checkpoint is
drawn once: the last record of a step counts.

Text is large enough for a phone and the background is white, so a plot reads the same on light and dark pages.
The code uses matplotlib's objects, never pyplot: no global state, no window, any thread.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from nanorun.console import count
from nanorun.errors import UserError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Records = Sequence[Mapping[str, Any]]
Ends = dict["Axes", float | None]  # the last value of each panel's line; None if it was not measured

BLUE, ORANGE = "#0072b2", "#d55e00"  # colorblind-safe
_INK, FAINT = "#222222", "#8a8a8a"
_MAX_POINTS = 2000  # per line; a phone has no more pixels, and an SVG stays small
# The moving median covers this fraction of a line on either side.
_SMOOTH, _NOISY = 60, 12
_STYLE: Any = {
    "font.size": 12,
    "axes.titlesize": 13,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": FAINT,
    "axes.labelcolor": _INK,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e6e6e6",
    "xtick.color": _INK,
    "ytick.color": _INK,
    "text.color": _INK,
    "text.parse_math": False,  # a run's name is not a formula
    "svg.hashsalt": "nanorun",  # the same metrics give the same file
}


class _Line:
    """One value over training."""

    def __init__(self, records: Records, key: str, x: str = "tokens") -> None:
        self.x, self.y = _values(records, x), _values(records, key)  # NaN where there is a gap
        self.finite = np.flatnonzero(np.isfinite(self.y))


def check_suffix(path: Path) -> None:
    if path.suffix.lower() not in (".png", ".svg"):
        raise UserError(f"A plot is a .png or a .svg file, and '{path.name}' is neither: choose one of them.")


@contextmanager
def new_figure(path: Path, size: tuple[float, float]) -> Iterator["Figure"]:
    """A figure to draw in, saved to the path at the end of the block."""
    check_suffix(path)
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UserError("Plots need matplotlib, which is not installed: pip install matplotlib.") from error

    path.parent.mkdir(parents=True, exist_ok=True)
    with rc_context(_STYLE):
        figure = Figure(figsize=size, facecolor="white", layout="constrained")
        yield figure
        figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix.lower() == ".svg" else None)


def plot_loss(name: str, records: Records, path: Path) -> Path:
    """Plots a run to a .png or .svg file."""
    with new_figure(path, (10, 7.2)) as figure:
        (loss, bpb), (speed, last) = figure.subplots(2, 2)
        steps, evals, chats = (_by_step(records, kind) for kind in ("step", "eval", "chat"))
        losses, norms = _Line(steps, "loss"), _Line(steps, "grad_norm")
        ends = {
            loss: _draw_panel(loss, "training loss, nats a token", losses, smooth=_SMOOTH),
            bpb: _draw_panel(bpb, "validation, bits per byte", _Line(evals, "val_bpb")),
            speed: _draw_panel(speed, "tokens per second", _Line(steps, "tokens_per_s"), smooth=_SMOOTH),
        }
        _clip_outliers(loss, losses)
        if chats:
            ends[last] = _draw_panel(last, "ChatCORE (1 is all right)", _Line(chats, "chatcore"))
        else:
            ends[last] = _draw_panel(last, "gradient norm", norms, smooth=_SMOOTH)
            _clip_outliers(last, norms)
        for axes in (speed, last):
            axes.yaxis.set_major_formatter(lambda value, _: count(value))
            axes.set_ylim(bottom=0)
        if chats:
            last.set_ylim(-0.02, 1.02)
        _finish(figure, name, ends, "tokens", counts=speed)
    return path


def plot_reward(name: str, records: Records, path: Path) -> Path:
    """The same for a run of reinforcement learning."""
    with new_figure(path, (10, 7.2)) as figure:
        (reward, passes), (length, entropy) = figure.subplots(2, 2)
        steps, evals = (_by_step(records, kind) for kind in ("step", "eval"))
        ks = [int(key[9:]) for record in evals for key in record if key.startswith("val_pass@")]
        k = max(ks, default=1)
        rewards, lengths, entropies = (_Line(steps, key, "step") for key in ("reward", "length", "entropy"))
        pass_at_1 = _Line(evals, "val_pass@1", "step")
        ends = {
            reward: _draw_panel(reward, "mean reward (dashed: held out)", rewards, smooth=_NOISY),
            passes: _draw_panel(passes, f"held out: pass@1 (dashed: pass@{k})", pass_at_1),
            length: _draw_panel(length, "tokens in a reply", lengths, smooth=_NOISY),
            entropy: _draw_panel(entropy, "entropy, nats a token", entropies, smooth=_NOISY),
        }
        for axes, key in ((reward, "val_reward"), (passes, f"val_pass@{k}")):
            style: Any = {"linestyle": "--", "linewidth": 1.5, "marker": "o", "markersize": 4}
            axes.plot(_values(evals, "step"), _values(evals, key), color=BLUE, **style)
            axes.set_ylim(-0.02, 1.02)
        for axes in (length, entropy):
            axes.set_ylim(bottom=0)
        _finish(figure, name, ends, "steps")
    return path


def _draw_panel(axes: "Axes", title: str, line: _Line, smooth: int | None = None) -> float | None:
    """Draws the line, with a moving median over 1/`smooth` of it on either side, and returns its last value."""
    axes.set_title(title, pad=8)
    if not len(line.finite):
        axes.text(0.5, 0.5, "not measured", transform=axes.transAxes, ha="center", color=FAINT)
        axes.tick_params(left=False, labelleft=False)
        axes.grid(visible=False)
        return None
    many = len(line.finite) > 30
    thin = slice(None, None, max(len(line.x) // _MAX_POINTS, 1))
    y = line.y
    if smooth and many:
        axes.plot(line.x[thin], y[thin], color=BLUE, alpha=0.3, linewidth=0.8)
        y = moving_median(y, len(line.finite) // smooth)
    marker = "" if many else "o"
    axes.plot(line.x[thin], y[thin], color=BLUE, linewidth=2, marker=marker, markersize=5)
    return float(y[line.finite[-1]])


def moving_median(y: np.ndarray, radius: int) -> np.ndarray:
    """The median of `radius` values on either side (fewer near the start), which one spike does not move.

    The window is centered, so it does not lag behind a loss that falls fast. Gaps stay gaps.
    """
    finite = np.flatnonzero(np.isfinite(y))
    values, out = y[finite], np.full(len(y), np.nan)
    for i, at in enumerate(finite):
        out[at] = np.median(values[max(i - radius, 0) : i + min(max(i, 2), radius) + 1])
    return out


def _clip_outliers(axes: "Axes", line: _Line) -> None:
    """Leaves the first steps and spikes out of the y range: they would make the rest look flat."""
    y = line.y[line.finite]
    if len(y):
        later = y[len(y) // 25 :] if len(y) > 50 else y
        bottom, top = later.min(), np.quantile(later, 0.995)
        margin = 0.06 * (top - bottom) or 0.05 * abs(top) or 0.5
        axes.set_ylim(bottom - margin, top + margin)


def _finish(figure: "Figure", name: str, ends: Ends, x_label: str, counts: "Axes | None" = None) -> None:
    """The x axis, the name of the run, and the last value of each line (as a count in the panel `counts`)."""
    from matplotlib.ticker import MaxNLocator

    last_x = [axes.dataLim.x1 for axes in ends if axes.lines]
    right = max([x for x in last_x if np.isfinite(x) and x > 0], default=1.0)
    for axes in ends:
        axes.set_xlim(0, right * 1.02)
        axes.xaxis.set_major_locator(MaxNLocator(nbins=5, steps=[1, 2, 2.5, 5, 10]))
        axes.xaxis.set_major_formatter(lambda value, _: count(value).replace("G", "B"))
        if last_x:
            axes.set_xlabel(x_label, labelpad=2)
        else:
            axes.tick_params(bottom=False, labelbottom=False)
    figure.suptitle(name, fontsize=15, fontweight="bold", x=0.01, ha="left")
    figure.get_layout_engine().set(w_pad=0.12, h_pad=0.1)  # type: ignore[union-attr, call-arg]
    figure.draw_without_rendering()  # a layout without the labels, which may hang over the edge
    for axes, value in ends.items():
        if value is not None:
            axes.annotate(
                count(value) if axes is counts else _digits(value),
                (1, value),
                (4, 0),
                xycoords=("axes fraction", "data"),
                textcoords="offset points",
                color=BLUE,
                va="center",
                fontsize=11,
                fontweight="bold",
                annotation_clip=False,
            )


def _by_step(records: Records, kind: str) -> Records:
    """Records of a kind in the order of their steps, the last of each step."""
    last = {record["step"]: record for record in records if record.get("kind") == kind and "step" in record}
    return [last[step] for step in sorted(last)]


def _values(records: Records, key: str) -> np.ndarray:
    return np.array([_number(record.get(key)) for record in records], dtype=float)


def _number(value: Any) -> float:
    """NaN for a value that cannot be drawn."""
    is_drawable = isinstance(value, int | float) and math.isfinite(value)
    return float(value) if is_drawable else math.nan


def _digits(value: float) -> str:
    return f"{value:.3f}" if abs(value) < 100 else count(value)
