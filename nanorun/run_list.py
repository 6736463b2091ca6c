"""What `nanorun runs` does: list the runs of this home, show one of them, rename and remove them.

A run records its parent, the run whose weights it started from, by name. So renaming a run also rewrites its children,
before the folder itself is renamed: if the process is killed in between, the same command completes it. Both rename
and remove hold the locks of all runs that they change.
"""

import os
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from nanorun import home
from nanorun.config import Config
from nanorun.console import command
from nanorun.errors import UserError
from nanorun.json_files import load_json
from nanorun.resume import training_steps
from nanorun.runs import (
    CHECKPOINT_FILES,
    CHECKPOINTS,
    CHECKSUMS,
    CHECKSUMS_SHAPE,
    COMMAND,
    CONFIG,
    EXAM,
    EXAM_SHAPE,
    LOCK,
    SUMMARY,
    TIME_FORMAT,
    RunInfo,
    list_runs,
    load_config,
    locked,
    read_arguments,
    read_config,
    read_figures,
    read_metrics,
    read_owner,
    read_summary,
    remove_folder,
    resume_command,
    write_json,
)

_SCORES = ("val_bpb", "chatcore", "val_reward_before", "val_reward")


def list_records() -> list[dict[str, Any]]:
    """The runs, the last trained first. Exactly one that can be loaded, if any, is what `nanorun chat` takes."""
    runs = list_runs()
    parents = {run.name: run.parent for run in runs}
    records = [_record(run, parents) for run in runs]
    loadable = (record for record in records if record["steps"] and not record["error"])
    default = next(loadable, None)
    return [{**record, "is_default": record is default} for record in records]


def show_record(name: str) -> dict[str, Any]:
    """Everything about one run."""
    config, parameters = read_config(name), load_config(name).model.total_parameters
    folder = home.runs_dir() / name
    record = next(record for record in list_records() if record["name"] == name)
    commands = {"chat": command(f"chat --model {name}")} if record["steps"] and not record["error"] else {}
    started_by = resume_command(name)
    if started_by is None and record["stage"] == "base":
        started_by = command(f"train base --config {folder / CONFIG} --name {name}")
    if started_by is not None:
        commands["started by" if record["finished"] else "resume"] = started_by
    exam = _read_exam(folder)
    files = [path for path in sorted(folder.iterdir()) if path.is_file() and path.name != LOCK]
    return {
        **record,
        "config": config,
        "parameters": parameters,
        "summary": read_figures(folder),
        "exam": exam["tasks"] if exam.get("step") == record["steps"] else [],
        "children": children_of(name),
        "folder": str(folder),
        "files": [str(path) for path in sorted(files, key=lambda path: path.suffix != ".png")],
        "commands": commands,
    }


def children_of(name: str) -> list[str]:
    return [run.name for run in list_runs() if run.parent == name and run.name != name]


def rename(old: str, new: str) -> dict[str, Any]:
    """Renames a run, also where its children refer to it."""
    home.check_name(new, "run")
    target = home.runs_dir() / new
    with ExitStack() as locks:
        folder = locks.enter_context(locked(old))
        if target.exists():
            raise UserError(f"There is a run '{new}' already: choose another name, or remove it first.")
        children = children_of(old)
        child_folders = [locks.enter_context(locked(child)) for child in children]
        for child in child_folders:
            _change_parent(child, old, new)
        try:
            _change_summary(folder, "name", old, new)
            _change_command(folder, {"--name": new})
            folder.rename(target)
        except OSError as error:
            for child in child_folders:
                _change_parent(child, new, old)
            raise UserError(
                f"{folder} cannot be renamed ({error.strerror}): check the permissions of {folder.parent}."
            ) from error
        home.sync(target.parent)
    return {"old": old, "new": new, "folder": str(target), "children": children}


def check_removal(names: Sequence[str]) -> dict[str, Any]:
    """What removing these runs would delete, and the runs that came from them. Raises if one of those needs it."""
    children = []
    for name in names:
        with locked(name):
            pass
        for child in children_of(name):
            if child in names:
                continue
            if not read_figures(home.runs_dir() / child):
                raise UserError(
                    f"'{name}' is the parent of '{child}', which has not finished and needs it to resume: finish "
                    f"'{child}' first, or remove it as well."
                )
            children.append(child)
    size = sum(_size(home.runs_dir() / name) for name in names)
    return {"removed": list(names), "bytes": size, "children": children}


def remove(names: Sequence[str]) -> None:
    with ExitStack() as locks:
        folders = [locks.enter_context(locked(name)) for name in names]
        for folder in folders:
            try:
                remove_folder(folder)
            except OSError as error:
                raise UserError(
                    f"{folder} cannot be removed ({error.strerror}): check the permissions of {folder.parent}."
                ) from error


def _record(run: RunInfo, parents: dict[str, str | None]) -> dict[str, Any]:
    folder = home.runs_dir() / run.name
    config = {} if run.config_error else read_config(run.name)
    return {
        "name": run.name,
        "stage": run.stage,
        "steps": run.checkpoint or 0,
        "planned_steps": training_steps(config),
        "finished": bool(read_figures(folder)),
        "in_use_by": read_owner(folder),
        "scores": _scores(folder, run.checkpoint),
        "bytes": _size(folder),
        "trained": time.strftime(TIME_FORMAT, time.gmtime(run.trained)),
        "lineage": _lineage(run.name, parents),
        "error": run.config_error or _fault(folder, config, run.checkpoint),
        "warning": _summary_fault(folder),
    }


def _lineage(name: str, parents: dict[str, str | None]) -> list[str]:
    """The run and what it came from, the first stage first. An ancestor that was removed ends it."""
    chain = [name]
    while (parent := parents.get(chain[0])) is not None and parent not in chain:
        chain.insert(0, parent)
    return chain


def _scores(folder: Path, checkpoint: int | None) -> dict[str, float]:
    """The final figures, or those of the last evaluation so far; the exam's, if it is of this checkpoint."""
    figures = read_figures(folder)
    if not figures:
        evaluations = read_metrics(folder, containing=b'"kind": "eval"')
        figures = {key: value for record in evaluations for key, value in record.items()}
    exam = _read_exam(folder)
    if exam.get("step") == checkpoint:
        figures = figures | {"chatcore": exam.get("chatcore")}
    return {name: figures[name] for name in _SCORES if isinstance(figures.get(name), float)}


def _fault(folder: Path, config: dict[str, Any], checkpoint: int | None) -> str:
    """Why the model cannot be loaded, as far as file sizes tell; empty if it can, or has not been saved yet."""
    try:
        Config.from_dict(config)
    except UserError as error:
        return f"{folder / CONFIG}: {error}"
    saved = [path for path in (folder / CHECKPOINTS).glob("*") if path.name.isdecimal()]
    if checkpoint is None or any(map(_is_complete, saved)):
        return ""
    return (
        f"Every checkpoint in {folder / CHECKPOINTS} is damaged: restore one from a backup, or start over with "
        "--fresh."
    )


def _summary_fault(folder: Path) -> str:
    try:
        read_summary(folder)
    except UserError as error:
        return str(error)
    return ""


def _is_complete(checkpoint: Path) -> bool:
    try:
        files = load_json(checkpoint / CHECKSUMS, CHECKSUMS_SHAPE)["files"]
        return all((checkpoint / name).stat().st_size == files[name]["bytes"] for name in CHECKPOINT_FILES)
    except (OSError, ValueError):
        return False


def _size(folder: Path) -> int:
    """Bytes of its files. They may come and go while it is in use."""
    size = 0
    for where, _, names in os.walk(folder):
        for name in names:
            with suppress(FileNotFoundError):
                size += os.lstat(os.path.join(where, name)).st_size
    return size


def _read_exam(folder: Path) -> dict[str, Any]:
    """The scores of the speedrun's exam; empty if there are none."""
    try:
        exam: dict[str, Any] = load_json(folder / EXAM, EXAM_SHAPE)
        return exam
    except (OSError, ValueError):
        return {}


def _change_parent(child: Path, old: str, new: str) -> None:
    config = read_config(child.name)
    holder = config["rl"] if isinstance(config.get("rl"), dict) else config
    holder["parent"] = new
    write_json(child / CONFIG, config)
    _change_summary(child, "parent", old, new)
    _change_command(child, {"--from": new, "--name": child.name})


def _change_summary(folder: Path, key: str, old: str, new: str) -> None:
    summary = read_figures(folder)
    if summary.get(key) == old:
        write_json(folder / SUMMARY, {**summary, key: new})


def _change_command(folder: Path, options: dict[str, str]) -> None:
    """Sets options of the command that resumes a run. One that names no run, such as speedrun, is dropped: it would
    train another."""
    arguments = read_arguments(folder)
    if arguments[:1] != ["train"]:
        (folder / COMMAND).unlink(missing_ok=True)
        return
    for option, value in options.items():
        if option in arguments:
            arguments[arguments.index(option) + 1] = value
        else:
            arguments = [each for each in arguments if not each.startswith(f"{option}=")] + [option, value]
    write_json(folder / COMMAND, arguments)
