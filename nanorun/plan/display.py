"""A plan as JSON and as text, and beside what the run measured."""

from collections.abc import Mapping
from typing import Any

from nanorun import console
from nanorun.hardware import PRICES_AS_OF
from nanorun.model.fast.recipe import Recipe
from nanorun.plan.estimate import TrainingPlan
from nanorun.plan.memory import deepest
from nanorun.tables import table

RECOMPUTE = Recipe(recompute=True)


def plan_record(plan: TrainingPlan) -> dict[str, Any]:
    """What --json prints. Memory is in units of 2^30 bytes; `minutes` are of training alone."""
    config, model = plan.config, plan.config.model
    return {
        "depth": model.depth,
        "dim": model.dim,
        "vocab_size": model.vocab_size,
        "vocab_from": plan.vocab_from,
        "context": model.context,
        "scaling_parameters": model.scaling_parameters,
        "total_parameters": model.total_parameters,
        "parameters": model.parameters(),
        "tokens": config.tokens,
        "batch_tokens": config.train.batch_tokens,
        "steps": config.train.steps,
        "flops_per_token": model.flops_per_token,
        "flops": plan.flops,
        "gpu": plan.gpu.name,
        "gpus": plan.gpus,
        "gpu_memory_gb": plan.gpu.memory_gb,
        "gpu_tflops": plan.gpu.bf16_tflops,
        "memory_gb": {**plan.memory_gb, "total": sum(plan.memory_gb.values())},
        "fits": plan.fits,
        "device_batch": plan.device_batch,
        "grad_accum_steps": plan.grad_accum_steps,
        "recompute": plan.recompute,
        "largest_device_batch": plan.largest_batch,
        "largest_device_batch_recompute": plan.largest_batch_recompute,
        "deepest": deepest(plan.gpu, plan.gpus, model.vocab_size, model.context),
        "deepest_recompute": deepest(plan.gpu, plan.gpus, model.vocab_size, model.context, RECOMPUTE),
        "tokens_per_s": plan.tokens_per_s,
        "mfu_assumed": plan.mfu,
        "mfu_from": plan.mfu_from,
        "minutes": plan.minutes,
        "eval_tokens": plan.eval_tokens,
        "evaluation_minutes": plan.evaluation_minutes,
        "cost_dollars": plan.cost_dollars,
        "dollars_per_gpu_hour": plan.gpu.dollars_per_hour,
        "prices_as_of": PRICES_AS_OF,
    }


def plan_table(plan: TrainingPlan) -> str:
    config, model, gpu = plan.config, plan.config.model, plan.gpu
    train = config.train
    each = " each" if plan.gpus > 1 else ""
    cost, price = "–", "your own machine"
    if plan.cost_dollars is not None:
        cost = f"${plan.cost_dollars:,.2f}"
        price = f"${gpu.dollars_per_hour:.2f} an hour{each}, a typical price of {PRICES_AS_OF}"
    batches = f"× {plan.grad_accum_steps:,} micro-batch{'es' if plan.grad_accum_steps > 1 else ''}{each}; "
    if plan.largest_batch_recompute:
        batches += f"{plan.largest_batch} would fit, {plan.largest_batch_recompute} with recompute"
    else:
        batches += "not even one fits"
    rows: list[tuple[str, str, str]] = [
        ("model", f"d{model.depth}", f"width {model.dim}, {model.heads} heads, context {model.context:,}"),
        ("vocabulary", f"{model.vocab_size:,}", plan.vocab_from),
        (
            "parameters",
            _count(model.total_parameters),
            f"{_count(model.scaling_parameters)} count for scaling",
        ),
        (
            "tokens",
            _count(config.tokens),
            f"{config.tokens / model.scaling_parameters:.3g} per scaling parameter",
        ),
        ("steps", f"{train.steps:,}", f"of {train.batch_tokens:,} tokens"),
        ("FLOPs", f"{plan.flops:.2e}", f"{model.flops_per_token:.2e} per token"),
        ("device", _device(plan), f"{gpu.bf16_tflops:,.3g} TFLOP/s, {gpu.memory_gb:.3g} GB{each}"),
        ("micro-batch", _rows(plan), batches),
        ("speed", f"{_count(plan.tokens_per_s)} tok/s", f"{plan.mfu:.0%} MFU, {plan.mfu_from}"),
        (
            "time",
            console.seconds(60 * plan.minutes),
            f"and {console.seconds(60 * plan.evaluation_minutes)} of evaluation",
        ),
        ("cost", cost, price),
    ]
    parameters = [(group.replace("_", " "), f"{n:,}") for group, n in model.parameters().items()]
    memory = [(part, f"{gb:.2f}") for part, gb in plan.memory_gb.items()]
    memory.append(("total", f"{sum(plan.memory_gb.values()):.2f}"))
    return "\n\n".join(
        [
            table(["plan", "", ""], rows),
            table(["parameters", "number"], parameters),
            table(["memory of one device" if plan.gpus > 1 else "memory", "GB"], memory),
            *_advice(plan),
        ]
    )


def _count(n: float) -> str:
    """Parameters and tokens are counted in billions."""
    return console.count(n).replace("G", "B")


def _device(plan: TrainingPlan) -> str:
    return f"{plan.gpus} × {plan.gpu.name}" if plan.gpus > 1 else plan.gpu.name


def _rows(plan: TrainingPlan) -> str:
    return f"{plan.device_batch} row{'s' if plan.device_batch > 1 else ''}"


def _advice(plan: TrainingPlan) -> list[str]:
    model = plan.config.model
    if plan.fits and plan.recompute and not plan.recipe.recompute:
        return ["This fits only with recompute, which computes activations twice and takes a third longer."]
    if plan.fits:
        return []
    if plan.largest_batch_recompute:
        return [f"{_rows(plan)} do not fit: use --device-batch {plan.largest_batch_recompute} or fewer."]
    depth = deepest(plan.gpu, plan.gpus, model.vocab_size, model.context, RECOMPUTE)
    return [f"This does not fit: on {_device(plan)} the deepest model that does is d{depth}, with recompute."]


def compare_with_plan(plan: Mapping[str, Any], summary: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Figures of a `plan_record` beside those of the run's summary, where a figure may be None."""
    pairs = {
        "minutes": (plan["minutes"], summary["seconds"] / 60),
        "tokens/s": (plan["tokens_per_s"], summary["tokens_per_s"]),
        "MFU": (plan["mfu_assumed"], summary["mfu"]),
        "peak memory, GB": (plan["memory_gb"]["total"], summary["peak_gib"]),
    }
    return [
        {
            "what": what,
            "planned": planned,
            "happened": happened,
            "ratio": happened / planned if planned and happened is not None else None,
        }
        for what, (planned, happened) in pairs.items()
    ]
