"""Parameters, tokens, memory, minutes and dollars of a run, before anything starts.

Everything follows from the configuration and one line about the device; nothing is built and no GPU touched.
Memory is counted in memory.py.

Minutes are FLOPs divided by peak FLOP/s times an assumed MFU, which the plan states, and where it is from:
a kept measurement on the same GPU (benchmarks/results/train-*.json), else the table in hardware.py. For a CPU a step
or two are tried (probe.py), since small models are far from its peak. They are minutes of training; evaluations
are counted apart, compiling and saving not at all.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanorun import console, probe
from nanorun.config import Config, Horizon, ModelConfig, scale, scale_model
from nanorun.errors import UserError
from nanorun.hardware import PRICES_AS_OF, Gpu, find_gpu, named_gpu, this_gpu
from nanorun.memory import comfortable_rows, deepest, eight_bits, largest_batch, largest_divisor, memory_gb

if TYPE_CHECKING:
    from nanorun.data.dataset import Dataset
    from nanorun.text.tokenizer import Tokenizer

VOCAB = 32_768  # where nothing says another
RESULTS = Path(__file__).resolve().parents[1] / "benchmarks" / "results"

_FULL_SPEED_WIDTH = 768  # narrower models leave a GPU waiting: MFU falls with the width (rule of thumb)
_MANY_GPUS = 0.94  # of one GPU's speed: the record script makes 574k tokens/s a GPU on eight, 608k on one
_RECOMPUTE_SPEED = 0.75  # four passes for the price of three


@dataclass(frozen=True)
class Plan:
    config: Config
    gpu: Gpu
    gpus: int
    device_batch: int  # rows of one micro-batch on one GPU
    micro_steps: int  # micro-batches a GPU adds up for one step
    recompute: bool
    fits: bool
    largest_batch: int  # rows that fit, a power of two; 0 when not even one does
    largest_batch_recompute: int
    memory_gb: dict[str, float]  # by part, of one GPU
    mfu: float
    mfu_from: str  # where the assumption comes from, for people
    eval_tokens: int  # of one evaluation: no more than there is validation text
    vocab_from: str = ""  # for people

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
        """A forward pass is a third of a step's work."""
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
) -> Plan:
    """What to expect of this run on so many of these GPUs; None is the device of this machine."""
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
    kept = largest_batch(model, gpu, gpus, recompute=False)
    recomputed = largest_batch(model, gpu, gpus, recompute=True)
    recompute = model.recompute or (kept < (device_batch or 1) and recomputed > kept)
    largest = recomputed if recompute else kept
    share = -(-rows // gpus)
    chosen = largest_divisor(
        share,
        device_batch or min(comfortable_rows(model, gpu.device), max(largest, 1)),
    )
    if gpu.device == "cpu":  # there is none in the table: it is this machine's
        pace, mfu_from = probe.measure(config, chosen), "measured just now"
        mfu = config.train.batch_tokens * model.flops_per_token / pace.seconds_per_step(config)
        mfu /= gpu.bf16_tflops * 1e12
    else:
        mfu, mfu_from = _assumed_mfu(model, gpu, gpus, results)
    eval_tokens = min(config.train.eval_tokens, validation_tokens or config.train.eval_tokens)
    return Plan(
        config,
        gpu,
        gpus,
        device_batch=chosen,
        micro_steps=-(-share // chosen),
        recompute=recompute,
        fits=chosen <= largest,
        largest_batch=kept,
        largest_batch_recompute=recomputed,
        memory_gb=memory_gb(model, chosen, gpu, gpus, recompute),
        mfu=mfu * (_RECOMPUTE_SPEED if recompute else 1),
        mfu_from=mfu_from,
        eval_tokens=eval_tokens,
    )


def plan_here(
    depth: int,
    vocab_size: int | None,
    context: int,
    horizon: Horizon,
    batch_tokens: int | None,
    gpu: str | None,
    gpus: int,
    device_batch: int | None,
) -> Plan:
    """The plan for a vocabulary of the usual size, unless another is asked for. Says if `train base` would take
    another here, since it takes the newest tokenizer."""
    from nanorun.data.dataset import dataset_names, open_dataset
    from nanorun.text.store import open_tokenizer, tokenizer_names

    tokenizer = open_tokenizer() if vocab_size is None and tokenizer_names() else None
    there = (
        validation_tokens(open_dataset(), tokenizer) if tokenizer is not None and dataset_names() else None
    )
    source = "as asked for" if vocab_size is not None else "the usual size"
    if tokenizer is not None and tokenizer.vocab_size != VOCAB:
        size = tokenizer.vocab_size
        source += f"; '{tokenizer.name}', which train base would take here, has {size:,} (--vocab {size})"
    config = scale(depth, vocab_size or VOCAB, context=context, horizon=horizon, batch_tokens=batch_tokens)
    made = make_plan(config, gpu, gpus, device_batch, validation_tokens=there)
    return replace(made, vocab_from=source)


def refuse_longer_than(days: float, plan: Plan) -> None:
    """Before anything starts, with what would fit: less depth, or less of a horizon that was asked for."""
    if plan.seconds <= days * 86_400:
        return
    config, model = plan.config, plan.config.model
    share = days / 2 * 86_400 / plan.seconds
    usual = scale(
        model.depth, model.vocab_size, context=model.context, batch_tokens=config.train.batch_tokens
    )
    advice = f"--tokens {_round_down(share * config.tokens)}"
    if config.train.steps == usual.train.steps:
        for depth in range(model.depth - 1, 0, -1):
            less = scale(depth, model.vocab_size, context=model.context)
            if less.tokens * less.model.flops_per_token > share * plan.flops:
                continue
            shorter = make_plan(less, plan.gpu, plan.gpus, validation_tokens=plan.eval_tokens)
            if shorter.seconds < days * 86_400:
                advice = f"--depth {depth}, about {console.seconds(shorter.seconds)}"
                break
    raise TooLong(
        f"This would take about {console.seconds(plan.seconds)} on this machine ({plan.gpu.name}) by the plan: choose "
        f"less, such as {advice}, or say --yes to train it all the same."
    )


class TooLong(UserError):
    """A person may say that it is meant."""


def _round_down(n: float) -> int:
    """To one digit, such as 300000: a suggestion, no result."""
    size = 10 ** max(len(str(int(n))) - 1, 0)
    return max(int(n) // size * size, 1)


def validation_tokens(dataset: "Dataset", tokenizer: "Tokenizer") -> int:
    """About how many tokens of validation text a dataset has."""
    from nanorun.data.dataset import read_texts

    if dataset.kind == "bin":
        return dataset.total("tokens", "val")
    some = "\n".join(islice(read_texts(dataset.files("val")), 100))[:100_000]
    tokens_per_byte = len(tokenizer.encode(some)) / max(len(some.encode()), 1)
    return max(round(dataset.total("text_bytes", "val") * tokens_per_byte), 1)


def _assumed_mfu(model: ModelConfig, gpu: Gpu, gpus: int, results: Path) -> tuple[float, str]:
    mfu, source = gpu.mfu, f"assumed for {gpu.name}"
    speed = _speed_of_width(model.dim)
    eight = eight_bits(model, gpu)
    measured = measured_mfu(gpu, model.depth, results, eight) or measured_mfu(gpu, model.depth, results)
    if measured is not None:
        mfu, depth, source = measured
        speed /= _speed_of_width(scale_model(depth, model.vocab_size, model.context).dim)
    if speed < 1:
        source += ", less for so narrow a model"
    if gpus > 1:
        speed *= _MANY_GPUS
        source += ", less for several GPUs"
    return min(mfu * speed, 1.0), source


def _speed_of_width(dim: int) -> float:
    return min(dim / _FULL_SPEED_WIDTH, 1.0)


def measured_mfu(
    gpu: Gpu, depth: int, results: Path = RESULTS, fp8: str = "none"
) -> tuple[float, int, str] | None:
    """The MFU, depth and name of the kept measurement on this GPU with such matmuls, nearest in depth, the newest of
    those."""
    found: list[tuple[int, str, float, int, str]] = []
    for path in sorted(results.glob("train-*.json")):
        try:
            record = json.loads(path.read_text(encoding="utf-8"))
            device = str(record.get("gpu") or record["device"])
            known = find_gpu(device)
            name = known.name if known and record.get("gpu") else device
            like = record["what"] == "train" and record.get("fp8", "none") == fp8
            if like and name == gpu.name and record["mfu"]:
                near = -abs(record["depth"] - depth)
                found.append((near, str(record["date"]), float(record["mfu"]), record["depth"], path.name))
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            continue  # a file in another shape is no measurement of ours, and no reason not to plan
    if not found:
        return None
    _, date, mfu, measured_depth, name = max(found)
    return mfu, measured_depth, f"measured at d{measured_depth} on {date}, {name}"


def plan_record(plan: Plan) -> dict[str, Any]:
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
        "micro_steps": plan.micro_steps,
        "recompute": plan.recompute,
        "largest_device_batch": plan.largest_batch,
        "largest_device_batch_recompute": plan.largest_batch_recompute,
        "deepest": deepest(plan.gpu, plan.gpus, model.vocab_size, model.context),
        "deepest_recompute": deepest(plan.gpu, plan.gpus, model.vocab_size, model.context, recompute=True),
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


def plan_table(plan: Plan) -> str:
    from nanorun.tables import table

    config, model, gpu = plan.config, plan.config.model, plan.gpu
    train = config.train
    many = f"{plan.gpus} × " if plan.gpus > 1 else ""
    ratio = config.tokens / model.scaling_parameters
    rows: list[tuple[str, str, str]] = [
        ("model", f"d{model.depth}", f"width {model.dim}, {model.heads} heads, context {model.context:,}"),
        ("vocabulary", f"{model.vocab_size:,}", plan.vocab_from),
        (
            "parameters",
            _count(model.total_parameters),
            f"{_count(model.scaling_parameters)} count for scaling",
        ),
        ("tokens", _count(config.tokens), f"{ratio:.3g} a scaling parameter"),
        ("steps", f"{train.steps:,}", f"of {train.batch_tokens:,} tokens"),
        ("FLOPs", f"{plan.flops:.2e}", f"{model.flops_per_token:.2e} a token"),
        ("device", many + gpu.name, f"{gpu.bf16_tflops:,.3g} TFLOP/s, {gpu.memory_gb:.3g} GB" + _each(plan)),
        ("micro-batch", _batch(plan), _batches_that_fit(plan)),
        ("speed", f"{_count(plan.tokens_per_s)} tok/s", f"{plan.mfu:.0%} MFU, {plan.mfu_from}"),
        (
            "time",
            console.seconds(60 * plan.minutes),
            f"and {console.seconds(60 * plan.evaluation_minutes)} of evaluation",
        ),
        ("cost", *_cost(plan)),
    ]
    whole = table(["plan", "", ""], rows)
    parameters = [(_words(group), f"{n:,}") for group, n in model.parameters().items()]
    memory = [(part, f"{gb:.2f}") for part, gb in plan.memory_gb.items()]
    memory.append(("total", f"{sum(plan.memory_gb.values()):.2f}"))
    return "\n\n".join(
        [
            whole,
            table(["parameters", "number"], parameters),
            table(["memory of one device" if plan.gpus > 1 else "memory", "GB"], memory),
            *_advice(plan),
        ]
    )


def _each(plan: Plan) -> str:
    return " each" if plan.gpus > 1 else ""


def _count(n: float) -> str:
    """Parameters and tokens are spoken of in billions."""
    return console.count(n).replace("G", "B")


def _words(group: str) -> str:
    return group.replace("_", " ")


def _batch(plan: Plan) -> str:
    return f"{plan.device_batch} row{'s' if plan.device_batch > 1 else ''}"


def _batches_that_fit(plan: Plan) -> str:
    times = f"× {plan.micro_steps:,} micro-step{'s' if plan.micro_steps > 1 else ''}{_each(plan)}"
    if not plan.largest_batch_recompute:
        return f"{times}; not even one fits"
    return f"{times}; {plan.largest_batch} would fit, {plan.largest_batch_recompute} with recompute"


def _cost(plan: Plan) -> tuple[str, str]:
    if plan.cost_dollars is None:
        return "–", "your own machine"
    rate = f"${plan.gpu.dollars_per_hour:.2f} an hour{_each(plan)}, a typical price of {PRICES_AS_OF}"
    return f"${plan.cost_dollars:,.2f}", rate


def _advice(plan: Plan) -> list[str]:
    if plan.fits and plan.recompute and not plan.config.model.recompute:
        return ["This fits only with recompute, which computes activations again and takes a third longer."]
    if plan.fits:
        return []
    if plan.largest_batch_recompute:
        return [f"{_batch(plan)} do not fit: use --device-batch {plan.largest_batch_recompute} or fewer."]
    model = plan.config.model
    depth = deepest(plan.gpu, plan.gpus, model.vocab_size, model.context, recompute=True)
    where = f"{plan.gpus} × {plan.gpu.name}" if plan.gpus > 1 else plan.gpu.name
    return [f"This does not fit: on {where} the deepest model that does is d{depth}, with recompute."]


def compare_with_plan(plan: Mapping[str, Any], summary: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Planned and happened, for the report after a run; what is missing on either side is None.

    `plan` is a `plan_record`; `summary` may have minutes (or seconds), tokens_per_s, mfu and peak_gib
    (or memory_gib).
    """
    minutes = summary.get("minutes")
    if minutes is None and summary.get("seconds") is not None:
        minutes = summary["seconds"] / 60
    memory = plan.get("memory_gb") or {}
    pairs = {
        "minutes": (plan.get("minutes"), minutes),
        "tokens/s": (plan.get("tokens_per_s"), summary.get("tokens_per_s")),
        "MFU": (plan.get("mfu_assumed"), summary.get("mfu")),
        "peak memory, GB": (memory.get("total"), summary.get("peak_gib", summary.get("memory_gib"))),
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
