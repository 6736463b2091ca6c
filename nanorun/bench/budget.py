"""Where the nanoseconds of a token go: what they should be, by arithmetic, and what they are, by a profile.

`predict` counts each part of a training step twice over: floating-point operations of the matmuls over the rate
at which this shape of matmul was measured to run, and bytes that the rest must move at least over the measured
bandwidth. `measure` runs the micro-batches of one step under torch's profiler and sorts kernels into the same parts
by their names; the update is timed by itself. The difference, part by part, is the list of what to do next.

Rates are an H200's (benchmarks/speed.py measures them anew). On another GPU only the proportions mean anything.
"""

import re
import time
from collections import defaultdict
from itertools import islice
from typing import Any

import torch

from nanorun.config import ModelConfig
from nanorun.data.loader import to_device
from nanorun.model.fast.recipe import PLAIN_RECIPE, Recipe
from nanorun.optim import schedules
from nanorun.train import loop

# TFLOP/s at 768 wide, mean of the three passes, by matrix: cuBLAS in bf16 and fp8, and model/kernels/gemm.
RATES = {
    "qkv": (726, 1219, 1387),
    "out": (646, 1038, 1038),
    "up": (730, 1197, 1400),
    "down": (771, 1422, 1417),
    "head": (618, 1056, 1462),
}
WIDE_RATES = (790, 1450, 1450)  # where it is wider: nearer to a square's
BANDWIDTH = 4.26e12  # bytes a second, of a copy on the device
# A token and head of 128, both ways, FlashAttention-4, context 2,048.
ATTENTION_NS = {"short": 2.90, "long": 4.17}
MUON_TFLOPS = 600
CHUNK_TOKENS = 8_192  # of the loss
LOOK = 2 / 8  # bytes read of a number in a gradient for its scale: of every eighth row (model/kernels/fp8)
HEAD_START = 100_000_000  # cycles, about 50 ms

PARTS = tuple(
    "matmuls, attention, rotary and qk norm, ReLU², norms and residual stream, quantizing, loss, embeddings, "
    "gradient accumulation, casts, update, other, GPU waits".split(", ")
)


def predict(
    config: ModelConfig, micro_tokens: int, step_tokens: int, recipe: Recipe = PLAIN_RECIPE
) -> dict[str, float]:
    """Nanoseconds a token, by part, for micro-batches and steps of this many tokens. What it cannot know (waits, the
    rest) it leaves out."""
    dim, depth, vocab = config.dim, config.depth, config.padded_vocab
    kv_dim, hidden = config.kv_heads * config.head_dim, config.mlp_ratio * config.dim
    eight = {
        "none": (),
        "mlp": ("up", "down"),
        "layers": ("up", "down", "qkv"),
        "head": ("up", "down", "qkv"),
        "all": ("up", "down", "qkv", "head"),
    }[recipe.fp8]
    parameters = {
        "qkv": depth * dim * (dim + 2 * kv_dim),
        "out": depth * dim * dim,
        "up": depth * dim * hidden,
        "down": depth * dim * hidden,
        "head": vocab * dim,
    }
    kind = 2 if recipe.pingpong else 1
    matmuls = sum(
        6 * count / ((RATES[name] if dim <= 1024 else WIDE_RATES)[kind if name in eight else 0] * 1e12)
        for name, count in parameters.items()
    )
    if recipe.fp8 == "head":  # two of its three products, by cuBLAS
        low, high, _ = RATES["head"] if dim <= 1024 else WIDE_RATES
        matmuls -= 4 * parameters["head"] * (1 / low - 1 / high) / 1e12
    attention = sum(
        config.heads
        * config.head_dim
        / 128
        * ATTENTION_NS["long" if config.window(layer) >= config.context else "short"]
        for layer in range(depth)
    )
    tables = 1 + sum(config.has_value_embedding(layer) for layer in range(depth))
    matrices, everything = sum(parameters.values()), config.total_parameters
    summed_in = step_tokens if recipe.inplace_embedding_grads else micro_tokens
    table_bytes = 4 * tables * vocab * dim / summed_in  # zeros, and a sum each time if not in place
    in_layers, in_mlp, in_head = "qkv" in eight, "up" in eight, recipe.fp8 in ("head", "all")
    stream_bytes = 42 if not (in_layers and recipe.fused_add_norm) else 28 if recipe.fused_residual else 38
    moved = {  # bytes a token: 2·D for each time that a row of activations is read or written
        "rotary and qk norm": depth * 24 * dim,
        "ReLU²": depth * (10 if not in_mlp else 6 if recipe.fused_relu2 else 9) * hidden,
        "norms and residual stream": depth * stream_bytes * dim,
        "quantizing": depth
        * ((4 + LOOK) * in_mlp + 3 * (LOOK if recipe.fused_rope else 4 + LOOK) * in_layers)
        * dim,
        "loss": 6 * vocab if in_head else 4 * vocab + 12 * vocab * dim / CHUNK_TOKENS,
        "embeddings": table_bytes + tables * (4 + 4 + 8) * dim,
        "gradient accumulation": (0 if recipe.inplace_embedding_grads else 3 * table_bytes)
        + 12 * matrices / micro_tokens
        + (12 * vocab * dim * max(1 / CHUNK_TOKENS - 1 / micro_tokens, 0) if in_head else 0),
        "casts": 12 * sum(n for k, n in parameters.items() if k not in eight) / micro_tokens,
        "update": (28 * (everything - matrices + vocab * dim) + 40 * (matrices - vocab * dim)) / step_tokens,
    }
    result = {part: 1e9 * count / BANDWIDTH for part, count in moved.items()}
    result["update"] += 1e9 * _muon_flops(config) / (MUON_TFLOPS * 1e12) / step_tokens
    return {"matmuls": 1e9 * matmuls, "attention": attention, **result}


def _muon_flops(config: ModelConfig) -> float:
    """Five rounds of three products: X·Xᵀ, its square, and that times X."""
    dim, hidden = config.dim, config.mlp_ratio * config.dim
    square = 5 * 3 * 2 * dim**3
    wide = 5 * (2 * 2 * dim * dim * hidden + 2 * dim**3)
    return float(config.depth * (4 * square + 2 * wide))


# The first pattern that a kernel's name matches says where it belongs.
_NAMES = (
    ("attention", r"flash|fmha|cudnn.*attention|flex_attention|sdpa"),
    ("ReLU²", r"relu"),
    ("loss", r"^_softcap_loss_|tanh|log_softmax"),
    ("rotary and qk norm", r"^_rope_norm_"),
    ("quantizing", r"_quantize_kernel|^_(qkv_)?amax_kernel|float8"),
    ("norms and residual stream", r"^_residual_norm_|rms_norm|rsqrt|mean"),
    ("matmuls", r"gemm|nvjet|cutlass|xmma|splitk|cublas"),
    ("embeddings", r"embedding|index_put|index_add|scatter|gather|sort|Memset|fill|zeros"),
    ("gradient accumulation", r"vectorized_elementwise.*add|CUDAFunctor_add"),
    ("casts", r"copy|cat"),
)


def part_of(kernel: str) -> str:
    for part, pattern in _NAMES:
        if re.search(pattern, kernel, re.IGNORECASE):
            return part
    return "other"


def measure(t: loop.Training) -> dict[str, Any]:
    """Nanoseconds a token of one step, by part, and the kernels that take longest."""
    from torch.profiler import ProfilerActivity, profile

    batches = list(islice(t.loader, t.grad_accum_steps))
    tokens = sum(batch.inputs.numel() for batch in batches)
    trained = sum(batch.trained_tokens for batch in batches)
    total = torch.zeros((), device=t.device)
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as seen:
        begin = time.perf_counter()
        for batch in batches:
            inputs = to_device(batch, t.device, t.config.model.document_mask)
            if t.graphed is not None:
                total += t.graphed(*inputs, trained, t.loss_scaler.scale)
            else:
                loss = t.forward(*inputs) / trained
                (loss * t.loss_scaler.scale).backward()
                total += loss.detach()
        torch.cuda.synchronize()
        wall_us = 1e6 * (time.perf_counter() - begin)
    update_us = _timed_update(t, total)
    parts: dict[str, float] = defaultdict(float)
    kernels = []
    for event in seen.key_averages():
        if event.device_type == torch.autograd.DeviceType.CUDA and event.self_device_time_total > 0:
            parts[part_of(event.key)] += event.self_device_time_total
            kernels.append((event.self_device_time_total, event.count, event.key[:120]))
    parts["GPU waits"] = max(wall_us - sum(parts.values()), 0.0)
    parts["update"] = update_us
    longest = [
        {"ms": round(us / 1e3, 2), "times": count, "part": part_of(name), "kernel": name}
        for us, count, name in sorted(kernels, reverse=True)[:40]
    ]
    return {"ns": {part: 1e3 * us / tokens for part, us in parts.items()}, "kernels": longest}


def _timed_update(t: loop.Training, loss: torch.Tensor) -> float:
    before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(HEAD_START)  # as in a run, where the host is a whole step ahead of the GPU
    before.record()
    loop.update(t, loss, schedules.scheduled_hyperparameters(t.step, t.config.train.steps, t.config.optim))
    after.record()
    torch.cuda.synchronize()
    return float(1e3 * before.elapsed_time(after))
