"""`make fuzz`: mutated inputs for every parser, each of which must be accepted or refused with one sentence.

    python tests/fuzz/fuzzer.py --count 40000                 every parser, a process each, one after the other
    python tests/fuzz/fuzzer.py --parser config --only 1234   that input again, with its traceback

Input number N of a parser depends on --seed and N alone. An input fails if it raises anything but a UserError (or what
its parser refuses inputs with), takes longer than TIME_LIMIT seconds, takes more memory than GROWTH_LIMIT, or ends the
process. Code that cannot be interrupted, such as that of a library, is killed from outside.
"""

import argparse
import json
import os
import random
import resource
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parents[2]), str(Path(__file__).resolve().parent)]

TIME_LIMIT = 5.0  # seconds of CPU time for one input
WATCH_LIMIT = 120.0  # seconds without progress, on a machine that may be busy
GROWTH_LIMIT = 300 << 20  # bytes of memory that one input may take
ADDRESS_LIMIT = 4 << 30  # bytes of address space beyond what the parsers need
MAX_FAILURES = 20  # different ones, of a parser


class TooSlow(BaseException):
    """Not an Exception, which a parser might catch."""


def fuzz(
    name: str, count: int, seed: int, folder: Path, progress: Any = None, first: int = 0
) -> dict[str, Any]:
    """Feeds inputs to a parser, in the folder, which becomes NANORUN_HOME. Returns the counts, and the failures."""
    from parsers import PARSERS

    from nanorun.errors import UserError

    os.environ["NANORUN_HOME"] = str(folder)
    parser = PARSERS[name](folder)
    refusals = (UserError, *parser.refusals)
    outcomes: Counter[str] = Counter()
    failures: dict[str, dict[str, Any]] = {}
    peak, slowest, start = 0, 0.0, time.perf_counter()
    handler = signal.signal(signal.SIGPROF, _too_slow)
    try:
        for number in range(first, first + count):
            if progress is not None:
                os.pwrite(progress, str(number).encode().ljust(20), 0)
            content = parser.make(random.Random(f"{seed} {name} {number}"))
            size, began, fault = _size_now(), time.process_time(), ""
            signal.setitimer(signal.ITIMER_PROF, TIME_LIMIT)
            try:
                parser.parse(content)
                outcomes["accepted"] += 1
            except refusals:
                outcomes["refused"] += 1
            except (KeyboardInterrupt, SystemExit):
                raise
            except BaseException as error:
                fault = _describe(error)
            finally:
                signal.setitimer(signal.ITIMER_PROF, 0)
            slowest = max(slowest, time.process_time() - began)
            peak = max(peak, _largest_size())
            if not fault and _largest_size() - size > GROWTH_LIMIT:
                fault = f"grew by {(_largest_size() - size) >> 20} MiB"
            if fault:
                outcomes["failed"] += 1
                failures.setdefault(fault, {"number": number, "content": repr(content)[:300]})
                if len(failures) >= MAX_FAILURES:
                    break
    finally:
        signal.signal(signal.SIGPROF, handler)
    seconds = time.perf_counter() - start
    return {
        "parser": name,
        "inputs": sum(outcomes.values()),
        **outcomes,
        "slowest_ms": round(1e3 * slowest),
        "peak_mib": peak >> 20,
        "seconds": round(seconds, 1),
        "failures": failures,
    }


def _too_slow(*_: object) -> None:
    raise TooSlow(f"more than {TIME_LIMIT:g} s")


def _size_now() -> int:
    """Bytes of memory of this process; the largest size is counted from here on (on Linux)."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    return _memory("VmRSS:")


def _largest_size() -> int:
    return _memory("VmHWM:")


def _memory(field: str) -> int:
    with suppress(OSError), open("/proc/self/status", encoding="ascii") as lines:
        return next((int(line.split()[1]) << 10 for line in lines if line.startswith(field)), 0)
    return 0


def _describe(error: BaseException) -> str:
    """Where it was raised: equal for equal faults."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [f for f in frames if "nanorun" in f.filename] or frames
    return f"{type(error).__name__} at {Path(ours[-1].filename).name}:{ours[-1].lineno}: {str(error)[:120]}"


def run_worker(name: str, count: int, seed: int, first: int, progress: str) -> None:
    import parsers  # noqa: F401 - its size is not part of the limit

    sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - what the parsers say, for the rest of the process
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + ADDRESS_LIMIT
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    handle = os.open(progress, os.O_WRONLY)
    with tempfile.TemporaryDirectory(dir=scratch()) as folder:
        print(json.dumps(fuzz(name, count, seed, Path(folder), handle, first)), flush=True)


def scratch() -> str | None:
    """In memory, where it can be: every input is written to a file, and some files are synced."""
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


def supervise(name: str, count: int, seed: int, first: int) -> dict[str, Any]:
    """Runs a worker, and kills it if it makes no progress."""
    with tempfile.NamedTemporaryFile() as progress, tempfile.TemporaryFile() as out:
        numbers = {"--count": count, "--seed": seed, "--first": first}
        arguments = [str(word) for pair in numbers.items() for word in pair]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "RUST_BACKTRACE": "0"}
        worker = subprocess.Popen(
            [sys.executable, __file__, "--worker", "--parser", name, *arguments, "--progress", progress.name],
            stdout=out,
            stderr=subprocess.DEVNULL,
            env=environment,
        )
        before, since = b"", time.monotonic()
        while worker.poll() is None:
            time.sleep(0.5)
            now = os.pread(progress.fileno(), 20, 0)
            if now != before:
                before, since = now, time.monotonic()
            elif now and time.monotonic() - since > WATCH_LIMIT:
                worker.kill()
        out.seek(0)
        lines = out.read().splitlines()
        if worker.returncode == 0 and lines:
            result: dict[str, Any] = json.loads(lines[-1])
            return result
        number = int(os.pread(progress.fileno(), 20, 0) or -1)
        fault = (
            "killed: it did not return"
            if worker.returncode == -signal.SIGKILL
            else f"exit {worker.returncode}"
        )
        return {
            "parser": name,
            "inputs": number - first + 1,
            "failed": 1,
            "failures": {fault: {"number": number}},
        }


def show_one(name: str, seed: int, number: int) -> None:
    from parsers import PARSERS

    with tempfile.TemporaryDirectory(dir=scratch()) as folder:
        os.environ["NANORUN_HOME"] = folder
        parser = PARSERS[name](Path(folder))
        content = parser.make(random.Random(f"{seed} {name} {number}"))
        print(repr(content)[:5000])
        parser.parse(content)


def main() -> None:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--count", type=int, default=40_000, help="inputs for each parser")
    options.add_argument("--parser", action="append", help="this one alone (may be repeated)")
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--first", type=int, default=0, help="the number of the first input")
    options.add_argument("--only", type=int, help="this input alone, in this process")
    options.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options.add_argument("--progress", help=argparse.SUPPRESS)
    chosen = options.parse_args()
    if chosen.worker:
        run_worker(chosen.parser[0], chosen.count, chosen.seed, chosen.first, chosen.progress)
        return
    if chosen.only is not None:
        show_one(chosen.parser[0], chosen.seed, chosen.only)
        return
    from parsers import PARSERS

    columns = ("inputs", "accepted", "refused", "failed", "slowest_ms", "peak_mib", "seconds")
    print(f"{'parser':12}" + "".join(f"{column:>12}" for column in columns), flush=True)
    results = []
    for name in chosen.parser or PARSERS:
        results.append(supervise(name, chosen.count, chosen.seed, chosen.first))
        print(f"{name:12}" + "".join(f"{results[-1].get(column, 0):>12,}" for column in columns), flush=True)
        for fault, about in results[-1]["failures"].items():
            print(f"    input {about['number']}: {fault}", flush=True)
    total = {column: sum(result.get(column, 0) for result in results) for column in columns[:4]}
    print(f"{'total':12}" + "".join(f"{total[column]:>12,}" for column in columns[:4]))
    print(json.dumps({"what": "fuzz", "seed": chosen.seed, **total, "parsers": results}))
    sys.exit(1 if total["failed"] else 0)


if __name__ == "__main__":
    main()
