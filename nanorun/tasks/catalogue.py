"""Tasks by name. The files of public ones are looked for in one folder, `tasks/` in the home unless told otherwise.

arc-easy arc-challenge mmlu gsm8k humaneval spelling    public: docs/tasks.md says where to get them
sample-facts sample-sums sample-spelling sample-counting sample-chat    the sample world's, always here
talk.jsonl, folder/ or talk.parquet                     conversations of yours
my_task.py or my_task.py:Riddles                        a task of yours, if the command line named it
"""

from collections.abc import Callable, Collection
from pathlib import Path
from typing import cast

from nanorun import home
from nanorun.errors import UserError
from nanorun.tasks import user_code
from nanorun.tasks.arc import arc
from nanorun.tasks.chat_file import ChatFile
from nanorun.tasks.files import NotHere
from nanorun.tasks.gsm8k import Gsm8k
from nanorun.tasks.humaneval import HumanEval
from nanorun.tasks.lantern_isles import TASKS as SAMPLE_TASKS
from nanorun.tasks.lantern_isles import SampleQuestions, sample_chat
from nanorun.tasks.mmlu import mmlu
from nanorun.tasks.spelling import SpellingBee
from nanorun.tasks.task import Examples, Task

PUBLIC: dict[str, Callable[[Path, str], Examples]] = {
    "arc-easy": lambda where, split: arc(where, "easy", split),
    "arc-challenge": lambda where, split: arc(where, "challenge", split),
    "mmlu": mmlu,
    "gsm8k": Gsm8k,
    "humaneval": HumanEval,
    "spelling": lambda where, split: _spelling(where, split),
}
NEED_NO_FILES = {*SAMPLE_TASKS, "sample-chat", "spelling"}
CHATCORE = ("arc-easy", "arc-challenge", "mmlu", "gsm8k", "humaneval", "spelling")


def tasks_dir() -> Path:
    return home.home() / "tasks"


def open_examples(
    spec: str, split: str = "train", folder: Path | None = None, trusted: Collection[str] = ()
) -> Examples:
    """What a name, a file or a trusted piece of code stands for. `folder` holds the public tasks' files."""
    if spec in PUBLIC:
        return PUBLIC[spec](folder or tasks_dir(), split)
    if spec in SAMPLE_TASKS:
        return SampleQuestions(spec, split)
    if spec == "sample-chat":
        return sample_chat(split)
    if user_code.is_code(spec):
        if user_code.absolute(spec) not in map(user_code.absolute, trusted):
            raise UserError(f"{spec} is code, which runs only when you say so: add --task {spec}.")
        return user_code.load(spec, split)
    if Path(spec).exists() or Path(spec).suffix in (".jsonl", ".parquet"):
        return ChatFile(Path(spec))
    if spec.startswith("chat:"):  # conversations among the public tasks' files, by the name of their file
        return ChatFile(folder or tasks_dir(), spec.removeprefix("chat:"), spec.removeprefix("chat:"))
    known = ", ".join([*PUBLIC, *SAMPLE_TASKS, "sample-chat"])
    raise UserError(
        f"There is no task '{spec}': name one of {known}, a .jsonl of conversations, or a .py file."
    )


def open_task(
    spec: str, split: str = "test", folder: Path | None = None, trusted: Collection[str] = ()
) -> Task:
    """Examples that can be judged, too."""
    examples = open_examples(spec, split, folder, trusted)
    if not hasattr(examples, "reward"):
        raise UserError(f"{spec} has nothing to judge answers by (no `reward`): it can only be learned from.")
    return cast(Task, examples)


def _spelling(where: Path, split: str) -> Examples:
    """With the folder's list of words, or, where there is none, the common words that nanorun knows."""
    try:
        return SpellingBee(where, split)
    except NotHere:
        return SpellingBee(None, split)
