"""Run Python programs that a model wrote, isolated from the machine.

Four layers of defense, each independent of the others:

1. Namespaces (`bubblewrap.py`): no network, no other processes, a file system with Python and nothing else, no
   environment, no terminal, an unprivileged user.
2. A system call filter (`seccomp.py`). Above all it allows no second process: nothing outlives the program, there
   is no fork bomb, and a limit on one process's memory is a limit on memory.
3. Resource limits that the kernel enforces (`sandbox_bootstrap.py`): memory, CPU time, threads, files.
4. A limit on wall-clock time and output. At the end, killing the first process of the PID namespace kills
   everything in it.

`Sandbox.probe()` starts the sandbox, attacks it, and raises `SandboxUnavailable` unless it holds. There is no
weaker fallback.

Not covered: kernel bugs; timing side channels; CPU time used before a limit; kernel memory for empty files in /tmp
(about 50 MB per second of run time); the content of the output. A program shares its process with the tests that
grade it, so a program that deliberately fakes success can.
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
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from nanorun.tools import bubblewrap, seccomp
from nanorun.tools.bubblewrap import SandboxUnavailable

__all__ = ["Sandbox", "SandboxResult", "SandboxUnavailable"]

_ENVIRONMENT = {"HOME": "/tmp", "PATH": "/usr/bin", "LANG": "C.UTF-8", "MALLOC_ARENA_MAX": "1"}
_run_numbers = itertools.count()

# Prints what it could do; nothing if the sandbox holds.
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
class SandboxResult:
    ok: bool  # it ran to its end; an early exit is not ok, not even exit(0)
    stdout: str
    stderr: str
    reason: str  # finished, exit code 1, time limit (5 s), memory limit, output limit, killed by signal 11
    seconds: float
    status: dict[str, Any] = field(default_factory=dict, compare=False)  # bubblewrap's; empty if stopped


class Sandbox:
    """Create it with `Sandbox.probe()`. `run` is thread-safe."""

    def __init__(self, bwrap: str) -> None:
        """Unchecked: use `probe`."""
        self._user = bubblewrap.sandbox_user()
        self._filter = seccomp.filter_program(platform.machine())
        self._bubblewrap = [bwrap, *self._user.options, *bubblewrap.isolation_options()]
        bootstrap = Path(__file__).with_name("sandbox_bootstrap.py").read_text("utf-8")
        self._python = [bubblewrap.python_path(), "-I", "-S", "-B", "-X", "utf8", "-c", bootstrap]

    @classmethod
    def probe(cls) -> "Sandbox":
        """A sandbox that has just been attacked and held."""
        if sys.platform != "linux" or platform.machine() not in seccomp.MACHINES:
            system = f"{sys.platform} on {platform.machine()}"
            raise SandboxUnavailable(f"this is {system}", f"use Linux on {' or '.join(seccomp.MACHINES)}")
        sandbox = cls(bubblewrap.find_bubblewrap())
        with tempfile.TemporaryDirectory() as folder:
            canary = Path(folder, "canary")
            canary.write_text("outside")
            result = sandbox.run(_ATTACK.replace("CANARY", repr(str(canary))), timeout=10)
        if not result.ok:
            raise SandboxUnavailable(f"a first program ended with {result.reason}{_last_line(result.stderr)}")
        breach = result.stdout.rstrip("; ")
        for name in bubblewrap.NAMESPACES:
            if result.status.get(f"{name}-namespace") in (None, os.stat(f"/proc/self/ns/{name}").st_ino):
                breach = breach or f"share our {name} namespace"
        if breach:
            raise SandboxUnavailable(f"a program in it could {breach}")
        if sandbox.run("bytearray(2**29)", timeout=10).reason != "memory limit":
            raise SandboxUnavailable("the limit on memory does not hold")
        if not sandbox.run("while True: pass", timeout=0.2).reason.startswith("time limit"):
            raise SandboxUnavailable("the limit on time does not hold")
        return sandbox

    def run(
        self, code: str, *, timeout: float = 5.0, memory_mib: int = 256, max_output: int = 10_000
    ) -> SandboxResult:
        """Runs a program to its end or to a limit: wall-clock seconds, memory, total bytes of output."""
        start = time.monotonic()
        finished_code, memory_code = random.SystemRandom().sample(range(64, 128), 2)
        user = self._user.highest_id - next(_run_numbers) % 10_000
        arguments = (user, memory_mib, finished_code, memory_code, timeout, *self._user.inherited_fds)
        with self._process(code, [str(argument) for argument in arguments]) as (process, status_pipe):
            output, stopped = _watch(process, status_pipe, start + timeout, max_output)
        stdout, stderr, status_lines = (text.decode("utf-8", "replace") for text in output)
        status: dict[str, Any] = {}
        if stopped == "time":
            reason = f"time limit ({timeout:g} s)"
        elif stopped == "output":
            reason = "output limit"
        else:
            for line in status_lines.splitlines():
                status |= json.loads(line)
            if "exit-code" not in status:
                raise SandboxUnavailable(f"bubblewrap could not start a program{_last_line(stderr)}")
            reason = _reason(status["exit-code"], finished_code, memory_code, timeout)
        seconds = time.monotonic() - start
        return SandboxResult(reason == "finished", stdout, stderr, reason, seconds, status)

    @contextlib.contextmanager
    def _process(
        self, code: str, arguments: list[str]
    ) -> Iterator[tuple[subprocess.Popen[bytes], IO[bytes]]]:
        """A running program, and the pipe with bubblewrap's status; killed and reaped at the end."""
        status_read, status_write = os.pipe()
        with open(status_read, "rb", buffering=0) as status_pipe:
            with (
                open(status_write, "wb") as status,
                _memory_file(code.encode("utf-8", "surrogatepass")) as program,
                _memory_file(self._filter) as rules,
            ):
                fds = ["--seccomp", str(rules.fileno()), "--json-status-fd", str(status.fileno()), "--"]
                process = subprocess.Popen(
                    [*self._bubblewrap, *fds, *self._python, *arguments],
                    stdin=program,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    pass_fds=(rules.fileno(), status.fileno(), *self._user.inherited_fds),
                    env=_ENVIRONMENT,
                    start_new_session=True,
                )
            with process:
                try:
                    yield process, status_pipe
                finally:
                    # The group: bubblewrap and the first process of the namespace. Its leader has not been
                    # waited for yet, so the id cannot belong to another process.
                    os.killpg(process.pid, signal.SIGKILL)


@contextlib.contextmanager
def _memory_file(content: bytes) -> Iterator[IO[bytes]]:
    """An anonymous file for a child process to read."""
    with open(os.memfd_create("nanorun"), "w+b") as file:
        file.write(content)
        file.seek(0)
        yield file


def _watch(
    process: subprocess.Popen[bytes], status_pipe: IO[bytes], deadline: float, max_output: int
) -> tuple[list[bytes], str | None]:
    """The bytes of stdout, stderr and the status pipe until all are closed, and the limit that stopped it, if any."""
    assert process.stdout is not None
    assert process.stderr is not None
    pipes = [process.stdout, process.stderr, status_pipe]
    output: list[bytes] = [b"", b"", b""]
    remaining = max_output
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
                    output[key.data] += piece[: max(remaining, 0)]
                    remaining -= len(piece)
            if remaining < 0:
                return output, "output"
    return output, None


def _reason(code: int, finished_code: int, memory_code: int, timeout: float) -> str:
    """bubblewrap exits like a shell: with the program's code, or 128 plus the signal that killed it."""
    if code == finished_code:
        return "finished"
    if code == memory_code:
        return "memory limit"
    if code == 128 + signal.SIGXCPU:
        return f"time limit ({timeout:g} s)"
    if 128 < code <= 128 + 64:
        return f"killed by signal {code - 128}"
    return f"exit code {code}"


def _last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return f" ({lines[-1][:200]})" if lines else ""
