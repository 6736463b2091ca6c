"""The first code inside the sandbox: drops the remaining privileges, sets limits, runs the program from stdin.

`sandbox.py` passes this file to `python -I -S -c`, so it imports nothing of nanorun. It sets limits here, inside
the user namespace, because a limit on processes (threads count) set outside would count the caller's other
processes.

A program that runs to its end makes the process exit with a random code drawn for this run, and one that runs out
of memory with another. So an early `exit()`, even `os._exit(0)`, does not look like success.
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
    user, memory_mib, finished_code, memory_code = map(int, sys.argv[1:5])
    seconds = float(sys.argv[5])
    program = sys.stdin.buffer.read()
    null = os.open("/dev/null", os.O_RDONLY)
    os.dup2(null, 0)
    for inherited in (null, *map(int, sys.argv[6:])):
        os.close(inherited)  # the program inherits only 0, 1 and 2
    if os.getuid() == 0:
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)  # dropping root drops the last capabilities
    set_limits(memory_mib, seconds)
    sys.argv[:] = ["program.py"]
    builtins.exit = builtins.quit = sys.exit  # type: ignore[assignment]  # as without -S
    run(program, finished_code, memory_code)


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


def run(program: bytes, finished_code: int, memory_code: int) -> None:
    main_module = types.ModuleType("__main__")
    sys.modules["__main__"] = main_module
    try:
        text = program.decode()
        linecache.cache["program.py"] = (len(text), None, text.splitlines(True), "program.py")
        exec(compile(text, "program.py", "exec"), main_module.__dict__)
    except MemoryError:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
        os._exit(memory_code)
    except Exception as error:
        here = error.__traceback__
        traceback.print_exception(error.with_traceback(here.tb_next if here else None))
        sys.exit(1)
    sys.exit(finished_code)


if __name__ == "__main__":
    main()
