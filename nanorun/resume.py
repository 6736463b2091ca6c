"""Which settings of a run may change when it resumes.

when it saves and evaluates    changes freely: the weights do not depend on it
its length                     may grow: the run continues, with its schedules recomputed for the new length
anything else                  is rejected, and the message names the options that differ
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from nanorun.config import Config
from nanorun.errors import UserError

_FREE = {"train.save_every", "train.save_minutes", "train.keep_checkpoints", "train.eval_every"}
# The length, and what is derived from it.
_LENGTH = {"train.steps", "train.minutes", "epochs", "optim.warmup_steps", "optim.matrix_weight_decay"}

# Settings by the option of `nanorun train KIND` that sets them; most others are derived from these.
_OPTIONS = {
    "base": {
        "model.depth": "--depth",
        "model.context": "--context",
        "data": "--data",
        "tokenizer": "--tokenizer",
        "train.minutes": "--minutes",
        "train.steps": "--steps",
        "train.batch_tokens": "--batch-tokens",
        "train.seed": "--seed",
    },
    "sft": {
        "parent": "--from",
        "train.seed": "--seed",
        "model.context": "--context",
        "train.steps": "--steps",
        "epochs": "--epochs",
        "train.batch_tokens": "--batch-tokens",
        "warm_start": "--warm",
        "mixture": "--mixture",  # its order depends on the seed
    },
    "rl": {
        "rl.parent": "--from",
        "rl.tasks": "--task",
        "train.steps": "--steps",
        "train.seed": "--seed",
        **{
            f"rl.{name}": f"--{name.replace('_', '-')}"
            for name in "problems samples max_tokens temperature clip kl inner_updates normalize_std "
            "eval_problems".split()
        },
        "optim": "--lr-fraction",
    },
}


def changed_settings(name: str, old: dict[str, Any], new: dict[str, Any], config_file: Path) -> set[str]:
    """The settings that differ. Raises a UserError if one of them must not."""
    found = list(_differences(_with_defaults(old), new))
    changed = {path for path, _, _ in found}
    if not changed <= (_FREE | _LENGTH if training_steps(new) > training_steps(old) else _FREE):
        raise UserError(_explain(name, found, new.get("kind", "base"), config_file))
    return changed


def training_steps(config: dict[str, Any]) -> int:
    """The length of a run, from its configuration; 0 if that is damaged."""
    train = config.get("train")
    steps = train.get("steps") if isinstance(train, dict) else None
    return steps if isinstance(steps, int) else 0


def _explain(name: str, found: list[tuple[str, str, str]], kind: str, config_file: Path) -> str:
    options = _OPTIONS.get(kind, _OPTIONS["base"])
    order = [*options, "", "model", "optim"]  # learning rates last: they are derived from all the others
    changes: dict[str, str] = {}
    ranked = []
    for path, was, now in found:
        if path in _FREE:
            continue
        group = path.partition(".")[0]
        setting = path if path in options else group if group in options else None
        label = options[setting] if setting is not None else path
        shown = label if setting in (None, path) else f"{label} ({path})"
        rank = setting if setting is not None else group if group in order else ""
        ranked.append((order.index(rank), label, f"{shown} was {was} and is now {now}"))
    for _, label, change in sorted(ranked, key=lambda each: each[0]):
        changes.setdefault(label, change)
    sentences = list(changes.values())
    more = f", and {len(sentences) - 3} more" if len(sentences) > 3 else ""
    all_of_them = f" (--config {config_file} sets them all)" if kind == "base" else ""
    return (
        f"The run '{name}' was started with other settings ({'; '.join(sentences[:3])}{more}): use those to resume "
        f"it{all_of_them}, --fresh to delete it and start over, or another --name."
    )


def _with_defaults(old: dict[str, Any]) -> dict[str, Any]:
    """A configuration of an earlier nanorun, with fields that it did not have at their defaults."""
    try:
        return {**old, **json.loads(json.dumps(Config.from_dict(old).to_dict()))}
    except (UserError, TypeError, KeyError, ValueError, AttributeError):
        return old


def _differences(old: Any, new: Any, path: str = "") -> Iterator[tuple[str, str, str]]:
    if isinstance(old, dict) and isinstance(new, dict):
        for key in [*old, *(key for key in new if key not in old)]:
            below = f"{path}.{key}" if path else str(key)
            if key not in old or key not in new:
                was, now = (_shown(side[key]) if key in side else "absent" for side in (old, new))
                yield below, was, now
            else:
                yield from _differences(old[key], new[key], below)
    elif old != new or isinstance(old, bool) != isinstance(new, bool):
        yield path, _shown(old), _shown(new)


def _shown(value: Any) -> str:
    text = json.dumps(value) if value is not None else "none"
    return text if len(text) <= 40 else f"{text[:37]}..."
