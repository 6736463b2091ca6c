"""What runs first inside the sandbox: gives up what is left to give up, then runs the program from stdin.

`sandbox.py` hands this file to `python -I -S -c`, so it uses nothing of nanorun. Limits are set here, behind
the user namespace, because a limit on processes (threads count) set in front of it would count whatever
else the caller runs.

A program that reaches its end makes the process exit with a code that was drawn for this run, and one that
ran out of memory with another. So `exit()` in the middle, even `os._exit(0)`, does not look like the end.
"""

import builtins
import contextlib
import linecache
import math
import os
import resource
import sys
import traceback
import types

THREADS = 32
OPEN_FILES = 64
FILE_BYTES = 16 * 2**20


def main() -> None:
    user, memory_mib, ended, starved = map(int, sys.argv[1:5])
    seconds = float(sys.argv[5])
    program = sys.stdin.buffer.read()
    nothing = os.open("/dev/null", os.O_RDONLY)
    os.dup2(nothing, 0)
    for inherited in (nothing, *map(int, sys.argv[6:])):
        os.close(inherited)  # the program finds 0, 1 and 2 open and nothing else
    if os.getuid() == 0:
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)  # and with root go the last capabilities
    limit(memory_mib, seconds)
    sys.argv[:] = ["program.py"]
    builtins.exit = builtins.quit = sys.exit  # type: ignore[assignment]  # as without -S
    run(program, ended, starved)


def limit(memory_mib: int, seconds: float) -> None:
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


def run(program: bytes, ended: int, starved: int) -> None:
    main_module = types.ModuleType("__main__")
    sys.modules["__main__"] = main_module
    try:
        text = program.decode()
        linecache.cache["program.py"] = (len(text), None, text.splitlines(True), "program.py")
        exec(compile(text, "program.py", "exec"), main_module.__dict__)
    except MemoryError:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
        os._exit(starved)
    except Exception as error:
        here = error.__traceback__
        traceback.print_exception(error.with_traceback(here.tb_next if here else None))
        sys.exit(1)
    sys.exit(ended)


if __name__ == "__main__":
    main()
