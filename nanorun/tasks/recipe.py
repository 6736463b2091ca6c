"""Recipes: which tasks make a mixture, by name or from a JSON file.

    {"train": [{"task": "gsm8k", "repeat": 2}, {"task": "me.jsonl", "repeat": 4},
               {"task": "mmlu", "split": "val", "stop": 1000}],
     "val": [{"task": "gsm8k", "split": "test", "stop": 200}]}

Files are looked for from the folder of the JSON file. Without "val", every fiftieth example of each entry is
kept to measure by and not trained on. A named recipe takes the tasks whose files are here and says which are
not; one from a file wants all of them.
"""

import json
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from nanorun.console import say
from nanorun.errors import UserError
from nanorun.tasks import user_code
from nanorun.tasks.catalogue import NEED_NO_FILES, open_examples, tasks_dir
from nanorun.tasks.files import NotHere
from nanorun.tasks.mixture import Mixture, Slice, Without
from nanorun.tasks.task import Examples

HELD_OUT = 50  # every so many-th example is kept to measure by


@dataclass(frozen=True)
class Entry:
    task: str
    split: str = "train"
    start: int | None = None
    stop: int | None = None
    repeat: int = 1

    def __post_init__(self) -> None:
        if self.repeat < 1:
            raise UserError(f"'{self.task}' of a mixture has repeat {self.repeat}: it must be at least 1.")


@dataclass(frozen=True)
class Recipe:
    name: str
    train: tuple[Entry, ...]
    val: tuple[Entry, ...] = ()  # none: every fiftieth of train
    optional: bool = False  # what is not here is left out

    def to_dict(self) -> dict[str, Any]:
        """What a run remembers of it."""
        parts = {"train": self.train, "val": self.val}
        return {"name": self.name, **{key: [asdict(e) for e in entries] for key, entries in parts.items()}}


RECIPES = {
    # The sample world's skills, a question at a time; counting letters is left to what follows.
    "sample-mid": Recipe(
        "sample-mid",
        (
            Entry("sample-spelling", stop=4_000),
            Entry("sample-sums", stop=2_000),
        ),
        (Entry("sample-spelling", "val", stop=100), Entry("sample-sums", "val", stop=100)),
    ),
    # And its conversations.
    "sample": Recipe(
        "sample",
        (Entry("sample-chat", stop=10_000),),
        (Entry("sample-chat", "val", stop=400),),
    ),
    # Formats and skills: multiple choice, calculating, spelling, and the first conversations.
    "mid": Recipe(
        "mid",
        (
            Entry("arc-easy"),
            Entry("arc-challenge"),
            Entry("mmlu"),
            Entry("gsm8k"),
            Entry("spelling", stop=10_000),
            Entry("chat:smol*/**/train-*"),
            Entry("chat:sft_t0_p3", stop=5_000),
            Entry("chat:sft_natural_instructions", stop=5_000),
            Entry("chat:sft_gpteacher"),
        ),
        optional=True,
    ),
    # Conversations of quality, with the skills kept alive.
    "sft": Recipe(
        "sft",
        (
            Entry("arc-easy"),
            Entry("arc-challenge"),
            Entry("arc-easy", "val"),
            Entry("arc-challenge", "val"),
            Entry("mmlu"),
            Entry("mmlu", "val"),
            Entry("gsm8k", repeat=2),
            Entry("spelling", stop=6_000),
            Entry("chat:smol*/**/train-*"),
            Entry("chat:sft_lima"),
            Entry("chat:sft_dolly_6k"),
            Entry("chat:sft_gpteacher"),
            Entry("chat:sft_alpaca_gpt4_1k"),
            Entry("chat:sft_selfinstruct_human"),
            Entry("chat:identity*", repeat=2),
        ),
        optional=True,
    ),
}


def find_recipe(name: str) -> Recipe:
    """A recipe by name, or from a JSON file."""
    if name in RECIPES:
        return RECIPES[name]
    path = Path(name)
    if path.suffix != ".json":
        raise UserError(f"There is no mixture '{name}': choose {', '.join(RECIPES)}, or give a .json file.")
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"Cannot read the mixture {path}: {error.strerror}.") from error
    except ValueError as error:
        raise UserError(f"{path} is not JSON ({error}): mend it.") from error
    if isinstance(record, list):
        record = {"train": record}
    if not isinstance(record, dict) or not record.get("train") or set(record) - {"train", "val", "name"}:
        raise UserError(
            f'{path} must hold {{"train": [...], "val": [...]}} with at least one task to train on.'
        )
    train, val = (_entries(record.get(key, ()), path) for key in ("train", "val"))
    return Recipe(str(record.get("name", path.stem)), train, val)


def prepare(
    recipe: Recipe, folder: Path | None = None, seed: int = 0, trusted: Sequence[str] = ()
) -> tuple[Recipe, Mixture, Mixture]:
    """The recipe as it is used, and its mixtures to train on and to measure by.

    Trusted code (`--task`) that the recipe does not mention is added to it.
    """
    trusted = [user_code.absolute(spec) for spec in trusted]
    named = {entry.task for entry in (*recipe.train, *recipe.val)}
    recipe = replace(recipe, train=(*recipe.train, *(Entry(spec) for spec in trusted if spec not in named)))
    absent: dict[str, NotHere] = {}
    train = _open_all(recipe.train, folder, trusted, absent)
    val = _open_all(recipe.val, folder, trusted, absent)
    if absent and not recipe.optional:
        raise next(iter(absent.values()))
    recipe = replace(recipe, train=tuple(entry for entry, _ in train), val=tuple(entry for entry, _ in val))
    if absent and all(entry.task in NEED_NO_FILES for entry, _ in train):
        raise UserError(
            f"Nothing of the mixture '{recipe.name}' is in {folder or tasks_dir()}: docs/tasks.md says which files go "
            "there, and --mixture sample needs none."
        )
    if absent:
        say(f"not in {folder or tasks_dir()}, so left out of the mixture: {', '.join(absent)}")
    if val:
        kept = [examples for _, examples in val]
        parts = [part for entry, part in train for _ in range(entry.repeat)]
    else:
        kept = [Slice(part, HELD_OUT - 1, step=HELD_OUT) for _, part in train]
        parts = [Without(part, HELD_OUT) for entry, part in train for _ in range(entry.repeat)]
        if not sum(map(len, kept)):
            raise UserError(
                f"The mixture '{recipe.name}' has fewer than {HELD_OUT} examples of each task, too few to keep some "
                'to measure by: name those in a .json mixture under "val".'
            )
    return recipe, Mixture(parts, seed, recipe.name), Mixture(kept, 0, recipe.name)


def _open_all(
    entries: Collection[Entry], folder: Path | None, trusted: Sequence[str], absent: dict[str, NotHere]
) -> list[tuple[Entry, Examples]]:
    """The entries whose files are here; the others go to `absent`."""
    found = []
    for entry in entries:
        try:
            examples = open_examples(entry.task, entry.split, folder, trusted)
        except NotHere as problem:
            absent[f"{entry.task} ({entry.split})" if entry.split != "train" else entry.task] = problem
            continue
        if entry.start is not None or entry.stop is not None:
            examples = Slice(examples, entry.start, entry.stop)
        if len(examples):
            found.append((entry, examples))
    return found


def _entries(records: Any, path: Path) -> tuple[Entry, ...]:
    made = []
    kinds = {field.name: (str,) if field.name in ("task", "split") else (int,) for field in fields(Entry)}
    for record in records if isinstance(records, list | tuple) else [records]:
        given = {"task": record} if isinstance(record, str) else record
        wrong = not isinstance(given, dict) or "task" not in given or set(given) - set(kinds)
        if wrong or any(not isinstance(v, kinds[k]) or isinstance(v, bool) for k, v in given.items()):
            raise UserError(
                f'{path} has {json.dumps(record):.100} in a mixture: write {{"task": NAME}} and, where wanted, '
                '"split", "start", "stop" and "repeat".'
            )
        entry = Entry(**given)
        if user_code.is_code(entry.task) or (path.parent / entry.task).exists():
            entry = replace(entry, task=user_code.absolute(str(path.parent / entry.task)))
        made.append(entry)
    return tuple(made)
