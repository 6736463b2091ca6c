"""The user's own task: a Python file with a class, `my_task.py` or `my_task.py:Riddles`.

The file is code and runs with the user's permissions, so it is loaded only when the command line names it
(`--task`), never because another file does.
"""

import importlib.util
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from nanorun.errors import UserError
from nanorun.tasks.task import Conversation, Examples
from nanorun.text.chat import Part
from nanorun.tools.sandbox import SandboxUnavailable


def is_code(spec: str) -> bool:
    return _split_spec(spec)[0].endswith(".py")


def absolute_spec(spec: str) -> str:
    """The spec with an absolute path, the same from every folder."""
    file, class_name = _split_spec(spec)
    return str(Path(file).absolute()) + (f":{class_name}" if class_name else "")


def load_task(spec: str, split: str) -> Examples:
    """The task of a file, constructed with the split: `Riddles("train")`."""
    file, class_name = _split_spec(spec)
    path = Path(file)
    if not os.path.isfile(path):
        raise UserError(f"There is no file {path}: check the name and the current folder.")
    with _user_errors(path, "cannot be loaded"):
        module_spec = importlib.util.spec_from_file_location(f"nanorun_task_{path.stem}", path)
        assert module_spec is not None
        assert module_spec.loader is not None
        module = importlib.util.module_from_spec(module_spec)
        sys.modules[module_spec.name] = module  # dataclasses look their module up
        module_spec.loader.exec_module(module)
    task_class = _choose_class(path, vars(module), class_name, module.__name__)
    with _user_errors(path, f"cannot make a {task_class.__name__}('{split}')"):
        task: Any = task_class(split)
        length = len(task)
    if not hasattr(task, "name"):
        raise UserError(f"{task_class.__name__} in {path} has no name: see docs/tasks.md.")
    if length < 1:
        raise UserError(f"{task_class.__name__}('{split}') in {path} has no examples.")
    # The first example and a first reward: a mistake shows now, before training or evaluation starts.
    if not hasattr(task, "reward"):
        examples: Examples = _UserExamples(task, path, length)
        examples[0]
        return examples
    for name, value in (("baseline", 0.0), ("letters", None)):  # optional in a user's task
        if not hasattr(task, name):
            setattr(task, name, value)
    user_task = _UserTask(task, path, length)
    user_task[0]
    with suppress(SandboxUnavailable):
        user_task.reward(0, [{"type": "text", "text": ""}])
    return user_task


class _UserExamples:
    """A user's examples; an exception in the user's code becomes a one-sentence error."""

    name: str

    def __init__(self, task: Any, path: Path, length: int) -> None:
        self._task, self._path, self._length = task, path, length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Conversation:
        with _user_errors(self._path, f"cannot give example {index}"):
            example = self._task[index]
        if not isinstance(example, Mapping) or not isinstance(example.get("messages"), Sequence):
            raise UserError(
                f"{self._path} gives a {type(example).__name__} as example {index}: it must be a conversation, "
                '{"messages": [...]}.'
            )
        conversation: Conversation = example
        return conversation

    def __getattr__(self, name: str) -> Any:
        return getattr(self._task, name)


class _UserTask(_UserExamples):
    def reward(self, index: int, reply: Sequence[Part]) -> float:
        with _user_errors(self._path, f"cannot grade a reply to question {index}"):
            reward = self._task.reward(index, reply)
        try:
            return float(reward)
        except (TypeError, ValueError) as error:
            raise UserError(
                f"{self._path} rewards a reply to question {index} with {reward!r:.40}: it must be "
                "a number from 0 to 1."
            ) from error


def _split_spec(spec: str) -> tuple[str, str]:
    file, colon, class_name = spec.rpartition(":")
    return (file, class_name) if colon and file.endswith(".py") else (spec, "")


def _choose_class(path: Path, names: dict[str, Any], class_name: str, module: str) -> Callable[[str], Any]:
    classes = [
        value
        for value in names.values()
        if inspect.isclass(value) and value.__module__ == module and hasattr(value, "__getitem__")
    ]
    matching = [each for each in classes if class_name in ("", each.__name__)]
    if len(matching) == 1:
        chosen: Callable[[str], Any] = matching[0]
        return chosen
    known = ", ".join(each.__name__ for each in classes) or "none"
    if class_name:
        raise UserError(f"{path} has no class {class_name} with __len__ and __getitem__: it has {known}.")
    raise UserError(
        f"{path} has several classes with __len__ and __getitem__, or none ({known}): say {path}:NAME."
    )


@contextmanager
def _user_errors(path: Path, what: str) -> Iterator[None]:
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
