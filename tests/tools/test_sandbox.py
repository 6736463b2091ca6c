"""Attacks on the sandbox from inside, as a program of a model would make them, with the expected result."""

import contextlib
import os
import platform
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from nanorun.tools.calls import ToolError, python_tool
from nanorun.tools.sandbox import Sandbox, SandboxResult, SandboxUnavailable

REPOSITORY = Path(__file__).resolve().parents[2]

# `refused` prints a word for each action: "refused" when it raises as it should or the system call does not
# exist (error 38), and else what it did. A call that fails for another reason was not refused.
PRELUDE = f"""
import ctypes, os, platform, socket, sys
libc = ctypes.CDLL(None, use_errno=True)
OUTSIDE, REPOSITORY = {os.getpid()}, {str(REPOSITORY)!r}

def refused(*actions):
    for action in actions:
        ctypes.set_errno(0)
        try:
            value = action()
        except (OSError, RuntimeError):
            print("refused")
        else:
            print("refused" if (value, ctypes.get_errno()) == (-1, 38) else f"DID {{value!r}}")

def call(x86, arm, *args):
    return lambda: libc.syscall(x86 if platform.machine() == "x86_64" else arm, *args)
"""


@pytest.fixture(scope="module")
def sandbox() -> Sandbox:
    if shutil.which("bwrap") is None:
        pytest.skip("bubblewrap is not installed (apt install bubblewrap), so no program can be run here")
    try:
        return Sandbox.probe()
    except SandboxUnavailable as error:
        pytest.skip(str(error))


def processes_that_mention(word: str) -> list[str]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if word.encode() in path.read_bytes():
                found.append(path.parent.name)
    return found


# -- what may run, runs ------------------------------------------------------------------------------


def test_a_program_returns_its_output(sandbox: Sandbox) -> None:
    result = sandbox.run("import sys\nprint('six', 6 * 7)\nprint('oh', file=sys.stderr)")
    assert result == SandboxResult(True, "six 42\n", "oh\n", "finished", result.seconds)
    assert 0 < result.seconds < 5


def test_ordinary_python_works(sandbox: Sandbox) -> None:
    result = sandbox.run("""
import asyncio, collections, concurrent.futures, dataclasses, decimal, json, math, pathlib, pickle, random, re
import shutil, signal, sqlite3, statistics, tempfile, threading, time, unittest, zoneinfo

@dataclasses.dataclass
class Point:
    x: int

async def main():
    return await asyncio.gather(*(asyncio.sleep(0.001, i) for i in range(3)))

assert asyncio.run(main()) == [0, 1, 2]
assert pickle.loads(pickle.dumps(Point(3))) == Point(3)
with concurrent.futures.ThreadPoolExecutor(4) as pool:
    assert list(pool.map(math.sqrt, [1, 4])) == [1, 2]
folder = pathlib.Path(tempfile.mkdtemp())
(folder / "a").write_text("text")
shutil.copytree(folder, folder.with_name("copy"))
shutil.rmtree(folder)
assert sqlite3.connect(":memory:").execute("select 6*7").fetchone() == (42,)
signal.signal(signal.SIGALRM, lambda *_: print("alarm"))
signal.setitimer(signal.ITIMER_REAL, 0.01)
time.sleep(0.05)
""")
    assert (result.reason, result.stdout, result.stderr) == ("finished", "alarm\n", "")


def test_an_error_shows_only_the_frames_of_the_program(sandbox: Sandbox) -> None:
    result = sandbox.run("def half(n):\n    return n / 0\n\nhalf(3)")
    assert (result.ok, result.reason) == (False, "exit code 1")
    assert "return n / 0" in result.stderr
    assert result.stderr.endswith("ZeroDivisionError: division by zero\n")
    assert result.stderr.count("File ") == 2


@pytest.mark.parametrize("code", ["exit(0)", "quit()", "import sys; sys.exit()", "import os; os._exit(0)"])
def test_an_early_exit_is_not_success(sandbox: Sandbox, code: str) -> None:
    result = sandbox.run(code + "\nassert False")
    assert (result.ok, result.reason) == (False, "exit code 0")


def test_no_exit_code_is_success(sandbox: Sandbox) -> None:
    """Python's own are among them: 120, when stdout cannot be flushed."""
    programs = [f"import os; os._exit({code})" for code in range(256)]
    programs.append("import os; print('x'); os.close(1); os.dup2(os.open('/dev/full', 1), 1)\nassert False")
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda program: sandbox.run(program, timeout=60), programs))
    assert [result.reason for result in results if result.ok] == []
    assert [result.reason for result in results[:129]] == [f"exit code {code}" for code in range(129)]
    assert results[-1].reason == "exit code 120"


def test_a_program_cannot_read_how_its_success_is_reported(sandbox: Sandbox) -> None:
    result = sandbox.run(
        "import os, sys\nfor word in sys.orig_argv:\n"
        "    if word.isdecimal() and 0 < int(word) < 256: os._exit(int(word))\nassert False"
    )
    assert (result.ok, result.reason) == (False, "exit code 1")


@pytest.mark.parametrize("code", ["1 +", "\0", "\udc80", "(" * 500, "# coding: nonsense\n1 +", "-" * 99_999])
def test_invalid_source_fails_with_an_error(sandbox: Sandbox, code: str) -> None:
    assert sandbox.run(code).reason in ("exit code 1", "memory limit", "killed by signal 11")


def test_many_programs_run_at_once(sandbox: Sandbox) -> None:
    with ThreadPoolExecutor(16) as pool:
        results = list(pool.map(lambda i: sandbox.run(f"print({i} * 2)", timeout=60), range(64)))
    assert [int(result.stdout) for result in results] == [i * 2 for i in range(64)]
    assert all(result.ok for result in results)


def test_no_file_descriptor_is_left_behind(sandbox: Sandbox) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for code in ("1", "1/0", "print('x' * 99_999)"):
        sandbox.run(code)
    assert len(os.listdir("/proc/self/fd")) == before


# -- attacks that run into a limit -------------------------------------------------------------------


@pytest.mark.parametrize(
    "code",
    [
        pytest.param("while True: pass", id="endless loop"),
        pytest.param("import time; time.sleep(999)", id="sleep"),
        pytest.param("9**9**9", id="a power in one C call"),
        pytest.param("import re; re.match(r'(a+)+$', 'a' * 64 + 'b')", id="catastrophic regex"),
        pytest.param(
            "import signal, time\n"
            "for s in set(signal.Signals) - {9, 19}: signal.signal(s, signal.SIG_IGN)\n"
            "signal.pthread_sigmask(signal.SIG_BLOCK, signal.Signals)\n"
            "while True: time.sleep(1)",
            id="ignoring every signal",
        ),
        pytest.param(
            "import threading\ndef spin():\n    while True: pass\nthreading.Thread(target=spin).start()",
            id="a thread that outlives the program",
        ),
        pytest.param("import atexit\ndef spin():\n    while True: pass\natexit.register(spin)", id="atexit"),
        pytest.param("import os\nos.close(1); os.close(2)\nwhile True: pass", id="closing its output"),
        pytest.param(
            "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass",
            id="fork bomb that insists",
        ),
        pytest.param(
            "import socket\na, b = socket.socketpair()\nb.recv(1)", id="waiting for what never comes"
        ),
        pytest.param("import signal, os\nos.kill(os.getpid(), signal.SIGSTOP)", id="stopping itself"),
    ],
)
def test_time_is_limited(sandbox: Sandbox, code: str) -> None:
    result = sandbox.run(code, timeout=0.4)
    assert (result.ok, result.reason) == (False, "time limit (0.4 s)")
    assert result.seconds < 3


DEFLATE_BOMB = """
import zlib
packer = zlib.compressobj(9, zlib.DEFLATED, -15)
piece = packer.compress(bytes(2**20)) + packer.flush(zlib.Z_FULL_FLUSH)
zlib.decompressobj(-15).decompress(piece * 1024)
"""


@pytest.mark.parametrize(
    "code",
    [
        pytest.param("held = []\nwhile True: held.append(bytearray(2**20))", id="growing list"),
        pytest.param("bytearray(2**40)", id="one huge block"),
        pytest.param("'a'.ljust(10**9)", id="ljust"),
        pytest.param("f'{1:>1000000000}'", id="format width"),
        pytest.param("[0] * 10**9", id="long list"),
        pytest.param(DEFLATE_BOMB, id="decompression bomb"),
    ],
)
def test_memory_is_limited(sandbox: Sandbox, code: str) -> None:
    result = sandbox.run(code, timeout=20)
    assert (result.ok, result.reason) == (False, "memory limit")


def test_the_memory_limit_can_be_raised_by_the_caller(sandbox: Sandbox) -> None:
    code = "print(len(bytearray(300 * 2**20)))"
    assert sandbox.run(code).reason == "memory limit"
    assert sandbox.run(code, memory_mib=512).ok


@pytest.mark.parametrize(
    "code",
    [
        pytest.param("print('x' * 10**8)", id="huge line"),
        pytest.param("while True: print('y')", id="endless lines"),
        pytest.param("import sys\nwhile True: sys.stderr.write('z')", id="endless stderr"),
        pytest.param("import os\nwhile True: os.write(1, b'\\xff' * 4096)", id="endless bytes"),
    ],
)
def test_output_is_limited(sandbox: Sandbox, code: str) -> None:
    result = sandbox.run(code, timeout=20, max_output=5_000)
    assert (result.ok, result.reason) == (False, "output limit")
    assert len(result.stdout) + len(result.stderr) == 5_000


def test_output_of_exactly_the_limit_is_kept(sandbox: Sandbox) -> None:
    assert sandbox.run("print('x' * 99)", max_output=100).stdout == "x" * 99 + "\n"
    assert sandbox.run("print('x' * 100)", max_output=100).reason == "output limit"


@pytest.mark.parametrize(
    ("code", "number"),
    [
        pytest.param("import ctypes; ctypes.string_at(0)", signal.SIGSEGV, id="null pointer"),
        pytest.param(
            "import faulthandler; faulthandler._stack_overflow()", signal.SIGSEGV, id="stack overflow"
        ),
        pytest.param("import os; os.abort()", signal.SIGABRT, id="abort"),
        pytest.param("import os; os.kill(os.getpid(), 9)", signal.SIGKILL, id="killing itself"),
    ],
)
def test_a_crash_reports_its_signal(sandbox: Sandbox, code: str, number: int) -> None:
    result = sandbox.run(code)
    assert (result.ok, result.reason) == (False, f"killed by signal {int(number)}")


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the 32-bit calls are those of x86")
def test_system_calls_in_32_bit_numbers_kill_the_program(sandbox: Sandbox) -> None:
    result = sandbox.run(
        PRELUDE + "import mmap\n"
        "page = mmap.mmap(-1, 4096, prot=7)\n"
        "page.write(bytes.fromhex('b802000000cd80c3'))  # mov eax, 2 (fork); int 0x80; ret\n"
        "print(ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(page)))())"
    )
    assert (result.ok, result.stdout) == (False, "")
    assert result.reason in ("killed by signal 31", "killed by signal 11")  # 11: a kernel without them


def test_disk_is_limited(sandbox: Sandbox) -> None:
    result = sandbox.run("""
import os
for i in range(100):
    try:
        with open(f"/tmp/{i}", "wb", buffering=0) as file:
            while file.write(bytes(2**20)): pass
    except OSError: pass
print(sum(os.stat(f"/tmp/{name}").st_blocks * 512 for name in os.listdir("/tmp")))
os.truncate("/tmp/0", 10**12)
""")
    assert 0 < int(result.stdout) <= 16 * 2**20
    assert result.reason == "exit code 1"
    assert "File too large" in result.stderr


def test_threads_are_limited(sandbox: Sandbox) -> None:
    result = sandbox.run("""
import threading, time
threading.stack_size(32768)
for started in range(1000):
    try: threading.Thread(target=time.sleep, args=(0.2,)).start()
    except RuntimeError: break
print(started)
""")
    assert (result.ok, int(result.stdout) <= 32) == (True, True)


def test_open_files_are_limited(sandbox: Sandbox) -> None:
    result = sandbox.run("held = []\nwhile True: held.append(open('/dev/null'))")
    assert result.reason == "exit code 1"
    assert "Too many open files" in result.stderr


def test_limits_cannot_be_raised(sandbox: Sandbox) -> None:
    result = sandbox.run("""
import resource
for what in (resource.RLIMIT_AS, resource.RLIMIT_NPROC, resource.RLIMIT_NOFILE, resource.RLIMIT_CPU):
    try: resource.setrlimit(what, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    except (ValueError, OSError): continue
    print("raised", what)
""")
    assert (result.stdout, result.reason) == ("", "finished")


# -- attacks that are refused ------------------------------------------------------------------------

REFUSED = {
    "fork": "refused(os.fork, os.forkpty, lambda: os.posix_spawn(sys.executable, ['x'], {}), libc.vfork)",
    "subprocess": """
import multiprocessing, subprocess
refused(lambda: subprocess.run([sys.executable]), lambda: os.popen("true"), lambda: os.execv("/bin/sh", ["sh"]),
        lambda: multiprocessing.Process(target=print).start())
assert os.system("true") == libc.system(b"true") == 127 << 8  # no shell could be started""",
    "clone as a process": """
refused(call(56, 220, 17, 0, 0, 0, 0), call(435, 435, ctypes.create_string_buffer(88), 88))""",
    "daemon": """
def daemon():
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            while True: pass
refused(daemon)""",
    "network": """
refused(socket.socket, lambda: socket.create_connection(("1.1.1.1", 53), 1),
        lambda: socket.socket(socket.AF_INET, socket.SOCK_RAW), lambda: socket.socket(socket.AF_PACKET),
        lambda: socket.socket(socket.AF_NETLINK), lambda: socket.socket(40))  # 40: AF_VSOCK""",
    "names": "refused(lambda: socket.getaddrinfo('example.com', 80), lambda: socket.if_nameindex())",
    "files of the machine": """
refused(*(lambda p=p: open(p).read() for p in ("/etc/shadow", "/etc/passwd", "/etc/hostname", "/root/.bashrc",
        "/root/.ssh/id_rsa", "/var/log/dpkg.log", "/run/secrets", "/tmp/../etc/passwd", "//etc//passwd")))""",
    "the repository and homes": """
refused(*(lambda p=p: os.listdir(p) for p in (REPOSITORY, "/home", "/work", "/var", "/opt", "/mnt", "/srv")))
refused(lambda: open(REPOSITORY + "/pyproject.toml"))""",
    "proc and sys": """
refused(*(lambda p=p: open(p).read() for p in ("/proc/1/environ", "/proc/self/environ", "/proc/version",
        f"/proc/{OUTSIDE}/environ", "/proc/sysrq-trigger", "/sys/kernel/notes")))
refused(lambda: os.listdir("/proc"), lambda: os.listdir("/sys"))""",
    "links out": """
os.symlink("/etc/passwd", "soft"); os.symlink("../../../root", "up")
refused(lambda: open("soft"), lambda: os.listdir("up/.ssh"), lambda: os.link(os.__file__, "hard"),
        lambda: os.rename(os.__file__, "moved"))""",
    "writing outside /tmp": """
refused(*(lambda p=p: open(p, "w") for p in ("/new", "/usr/new", "/usr/lib/new", "/etc/new", "/dev/new",
        "/dev/shm/new", "/lib/new", os.path.dirname(os.__file__) + "/new")))
refused(lambda: open(os.__file__, "a"), lambda: os.unlink(os.__file__), lambda: os.chmod("/usr/lib", 0o777),
        lambda: os.mkdir("/new"), lambda: os.chmod("/", 0o777))""",
    "devices": """
refused(*(lambda p=p: open(p, "rb") for p in ("/dev/mem", "/dev/kmsg", "/dev/sda", "/dev/vda", "/dev/nvme0n1",
        "/dev/kvm", "/dev/fuse", "/dev/nvidia0", "/dev/tty", "/dev/ptmx", "/dev/console", "/dev/pts/0")))
refused(lambda: os.mknod("sda", 0o60666, os.makedev(8, 0)), lambda: os.mkfifo("fifo"))""",
    "typing into the terminal": """
import fcntl, termios
refused(*(lambda fd=fd: fcntl.ioctl(fd, termios.TIOCSTI, b"x") for fd in (0, 1, 2)))
refused(lambda: fcntl.ioctl(0, 0x541C, b"x"), os.openpty, lambda: os.open("/dev/tty", os.O_RDWR))""",
    "mounts": """
refused(lambda: libc.mount(b"tmpfs", b"/tmp", b"tmpfs", 0, None), lambda: libc.umount2(b"/tmp", 2),
        lambda: libc.mount(b"none", b"/", None, 32 | 4096, None), lambda: libc.pivot_root(b"/tmp", b"/tmp"),
        call(428, 428, -100, b"/", 1), call(430, 430, b"ext4", 0), call(155, 41, b"/tmp", b"/tmp"))""",
    "namespaces": """
refused(*(lambda f=f: libc.unshare(f) for f in (0x10000000, 0x20000, 0x20000000, 0x40000000, 0)),
        lambda: libc.setns(0, 0), call(56, 220, 0x10000000 | 17, 0, 0, 0, 0))""",
    "chroot": """
os.mkdir("jail")
refused(lambda: os.chroot("jail"), lambda: libc.chroot(b"/tmp"))""",
    "other processes' memory": """
refused(*(lambda r=r: libc.ptrace(r, 1, 0, 0) for r in (0, 16, 0x4206)),
        lambda: libc.process_vm_readv(1, None, 0, None, 0, 0), call(434, 434, 1, 0), call(438, 438, 3, 0, 0))""",
    "keys": "refused(call(248, 217, b'user', b'k', b'v', 1, -3), call(250, 219, 0, -3, 1), call(249, 218, 0, 0, 0))",
    "kernel interfaces": """
refused(call(321, 280, 0, 0, 0), call(298, 241, 0, 0, -1, -1, 0), call(425, 425, 8, 0), call(323, 282, 0),
        call(175, 105, 0, 0, b""), call(246, 104, 0, 0, 0, 0), call(169, 142, 0, 0, 0, 0), call(103, 116, 3, 0, 0),
        call(157, 167, 4, 1, 0, 0, 0), call(135, 92, 0), call(304, 265, 0, 0, 0), call(170, 161, b"x", 1))""",
    "memory that no limit counts": """
refused(lambda: os.memfd_create("x"), call(29, 194, 0, 2**30, 0o600), call(68, 186, 0, 0o600),
        call(240, 180, b"/q", 0o102, 0o600, 0), call(149, 228, 0, 4096),
        lambda: os.setxattr("/tmp", "user.a", b"b"))""",
    "x32 numbers": "refused(call(0x40000000 + 57, 2**20), call(0x40000000 + 41, 2**20, 1, 1, 0))",
    "limits of other processes": """
import resource
refused(*(lambda p=p: resource.prlimit(p, resource.RLIMIT_CPU, (1, 1)) for p in (1, os.getppid(), OUTSIDE)))""",
    "becoming root": """
refused(*(lambda i=i: os.setresuid(i, i, i) for i in (0, 1000, os.getuid() - 1)), lambda: os.setresgid(0, 0, 0),
        lambda: os.setgroups([0]), lambda: os.setuid(0), lambda: os.chown("/tmp", 0, 0))""",
    "signals to processes outside": """
refused(lambda: os.kill(-1, 9), lambda: os.kill(OUTSIDE, 9), lambda: os.kill(OUTSIDE, 0),
        lambda: os.killpg(OUTSIDE, 9))""",
    "import tricks": """
refused(lambda: __import__("os").fork(), lambda: eval("__import__('socket').socket()"),
        lambda: ().__class__.__base__.__subclasses__() and exec("import pty; pty.fork()"))""",
}


@pytest.mark.parametrize("attack", REFUSED)
def test_an_attack_fails(sandbox: Sandbox, attack: str) -> None:
    result = sandbox.run(PRELUDE + REFUSED[attack])
    assert (result.reason, result.stderr) == ("finished", "")
    assert set(result.stdout.splitlines()) == {"refused"}


def test_the_first_process_cannot_be_killed_from_inside(sandbox: Sandbox) -> None:
    code = "import os\nfor s in (9, 15, 19, 11):\n    try: os.kill(1, s)\n    except PermissionError: pass\nprint('on')"
    assert sandbox.run(code).stdout == "on\n"


def test_setuid_programs_grant_no_privileges(sandbox: Sandbox) -> None:
    result = sandbox.run(
        "import os\nfor path in ('/usr/lib', '/tmp', os.path.dirname(os.__file__)):\n"
        "    assert os.statvfs(path).f_flag & os.ST_NOSUID, path"
    )
    assert (result.reason, result.stderr) == ("finished", "")


def test_a_local_server_is_unreachable(sandbox: Sandbox) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket(socket.AF_UNIX) as abstract:
        abstract.bind(f"\0nanorun-{os.getpid()}")
        abstract.listen()
        result = sandbox.run(
            PRELUDE
            + f"refused(lambda: socket.create_connection(('127.0.0.1', {server.getsockname()[1]}), 1))\n"
            f"refused(lambda: socket.socket(socket.AF_UNIX).connect('\\0nanorun-{os.getpid()}'))\n"
            "a, b = socket.socketpair()\n"
            f"refused(lambda: a.connect('\\0nanorun-{os.getpid()}'))"
        )
        assert (result.reason, result.stdout) == ("finished", "refused\n" * 3)
        for listening in (server, abstract):
            listening.setblocking(False)
            with pytest.raises(BlockingIOError):
                listening.accept()


def test_environment_files_and_descriptors_of_the_caller_are_hidden(
    sandbox: Sandbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NANORUN_SECRET", "hunter2")
    secret = tmp_path / "secret"
    secret.write_text("hunter2")
    with secret.open() as held:
        os.set_inheritable(held.fileno(), True)
        result = sandbox.run(
            PRELUDE + f"print(sorted(os.environ), os.path.exists({str(secret)!r}), os.listdir('/tmp'))\n"
            "def is_open(fd):\n    try: return bool(os.fstat(fd))\n    except OSError: return False\n"
            "print([fd for fd in range(20000) if is_open(fd)], repr(sys.stdin.read()))"
        )
    names = ["HOME", "LANG", "MALLOC_ARENA_MAX", "PATH", "PWD"]
    assert result.stdout == f"{names} False []\n[0, 1, 2] ''\n"


def test_programs_share_no_state(sandbox: Sandbox) -> None:
    assert sandbox.run("open('/tmp/left', 'w').write('x')").ok
    assert sandbox.run("import os; print(os.listdir('/tmp'))").stdout == "[]\n"


def test_a_program_cannot_pretend_that_the_sandbox_failed(sandbox: Sandbox) -> None:
    result = sandbox.run("import os\nos.write(2, b'bwrap: no permission\\n')\nos._exit(1)")
    assert result.reason == "exit code 1"


def test_no_process_survives_a_limit(sandbox: Sandbox) -> None:
    assert sandbox.run("while True: pass", timeout=0.4321).reason == "time limit (0.4321 s)"
    within(2, lambda: not processes_that_mention("0.4321"))


def test_the_program_dies_with_the_process_that_started_it(sandbox: Sandbox) -> None:
    code = (
        "from nanorun.tools.sandbox import Sandbox\nSandbox.probe().run('while True: pass', timeout=98.765)"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], cwd=REPOSITORY)
    within(20, lambda: bool(processes_that_mention("98.765")))
    parent.kill()
    parent.wait()
    within(5, lambda: not processes_that_mention("98.765"))


# -- programs graded by tests in another sandbox -------------------------------------------------------

TESTS = "assert add(2, 3) == 5\nassert add('a', b='b') == 'ab'\nassert add([1], [2]) == [1, 2]"
FIND_SECRET = """
import gc, os, re, sys
frame, found = sys._getframe(), set()
while frame:
    found |= {value for value in frame.f_locals.values() if isinstance(value, bytes)}
    frame = frame.f_back
found |= {each for each in gc.get_objects() if isinstance(each, bytes)}
secrets = {each for each in found if re.fullmatch(b"[0-9a-f]{32}", each)}
"""
FAKES = {
    "nothing": "",
    "wrong": "def add(a, b): return a - b",
    "exit": "import os\nos._exit(0)",
    "exit in a call": "import os\ndef add(a, b): os._exit(0)",
    "exit at exit": "import atexit, os\natexit.register(os._exit, 0)\ndef add(a, b): raise SystemExit(0)",
    "equal to everything": """
class Any:
    def __eq__(self, other): return True
def add(a, b): return Any()""",
    "equal to everything, as a subclass": """
class Text(str):
    def __eq__(self, other): return True
    __hash__ = str.__hash__
class Number(int):
    def __eq__(self, other): return True
    __hash__ = int.__hash__
def add(a, b): return Number(0) if isinstance(a, int) else Text()""",
    "comparisons replaced": """
import builtins, sys
builtins.AssertionError = type("Quiet", (Exception,), {})
for module in list(sys.modules.values()):
    vars(module).update(check=print, assert_equal=print) if module else None
def add(a, b):
    frame = sys._getframe()
    while frame:
        frame.f_globals["add"] = lambda *a, **b: 5
        frame = frame.f_back""",
    "the report, found in memory": FIND_SECRET
    + """
for secret in secrets: os.write(1, secret + b"f")
os._exit(0)""",
    "the report, to every descriptor": FIND_SECRET
    + """
for fd in range(64):
    for secret in secrets | {b""}:
        try: os.write(fd, secret + b"f")
        except OSError: pass
os._exit(0)""",
    "answers to every descriptor": """
import os
for fd in range(64):
    for text in (b'["value", true]\\n', b'finished\\n', b'["SystemExit", 0]\\n', b'["value", ["set"]]\\n'):
        try: os.write(fd, text)
        except OSError: pass
while True: pass""",
    "an endless answer": """
import os
def add(a, b):
    for fd in range(3, 64):
        try:
            while True: os.write(fd, b"[" * 65536)
        except OSError: pass""",
    "closing every descriptor": "import os\nos.closerange(0, 64)\ndef add(a, b): return a + b",
    "killing the parent": """
import os, signal
for pid in (1, os.getppid(), -1, 0):
    for number in (signal.SIGTERM, signal.SIGKILL):
        try: os.kill(pid, number)
        except OSError: pass""",
    "ptrace and proc": """
import ctypes, os
libc = ctypes.CDLL(None)
for pid in range(1, 100):
    assert libc.ptrace(16, pid, 0, 0) == -1
    for name in ("mem", "fd", "environ", "maps"):
        assert not os.path.exists(f"/proc/{pid}/{name}")
def add(a, b): return None""",
    "another process that outlives it": """
import ctypes, os
for start in (os.fork, os.forkpty, ctypes.CDLL(None).vfork):
    try:
        if start() >= 0: print("a second process")
    except OSError: pass
def add(a, b): return None""",
    "another program in its place": """
import os, sys
os.execv(sys.executable, [sys.executable, "-c", "print('finished')"])""",
}


@pytest.mark.parametrize("fake", FAKES)
def test_a_program_cannot_fake_that_it_passes_its_tests(sandbox: Sandbox, fake: str) -> None:
    result = sandbox.grade(FAKES[fake], TESTS, "add", timeout=2)
    assert not result.ok
    assert "a second process" not in result.stdout


@pytest.mark.parametrize(
    ("program", "tests"),
    [
        ("def add(a, b): return a + b", TESTS),
        ("print('loading')\nadd = lambda a, b: a + b", TESTS),
        ("def add(*values): return values", "assert add(1, (2.5, None, True)) == (1, (2.5, None, True))"),
        (
            "def same(value): return value",
            "for value in (2**99, -1.5, float('inf'), 1j, {1: 'a', (2,): [b'x', {3}]}, frozenset('ab'), range(3)):\n"
            "    assert same(value) == value and type(same(value)) is type(value)\n"
            "assert same(True) is True and same('\\ud800é') == '\\ud800é'",
        ),
        ("def even(n): return (i for i in range(n) if i % 2 == 0)", "assert list(even(5)) == [0, 2, 4]"),
        (
            "def fail(n): raise ValueError(n)",
            "try: fail('no')\nexcept ValueError as e: assert str(e) == 'no'\nelse: assert False",
        ),
        ("def n(): return 1", "def helper(): return n()\nassert helper() == 1"),
    ],
)
def test_a_program_that_passes_its_tests_is_ok(sandbox: Sandbox, program: str, tests: str) -> None:
    function = program.split("def ")[-1].split("(")[0] if "def " in program else "add"
    result = sandbox.grade(program, tests, function)
    assert (result.reason, result.stderr) == ("finished", "")


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ("def f(): return 2", "exit code 1"),
        ("1 +", "exit code 1"),
        ("def f(): return bytearray(2**40)", "memory limit"),
        ("def f():\n    while True: pass", "time limit (0.5 s)"),
        ("def f(): print('x' * 20_000)", "output limit"),
    ],
)
def test_failed_tests_report_why(sandbox: Sandbox, program: str, reason: str) -> None:
    result = sandbox.grade(program, "assert f() == 1", "f", timeout=0.5)
    assert (result.ok, result.reason) == (False, reason)


def test_the_python_tool_returns_what_a_program_prints(sandbox: Sandbox) -> None:
    assert python_tool(sandbox)("print(6 * 7)") == "42"
    assert python_tool(sandbox)("print(1)\nexit()") == "1"


@pytest.mark.parametrize(
    ("code", "timeout", "error"),
    [
        ("1/0", 9, "ZeroDivisionError: division by zero"),
        ("exit(3)", 9, "exit code 3"),
        ("while True: pass", 0.3, "time limit (0.3 s)"),
    ],
)
def test_the_python_tool_reports_failures(sandbox: Sandbox, code: str, timeout: float, error: str) -> None:
    with pytest.raises(ToolError) as raised:
        python_tool(sandbox, timeout=timeout)(code)
    assert str(raised.value) == error


# -- the sandbox refuses to be weaker ----------------------------------------------------------------


def test_missing_bubblewrap_is_reported_with_the_install_command(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SandboxUnavailable, match="bubblewrap is not installed"):
        Sandbox.probe()


@pytest.mark.parametrize(
    ("option", "change", "problem"),
    [
        pytest.param("--unshare-net", "continue", "share our net namespace", id="network"),
        pytest.param("--unshare-ipc", "continue", "share our ipc namespace", id="shared memory"),
        pytest.param("--remount-ro", "args+=(--proc /proc)", "see processes", id="proc"),
        pytest.param("/etc/ld.so.cache", "a=/etc/passwd", "read /etc/passwd", id="files"),
        pytest.param("--remount-ro", "a=--chdir", "write to the root", id="read-only"),
        pytest.param("--seccomp", "a=--sync-fd", "open a socket; start a process", id="system calls"),
    ],
)
def test_a_sandbox_with_a_hole_is_not_used(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, option: str, change: str, problem: str
) -> None:
    """A bubblewrap that changes one option, as the wrapper of some system might."""
    weak = tmp_path / "bwrap"
    weak.write_text(
        f'#!/bin/bash\nargs=()\nfor a in "$@"; do case "$a" in {option}) {change};; esac; args+=("$a"); done\n'
        f'exec {shutil.which("bwrap")} "${{args[@]}}"\n'
    )
    weak.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(SandboxUnavailable) as raised:
        Sandbox.probe()
    assert problem in raised.value.problem


@pytest.mark.skipif(os.geteuid() != 0, reason="the other tests run as an ordinary user already")
def test_the_sandbox_works_for_an_unprivileged_user(sandbox: Sandbox) -> None:
    check = "import os, sys; os.stat(sys._base_executable); assert sys.version_info >= (3, 11)"
    program = (
        "import resource\ntry: resource.prlimit(1, resource.RLIMIT_CPU, (1, 1))\nexcept OSError: print(6 * 7)"
    )
    use = f"from nanorun.tools.sandbox import Sandbox; print(Sandbox.probe().run({program!r}).stdout)"

    def as_nobody(code: str) -> subprocess.CompletedProcess[str]:
        become = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "--"]
        command = [*become, "/usr/bin/python3", "-c", code]
        return subprocess.run(command, capture_output=True, text=True, cwd=REPOSITORY, check=False)

    if as_nobody(f"{check}; import nanorun").returncode:
        pytest.skip("nobody has no /usr/bin/python3 of 3.11 here, or may not read this folder")
    done = as_nobody(use)
    assert (done.stdout, done.stderr) == ("42\n\n", "")


def within(seconds: float, condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)
