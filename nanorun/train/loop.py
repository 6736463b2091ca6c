"""One training step, and the loop around it. Every stage (base, SFT, RL) trains through here.

    batches of the step  →  forward and backward of each micro-batch  →  optimizer update, unless loss or gradients
    look wrong (guard)  →  log, and when due: save, evaluate

The loss of a step is the sum over its tokens divided by the number of trained tokens of the whole step, over all
micro-batches and ranks, so splitting the step differently changes nothing. The host waits for the device once a step,
for its loss and gradient norm: whether the update is applied is decided on the device, by limits that the guard
derives from earlier steps.

Reinforcement learning has a step of its own (rl.py), which ends in the same `update`; the loop is this one.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from nanorun import checkpoint
from nanorun.config import Config
from nanorun.console import Progress, say
from nanorun.data.loader import Batch, to_device
from nanorun.errors import UserError
from nanorun.infer.load import check_weights
from nanorun.json_files import check_shape
from nanorun.model.fast.path import FastPath
from nanorun.model.fast.recipe import PLAIN_RECIPE, Recipe, current_names
from nanorun.model.gpt import GPT
from nanorun.optim import schedules
from nanorun.optim.optimizer import Optimizer
from nanorun.optim.schedules import ScheduledHyperparameters
from nanorun.runs import Run, read_metrics
from nanorun.train.graphed import GraphedMicroStep
from nanorun.train.guard import LossScaler, StepVerdict, StopSignals, ThroughputMonitor, TrainingGuard
from nanorun.train.track import Tracker

Kind = Literal["eval", "chat"]  # of an evaluation during training


class BatchSource(AbstractContextManager[Any], Protocol):
    """What steps train on, one `next` after the other; another instance continues from its `state`."""

    @property
    def rows(self) -> int: ...  # of a micro-batch

    def __iter__(self) -> Iterator[Any]: ...

    def __next__(self) -> Any: ...

    def state(self) -> dict[str, Any]: ...


class Evaluation(Protocol):
    def figures(self) -> dict[str, Any]: ...  # for the log

    def sentence(self) -> str: ...  # for the progress bar


@dataclass(frozen=True)
class Exam:
    """A chat evaluation during training, besides the validation loss."""

    every: int  # steps, and at the end
    ask: Callable[[GPT], Evaluation]


@dataclass
class Training:
    """Everything a run consists of. A checkpoint of what `save` writes is all it needs to resume."""

    config: Config
    run: Run
    model: GPT
    forward: Callable[..., Tensor]  # the loss of the model or its fast path, compiled where that pays
    optimizer: Optimizer
    loader: BatchSource
    evaluate: Callable[[], Evaluation]
    device: torch.device
    exam: Exam | None = None
    grad_accum_steps: int = 1  # micro-batches of a step
    peak_flops: float | None = None  # of the device, for MFU
    guard: TrainingGuard = field(default_factory=TrainingGuard)
    loss_scaler: LossScaler = field(default_factory=lambda: LossScaler(False))
    throughput: ThroughputMonitor = field(default_factory=ThroughputMonitor)
    unit: Literal["tok", "step"] = "tok"  # of the progress bar
    position: dict[str, Any] = field(default_factory=dict)  # of the loader, after the last complete step
    should_stop: Callable[[], object] = lambda: False  # called before each micro-batch
    on_micro_batch: Callable[[float], object] = lambda size: (
        None
    )  # called after each micro-batch, with its size
    step: int = 0  # completed updates
    tokens: int = 0  # trained on so far
    seconds: float = 0.0  # spent training, without evaluation and saving
    tracker: Tracker | None = None
    fast: FastPath | None = None  # what `forward` computes; None: the plain model
    graphed: GraphedMicroStep | None = None  # `forward` and backward as a CUDA graph
    recipe: Recipe = PLAIN_RECIPE  # as resolved for this device
    tokenizer: str | None = None  # the fingerprint of the one that the weights are for
    is_compiled: bool = False

    def __post_init__(self) -> None:
        self.position = self.position or self.loader.state()

    def log(self, record: dict[str, Any]) -> None:
        self.run.log(record)
        if self.tracker is not None:
            self.tracker.log(record)


@dataclass(frozen=True)
class Step:
    """What one step did."""

    loss: float
    norm: float
    tokens: int  # trained on
    input_tokens: int  # trained or not (padding, user messages): throughput counts these
    seconds: float
    waited: float  # of them, for data
    verdict: StepVerdict
    lr_scale: float  # of the schedule, 1 at the peak
    figures: Mapping[str, Any] = field(default_factory=dict)  # more for the log
    note: str = ""  # for the progress bar


class OutOfData(Exception):
    """All epochs are done."""


class DataUnavailable(UserError):
    """The next batch cannot be loaded, such as from a shard that was damaged or removed. The weights are intact."""


class StepInterrupted(Exception):
    """The step was interrupted by a stop request. It has no effect and will run again from its start."""


def train_step(t: Training) -> Step:
    """One step. Where epochs are counted, the last step may be a short one."""
    start = time.perf_counter()
    hyperparameters = schedules.scheduled_hyperparameters(t.step, t.config.train.steps, t.config.optim)
    try:
        batches: list[Batch] = list(islice(t.loader, t.grad_accum_steps))
    except UserError as error:
        raise DataUnavailable(str(error)) from error
    if not batches:
        raise OutOfData
    trained = sum(batch.trained_tokens for batch in batches)
    waited = time.perf_counter() - start

    total = torch.zeros((), device=t.device)
    for batch in batches:
        if t.should_stop():
            raise StepInterrupted
        tokens, targets, docs = to_device(batch, t.device, t.config.model.document_mask)
        if t.graphed is not None:  # the two lines below, captured as a CUDA graph
            loss = t.graphed(tokens, targets, docs, trained, t.loss_scaler.scale)
        else:
            loss = t.forward(tokens, targets, docs) / trained
            (loss * t.loss_scaler.scale).backward()
        total += loss.detach()
        t.on_micro_batch(batch.inputs.numel())
    loss_now, norm_now, verdict = update(t, total, hyperparameters)
    t.step += 1
    t.tokens += trained
    t.position = t.loader.state()
    seconds = time.perf_counter() - start
    t.seconds += seconds
    return Step(
        loss=loss_now,
        norm=norm_now,
        tokens=trained,
        input_tokens=sum(batch.inputs.numel() for batch in batches),
        seconds=seconds,
        waited=waited,
        verdict=verdict,
        lr_scale=hyperparameters.lr_scale,
    )


def update(
    t: Training, loss: Tensor, hyperparameters: ScheduledHyperparameters
) -> tuple[float, float, StepVerdict]:
    """One optimizer update, unless loss or gradients look wrong. Returns loss, gradient norm and the verdict."""
    norm = t.optimizer.clip_grad_norm(t.config.optim.max_grad_norm, t.loss_scaler.scale)
    largest_loss, largest_norm = t.guard.limits()
    t.optimizer.step(hyperparameters, apply_update=(loss <= largest_loss) & (norm <= largest_norm))
    t.optimizer.zero_grad(keep_buffers=t.graphed is not None)
    if t.fast is not None:  # after zero_grad, which drops its gradient buffers unless a CUDA graph keeps them
        t.fast.refresh()

    loss_now, norm_now = torch.stack([loss.float(), norm.float()]).tolist()
    overflow = t.loss_scaler.active and t.loss_scaler.update(loss_now, norm_now)
    verdict: StepVerdict = "skip" if overflow else t.guard.check(loss_now, norm_now)
    if overflow:
        t.guard.reason = (
            f"gradients overflowed fp16; the loss is scaled by {t.loss_scaler.scale:g} from now on"
        )
    if verdict != "ok":
        t.optimizer.discard_step()
    return loss_now, norm_now, verdict


def train(t: Training, take_step: Callable[[Training], Step] = train_step) -> bool:
    """Trains to the last step, saving and evaluating when due. Returns False when a signal stopped it, after saving."""
    train = t.config.train
    last_save = time.monotonic()
    size = 1 if t.unit == "step" else train.batch_tokens
    total, done = train.steps * size, t.step * size
    with StopSignals() as stop, Progress(f"training {t.run.name}", total, t.unit, done=done) as bar:
        if t.step:  # the last session may have been killed between saving and evaluating
            log_missing_evaluations(t, evaluations_due(t))
        t.should_stop = lambda: stop.requested
        # On CUDA the host runs ahead of the device, so progress in tokens advances with each step.
        by_micro_batch = t.device.type != "cuda" or t.unit == "step"
        t.on_micro_batch = bar.advance if by_micro_batch else t.on_micro_batch
        while t.step < train.steps and not stop.requested:
            try:
                step = take_step(t)
            except StepInterrupted:
                break
            except OutOfData:  # a rollback repeated steps, and data is never used twice
                save_last(t)
                log_missing_evaluations(t, evaluations_due(t, ended=True))
                return True
            except DataUnavailable:
                if t.step and t.step not in checkpoint.steps(t.run.checkpoints):
                    with suppress(checkpoint.NonFinite):  # the data is what the user must know of
                        save(t)
                raise
            t.log(step_record(t, step))
            note = step.note or f"step {t.step}/{train.steps}, loss {step.loss:.3f}"
            bar.advance(0 if by_micro_batch else step.input_tokens, note)
            if warning := t.throughput.record(step.input_tokens, step.seconds, step.waited):
                bar.note(warning)
            if step.verdict != "ok":
                bar.note(f"step {t.step} skipped: {t.guard.reason}")
            if step.verdict == "rollback" and roll_back(t, "several bad steps in a row"):
                continue
            minutes = (time.monotonic() - last_save) / 60
            due = evaluations_due(t)
            if due or t.step % train.save_every == 0 or minutes >= train.save_minutes:
                with bar.aside():
                    saved = save_or_roll_back(t)
                last_save = time.monotonic()
                if not saved:
                    continue
            for kind in due:
                with bar.aside():
                    result = log_evaluation(t, kind)
                bar.note(f"{result.sentence()} at step {t.step}")
        if t.step < train.steps:
            save_last(t)
    return t.step == train.steps


def step_record(t: Training, step: Step) -> dict[str, Any]:
    speed = step.input_tokens / step.seconds
    mfu = t.config.model.flops_per_token * speed / t.peak_flops if t.peak_flops else None
    memory = torch.cuda.max_memory_allocated(t.device) if t.device.type == "cuda" else None
    return {
        "kind": "step",
        "step": t.step,
        "loss": step.loss,
        "tokens": t.tokens,
        "seconds": round(t.seconds, 4),
        "tokens_per_s": round(speed, 1),
        "mfu": mfu,
        "memory_gib": memory and memory / 2**30,
        "lr_scale": step.lr_scale,
        "grad_norm": step.norm,
        "data_wait_s": round(step.waited, 4),
        "skipped": step.verdict != "ok",
        **step.figures,
    }


def evaluations_due(t: Training, ended: bool = False) -> list[Kind]:
    """What is measured at this step."""
    every: dict[Kind, int] = {"eval": t.config.train.eval_every}
    if t.exam is not None:
        every["chat"] = t.exam.every
    ended = ended or t.step == t.config.train.steps
    return [kind for kind, steps in every.items() if ended or (steps > 0 and t.step % steps == 0)]


def log_missing_evaluations(t: Training, kinds: Sequence[Kind]) -> None:
    logged = [(record.get("kind"), record.get("step")) for record in read_metrics(t.run.folder)]
    for kind in kinds:
        if (kind, t.step) not in logged:
            log_evaluation(t, kind)


def log_evaluation(t: Training, kind: Kind = "eval") -> Evaluation:
    result = t.exam.ask(t.model) if kind == "chat" and t.exam is not None else t.evaluate()
    record = {"kind": kind, "step": t.step, "tokens": t.tokens, "seconds": round(t.seconds, 4)}
    t.log({**record, **result.figures()})
    return result


def save(t: Training) -> None:
    """Raises NonFinite, and writes nothing, if a weight is NaN or infinite."""
    state = {
        "step": t.step,
        "tokens": t.tokens,
        "seconds": t.seconds,
        "rows": t.loader.rows,
        "loader": t.position,
        "guard": t.guard.state_dict(),
        "scale": t.loss_scaler.state_dict(),
        "recipe": t.recipe.to_dict(),
        "tokenizer": t.tokenizer,
        "numerics": numerics(t),
    }
    t.run.fail_if_removed()
    folder = t.run.checkpoints
    rng = {f"rng.{name}": tensor for name, tensor in checkpoint.rng_state().items()}
    checkpoint.save(folder, t.step, t.model.state_dict(), {**t.optimizer.state_dict(), **rng}, state)
    checkpoint.prune(folder, t.config.train.keep_checkpoints)


def save_or_roll_back(t: Training) -> bool:
    """Saves. Damaged weights, which cannot be saved, are replaced by those of the last checkpoint: returns False."""
    try:
        save(t)
    except checkpoint.NonFinite as error:
        if not checkpoint.steps(t.run.checkpoints):
            raise _unsaved(t, error) from error
        t.guard.count_rollback(str(error))
        roll_back(t, str(error))
        return False
    return True


def save_last(t: Training) -> None:
    """Saves before the loop ends."""
    try:
        save(t)
    except checkpoint.NonFinite as error:
        raise _unsaved(t, error) from error


def _unsaved(t: Training, error: checkpoint.NonFinite) -> UserError:
    last = checkpoint.steps(t.run.checkpoints)
    again = f"resumes from step {last[-1]}" if last else "starts over"
    return UserError(
        f"Step {t.step} of '{t.run.name}' is not saved: {error}. The same command {again}; if this is repeated, lower "
        "the learning rates in a copy of the run's config.json (--config), or test the memory of this machine."
    )


_GUARD_SHAPE = {
    "norms": [float],
    "losses": [float],
    **dict.fromkeys(("in_a_row?", "spikes_in_a_row?", "skips?", "rollbacks?", "position?", "trouble?"), int),
}
_STATE_SHAPE = {
    "tokens": int,
    "seconds": float,
    "rows?": int,
    "loader": dict,
    "guard": _GUARD_SHAPE,
    "scale": {"scale?": float, "good?": int},
    **dict.fromkeys(("recipe?", "numerics?", "means?"), dict),
}


def check_state(found: checkpoint.Checkpoint) -> None:
    """UserError unless the state of a checkpoint is one that `restore` can read."""
    try:
        check_shape(found.state, _STATE_SHAPE)
        if found.state.get("rows", 1) < 1:
            raise ValueError(f"rows is {found.state['rows']}, not at least 1")
    except ValueError as error:
        raise UserError(
            f"{found.path / checkpoint.STATE} is damaged ({error}): remove {found.path} to resume from the checkpoint "
            "before it, or start over with --fresh."
        ) from error


def restore(t: Training, found: checkpoint.Checkpoint) -> None:
    """Weights, optimizer, random numbers and counters of a checkpoint. The loader is made from its state."""
    load_weights(t, found)
    t.step = found.step
    checkpoint.restore_rng({n[4:]: s for n, s in found.optimizer.items() if n.startswith("rng.")})
    t.tokens, t.seconds = found.state["tokens"], found.state["seconds"]
    t.position = found.state["loader"]
    t.guard.load_state_dict(found.state["guard"])
    t.loss_scaler.load_state_dict(found.state["scale"])
    warn_about_numerics(t, found.state)
    t.run.rewind_metrics(found.step)
    say(f"resuming '{t.run.name}' from step {found.step} of {t.config.train.steps}")


def numerics(t: Training) -> dict[str, str]:
    """What rounding depends on besides the configuration and the recipe."""
    cuda = t.device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(t.device) if cuda else t.device.type,
        "torch": torch.__version__,
        "dtype": str(t.model.dtype).removeprefix("torch."),
        "attention": ", ".join(sorted(set(t.model.batch_attention.backends))),
        "compiled": "yes" if t.is_compiled else "no",
    }


def warn_about_numerics(t: Training, state: Mapping[str, Any]) -> None:
    """Logs when a resumed run computes otherwise than its checkpoint did: the losses are then not bit-identical."""
    before = state.get("numerics", state.get("means", {})) | current_names(state.get("recipe", {}))
    now = numerics(t) | t.recipe.to_dict()
    changed = [
        f"{name} was {before[name]} and is {now[name]}"
        for name in now
        if before.get(name, now[name]) != now[name]
    ]
    if changed:
        say(f"resuming with different numerics: {'; '.join(changed)}")


def recorded_recipe(found: checkpoint.Checkpoint) -> Recipe:
    """The recipe that a checkpoint was computed with. Earlier versions recorded only its FP8 mode."""
    if "recipe" in found.state:
        return Recipe.from_dict(found.state["recipe"])
    return Recipe(fp8=found.state.get("means", {}).get("eight bits", "none"))


def load_weights(t: Training, found: checkpoint.Checkpoint, with_optimizer: bool = True) -> None:
    check_weights(found.model, t.model)
    t.model.load_state_dict(found.model)
    if t.fast is not None:  # its FP8 copies are of the old weights
        t.fast.refresh()
    if with_optimizer:
        t.optimizer.load_state_dict({n: s for n, s in found.optimizer.items() if not n.startswith("rng.")})


def roll_back(t: Training, reason: str) -> bool:
    """Restores the last checkpoint, and continues with the data after the bad steps, which would fail again."""
    found = checkpoint.load_newest(t.run.checkpoints)
    if found is None:
        say(f"step {t.step}: {reason} and no checkpoint yet; skipping them")
        return False
    say(f"step {t.step}: {reason}; rolling back to step {found.step} and skipping this data")
    load_weights(t, found)
    t.step = found.step
    t.guard.load_rolled_back_state(found.state["guard"])
    t.run.rewind_metrics(found.step)
    return True
