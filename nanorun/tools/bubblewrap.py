"""The command line of bubblewrap: the file system, namespaces and user of a sandboxed program.

The file system holds one Python, the libraries it loads and five harmless devices, all read-only, and an empty
/tmp of limited size. There is no home, no /etc, no /proc. Paths are the same as outside, because Python and its
libraries contain absolute paths.

The user is nobody. Started by an ordinary user, the program is user 65534 of a new user namespace, which maps to
that user outside, with fewer rights. Started by root, it would map to root, whom the kernel exempts from the limit
on threads. Root therefore opens one user namespace that maps all ids, and every program gets its own id in it
(`sandbox_bootstrap.py` switches to it).
"""

import functools
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from nanorun.errors import UserError

NAMESPACES = ("pid", "net", "ipc", "uts", "cgroup")
TMP_BYTES = 16 * 2**20
_DEVICES = ("null", "zero", "full", "random", "urandom")
_MIN_VERSION = (0, 7)  # the first that limits the size of /tmp
_NOBODY = 65_534
_OPEN_USER_NAMESPACE = (
    "import ctypes, os; new = ctypes.CDLL(None, use_errno=True).unshare(0x10000000); "
    "print(os.strerror(ctypes.get_errno()) if new else 'open', flush=True); input()"
)
_ALLOW_NAMESPACES = (
    "allow user namespaces (sysctl user.max_user_namespaces=10000; on Ubuntu also "
    "kernel.apparmor_restrict_unprivileged_userns=0; in a container a seccomp profile that permits unshare)"
)


class SandboxUnavailable(UserError):
    """Programs cannot run safely on this machine: the problem, and the remedy."""

    def __init__(self, problem: str, advice: str = _ALLOW_NAMESPACES) -> None:
        super().__init__(f"A program that a model wrote cannot be run safely here: {problem}; {advice}.")
        self.problem, self.advice = problem, advice


@dataclass(frozen=True)
class SandboxUser:
    options: list[str]
    inherited_fds: tuple[int, ...]  # that bubblewrap must inherit
    highest_id: int  # of programs started by root; each takes the next lower one


def find_bubblewrap() -> str:
    path = shutil.which("bwrap")
    if path is None:
        raise SandboxUnavailable("bubblewrap is not installed", "apt install bubblewrap")
    output = subprocess.run([path, "--version"], capture_output=True, text=True, check=False).stdout
    version = re.search(r"(\d+)\.(\d+)", output)
    if version is None or (int(version[1]), int(version[2])) < _MIN_VERSION:
        raise SandboxUnavailable(
            f"{path} is {output.strip() or 'of unknown version'}", "install bubblewrap 0.7 or newer"
        )
    return path


def python_path() -> str:
    """The base interpreter, outside any virtual environment."""
    return os.path.realpath(getattr(sys, "_base_executable", sys.executable))


def isolation_options() -> list[str]:
    """Opens the namespaces, and builds the file system from an empty root to the final read-only state."""
    prefix = os.path.realpath(sys.base_prefix)
    wanted = [python_path(), "/etc/ld.so.cache"]
    wanted += [f"{root}/{lib}" for root in ("", "/usr", prefix) for lib in ("lib", "lib64")]
    present = [Path(path) for path in dict.fromkeys(wanted) if os.path.exists(path)]
    folders = {parent for path in present for parent in path.parents} | {Path("/dev")}
    options = [*(f"--unshare-{name}" for name in NAMESPACES), "--die-with-parent", "--new-session"]
    options += ["--perms", "1777", "--size", str(TMP_BYTES), "--tmpfs", "/tmp", "--chdir", "/tmp"]
    for folder in sorted(folders - {Path("/"), Path("/tmp")}):
        if not folder.is_symlink():
            options += ["--perms", "0755", "--dir", str(folder)]
    for path in present:
        if path.is_symlink():
            options += ["--symlink", os.readlink(path), str(path)]
        else:
            options += ["--ro-bind", str(path), str(path)]
    for device in _DEVICES:
        options += ["--dev-bind", f"/dev/{device}", f"/dev/{device}"]
    return [*options, "--remount-ro", "/"]


@functools.cache
def sandbox_user() -> SandboxUser:
    """Cached: a user namespace exists as long as a process holds it open."""
    ids = [_read_map(kind) for kind in ("uid", "gid")]
    highest = min(max(first + count for first, count in rows) for rows in ids) - 2
    if os.geteuid() != 0 or highest < _NOBODY // 2:  # or root of a namespace with hardly any other id
        return SandboxUser(["--unshare-user", "--uid", str(_NOBODY), "--gid", str(_NOBODY)], (), _NOBODY)
    held = _open_user_namespace(ids)
    options = f"--userns {held} --cap-drop ALL --cap-add CAP_SETUID --cap-add CAP_SETGID".split()
    return SandboxUser(options, (held,), min(highest, 2**31 - 2))


def _read_map(kind: str) -> list[tuple[int, int]]:
    """The ids that exist here, as ranges (first, count)."""
    lines = Path(f"/proc/self/{kind}_map").read_text().splitlines()
    return [(int(first), int(count)) for first, _, count in map(str.split, lines)]


def _open_user_namespace(ids: list[list[tuple[int, int]]]) -> int:
    """Only a single-threaded process can open one, so a helper does, and this process keeps its descriptor."""
    command = [python_path(), "-I", "-S", "-c", _OPEN_USER_NAMESPACE]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as helper:
        try:
            assert helper.stdout is not None
            status = helper.stdout.readline().strip()
            if status != "open":
                raise SandboxUnavailable(f"root cannot open a user namespace ({status or 'no answer'})")
            for kind, rows in zip(("uid", "gid"), ids, strict=True):
                lines = "".join(f"{first} {first} {count}\n" for first, count in rows)
                Path(f"/proc/{helper.pid}/{kind}_map").write_text(lines)
            return os.open(f"/proc/{helper.pid}/ns/user", os.O_RDONLY)
        except OSError as error:
            raise SandboxUnavailable(f"root cannot set up a user namespace ({error})") from error
        finally:
            helper.kill()
