"""Pictures of runs, from their metrics.

One figure of four panels: training loss, validation bits per byte, speed, and the gradient's norm (the
learning rate where no norm was recorded; ChatCORE, where a chat model was asked on the way). For reinforcement
learning: reward, held-out pass@k, the length of replies, and how much chance is left in them. Each measurement
is drawn lightly and its moving median over it; the last value stands at the end of its line, in its colour. A
loss that is NaN, infinite or missing leaves a gap. A run that went back to a checkpoint is drawn once: the last
record of a step is the one that counts.

Text is large enough for a phone and the background is white, so a picture reads the same in light and dark
pages. matplotlib is used through its objects, never pyplot: no global state, no window, any thread.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from nanorun.console import count
from nanorun.errors import UserError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Dash = Literal["-", "--", ":"]
Records = Sequence[Mapping[str, Any]]
Runs = Sequence[tuple[str, Records]]

_COLORS = ("#0072b2", "#d55e00", "#009e73", "#b8528f", "#b07d00", "#3a9fd6", "#444444")  # told apart by all
_DASHES: tuple[Dash, ...] = ("-", "--", ":")  # once the colours are used up
_INK, _FAINT = "#222222", "#8a8a8a"
_MOST_POINTS = 2000  # of a line; a phone has no more pixels, and an SVG stays small
_LABEL_HEIGHT = 13  # points
_SMOOTH, _NOISY = 60, 12  # a moving median reaches over this part of a line, either side
_MOST_LABELS = 6  # in a panel; more would not stand beside their lines
_STYLE: Any = {
    "font.size": 12,
    "axes.titlesize": 13,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": _FAINT,
    "axes.labelcolor": _INK,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e6e6e6",
    "xtick.color": _INK,
    "ytick.color": _INK,
    "text.color": _INK,
    "text.parse_math": False,  # a run's name is no formula
    "svg.hashsalt": "nanorun",  # the same metrics give the same file
}


@dataclass(frozen=True)
class _Line:
    """One value of one run over training."""

    x: np.ndarray
    y: np.ndarray  # NaN where there is a gap
    color: str
    dash: Dash

    @property
    def shown(self) -> np.ndarray:
        return np.flatnonzero(np.isfinite(self.y))


def plot_loss(runs: Runs, path: Path) -> Path:
    """Draws one run, or several to compare, into a .png or .svg file."""
    return _plot(runs, path, _draw)


def plot_reward(runs: Runs, path: Path) -> Path:
    """The same for runs of reinforcement learning."""
    return _plot(runs, path, _draw_reward)


def _plot(runs: Runs, path: Path, draw: Callable[["Figure", Runs], None]) -> Path:
    path = Path(path)
    if path.suffix.lower() not in (".png", ".svg"):
        raise UserError(f"A plot is a .png or a .svg file, and '{path.name}' is neither: choose one of them.")
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UserError("Plots need matplotlib, which is not installed: pip install matplotlib.") from error

    path.parent.mkdir(parents=True, exist_ok=True)
    with rc_context(_STYLE):
        figure = Figure(figsize=(10, 7.2), facecolor="white", layout="constrained")
        figure.get_layout_engine().set(w_pad=0.12, h_pad=0.1)  # type: ignore[union-attr, call-arg]
        draw(figure, runs)
        figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix.lower() == ".svg" else None)
    return path


def _draw(figure: "Figure", runs: Runs) -> None:
    (loss, bpb), (speed, last) = panels = figure.subplots(2, 2)
    steps = [_by_step(records, "step") for _, records in runs]
    evals = [_by_step(records, "eval") for _, records in runs]
    chats = [_by_step(records, "chat") for _, records in runs]
    by_tokens = any("tokens" in record for run in steps + evals for record in run)

    def lines(records: list[list[Mapping[str, Any]]], key: str) -> list[_Line]:
        return [
            _Line(
                _tokens(mine, steps[i]) if by_tokens else np.array([_number(r.get("step")) for r in mine]),
                np.array([_number(record.get(key)) for record in mine], dtype=float),
                _COLORS[i % len(_COLORS)],
                _DASHES[i // len(_COLORS) % len(_DASHES)],
            )
            for i, mine in enumerate(records)
        ]

    losses, norms = lines(steps, "loss"), lines(steps, "grad_norm")
    ends = [
        _panel(loss, "training loss, nats a token", losses, smooth=_SMOOTH),
        _panel(bpb, "validation, bits per byte", lines(evals, "val_bpb")),
        _panel(speed, "tokens per second", lines(steps, "tokens_per_s"), smooth=_SMOOTH),
    ]
    _look_past_the_start(loss, losses)
    if any(chats):
        ends.append(_panel(last, "ChatCORE (1 is all right)", lines(chats, "chatcore")))
    elif any(len(line.shown) for line in norms):
        ends.append(_panel(last, "gradient norm", norms, smooth=_SMOOTH))
        _look_past_the_start(last, norms)
    else:
        ends.append(_panel(last, "learning rate, share of its peak", lines(steps, "lr"), marks=False))
    for axes in (speed, last):
        axes.yaxis.set_major_formatter(lambda value, _: count(value))
        axes.set_ylim(bottom=0)
    if any(chats):
        last.set_ylim(-0.02, 1.02)
    _share_x(list(panels.flat), "tokens" if by_tokens else "steps")
    _name_runs(figure, [name for name, _ in runs], losses)
    figure.draw_without_rendering()  # labels are moved apart on the page, so the page must be laid out
    for axes, values in zip(panels.flat, ends, strict=True):
        if len(values) <= _MOST_LABELS:
            _label_ends(axes, values, count if axes is speed else _digits)


def _draw_reward(figure: "Figure", runs: Runs) -> None:
    (reward, passes), (length, entropy) = panels = figure.subplots(2, 2)
    steps = [_by_step(records, "step") for _, records in runs]
    evals = [_by_step(records, "eval") for _, records in runs]

    def lines(records: list[list[Mapping[str, Any]]], key: str, dash: Dash | None = None) -> list[_Line]:
        return [
            _Line(
                np.array([_number(record.get("step")) for record in mine]),
                np.array([_number(record.get(key)) for record in mine], dtype=float),
                _COLORS[i % len(_COLORS)],
                dash or _DASHES[i // len(_COLORS) % len(_DASHES)],
            )
            for i, mine in enumerate(records)
        ]

    rewards, held_out = lines(steps, "reward"), lines(evals, "val_reward", "--")
    most = max((_passes(record) for run in evals for record in run), default=1)
    ends = [
        _panel(reward, "mean reward (dashed: held out)", rewards, smooth=_NOISY),
        _panel(passes, f"held out: pass@1 (dashed: pass@{most})", lines(evals, "val_pass@1")),
        _panel(length, "tokens in a reply", lines(steps, "length"), smooth=_NOISY),
        _panel(entropy, "entropy, nats a token", lines(steps, "entropy"), smooth=_NOISY),
    ]
    for axes, more in ((reward, held_out), (passes, lines(evals, f"val_pass@{most}", "--"))):
        for line in more:
            axes.plot(
                line.x, line.y, color=line.color, linestyle="--", linewidth=1.5, marker="o", markersize=4
            )
        axes.set_ylim(-0.02, 1.02)
    for axes in (length, entropy):
        axes.set_ylim(bottom=0)
    _share_x(list(panels.flat), "steps")
    _name_runs(figure, [name for name, _ in runs], rewards)
    figure.draw_without_rendering()
    for axes, values in zip(panels.flat, ends, strict=True):
        if len(values) <= _MOST_LABELS:
            _label_ends(axes, values, _digits)


def _passes(record: Mapping[str, Any]) -> int:
    """The largest k of a record's pass@k."""
    return max([int(key[9:]) for key in record if key.startswith("val_pass@")], default=1)


def _panel(
    axes: "Axes", title: str, lines: list[_Line], smooth: int | None = None, marks: bool = True
) -> list[tuple[float, str]]:
    """Draws the lines, smoothed over this part of them either side; returns the last value of each, and its colour."""
    axes.set_title(title, pad=8)
    lines = [line for line in lines if len(line.shown)]
    if not lines:
        axes.text(0.5, 0.5, "not measured", transform=axes.transAxes, ha="center", color=_FAINT)
        axes.tick_params(left=False, labelleft=False)
        axes.grid(visible=False)
    ends = []
    for line in lines:
        many = len(line.shown) > 30
        thin = slice(None, None, max(len(line.x) // _MOST_POINTS, 1))
        y = line.y
        if smooth and many:
            faint = 0.3 if len(lines) == 1 else 0.13
            axes.plot(line.x[thin], y[thin], color=line.color, alpha=faint, linewidth=0.8)
            y = smoothed(y, len(line.shown) // smooth)
        marker = "o" if len(line.shown) == 1 or (marks and not many) else ""
        axes.plot(
            line.x[thin],
            y[thin],
            color=line.color,
            linestyle=line.dash,
            linewidth=2,
            marker=marker,
            markersize=5,
        )
        ends.append((float(y[line.shown[-1]]), line.color))
    return ends


def smoothed(y: np.ndarray, over: int) -> np.ndarray:
    """The median of so many values either side (fewer near the start), which one spike does not move.

    It looks as far ahead as back, so it does not trail behind a loss that falls fast. Gaps stay gaps.
    """
    shown = np.flatnonzero(np.isfinite(y))
    values, out = y[shown], np.full(len(y), np.nan)
    for i, at in enumerate(shown):
        out[at] = np.median(values[max(i - over, 0) : i + min(max(i, 2), over) + 1])
    return out


def _look_past_the_start(axes: "Axes", lines: list[_Line]) -> None:
    """The first steps fall so far, and a spike rises so high, that the rest would look flat: leave them out."""
    tops, bottoms = [], []
    for line in lines:
        y = line.y[line.shown]
        if len(y):
            later = y[len(y) // 25 :] if len(y) > 50 else y
            tops.append(np.quantile(later, 0.995))
            bottoms.append(later.min())
    if tops:
        room = 0.06 * (max(tops) - min(bottoms)) or 0.05 * abs(max(tops)) or 0.5
        axes.set_ylim(min(bottoms) - room, max(tops) + room)


def _label_ends(axes: "Axes", ends: list[tuple[float, str]], show: Callable[[float], str]) -> None:
    """The last value of each line, at the right edge; labels that would touch are moved apart."""
    points = 72 / axes.get_figure(root=True).dpi  # type: ignore[union-attr]
    ends = sorted(ends)
    wanted = [axes.transData.transform((0, y))[1] * points for y, _ in ends]
    placed = list(wanted)
    for _ in range(50):
        for i in range(len(placed) - 1):
            missing = _LABEL_HEIGHT - (placed[i + 1] - placed[i])
            if missing > 0:
                placed[i], placed[i + 1] = placed[i] - missing / 2, placed[i + 1] + missing / 2
    for (y, color), at, place in zip(ends, wanted, placed, strict=True):
        axes.annotate(
            show(y),
            (1, y),
            (4, place - at),
            xycoords=("axes fraction", "data"),
            textcoords="offset points",
            color=color,
            va="center",
            fontsize=11,
            fontweight="bold",
            annotation_clip=False,
        )


def _share_x(panels: list["Axes"], name: str) -> None:
    from matplotlib.ticker import MaxNLocator

    ends = [axes.dataLim.x1 for axes in panels if axes.lines]
    right = max([end for end in ends if np.isfinite(end) and end > 0], default=1.0)
    for axes in panels:
        axes.set_xlim(0, right * 1.02)
        axes.xaxis.set_major_locator(MaxNLocator(nbins=5, steps=[1, 2, 2.5, 5, 10]))
        axes.xaxis.set_major_formatter(lambda value, _: count(value).replace("G", "B"))
        if ends:
            axes.set_xlabel(name, labelpad=2)
        else:
            axes.tick_params(bottom=False, labelbottom=False)


def _name_runs(figure: "Figure", names: list[str], lines: list[_Line]) -> None:
    from matplotlib.lines import Line2D

    if len(names) == 1:
        figure.suptitle(names[0], fontsize=15, fontweight="bold", x=0.01, ha="left")
    elif names:
        keys = [Line2D([], [], color=line.color, linestyle=line.dash, linewidth=3) for line in lines]
        columns = max(min(len(names), 4, 80 // (max(map(len, names)) + 6)), 1)
        figure.legend(keys, names, loc="outside upper left", ncols=columns, frameon=False, fontsize=13)


def _by_step(records: Records, kind: str) -> list[Mapping[str, Any]]:
    """Records of a kind in the order of their steps, the last of each step."""
    last = {record["step"]: record for record in records if record.get("kind") == kind and "step" in record}
    return [last[step] for step in sorted(last)]


def _tokens(records: list[Mapping[str, Any]], steps: list[Mapping[str, Any]]) -> np.ndarray:
    """Tokens trained on at each record; those that do not say lie between the steps that do."""
    known = [(r["step"], r["tokens"]) for r in steps if np.isfinite(_number(r.get("tokens")))]
    at, tokens = ([0, *column] for column in zip(*known, strict=True)) if known else ([0], [0])
    return np.array(
        [
            r["tokens"] if np.isfinite(_number(r.get("tokens"))) else np.interp(r["step"], at, tokens)
            for r in records
        ],
        dtype=float,
    )


def _number(value: Any) -> float:
    """NaN for whatever cannot be drawn."""
    usable = isinstance(value, int | float) and math.isfinite(value)
    return float(value) if usable else math.nan


def _digits(value: float) -> str:
    return f"{value:.3f}" if abs(value) < 100 else count(value)
