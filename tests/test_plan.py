"""A plan agrees with the reference table and with kept measurements."""

import json
import math
import re
import time
from dataclasses import replace

import pytest
import torch

from nanorun import hardware
from nanorun.config import Horizon, sample_preset, scale
from nanorun.errors import UserError
from nanorun.hardware import GPUS
from nanorun.model.fast.recipe import Recipe
from nanorun.plan.display import compare_with_plan, plan_record, plan_table
from nanorun.plan.estimate import PlanTooLong, check_duration, make_plan
from nanorun.plan.memory import deepest, largest_batch, memory_gb
from nanorun.plan.speed import measured_mfu

VOCAB = 32768
RECOMPUTE = Recipe(recompute=True)


@pytest.fixture
def none(tmp_path):
    """A folder without measurements."""
    return tmp_path


@pytest.mark.parametrize(
    ("depth", "scaling", "total", "flops_per_token"),
    [
        (12, 110e6, 286e6, 7.6e8),
        (20, 435e6, 897e6, 2.9e9),
        (24, 730e6, 1.38e9, 4.8e9),
        (26, 918e6, 1.68e9, 6.0e9),
    ],
)
def test_sizes_match_the_reference_table(depth, scaling, total, flops_per_token, none):
    record = plan_record(make_plan(scale(depth, VOCAB), "h100", results=none))
    assert record["scaling_parameters"] == pytest.approx(scaling, rel=0.005)
    assert record["total_parameters"] == pytest.approx(total, rel=0.005)
    assert record["flops_per_token"] == pytest.approx(flops_per_token, rel=0.01)
    assert sum(record["parameters"].values()) == record["total_parameters"]


def test_tokens_time_and_cost_follow_from_each_other(none):
    record = plan_record(make_plan(scale(12, VOCAB, horizon=Horizon(ratio=8)), "h100", results=none))
    assert record["tokens"] == record["steps"] * record["batch_tokens"]
    assert record["tokens"] == pytest.approx(8 * record["scaling_parameters"], rel=0.001)
    assert record["flops"] == record["tokens"] * record["flops_per_token"]
    assert record["mfu_assumed"] == 0.40
    assert record["tokens_per_s"] == pytest.approx(0.40 * 989e12 / record["flops_per_token"])
    assert record["minutes"] == pytest.approx(record["tokens"] / record["tokens_per_s"] / 60)
    hours = (record["minutes"] + record["evaluation_minutes"]) / 60
    assert record["cost_dollars"] == pytest.approx(hours * GPUS["h100"].dollars_per_hour)
    assert json.loads(json.dumps(record)) == record


def test_activations_agree_with_a_measurement_of_nanochat():
    """Its d12 at 32 rows peaked at 28.1 GiB; it keeps bf16 logits and embeddings, we do not."""
    parts = memory_gb(scale(12, VOCAB).model, 32, GPUS["h200"], recipe=Recipe(fp8="none"))
    groups = scale(12, VOCAB).model.parameters()
    embeddings = groups["embedding"] + groups["value_embeddings"]
    logits = 32 * 2048 * VOCAB * 2
    states = 8 * embeddings + 16 * groups["head"] + 12 * groups["matrices"]
    assert parts["activations"] + (logits + states) / 2**30 == pytest.approx(28.1, rel=0.04)


def test_memory_has_all_its_parts_and_grows_with_the_rows():
    model = scale(20, VOCAB).model
    one, two = (memory_gb(model, rows, GPUS["h100"]) for rows in (16, 32))
    assert one["weights"] == one["gradients"] == pytest.approx(4 * model.total_parameters / 2**30)
    others = model.total_parameters - model.parameters()["matrices"]
    states = 4 * model.parameters()["matrices"] + 8 * others
    assert one["optimizer"] == pytest.approx(states / 2**30, rel=0.01)
    assert two["activations"] == 2 * one["activations"]
    assert two["weights"] == one["weights"]
    assert memory_gb(model, 16, GPUS["h100"], gpus=8)["optimizer"] == one["optimizer"] / 8
    assert memory_gb(model, 16, GPUS["h100"], recipe=RECOMPUTE)["activations"] < one["activations"] / 3


def test_eight_bits_need_less_where_they_are_the_default():
    model = scale(12, VOCAB).model
    sixteen = memory_gb(model, 16, GPUS["h200"], recipe=Recipe(fp8="none"))
    eight = [memory_gb(model, 16, GPUS["h200"], recipe=Recipe(fp8=fp8)) for fp8 in ("mlp", "layers", "all")]
    activations = [parts["activations"] for parts in (sixteen, *eight)]
    assert activations == sorted(activations, reverse=True)
    assert memory_gb(model, 16, GPUS["h200"]) == eight[-1]
    assert memory_gb(model, 16, GPUS["rtx4090"]) == sixteen, "not tried there"


def test_grouped_heads_and_no_value_embeddings_need_less():
    plain = scale(12, VOCAB).model
    lean = replace(plain, kv_heads=2, value_embeddings=False)
    less, more = (memory_gb(model, 8, GPUS["h100"])["activations"] for model in (lean, plain))
    assert less < more


@pytest.mark.parametrize("gpu", ["h100", "rtx4090", "t4"])
@pytest.mark.parametrize("recompute", [False, True])
def test_the_largest_micro_batch_fits_and_twice_as_many_rows_do_not(gpu, recompute):
    model, card, recipe = scale(12, VOCAB).model, GPUS[gpu], Recipe(recompute=recompute)
    rows = largest_batch(model, card, recipe=recipe)
    assert rows & (rows - 1) == 0
    assert sum(memory_gb(model, rows, card, recipe=recipe).values()) < card.memory_gb
    assert sum(memory_gb(model, 2 * rows, card, recipe=recipe).values()) > 0.94 * card.memory_gb - 1


def test_the_micro_batch_never_exceeds_the_step(none):
    config = scale(12, VOCAB, batch_tokens=2**16)  # 32 rows
    plan = make_plan(config, "b200", gpus=8, results=none)
    assert (plan.device_batch, plan.grad_accum_steps) == (4, 1)
    assert make_plan(config, "b200", device_batch=8, results=none).grad_accum_steps == 4
    with pytest.raises(UserError, match="at most 32"):
        make_plan(config, "b200", gpus=64, results=none)


def test_a_model_that_fits_only_with_recompute_is_planned_with_it(none):
    long = {"context": 16_384}  # one row then keeps more than a model needs as scratch memory
    depth = deepest(GPUS["rtx4090"], recipe=RECOMPUTE, **long)
    assert depth > deepest(GPUS["rtx4090"], **long) > 12
    plan = make_plan(scale(depth, VOCAB, **long), "rtx4090", results=none)
    assert plan.recompute
    assert plan.fits
    assert plan.mfu == pytest.approx(0.75 * 0.40)
    assert "only with recompute" in plan_table(plan)


def test_a_model_that_does_not_fit_gets_a_suggestion(none):
    plan = make_plan(scale(deepest(GPUS["t4"], recipe=RECOMPUTE) + 2, VOCAB), "t4", results=none)
    assert not plan.fits
    assert f"d{deepest(GPUS['t4'], recipe=RECOMPUTE)}" in plan_table(plan)
    too_many = make_plan(scale(12, VOCAB), "t4", device_batch=256, results=none)
    assert not too_many.fits
    assert "--device-batch 32" in plan_table(too_many)


def test_the_deepest_model_grows_with_memory_and_gpus():
    assert deepest(GPUS["t4"]) < deepest(GPUS["a100-40"]) < deepest(GPUS["h100"]) < deepest(GPUS["h200"])
    assert deepest(GPUS["h100"], gpus=8) > deepest(GPUS["h100"])
    assert deepest(replace(GPUS["t4"], memory_gb=1.0)) == 0


def test_a_kept_measurement_replaces_the_assumption(tmp_path):
    def keep(name, **figures):
        record = {"what": "train", "gpu": "NVIDIA H200", "date": "2026-11-20", **figures}
        (tmp_path / f"train-{name}.json").write_text(json.dumps(record))

    keep("d12-h200", depth=12, mfu=0.5)
    keep("d24-h200", depth=24, mfu=0.55)
    keep("d12-h100", depth=12, mfu=0.9, gpu="NVIDIA H100 80GB HBM3")
    keep("other-h200", depth=12, mfu=0.99, what="train-nanochat")
    (tmp_path / "train-broken.json").write_text("{")
    (tmp_path / "train-list.json").write_text("[]")
    plan = make_plan(scale(12, VOCAB), "h200", results=tmp_path)
    assert plan.mfu == 0.5
    assert "train-d12-h200.json" in plan_table(plan)
    assert make_plan(scale(22, VOCAB), "h200", results=tmp_path).mfu == 0.55
    assert measured_mfu(GPUS["a100-80"], 12, tmp_path) is None
    keep("d12-fast-h200", depth=12, mfu=0.6, fp8="all")
    sixteen = {"recipe": Recipe(fp8="none"), "results": tmp_path}
    assert make_plan(scale(12, VOCAB), "h200", results=tmp_path).mfu == 0.6, (
        "in eight bits, where there are any"
    )
    assert make_plan(scale(12, VOCAB), "h200", **sixteen).mfu == 0.5
    keep("d12-newer-h200", depth=12, mfu=0.45, date="2026-12-01")
    assert make_plan(scale(12, VOCAB), "h200", **sixteen).mfu == 0.45


def test_narrow_models_and_several_gpus_are_expected_to_be_slower(none):
    assert make_plan(scale(4, VOCAB), "h100", results=none).mfu == pytest.approx(0.40 / 3)
    assert make_plan(scale(12, VOCAB), "h100", gpus=8, results=none).mfu == pytest.approx(0.40 * 0.94)


def test_the_table_shows_the_main_figures(none):
    text = plan_table(make_plan(scale(24, VOCAB, horizon=Horizon(ratio=8)), "h100", gpus=8, results=none))
    for part in ("d24", "1.38B", "730M", "8 × h100", "activations", "MFU", "$", "May 2026", "micro-batch"):
        assert part in text
    assert max(map(len, text.splitlines())) < 110


def test_a_plan_is_compared_with_the_measured_run(none):
    record = plan_record(make_plan(scale(12, VOCAB), "h200", results=none))
    summary = {"seconds": record["minutes"] * 120, "tokens_per_s": 600_000, "mfu": None, "peak_gib": 30.0}
    rows = {row["what"]: row for row in compare_with_plan(record, summary)}
    assert rows["minutes"]["ratio"] == pytest.approx(2)
    assert rows["tokens/s"]["ratio"] == pytest.approx(600_000 / record["tokens_per_s"])
    assert rows["MFU"] == {"what": "MFU", "planned": record["mfu_assumed"], "happened": None, "ratio": None}
    assert rows["peak memory, GB"]["planned"] == record["memory_gb"]["total"]


def test_gpus_are_found_by_the_names_of_users_and_of_torch():
    assert hardware.named_gpu("RTX 4090") is GPUS["rtx4090"]
    assert hardware.named_gpu("A100_80") is GPUS["a100-80"]
    with pytest.raises(UserError, match=r"'h99'.*h100.*rtx4090"):
        make_plan(scale(12, VOCAB), "h99")
    names = {
        "NVIDIA H100 80GB HBM3": "h100",
        "NVIDIA H100 PCIe": "h100-pcie",
        "NVIDIA H200": "h200",
        "NVIDIA B200": "b200",
        "NVIDIA A100-SXM4-80GB": "a100-80",
        "NVIDIA A100 80GB PCIe": "a100-80",
        "NVIDIA A100-SXM4-40GB": "a100-40",
        "NVIDIA L40S": "l40s",
        "NVIDIA L4": "l4",
        "NVIDIA A10G": "a10g",
        "Tesla T4": "t4",
        "Tesla V100-SXM2-16GB": "v100",
        "NVIDIA GeForce RTX 4090": "rtx4090",
        "NVIDIA GeForce RTX 3090": "rtx3090",
        "NVIDIA GeForce RTX 5090": "rtx5090",
        "AMD Instinct MI300X": "mi300x",
        "Apple M3 Max": "apple",
    }
    for torch_name, name in names.items():
        assert hardware.find_gpu(torch_name) is GPUS[name], torch_name
    for other in (
        "NVIDIA GH200 480GB",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA L40",
        "NVIDIA A10",
        "AMD EPYC",
    ):
        assert hardware.find_gpu(other) is None, other
    assert GPUS["h100"].bf16_tflops == GPUS["h200"].bf16_tflops == 989


def test_the_default_gpu_is_this_machine(none):
    machine = hardware.this_gpu(seconds=0.05)
    assert machine.bf16_tflops > 0
    assert machine.memory_gb > 0
    record = plan_record(make_plan(scale(4, 4096, context=256), machine, results=none))
    assert record["minutes"] > 0
    assert json.loads(json.dumps(record)) == record


def test_a_plan_for_a_cpu_agrees_with_a_measured_step():
    """From the peak of large matmuls it would be a fourth. The machine may be busy, so the best of a few counts."""
    from nanorun.model.gpt import build

    if hardware.detect().device != "cpu":
        pytest.skip("there is a GPU here")
    config = sample_preset(1024)
    model = build(config.model, torch.device("cpu"), torch.float32)
    tokens = torch.randint(0, 1024, (16, 256))

    def ratio() -> float:
        planned = make_plan(config).tokens_per_s
        seconds = []
        for _ in range(4):
            start = time.perf_counter()
            model(tokens, tokens).backward()
            seconds.append(time.perf_counter() - start)
        return planned * sorted(seconds)[1] / tokens.numel()

    assert min(abs(math.log(ratio())) for _ in range(4)) < math.log(1.5)


def test_evaluation_is_planned_with_the_available_text(none):
    config = scale(4, VOCAB)
    all_of_it = make_plan(config, "h100", results=none)
    little = make_plan(config, "h100", results=none, validation_tokens=config.train.eval_tokens // 100)
    assert little.evaluation_minutes == pytest.approx(all_of_it.evaluation_minutes / 100)
    assert little.minutes == all_of_it.minutes


def test_a_plan_that_takes_too_long_is_rejected_with_a_suggestion(none):
    long = make_plan(scale(24, VOCAB), "t4", results=none)
    with pytest.raises(PlanTooLong, match=r"about \d+ d .*--depth (\d+), about \d+ h .*--yes") as refused:
        check_duration(long, 1)
    depth = int(re.search(r"--depth (\d+)", str(refused.value))[1])
    check_duration(make_plan(scale(depth, VOCAB), "t4"), 1)
    tokens = make_plan(scale(24, VOCAB, horizon=Horizon(tokens=10**9)), "t4", results=none)
    with pytest.raises(PlanTooLong, match=r"--tokens (\d+)") as refused:
        check_duration(tokens, 1)
    fewer = int(re.search(r"--tokens (\d+)", str(refused.value))[1])
    check_duration(make_plan(scale(24, VOCAB, horizon=Horizon(tokens=fewer)), "t4", results=none), 1)


def test_invalid_arguments_are_rejected():
    with pytest.raises(UserError, match="at least one"):
        make_plan(scale(12, VOCAB), "h100", gpus=0)
    with pytest.raises(UserError, match="at least one"):
        make_plan(scale(12, VOCAB), "h100", device_batch=0)
