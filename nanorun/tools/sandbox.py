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

`run` runs one program. That it finished is its own report, which a program can forge. `grade` runs a program and its
tests in two sandboxes, and only the tests report: a program that fails them cannot pass.

Not covered: kernel bugs; timing side channels; CPU time used before a limit; kernel memory for empty files in /tmp
(about 50 MB per second of run time); the content of the output (docs/threat-model.md).
"""

import contextlib
import itertools
import json
import os
import platform
import secrets
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any, Literal, NamedTuple

from nanorun.tools import bubblewrap, seccomp
from nanorun.tools.bubblewrap import SandboxUnavailable
from nanorun.tools.sandbox_bootstrap import FINISHED, OUT_OF_MEMORY

__all__ = ["Sandbox", "SandboxResult", "SandboxUnavailable"]

SECONDS, MEMORY_MIB, OUTPUT_BYTES = 5.0, 256, 10_000  # the default limits of a program

_ENVIRONMENT = {"HOME": "/tmp", "PATH": "/usr/bin", "LANG": "C.UTF-8", "MALLOC_ARENA_MAX": "1"}
_SECRET_BYTES = 32
_run_numbers = itertools.count()

# Prints what it could do; nothing if the sandbox holds.
_ATTACK = """
import os, resource, socket, threading, time

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
attempt("limit the first process", lambda: resource.prlimit(1, resource.RLIMIT_CPU))
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
    """Create it with `Sandbox.probe()`. `run` and `grade` are thread-safe."""

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
        self,
        code: str,
        *,
        timeout: float = SECONDS,
        memory_mib: int = MEMORY_MIB,
        max_output: int = OUTPUT_BYTES,
    ) -> SandboxResult:
        """Runs a program to its end or to a limit: wall-clock seconds, memory, total bytes of output."""
        limits = _Limits(timeout, memory_mib, max_output)
        with self._process(code, limits) as process:
            stopped = _watch([process], limits)
        return process.result(stopped, limits)

    def grade(
        self,
        program: str,
        tests: str,
        function: str,
        *,
        timeout: float = SECONDS,
        memory_mib: int = MEMORY_MIB,
        max_output: int = OUTPUT_BYTES,
    ) -> SandboxResult:
        """Runs the tests in one sandbox, where `function` calls that of the program in another one.

        Arguments and results are copied, and must be plain values: numbers, texts, and lists, tuples, sets, dicts and
        iterators of them. The result is that of the tests. Each of the two may use the whole `memory_mib`.
        """
        limits = _Limits(timeout, memory_mib, max_output)
        with _pipe() as (requests_read, requests_write), _pipe() as (answers_read, answers_write):
            serve = _Part("serve", function, requests_read, answers_write)
            call = _Part("tests", function, answers_read, requests_write)
            with (
                self._process(program, limits, serve) as graded,
                self._process(tests, limits, call) as grader,
            ):
                for pipe in (requests_read, requests_write, answers_read, answers_write):
                    pipe.close()  # here, so that each process notices when the other one ends
                stopped = _watch([grader, graded], limits)
        result = grader.result(stopped, limits)
        return replace(result, stdout=_text(graded.printed), stderr=_text(graded.stderr) + result.stderr)

    @contextlib.contextmanager
    def _process(self, code: str, limits: "_Limits", part: "_Part | None" = None) -> Iterator["_Process"]:
        """A running program, killed and reaped at the end; in `grade` with its part of the calls."""
        secret = secrets.token_hex(_SECRET_BYTES // 2).encode()
        user = self._user.highest_id - next(_run_numbers) % 10_000
        held = self._user.inherited_fds
        arguments = [str(user), str(limits.memory_mib), str(limits.seconds), ",".join(map(str, held))]
        channel: list[int] = []
        if part is not None:
            channel = [part.read.fileno(), part.write.fileno()]
            arguments += [part.role, part.function, *map(str, channel)]
        with (
            _pipe() as (status, status_write),
            _memory_file(secret + b"\n" + code.encode("utf-8", "surrogatepass")) as program,
            _memory_file(self._filter) as rules,
        ):
            options = ["--seccomp", str(rules.fileno()), "--json-status-fd", str(status_write.fileno()), "--"]
            process = subprocess.Popen(
                [*self._bubblewrap, *options, *self._python, *arguments],
                stdin=program,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                pass_fds=(rules.fileno(), status_write.fileno(), *held, *channel),
                env=_ENVIRONMENT,
                start_new_session=True,
            )
            status_write.close()
            with process:
                try:
                    yield _Process(process, status, secret)
                finally:
                    # The group: bubblewrap and the first process of the namespace. Its leader has not been
                    # waited for yet, so the id cannot belong to another process.
                    os.killpg(process.pid, signal.SIGKILL)


class _Part(NamedTuple):
    """What a process does in `grade`, and its pipes."""

    role: Literal["serve", "tests"]
    function: str
    read: IO[bytes]
    write: IO[bytes]


@dataclass(frozen=True)
class _Limits:
    seconds: float
    memory_mib: int
    output: int  # bytes
    start: float = field(default_factory=time.monotonic)


class _Process:
    """A sandboxed process: its pipes, and what was read from them."""

    def __init__(self, process: subprocess.Popen[bytes], status_pipe: IO[bytes], secret: bytes) -> None:
        assert process.stdout is not None
        assert process.stderr is not None
        self.pipes = {"stdout": process.stdout, "stderr": process.stderr, "status": status_pipe}
        self.stdout = self.stderr = self.status = b""
        self._secret = secret

    @property
    def printed(self) -> bytes:
        """stdout without the report of the end."""
        before, _, report = self.stdout.partition(self._secret)
        return before + report[1:]

    def result(self, stopped: str | None, limits: _Limits) -> SandboxResult:
        """`stopped` is the limit that was exceeded, if any."""
        status: dict[str, Any] = {}
        stdout = self.printed[: limits.output]
        stderr = self.stderr[: limits.output - len(stdout)]
        if len(self.printed + self.stderr) > limits.output:
            stopped = stopped or "output limit"
        if stopped is None:
            for line in self.status.decode().splitlines():
                status |= json.loads(line)
            if "exit-code" not in status:
                raise SandboxUnavailable(f"bubblewrap could not start a program{_last_line(_text(stderr))}")
            end = self.stdout.partition(self._secret)[2][:1]
            stopped = _how_it_ended(status["exit-code"], end, limits)
        seconds = time.monotonic() - limits.start
        return SandboxResult(stopped == "finished", _text(stdout), _text(stderr), stopped, seconds, status)


@contextlib.contextmanager
def _pipe() -> Iterator[tuple[IO[bytes], IO[bytes]]]:
    read, write = os.pipe()
    with open(read, "rb", buffering=0) as reader, open(write, "wb", buffering=0) as writer:
        yield reader, writer


@contextlib.contextmanager
def _memory_file(content: bytes) -> Iterator[IO[bytes]]:
    """An anonymous file for a child process to read."""
    with open(os.memfd_create("nanorun"), "w+b") as file:
        file.write(content)
        file.seek(0)
        yield file


def _watch(processes: Sequence[_Process], limits: _Limits) -> str | None:
    """Reads what the processes write until the first one has ended; returns the limit that stopped it, if any."""
    remaining = limits.output + _SECRET_BYTES + 1
    with selectors.DefaultSelector() as selector:
        for process in processes:
            for name, pipe in process.pipes.items():
                selector.register(pipe, selectors.EVENT_READ, (process, name))
        while any(key.data[0] is processes[0] for key in selector.get_map().values()):
            left = limits.start + limits.seconds - time.monotonic()
            if left <= 0:
                return _time_limit(limits)
            for key, _ in selector.select(left):
                process, name = key.data
                piece = os.read(key.fd, 65_536)
                if not piece:
                    selector.unregister(key.fileobj)
                    continue
                if name != "status":
                    remaining -= len(piece)
                    piece = piece[: max(len(piece) + min(remaining, 0), 0)]
                setattr(process, name, getattr(process, name) + piece)
            if remaining < 0:
                return "output limit"
    return None


def _how_it_ended(code: int, end: bytes, limits: _Limits) -> str:
    """bubblewrap exits like a shell: with the program's code, or 128 plus the signal that killed it."""
    if end == FINISHED and code == 0:
        return "finished"
    if end == OUT_OF_MEMORY:
        return "memory limit"
    if code == 128 + signal.SIGXCPU:
        return _time_limit(limits)
    if 128 < code <= 128 + 64:
        return f"killed by signal {code - 128}"
    return f"exit code {code}"


def _time_limit(limits: _Limits) -> str:
    return f"time limit ({limits.seconds:g} s)"


def _text(output: bytes) -> str:
    return output.decode("utf-8", "replace")


def _last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return f" ({lines[-1][:200]})" if lines else ""
