"""`train base`: everything from a depth to a trained model. Sets up the parts and hands them to the loop."""

import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nanorun import checkpoint, hardware, home, runs
from nanorun.config import Backend, Config, Dtype, Horizon, largest_divisor
from nanorun.console import say, seconds
from nanorun.data.dataset import Dataset, dataset_names, open_dataset
from nanorun.data.loader import Loader
from nanorun.data.rows import RowOrder
from nanorun.data.shards import read_texts
from nanorun.data.sources import Source, open_source
from nanorun.data.vocabulary import SAMPLE_DATA, build_sample
from nanorun.errors import UserError
from nanorun.evals.bpb import bpb_evaluator
from nanorun.infer.load import check_tokenizer
from nanorun.infer.plain import generate
from nanorun.json_files import load_json
from nanorun.model import compiling
from nanorun.model.attention import choose_backends
from nanorun.model.fast import precompile
from nanorun.model.fast.path import FastPath, recompute_blocks, unsupported
from nanorun.model.fast.recipe import DEFAULT_RECIPE, Recipe, resolve
from nanorun.model.gpt import GPT, build
from nanorun.optim.groups import group_parameters
from nanorun.optim.optimizer import Optimizer
from nanorun.plan import dial, display, estimate, memory
from nanorun.resume import training_steps
from nanorun.runs import Run, read_metrics, write_json
from nanorun.text.store import open_tokenizer
from nanorun.text.tokenizer import Tokenizer
from nanorun.train import loop
from nanorun.train.graphed import GraphedMicroStep
from nanorun.train.guard import LossScaler
from nanorun.train.track import Tracker, TrackerName, require


@dataclass(frozen=True)
class BaseOptions:
    """What `train base` can be told beyond the configuration: how to run, not what to learn."""

    name: str | None = None
    fresh: bool = False
    device_batch: int | None = None  # rows of a micro-batch
    backend: Backend = "auto"
    dtype: Dtype = "auto"
    compile: bool = True  # on CUDA
    graphs: bool = True  # with it: micro-batches replayed as a CUDA graph
    recipe: Recipe | None = None  # None: the checkpoint's, or the default
    deterministic: bool = False
    track: TrackerName | None = None
    samples: int = 10
    max_days: float | None = None  # a new run that the plan expects to take longer is rejected


def default_name(depth: int | None, horizon: Horizon, data: str | None) -> str:
    """base-d12; base-notes where the text and the time fix the depth."""
    if depth is not None or horizon.minutes is None:
        return f"base-d{depth or dial.DEFAULT_DEPTH}"
    return f"base-{open_dataset(data).name if data or dataset_names() else SAMPLE_DATA}"


def configure(
    depth: int | None,
    *,
    name: str | None = None,
    data: str | None = None,
    tokenizer: str | None = None,
    horizon: Horizon | None = None,
    context: int | None = None,
    batch_tokens: int | None = None,
) -> Config:
    """The configuration on the data that is here, with its own tokenizer unless another is named; on the sample world,
    where there is no data at all. A run of this `name` keeps its own, but for what is given: the same command resumes
    it, whatever the speed of the machine and the rules for new runs are by now."""
    if name is not None:
        home.check_name(name, "run")
    if data is None and tokenizer is None and not dataset_names():
        say("there is no data here yet: building the sample world")
        build_sample()
    horizon = horizon or Horizon()
    if name is not None and runs.trained_config(name):
        found = runs.load_config(name)
        asked = {"steps": _steps_of(found, horizon), "minutes": horizon.minutes, "batch_tokens": batch_tokens}
        if depth in (None, found.model.depth) and context in (None, found.model.context):
            return override(found, asked, data=data, tokenizer=tokenizer)
    return dial.configure_here(
        depth, horizon, data=data, tokenizer=tokenizer, context=context, batch_tokens=batch_tokens
    )


def _steps_of(run: Config, horizon: Horizon) -> int | None:
    """The length that is asked for, in steps of a run that exists; None if none is."""
    tokens = horizon.tokens
    if horizon.ratio is not None:
        tokens = round(horizon.ratio * run.model.scaling_parameters)
    elif horizon.flops is not None:
        tokens = round(horizon.flops / run.model.flops_per_token)
    elif horizon.minutes is not None and run.train.minutes is not None:
        return round(run.train.steps * horizon.minutes / run.train.minutes)
    return horizon.steps if tokens is None else max(round(tokens / run.train.batch_tokens), 1)


def read_config(path: Path) -> Config:
    try:
        return Config.from_dict(load_json(path, max_bytes=1 << 20))
    except OSError as error:
        raise UserError(f"Cannot read the configuration {path}: {error.strerror}.") from error
    except ValueError as error:
        raise UserError(f"{path} is not a configuration ({error}): use a run's config.json.") from error


def override(config: Config, train: dict[str, Any], **names: str | None) -> Config:
    """A configuration from a file, with the given values changed. Derived values stay as the file has them."""

    def given(changes: dict[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in changes.items() if value is not None}

    return replace(config, train=replace(config.train, **given(train)), **given(names))


def train_base(config: Config, options: BaseOptions) -> dict[str, Any]:
    """Trains, or resumes; returns the summary that is also written to the run's folder."""
    name = options.name or f"base-d{config.model.depth}"
    if config.kind != "base":
        raise UserError(
            f"This is the configuration of a run of kind '{config.kind}': train base makes base models."
        )
    if options.deterministic:
        make_deterministic()
    machine = hardware.detect()
    choose_backends(config.model, torch.device(machine.device), options.backend)  # or say what is wrong
    resolve_recipe(config, machine, options, None)
    dataset, tokenizer = open_dataset(config.data), open_tokenizer(config.tokenizer)
    check_vocabulary(config, tokenizer)
    if options.track:
        require(options.track)
    size = dial.text_size(dataset, tokenizer)
    plan = estimate.make_plan(
        config,
        device_batch=options.device_batch,
        validation_tokens=size.val_tokens,
        recipe=options.recipe or DEFAULT_RECIPE,
    )
    earlier = {} if options.fresh else runs.trained_config(name)
    if config.train.steps > training_steps(earlier) and options.max_days is not None:
        estimate.check_duration(plan, options.max_days)
    material = text_material(config, tokenizer)  # an error here leaves no folder behind
    with Run.open(name, config.to_dict(), fresh=options.fresh) as run:
        found, summary = find_progress(run, config.train.steps)
        if summary is not None:
            return summary
        planned = display.plan_record(plan)
        write_json(run.folder / "plan.json", planned)
        left = 1 - found.step / config.train.steps if found is not None else 1
        say(
            f"{config.train.steps:,} steps of {config.train.batch_tokens:,} tokens on {plan.gpu.name}: about "
            f"{seconds(left * plan.seconds)}{' more' if left < 1 else ''} by the plan"
        )
        if sentence := dial.passes_sentence(config, size.train_tokens):
            say(sentence)
        training, finished = train_within_memory(config, run, options, found, material)
        if not finished:
            raise Interrupted(run, training.step, config.train.steps)
        return finish(training, options, planned)


def find_progress(run: Run, finished_at: int) -> tuple[checkpoint.Checkpoint | None, dict[str, Any] | None]:
    """The newest checkpoint, and the summary if the run has finished with at least `finished_at` steps."""
    found = checkpoint.load_newest(run.checkpoints)
    if found is None:
        run.rewind_metrics(-1)  # what a session logged that was killed before its first checkpoint
    try:
        summary = runs.read_summary(run.folder)
    except UserError as error:
        say(str(error))
        summary = {}
    if found is None or found.step < finished_at or not summary:
        return found, None
    say(f"run '{run.name}' is already finished, at step {found.step}")
    return found, summary


@dataclass(frozen=True)
class Material:
    """What a stage learns from, in which order, and what it is measured by."""

    train: Source
    order: RowOrder
    val: Source
    exam: loop.Exam | None = None


def train_within_memory(
    config: Config,
    run: Run,
    options: BaseOptions,
    found: checkpoint.Checkpoint | None,
    material: Material | None = None,
    parent: checkpoint.Checkpoint | None = None,
    warm: bool = True,
) -> tuple[loop.Training, bool]:
    """Trains; when the device runs out of memory, again from the last checkpoint with half the micro-batch."""
    while True:
        training = assemble(config, run, options, found, material, parent, warm)
        rows = training.loader.rows
        try:
            with training.loader:
                finished = loop.train(training)
        except torch.OutOfMemoryError as error:
            if rows == 1:
                raise UserError(
                    "The device runs out of memory with one row at a time: choose a smaller --depth or --context, or "
                    "--recompute."
                ) from error
        else:
            if training.tracker is not None:
                training.tracker.close()
            return training, finished
        del training
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        if precompile.stop():
            say("out of memory beside processes that precompile kernels; trying again without them")
        else:
            say(f"out of memory with micro-batches of {rows} rows; going on with {rows // 2}")
            options = replace(options, device_batch=rows // 2)
        found = checkpoint.load_newest(run.checkpoints)


def check_vocabulary(config: Config, tokenizer: Tokenizer) -> None:
    if tokenizer.vocab_size != config.model.vocab_size:
        raise UserError(
            f"Tokenizer '{tokenizer.name}' has {tokenizer.vocab_size} tokens and the run {config.model.vocab_size}: "
            "it is not the one the run began with."
        )


class Interrupted(UserError):
    exit_code = 130  # as the shell's, for what was stopped by a signal

    def __init__(self, run: Run, step: int, steps: int) -> None:
        again = runs.resume_command(run.name)
        goes_on = f"this goes on from there: {again}" if again else "the same command goes on from there"
        super().__init__(f"Stopped '{run.name}' at step {step} of {steps} and saved; {goes_on}")


def assemble(
    config: Config,
    run: Run,
    options: BaseOptions,
    found: checkpoint.Checkpoint | None,
    material: Material | None = None,
    parent: checkpoint.Checkpoint | None = None,
    warm: bool = True,
) -> loop.Training:
    """The parts of a run: fresh, from a parent's weights (and its optimizer state, if `warm`), or as a checkpoint left
    them. On text, unless another `material` is given."""
    machine = hardware.detect()
    device = torch.device(machine.device)
    dtype = hardware.compute_dtype(machine, options.dtype)
    if options.deterministic:
        make_deterministic()
    if device.type == "cpu":
        hardware.keep_freed_memory()
    tokenizer = open_tokenizer(config.tokenizer)
    check_vocabulary(config, tokenizer)
    if found is not None:
        loop.check_state(found)
    for saved in (found, parent):
        if saved is not None:
            check_tokenizer(tokenizer, saved)
    compiled = options.compile and device.type == "cuda"
    if compiled:
        compiling.share_triton_cache(device)
    flash_possible = options.backend in ("auto", "flash") and not config.model.document_mask
    if compiled and flash_possible and dtype == torch.bfloat16 and not options.deterministic:
        precompile.start(config.model, options.recipe or DEFAULT_RECIPE, device)
    recipe = resolve_recipe(config, machine, options, found)
    backends = choose_backends(config.model, device, options.backend, dtype, compiled)
    model = build(config.model, device, dtype, backends, config.train.seed)
    fast = fast_path(model, recipe)
    if fast is None and recipe.recompute:
        recompute_blocks(model)
    plain: Callable[..., Tensor] = compiling.compiled(model) if compiled else model
    forward = plain if fast is None else compiling.compiled(fast) if compiled else fast
    groups = group_parameters(model.named_parameters(), config.optim)
    optimizer = Optimizer(groups, config.optim, compiled=compiled)

    recorded = found.state.get("rows") if found is not None else None
    rows = options.device_batch or recorded or memory.micro_batch_rows(config.model, machine, recipe)
    per_step = config.train.batch_tokens // config.model.context
    if per_step < 1:
        raise UserError(
            f"A step of {config.train.batch_tokens:,} tokens is less than one row of {config.model.context:,}: use a "
            "larger --batch-tokens or a smaller --context."
        )
    rows = largest_divisor(per_step, rows)
    material = material or text_material(config, tokenizer)
    loader = Loader(
        material.train,
        rows=rows,
        context=config.model.context,
        order=material.order,
        state=found.state["loader"] if found is not None else None,
        pin_memory=device.type == "cuda",
        ahead=2 * (per_step // rows),  # the next step's are ready when this one ends
        short_last=not compiled,
    )
    gpu = hardware.find_gpu(machine.name) if device.type == "cuda" else None
    training = loop.Training(
        config,
        run,
        model,
        forward,
        optimizer,
        loader,
        bpb_evaluator(material.val, config.model, tokenizer, plain, device, rows, config.train.eval_tokens),
        device,
        exam=material.exam,
        grad_accum_steps=per_step // rows,
        peak_flops=gpu.bf16_tflops * 1e12 if gpu is not None else None,
        loss_scaler=LossScaler(dtype == torch.float16),
        tracker=Tracker(options.track, run.name, config.to_dict()) if options.track else None,
        fast=fast,
        graphed=GraphedMicroStep(forward, model, optimizer.params) if compiled and options.graphs else None,
        recipe=recipe,
        tokenizer=tokenizer.fingerprint,
        is_compiled=compiled,
    )
    if found is not None:
        loop.restore(training, found)
    elif parent is not None:
        loop.load_weights(training, parent, with_optimizer=warm)
    return training


def text_material(config: Config, tokenizer: Tokenizer) -> Material:
    dataset, train = open_dataset(config.data), config.train
    order = RowOrder(train.packing, train.reuse_tails, seed=train.seed)
    sources = (open_source(dataset, split, tokenizer, verify_all=True) for split in ("train", "val"))
    return Material(next(sources), order, next(sources))


def resolve_recipe(
    config: Config, machine: hardware.Hardware, options: BaseOptions, found: checkpoint.Checkpoint | None
) -> Recipe:
    """The recipe that was asked for, else that of the checkpoint, else the default, as this device runs it."""
    wanted = options.recipe or (loop.recorded_recipe(found) if found is not None else DEFAULT_RECIPE)
    dtype = hardware.compute_dtype(machine, options.dtype)
    return resolve(
        wanted, config.model, torch.device(machine.device), dtype, strict=options.recipe is not None
    )


def fast_path(model: GPT, recipe: Recipe) -> FastPath | None:
    """The fast path, where the recipe has anything for it and it supports the model; else the plain model trains."""
    if recipe.is_plain:
        return None
    if names := unsupported(model.config, recipe):
        say(f"training with the plain model: the fast path does not support {', '.join(names)}")
        return None
    return FastPath(model, recipe)


def make_deterministic() -> None:
    """The same bits every time on the same GPU, a little slower. Must come before CUDA is first used.

    Inductor must not choose the tiling of a kernel by timing it: of two processes with empty caches each would make
    its own choice, and even in an elementwise kernel the compiler fuses other multiplications and additions for
    another tiling. (AdamW's second moments differed by 2e-19 at step 3, the losses from step 6 on.)
    """
    import torch._inductor.config as inductor

    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    inductor.deterministic = True
    inductor.triton.autotune_pointwise = False


def finish(t: loop.Training, options: BaseOptions, planned: dict[str, Any]) -> dict[str, Any]:
    """The summary, the samples and the plot of a run that reached its end."""
    from nanorun.report.plots import plot_loss

    summary = summarize(t)
    # Every length is another shape, for which compiled attention would compile again.
    t.model.batch_attention.use_backend("sdpa")
    summary["samples"] = sample(
        t.model, open_dataset(t.config.data), open_tokenizer(t.config.tokenizer), options.samples
    )
    summary["planned"] = display.compare_with_plan(planned, summary)
    t.run.write_summary(summary)
    plot_loss(t.run.name, list(read_metrics(t.run.folder)), t.run.folder / "loss.png")
    return summary


def last_figure(records: Sequence[Mapping[str, Any]], name: str) -> Any:
    """The figure of the last record; None if there is none, as in metrics that were damaged."""
    return records[-1].get(name) if records else None


def median_figure(records: Sequence[Mapping[str, Any]], name: str) -> Any:
    return statistics.median_high([r[name] for r in records if r.get(name) is not None] or [None])


def common_summary(t: loop.Training, steps: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The final figures of every stage, from the records of its steps."""
    return {
        "name": t.run.name,
        "kind": t.config.kind,
        "depth": t.config.model.depth,
        "steps": t.step,
        "tokens": t.tokens,
        "seconds": round(t.seconds, 1),
        "peak_gib": last_figure(steps, "memory_gib"),
        "skipped_steps": sum(bool(r.get("skipped")) for r in steps),
        "device": hardware.detect().name,
        "torch": torch.__version__,
        "finished": time.strftime(runs.TIME_FORMAT, time.gmtime()),
    }


def summarize(t: loop.Training) -> dict[str, Any]:
    """The final figures of a stage that trains on text: base and SFT."""
    records = list(read_metrics(t.run.folder))
    steps, evals = ([r for r in records if r.get("kind") == kind] for kind in ("step", "eval"))
    model = t.config.model
    return {
        **common_summary(t, steps),
        "scaling_parameters": model.scaling_parameters,
        "total_parameters": model.total_parameters,
        "val_bpb": last_figure(evals, "val_bpb"),
        "val_loss": last_figure(evals, "val_loss"),
        "train_loss": last_figure(steps, "loss"),
        "tokens_per_s": median_figure(steps[min(10, len(steps) // 2) :], "tokens_per_s"),
        "mfu": last_figure(steps, "mfu"),
        "fp8": t.recipe.fp8,
        "gemm_library": "quack" if t.recipe.uses_quack else "torch",
    }


def sample(
    model: GPT, dataset: Dataset, tokenizer: Tokenizer, many: int, length: int = 64
) -> list[dict[str, str]]:
    """Continuations of the first words of validation documents."""
    prompts = [_opening(text) for text in islice(_texts(dataset, tokenizer), many)]
    if not prompts:
        prompts = ["The"] * min(many, 1)
    ids = [[tokenizer.bos, *tokenizer.encode(prompt)] for prompt in prompts]
    replies = generate(model, ids, length, temperature=0.8, stop=[tokenizer.bos])
    said = [tokenizer.decode(reply) for reply in replies]
    return [{"prompt": prompt, "text": text} for prompt, text in zip(prompts, said, strict=True)]


def _texts(dataset: Dataset, tokenizer: Tokenizer) -> Iterator[str]:
    """Validation documents, or the beginnings of them."""
    if dataset.kind == "parquet":
        yield from read_texts(dataset, "val")
        return
    source = open_source(dataset, "val", tokenizer)
    for unit in range(source.units):
        block = source.load([unit])
        for start, length in zip(block.documents.starts, block.documents.lengths, strict=True):
            yield tokenizer.decode(block.tokens[start : start + min(length, 64)].tolist())


def _opening(text: str) -> str:
    return " ".join(text.split()[:3]) or "The"
