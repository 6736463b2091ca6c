"""On a GPU a run learns in sixteen bits as in fp32, and a bad step is skipped there without a wait."""

from pathlib import Path

import pytest
import torch
from small_home import make_home, small

from nanorun.runs import Run, read_metrics
from nanorun.train import base, loop
from nanorun.train.base import BaseOptions


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device here")
    return make_home(tmp_path_factory.mktemp("home"))


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_sixteen_bits_learn_as_fp32_does(world, monkeypatch, dtype):
    monkeypatch.setenv("NANORUN_HOME", str(world))
    losses = {}
    for kind in ("fp32", dtype):
        options = BaseOptions(name=f"as-{kind}", fresh=True, dtype=kind, samples=2, compile=kind != "fp32")
        summary = base.train_base(small(30), options)
        losses[kind] = [r["loss"] for r in read_metrics(world / "runs" / f"as-{kind}") if r["kind"] == "step"]
        assert summary["samples"][0]["text"]
    # Only the first steps: then rounding is amplified (Adam makes full steps of gradients that are zero at first).
    assert losses[dtype][:3] == pytest.approx(losses["fp32"][:3], abs=0.02)
    assert losses[dtype][-1] < 3.0 < losses[dtype][0]


@pytest.mark.parametrize("graphs", [False, True])
def test_a_bad_step_is_skipped_on_the_device_without_a_wait(world, monkeypatch, graphs):
    monkeypatch.setenv("NANORUN_HOME", str(world))
    config = small()
    with Run.open(f"skips-{graphs}", config.to_dict(), fresh=True) as run:
        t = base.assemble(config, run, BaseOptions(graphs=graphs), None)
        with t.loader:
            for _ in range(4):  # of one micro-batch each: by then it is recorded
                loop.train_step(t)
            assert (t.graphed is not None and t.graphed.graph is not None) == graphs
            before = [p.detach().clone() for p in t.model.parameters()]
            with torch.no_grad():
                t.model.head.weight.mul_(float("nan"))
            if t.fast is not None:
                t.fast.refresh()
            assert loop.train_step(t).verdict == "skip"
            with torch.no_grad():
                head = next(p for name, p in zip(names(t), before, strict=True) if name == "head.weight")
                t.model.head.weight.copy_(head)
            if t.fast is not None:
                t.fast.refresh()
            assert all(torch.equal(p, q) for p, q in zip(t.model.parameters(), before, strict=True))
            assert loop.train_step(t).verdict == "ok"


def names(t: loop.Training) -> list[str]:
    return [name for name, _ in t.model.named_parameters()]
