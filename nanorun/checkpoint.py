"""The checkpoint format: everything a run needs to resume, written atomically.

    checkpoints/000060/          named by the number of optimizer steps
        model.safetensors        the weights, in the standard format
        optimizer.safetensors    the optimizer's tensors
        state.json               {"format": "nanorun-checkpoint", "version": 1, "step": 60, "state": {...}}:
                                 loader position, RNG state, counters, whatever the caller passes
        checksums.json           {"files": {NAME: {"bytes": N, "sha256": HEX}}} of the three above

There is no pickle, so loading a checkpoint runs no code, and no timestamp, so equal runs write equal bytes. A
checkpoint is written to a hidden folder, synced to disk, and renamed last; removal does the same in reverse. A
folder with a real name is therefore complete, and what a killed writer leaves is hidden and removed by
`load_newest`. Disks still lose bits, so loading verifies every byte; a damaged checkpoint is renamed to
`damaged-000060`, and the previous one is used.

`save`, `prune` and `load_newest` (with `repair`) are for the one process that holds the run's lock. Others, such as
a chat with a model in training, read with `load_newest(..., repair=False)`.

Not covered: a disk that ignores fsync, and memory corruption before the bytes are written.
"""

import errno
import hashlib
import json
import os
import platform
import random
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nanorun import console, home, runs
from nanorun.errors import UserError
from nanorun.json_files import load_json

FILES = MODEL, OPTIMIZER, STATE = runs.CHECKPOINT_FILES
CHECKSUMS = runs.CHECKSUMS
_STATE_BYTES = 1 << 26
_STATE_SHAPE = {"format": str, "version": int, "step": int, "state": dict}
_OVERHEAD = 1 << 20  # headers, checksums and file system blocks

_DTYPES: dict[torch.dtype, str] = {  # their names in safetensors
    **{getattr(torch, f"float{bits}"): f"F{bits}" for bits in (16, 32, 64)},
    **{getattr(torch, f"int{bits}"): f"I{bits}" for bits in (8, 16, 32, 64)},
    **{getattr(torch, f"uint{bits}"): f"U{bits}" for bits in (8, 16, 32, 64)},
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.bool: "BOOL",
}


class NonFinite(Exception):
    """A tensor holds NaN or infinite values, and where: a checkpoint of it would be useless, and is not written."""


class Damaged(Exception):
    """A checkpoint that fails verification, with the reason."""


@dataclass(frozen=True)
class Checkpoint:
    step: int
    model: dict[str, Tensor]
    optimizer: dict[str, Tensor]
    state: dict[str, Any]
    path: Path


def save(
    folder: Path,
    step: int,
    model: Mapping[str, Tensor],
    optimizer: Mapping[str, Tensor],
    state: Mapping[str, Any],
) -> Path:
    """Writes the checkpoint of `step` and returns its folder. It replaces one of the same step.

    Tensors are copied to the CPU one at a time, so a model on a GPU needs no second copy in host memory. Tied
    weights are written once under each of their names.
    """
    for what, tensors in (("the model", model), ("the optimizer", optimizer)):
        _check_tensors(what, tensors)
    _check_json(state, "state")
    record = {"format": "nanorun-checkpoint", "version": 1, "step": step, "state": dict(state)}
    text = (json.dumps(record) + "\n").encode()
    final = folder / _name(step)
    with _disk_errors(final):
        folder.mkdir(parents=True, exist_ok=True)
        _sweep(folder, final.name)
        _check_disk_space(folder, final.name, _bytes(model) + _bytes(optimizer) + len(text) + _OVERHEAD)
        with home.new_folder(final, replace=True) as work, _disk_errors(final):
            sums = {
                MODEL: _write(work / MODEL, _safetensors(model)),
                OPTIMIZER: _write(work / OPTIMIZER, _safetensors(optimizer)),
                STATE: _write(work / STATE, [text]),
            }
            _write(work / CHECKSUMS, [(json.dumps({"files": sums}, indent=1) + "\n").encode()])
        home.sync(folder)
    return final


def load(path: Path) -> Checkpoint:
    """Loads one checkpoint and verifies every byte; raises Damaged with the reason if verification fails."""
    _verify(path)
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        record = load_json(path / STATE, _STATE_SHAPE, max_bytes=_STATE_BYTES)
        if record["format"] != "nanorun-checkpoint" or record["version"] != 1:
            raise UserError(
                f"{path} has format {record['format']} {record['version']}, which this version cannot read: "
                "use the nanorun version that wrote it."
            )
        step, state = record["step"], record["state"]
        if path.name.isdecimal() and step != int(path.name):
            raise ValueError(f"{STATE} is of step {step}")
        model, optimizer = load_file(path / MODEL), load_file(path / OPTIMIZER)
        for what, tensors in (("the model", model), ("the optimizer", optimizer)):
            _check_finite(what, tensors)
    except (ValueError, OSError, SafetensorError) as error:
        raise Damaged(f"it cannot be read: {error}") from error
    except NonFinite as error:
        raise Damaged(str(error)) from error
    return Checkpoint(step, model, optimizer, state, path)


def load_newest(
    folder: Path, say: Callable[[str], None] = console.say, *, repair: bool = True
) -> Checkpoint | None:
    """The newest intact checkpoint, or None if there are no checkpoints at all."""
    if repair:
        _sweep(folder)
    damaged: dict[str, str] = {}
    found = None
    for step in reversed(steps(folder)):
        path = folder / _name(step)
        try:
            found = load(path)
            break
        except Damaged as damage:
            if path.is_dir():  # else another process has just pruned it
                damaged[path.name] = str(damage)
    if found is None:
        reasons = [f"{name}: {reason}" for name, reason in damaged.items()]
        reasons += sorted(entry.name for entry in folder.glob("damaged-*"))
        if not reasons:
            return None
        raise UserError(
            f"Every checkpoint in {folder} is damaged ({'; '.join(reasons)}): restore one from a backup, or "
            "start over with --fresh."
        )
    for name, reason in damaged.items():
        say(f"{folder.name}/{name} is damaged ({reason}): continuing from {found.path.name}")
        if repair:
            _rename_damaged(folder / name)
    return found


def steps(folder: Path) -> list[int]:
    """The steps of the checkpoints in the folder, oldest first."""
    numbers = (int(entry.name) for entry in folder.glob("*/") if entry.name.isdecimal())
    return sorted(step for step in numbers if (folder / _name(step)).is_dir())


def prune(folder: Path, keep: int) -> list[int]:
    """Removes all but the newest `keep` checkpoints; returns the removed steps.

    The newest one whose files have their full length always stays. (Checksums are not verified here: every save
    would read all checkpoints.)
    """
    if keep < 1:
        raise ValueError(f"at least one checkpoint must be kept, not {keep}")
    found = steps(folder)
    kept = set(found[-keep:])
    kept |= set([step for step in found if _has_full_length(folder / _name(step))][-1:])
    removed = [step for step in found if step not in kept]
    for step in removed:
        hidden = folder / f".{_name(step)}.removed-{platform.node()}-{os.getpid()}"
        (folder / _name(step)).rename(hidden)
        shutil.rmtree(hidden, ignore_errors=True)
    return removed


def rng_state() -> dict[str, Tensor]:
    """The state of Python's, NumPy's and torch's global RNGs in this process, as tensors.

    For CUDA only the current device, since each rank has its own. Every rank has its own state.
    """
    version, numbers, gauss = random.getstate()
    _, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    state = {
        "python": torch.tensor([version, *numbers]),
        "python_gauss": torch.tensor([] if gauss is None else [gauss], dtype=torch.float64),
        "numpy": torch.tensor([*np.asarray(keys).tolist(), int(position)]),
        "numpy_gauss": torch.tensor([float(cached)] if has_gauss else [], dtype=torch.float64),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def restore_rng(state: Mapping[str, Tensor]) -> None:
    """Sets the generators to a saved state. UserError if it is none."""
    try:
        _restore_rng(state)
    except (KeyError, ValueError, TypeError, IndexError, RuntimeError) as error:
        raise UserError(
            f"The saved state of the random number generators is damaged ({error}): use an earlier checkpoint."
        ) from error


def _restore_rng(state: Mapping[str, Tensor]) -> None:
    version, *numbers = state["python"].tolist()
    gauss = state["python_gauss"].tolist()
    random.setstate((version, tuple(numbers), gauss[0] if gauss else None))
    *keys, position = state["numpy"].tolist()
    cached = state["numpy_gauss"].tolist()
    np.random.set_state(
        ("MT19937", np.array(keys, dtype=np.uint32), position, len(cached), cached[0] if cached else 0.0)
    )
    torch.set_rng_state(state["torch"].cpu())
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"].cpu())


def _name(step: int) -> str:
    return f"{step:06d}"


def _bytes(tensors: Mapping[str, Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def _check_tensors(what: str, tensors: Mapping[str, Tensor]) -> None:
    for name, tensor in tensors.items():
        if tensor.layout != torch.strided or tensor.dtype not in _DTYPES or tensor.is_meta:
            raise TypeError(f"{name} of {what} is a {tensor.layout} {tensor.dtype} tensor on {tensor.device}")
    _check_finite(what, tensors)


def _check_finite(what: str, tensors: Mapping[str, Tensor]) -> None:
    for name, tensor in tensors.items():
        if not tensor.is_floating_point() or not tensor.numel():
            continue
        wide = tensor.detach() if tensor.element_size() > 1 else tensor.detach().float()
        low, high = torch.aminmax(wide)  # one pass, no copy; NaN propagates to both
        if not (torch.isfinite(low) and torch.isfinite(high)):
            bad = ~torch.isfinite(wide)
            first = "".join(f", the first in row {row}" for row in bad.nonzero()[0].tolist()[:1])
            raise NonFinite(
                f"{name} of {what} holds NaN or infinite values ({int(bad.sum()):,} of {bad.numel():,}{first})"
            )


def _check_json(value: Any, path: str) -> None:
    """Refuses values that JSON would silently convert: they would come back changed."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            if not isinstance(key, str):
                raise TypeError(f"{path} has the key {key!r}, which JSON would convert to a string")
            _check_json(item, f"{path}.{key}")
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            _check_json(item, f"{path}[{index}]")
    elif value is not None and not isinstance(value, str | int | float):
        raise TypeError(f"{path} is a {type(value).__name__}, which JSON cannot represent")


def _check_disk_space(folder: Path, name: str, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise UserError(
            f"The checkpoint {name} needs {console.size(needed)}, but {folder} has {console.size(free)} free: "
            "free some space there. Nothing was written; earlier checkpoints are intact."
        )


@contextmanager
def _disk_errors(final: Path) -> Iterator[None]:
    """Converts an OSError to a UserError with a remedy."""
    try:
        yield
    except OSError as error:
        advice = "check the disk and its permissions"
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            advice = "free some space on that disk or raise your quota"
        elif error.errno == errno.EFBIG:
            advice = "allow larger files there (ulimit -f)"
        raise UserError(
            f"The checkpoint {final} could not be written ({error.strerror}): {advice}. No part of it was "
            "kept; earlier checkpoints are intact."
        ) from error


def _safetensors(tensors: Mapping[str, Tensor]) -> Iterator[memoryview | bytes]:
    """The bytes of a safetensors file, with one tensor in memory at a time (the library needs all at once)."""
    order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in order:
        tensor = tensors[name]
        start, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": _DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for name in order:
        if tensors[name].numel():
            flat = tensors[name].detach().cpu().contiguous().reshape(-1)
            yield flat.view(torch.uint8).numpy().data


def _write(path: Path, parts: Iterable[memoryview | bytes]) -> dict[str, Any]:
    """Writes and syncs one file, and returns its entry in checksums.json."""
    digest, written = hashlib.sha256(), 0
    with open(path, "xb") as file:
        for part in parts:
            digest.update(part)
            written += file.write(part)
        file.flush()
        os.fsync(file.fileno())
    return {"bytes": written, "sha256": digest.hexdigest()}


def _check_sizes(path: Path) -> dict[str, str]:
    """The checksum of each file, if all have the length that checksums.json says."""
    try:
        files = load_json(path / CHECKSUMS, runs.CHECKSUMS_SHAPE)["files"]
        entries = {name: (files[name]["bytes"], files[name]["sha256"]) for name in FILES}
    except FileNotFoundError:
        raise Damaged(f"{CHECKSUMS} is missing") from None
    except ValueError as error:
        raise Damaged(f"{CHECKSUMS} cannot be read: {error}") from error
    for name, (length, _) in entries.items():
        if not (path / name).is_file():
            raise Damaged(f"{name} is missing")
        short = length - (path / name).stat().st_size
        if short:
            raise Damaged(f"{name} is {abs(short):,} bytes {'short' if short > 0 else 'too long'}")
    return {name: checksum for name, (_, checksum) in entries.items()}


def _verify(path: Path) -> None:
    try:
        for name, checksum in _check_sizes(path).items():
            with open(path / name, "rb") as file:
                if hashlib.file_digest(file, "sha256").hexdigest() != checksum:
                    raise Damaged(f"{name} does not match its checksum")
    except OSError as error:
        if error.errno in (errno.EIO, errno.ENOENT):
            raise Damaged(f"it cannot be read: {error.strerror}") from error
        raise UserError(  # permissions, memory, too many open files: the checkpoint may be intact
            f"{path} cannot be read ({error.strerror}): resolve this and run the same command again."
        ) from error


def _has_full_length(path: Path) -> bool:
    try:
        _check_sizes(path)
    except (Damaged, OSError):
        return False
    return True


def _rename_damaged(path: Path) -> None:
    """Keeps the damaged folder under another name: parts of it may be recoverable by hand."""
    aside, number = path.with_name(f"damaged-{path.name}"), 2
    while aside.exists():
        aside, number = path.with_name(f"damaged-{path.name}-{number}"), number + 1
    path.rename(aside)


def _sweep(folder: Path, name: str = "") -> None:
    """Removes what killed writers left (of one checkpoint). Only the process that holds the run's lock may do this."""
    for hidden in folder.glob(f".{name}.*" if name else ".*"):
        real = folder / hidden.name[1:].partition(".")[0]
        if hidden.name.startswith(f".{real.name}.old-") and not real.exists():
            hidden.rename(real)  # killed between the two renames of a replacement
        else:
            shutil.rmtree(hidden, ignore_errors=True)
