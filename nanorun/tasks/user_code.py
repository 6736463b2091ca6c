"""A person's own task: a Python file with a class, `my_task.py` or `my_task.py:Riddles`.

The file is code and runs with all the rights of whoever starts nanorun, so it is only ever loaded when the
command line names it (`--task`), never because some other file does.
"""

import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from nanorun.errors import UserError
from nanorun.tasks.task import Conversation, Examples
from nanorun.text.chat import Part
from nanorun.tools.bubblewrap import SandboxUnavailable


def is_code(spec: str) -> bool:
    return _cut(spec)[0].endswith(".py")


def absolute(spec: str) -> str:
    """The same, whatever folder one is in."""
    file, kind = _cut(spec)
    return str(Path(file).absolute()) + (f":{kind}" if kind else "")


def load(spec: str, split: str) -> Examples:
    """The task of a file, made with the split: `Riddles("train")`."""
    file, wanted = _cut(spec)
    path = Path(file)
    if not path.is_file():
        raise UserError(f"There is no file {path}: --task takes the path of a Python file.")
    with _explained(path, "cannot be loaded"):
        made = importlib.util.spec_from_file_location(f"nanorun_task_{path.stem}", path)
        assert made is not None
        assert made.loader is not None
        module = importlib.util.module_from_spec(made)
        sys.modules[made.name] = module  # dataclasses look their module up
        made.loader.exec_module(module)
    kind = _choose(path, vars(module), wanted, module.__name__)
    with _explained(path, f"cannot make a {kind.__name__}('{split}')"):
        task: Any = kind(split)
        length = len(task)
    missing = [name for name in ("name", "__getitem__") if not hasattr(task, name)]
    if missing:
        raise UserError(f"{kind.__name__} in {path} has no {' and no '.join(missing)}: see docs/tasks.md.")
    if length < 1:
        raise UserError(f"{kind.__name__}('{split}') in {path} has no examples.")
    if not hasattr(task, "reward"):
        examples: Examples = _Own(task, path, length)
        examples[0]  # a mistake is told now, before anything starts
        return examples
    for name, value in (("baseline", 0.0), ("letters", None)):  # what a judge may leave out
        if not hasattr(task, name):
            setattr(task, name, value)
    judge = _OwnJudge(task, path, length)
    judge[0]
    with suppress(SandboxUnavailable):
        judge.reward(0, [{"type": "text", "text": ""}])
    return judge


class _Own:
    """A person's examples, whose mistakes are told in a sentence."""

    name: str

    def __init__(self, task: Any, path: Path, length: int) -> None:
        self._task, self._path, self._length = task, path, length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Conversation:
        with _explained(self._path, f"cannot give example {index}"):
            example = self._task[index]
        if not isinstance(example, Mapping) or not isinstance(example.get("messages"), Sequence):
            raise UserError(
                f"{self._path} gives a {type(example).__name__} as example {index}: it must be a conversation, "
                '{"messages": [...]}.'
            )
        conversation: Conversation = example
        return conversation

    def __iter__(self) -> Iterator[Conversation]:
        return (self[i] for i in range(len(self)))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._task, name)


class _OwnJudge(_Own):
    def reward(self, index: int, reply: Sequence[Part]) -> float:
        with _explained(self._path, f"cannot judge a reply to question {index}"):
            reward = self._task.reward(index, reply)
        try:
            return float(reward)
        except (TypeError, ValueError) as error:
            raise UserError(
                f"{self._path} rewards a reply to question {index} with {reward!r:.40}: it must be "
                "a number from 0 to 1."
            ) from error


def _cut(spec: str) -> tuple[str, str]:
    file, colon, kind = spec.rpartition(":")
    return (file, kind) if colon and file.endswith(".py") else (spec, "")


def _choose(path: Path, names: dict[str, Any], wanted: str, module: str) -> Callable[[str], Any]:
    own = [
        value
        for value in names.values()
        if inspect.isclass(value) and value.__module__ == module and hasattr(value, "__getitem__")
    ]
    fitting = [kind for kind in own if wanted in ("", kind.__name__)]
    if len(fitting) == 1:
        chosen: Callable[[str], Any] = fitting[0]
        return chosen
    known = ", ".join(kind.__name__ for kind in own) or "none"
    if wanted:
        raise UserError(f"{path} has no class {wanted} with __len__ and __getitem__: it has {known}.")
    raise UserError(
        f"{path} has several classes with __len__ and __getitem__, or none ({known}): say {path}:NAME."
    )


@contextmanager
def _explained(path: Path, what: str) -> Iterator[None]:
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        lines = [
            frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)
        ]
        line = getattr(error, "lineno", None) or (lines[-1] if lines else None)
        at = f" at line {line}" if line else ""
        raise UserError(f"{path} {what}: {type(error).__name__}{at} ({error}).") from error
