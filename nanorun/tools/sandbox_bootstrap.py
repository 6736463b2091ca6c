"""The first code inside the sandbox: drops the remaining privileges, sets limits, runs the program from stdin.

`sandbox.py` passes this file to `python -I -S -c`, so it imports nothing of nanorun. It sets limits here, inside
the user namespace, because a limit on processes (threads count) set outside would count the caller's other
processes.

A program has run to its end if a secret drawn for this run follows its output and it exits with 0. Exit codes alone
prove nothing: a program chooses its own, and Python exits with 120 when stdout cannot be flushed. But the program
shares its process with the secret, and one that searches its own memory can find it. Tests that grade a program
therefore run in a sandbox of their own (`tests`), and call the program's function in the other one (`serve`). A call
is one line of JSON there and one back. Only plain values pass, so no object of the program, such as one that equals
everything, reaches the tests.
"""

from __future__ import annotations

import builtins
import contextlib
import json
import linecache
import math
import os
import resource
import sys
import traceback
import types

TYPE_CHECKING = False  # importing typing takes 3 ms, a tenth of a short run
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import IO, Any

THREADS = 32
OPEN_FILES = 64
FILE_BYTES = 16 * 2**20
FINISHED, OUT_OF_MEMORY = b"f", b"m"  # how a program ended, after the secret

_KINDS: dict[str, Any] = {
    "list": list,
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
    "dict": dict,
    "bytes": bytes,
    "complex": lambda items: complex(*items),
    "range": lambda items: range(*items),
    "iterator": lambda items: iter(list(items)),
    "int": lambda items: int(next(items), 16),  # JSON's are limited in length
}


def main() -> None:
    user, memory_mib = map(int, sys.argv[1:3])
    seconds = float(sys.argv[3])
    inherited = [int(fd) for fd in sys.argv[4].split(",") if fd]
    role, function, *fds = sys.argv[5:] or ("run", "")
    secret, program = sys.stdin.buffer.read().split(b"\n", 1)
    null = os.open("/dev/null", os.O_RDONLY)
    os.dup2(null, 0)
    for fd in (null, *inherited):
        os.close(fd)  # the program inherits only 0, 1 and 2
    if os.getuid() == 0:
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)  # dropping root drops the last capabilities
    set_limits(memory_mib, seconds)
    sys.argv[:] = ["program.py"]
    sys.orig_argv[:] = sys.argv
    builtins.exit = builtins.quit = sys.exit  # type: ignore[assignment]  # as without -S
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module
    channel = [os.fdopen(int(fd), mode) for fd, mode in zip(fds, ("rb", "wb"), strict=False)]
    if role == "tests":
        setattr(module, function, remote_function(*channel))
    run(module, program, secret)
    if role == "serve":
        serve(getattr(module, function), *channel)
    else:
        report(secret + FINISHED)


def set_limits(memory_mib: int, seconds: float) -> None:
    cpu = math.ceil(seconds) + 1
    for what, soft, hard in (
        (resource.RLIMIT_AS, memory_mib * 2**20, memory_mib * 2**20),
        (resource.RLIMIT_CPU, cpu, cpu + 1),
        (resource.RLIMIT_NPROC, THREADS, THREADS),
        (resource.RLIMIT_NOFILE, OPEN_FILES, OPEN_FILES),
        (resource.RLIMIT_FSIZE, FILE_BYTES, FILE_BYTES),
        (resource.RLIMIT_CORE, 0, 0),
        (resource.RLIMIT_MSGQUEUE, 0, 0),
        (resource.RLIMIT_MEMLOCK, 0, 0),
    ):
        resource.setrlimit(what, (soft, hard))


def run(module: types.ModuleType, program: bytes, secret: bytes) -> None:
    """Runs the program; an error ends the process."""
    try:
        text = program.decode()
        linecache.cache["program.py"] = (len(text), None, text.splitlines(True), "program.py")
        exec(compile(text, "program.py", "exec"), module.__dict__)
    except MemoryError:
        report(secret + OUT_OF_MEMORY)
        os._exit(1)
    except Exception as error:
        here = error.__traceback__
        traceback.print_exception(error.with_traceback(here.tb_next if here else None))
        sys.exit(1)


def report(end: bytes) -> None:
    with contextlib.suppress(Exception):  # the program has closed or replaced its output
        sys.stdout.flush()
    with contextlib.suppress(OSError):
        os.write(1, end)


def serve(function: Callable[..., object], requests: IO[bytes], answers: IO[bytes]) -> None:
    """Answers calls until the tests have ended."""
    for line in requests:
        try:
            arguments, named = decode(json.loads(line))
            answer = ["value", encode(function(*arguments, **named))]
        except Exception as error:
            answer = [type(error).__name__, str(error)[:1000]]
        answers.write(json.dumps(answer).encode() + b"\n")
        answers.flush()


def remote_function(answers: IO[bytes], requests: IO[bytes]) -> Callable[..., object]:
    """The function that `serve` answers for. Its exceptions are raised here, if they are built-in ones."""

    def call(*arguments: object, **named: object) -> object:
        requests.write(json.dumps(encode((arguments, named))).encode() + b"\n")
        requests.flush()
        line = answers.readline()
        if not line:
            raise EOFError("the program has ended")
        what, value = json.loads(line)
        if what == "value":
            return decode(value)
        error = getattr(builtins, what, None)
        if isinstance(error, type) and issubclass(error, Exception):
            raise error(value)
        raise RuntimeError(f"{what}: {value}")

    return call


def encode(value: Any) -> object:
    """A value as JSON: a number, a text, or [KIND, ITEM...]. Objects of other types are refused."""
    if value is None or isinstance(value, bool | float | str):
        return value
    if isinstance(value, int):
        return int(value) if abs(value) < 2**63 else ["int", f"{value:x}"]
    if isinstance(value, complex):
        return ["complex", value.real, value.imag]
    if isinstance(value, range):
        return ["range", value.start, value.stop, value.step]
    kinds = (name for name, kind in _KINDS.items() if isinstance(kind, type) and isinstance(value, kind))
    name = next(kinds, "iterator" if hasattr(value, "__next__") else None)
    if name is None:
        raise TypeError(f"a {type(value).__name__} cannot be passed between the program and its tests")
    return [name, *map(encode, value.items() if name == "dict" else value)]


def decode(value: Any) -> Any:
    if not isinstance(value, list):
        return value
    kind, *items = value
    return _KINDS[kind](map(decode, items))


if __name__ == "__main__":
    main()
