"""Tasks by name. The files of public ones are in one folder, `tasks/` in the home unless told otherwise.

arc-easy arc-challenge mmlu gsm8k humaneval spelling    public: docs/tasks.md says where to get them
sample-facts sample-sums sample-spelling sample-counting sample-sums-3digit sample-long-results
sample-spelling-unseen sample-world sample-chat         the sample world, always available
talk.jsonl, talk.json, talk.csv, talk.parquet, folder/  your own conversations (layouts.py)
my_task.py or my_task.py:Riddles                        your own task, if the command line names it
"""

import os
from collections.abc import Callable, Collection
from pathlib import Path
from typing import cast

from nanorun import home
from nanorun.data.readers import file_kind, is_folder
from nanorun.errors import UserError
from nanorun.tasks import user_code
from nanorun.tasks.gsm8k import Gsm8k
from nanorun.tasks.humaneval import HumanEval
from nanorun.tasks.layouts import read_conversation_file
from nanorun.tasks.multiple_choice import arc, mmlu
from nanorun.tasks.sample import TASKS as SAMPLE_TASKS
from nanorun.tasks.sample import SampleQuestions, sample_chat
from nanorun.tasks.spelling import SpellingBee
from nanorun.tasks.task import ConversationList, Examples, Task, find_files

PUBLIC: dict[str, Callable[[Path, str], Examples]] = {
    "arc-easy": lambda where, split: arc(where, "easy", split),
    "arc-challenge": lambda where, split: arc(where, "challenge", split),
    "mmlu": mmlu,
    "gsm8k": Gsm8k,
    "humaneval": HumanEval,
    "spelling": SpellingBee,
}
NEED_NO_FILES = {*SAMPLE_TASKS, "sample-chat", "spelling"}
CHATCORE = tuple(PUBLIC)


def tasks_dir() -> Path:
    return home.home() / "tasks"


def open_examples(
    spec: str, split: str = "train", folder: Path | None = None, trusted: Collection[str] = ()
) -> Examples:
    """Opens a name, a file or a trusted piece of code. `folder` holds the public tasks' files."""
    if spec in PUBLIC:
        return PUBLIC[spec](folder or tasks_dir(), split)
    if spec in SAMPLE_TASKS:
        return SampleQuestions(spec, split)
    if spec == "sample-chat":
        return sample_chat(split)
    if user_code.is_code(spec):
        if user_code.absolute_spec(spec) not in map(user_code.absolute_spec, trusted):
            raise UserError(f"{spec} is code, which runs only when you say so: add --task {spec}.")
        return user_code.load_task(spec, split)
    if is_path(spec):
        return read_conversations(Path(spec))
    if spec.startswith("chat:"):  # conversations among the public tasks' files, by the name of their file
        return read_conversations(folder or tasks_dir(), spec.removeprefix("chat:"))
    known = ", ".join([*PUBLIC, *SAMPLE_TASKS, "sample-chat"])
    raise UserError(
        f"There is no task '{spec:.100}': name one of {known}, a file of conversations (.jsonl, .json, .csv, "
        ".parquet), or a .py file."
    )


def is_path(spec: str) -> bool:
    """Whether a task is a file or folder of the user's, present or not, and not the name of a task."""
    if spec in PUBLIC or spec in NEED_NO_FILES or spec.startswith("chat:"):
        return False
    return user_code.is_code(spec) or bool(Path(spec).suffix) or "/" in spec or os.path.exists(spec)


def open_task(
    spec: str, split: str = "test", folder: Path | None = None, trusted: Collection[str] = ()
) -> Task:
    """Examples with a reward."""
    examples = open_examples(spec, split, folder, trusted)
    if not hasattr(examples, "reward"):
        raise UserError(f"{spec} has no `reward` to grade replies with: it can only be trained on.")
    return cast(Task, examples)


def read_conversations(where: Path, pattern: str | None = None) -> ConversationList:
    """Conversations from a file, or from all jsonl and parquet files below a folder that match `pattern`, sorted by
    name."""
    is_file = pattern is None and not is_folder(where)
    files = (
        [where]
        if is_file
        else find_files(where, [f"{pattern or '*'}.*"], f"conversations ('{pattern or '*'}'):")
    )
    kinds = ("jsonl", "parquet", "json", "csv") if is_file else ("jsonl", "parquet")
    readable = [path for path in files if file_kind(path)[0] in kinds]
    if not readable:
        raise UserError(
            f"{files[0]} holds no conversations by its suffix: name a .jsonl, .json or .csv file (plain, .gz, .xz or "
            ".zst), a .parquet file, or a folder of .jsonl and .parquet files."
        )
    conversations = [conversation for path in readable for conversation in read_conversation_file(path)]
    if not conversations:
        raise UserError(f"{where} holds no conversations with an answer: add some.")
    return ConversationList(pattern or where.name.split(".")[0], conversations)
