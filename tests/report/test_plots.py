"""Pictures of runs are made from whatever a run has written, and show it."""

import math

import numpy as np
import pytest

from nanorun.errors import UserError

matplotlib = pytest.importorskip("matplotlib")
from nanorun.report.plots import moving_median, plot_loss, plot_reward  # noqa: E402

BLUE = (0x00, 0x72, 0xB2)


def metrics(steps: int = 200, batch: int = 524_288, floor: float = 3.0) -> list[dict]:
    noise = np.random.default_rng(0).normal(size=steps + 1)
    records: list[dict] = []
    for step in range(1, steps + 1):
        records.append(
            {
                "kind": "step",
                "step": step,
                "loss": floor + 7 * math.exp(-step / 20) + 0.05 * noise[step],
                "tokens": step * batch,
                "seconds": float(step),
                "tokens_per_s": 500_000.0,
                "mfu": 0.4,
                "lr_scale": min(1.0, step / 40),
                "grad_norm": 0.5,
            }
        )
        if step % 50 == 0:
            records.append(
                {
                    "kind": "eval",
                    "step": step,
                    "tokens": step * batch,
                    "val_bpb": 1 + 1 / step,
                    "val_loss": 3.4,
                }
            )
    return records


def pixels(path):
    import matplotlib.image

    picture = matplotlib.image.imread(path)
    return (picture[..., :3] * 255).round().astype(int)


def colors(path) -> int:
    return len(np.unique(pixels(path) @ [1 << 16, 1 << 8, 1]))


def amount(path, color) -> int:
    return int((np.abs(pixels(path) - color).max(axis=-1) < 12).sum())


def test_chatcore_is_plotted_if_it_was_evaluated_during_training(tmp_path):
    looks = [
        {"kind": "chat", "step": step, "tokens": step, "chatcore": step / 250} for step in (50, 100, 150, 200)
    ]
    drawn = plot_loss("sft", [*metrics(), *looks], tmp_path / "chat.svg").read_text()
    assert "<!-- ChatCORE (1 is all right) -->" in drawn
    assert "<!-- 0.800 -->" in drawn, "the last value stands at the end of its line"
    assert "ChatCORE" not in plot_loss("sft", metrics(), tmp_path / "none.svg").read_text()


def test_a_run_is_plotted_on_a_white_background(tmp_path):
    path = plot_loss("d12", metrics(), tmp_path / "new" / "loss.png")
    picture = pixels(path)
    assert picture.shape[0] > 700
    assert picture.shape[1] > 1000
    assert colors(path) > 20
    assert (picture[0, 0] == 255).all()
    assert amount(path, BLUE) > 2000  # four lines and their labels


def test_a_long_name_and_one_like_a_formula_are_drawn_unchanged(tmp_path):
    for name in ("a run with quite a long name " * 3, "_odd $name$"):
        assert plot_loss(name, metrics(), tmp_path / "name.png").is_file()


def test_svg_is_the_same_for_the_same_metrics(tmp_path):
    first = plot_loss("d12", metrics(), tmp_path / "a.svg").read_text()
    again = plot_loss("d12", metrics(), tmp_path / "b.svg").read_text()
    assert first.lstrip().startswith("<?xml")
    assert "#0072b2" in first
    assert first == again


@pytest.mark.parametrize(
    "records",
    [
        [],
        [{"kind": "other", "step": 1}],
        metrics(1),
        [{"kind": "eval", "step": 0, "tokens": 0, "val_bpb": 3.1}],
        [{"kind": "step", "step": 1, "loss": None, "tokens": 10}],
        [{"kind": "step", "step": s, "loss": 2.0, "tokens": s} for s in range(100)],
    ],
    ids=["empty", "nothing known", "one step", "only an eval", "only a gap", "constant"],
)
@pytest.mark.filterwarnings("error")
def test_few_or_no_records_are_plotted_without_warnings(records, tmp_path):
    path = plot_loss("run", records, tmp_path / "plot.png")
    assert colors(path) > 5


@pytest.mark.filterwarnings("error")
def test_non_finite_losses_leave_a_gap(tmp_path):
    whole = metrics(300)
    broken = [dict(record) for record in whole]
    bad = [math.nan, None, math.inf]
    for i, record in enumerate(broken):
        if 100 < record["step"] < 280 and record["kind"] == "step":
            record["loss"] = bad[i % 3]
    without = plot_loss("run", broken, tmp_path / "gap.png")
    assert amount(without, BLUE) < amount(plot_loss("run", whole, tmp_path / "whole.png"), BLUE)


def test_steps_repeated_after_a_resume_count_once(tmp_path):
    spoiled = [{**record, "loss": 50.0} for record in metrics() if record["step"] > 100]
    once = plot_loss("run", metrics(), tmp_path / "once.png")
    again = plot_loss("run", spoiled + metrics(), tmp_path / "again.png")
    assert (pixels(once) == pixels(again)).all()


def test_an_unknown_suffix_is_rejected_with_the_known_ones(tmp_path):
    with pytest.raises(UserError, match=r"\.png or a \.svg"):
        plot_loss("run", metrics(), tmp_path / "loss.jpeg")
    assert not list(tmp_path.iterdir())


def test_smoothing_keeps_gaps_ignores_spikes_and_does_not_lag():
    y = np.linspace(10, 0, 101)
    np.testing.assert_allclose(moving_median(y, 5)[5:-5], y[5:-5])
    y[50], y[70] = math.nan, 1000
    smooth = moving_median(y, 5)
    assert np.isnan(smooth[50])
    assert np.nanmax(smooth) <= 10


def rewards(steps: int = 120) -> list[dict]:
    noise = np.random.default_rng(1).normal(size=steps + 1)
    records: list[dict] = [
        {"kind": "eval", "step": 0, "val_reward": 0.3, "val_pass@1": 0.3, "val_pass@8": 0.9}
    ]
    for step in range(1, steps + 1):
        share = 0.9 - 0.6 * math.exp(-step / 30)
        figures = {"reward": share + 0.05 * noise[step], "length": 40.0, "entropy": 1 - share, "kl": None}
        records.append({"kind": "step", "step": step, **figures})
        if step % 40 == 0:
            records.append(
                {"kind": "eval", "step": step, "val_reward": share, "val_pass@1": share, "val_pass@8": 0.95}
            )
    return records


def test_rewards_are_plotted_with_or_without_records(tmp_path):
    one = plot_reward("rl", rewards(), tmp_path / "one.png")
    assert amount(one, BLUE) > 2000
    empty = plot_reward("none yet", [], tmp_path / "empty.svg")
    assert empty.stat().st_size > 1000
