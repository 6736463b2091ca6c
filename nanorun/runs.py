"""A run's folder, `runs/NAME/`: its configuration, its metrics, its results, and the process that owns it.

    config.json     the configuration; resume.py decides what of it may change when the run resumes
    command.json    the arguments of `nanorun` that started it, and resume it
    metrics.jsonl   one object per step or evaluation, written as it happens
    summary.json    the final figures, written atomically at the end
    checkpoints/    see checkpoint.py
    lock            the owner: pid, host, start time and command, as JSON

The lock is `flock` on the open file, so the kernel releases it when its holder dies, however it dies. It excludes a
second process on this machine, and on others where the file system supports flock across hosts (NFS does, some
Lustre mounts do not: there a warning is printed and the run continues without a lock).

A start that fails before the first step leaves no folder. What a killed one leaves, without a checkpoint and without
a step in its metrics, is started anew, whatever its configuration.
"""

import errno
import fcntl
import json
import math
import os
import platform
import shlex
import shutil
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import IO, Any, Self

from nanorun import console, home, resume
from nanorun.config import Config
from nanorun.errors import UserError
from nanorun.json_files import check_shape, load_json, parse_json, read_json, read_lines

CONFIG, METRICS, SUMMARY = "config.json", "metrics.jsonl", "summary.json"
CHECKPOINTS, COMMAND, LOCK = "checkpoints", "command.json", "lock"
CHECKSUMS, CHECKPOINT_FILES = "checksums.json", ("model.safetensors", "optimizer.safetensors", "state.json")
EXAM = "exam.json"  # the scores of the speedrun's exam
SYNC_EVERY = 5.0  # seconds of metrics that a power failure may lose; a killed process loses nothing
STAGES = ("base", "mid", "sft", "rl")  # mid is a run of kind sft on a mixture for midtraining
CHAT_KINDS = ("sft", "rl")  # kinds of run whose models answer questions
TIME_FORMAT = "%Y-%m-%dT%H:%M:%SZ"  # UTC, in summary.json and the lock
_NOT_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
_MAX_LINE = 1 << 20  # of metrics.jsonl
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


# The types of what is read back (json_files.py). Config.from_dict checks the rest of a configuration.
CONFIG_SHAPE = {
    **dict.fromkeys(("kind?", "data?", "tokenizer?"), str),
    "parent?": (str, None),
    **dict.fromkeys(("model?", "optim?", "train?"), dict),
    "warm_start?": bool,
    "epochs?": (int, None),
    "mixture?": {"name": str},
    "rl?": {"parent": str, "parent_step?": int, "tasks?": [str]},
}
_FIGURE = (float, str, None)  # a string: NaN or infinite
_FIGURES = (
    "loss tokens seconds tokens_per_s mfu memory_gib lr_scale grad_norm data_wait_s val_bpb val_loss val_tokens "
    "chatcore reward length entropy rollout_tokens_per_s train_tokens_per_s val_reward"
).split()
METRICS_SHAPE = {"kind?": str, "step?": int, **{f"{name}?": _FIGURE for name in _FIGURES}}
_SAMPLE = {
    "prompt?": str,
    "text?": str,
    "question?": str,
    "reward?": float,
    "reply?": [{"type": str, "text": str}],
}
SUMMARY_SHAPE = {
    **dict.fromkeys(("name?", "kind?", "finished?", "device?", "torch?"), str),
    "parent?": (str, None),
    **dict.fromkeys(("depth?", "steps?", "tokens?", "skipped_steps?", "parent_step?"), int),
    **{f"{name}?": _FIGURE for name in (*_FIGURES, "train_loss", "peak_gib", "first_reward", "last_reward")},
    "seconds?": float,
    "val_reward_before?": _FIGURE,
    "before?": dict,
    "tasks?": [str],
    "samples?": [_SAMPLE],
    "planned?": [{"what": str, "planned": (float, None), "happened": (float, None), "ratio?": (float, None)}],
}
CHECKSUMS_SHAPE = {"files": {name: {"bytes": int, "sha256": str} for name in CHECKPOINT_FILES}}
_SCORE = {"task": str, "n": int, **dict.fromkeys(("accuracy", "low", "high"), (float, None))}
EXAM_SHAPE = {"step": int, "chatcore?": (float, None), "tasks": [_SCORE]}


class Run:
    """`with Run.open(name, config) as run: run.log({...})`."""

    def __init__(self, name: str, folder: Path, lock: IO[bytes] | None = None) -> None:
        self.name, self.folder = name, folder
        self._lock = lock  # None: in a temporary folder, such as that of a benchmark
        self._metrics: int | None = None  # a file descriptor, opened by the first record
        self._synced_at = 0.0

    @classmethod
    def open(cls, name: str, config: Mapping[str, Any], *, fresh: bool = False) -> "Run":
        """Starts the run, or resumes it if it has trained already and its config allows that."""
        home.check_name(name, "run")
        folder = home.runs_dir() / name
        stored: dict[str, Any] = json.loads(json.dumps(config))  # as it reads back: tuples are lists
        home.make_home()
        try:
            with ExitStack() as on_error:
                handle = _take_lock(folder, "wait for it, stop it, or choose another --name")
                on_error.callback(_release_lock, handle)
                _recover(folder)
                has_config = (folder / CONFIG).exists()
                if fresh or (has_config and not _has_trained(folder)):
                    _start_over(folder, stored)
                elif has_config:
                    _resume(folder, stored)
                else:
                    write_json(folder / CONFIG, stored)
                if arguments := _arguments():
                    write_json(folder / COMMAND, arguments)
                (folder / CHECKPOINTS).mkdir(exist_ok=True)
                run = cls(name, folder, handle)
                run.rewind_metrics(math.inf)  # drops a line that a crash left incomplete
                on_error.pop_all()
        except OSError as error:
            raise UserError(
                f"The run folder {folder} cannot be written ({error.strerror}): free space or fix the permissions "
                "there, or set NANORUN_HOME to another folder."
            ) from error
        return run

    @property
    def checkpoints(self) -> Path:
        return self.folder / CHECKPOINTS

    def log(self, record: Mapping[str, Any]) -> None:
        """Appends one line, which survives a kill at once and a power failure after a few seconds."""
        line = (json.dumps(_to_json(record), allow_nan=False) + "\n").encode()
        path = self.folder / METRICS
        if self._metrics is None:
            self._metrics = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        self.fail_if_removed(path)
        size_before = os.fstat(self._metrics).st_size
        try:
            while line:
                line = line[os.write(self._metrics, line) :]
        except OSError as error:
            os.ftruncate(self._metrics, size_before)  # readers never see a partial line
            raise UserError(
                f"{path} cannot be written ({error.strerror}): free space there, then run the same command "
                "again; it resumes from the last checkpoint."
            ) from error
        if time.monotonic() - self._synced_at >= SYNC_EVERY:
            self._sync()

    def fail_if_removed(self, part: Path | None = None) -> None:
        """UserError if somebody has removed the folder, or this part of it, while the run was training."""
        if not (part or self.folder).exists():
            raise UserError(
                f"{part or self.folder} was removed while '{self.name}' was training, which ends it: restore the "
                "folder from a copy, or run the same command again to start over."
            )

    def rewind_metrics(self, step: float) -> int:
        """Removes what was logged after `step`, which is about to run again. Returns the number of lines removed.

        A record without a step belongs to the run as a whole and stays.
        """
        path = self.folder / METRICS
        if not path.exists():
            return 0
        self._close_metrics()
        kept, lines, damaged = list[bytes](), 0, 0
        for line in read_lines(path, _MAX_LINE):
            lines += 1
            record = _parse(line)
            if record is not None and record.get("step", -math.inf) <= step:
                kept.append(line)
            has_end = line.endswith(b"\n") or len(line) == _MAX_LINE  # else a crash left it incomplete
            damaged += record is None and has_end
        if damaged:
            console.say(f"{path}: leaving out {damaged} damaged line{'s' * (damaged > 1)}")
        if len(kept) < lines:
            home.replace_file(path, b"".join(kept))
        return lines - len(kept)

    def write_summary(self, record: Mapping[str, Any]) -> None:
        write_json(self.folder / SUMMARY, _to_json(record))

    def close(self) -> None:
        self._close_metrics()
        if self._lock is not None:
            _release_lock(self._lock)
            self._lock = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        if error is not None and self._lock is not None and not _has_trained(self.folder):
            with suppress(OSError):  # the first error is the one to report
                remove_folder(self.folder)
        self.close()

    def _sync(self) -> None:
        if self._metrics is not None:
            os.fsync(self._metrics)
            self._synced_at = time.monotonic()

    def _close_metrics(self) -> None:
        if self._metrics is not None:
            self._sync()
            os.close(self._metrics)
            self._metrics = None


@dataclass(frozen=True)
class RunInfo:
    name: str
    kind: str | None  # config's "kind": base, sft or rl
    stage: str | None  # one of STAGES
    parent: str | None  # the run whose weights it started from
    trained: float  # when it finished, or saved its newest checkpoint, in seconds since 1970
    checkpoint: int | None  # the newest one's step
    config_error: str = ""  # what is wrong with its config.json


def list_runs() -> list[RunInfo]:
    """The runs of this home, the last trained first; of those trained at the same time, the later stage first."""
    found = []
    parts = [home.runs_dir().glob(f"[!.]*/{part}") for part in (CONFIG, CHECKPOINTS)]
    for folder in {path.parent for paths in parts for path in paths}:
        config, config_error = dict[str, Any](), ""
        try:
            if not (folder / CONFIG).exists():
                raise UserError(f"{folder / CONFIG} is missing: restore it from a copy, or remove the run.")
            config = read_config(folder.name)
        except UserError as error:
            config_error = str(error)
        kind, mixture, rl = config.get("kind"), config.get("mixture"), config.get("rl")
        is_mid = isinstance(mixture, dict) and str(mixture.get("name")).endswith("mid")
        parent = rl.get("parent") if isinstance(rl, dict) else config.get("parent")
        steps = [int(entry.name) for entry in folder.glob(f"{CHECKPOINTS}/*") if entry.name.isdecimal()]
        newest = max(steps, default=None)
        found.append(
            RunInfo(
                folder.name,
                kind,
                "mid" if is_mid else kind,
                parent,
                _trained_at(folder, newest),
                newest,
                config_error,
            )
        )

    def rank(run: RunInfo) -> tuple[float, int, str]:
        return -run.trained, -STAGES.index(run.stage) if run.stage in STAGES else 0, run.name

    return sorted(found, key=rank)


def _trained_at(folder: Path, checkpoint: int | None) -> float:
    """From the summary where the run has finished: a copy of the files has other times."""
    summary = read_figures(folder)
    if checkpoint is not None and summary.get("steps") == checkpoint:
        with suppress(ValueError, OverflowError):
            return datetime.fromisoformat(str(summary.get("finished"))).timestamp()
    last = folder / (METRICS if checkpoint is None else f"{CHECKPOINTS}/{checkpoint:06d}")
    return (last if last.exists() else folder).stat().st_mtime


def newest_run(kind: str) -> str | None:
    """The name of the last trained run of that kind with a model to load."""
    return next((run.name for run in loadable_runs() if run.kind == kind), None)


def loadable_runs() -> list[RunInfo]:
    """The runs whose models can be loaded, the last trained first. Reports those whose configuration is damaged."""
    runs = [run for run in list_runs() if run.checkpoint]  # not that of step 0, which has learned nothing
    for run in runs:
        if run.config_error:
            console.say(f"skipping the run '{run.name}': {run.config_error}")
    return [run for run in runs if not run.config_error]


def default_runs(prefer_chat: bool = False) -> list[str]:
    """What to load when no run is named, in this order until one is intact: the last trained first; where only a chat
    model makes sense, chat models first."""
    found = loadable_runs()
    if prefer_chat:
        found.sort(key=lambda run: run.kind not in CHAT_KINDS)
    return [run.name for run in found]


def read_config(name: str) -> dict[str, Any]:
    """The content of a run's config.json, of which only the types have been checked."""
    path = home.runs_dir() / name / CONFIG
    if not os.path.exists(path):  # False also for a name that no file can have
        raise _no_such_run(name)
    record: dict[str, Any] = read_json(
        path, "restore it from a copy, or start over with --fresh", CONFIG_SHAPE, max_bytes=1 << 20
    )
    return record


def load_config(name: str) -> Config:
    """The configuration of a run."""
    record = read_config(name)
    try:
        return Config.from_dict(record)
    except UserError as error:
        raise UserError(f"{home.runs_dir() / name / CONFIG}: {error}") from error


def read_summary(folder: Path) -> dict[str, Any]:
    """The final figures of a run; empty if it has not finished. UserError if the file is damaged."""
    if not (folder / SUMMARY).exists():
        return {}
    remedy = "the command that trained the run writes it again"
    record: dict[str, Any] = read_json(folder / SUMMARY, remedy, SUMMARY_SHAPE)
    return record


def read_figures(folder: Path) -> dict[str, Any]:
    """The same for a list of runs: a damaged file is as good as none."""
    try:
        return read_summary(folder)
    except UserError:
        return {}


def trained_config(name: str) -> dict[str, Any]:
    """The configuration of a run that has a checkpoint; empty for any other name."""
    folder = home.runs_dir() / name / CHECKPOINTS
    has_checkpoint = os.path.isdir(folder) and any(folder.glob("[0-9]*"))
    return read_config(name) if has_checkpoint else {}


def resume_command(name: str) -> str | None:
    """The command that started a run, as it can be typed in this shell; None if that is not known."""
    arguments = read_arguments(home.runs_dir() / name)
    return console.command(shlex.join(arguments)) if arguments else None


def read_arguments(folder: Path) -> list[str]:
    try:
        arguments: list[str] = load_json(folder / COMMAND, [str])
        return arguments
    except (OSError, ValueError):
        return []


def read_metrics(folder: Path, containing: bytes = b"") -> Iterator[dict[str, Any]]:
    """The records of a run, also while it is being written; a partial line is skipped. `containing` selects lines."""
    path = folder / METRICS
    if not path.exists():
        return
    for line in read_lines(path, _MAX_LINE):
        record = _parse(line) if containing in line else None
        if record is not None:
            yield {
                key: _NOT_FINITE.get(value, value) if isinstance(value, str) else value
                for key, value in record.items()
            }


def write_json(path: Path, record: Any) -> None:
    """Atomically: the file is the old one or the new one, at every moment."""
    home.replace_file(path, (json.dumps(record, indent=1, allow_nan=False) + "\n").encode())


@contextmanager
def locked(name: str) -> Iterator[Path]:
    """The folder of an existing run, which no other process trains, renames or removes meanwhile."""
    folder = home.runs_dir() / home.check_name(name, "run")
    if not folder.is_dir():
        raise _no_such_run(name)
    try:
        handle = _take_lock(folder, "wait for it, or stop it")
    except OSError as error:
        raise UserError(f"{folder} cannot be changed ({error.strerror}): check its permissions.") from error
    try:
        _recover(folder)
        yield folder
    finally:
        _release_lock(handle)


def remove_folder(folder: Path) -> None:
    """Removes a locked run at once: what a killed process leaves of it is hidden, and the next removal deletes it."""
    folder.rename(folder.with_name(f".{folder.name}.removed-{platform.node()}-{os.getpid()}"))
    for hidden in folder.parent.glob(".*.removed-*"):
        shutil.rmtree(hidden, ignore_errors=True)


def read_owner(folder: Path) -> str | None:
    """The process that uses a run, in words; None if none does."""
    with suppress(OSError), open(folder / LOCK, "rb") as handle:
        if not handle.read(1):
            return None
        try:  # the record may be of a process that was killed
            fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return _read_owner(handle)
    return None


def _no_such_run(name: str) -> UserError:
    folder = home.runs_dir()
    known = ", ".join(sorted(path.parent.name for path in folder.glob(f"[!.]*/{CONFIG}"))) or "none yet"
    return UserError(f"There is no run '{name:.100}' in {folder} (existing runs: {known}).")


def _take_lock(folder: Path, remedy: str) -> IO[bytes]:
    """Makes the folder, if there is none. The open file holds the lock; the kernel releases it when the process is
    gone."""
    is_current = False
    folder.mkdir(parents=True, exist_ok=True)
    handle = open(folder / LOCK, "a+b", buffering=0)  # noqa: SIM115 - it stays open as long as the lock
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        owner = _read_owner(handle)
        handle.close()
        raise UserError(f"The run '{folder.name}' is in use by {owner}: {remedy}.") from None
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            handle.close()
            raise
        console.say(f"{folder} does not support locks: start no second process that trains '{folder.name}'.")
    with suppress(FileNotFoundError):
        is_current = os.path.samestat(os.fstat(handle.fileno()), os.stat(folder / LOCK))
    if not is_current:  # the run was removed or renamed between `open` and `flock`
        handle.close()
        return _take_lock(folder, remedy)
    # A forked data worker must not hold the lock of a parent that was killed.
    os.register_at_fork(after_in_child=handle.close)
    owner_record = {
        "pid": os.getpid(),
        "host": platform.node(),
        "started": time.strftime(TIME_FORMAT, time.gmtime()),
        "command": shlex.join(sys.orig_argv)[:500],
    }
    handle.truncate(0)
    handle.write((json.dumps(owner_record) + "\n").encode())
    return handle


def _release_lock(handle: IO[bytes]) -> None:
    if not handle.closed:
        handle.truncate(0)
        handle.close()


def _read_owner(handle: IO[bytes]) -> str:
    handle.seek(0)
    try:
        owner = parse_json(handle.read(1 << 16))
        check_shape(owner, {"pid": int, "host": str, "started": str, "command": str})
        return f"process {owner['pid']} on {owner['host']} since {owner['started']} ({owner['command']})"
    except ValueError:
        return "another process"  # which has not written its record yet


def _arguments() -> list[str]:
    """Those that resume what this process starts; none if it is not the command line."""
    if not console.is_nanorun():
        return []
    return [argument for argument in sys.argv[1:] if argument not in ("--fresh", "--json")]


def _has_trained(folder: Path) -> bool:
    """Whether there is a checkpoint, even a damaged one, or a step in the metrics."""
    return any(not entry.name.startswith(".") for entry in (folder / CHECKPOINTS).glob("*")) or any(
        record.get("step", 0) for record in read_metrics(folder)
    )


def _resume(folder: Path, config: dict[str, Any]) -> None:
    """Stores what changes in the configuration of a run, or raises if it must not change."""
    before = read_config(folder.name)
    changed = resume.changed_settings(folder.name, before, config, folder / CONFIG)
    was, now = (resume.training_steps(each) for each in (before, config))
    if now > was:
        console.say(
            f"'{folder.name}' becomes longer: {now:,} steps instead of {was:,}, and its learning rates follow the "
            "schedule of the new length"
        )
        (folder / SUMMARY).unlink(missing_ok=True)  # first: without it, the run is not finished
    if changed:
        write_json(folder / CONFIG, config)


def _start_over(folder: Path, config: dict[str, Any]) -> None:
    """Moves the old contents aside, and deletes them only when the new run exists.

    The lock stays where it is, so the folder is ours throughout. The old config is moved first and the new one is
    written last: a folder without one was interrupted in the middle of this, and `_recover` undoes it.
    """
    old = folder.with_name(f".{folder.name}.old-{platform.node()}-{os.getpid()}")
    old.mkdir()
    entries = [entry for entry in folder.iterdir() if entry.name != LOCK]
    for entry in sorted(entries, key=lambda entry: entry.name != CONFIG):
        entry.rename(old / entry.name)
    write_json(folder / CONFIG, config)
    shutil.rmtree(old, ignore_errors=True)


def _recover(folder: Path) -> None:
    """Cleans up after a killed process. A killed --fresh is undone unless the new run existed already."""
    for temporary in folder.glob("*.tmp"):
        temporary.unlink()
    for old in folder.parent.glob(f".{folder.name}.old-*"):
        if not (folder / CONFIG).exists():
            for entry in sorted(old.iterdir(), key=lambda entry: entry.name == CONFIG):
                entry.rename(folder / entry.name)
        shutil.rmtree(old, ignore_errors=True)


def _to_json(value: Any) -> Any:
    """The value as valid JSON: NaN and infinities as strings, tensors and arrays as numbers."""
    if isinstance(value, Mapping):
        return {str(key): _to_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_to_json(item) for item in value]
    if hasattr(value, "tolist"):
        return _to_json(value.tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return json.dumps(value)  # "NaN", "Infinity" or "-Infinity"
    return value if value is None or isinstance(value, str | int | float) else str(value)


def _parse(line: bytes) -> dict[str, Any] | None:
    """The record of a complete line, None for a partial or damaged one."""
    if not line.endswith(b"\n"):
        return None
    try:
        record: dict[str, Any] = parse_json(line)
        check_shape(record, METRICS_SHAPE)
    except ValueError:
        return None
    texts = (value for name in _FIGURES if isinstance(value := record.get(name), str))
    return record if all(text in _NOT_FINITE for text in texts) else None
