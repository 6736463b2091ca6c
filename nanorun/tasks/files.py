"""Where a task's files are: the one that was named, or the first that fits below a folder.

Public datasets come in many wrappings (the hub's parquet folders, plain jsonl). A task lists the names its
split goes by, best first, and reads whichever is there.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nanorun.data.readers import read_records
from nanorun.errors import UserError

Record = Mapping[str, Any]


class NotHere(UserError):
    """The files of a task are not in the folder."""


def read_split(where: Path, names: Mapping[str, Sequence[str]], split: str, task: str) -> list[Record]:
    """The records of a split. `names` has glob patterns for each split, below the folder at any depth."""
    if split not in names:
        raise UserError(f"The task {task} has no split '{split}': choose {' or '.join(names)}.")
    return [
        record for path in find(where, names[split], f"{task}'s {split}") for _, record in read_records(path)
    ]


def find(where: Path, patterns: Sequence[str], what: str) -> list[Path]:
    """The file itself, or all files that fit the first pattern for which there are any."""
    if where.is_file():
        return [where]
    for pattern in patterns:
        if found := sorted(path for path in where.glob(f"**/{pattern}") if path.is_file()):
            return found
    raise NotHere(f"{what} files are not in {where}: put {' or '.join(patterns)} there (docs/tasks.md).")


def field(record: Record, name: str, task: str) -> Any:
    """A column that must be there."""
    if name not in record:
        have = ", ".join(f"'{key}'" for key in record) or "none"
        raise UserError(f"A record of {task} has no '{name}' (it has {have}): is this the right file?")
    return record[name]
