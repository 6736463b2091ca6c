"""A person's own task: a Python file with a class, `my_task.py` or `my_task.py:Riddles`.

The file is code and runs with all the rights of whoever starts nanorun, so it is only ever loaded when the
command line names it (`--task`), never because some other file does.
"""

import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from nanorun.errors import UserError
from nanorun.tasks.task import Examples


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
    if hasattr(task, "reward"):  # what a judge may leave out
        for name, value in (("baseline", 0.0), ("letters", None)):
            if not hasattr(task, name):
                setattr(task, name, value)
    examples: Examples = task
    return examples


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
    raise UserError(
        f"{path} must say which class is the task (with __len__ and __getitem__ it has: {known}): "
        f"--task {path}:NAME."
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
