"""Mixtures: several tasks as one sequence of examples, by name or from a JSON file.

    {"train": [{"task": "gsm8k", "repeat": 2}, {"task": "me.jsonl", "repeat": 4},
               {"task": "mmlu", "split": "val", "stop": 1000}],
     "val": [{"task": "gsm8k", "split": "test", "stop": 200}]}

Paths are relative to the folder of the JSON file. Without "val", every fiftieth example of each entry is held out
for validation. A named mixture uses the tasks whose files are present and reports the others; one from a file
needs all of them.

The order of a mixture is a permutation of all examples of its parts, which depends on the seed alone. A part that
is listed twice is seen twice as often. Looking up an example is O(log parts).
"""

import json
from bisect import bisect_right
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, fields, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

from nanorun.console import say
from nanorun.data.rows import shuffled
from nanorun.errors import UserError
from nanorun.tasks import user_code
from nanorun.tasks.catalogue import NEED_NO_FILES, open_examples, tasks_dir
from nanorun.tasks.task import Conversation, Examples, TaskFilesMissing

HOLD_OUT_EVERY = 50  # every so many-th example is held out for validation


class Mixture:
    def __init__(self, parts: Sequence[Examples], seed: int = 0, name: str = "mixture") -> None:
        self.parts, self.name = list(parts), name
        self._ends = list(accumulate(len(part) for part in self.parts))
        self._order = shuffled(self._ends[-1] if self._ends else 0, seed)

    def __len__(self) -> int:
        return len(self._order)

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


def hold_out(examples: Examples, every: int) -> tuple[Subset, Subset]:
    """Splits off every `every`-th example: those to train on, and those to validate on."""
    indices = range(len(examples))
    train = [index for index in indices if index % every != every - 1]
    return Subset(examples, train), Subset(examples, indices[every - 1 :: every])


@dataclass(frozen=True)
class MixtureEntry:
    task: str
    split: str = "train"
    start: int | None = None
    stop: int | None = None
    repeat: int = 1

    def __post_init__(self) -> None:
        if self.repeat < 1:
            raise UserError(f"'{self.task}' of a mixture has repeat {self.repeat}: it must be at least 1.")


@dataclass(frozen=True)
class MixtureSpec:
    name: str
    train: tuple[MixtureEntry, ...]
    val: tuple[MixtureEntry, ...] = ()  # empty: every fiftieth of train
    optional: bool = False  # entries whose files are missing are left out

    def to_dict(self) -> dict[str, Any]:
        """What a run's config.json records."""
        parts = {"train": self.train, "val": self.val}
        return {"name": self.name, **{key: [asdict(e) for e in entries] for key, entries in parts.items()}}


# Named mixtures, in the format of the JSON files.
MIXTURES = {
    # The sample world's skills, one question at a time; counting letters is left to the next stages.
    "sample-mid": """{
        "train": [{"task": "sample-spelling", "stop": 4000}, {"task": "sample-sums", "stop": 2000}],
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


def find_mixture(name: str) -> MixtureSpec:
    """A mixture by name, or from a JSON file."""
    path = Path(name)
    if name not in MIXTURES and path.suffix != ".json":
        raise UserError(f"There is no mixture '{name}': choose {', '.join(MIXTURES)}, or give a .json file.")
    try:
        record = json.loads(MIXTURES.get(name) or path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"Cannot read the mixture {path}: {error.strerror}.") from error
    except ValueError as error:
        raise UserError(f"{path} is not valid JSON ({error}): correct it.") from error
    if isinstance(record, list):
        record = {"train": record}
    if not isinstance(record, dict) or not record.get("train") or set(record) - {"train", "val", "name"}:
        raise UserError(
            f'{path} must hold {{"train": [...], "val": [...]}} with at least one task to train on.'
        )
    train, val = (_parse_entries(record.get(key, ()), path) for key in ("train", "val"))
    return MixtureSpec(str(record.get("name", path.stem)), train, val, optional=name in MIXTURES)


def prepare_mixture(
    spec: MixtureSpec, folder: Path | None = None, seed: int = 0, trusted: Sequence[str] = ()
) -> tuple[MixtureSpec, Mixture, Mixture]:
    """The spec without missing entries, and its mixtures for training and for validation.

    Trusted code (`--task`) that the spec does not mention is added to it.
    """
    trusted = [user_code.absolute_spec(code) for code in trusted]
    named = {entry.task for entry in (*spec.train, *spec.val)}
    added = (MixtureEntry(code) for code in trusted if code not in named)
    missing: dict[str, TaskFilesMissing] = {}
    train = _open_entries((*spec.train, *added), folder, trusted, missing)
    val = _open_entries(spec.val, folder, trusted, missing)
    if missing and not spec.optional:
        raise next(iter(missing.values()))
    spec = replace(spec, train=tuple(entry for entry, _ in train), val=tuple(entry for entry, _ in val))
    if missing and all(entry.task in NEED_NO_FILES for entry, _ in train):
        raise UserError(
            f"Nothing of the mixture '{spec.name}' is in {folder or tasks_dir()}: docs/tasks.md says which files go "
            "there, and --mixture sample needs none."
        )
    if missing:
        say(f"not in {folder or tasks_dir()}, so left out of the mixture: {', '.join(missing)}")
    train_parts = [(entry.repeat, examples) for entry, examples in train]
    val_parts: list[Examples] = [examples for _, examples in val]
    if not val:
        splits = [(repeat, hold_out(examples, HOLD_OUT_EVERY)) for repeat, examples in train_parts]
        train_parts = [(repeat, kept) for repeat, (kept, _) in splits]
        val_parts = [held_out for _, (_, held_out) in splits]
        if not sum(map(len, val_parts)):
            raise UserError(
                f"The mixture '{spec.name}' has fewer than {HOLD_OUT_EVERY} examples of each task, too few to hold "
                'some out for validation: name those in a .json mixture under "val".'
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
            missing[f"{entry.task} ({entry.split})" if entry.split != "train" else entry.task] = error
            continue
        if entry.start is not None or entry.stop is not None:
            examples = Subset(examples, range(len(examples))[entry.start : entry.stop])
        if len(examples):
            opened.append((entry, examples))
    return opened


def _parse_entries(records: Any, path: Path) -> tuple[MixtureEntry, ...]:
    entries = []
    types = {field.name: str if field.name in ("task", "split") else int for field in fields(MixtureEntry)}
    for record in records if isinstance(records, list | tuple) else [records]:
        values = {"task": record} if isinstance(record, str) else record
        invalid = not isinstance(values, dict) or "task" not in values or set(values) - set(types)
        if invalid or any(not isinstance(v, types[k]) or isinstance(v, bool) for k, v in values.items()):
            raise UserError(
                f'{path} has {json.dumps(record):.100} in a mixture: write {{"task": NAME}} and, optionally, '
                '"split", "start", "stop" and "repeat".'
            )
        entry = MixtureEntry(**values)
        is_path = user_code.is_code(entry.task) or (path.parent / entry.task).exists()
        if is_path and path.suffix == ".json":  # in a named mixture, they are names
            entry = replace(entry, task=user_code.absolute_spec(str(path.parent / entry.task)))
        entries.append(entry)
    return tuple(entries)
