"""What a task is: numbered conversations and, where replies can be right or wrong, a reward for a reply.

    Examples   conversations to train on: `len`, and `examples[i]`, a conversation as text/chat.py renders it,
               which ends with the assistant's reference answer
    Task       examples with a reward: `reward(i, reply)` grades a reply to question i from 0 to 1

A question is its conversation without the last message (`question_messages`). A task with `letters` is multiple
choice: its answer is the most likely of the letters, without generation. Any object with these attributes is a
task; there is no base class and no registry.

Public datasets come in several layouts (the hub's parquet folders, plain jsonl). A task lists the file names of
each split, preferred ones first, and reads the first that it finds.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

from nanorun.data.readers import check_object, read_records
from nanorun.errors import UserError
from nanorun.text.chat import Part

Conversation = Mapping[str, Any]  # {"messages": [{"role": ..., "content": text or parts}, ...]}
Record = Mapping[str, Any]
Parsed = TypeVar("Parsed")


class Examples(Protocol):
    name: str

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Conversation: ...


class Task(Examples, Protocol):
    baseline: float  # the accuracy of guessing
    letters: Sequence[str] | None  # of a multiple choice; None: the reply is generated

    def reward(self, index: int, reply: Sequence[Part]) -> float:
        """Grades the parts of a reply (as `parse_reply` returns them) to question `index`, from 0 to 1."""
        ...


class ConversationList:
    """Conversations to train on, without a reward."""

    def __init__(self, name: str, conversations: Sequence[Conversation]) -> None:
        self.name, self._conversations = name, conversations

    def __len__(self) -> int:
        return len(self._conversations)

    def __getitem__(self, index: int) -> Conversation:
        return self._conversations[index]


def exchange(prompt: str, reply: str | Sequence[Part]) -> Conversation:
    """A conversation of one question and one answer."""
    return {"messages": [{"role": "user", "content": prompt}, {"role": "assistant", "content": reply}]}


def question_messages(conversation: Conversation) -> list[Mapping[str, Any]]:
    """The messages without the final answer."""
    messages: list[Mapping[str, Any]] = list(conversation["messages"])
    return messages[:-1] if messages and messages[-1]["role"] == "assistant" else messages


def reply_text(reply: Sequence[Part]) -> str:
    """The text of a reply, without its tool calls and their outputs."""
    return "".join(part["text"] for part in reply if part["type"] == "text")


class TaskFilesMissing(UserError):
    """The files of a task are not in the folder."""


def read_split(
    where: Path,
    names: Mapping[str, Sequence[str]],
    split: str,
    task: str,
    parse: Callable[[Record], Parsed],
) -> list[Parsed]:
    """The records of a split, each parsed; `parse` raises ValueError for one that it cannot use.

    `names` maps each split to glob patterns, matched at any depth below the folder.
    """
    if split not in names:
        raise UserError(f"The task {task} has no split '{split}': choose {' or '.join(names)}.")
    parsed = []
    for path in find_files(where, names[split], f"{task}'s {split}"):
        for place, record in read_records(path):
            try:
                parsed.append(parse(check_object(place, record)))
            except ValueError as error:
                raise UserError(
                    f"{place[0].upper()}{place[1:]} is no question of {task} ({error}): is this the right file?"
                ) from error
    return parsed


def find_files(where: Path, patterns: Sequence[str], what: str) -> list[Path]:
    """The file itself, or all files that match the first pattern with any match."""
    if os.path.isfile(where):
        return [where]
    for pattern in patterns:
        if files := sorted(path for path in where.glob(f"**/{pattern}") if path.is_file()):
            return files
    raise TaskFilesMissing(
        f"{what} files are not in {where}: put {' or '.join(patterns)} there (docs/tasks.md)."
    )
