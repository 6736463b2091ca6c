"""`bench infer` reports what was really done."""

from dataclasses import replace

import pytest

from nanorun import hardware
from nanorun.bench import infer
from nanorun.errors import UserError


@pytest.mark.parametrize("speculate", [None, "lookup", "draft"])
def test_every_batch_size_gives_one_row(speculate):
    workload = infer.InferenceWorkload(
        (1, 3), prompt_tokens=20, new_tokens=6, int8=speculate == "lookup", speculate=speculate
    )
    result = infer.bench_infer(1, None, workload)
    assert (result["what"], result["depth"], result["prompt"]) == ("infer", 1, 20)
    assert [row["batch"] for row in result["rows"]] == [1, 3]
    for row in result["rows"]:
        assert row["ttft_ms"] > 0
        assert row["tokens_per_s"] > 0.9 * row["batch"] * 1e3 / row["ms_per_step"]
        assert ("acceptance" in row) == (speculate is not None)


def test_bytes_of_a_step_are_the_matrices_and_the_visible_keys(monkeypatch):
    from nanorun.config import scale_model
    from nanorun.infer.model import inference_copy
    from nanorun.model.gpt import build

    machine = replace(hardware.GPUS["h200"], bandwidth_tb_s=1e-6)  # a megabyte a second
    monkeypatch.setattr(hardware, "this_gpu", lambda: machine)
    import torch

    config = scale_model(4, 1000, 2048, dim=128, heads=4, kv_heads=2)
    weights = inference_copy(build(config, torch.device("cpu"), torch.float32))
    workload = infer.InferenceWorkload(prompt_tokens=1024, new_tokens=1)
    layer = 128 * 128 * 2 + 2 * 128 * 64 + 8 * 128 * 128
    gates = 16 * 128  # two layers have value gates: two rows, padded to sixteen
    keys = 3 * 512 + 1025
    bytes_read = 4 * (4 * layer + 2 * gates + 1024 * 128) + 7 * keys * 2 * 2 * 32 * 4
    assert infer._mbu(weights, 7, workload, 1.0) == pytest.approx(bytes_read / 1e6)


def test_a_prompt_that_exceeds_the_context_is_rejected():
    with pytest.raises(UserError, match="do not fit"):
        infer.bench_infer(1, None, infer.InferenceWorkload(prompt_tokens=2000, new_tokens=100))


def test_too_few_tokens_are_rejected_early_and_the_suggested_number_suffices(monkeypatch):
    wanted = infer.InferenceWorkload(
        (3,), prompt_tokens=300, new_tokens=3
    )  # on a CPU they are read one a step
    if hardware.detect().device != "cpu":
        pytest.skip("there is a GPU here")
    with monkeypatch.context() as patch:
        patch.setattr(infer, "build", None)
        with pytest.raises(UserError, match="choose --new 4"):
            infer.bench_infer(1, None, wanted)
    assert infer.bench_infer(1, None, replace(wanted, new_tokens=4))["rows"][0]["batch"] == 3


def test_rows_are_reported_as_they_are_measured(capsys):
    infer.bench_infer(1, None, infer.InferenceWorkload((1, 2), prompt_tokens=8, new_tokens=4))
    told = capsys.readouterr().err.splitlines()
    assert [line[:6] for line in told] == ["timing", "    " + told[1][4:6], "timing", "    " + told[3][4:6]]
    assert "tokens/s" in told[1]
