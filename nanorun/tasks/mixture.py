"""Mixtures: several tasks as one sequence of examples, by name, from a JSON file, or made of the user's own tasks.

    {"train": [{"task": "gsm8k", "repeat": 2}, {"task": "me.jsonl", "repeat": 4},
               {"task": "mmlu", "split": "val", "stop": 1000}],
     "val": [{"task": "gsm8k", "split": "test", "stop": 200}]}

Paths are relative to the folder of the JSON file. Without "val", some examples of each entry are held out for
validation, evenly spaced: a tenth of up to 1,000, then 100, and a fiftieth from 5,000 on. A named mixture uses the
tasks whose files are present and reports the others; another one needs all of them.

The order of a mixture is a permutation of all examples of its parts, which depends on the seed alone. A part that
is listed twice is seen twice as often. Looking up an example is O(log parts).
"""

import os
from bisect import bisect_right
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, fields, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from nanorun.console import say
from nanorun.data.packing import Ints
from nanorun.data.readers import is_folder
from nanorun.data.rows import shuffled
from nanorun.errors import UserError
from nanorun.json_files import has_type, load_json, parse_json, shown
from nanorun.tasks import user_code
from nanorun.tasks.catalogue import NEED_NO_FILES, is_path, open_examples, tasks_dir
from nanorun.tasks.layouts import holds_conversations
from nanorun.tasks.task import Conversation, Examples, TaskFilesMissing

MAX_REPEAT = 1_000
MAX_EXAMPLES = 10**8  # of a mixture, repeated ones included


class Mixture:
    def __init__(self, parts: Sequence[Examples], seed: int = 0, name: str = "mixture") -> None:
        self.parts, self.name = list(parts), name
        self._ends = list(accumulate(len(part) for part in self.parts))
        if self._ends and self._ends[-1] > MAX_EXAMPLES:
            raise UserError(
                f"The mixture '{name}' has {self._ends[-1]:,} examples (at most {MAX_EXAMPLES:,}): repeat less."
            )
        self._order = shuffled(self._ends[-1] if self._ends else 0, seed)

    def __len__(self) -> int:
        return len(self._order)

    @property
    def part_of(self) -> Ints:
        """The part that each example comes from."""
        return np.searchsorted(self._ends, self._order, side="right")

    def __getitem__(self, index: int) -> Conversation:
        if not 0 <= index < len(self._order):
            raise IndexError(f"example {index} of a mixture of {len(self._order)}")
        drawn = int(self._order[index])
        part = bisect_right(self._ends, drawn)
        return self.parts[part][drawn - (self._ends[part - 1] if part else 0)]


class Subset:
    """Some of the examples, by their indices."""

    def __init__(self, examples: Examples, indices: Sequence[int]) -> None:
        self._examples, self._indices, self.name = examples, indices, examples.name

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, index: int) -> Conversation:
        if not 0 <= index < len(self._indices):
            raise IndexError(f"example {index} of a subset of {len(self._indices)}")
        return self._examples[self._indices[index]]


def hold_out(examples: Examples) -> tuple[Subset, Subset]:
    """Splits the examples into those to train on and, evenly spaced, those to validate on."""
    total = len(examples)
    count = max(min(total // 10, 100), total // 50, 3 if total >= 20 else 1) if total > 1 else 0
    held_out = {(2 * i + 1) * total // (2 * count) for i in range(count)}
    train = [index for index in range(total) if index not in held_out]
    return Subset(examples, train), Subset(examples, sorted(held_out))


@dataclass(frozen=True)
class MixtureEntry:
    task: str
    split: str = "train"
    start: int | None = None
    stop: int | None = None
    repeat: int = 1

    def __post_init__(self) -> None:
        if not 1 <= self.repeat <= MAX_REPEAT:
            raise UserError(
                f"'{self.task:.100}' of a mixture has repeat {self.repeat}: it must be from 1 to {MAX_REPEAT:,}."
            )

    @property
    def label(self) -> str:
        """The task as tables show it: a file by its name."""
        name = Path(self.task).name if is_path(self.task) else self.task
        return f"{name} ({self.split})" if self.split != "train" else name


@dataclass(frozen=True)
class MixtureSpec:
    name: str
    train: tuple[MixtureEntry, ...]
    val: tuple[MixtureEntry, ...] = ()  # empty: some of train
    optional: bool = False  # entries whose files are missing are left out

    def to_dict(self) -> dict[str, Any]:
        """What a run's config.json records."""
        parts = {"train": self.train, "val": self.val}
        return {"name": self.name, **{key: [asdict(e) for e in entries] for key, entries in parts.items()}}


# Named mixtures, in the format of the JSON files.
MIXTURES = {
    # The sample world's skills, one question at a time.
    "sample-mid": """{
        "train": [{"task": "sample-spelling", "stop": 2800}, {"task": "sample-spelling-unseen", "stop": 1800},
                  {"task": "sample-counting", "stop": 1200}, {"task": "sample-sums", "stop": 300},
                  {"task": "sample-sums-3digit", "stop": 500}, {"task": "sample-long-results", "stop": 200}],
        "val": [{"task": "sample-spelling", "split": "val", "stop": 100},
                {"task": "sample-sums", "split": "val", "stop": 100}]}""",
    # The sample world's conversations.
    "sample": """{
        "train": [{"task": "sample-chat", "stop": 10000}],
        "val": [{"task": "sample-chat", "split": "val", "stop": 400}]}""",
    # Formats and skills: multiple choice, calculation, spelling, and the first conversations.
    "mid": """{
        "train": ["arc-easy", "arc-challenge", "mmlu", "gsm8k", {"task": "spelling", "stop": 10000},
                  "chat:smol*/**/train-*", {"task": "chat:sft_t0_p3", "stop": 5000},
                  {"task": "chat:sft_natural_instructions", "stop": 5000}, "chat:sft_gpteacher"]}""",
    # High-quality conversations, with the skills mixed in so that they are not forgotten.
    "sft": """{
        "train": ["arc-easy", "arc-challenge", {"task": "arc-easy", "split": "val"},
                  {"task": "arc-challenge", "split": "val"}, "mmlu", {"task": "mmlu", "split": "val"},
                  {"task": "gsm8k", "repeat": 2}, {"task": "spelling", "stop": 6000},
                  "chat:smol*/**/train-*", "chat:sft_lima", "chat:sft_dolly_6k", "chat:sft_gpteacher",
                  "chat:sft_alpaca_gpt4_1k", "chat:sft_selfinstruct_human",
                  {"task": "chat:identity*", "repeat": 2}]}""",
}


def choose_mixture(name: str | None, tasks: Sequence[str]) -> MixtureSpec:
    """The mixture of that name. Without a name, the user's own tasks are the mixture, and else it is sft."""
    return own_mixture(tasks) if name is None and tasks else find_mixture(name or "sft")


def own_mixture(tasks: Sequence[str]) -> MixtureSpec:
    names = [Path(task).name.split(".")[0] if is_path(task) else task for task in tasks]
    return MixtureSpec("+".join(names), tuple(MixtureEntry(_resolve(task)) for task in tasks))


def find_mixture(name: str) -> MixtureSpec:
    """A mixture by name, or from a JSON file; a file of conversations is a mixture by itself."""
    path = Path(name)
    if name not in MIXTURES:
        if not is_path(name):
            raise UserError(
                f"There is no mixture '{name:.100}': choose {', '.join(MIXTURES)}, or give a file, a .json mixture or "
                "your own conversations (docs/tasks.md)."
            )
        if is_folder(path) or path.suffix != ".json" or holds_conversations(path):
            return own_mixture([name])
    try:
        record = parse_json(MIXTURES[name]) if name in MIXTURES else load_json(path, (dict, list))
    except OSError as error:
        raise UserError(f"Cannot read the mixture {path}: {error.strerror}.") from error
    except ValueError as error:
        raise UserError(f"{path} is not a mixture ({error}): correct it.") from error
    if isinstance(record, list):
        record = {"train": record}
    if not record.get("train") or set(record) - {"train", "val", "name"}:
        raise UserError(
            f'{path} must hold {{"train": [...], "val": [...]}} with at least one task to train on.'
        )
    train, val = (_parse_entries(record.get(key, ()), path) for key in ("train", "val"))
    return MixtureSpec(str(record.get("name", path.stem)), train, val, optional=name in MIXTURES)


def prepare_mixture(
    spec: MixtureSpec, folder: Path | None = None, seed: int = 0, trusted: Sequence[str] = ()
) -> tuple[MixtureSpec, Mixture, Mixture]:
    """The spec without missing entries, and its mixtures for training and for validation.

    What the command line names (`--task`) is trusted if it is code. It is added if the spec does not mention it.
    """
    trusted = [_resolve(task) for task in trusted]
    named = {entry.task for entry in (*spec.train, *spec.val)}
    added = [MixtureEntry(task) for task in trusted if task not in named]
    missing: dict[str, TaskFilesMissing] = {}
    train = _open_entries((*spec.train, *added), folder, trusted, missing)
    val = _open_entries(spec.val, folder, trusted, missing)
    if missing and not spec.optional:
        raise next(iter(missing.values()))
    spec = replace(spec, train=tuple(entry for entry, _ in train), val=tuple(entry for entry, _ in val))
    if missing and all(entry.task in NEED_NO_FILES or entry in added for entry, _ in train):
        raise UserError(
            f"Nothing of the mixture '{spec.name}' is in {folder or tasks_dir()}: docs/tasks.md says which files go "
            "there; --mixture sample needs none, and --task FILE without --mixture trains on that file alone."
        )
    if missing:
        say(f"not in {folder or tasks_dir()}, so left out of the mixture: {', '.join(missing)}")
    train_parts = [(entry.repeat, examples) for entry, examples in train]
    val_parts: list[Examples] = [examples for _, examples in val]
    if not val:
        splits = [(repeat, hold_out(examples)) for repeat, examples in train_parts]
        train_parts = [(repeat, kept) for repeat, (kept, _) in splits]
        val_parts = [held_out for _, (_, held_out) in splits]
        if not sum(map(len, val_parts)):
            raise UserError(
                f"The mixture '{spec.name}' has a single example of each task, too few to hold one out for validation: "
                "add more."
            )
    repeated = [examples for repeat, examples in train_parts for _ in range(repeat)]
    return spec, Mixture(repeated, seed, spec.name), Mixture(val_parts, 0, spec.name)


def _open_entries(
    entries: Collection[MixtureEntry],
    folder: Path | None,
    trusted: Sequence[str],
    missing: dict[str, TaskFilesMissing],
) -> list[tuple[MixtureEntry, Examples]]:
    """The entries whose files are present; the others go to `missing`."""
    opened = []
    for entry in entries:
        try:
            examples = open_examples(entry.task, entry.split, folder, trusted)
        except TaskFilesMissing as error:
            if is_path(entry.task):  # the user's own are not optional
                raise
            missing[entry.label] = error
            continue
        if entry.start is not None or entry.stop is not None:
            examples = Subset(examples, range(len(examples))[entry.start : entry.stop])
        if len(examples):
            opened.append((entry, examples))
    return opened


def _resolve(task: str) -> str:
    """The name of a task as it is, a path as an absolute one."""
    return user_code.absolute_spec(task) if is_path(task) else task


def _parse_entries(records: Any, path: Path) -> tuple[MixtureEntry, ...]:
    entries = []
    types = {field.name: str if field.name in ("task", "split") else int for field in fields(MixtureEntry)}
    for record in records if isinstance(records, list | tuple) else [records]:
        values = {"task": record} if isinstance(record, str) else record
        invalid = not isinstance(values, dict) or "task" not in values or set(values) - set(types)
        if invalid or not all(has_type(value, types[key]) for key, value in values.items()):
            raise UserError(
                f'{path} has {shown(record)} in a mixture: write {{"task": NAME}} and, optionally, '
                '"split", "start", "stop" and "repeat".'
            )
        entry = MixtureEntry(**values)
        is_path = user_code.is_code(entry.task) or os.path.exists(path.parent / entry.task)
        if is_path and path.suffix == ".json":  # in a named mixture, they are names
            entry = replace(entry, task=user_code.absolute_spec(str(path.parent / entry.task)))
        entries.append(entry)
    return tuple(entries)
