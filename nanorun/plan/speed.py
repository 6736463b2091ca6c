"""The MFU to expect of a run, with its source.

For a GPU: a kept measurement on the same GPU (benchmarks/results/train-*.json), else the table in hardware.py.

For a CPU: a short probe. Its largest matmuls give an upper bound, and a small model is far below that: its matmuls
are narrow, and what stands between them (norms, rotary embeddings, the loss, the optimizer) takes as long as they
do. So a plan for a CPU trains a step: of the model itself where that is quick, else of one of the same width with
fewer layers and shorter rows, up to the width beyond which matmuls get no faster.
"""

import time
from dataclasses import replace
from pathlib import Path
from statistics import median

import torch

from nanorun import hardware
from nanorun.config import Config, ModelConfig, scale_model
from nanorun.hardware import GPUS, Gpu, find_gpu
from nanorun.json_files import load_json
from nanorun.model.fast.recipe import DEFAULT_RECIPE, Recipe
from nanorun.model.gpt import build
from nanorun.optim.groups import group_parameters
from nanorun.optim.optimizer import Optimizer
from nanorun.optim.schedules import scheduled_hyperparameters
from nanorun.plan.memory import chosen_fp8

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"

_FULL_SPEED_WIDTH = 768  # narrower models leave a GPU idle: MFU falls with the width (rule of thumb)
_MEMORY_BOUND = 0.3  # of the time of a step: it waits for memory, not for tensor cores (docs/speed.md)
_MULTI_GPU_SPEED = 0.94  # of one GPU's: the record script reaches 574k tokens/s per GPU on eight, 608k on one

_PROBE_SECONDS = 0.7  # of measuring, roughly: at least three micro-batches run, the first unmeasured
_PROBE_FLOPS = 4e10  # of a probed micro-batch: half a second, or a few
_PROBE_MAX_WIDTH = 1024  # wider matmuls are no faster
_PROBE_MAX_VOCAB = 32_768
_MEASUREMENT = {
    **dict.fromkeys(("what", "date", "device?", "fp8?"), str),
    "gpu?": (str, None),
    "depth": int,
    "mfu": (float, None),
}


def expected_mfu(
    model: ModelConfig, gpu: Gpu, gpus: int, results: Path, recipe: Recipe = DEFAULT_RECIPE
) -> tuple[float, str]:
    mfu, source = gpu.mfu, f"assumed for {gpu.name}"
    speed, memory = _width_factor(model.dim), 1.0
    fp8 = chosen_fp8(model, gpu, recipe)
    for card in (gpu, *([GPUS[gpu.same_chip]] if gpu.same_chip else [])):
        measured = measured_mfu(card, model.depth, results, fp8) or measured_mfu(card, model.depth, results)
        if measured is not None:
            mfu, depth, source = measured
            speed /= _width_factor(scale_model(depth, model.vocab_size, model.context).dim)
            if card is not gpu and card.bandwidth_tb_s and gpu.bandwidth_tb_s:
                slower = card.bandwidth_tb_s / gpu.bandwidth_tb_s
                memory = 1 / (1 - _MEMORY_BOUND + _MEMORY_BOUND * slower)
                source += f" with {card.name}, less for the memory of {gpu.name}"
            break
    if speed < 1:
        source += ", less for so narrow a model"
    if gpus > 1:
        speed *= _MULTI_GPU_SPEED
        source += ", less for several GPUs"
    return min(mfu * speed * memory, 1.0), source


def _width_factor(dim: int) -> float:
    return min(dim / _FULL_SPEED_WIDTH, 1.0)


def measured_mfu(
    gpu: Gpu, depth: int, results: Path = RESULTS, fp8: str = "none"
) -> tuple[float, int, str] | None:
    """The MFU, depth and source of the kept measurement on this GPU with this FP8 setting: the nearest in depth, and
    the newest of those."""
    found: list[tuple[int, str, float, int, str]] = []
    for path in sorted(results.glob("train-*.json")):
        try:
            record = load_json(path, _MEASUREMENT)
            device = record.get("gpu") or record.get("device", "")
            known = find_gpu(device)
            name = known.name if known and record.get("gpu") else device
            is_like = record["what"] == "train" and record.get("fp8", "none") == fp8
            if is_like and name == gpu.name and record["mfu"]:
                nearness = -abs(record["depth"] - depth)
                found.append((nearness, record["date"], record["mfu"], record["depth"], path.name))
        except (OSError, ValueError):
            continue  # a file in another format is not one of our measurements, and no reason to fail
    if not found:
        return None
    _, date, mfu, measured_depth, name = max(found)
    return mfu, measured_depth, f"measured at d{measured_depth} on {date}, {name}"


def measure_cpu_mfu(config: Config, rows: int, cpu: Gpu) -> float:
    """The MFU of training this model on this machine's CPU with micro-batches of `rows` rows.

    The passes are timed per FLOP and the update per parameter, since the update happens once a step.
    """
    hardware.keep_freed_memory()  # as training does: up to 1.5 times as fast
    model_config, rows = _probe_size(config.model, rows)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, model_config.vocab_size, (rows, model_config.context), generator=generator)
    with torch.random.fork_rng(devices=[]):
        model = build(model_config, torch.device("cpu"), torch.float32)
    optimizer = Optimizer(
        group_parameters(model.named_parameters(), config.optim), config.optim, compiled=False
    )
    passes: list[float] = []
    updates: list[float] = []
    end = time.perf_counter() + _PROBE_SECONDS
    while len(passes) < 3 or (time.perf_counter() < end and len(passes) < 20):
        start = time.perf_counter()
        (model(tokens, tokens) / tokens.numel()).backward()
        between = time.perf_counter()
        optimizer.clip_grad_norm(config.optim.max_grad_norm)
        optimizer.step(scheduled_hyperparameters(0, 1, config.optim))
        optimizer.zero_grad()
        passes.append(between - start)
        updates.append(time.perf_counter() - between)
    # The first of each also loads libraries.
    s_per_flop = median(passes[1:]) / (tokens.numel() * model_config.flops_per_token)
    s_per_parameter = median(updates[1:]) / model_config.total_parameters
    flops = config.train.batch_tokens * config.model.flops_per_token
    seconds = s_per_flop * flops + s_per_parameter * config.model.total_parameters
    return flops / seconds / (cpu.bf16_tflops * 1e12)


def _probe_size(model: ModelConfig, rows: int) -> tuple[ModelConfig, int]:
    """A model like this one and a micro-batch that are quick to run: the originals, where they are."""
    if model.dim > _PROBE_MAX_WIDTH:
        heads = max(_PROBE_MAX_WIDTH // model.head_dim, 1)
        model = replace(model, dim=heads * model.head_dim, heads=heads, kv_heads=heads)
    model = replace(model, vocab_size=min(model.vocab_size, _PROBE_MAX_VOCAB))

    def flops() -> float:
        return rows * model.context * model.flops_per_token

    while rows > 1 and flops() > _PROBE_FLOPS:
        rows //= 2
    while model.depth > 2 and flops() > _PROBE_FLOPS:
        model = replace(model, depth=model.depth // 2)
    while model.context > 256 and flops() > _PROBE_FLOPS:
        model = replace(model, context=model.context // 2)
    return model, rows
