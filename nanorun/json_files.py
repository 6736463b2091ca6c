"""The one reader of nanorun's JSON files: limits before parsing, types after it.

    size     from `stat`, before the file is opened
    depth    and the number of values, by counting brackets and commas outside of strings, before the text is parsed:
             a parser recurses once per level and makes an object of some 60 bytes per value, whatever the text's size
    types    against a shape, which looks like the file: {"files": [{"name": str, "bytes": int, "note?": (str, None)}]}

Whatever is wrong is a ValueError that says what (`load_json`, `parse_json`), or one sentence for the user that also
names the file and the remedy (`read_json`).

A shape is a type, None, a tuple of alternatives, [shape] for a list, or {name: shape} for an object. A name that ends
with "?" may be absent; names that are not mentioned are not checked. `float` accepts whole numbers, `int` and `float`
no booleans, and numbers must be finite and fit into 64 bits.
"""

import json
import math
import os
import stat
from collections.abc import Iterator, Mapping
from itertools import accumulate
from pathlib import Path
from typing import Any

from nanorun.errors import UserError

MAX_BYTES = 1 << 24
MAX_DEPTH = 64
MAX_VALUES = 1 << 22


class JsonError(ValueError):
    """Not JSON, or more than the limits allow."""

    def __init__(self, reason: str, line: int | None = None, column: int | None = None) -> None:
        super().__init__(reason if line is None else f"line {line}, column {column}: {reason}")
        self.reason, self.line = reason, line


Shape = Any  # type | None | tuple[Shape, ...] | list[Shape] | Mapping[str, Shape]

_NAMES: dict[type | None, str] = {
    int: "a whole number",
    float: "a number",
    str: "text",
    bool: "true or false",
    dict: "an object",
    list: "a list",
    None: "null",
}
_NOT_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
_CHUNK = 1 << 16
_STEPS = {byte: 1 if byte in b"[{" else -1 for byte in b"[]{}"}


def read_json(path: Path, remedy: str, shape: Shape = dict, *, max_bytes: int = MAX_BYTES) -> Any:
    """The content of a file. A file that cannot be read or is damaged is a UserError that ends with `remedy`."""
    try:
        return load_json(path, shape, max_bytes=max_bytes)
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}): {remedy}.") from error
    except ValueError as error:
        raise UserError(f"{path} is damaged ({error}): {remedy}.") from error


def load_json(path: Path, shape: Shape = dict, *, max_bytes: int = MAX_BYTES) -> Any:
    """The content of a file. ValueError if it is damaged, OSError if it cannot be read."""
    value = parse_json(read_limited(path, max_bytes))
    check_shape(value, shape)
    return value


def read_limited(path: Path, max_bytes: int) -> bytes:
    """The bytes of a regular file. ValueError if it has more than `max_bytes`."""
    about = os.stat(path)
    if not stat.S_ISREG(about.st_mode):
        raise ValueError("it is not a regular file")
    if about.st_size <= max_bytes:
        with open(path, "rb") as file:
            content = file.read(max_bytes + 1)
        if len(content) <= max_bytes:
            return content
    raise ValueError(f"it has {about.st_size:,} bytes, at most {max_bytes:,} are expected")


def read_lines(path: Path, max_bytes: int) -> Iterator[bytes]:
    """The lines of a file with their ends. A line of more than `max_bytes` is cut off there, without an end."""
    with open(path, "rb") as file:
        while line := file.readline(max_bytes):
            yield line
            while not line.endswith(b"\n") and (line := file.readline(max_bytes)):
                pass


def parse_json(content: bytes | str, *, max_depth: int = MAX_DEPTH, max_values: int = MAX_VALUES) -> Any:
    """The value of a JSON text, or JsonError."""
    content = content.encode("utf-8", "surrogatepass") if isinstance(content, str) else content
    _check_limits(content, max_depth, max_values)
    try:
        return json.loads(content.decode("utf-8"))
    except json.JSONDecodeError as error:
        raise JsonError("it is not valid JSON", error.lineno, error.colno) from error
    except UnicodeDecodeError as error:
        raise JsonError("it is not UTF-8") from error
    except ValueError as error:  # a number with too many digits
        raise JsonError(str(error)) from error


def _check_limits(content: bytes, max_depth: int, max_values: int) -> None:
    """In time and memory proportional to the length of the text; cheap for a text that cannot exceed the limits."""
    opened = content.count(b"[") + content.count(b"{")
    if opened <= max_depth and opened + content.count(b",") <= max_values:
        return
    content = content.replace(b"\\\\", b"").replace(b'\\"', b"")  # every quote left begins or ends a string
    depth, values, in_string = 0, 0, 0
    for start in range(0, len(content), _CHUNK):
        parts = content[start : start + _CHUNK].split(b'"')
        outside = b"".join(parts[in_string::2])
        in_string = (in_string + len(parts) - 1) % 2
        brackets = outside.translate(None, delete=_NOT_BRACKETS)
        values += outside.count(b"[") + outside.count(b"{") + outside.count(b",")
        if values > max_values:
            raise JsonError(f"it has more than {max_values:,} values")
        depths = list(accumulate(map(_STEPS.__getitem__, brackets), initial=depth))
        depth = depths[-1]
        if max(depths) > max_depth:
            raise JsonError(f"it is nested more than {max_depth} levels deep")


def check_shape(value: Any, shape: Shape, where: str = "") -> None:
    """ValueError unless the value has the shape."""
    if isinstance(shape, tuple):
        if not any(_has_kind(value, each) for each in shape):
            raise _mismatch(value, where, " or ".join(_name(each) for each in shape))
        shape = next(each for each in shape if _has_kind(value, each))
    if not _has_kind(value, shape):
        raise _mismatch(value, where, _name(shape))
    if isinstance(shape, Mapping):
        for key, inner in shape.items():
            name = key.removesuffix("?")
            if name in value:
                check_shape(value[name], inner, f"{where}.{name}" if where else name)
            elif name == key:
                raise ValueError(f"{where or 'it'} has no '{name}'")
    elif isinstance(shape, list):
        for index, each in enumerate(value):
            check_shape(each, shape[0], f"{where}[{index}]")


def has_type(value: Any, kind: type | None) -> bool:
    """Whether a value of a JSON file has this type."""
    if kind is None:
        return value is None
    if kind in (int, float):
        types = int if kind is int else (int, float)
        return isinstance(value, types) and not isinstance(value, bool) and _fits(value)
    return isinstance(value, kind)


def shown(value: Any) -> str:
    """The beginning of a value, as JSON."""
    text = json.dumps(value, default=str)
    return text if len(text) <= 60 else text[:57] + "..."


def type_name(kind: type | None) -> str:
    return _NAMES[kind]


def _fits(value: float) -> bool:
    return -(2**63) <= value < 2**63 if isinstance(value, int) else math.isfinite(value)


def _has_kind(value: Any, shape: Shape) -> bool:
    return has_type(value, _kind(shape))


def _kind(shape: Shape) -> type | None:
    if isinstance(shape, Mapping):
        return dict
    return list if isinstance(shape, list) else shape


def _name(shape: Shape) -> str:
    return _NAMES[_kind(shape)]


def _mismatch(value: Any, where: str, expected: str) -> ValueError:
    return ValueError(f"{where or 'it'} is {shown(value)}, not {expected}")
