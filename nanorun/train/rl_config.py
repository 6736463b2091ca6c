"""What a run of reinforcement learning is told, and what follows from the run that it starts from.

The learning rates are the parent's times 0.05 (`--rate-share`) and fall in a line to 0; nothing decays, since
nothing new is memorised.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from nanorun import checkpoint, home
from nanorun.config import Config, TrainConfig
from nanorun.errors import UserError
from nanorun.evals.chat import open_task as open_by_name
from nanorun.runs import list_runs, read_config
from nanorun.tasks.task import Task

RATE_SHARE = 0.05  # of the parent's rates, unless told otherwise
MOST_STEPS = 500  # unless more are asked for

OpenTask = Callable[[str, str], Task]


@dataclass(frozen=True)
class RLConfig:
    """What is learned from what: part of a run's config.json."""

    parent: str  # the run whose weights are the start, and the reference
    parent_step: int
    tasks: tuple[str, ...]
    problems: int = 16  # a step
    samples: int = 16  # of each problem
    max_tokens: int = 256
    temperature: float = 1.0
    clip: float | None = None
    kl: float = 0.0
    inner_updates: int = 1  # with the samples of one step
    normalize_std: bool = False
    eval_problems: int = 64  # held out, as many samples of each

    def __post_init__(self) -> None:
        if self.samples < 2:
            raise UserError("--samples must be at least 2: a reply is judged by comparing it with others.")
        if not self.temperature > 0:
            raise UserError("--temperature must be more than 0: without chance all samples are the same.")
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
    rate_share: float = RATE_SHARE,
    **changes: Any,
) -> tuple[str, Config, RLConfig]:
    """The run's name and configuration: what is asked for, and what follows from the parent.

    A run that exists already remembers its parent.
    """
    old = _recorded(name) if name is not None and not fresh else None
    if name is None:
        name = f"rl-d{read_config(parent or _newest_parent())['model']['depth']}"
        old = _recorded(name) if not fresh else None
    parent = parent or (old["parent"] if old is not None else _newest_parent())
    theirs = Config.from_dict(read_config(parent))
    if old is not None and old["parent"] == parent:
        start = old["parent_step"]
    else:
        saved = checkpoint.steps(home.runs_dir() / parent / "checkpoints")
        if not saved:
            raise UserError(f"The run '{parent}' has no checkpoint yet: let it train on.")
        start = saved[-1]
    if not 0 < rate_share < float("inf"):
        raise UserError(f"--rate-share is {rate_share}: it must be more than 0, such as 0.05.")
    if not tasks:
        raise UserError("Name a task to learn: --task NAME, or a file of yours, --task file.py:Class.")
    rl = RLConfig(parent, start, tuple(tasks), **changes)
    if steps is None:
        problems = sum(len(open_task(spec, "train")) for spec in tasks)
        steps = min(-(-problems // rl.problems), MOST_STEPS)  # one pass over them
    batch = rl.problems * rl.samples * rl.max_tokens
    defaults: dict[str, Any] = {"eval_every": 25, "save_every": 25, "save_minutes": 10.0, "seed": 0}
    config = TrainConfig(steps=steps, batch_tokens=batch, **{**defaults, **(train or {})})
    model = replace(theirs.model, fp8="none")  # what is learned must be what the engine sampled
    optim = theirs.optim.fine_tuning(rate_share, warmdown=1.0)
    return name, replace(theirs, model=model, optim=optim, train=config, kind="rl"), rl


def _recorded(name: str) -> dict[str, Any] | None:
    """What an earlier session of this run was told, if there was one."""
    if not (home.runs_dir() / name / "config.json").is_file():
        return None
    record: dict[str, Any] | None = read_config(name).get("rl")
    return record


def _newest_parent() -> str:
    runs = [run for run in list_runs() if run.checkpoint is not None]
    for kind in ("sft", "base"):
        for run in runs:
            if run.kind == kind:
                return run.name
    raise UserError(f"There is no model to start from in {home.runs_dir()}: nanorun speedrun makes one.")
