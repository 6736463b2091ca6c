"""Parameters, tokens, memory, minutes and dollars of a run, before anything starts.

Everything follows from the configuration and one line about the device; no model is built and no GPU touched.
Minutes are FLOPs divided by peak FLOP/s times the expected MFU (speed.py). They cover training; evaluation is
estimated separately, compiling and saving are not counted.
"""

from dataclasses import dataclass, replace
from pathlib import Path

from nanorun import console
from nanorun.config import Config, largest_divisor, scale
from nanorun.errors import UserError
from nanorun.hardware import Gpu, named_gpu, this_gpu
from nanorun.model.fast.recipe import DEFAULT_RECIPE, Recipe
from nanorun.plan.memory import largest_batch, memory_gb, preferred_rows
from nanorun.plan.speed import RESULTS, expected_mfu, measure_cpu_mfu

_RECOMPUTE_SPEED = 0.75  # recomputing adds a fourth pass to three


@dataclass(frozen=True)
class TrainingPlan:
    config: Config
    gpu: Gpu
    gpus: int
    device_batch: int  # rows of one micro-batch on one GPU
    grad_accum_steps: int  # micro-batches that each GPU accumulates in one step
    recompute: bool
    fits: bool
    largest_batch: int  # rows that fit, a power of two; 0 when not even one does
    largest_batch_recompute: int
    memory_gb: dict[str, float]  # by part, of one GPU
    mfu: float
    mfu_from: str  # the source of that figure, for display
    eval_tokens: int  # of one evaluation: at most the validation text
    recipe: Recipe = DEFAULT_RECIPE
    vocab_from: str = ""  # for display

    @property
    def flops(self) -> float:
        return float(self.config.model.flops_per_token) * self.config.tokens

    @property
    def tokens_per_s(self) -> float:
        return self.mfu * self.gpu.bf16_tflops * 1e12 * self.gpus / self.config.model.flops_per_token

    @property
    def minutes(self) -> float:
        return self.config.tokens / self.tokens_per_s / 60

    @property
    def evaluation_minutes(self) -> float:
        """A forward pass is a third of the work of a step."""
        train = self.config.train
        times = -(-train.steps // train.eval_every) if train.eval_every else 1
        return times * self.eval_tokens / 3 / self.tokens_per_s / 60

    @property
    def seconds(self) -> float:
        """Of training and evaluation."""
        return 60 * (self.minutes + self.evaluation_minutes)

    @property
    def cost_dollars(self) -> float | None:
        """Of training and evaluation."""
        if self.gpu.dollars_per_hour is None:
            return None
        return self.seconds / 3600 * self.gpu.dollars_per_hour * self.gpus


def make_plan(
    config: Config,
    gpu: Gpu | str | None = None,
    gpus: int = 1,
    device_batch: int | None = None,
    results: Path = RESULTS,
    validation_tokens: int | None = None,
    recipe: Recipe = DEFAULT_RECIPE,
) -> TrainingPlan:
    """Estimates this run on `gpus` GPUs of this kind; None is the device of this machine."""
    if gpus < 1 or (device_batch is not None and device_batch < 1):
        raise UserError("A plan needs at least one GPU and one row in a micro-batch.")
    if gpu is None:
        gpu = this_gpu()
    elif isinstance(gpu, str):
        gpu = named_gpu(gpu)
    model = config.model
    rows = config.train.batch_tokens // model.context
    if rows < gpus:
        raise UserError(
            f"A batch of {config.train.batch_tokens:,} tokens has {rows} rows of {model.context}, too few for "
            f"{gpus} GPUs: use at most {rows}, or a larger --batch-tokens."
        )
    without = largest_batch(model, gpu, gpus, replace(recipe, recompute=False))
    recomputed = largest_batch(model, gpu, gpus, replace(recipe, recompute=True))
    recompute = recipe.recompute or (without < (device_batch or 1) and recomputed > without)
    largest = recomputed if recompute else without
    rows_per_gpu = -(-rows // gpus)
    chosen = largest_divisor(
        rows_per_gpu, device_batch or min(preferred_rows(model, gpu.device), max(largest, 1))
    )
    if gpu.device == "cpu":  # the table has none, so it is this machine's
        mfu, mfu_from = measure_cpu_mfu(config, chosen, gpu), "measured just now"
    else:
        mfu, mfu_from = expected_mfu(model, gpu, gpus, results, recipe)
    return TrainingPlan(
        config,
        gpu,
        gpus,
        device_batch=chosen,
        grad_accum_steps=-(-rows_per_gpu // chosen),
        recompute=recompute,
        fits=chosen <= largest,
        largest_batch=without,
        largest_batch_recompute=recomputed,
        memory_gb=memory_gb(model, chosen, gpu, gpus, replace(recipe, recompute=recompute)),
        mfu=mfu * (_RECOMPUTE_SPEED if recompute else 1),
        mfu_from=mfu_from,
        eval_tokens=min(config.train.eval_tokens, validation_tokens or config.train.eval_tokens),
        recipe=recipe,
    )


class PlanTooLong(UserError):
    """The user may confirm the run all the same."""


def check_duration(plan: TrainingPlan, max_days: float) -> None:
    """Rejects a run that would take longer, and suggests what would fit: less depth, or a shorter horizon where one
    was specified."""
    if plan.seconds <= max_days * 86_400:
        return
    config, model = plan.config, plan.config.model
    share = max_days / 2 * 86_400 / plan.seconds
    default = scale(
        model.depth, model.vocab_size, context=model.context, batch_tokens=config.train.batch_tokens
    )
    advice = f"--tokens {_round_down(share * config.tokens)}"
    if config.train.steps == default.train.steps:
        for depth in range(model.depth - 1, 0, -1):
            less = scale(depth, model.vocab_size, context=model.context)
            if less.tokens * less.model.flops_per_token > share * plan.flops:
                continue
            shorter = make_plan(less, plan.gpu, plan.gpus, validation_tokens=plan.eval_tokens)
            if shorter.seconds < max_days * 86_400:
                advice = f"--depth {depth}, about {console.seconds(shorter.seconds)}"
                break
    raise PlanTooLong(
        f"By the plan this would take about {console.seconds(plan.seconds)} on this machine ({plan.gpu.name}): choose "
        f"less, such as {advice}, or --minutes 60 for a model that fits that time, or add --yes to train it anyway."
    )


def _round_down(n: float) -> int:
    """To one significant digit, such as 300000: a suggestion, not a result."""
    size = int(10 ** max(len(str(int(n))) - 1, 0))
    return max(int(n) // size * size, 1)
