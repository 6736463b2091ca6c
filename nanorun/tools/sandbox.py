"""Runs Python programs that a model wrote, where they can do no harm.

Four walls, each of which stands without the others:

1. A machine of its own (`bubblewrap.py`): no network, no other processes, a file system that holds Python
   and nothing else, no environment, no terminal, nobody's user.
2. Few system calls (`seccomp.py`). Above all there is no second process: nothing to outlive the program,
   nothing to bomb with, and a limit on one process's memory is a limit on memory.
3. Limits that the kernel keeps (`sandbox_bootstrap.py`): memory, CPU time, threads, files.
4. A watch on the clock and on the output. When it is over, killing the first process of the namespace takes
   everything in it along.

`Sandbox.probe()` starts the sandbox, attacks it, and raises `SandboxUnavailable` unless it holds. There is
no weaker mode to fall back to.

Not covered: bugs of the kernel; what can be told from timing; the CPU that is used before a limit; kernel
memory behind empty files in /tmp (some 50 MB for each second that a program may run); what the output says. A
program shares its process with the tests that judge it, so one that sets out to fake its success can.
"""

import contextlib
import itertools
import json
import os
import platform
import random
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from nanorun.tools import seccomp
from nanorun.tools.bubblewrap import (
    NAMESPACES,
    SandboxUnavailable,
    file_system,
    find_bubblewrap,
    namespaces,
    python_path,
    users,
)

__all__ = ["Result", "Sandbox", "SandboxUnavailable"]

_ENVIRONMENT = {"HOME": "/tmp", "PATH": "/usr/bin", "LANG": "C.UTF-8", "MALLOC_ARENA_MAX": "1"}
_turn = itertools.count()

# Prints what it could do, so nothing when the walls hold.
_ATTACK = """
import os, socket, threading, time

def attempt(what, action):
    try:
        action()
    except (OSError, RuntimeError):
        return
    print(what, end="; ")

def write_in(folder):
    if os.statvfs(folder).f_flag & os.ST_RDONLY:
        raise OSError

def start_threads():
    threading.stack_size(32768)
    for _ in range(100):
        threading.Thread(target=time.sleep, args=(9,), daemon=True).start()

attempt("read a file outside", lambda: open(CANARY))
attempt("read /etc/passwd", lambda: open("/etc/passwd"))
attempt("see processes", lambda: os.listdir("/proc"))
attempt("write to the root", lambda: write_in("/"))
attempt("write to its own Python", lambda: write_in(os.path.dirname(os.__file__)))
attempt("open a socket", socket.socket)
attempt("start a process", os.fork)
attempt("start a hundred threads", start_threads)
"""


@dataclass(frozen=True)
class Result:
    ok: bool  # it ran to its end; leaving early is not that, not even with exit(0)
    stdout: str
    stderr: str
    reason: str  # finished, exit code 1, time limit (5 s), memory limit, output limit, killed by signal 11
    seconds: float


class Sandbox:
    """`Sandbox.probe()` makes one; `run` may be called from many threads at once."""

    def __init__(self, bwrap: str) -> None:
        """Unchecked: use `probe`."""
        self._users = users()
        self._filter = seccomp.filter_program(platform.machine())
        self._start = [bwrap, *self._users.options, *namespaces(), *file_system()]
        inside = Path(__file__).with_name("sandbox_bootstrap.py").read_text("utf-8")
        self._python = [python_path(), "-I", "-S", "-B", "-X", "utf8", "-c", inside]

    @classmethod
    def probe(cls) -> "Sandbox":
        """A sandbox that was attacked just now and held."""
        if sys.platform != "linux" or platform.machine() not in seccomp.MACHINES:
            here = f"{sys.platform} on {platform.machine()}"
            raise SandboxUnavailable(f"this is {here}", f"use Linux on {' or '.join(seccomp.MACHINES)}")
        sandbox = cls(find_bubblewrap())
        with tempfile.TemporaryDirectory() as folder:
            canary = Path(folder, "canary")
            canary.write_text("outside")
            result, status = sandbox._run(_ATTACK.replace("CANARY", repr(str(canary))), 10, 256, 10_000)
        if not result.ok:
            raise SandboxUnavailable(f"a first program ended with {result.reason}{_last_line(result.stderr)}")
        broken = result.stdout.rstrip("; ")
        for name in NAMESPACES:
            if status.get(f"{name}-namespace") in (None, os.stat(f"/proc/self/ns/{name}").st_ino):
                broken = broken or f"share our {name} namespace"
        if broken:
            raise SandboxUnavailable(f"a program in it could {broken}")
        if sandbox.run("bytearray(2**29)", timeout=10).reason != "memory limit":
            raise SandboxUnavailable("the limit on memory does not hold")
        if not sandbox.run("while True: pass", timeout=0.2).reason.startswith("time limit"):
            raise SandboxUnavailable("the limit on time does not hold")
        return sandbox

    def run(
        self, code: str, *, timeout: float = 5.0, memory_mib: int = 256, max_output: int = 10_000
    ) -> Result:
        """Runs a program to its end or to a limit: wall-clock seconds, memory, bytes of output in all."""
        return self._run(code, timeout, memory_mib, max_output)[0]

    def _run(
        self, code: str, timeout: float, memory_mib: int, max_output: int
    ) -> tuple[Result, dict[str, Any]]:
        """The result, and what bubblewrap says about the sandbox that it made."""
        start = time.monotonic()
        ended, starved = random.SystemRandom().sample(range(64, 128), 2)
        user = self._users.highest - next(_turn) % 10_000
        words = map(str, (user, memory_mib, ended, starved, timeout, *self._users.keep))
        with self._process(code, list(words)) as (process, status_pipe):
            output, stopped = _watch(process, status_pipe, start + timeout, max_output)
        stdout, stderr, said = (text.decode("utf-8", "replace") for text in output)
        status: dict[str, Any] = {}
        if stopped == "time":
            reason = f"time limit ({timeout:g} s)"
        elif stopped == "output":
            reason = "output limit"
        else:
            for line in said.splitlines():
                status |= json.loads(line)
            if "exit-code" not in status:
                raise SandboxUnavailable(f"bubblewrap could not start a program{_last_line(stderr)}")
            reason = _reason(status["exit-code"], ended, starved, timeout)
        return Result(reason == "finished", stdout, stderr, reason, time.monotonic() - start), status

    @contextlib.contextmanager
    def _process(self, code: str, words: list[str]) -> Iterator[tuple[subprocess.Popen[bytes], IO[bytes]]]:
        """A program on its way, and the pipe that bubblewrap reports on; killed and gone at the end."""
        status_read, status_write = os.pipe()
        with open(status_read, "rb", buffering=0) as status_pipe:
            with (
                open(status_write, "wb") as status,
                _memory_file(code.encode("utf-8", "surrogatepass")) as program,
                _memory_file(self._filter) as rules,
            ):
                fds = ["--seccomp", str(rules.fileno()), "--json-status-fd", str(status.fileno()), "--"]
                process = subprocess.Popen(
                    [*self._start, *fds, *self._python, *words],
                    stdin=program,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    pass_fds=(rules.fileno(), status.fileno(), *self._users.keep),
                    env=_ENVIRONMENT,
                    start_new_session=True,
                )
            with process:
                try:
                    yield process, status_pipe
                finally:
                    # The group: bubblewrap and the first process of the namespace. We have not waited for
                    # its leader yet, so even when all is over the number is nobody else's.
                    os.killpg(process.pid, signal.SIGKILL)


@contextlib.contextmanager
def _memory_file(content: bytes) -> Iterator[IO[bytes]]:
    """Something to read for a process that we start, without a name in any folder."""
    with open(os.memfd_create("nanorun"), "w+b") as file:
        file.write(content)
        file.seek(0)
        yield file


def _watch(
    process: subprocess.Popen[bytes], status_pipe: IO[bytes], deadline: float, max_output: int
) -> tuple[list[bytes], str | None]:
    """What came out of stdout, stderr and the status pipe until all were closed, or what stopped it."""
    assert process.stdout is not None
    assert process.stderr is not None
    pipes = [process.stdout, process.stderr, status_pipe]
    output: list[bytes] = [b"", b"", b""]
    room = max_output
    with selectors.DefaultSelector() as selector:
        for i, pipe in enumerate(pipes):
            selector.register(pipe, selectors.EVENT_READ, i)
        while selector.get_map():
            left = deadline - time.monotonic()
            if left <= 0:
                return output, "time"
            for key, _ in selector.select(left):
                piece = os.read(key.fd, 65_536)
                if not piece:
                    selector.unregister(key.fileobj)
                elif key.data == 2:
                    output[2] += piece
                else:
                    output[key.data] += piece[: max(room, 0)]
                    room -= len(piece)
            if room < 0:
                return output, "output"
    return output, None


def _reason(code: int, ended: int, starved: int, timeout: float) -> str:
    """bubblewrap exits like a shell: with the program's code, or 128 and the signal that killed it."""
    if code == ended:
        return "finished"
    if code == starved:
        return "memory limit"
    if code == 128 + signal.SIGXCPU:
        return f"time limit ({timeout:g} s)"
    if 128 < code <= 128 + 64:
        return f"killed by signal {code - 128}"
    return f"exit code {code}"


def _last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return f" ({lines[-1][:200]})" if lines else ""
