"""Minutes of abuse against a real server: `python benchmarks/abuse.py --minutes 10 [--model RUN]`.

The server and its engine run on one core. On the other, a second process does all that a hostile client can think of,
at the same time: requests with hundreds of thousands of invalid values, and such as are just within the limits; more
idle connections than the server accepts; headers and bodies that arrive byte by byte; streams that are abandoned, not
read, or read a byte per second; thousands of logprobs; broken HTTP, long headers, tiny chunks, pipelines, bodies of ten
megabytes; bursts of connections.

Meanwhile two honest clients ask one question after the other, one for streams and one for whole answers, and /health is
polled twenty times a second, each time on a new connection. Reports the latency of /health, the memory of the server
and its engine over time, the honest answers, and the size of the log. Prints one JSON line last; --save writes it.
"""

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
POLL_S = 0.05
IDLE, SLOW_HEADERS, SLOW_BODIES, STREAMS, BURST = 1200, 100, 60, 4, 300  # connections of each kind
HI = b'{"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1, '


def many(value: bytes, before: bytes, after: bytes, count: int = 10**9) -> bytes:
    """A body of two megabytes, unless `count` values take fewer."""
    return before + b",".join([value] * min(count, 1_990_000 // (len(value) + 1))) + after


def hostile_bodies() -> Iterator[tuple[str, bytes]]:
    messages, parts = b'{"messages": [', b'{"max_tokens": 1, "messages": [{"role": "user", "content": ['
    for count in (10**9, 16_000):  # beyond the limit of values, and within
        yield TEXT, many(b"-1", b'{"prompt": [', b"]}", count)
        yield TEXT, many(b"1", b'{"prompt": [', b"]}", count)
        yield TEXT, many(b"[1]", b'{"prompt": [', b"]}", count)
        yield CHAT, many(b"{}", messages, b"]}", count)
        yield CHAT, many(b'{"role": "user", "content": ""}', messages, b"]}", count)
        yield CHAT, many(b"{}", parts, b"]}]}", count)
        yield CHAT, many(b'{"type": "text", "text": ""}', parts, b"]}]}", count)
        yield CHAT, many(b"[]", HI + b'"metadata": [', b"]}", count)
    for count in (150_000, 1_000):
        names = b",".join(b'"%x": 1' % number for number in range(count))
        yield CHAT, HI + names + b"}"
        yield CHAT, HI + b'"logit_bias": {' + names + b"}}"
    yield CHAT, HI + b'"metadata": ' + b"[" * 900_000 + b"]" * 900_000 + b"}"
    yield CHAT, HI + b'"seed": ' + b"9" * 1_900_000 + b"}"
    yield CHAT, many(b"9" * 4300, HI + b'"metadata": [', b"]}")
    yield TEXT, b'{"prompt": "' + b"x" * 1_990_000 + b'"}'
    yield TEXT, b'{"prompt": "' + b'{\\"a\\": [1, 2]},' * 110_000 + b'"}'
    yield TEXT, b'{"prompt": "' + b"\\ud800" * 300_000 + b'"}'
    yield TEXT, b'{"prompt": "' + b"x" * 10_000_000 + b'"}'
    turns = [{"role": ("user", "assistant")[at % 2], "content": f"number {at}"} for at in range(4095)]
    yield CHAT, json.dumps({"messages": turns, "truncation": "auto", "max_tokens": 4}).encode()
    for body in (b"", b"{", b"null", b"[]", b"\xff\xfe", b"[" * 50_000, b'{"prompt": "x", "n": 1e400}'):
        yield TEXT, body


def broken_requests() -> Iterator[bytes]:
    yield random.Random(0).randbytes(300_000)
    yield b"\r\n" * 100_000
    yield head("GET", "/health") + b"x: " + b"y" * 1_000_000 + b"\r\n\r\n"
    yield head("GET", "/health") + b"x: y\r\n" * 40_000 + b"\r\n"
    yield head("GET", "/" + "%41" * 100_000) + b"\r\n"
    yield head("GET", "/health") + b"Upgrade: websocket\r\nConnection: upgrade\r\n\r\n"
    yield (head("GET", "/page.css") + b"\r\n") * 1_000
    yield head("POST", CHAT) + b"Transfer-Encoding: chunked\r\n\r\n" + b"1\r\nx\r\n" * 100_000 + b"0\r\n\r\n"
    yield head("POST", CHAT) + b"Transfer-Encoding: chunked\r\n\r\nnot a number\r\n"
    yield head("POST", CHAT) + b"Content-Length: -1\r\n\r\n"


def head(method: str, path: str) -> bytes:
    return f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n".encode()


def post(path: str, body: bytes) -> bytes:
    return head("POST", path) + f"Connection: close\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


def completion(number: int, tokens: int, **more: Any) -> bytes:
    fields = {"prompt": f"{number}: Once upon a time there was", "max_tokens": tokens, **more}
    return post(TEXT, json.dumps(fields).encode())


@contextlib.asynccontextmanager
async def connected(port: int, **options: Any) -> Any:
    reader, writer = await asyncio.open_connection("127.0.0.1", port, **options)
    try:
        yield reader, writer
    finally:
        writer.transport.abort()


async def until_closed(reader: asyncio.StreamReader) -> None:
    with contextlib.suppress(OSError):
        await reader.read()


class Abusers:
    """The hostile process."""

    def __init__(self, port: int) -> None:
        self.port, self.seen, self.dice = port, Counter[str](), random.Random(0)
        self.numbers = itertools.count()

    async def run(self, seconds: float) -> None:
        kinds: list[tuple[int, Callable[[], Coroutine[Any, Any, None]]]] = [
            (1, self.send_bodies),
            (1, self.send_broken_requests),
            (IDLE, self.stay_idle),
            (SLOW_HEADERS, self.send_headers_slowly),
            (SLOW_BODIES, self.send_a_body_slowly),
            (STREAMS, self.abandon_a_stream),
            (STREAMS, self.leave_logprobs_unread),
            (STREAMS, self.read_slowly),
            (1, self.ask_for_logprobs),
            (1, self.open_a_burst),
        ]
        tasks = [asyncio.create_task(self._repeat(kind)) for count, kind in kinds for _ in range(count)]
        await asyncio.sleep(seconds)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _repeat(self, kind: Callable[[], Coroutine[Any, Any, None]]) -> None:
        await asyncio.sleep(3 * self.dice.random())
        while True:
            with contextlib.suppress(OSError):
                await kind()
            self.seen[kind.__name__.replace("_", " ")] += 1
            await asyncio.sleep(1 + 2 * self.dice.random())

    async def send(self, request: bytes, patience: float = 30) -> None:
        """Counts the response by its status."""
        async with connected(self.port) as (reader, writer):
            with contextlib.suppress(OSError, TimeoutError):
                async with asyncio.timeout(patience):
                    writer.write(request)
                    line = await reader.readline()
                    self.seen[f"status {line.split()[1].decode() if line else 'none'}"] += 1
                    while await reader.read(65536):
                        pass

    async def send_bodies(self) -> None:
        for path, body in hostile_bodies():
            await self.send(post(path, body))
            await asyncio.sleep(0.1)

    async def send_broken_requests(self) -> None:
        for request in broken_requests():
            await self.send(request, patience=2)
            await asyncio.sleep(0.1)

    async def stay_idle(self) -> None:
        async with connected(self.port) as (reader, _):
            await until_closed(reader)

    async def send_headers_slowly(self) -> None:
        async with connected(self.port) as (reader, writer):
            closed = asyncio.create_task(until_closed(reader))
            for letter in itertools.chain(head("GET", "/health"), itertools.repeat(ord("x"))):
                writer.write(bytes([letter]))
                await asyncio.sleep(1)
                if closed.done():
                    return

    async def send_a_body_slowly(self) -> None:
        async with connected(self.port) as (reader, writer):
            closed = asyncio.create_task(until_closed(reader))
            writer.write(head("POST", CHAT) + b"Content-Length: 1900000\r\n\r\n" + b"x" * 1_500_000)
            while not closed.done():
                writer.write(b"x" * 100)
                await asyncio.sleep(1)

    async def abandon_a_stream(self) -> None:
        async with connected(self.port) as (reader, writer):
            writer.write(completion(next(self.numbers), 128, stream=True))
            await reader.read(4096)

    async def leave_logprobs_unread(self) -> None:
        async with connected(self.port, limit=1024) as (reader, writer):
            writer.write(completion(next(self.numbers), 400, stream=True, n=2, logprobs=20))
            await reader.read(1)
            await asyncio.sleep(20)

    async def read_slowly(self) -> None:
        async with connected(self.port, limit=1024) as (reader, writer):
            writer.write(completion(next(self.numbers), 64, stream=True))
            for _ in range(20):
                await reader.read(1)
                await asyncio.sleep(1)

    async def ask_for_logprobs(self) -> None:
        await self.send(completion(next(self.numbers), 400, n=4, logprobs=20))

    async def open_a_burst(self) -> None:
        async with contextlib.AsyncExitStack() as stack:
            await asyncio.gather(
                *(stack.enter_async_context(connected(self.port)) for _ in range(BURST)),
                return_exceptions=True,
            )
            await asyncio.sleep(1)


class Observer:
    """The honest clients, and the measurements."""

    def __init__(self, port: int, pid: int) -> None:
        self.port, self.pid = port, pid
        self.health: list[float] = []
        self.first_byte: list[float] = []
        self.seen = Counter[str]()
        self.memory: list[tuple[int, float, float]] = []  # second, MiB of the server, MiB of its engine
        self.numbers = itertools.count()

    async def run(self, seconds: float) -> None:
        end = time.perf_counter() + seconds
        await asyncio.gather(
            self.poll_health(end), self.watch_memory(end), self.ask(end, True), self.ask(end, False)
        )

    async def poll_health(self, end: float) -> None:
        while (begun := time.perf_counter()) < end:
            try:
                async with asyncio.timeout(10), connected(self.port) as (reader, writer):
                    writer.write(head("GET", "/health") + b"Connection: close\r\n\r\n")
                    status = (await reader.read()).split()[1].decode()
            except (OSError, IndexError) as error:
                status = type(error).__name__
            self.health.append(time.perf_counter() - begun)
            self.seen[f"health {status}"] += 1
            await asyncio.sleep(POLL_S)

    async def ask(self, end: float, stream: bool) -> None:
        kind = "stream" if stream else "whole answer"
        while (begun := time.perf_counter()) < end:
            try:
                async with asyncio.timeout(120), connected(self.port) as (reader, writer):
                    writer.write(completion(next(self.numbers), 48, stream=stream))
                    line = await reader.readline()
                    self.first_byte.append(time.perf_counter() - begun)
                    data = await reader.read()
            except OSError as error:
                self.seen[f"failed: {kind}, {type(error).__name__}"] += 1
                continue
            is_complete = data.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n") if stream else data.endswith(b"}")
            if is_complete and b" 200 " in line:
                self.seen[f"served: {kind}"] += 1
            else:
                self.seen[f"failed: {kind}, {line.decode().strip()}"] += 1
                await asyncio.sleep(1)

    async def watch_memory(self, end: float) -> None:
        children = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()
        for second in itertools.count():
            if time.perf_counter() >= end:
                return
            self.memory.append((second, resident_mib(self.pid), sum(map(resident_mib, children))))
            await asyncio.sleep(1)


def resident_mib(pid: int | str) -> float:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return round(pages * os.sysconf("SC_PAGE_SIZE") / 2**20, 1)


def percentile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return round(ordered[min(int(share * len(ordered)), len(ordered) - 1)], 4)


def on_core(core: int, command: list[str], **options: Any) -> "subprocess.Popen[str]":
    cores = sorted(os.sched_getaffinity(0))
    mine = {cores[core % len(cores)]}
    return subprocess.Popen(command, text=True, preexec_fn=lambda: os.sched_setaffinity(0, mine), **options)


def measure(model: str | None, seconds: float) -> dict[str, Any]:
    command = [
        sys.executable,
        "-m",
        "nanorun",
        "serve",
        "--port",
        "0",
        *(["--model", model] if model else []),
    ]
    with tempfile.TemporaryFile() as log, on_core(0, command, stdout=subprocess.PIPE, stderr=log) as server:
        try:
            assert server.stdout is not None
            address = server.stdout.readline().strip()
            if not address:
                log.seek(0)
                sys.exit(log.read().decode())
            port = int(address.removesuffix("/v1").rsplit(":", 1)[1])
            observer = Observer(port, server.pid)
            attack = [sys.executable, __file__, "--attack", str(port), "--minutes", str(seconds / 60)]
            with on_core(1, attack, stdout=subprocess.PIPE) as abusers:
                asyncio.run(observer.run(seconds))
                abuse = json.loads(abusers.communicate(timeout=60)[0])
            time.sleep(2)
            state = asyncio.run(read(port, "/health"))
        finally:
            server.send_signal(signal.SIGTERM)
            code = server.wait(60)
        log_bytes = os.fstat(log.fileno()).st_size
    memory = observer.memory
    return {
        "minutes": round(seconds / 60, 2),
        "health": {
            "polls": len(observer.health),
            **{f"p{100 * share:g}_s": percentile(observer.health, share) for share in (0.5, 0.99, 0.999)},
            "max_s": round(max(observer.health), 4),
        },
        "outcomes": dict(sorted(observer.seen.items())),
        "first_byte_p50_s": percentile(observer.first_byte, 0.5),
        "abuse": dict(sorted(abuse.items())),
        "memory_mib": memory[:: max(len(memory) // 40, 1)],
        "server_mib": {
            "start": memory[0][1],
            "quarter": memory[len(memory) // 4][1],
            "end": memory[-1][1],
            "max": max(mib for _, mib, _ in memory),
        },
        "log_bytes": log_bytes,
        "health_after": json.loads(state),
        "exit_code": code,
    }


async def read(port: int, path: str) -> bytes:
    async with connected(port) as (reader, writer):
        writer.write(head("GET", path) + b"Connection: close\r\n\r\n")
        body: bytes = (await reader.read()).partition(b"\r\n\r\n")[2]
        return body


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--model", help="a run (default: the newest chat model, else base model)")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--save", type=Path)
    parser.add_argument("--attack", type=int, help=argparse.SUPPRESS)  # the hostile process: a port
    args = parser.parse_args()
    if args.attack is not None:
        os.nice(10)  # the clients that measure share its core
        abusers = Abusers(args.attack)
        asyncio.run(abusers.run(60 * args.minutes))
        print(json.dumps(abusers.seen))
        return

    from nanorun.provenance import check_writable, record, write_and_print_result

    check_writable(args.save)
    figures = measure(args.model, 60 * args.minutes)
    for name, value in figures.items():
        if name != "memory_mib":
            print(f"{name:>18}  {value}")
    print("   second  server MiB  engine MiB")
    for second, server, engine in figures["memory_mib"]:
        print(f"{second:9d} {server:11.1f} {engine:11.1f}")
    write_and_print_result(record("abuse", model=args.model, **figures), args.save)


if __name__ == "__main__":
    main()
