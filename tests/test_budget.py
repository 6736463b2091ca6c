"""The budget adds up to what was measured once, knows kernels by their names, and the bench knows its levers."""

import importlib.util
from dataclasses import fields
from pathlib import Path

import pytest

from nanorun.bench.budget import PARTS, part_of, predict
from nanorun.config import scale_model
from nanorun.model.fast.recipe import Recipe

TOKENS = (32_768, 524_288)  # of a micro-batch, of a step


def test_the_predicted_time_of_a_d12_in_bf16_is_slightly_below_the_measured_one():
    predicted = predict(scale_model(12, 32_768), *TOKENS)
    assert set(predicted) <= set(PARTS)
    measured = 1e9 / 608_336  # benchmarks/results/train-d12-bf16-h200.json
    assert 0.85 * measured < sum(predicted.values()) < measured
    assert predicted["matmuls"] == pytest.approx(939, rel=0.01)


def test_every_further_fp8_setting_is_predicted_to_be_faster():
    sums = [
        sum(predict(scale_model(12, 32_768), *TOKENS, Recipe(fp8=way)).values())
        for way in ("none", "mlp", "layers", "head", "all")
    ]
    assert sums == sorted(sums, reverse=True)


@pytest.mark.parametrize(
    ("kernel", "part"),
    [
        ("nvjet_tst_192x192_64x3_2x1_v_bz_coopB_TNN", "matmuls"),
        ("void cublasLt::splitKreduce_kernel<32, 16>", "matmuls"),
        ("kernel_cutlass_flash_attncuteflash_bwd_sm90", "attention"),
        ("triton_poi_fused__to_copy_pow_relu_2", "ReLU²"),
        ("_relu2_backward_kernel", "ReLU²"),
        ("_relu2_scale_kernel", "ReLU²"),
        (
            "kernel_cutlass_kernel_quackepiloguefrontendGemmMod_mixed_residual_8bea0c2__c_tile_scalar",
            "matmuls",
        ),
        ("_gated_embedding_backward_kernel", "embeddings"),
        ("_embedding_grad_kernel", "embeddings"),
        ("_quantize_kernel", "quantizing"),
        ("_amax_kernel", "quantizing"),
        ("_qkv_amax_kernel", "quantizing"),
        ("_residual_norm_kernel", "norms and residual stream"),
        ("_residual_norm_backward_kernel", "norms and residual stream"),
        ("_softcap_loss_kernel", "loss"),
        ("_softcap_loss_grad_fp8_kernel", "loss"),
        ("_rope_norm_backward_fp8_kernel", "rotary and qk norm"),
        (
            "void at::native::vectorized_elementwise_kernel<4, CUDAFunctor_add<float>>",
            "gradient accumulation",
        ),
    ],
)
def test_kernels_are_classified_by_name(kernel, part):
    assert part_of(kernel) == part


def test_every_variant_of_the_benchmark_changes_existing_fields():
    path = Path(__file__).resolve().parents[1] / "benchmarks" / "speed.py"
    spec = importlib.util.spec_from_file_location("speed", path)
    speed = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(speed)
    known = {field.name for field in fields(Recipe)} | {"options", "without_flash"}
    for changes in (speed.ALL_ON, *speed.LEVERS.values()):
        assert changes.keys() <= known
    assert set(speed.PROFILED) <= speed.LEVERS.keys()
