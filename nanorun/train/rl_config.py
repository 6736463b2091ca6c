"""The configuration of a reinforcement learning run: its options, and what follows from the run that it starts from.

The learning rates are the parent's times 0.05 (`--lr-fraction`) and fall linearly to 0.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from nanorun import checkpoint, home
from nanorun.config import Config, TrainConfig
from nanorun.console import command
from nanorun.errors import UserError
from nanorun.evals.chat import open_task as open_by_name
from nanorun.runs import load_config, newest_run, read_config
from nanorun.tasks.task import Task

LR_FRACTION = 0.05  # of the parent's learning rates, by default
MAX_DEFAULT_STEPS = 500

OpenTask = Callable[[str, str], Task]


@dataclass(frozen=True)
class RLConfig:
    """What is trained on what: part of a run's config.json."""

    parent: str  # the run whose weights are the start, and the reference of the KL penalty
    parent_step: int
    tasks: tuple[str, ...]
    problems: int = 16  # per step
    samples: int = 16  # rollouts per problem
    max_tokens: int = 256
    temperature: float = 1.0
    clip: float | None = None  # of the importance ratio
    kl: float = 0.0  # coefficient of the KL penalty
    inner_updates: int = 1  # with the rollouts of one step
    normalize_std: bool = False
    eval_problems: int = 64  # held out, with as many rollouts each

    def __post_init__(self) -> None:
        if self.samples < 2:
            raise UserError(
                f"--samples is {self.samples}: it must be at least 2, to compare replies to a problem."
            )
        if not self.temperature > 0:
            raise UserError(
                f"--temperature is {self.temperature}: it must be more than 0, or all samples are equal."
            )
        if self.clip is not None and not 0 < self.clip < 1:
            raise UserError(f"--clip is {self.clip}: it must lie between 0 and 1, such as 0.2.")
        if not 0 <= self.kl < float("inf"):
            raise UserError(f"--kl is {self.kl}: it must be 0 or more, such as 0.01.")
        if min(self.problems, self.max_tokens, self.inner_updates, self.eval_problems) < 1:
            raise UserError("Problems, max-tokens, inner-updates and eval-problems must each be at least 1.")


def configure(
    tasks: Sequence[str],
    *,
    parent: str | None = None,
    name: str | None = None,
    fresh: bool = False,
    steps: int | None = None,
    open_task: OpenTask = open_by_name,
    train: dict[str, Any] | None = None,
    lr_fraction: float = LR_FRACTION,
    **options: Any,
) -> tuple[str, Config, RLConfig]:
    """The run's name and configuration. An existing run keeps its parent."""
    if name is None:
        name = f"rl-d{load_config(parent or _newest_parent()).model.depth}"
    exists = not fresh and (home.runs_dir() / name / "config.json").is_file()
    saved = read_config(name).get("rl") if exists else None
    parent = parent or (saved["parent"] if saved is not None else _newest_parent())
    inherited = load_config(parent)
    if saved is not None and saved["parent"] == parent and "parent_step" in saved:
        parent_step = saved["parent_step"]
    else:
        parent_steps = checkpoint.steps(home.runs_dir() / parent / "checkpoints")
        if not parent_steps:
            raise UserError(f"The run '{parent}' has no checkpoint yet: continue its training.")
        parent_step = parent_steps[-1]
    if not 0 < lr_fraction < float("inf"):
        raise UserError(f"--lr-fraction is {lr_fraction}: it must be more than 0, such as 0.05.")
    if not tasks:
        raise UserError("Name a task to train on: --task NAME, or your own, --task file.py:Class.")
    rl = RLConfig(parent, parent_step, tuple(tasks), **options)
    if steps is None:
        problems = sum(len(open_task(spec, "train")) for spec in tasks)
        steps = min(-(-problems // rl.problems), MAX_DEFAULT_STEPS)  # one epoch
    batch_tokens = rl.problems * rl.samples * rl.max_tokens
    defaults: dict[str, Any] = {"eval_every": 25, "save_every": 25, "save_minutes": 10.0, "seed": 0}
    config = replace(
        inherited,
        model=replace(inherited.model, dropout=0.0),  # the policy is what was sampled from
        optim=inherited.optim.fine_tuning(lr_fraction, warmdown=1.0),
        train=TrainConfig(steps=steps, batch_tokens=batch_tokens, **{**defaults, **(train or {})}),
        kind="rl",
    )
    return name, config, rl


def _newest_parent() -> str:
    name = newest_run("sft") or newest_run("base")
    if name is None:
        raise UserError(
            f"There is no model to start from in {home.runs_dir()}: {command('speedrun')} trains one."
        )
    return name
