"""A run's folder, `runs/NAME/`: what it is, what happened in it, and who is at work there.

    config.json     what the run is, written once; going on with another configuration is refused
    metrics.jsonl   one object a step or evaluation, written as it happens
    summary.json    the final figures, written whole at the end
    checkpoints/    see checkpoint.py
    lock            who works here: pid, host, start and command, as JSON

The lock is `flock` on the open file, so the kernel frees it the moment its holder dies, however it dies.
It guards against a second process on this machine, and on others where the file system carries flock
across (NFS does, some Lustre mounts do not: there a line says so and the run goes on unguarded).

Rank 0 holds the run. Other ranks open it with `lock=False`: they know the folder and write nothing.
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
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from nanorun import console, home
from nanorun.errors import UserError, json_fault

CONFIG, METRICS, SUMMARY, CHECKPOINTS, LOCK = (
    "config.json",
    "metrics.jsonl",
    "summary.json",
    "checkpoints",
    "lock",
)
SYNC_EVERY = 5.0  # seconds of metrics that a power cut may take; a killed process loses nothing
CHAT_KINDS = ("sft", "rl")  # runs whose models were taught to answer
_NOT_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


class Run:
    """`with Run.open(name, config) as run: run.log({...})`."""

    def __init__(self, name: str, folder: Path, config: dict[str, Any], lock: "_Lock | None") -> None:
        self.name, self.folder, self.config = name, folder, config
        self._lock = lock
        self._metrics: int | None = None  # a file descriptor, opened by the first record
        self._synced = 0.0

    @classmethod
    def open(cls, name: str, config: Mapping[str, Any], *, fresh: bool = False, lock: bool = True) -> "Run":
        """Begins the run, or goes on with it if its folder exists and was begun with the same config."""
        home.check_name(name, "run")
        folder = home.runs_dir() / name
        wanted = json.loads(json.dumps(config))  # as it reads back: tuples are lists
        if not lock:
            return cls(name, folder, wanted, None)
        home.make_home()
        held: _Lock | None = None
        try:
            folder.mkdir(parents=True, exist_ok=True)
            held = _Lock.take(folder / LOCK, name)
            _clear_up(folder)
            if fresh:
                _begin_anew(folder, wanted)
            elif (folder / CONFIG).exists():
                _check_same(name, read_config(name), wanted)
            else:
                write_json(folder / CONFIG, wanted)
            (folder / CHECKPOINTS).mkdir(exist_ok=True)
            _cut_torn_line(folder / METRICS)
        except OSError as error:
            if held is not None:
                held.release()
            raise UserError(
                f"The run folder {folder} cannot be written ({error.strerror}): make room or give yourself "
                "the rights there, or set NANORUN_HOME to another folder."
            ) from error
        except BaseException:
            if held is not None:
                held.release()
            raise
        return cls(name, folder, wanted, held)

    @property
    def checkpoints(self) -> Path:
        return self.folder / CHECKPOINTS

    def log(self, record: Mapping[str, Any]) -> None:
        """Appends one line, which survives a kill at once and a power cut after a few seconds."""
        if self._lock is None:
            return
        line = (json.dumps(_plain(record), allow_nan=False) + "\n").encode()
        path = self.folder / METRICS
        if self._metrics is None:
            self._metrics = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        before = os.fstat(self._metrics).st_size
        try:
            while line:
                line = line[os.write(self._metrics, line) :]
        except OSError as error:
            os.ftruncate(self._metrics, before)  # no torn line for those who read on
            raise UserError(
                f"{path} cannot be written ({error.strerror}): make room there, then start the same command "
                "again; it goes on from the last checkpoint."
            ) from error
        if time.monotonic() - self._synced >= SYNC_EVERY:
            self._sync()

    def rewind_metrics(self, step: int) -> int:
        """Takes out what was logged after `step`, which is about to be done again. Says how many lines."""
        if self._lock is None:
            return 0
        self._close_metrics()
        path = self.folder / METRICS
        if not path.exists():
            return 0
        removed = 0
        beside = path.with_suffix(".jsonl.tmp")
        with open(path, "rb") as old, open(beside, "wb") as new:
            for line in old:
                record = _parse(line)
                if record is None or _step(record) > step:
                    removed += 1
                else:
                    new.write(line)
            new.flush()
            os.fsync(new.fileno())
        if removed:
            beside.replace(path)
            home.sync(path.parent)
        else:
            beside.unlink()
        return removed

    def read_metrics(self) -> Iterator[dict[str, Any]]:
        return read_metrics(self.folder)

    def write_summary(self, record: Mapping[str, Any]) -> None:
        if self._lock is not None:
            write_json(self.folder / SUMMARY, _plain(record))

    def close(self) -> None:
        self._close_metrics()
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _sync(self) -> None:
        if self._metrics is not None:
            os.fsync(self._metrics)
            self._synced = time.monotonic()

    def _close_metrics(self) -> None:
        if self._metrics is not None:
            self._sync()
            os.close(self._metrics)
            self._metrics = None


@dataclass(frozen=True)
class RunInfo:
    name: str
    kind: str | None  # config's "kind": base, sft or rl
    changed: float  # when something was last written, in seconds since 1970
    checkpoint: int | None  # the newest one's step
    finished: bool
    fault: str = ""  # what is wrong with its config.json


def list_runs() -> list[RunInfo]:
    """The runs of this home, the one last worked on first."""
    found = []
    for path in home.runs_dir().glob(f"[!.]*/{CONFIG}"):
        folder, kind, fault = path.parent, None, ""
        try:
            kind = read_config(folder.name).get("kind")
        except UserError as error:
            fault = str(error)
        steps = [int(entry.name) for entry in folder.glob(f"{CHECKPOINTS}/*") if entry.name.isdecimal()]
        changed = max(f.stat().st_mtime for f in (path, folder / METRICS, folder / SUMMARY) if f.exists())
        finished = (folder / SUMMARY).exists()
        found.append(RunInfo(folder.name, kind, changed, max(steps, default=None), finished, fault))
    return sorted(found, key=lambda run: (-run.changed, run.name))


def newest_run(kind: str | None = None, *, with_checkpoint: bool = False) -> str | None:
    """The name of the run last worked on (of that kind; that has a model to load)."""
    for run in loadable_runs() if with_checkpoint else list_runs():
        if kind in (None, run.kind):
            return run.name
    return None


def loadable_runs() -> list[RunInfo]:
    """The runs whose models can be loaded, newest first; a line names those whose configuration is damaged."""
    found = []
    for run in list_runs():
        if run.checkpoint is not None and run.fault:
            console.say(f"skipping the run '{run.name}': {run.fault}")
        elif run.checkpoint is not None:
            found.append(run)
    return found


def speakers() -> list[str]:
    """The runs to talk to, the best first: the newest whose model answers, then the newest of the others."""
    loadable = loadable_runs()
    return [run.name for run in sorted(loadable, key=lambda run: run.kind not in CHAT_KINDS)]


def newest_speaker() -> str | None:
    return next(iter(speakers()), None)


def read_config(name: str) -> dict[str, Any]:
    path = home.runs_dir() / name / CONFIG
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(record, dict):
            raise ValueError("it holds no object")
        return record
    except FileNotFoundError:
        known = ", ".join(run.name for run in list_runs()) or "none yet"
        raise UserError(f"There is no run '{name}' in {home.runs_dir()} (there: {known}).") from None
    except ValueError as error:
        raise UserError(
            f"{path} is damaged ({json_fault(error)}): put it back from a copy, or begin anew with --fresh."
        ) from error


def read_metrics(folder: Path) -> Iterator[dict[str, Any]]:
    """The records of a run, also of one that is being written; a torn line is passed over."""
    path = folder / METRICS
    if not path.exists():
        return
    with open(path, "rb") as file:
        for line in file:
            record = _parse(line)
            if record is not None:
                yield {
                    key: _NOT_FINITE.get(value, value) if isinstance(value, str) else value
                    for key, value in record.items()
                }


def write_json(path: Path, record: Any) -> None:
    """The file is the old one or the new one, at every moment."""
    beside = path.with_name(path.name + ".tmp")
    with open(beside, "w", encoding="utf-8") as file:
        file.write(json.dumps(record, indent=1, allow_nan=False) + "\n")
        file.flush()
        os.fsync(file.fileno())
    beside.replace(path)
    home.sync(path.parent)


class _Lock:
    """Who works in a folder. Freed by `release`, or by the kernel when the process is gone."""

    def __init__(self, handle: IO[bytes]) -> None:
        self._handle = handle
        # A forked data worker must not keep the lock of a parent that was killed.
        os.register_at_fork(after_in_child=handle.close)

    @classmethod
    def take(cls, path: Path, name: str) -> "_Lock":
        handle = open(path, "a+b", buffering=0)  # noqa: SIM115 - it stays open as long as the lock
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = _read_holder(handle)
            handle.close()
            raise UserError(
                f"The run '{name}' is in use by {holder}: wait for it, stop it, or choose another --name."
            ) from None
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                handle.close()
                raise
            console.say(f"{path.parent} cannot be locked here: let no second process train '{name}'.")
        handle.truncate(0)
        handle.write((json.dumps(_myself()) + "\n").encode())
        return cls(handle)

    def release(self) -> None:
        if not self._handle.closed:
            self._handle.truncate(0)
            self._handle.close()


def _myself() -> dict[str, Any]:
    return {
        "pid": os.getpid(),
        "host": platform.node(),
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "command": shlex.join(sys.orig_argv)[:500],
    }


def _read_holder(handle: IO[bytes]) -> str:
    handle.seek(0)
    try:
        who = json.loads(handle.read())
        return f"process {who['pid']} on {who['host']} since {who['started']} ({who['command']})"
    except (ValueError, KeyError, TypeError):
        return "another process"  # which has only just begun to write its name


def _begin_anew(folder: Path, config: dict[str, Any]) -> None:
    """Moves what is in the folder aside, and deletes it only when the new run is there.

    The lock stays where it is, so the folder is ours all the time. The old config goes first and the new
    one comes last: a folder without one is in the middle of this, and `_clear_up` undoes it.
    """
    old = folder.with_name(f".{folder.name}.old-{platform.node()}-{os.getpid()}")
    old.mkdir()
    entries = [entry for entry in folder.iterdir() if entry.name != LOCK]
    for entry in sorted(entries, key=lambda entry: entry.name != CONFIG):
        entry.rename(old / entry.name)
    write_json(folder / CONFIG, config)
    shutil.rmtree(old, ignore_errors=True)


def _clear_up(folder: Path) -> None:
    """After a killed process; from a killed --fresh back to the old run, if the new one was not there yet."""
    for half_written in folder.glob("*.tmp"):
        half_written.unlink()
    for old in folder.parent.glob(f".{folder.name}.old-*"):
        if not (folder / CONFIG).exists():
            for entry in sorted(old.iterdir(), key=lambda entry: entry.name == CONFIG):
                entry.rename(folder / entry.name)
        shutil.rmtree(old, ignore_errors=True)


def _check_same(name: str, old: dict[str, Any], new: dict[str, Any]) -> None:
    found = sorted(_differences(_completed(old), new), key=lambda change: _typed_first(change[0]))
    changes = [f"{_TYPED.get(path, path)} was {was} and is now {now}" for path, was, now in found]
    if changes:
        more = f", and {len(changes) - 3} more" if len(changes) > 3 else ""
        raise UserError(
            f"The run '{name}' was begun with other settings ({'; '.join(changes[:3])}{more}): give those "
            f"again to go on with it (--config {home.runs_dir() / name / CONFIG} gives them all), --fresh to throw it "
            "away and begin anew, or another --name."
        )


# Fields that a person sets, by the option that sets them; most others follow from these.
_TYPED = {
    "model.depth": "--depth",
    "model.context": "--context",
    "data": "--data",
    "tokenizer": "--tokenizer",
    "parent": "--from",
    "train.steps": "--steps",
    "train.batch_tokens": "--batch-tokens",
    "train.seed": "--seed",
    "train.save_every": "--save-every",
    "train.eval_every": "--eval-every",
    "model.recompute": "--recompute",
}


def _typed_first(path: str) -> int:
    """Then what they give directly, then the rest of the model, and the rates that follow from it all."""
    if path in _TYPED:
        return list(_TYPED).index(path)
    return 100 + ["model", "optim"].index(path.split(".")[0]) if path.startswith(("model.", "optim.")) else 99


def _completed(old: dict[str, Any]) -> dict[str, Any]:
    """A configuration of an earlier nanorun, with what it did not know yet at its default."""
    from nanorun.config import Config

    try:
        return {**old, **json.loads(json.dumps(Config.from_dict(old).to_dict()))}
    except (UserError, TypeError, KeyError, ValueError, AttributeError):
        return old


def _differences(old: Any, new: Any, path: str = "") -> Iterator[tuple[str, str, str]]:
    if isinstance(old, dict) and isinstance(new, dict):
        for key in [*old, *(key for key in new if key not in old)]:
            below = f"{path}.{key}" if path else str(key)
            if key not in old or key not in new:
                was, now = (json.dumps(side[key]) if key in side else "absent" for side in (old, new))
                yield below, was, now
            else:
                yield from _differences(old[key], new[key], below)
    elif old != new or isinstance(old, bool) != isinstance(new, bool):
        yield path, json.dumps(old), json.dumps(new)


def _plain(value: Any) -> Any:
    """The value as valid JSON: NaN and infinities as words, tensors and arrays as numbers."""
    if value is None or isinstance(value, str | bool):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        if math.isfinite(value):
            return float(value)
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if hasattr(value, "tolist"):
        return _plain(value.tolist())
    return str(value)


def _parse(line: bytes) -> dict[str, Any] | None:
    """The record of a whole line, None for a torn one."""
    if not line.endswith(b"\n"):
        return None
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) else None


def _step(record: dict[str, Any]) -> float:
    """A record without a step belongs to the run as a whole and is never rewound."""
    step = record.get("step")
    return step if isinstance(step, int | float) else -math.inf


def _cut_torn_line(path: Path) -> None:
    """A crash in the middle of a record must not glue the next one to it."""
    if not path.exists():
        return
    with open(path, "r+b") as file:
        end = file.seek(0, os.SEEK_END)
        keep = end
        while keep:
            start = max(keep - 65536, 0)
            file.seek(start)
            newline = file.read(keep - start).rfind(b"\n")
            if newline >= 0:
                keep = start + newline + 1
                break
            keep = start
        if keep < end:
            file.truncate(keep)
