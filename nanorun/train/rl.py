"""`train rl`: reinforcement learning from a task's rewards, on the model's own replies.

    a step:  draw problems  →  sample replies to each with the weights of now (rollouts.py)  →  rewards by the
             task, advantages  →  the policy gradient over all sampled tokens (policy.py)  →  update

The rest is the loop of every stage (loop.py): guard, checkpoints, signals, evaluation on the way.

On-policy means that what is learned from was sampled by the very weights that learn. Engine and trainer compute
the same probabilities by different code, so each step logs how far they are apart (`logprob_gap`, nats a token):
about 1e-6 in fp32, about 1e-2 in bf16.
"""

import functools
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, cast

import torch
from torch import Tensor

from nanorun import checkpoint, hardware, home
from nanorun.config import Config, Dtype
from nanorun.console import say
from nanorun.errors import UserError
from nanorun.evals.chat import open_task as open_by_name
from nanorun.infer.load import model_from_weights
from nanorun.model.gpt import GPT
from nanorun.optim import schedules
from nanorun.optim.groups import group_parameters
from nanorun.optim.optimizer import Optimizer
from nanorun.runs import CHAT_KINDS, Run, read_config, read_metrics
from nanorun.text.store import open_tokenizer
from nanorun.train import loop
from nanorun.train.base import Interrupted, make_deterministic
from nanorun.train.guard import LossScaler, StepVerdict, ThroughputMonitor, TrainingGuard
from nanorun.train.policy import MicroBatch, Sample, micro_batches, policy_loss, token_logprobs
from nanorun.train.rl_config import OpenTask, RLConfig, configure
from nanorun.train.rollouts import Rollouts, Tasks, open_tasks

MICRO_TOKENS_GPU, MICRO_TOKENS_CPU = 16_384, 4_096
REFERENCE = "reference"  # the start, kept where KL needs it


__all__ = ["Options", "configure", "train_rl"]


@dataclass(frozen=True)
class Options:
    """How to run, not what to learn."""

    fresh: bool = False
    device_batch: int | None = None  # samples of a micro-batch
    dtype: Dtype = "auto"
    compile: bool = True  # the optimizer, on CUDA
    deterministic: bool = False


def train_rl(
    name: str, config: Config, rl: RLConfig, options: Options, open_task: OpenTask = open_by_name
) -> dict[str, Any]:
    """Trains, or goes on training; returns the summary that is also kept in the run's folder."""
    if name == rl.parent:
        raise UserError(f"The run '{name}' cannot be its own start: choose another --name.")
    if options.deterministic:
        make_deterministic()
    open_tokenizer(config.tokenizer)  # or say what is wrong, before there is a folder
    tasks = open_tasks(rl, open_task)
    with Run.open(name, {**config.to_dict(), "rl": asdict(rl)}, fresh=options.fresh) as run:
        found = checkpoint.load_newest(run.checkpoints)
        if found is None:
            run.rewind_metrics(-1)  # also where it started from, which is measured again
            if read_config(rl.parent).get("kind") not in CHAT_KINDS:
                say(
                    f"'{rl.parent}' is a base model, which was not taught to answer: few replies will earn anything. "
                    f"nanorun train sft --from {rl.parent} comes before."
                )
        summary = run.folder / "summary.json"
        if found is not None and found.step >= config.train.steps and summary.is_file():
            say(f"run '{name}' is finished already, at step {found.step}")
            done: dict[str, Any] = json.loads(summary.read_text(encoding="utf-8"))
            return done
        training, reference = assemble(config, rl, run, options, found, tasks)
        with training.loader:
            if found is None:
                loop.log_evaluation(training)  # where it starts from
            step = functools.partial(rl_step, rl=rl, reference=reference)
            if not loop.train(training, step):
                raise Interrupted(name, training.step, config.train.steps)
            return finish(training, rl)


def assemble(
    config: Config,
    rl: RLConfig,
    run: Run,
    options: Options,
    found: checkpoint.Checkpoint | None,
    tasks: Tasks,
) -> tuple[loop.Training, GPT | None]:
    """The parts of a run, fresh or as a checkpoint left them; and the reference, where there is one."""
    machine = hardware.detect()
    device, dtype = torch.device(machine.device), hardware.compute_dtype(machine, options.dtype)
    tokenizer = open_tokenizer(config.tokenizer)
    model = model_from_weights((found or _start(run, rl)).model, config.model, device, dtype)
    reference = None
    if rl.kl:
        kept = checkpoint.load_newest(run.folder / REFERENCE)
        if kept is None:
            kept = _start(run, rl)
            checkpoint.save(run.folder / REFERENCE, 0, kept.model, {}, {})
        reference = model_from_weights(kept.model, config.model, device, dtype).requires_grad_(False)
    compiled = options.compile and device.type == "cuda"
    groups = group_parameters(model.named_parameters(), config.optim)
    recorded = found.state.get("rows") if found is not None else None
    tokens = MICRO_TOKENS_GPU if device.type == "cuda" else MICRO_TOKENS_CPU
    longest = min(2 * rl.max_tokens, config.model.context)  # about; a prompt is seldom longer than a reply
    rows = options.device_batch or recorded or max(tokens // longest, 1)
    rollouts = Rollouts(
        model,
        tokenizer,
        rl,
        tasks,
        seed=config.train.seed,
        rows=rows,
        state=found.state["loader"] if found is not None else None,
    )
    training = loop.Training(
        config,
        run,
        model,
        model,
        Optimizer(groups, config.optim, compiled=compiled),
        rollouts,
        rollouts.evaluate,
        device,
        guard=TrainingGuard(
            norm_factor=1e4
        ),  # rewards come and go, and gradients with them: only an explosion is wrong
        scale=LossScaler(dtype == torch.float16),
        watch=ThroughputMonitor(min_fraction=0.0),  # reply lengths vary, and throughput with them
        unit="step",
    )
    if found is not None:
        loop.restore(training, found)
        run.rewind_metrics(found.step)
        say(f"going on with '{run.name}' from step {found.step} of {config.train.steps}")
    return training, reference


def rl_step(t: loop.Training, rl: RLConfig, reference: GPT | None) -> loop.Step:
    """The whole of reinforcement learning, on one screen."""
    start = time.perf_counter()
    rates = schedules.scheduled_hyperparameters(t.step, t.config.train.steps, t.config.optim)
    experience = next(cast(Rollouts, t.loader))
    samples = [s for s in experience.samples if s.advantage or reference is not None]  # others move nothing
    trained = sum(sample.trained for sample in experience.samples)
    begun = time.perf_counter()

    loss, norm = 0.0, 0.0
    verdict: StepVerdict = "ok"
    old: Tensor | None = None  # log-probabilities when they were sampled, which is before the first update
    sums = torch.zeros(4)
    for _ in range(rl.inner_updates if samples else 0):
        total, sums, now = gradients(t, rl, reference, samples, old, trained)
        old = now if old is None else old
        loss, norm, verdict = loop.update(t, total, rates)
        if verdict != "ok":
            break
    t.step += 1
    t.tokens += trained
    t.position = t.loader.state()
    seconds = time.perf_counter() - start
    t.seconds += seconds
    figures = experience.figures() | _figures(sums, samples, reference, max(seconds - (begun - start), 1e-9))
    note = f"step {t.step}/{t.config.train.steps}, reward {figures['reward']:.3f}"
    waited = begun - start
    return loop.Step(loss, norm, trained, seconds, waited, verdict, rates.lr_scale, figures, note)


def gradients(
    t: loop.Training,
    rl: RLConfig,
    reference: GPT | None,
    samples: Sequence[Sample],
    old: Tensor | None,
    trained: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """The loss, its gradients in place; sums for the log; and the log-probabilities of all trained tokens.

    When the device runs out of memory, again with half as many samples at a time.
    """
    rollouts = cast(Rollouts, t.loader)
    rows = rollouts.rows
    try:
        batches = micro_batches(samples, rows)
        sizes = [len(batch.targets) for batch in batches]
        olds = old.split(sizes) if old is not None else [None] * len(batches)
        total, sums, nows = torch.zeros((), device=t.device), torch.zeros(4, device=t.device), list[Tensor]()
        for batch, was in zip(batches, olds, strict=True):
            batch = batch.to(t.device)
            now = token_logprobs(t.model, batch, rl.temperature)
            nows.append(now.detach())
            loss, seen = policy_loss(
                now,
                nows[-1] if was is None else was,
                batch.advantages,
                clip=rl.clip,
                reference=_by_reference(reference, batch, rl.temperature),
                kl=rl.kl,
            )
            loss = loss / trained
            (loss * t.scale.scale).backward()
            total += loss.detach()
            gap = ((nows[-1] if was is None else was) - batch.logprobs).abs()
            sums[:3] += torch.stack([*seen, gap.sum()])
            sums[3] = torch.maximum(sums[3], gap.max())
        return total, sums, torch.cat(nows)
    except torch.OutOfMemoryError as error:
        if rows == 1:
            raise UserError(
                "The device runs out of memory with one reply at a time: choose a smaller --max-tokens."
            ) from error
    t.optimizer.zero_grad()
    t.model.renew()
    if t.device.type == "cuda":
        torch.cuda.empty_cache()
    say(f"out of memory with {rows} replies at a time; going on with {rows // 2}")
    rollouts.rows = rows // 2
    return gradients(t, rl, reference, samples, old, trained)


def _by_reference(reference: GPT | None, batch: MicroBatch, temperature: float) -> Tensor | None:
    if reference is None:
        return None
    with torch.no_grad():
        return token_logprobs(reference, batch, temperature)


def _figures(
    sums: Tensor, samples: Sequence[Sample], reference: GPT | None, seconds: float
) -> dict[str, Any]:
    stopped, apart, gap, most = sums.tolist()
    tokens = sum(sample.trained for sample in samples)
    return {
        "clip_share": stopped / tokens if tokens else 0.0,
        "kl": apart / tokens if reference is not None else None,
        "logprob_gap": gap / tokens if tokens else None,
        "logprob_gap_max": most if tokens else None,
        "train_s": round(seconds, 4),
        "train_tokens_per_s": round(tokens / seconds, 1),
    }


def finish(t: loop.Training, rl: RLConfig) -> dict[str, Any]:
    """The summary and the plot of a run that reached its end."""
    from nanorun.report.plots import plot_reward

    records = list(read_metrics(t.run.folder))
    steps = [record for record in records if record["kind"] == "step"]
    evals = [record for record in records if record["kind"] == "eval"]
    rollouts = cast(Rollouts, t.loader)
    last = rollouts.last or rollouts.evaluate()
    before = {key: value for key, value in evals[0].items() if key.startswith("val_")}
    before = before if evals[0]["step"] == 0 else {}
    few = max(len(steps) // 10, 1)
    summary: dict[str, Any] = {
        "name": t.run.name,
        "kind": "rl",
        "parent": rl.parent,
        "parent_step": rl.parent_step,
        "tasks": list(rl.tasks),
        "depth": t.config.model.depth,
        "steps": t.step,
        "tokens": t.tokens,
        "seconds": round(t.seconds, 1),
        "first_reward": sum(record["reward"] for record in steps[:few]) / few,
        "last_reward": sum(record["reward"] for record in steps[-few:]) / few,
        "eval_problems": len(rollouts.held_out),
        "samples_each": rl.samples,
        "val_reward_before": before.get("val_reward"),
        "before": before,
        **last.figures(),
        "rollout_tokens_per_s": _median([record["rollout_tokens_per_s"] for record in steps]),
        "train_tokens_per_s": _median([record["train_tokens_per_s"] for record in steps]),
        "peak_gib": steps[-1]["memory_gib"],
        "skipped_steps": sum(bool(record["skipped"]) for record in steps),
        "device": hardware.detect().name,
        "torch": torch.__version__,
        "finished": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "samples": last.examples,
    }
    t.run.write_summary(summary)
    plot_reward([(t.run.name, records)], t.run.folder / "reward.png")
    return summary


def _median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]


def _start(run: Run, rl: RLConfig) -> checkpoint.Checkpoint:
    """The parent's weights that the run began with."""
    path = home.runs_dir() / rl.parent / "checkpoints" / f"{rl.parent_step:06d}"
    try:
        if path.is_dir():
            return checkpoint.load(path)
        reason = "it is gone"
    except checkpoint.Damaged as damage:
        reason = str(damage)
    raise UserError(
        f"The run '{run.name}' starts from step {rl.parent_step} of '{rl.parent}', which cannot be read ({reason}): "
        "begin anew from what there is with --fresh."
    )
