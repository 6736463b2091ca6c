"""`train rl`: reinforcement learning from a task's rewards, on the model's own replies.

    a step:  draw problems  →  sample rollouts of each with the current weights (rollouts.py)  →  rewards by the task,
             advantages  →  the policy gradient over all sampled tokens (policy.py)  →  update

The rest is the loop of every stage (loop.py): guard, checkpoints, signals, evaluation.

On-policy means that the rollouts are sampled by the very weights that are trained. Engine and trainer compute the same
probabilities by different code, so each step logs the difference of their log-probabilities (`logprob_gap`, nats per
token): about 1e-6 in fp32, about 1e-2 in bf16.
"""

import functools
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor

from nanorun import checkpoint, hardware, home
from nanorun.config import Config, Dtype
from nanorun.console import Progress, command, say
from nanorun.errors import UserError
from nanorun.evals.chat import open_task as open_by_name
from nanorun.infer.load import check_tokenizer, model_from_weights
from nanorun.model.gpt import GPT
from nanorun.optim.groups import group_parameters
from nanorun.optim.optimizer import Optimizer
from nanorun.optim.schedules import scheduled_hyperparameters
from nanorun.runs import CHAT_KINDS, Run, read_config, read_metrics
from nanorun.text.store import open_tokenizer
from nanorun.train import loop
from nanorun.train.base import Interrupted, common_summary, find_progress, make_deterministic, median_figure
from nanorun.train.guard import LossScaler, StepVerdict, ThroughputMonitor, TrainingGuard
from nanorun.train.policy import Rollout, micro_batches, policy_loss, token_logprobs
from nanorun.train.rl_config import OpenTask, RLConfig, configure
from nanorun.train.rollouts import RolloutSource, TaskSplits, open_tasks

FIRST_EVALUATION_S = 120.0  # or as long as the sampling of one step, if that is longer
MICRO_TOKENS = {"cuda": 16_384, "mps": 4_096, "cpu": 4_096}
REFERENCE = "reference"  # the parent's weights, kept for the KL penalty

__all__ = ["RLOptions", "configure", "train_rl"]


@dataclass(frozen=True)
class RLOptions:
    """How to run, not what to train."""

    fresh: bool = False
    device_batch: int | None = None  # rollouts per micro-batch
    dtype: Dtype = "auto"
    compile: bool = True  # the optimizer, on CUDA
    deterministic: bool = False


def train_rl(
    name: str, config: Config, rl: RLConfig, options: RLOptions, open_task: OpenTask = open_by_name
) -> dict[str, Any]:
    """Trains, or resumes; returns the summary that is also written to the run's folder."""
    if name == rl.parent:
        raise UserError(f"The run '{name}' cannot start from itself: choose another --name.")
    if options.deterministic:
        make_deterministic()
    open_tokenizer(config.tokenizer)  # an error here leaves no folder behind
    tasks = open_tasks(rl, open_task)
    with Run.open(name, {**config.to_dict(), "rl": asdict(rl)}, fresh=options.fresh) as run:
        found, summary = find_progress(run, config.train.steps)
        if summary is not None:
            return summary
        if found is None and read_config(rl.parent).get("kind") not in CHAT_KINDS:
            say(
                f"'{rl.parent}' is a base model, not trained to answer: few replies will get a reward. "
                f"Run {command('train sft')} --from {rl.parent} first."
            )
        say(
            f"loading '{rl.parent if found is None else name}': {rl.problems} problems a step, {rl.samples} replies "
            f"each, at most {rl.max_tokens} tokens"
        )
        training, reference = assemble(config, rl, run, options, found, tasks)
        with training.loader:
            if found is None:
                evaluate_parent(training, rl)
            step = functools.partial(rl_step, rl=rl, reference=reference)
            if not loop.train(training, step):
                raise Interrupted(run, training.step, config.train.steps)
            return finish(training, rl)


def evaluate_parent(t: loop.Training, rl: RLConfig) -> None:
    """Measures the weights that the run starts from. Its duration limits the number of held-out problems."""
    source = cast(RolloutSource, t.loader)
    problems = len(source.held_out)
    with Progress(f"evaluating {rl.parent} on held-out problems", problems * rl.samples, "reply") as bar:
        evaluate = functools.partial(
            source.evaluate, on_sample=functools.partial(bar.advance, 1), seconds=FIRST_EVALUATION_S
        )
        result = loop.log_evaluation(replace(t, evaluate=evaluate))
    t.position = source.state()
    kept = len(source.held_out)
    few = f", not {problems}, to keep it near {FIRST_EVALUATION_S:.0f} seconds" if kept < problems else ""
    say(f"{result.sentence()} before the first step (on {kept} problems{few})")


def assemble(
    config: Config,
    rl: RLConfig,
    run: Run,
    options: RLOptions,
    found: checkpoint.Checkpoint | None,
    tasks: TaskSplits,
) -> tuple[loop.Training, GPT | None]:
    """The parts of a run, new or restored from a checkpoint; and the reference model, if the KL penalty needs one."""
    machine = hardware.detect()
    device, dtype = torch.device(machine.device), hardware.compute_dtype(machine, options.dtype)
    tokenizer, start = open_tokenizer(config.tokenizer), found or _parent_checkpoint(run, rl)
    check_tokenizer(tokenizer, start)
    if found is not None:
        loop.check_state(found)
    model = model_from_weights(start.model, config.model, device, dtype)
    reference = None
    if rl.kl:
        kept = checkpoint.load_newest(run.folder / REFERENCE)
        if kept is None:
            kept = _parent_checkpoint(run, rl)
            checkpoint.save(run.folder / REFERENCE, 0, kept.model, {}, {})
        reference = model_from_weights(kept.model, config.model, device, dtype).requires_grad_(False)
    groups = group_parameters(model.named_parameters(), config.optim)
    length = min(2 * rl.max_tokens, config.model.context)  # estimated: a prompt is seldom longer than a reply
    rows = max(MICRO_TOKENS[device.type] // length, 1)
    saved = found.state if found is not None else {}
    source = RolloutSource(
        model,
        tokenizer,
        rl,
        tasks,
        seed=config.train.seed,
        rows=options.device_batch or saved.get("rows") or rows,
        state=saved.get("loader"),
    )
    training = loop.Training(
        config,
        run,
        model,
        model,
        Optimizer(groups, config.optim, compiled=options.compile and device.type == "cuda"),
        source,
        source.evaluate,
        device,
        guard=TrainingGuard(norm_factor=1e4),  # gradients vary with the rewards: only an explosion is a fault
        loss_scaler=LossScaler(dtype == torch.float16),
        throughput=ThroughputMonitor(min_fraction=0.0),  # reply lengths vary, and throughput with them
        unit="step",
        tokenizer=tokenizer.fingerprint,
    )
    source.on_sample = lambda: training.on_micro_batch(1 / (rl.problems * rl.samples))  # of a step
    if found is not None:
        loop.restore(training, found)
    return training, reference


def rl_step(t: loop.Training, rl: RLConfig, reference: GPT | None) -> loop.Step:
    """One step of reinforcement learning: sample rollouts, then one or more updates with them."""
    start = time.perf_counter()
    hyperparameters = scheduled_hyperparameters(t.step, t.config.train.steps, t.config.optim)
    batch = next(cast(RolloutSource, t.loader))
    rollouts = [r for r in batch.rollouts if r.advantage or reference is not None]  # others have no gradient
    sampled_tokens = sum(rollout.sampled_tokens for rollout in batch.rollouts)
    sampling_seconds = time.perf_counter() - start

    loss, norm = 0.0, 0.0
    verdict: StepVerdict = "ok"
    old_logprobs: Tensor | None = None  # before the first update: those of the weights that sampled
    sums = torch.zeros(4)
    for _ in range(rl.inner_updates if rollouts else 0):
        total, sums, logprobs = forward_backward(t, rl, reference, rollouts, old_logprobs, sampled_tokens)
        old_logprobs = logprobs if old_logprobs is None else old_logprobs
        loss, norm, verdict = loop.update(t, total, hyperparameters)
        if verdict != "ok":
            break
    t.step += 1
    t.tokens += sampled_tokens
    t.position = t.loader.state()
    seconds = time.perf_counter() - start
    t.seconds += seconds

    clipped, divergence, gap, max_gap = sums.tolist()
    tokens = sum(rollout.sampled_tokens for rollout in rollouts)
    train_seconds = max(seconds - sampling_seconds, 1e-9)
    figures = {
        **batch.figures(),
        "clip_share": clipped / tokens if tokens else 0.0,
        "kl": divergence / tokens if reference is not None else None,
        "logprob_gap": gap / tokens if tokens else None,
        "logprob_gap_max": max_gap if tokens else None,
        "train_s": round(train_seconds, 4),
        "train_tokens_per_s": round(tokens / train_seconds, 1),
    }
    return loop.Step(
        loss=loss,
        norm=norm,
        tokens=sampled_tokens,
        input_tokens=sampled_tokens,
        seconds=seconds,
        waited=sampling_seconds,
        verdict=verdict,
        lr_scale=hyperparameters.lr_scale,
        figures=figures,
        note=f"step {t.step}/{t.config.train.steps}, reward {figures['reward']:.3f}",
    )


def forward_backward(
    t: loop.Training,
    rl: RLConfig,
    reference: GPT | None,
    rollouts: Sequence[Rollout],
    old_logprobs: Tensor | None,
    sampled_tokens: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Accumulates the gradients of all rollouts. Returns the loss; the sums of clipped tokens, KL divergence and gap
    between engine and trainer, and the largest gap; and the log-probabilities of all sampled tokens.

    When the device runs out of memory, repeats with half the micro-batch.
    """
    source = cast(RolloutSource, t.loader)
    try:
        batches = micro_batches(rollouts, source.rows)
        sizes = [len(batch.targets) for batch in batches]
        old = old_logprobs.split(sizes) if old_logprobs is not None else None
        total, sums = torch.zeros((), device=t.device), torch.zeros(4, device=t.device)
        all_logprobs: list[Tensor] = []
        for i, batch in enumerate(batches):
            batch = batch.to(t.device)
            logprobs = token_logprobs(t.model, batch, rl.temperature)
            all_logprobs.append(logprobs.detach())
            sampled_with = old[i] if old is not None else all_logprobs[i]
            reference_logprobs = None
            if reference is not None:
                with torch.no_grad():
                    reference_logprobs = token_logprobs(reference, batch, rl.temperature)
            loss, clipped, divergence = policy_loss(
                logprobs,
                sampled_with,
                batch.advantages,
                clip=rl.clip,
                reference_logprobs=reference_logprobs,
                kl=rl.kl,
            )
            loss = loss / sampled_tokens
            (loss * t.loss_scaler.scale).backward()
            total += loss.detach()
            gap = (sampled_with - batch.logprobs).abs()
            sums[:3] += torch.stack([clipped.to(gap.dtype), divergence, gap.sum()])
            sums[3] = torch.maximum(sums[3], gap.max())
        return total, sums, torch.cat(all_logprobs)
    except torch.OutOfMemoryError as error:
        if source.rows == 1:
            raise UserError(
                "The device runs out of memory with one reply at a time: choose a smaller --max-tokens."
            ) from error
    t.optimizer.zero_grad()
    if t.device.type == "cuda":
        torch.cuda.empty_cache()
    say(f"out of memory with {source.rows} replies per micro-batch; continuing with {source.rows // 2}")
    source.rows //= 2
    return forward_backward(t, rl, reference, rollouts, old_logprobs, sampled_tokens)


def finish(t: loop.Training, rl: RLConfig) -> dict[str, Any]:
    """Writes the summary and the plot of a finished run."""
    from nanorun.report.plots import plot_reward

    records = list(read_metrics(t.run.folder))
    steps = [record for record in records if record.get("kind") == "step"]
    first_eval = next((record for record in records if record.get("kind") == "eval"), {})
    source = cast(RolloutSource, t.loader)
    last = source.last_result or source.evaluate()
    before = {key: value for key, value in first_eval.items() if key.startswith("val_")}
    before = before if first_eval.get("step") == 0 else {}
    rewards = [record["reward"] for record in steps if record.get("reward") is not None]
    tenth = max(len(rewards) // 10, 1)
    summary: dict[str, Any] = {
        **common_summary(t, steps),
        "parent": rl.parent,
        "parent_step": rl.parent_step,
        "tasks": list(rl.tasks),
        "first_reward": sum(rewards[:tenth]) / tenth if rewards else None,
        "last_reward": sum(rewards[-tenth:]) / tenth if rewards else None,
        "eval_problems": len(source.held_out),
        "samples_each": rl.samples,
        "val_reward_before": before.get("val_reward"),
        "before": before,
        **last.figures(),
        "rollout_tokens_per_s": median_figure(steps, "rollout_tokens_per_s"),
        "train_tokens_per_s": median_figure(steps, "train_tokens_per_s"),
        "samples": last.examples,
    }
    t.run.write_summary(summary)
    plot_reward(t.run.name, records, t.run.folder / "reward.png")
    return summary


def _parent_checkpoint(run: Run, rl: RLConfig) -> checkpoint.Checkpoint:
    """The parent's weights that the run starts from."""
    path = home.runs_dir() / rl.parent / "checkpoints" / f"{rl.parent_step:06d}"
    try:
        if path.is_dir():
            return checkpoint.load(path)
        reason = "it is gone"
    except checkpoint.Damaged as damage:
        reason = str(damage)
    raise UserError(
        f"The run '{run.name}' starts from step {rl.parent_step} of '{rl.parent}', which cannot be read ({reason}): "
        "start over from its newest checkpoint with --fresh."
    )
