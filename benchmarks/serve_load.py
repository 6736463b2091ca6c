"""The server under load, and its overhead over the bare engine: `python benchmarks/serve_load.py [--model RUN]`.

Two measurements on one model, in one run:

1. Throughput with 1, 8 and 64 clients, each of which sends its next request as soon as a response is complete: of the
   engine alone in this process, without streaming, and of the server, each client reading a stream. The two alternate,
   three times; the share is the median of the three, so that a disturbance affects one pair only.
2. A minute of abuse: 64 concurrent streams, a third of them abandoned midway; besides, malformed bodies, bodies of ten
   megabytes, conversations of 2,000 messages, clients that read one byte per second, random requests from the OpenAPI
   schema (by schemathesis, where it is installed), and /health polled four times a second. Only invalid requests
   may fail, no slot may leak, and memory must not grow.

Prints a table and, last, one JSON line; --save writes it to a file. The clients need a core of their own: on a machine
with few, they and the server slow each other down, and the share is a lower bound.
"""

import argparse
import asyncio
import itertools
import json
import os
import re
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from statistics import median
from typing import Any

from nanorun.infer.engine import Settings
from nanorun.infer.load import ServedModel
from nanorun.infer.request import Request, Sampling
from nanorun.provenance import record, write_result
from nanorun.runs import default_runs

SAMPLING = Sampling(temperature=0.8, top_k=50)
SLOW_READERS = 4
ABANDON_AFTER = 3  # chunks
MALFORMED = (
    b"",
    b"{",
    b"null",
    b"[]",
    b"\xff\xfe",
    b"[" * 50_000,
    b'{"messages": 7}',
    b'{"prompt": "x", "n": 1e400}',
)


def prompt(number: int) -> str:
    return f"{number}: Once upon a time there was"


def engine_throughput(model: ServedModel, clients: int, seconds: float, tokens: int) -> float:
    """Tokens per second of the engine alone."""
    tokenizer, numbers, written = model.tokenizer, itertools.count(), Counter[str]()
    stop_ids = list(tokenizer.special.values())
    end = time.perf_counter() + seconds

    def client() -> None:
        while time.perf_counter() < end:
            ids = [tokenizer.bos, *tokenizer.encode(prompt(next(numbers)))]
            replies = model.engine.submit(Request(ids, SAMPLING, tokens, stop_ids)).result()
            written["tokens"] += len(replies[0].ids)

    begun = time.perf_counter()
    threads = [threading.Thread(target=client) for _ in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return written["tokens"] / (time.perf_counter() - begun)


def server_throughput(port: int, clients: int, seconds: float, tokens: int) -> float:
    """Tokens per second through the server.

    The clients share the machine with the server that they measure, so they only read: one thread, and one persistent
    connection each, as OpenAI's client uses. Responses are parsed after the measurement.
    """
    numbers, responses = itertools.count(), list[bytes]()
    begun = time.perf_counter()
    with selectors.DefaultSelector() as selector:
        for _ in range(clients):
            connection = socket.create_connection(("127.0.0.1", port))
            connection.sendall(stream_request(next(numbers), tokens))
            selector.register(connection, selectors.EVENT_READ, list[bytes]())
        while selector.get_map():
            for key, _ in selector.select():
                assert isinstance(key.fileobj, socket.socket)
                connection, parts = key.fileobj, key.data
                parts.append(connection.recv(65536))
                if parts[-1] and not b"".join(parts[-2:]).endswith(b"\r\n0\r\n\r\n"):
                    continue
                responses.append(b"".join(parts))
                parts.clear()
                if time.perf_counter() < begun + seconds:
                    connection.sendall(stream_request(next(numbers), tokens))
                else:
                    selector.unregister(connection)
                    connection.close()
    seconds = time.perf_counter() - begun
    return sum(map(count_tokens, responses)) / seconds


def stream_request(number: int, tokens: int, more: str = "") -> bytes:
    request = {"prompt": prompt(number), "max_tokens": tokens, "stream": True}
    request |= {"temperature": SAMPLING.temperature, "top_k": SAMPLING.top_k}
    body = json.dumps({**request, "stream_options": {"include_usage": True}})
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return f"{head}{more}Content-Length: {len(body)}\r\n\r\n{body}".encode()


def count_tokens(response: bytes) -> int:
    """Tokens of a complete response, each at least a byte of text but for a stop token and an incomplete character."""
    *chunks, last, done = re.findall(rb"data: (.*)\n", response)
    text = "".join(json.loads(chunk)["choices"][0]["text"] for chunk in chunks)
    tokens: int = json.loads(last)["usage"]["completion_tokens"]
    assert done == b"[DONE]", response
    assert len(text.encode()) >= tokens - 4, response
    return tokens


class AbusiveClients:
    """The clients of the minute of abuse."""

    def __init__(self, port: int, tokens: int) -> None:
        self.port, self.tokens = port, tokens
        self.numbers, self.seen = itertools.count(), Counter[str]()
        self.first: list[float] = []

    async def stream(self, abandon_after: int | None = None) -> None:
        begun = time.perf_counter()
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            writer.write(stream_request(next(self.numbers), self.tokens, "Connection: close\r\n"))
            status = (await reader.readline()).split()[1].decode()
            data, chunks = b"", 0
            while part := await reader.read(65536):
                before, chunks = chunks, chunks + part.count(b"data: {")
                if chunks and not before:
                    self.first.append(time.perf_counter() - begun)
                data = (data + part)[-2048:]
                if abandon_after is not None and chunks >= abandon_after:
                    self.seen["left"] += 1
                    return
            written = re.search(rb'"completion_tokens":(\d+)', data)
            self.seen["tokens"] += int(written[1]) if written else 0
            self.seen["whole" if b"[DONE]" in data else f"broken {status}"] += 1
        except (OSError, IndexError) as error:
            self.seen[f"failed {type(error).__name__}"] += 1
        finally:
            writer.close()

    async def post(self, path: str, body: bytes) -> None:
        """Send a request and count the response by its status."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            writer.write(f"{head}Connection: close\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
            status = (await reader.readline()).split()[1].decode()
            while await reader.read(65536):
                pass
            self.seen[f"nuisance {status}"] += 1
        except (OSError, IndexError):
            self.seen["nuisance hung up on"] += (
                1  # a server may close the connection on a body that is too long
            )
        finally:
            writer.close()

    async def read_slowly(self, until: float) -> None:
        """Read one byte per second of a stream."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port, limit=1024)
        writer.write(stream_request(next(self.numbers), self.tokens))
        while time.perf_counter() < until and await reader.read(1):
            await asyncio.sleep(1)
        self.seen["read slowly"] += 1
        writer.close()

    async def send_bad_requests(self, until: float) -> None:
        """Four times a second, a request that no good client sends."""
        messages = [{"role": ("user", "assistant")[at % 2], "content": f"number {at}"} for at in range(2001)]
        conversation = json.dumps({"messages": messages, "truncation": "auto", "max_tokens": 4}).encode()
        for number in itertools.count():
            if time.perf_counter() >= until:
                return
            path = ("/v1/chat/completions", "/v1/completions")[number % 2]
            body = MALFORMED[number // 2 % len(MALFORMED)]
            if number % 8 == 0:
                path, body = "/v1/chat/completions", conversation
            elif number % 8 == 5:
                body = b'{"prompt": "' + b"x" * 10_000_000 + b'"}'
            await self.post(path, body)
            await asyncio.sleep(0.25)

    async def run(self, count: int, seconds: float) -> float:
        """`count` concurrent clients that abandon every third stream; tokens per second of complete responses."""
        end = time.perf_counter() + seconds

        async def client(number: int) -> None:
            for request in itertools.count(number):
                if time.perf_counter() >= end:
                    return
                await self.stream(ABANDON_AFTER if request % 3 == 0 else None)

        before, begun = self.seen["tokens"], time.perf_counter()
        await asyncio.gather(*(client(number) for number in range(count)))
        return (self.seen["tokens"] - before) / (time.perf_counter() - begun)

    async def get(self, path: str) -> tuple[int, str]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
        answer = (await reader.read()).decode()
        writer.close()
        return int(answer.split()[1]), answer

    async def metric(self, name: str) -> float:
        found = re.search(rf"^{name} (\S+)$", (await self.get("/metrics"))[1], re.MULTILINE)
        return float(found[1]) if found else -1.0


async def fuzz(port: int, seconds: float) -> int | None:
    """The exit code of schemathesis, which sends random requests from the schema; None where it is not installed."""
    program = shutil.which("st", path=str(Path(sys.executable).parent))
    if program is None:
        return None
    command = [program, "run", f"http://127.0.0.1:{port}/openapi.json", "--checks", "not_a_server_error"]
    command += ["--phases", "fuzzing", "--max-time", str(int(seconds)), "--no-color"]
    process = await asyncio.create_subprocess_exec(
        *command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        cwd=tempfile.gettempdir(),  # it creates a folder
    )
    output, _ = await process.communicate()
    if process.returncode:
        print(output.decode(errors="replace")[-3000:], file=sys.stderr)
    return process.returncode


async def abuse(load: AbusiveClients, clients: int, seconds: float) -> dict[str, Any]:
    """Run the abusive clients; returns outcomes of requests, latency of /health, memory growth and leaked slots."""
    healthy, memory, done = list[float](), list[float](), asyncio.Event()

    async def watch() -> None:
        while not done.is_set():
            begun = time.perf_counter()
            status, _ = await load.get("/health")
            healthy.append(time.perf_counter() - begun)
            load.seen[f"health {status}"] += 1
            parts = ("process", "nanorun_engines")
            resident = [await load.metric(f"{part}_resident_memory_bytes") for part in parts]
            memory.append(sum(resident) / 2**20)
            await asyncio.sleep(0.25)

    load.seen.clear()
    load.first.clear()
    until = time.perf_counter() + seconds
    others = [watch(), load.send_bad_requests(until), *(load.read_slowly(until) for _ in range(SLOW_READERS))]
    tasks = [asyncio.create_task(other) for other in others]
    fuzzing = asyncio.create_task(fuzz(load.port, seconds))
    rate = await load.run(clients, seconds)
    if (code := await fuzzing) is not None:
        load.seen[f"schemathesis ended with {code}"] += 1
    done.set()
    await asyncio.gather(*tasks)
    for _ in range(200):
        busy = await load.metric("nanorun_slots_busy") + await load.metric("nanorun_reserved")
        if not busy:
            break
        await asyncio.sleep(0.05)
    quarter = memory[len(memory) // 4]  # by then, lazily allocated memory is in use
    return {
        "clients": clients,
        "seconds": seconds,
        "tokens_per_s": round(rate, 1),
        "outcomes": dict(sorted(load.seen.items())),
        "first_byte_p50_s": round(sorted(load.first)[len(load.first) // 2], 4),
        "health_worst_s": round(max(healthy), 4),
        "memory_mib": [round(quarter, 1), round(memory[-1], 1)],
        "slots_left_busy": busy,
    }


def throughput_row(clients: int, rounds: list[tuple[float, float]]) -> dict[str, Any]:
    """Medians over rounds of (engine, server) throughput."""
    shares = [server / engine for engine, server in rounds]
    engine, server = (round(median(rates), 1) for rates in zip(*rounds, strict=True))
    share, all_shares = round(median(shares), 3), [round(share, 3) for share in shares]
    return {"clients": clients, "engine": engine, "server": server, "share": share, "shares": all_shares}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--model", help="a run (default: the newest chat model, else base model)")
    parser.add_argument("--clients", default="1,8,64")
    parser.add_argument("--tokens", type=int, default=128, help="of a response, at most")
    parser.add_argument("--slots", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=10.0, help="of each measurement")
    parser.add_argument("--rounds", type=int, default=3, help="repetitions of each")
    parser.add_argument("--abuse", type=float, default=60.0, help="seconds of abuse")
    parser.add_argument("--save", type=Path)
    args = parser.parse_args()
    name, counts = (
        args.model or default_runs(prefer_chat=True)[0],
        [int(count) for count in args.clients.split(",")],
    )

    command = [sys.executable, "-m", "nanorun", "serve", "--port", "0", "--queue", "1024", "--gpus", "1"]
    command += ["--tools", "none", "--slots", str(args.slots), *(["--model", name] if name else [])]
    rows: list[dict[str, Any]] = []
    with (
        ServedModel(name, Settings(args.slots, max_queue=1024), tools="none") as model,
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ) as server,
    ):
        try:
            assert server.stdout is not None
            port = int(server.stdout.readline().strip().removesuffix("/v1").rsplit(":", 1)[1])
            load = AbusiveClients(port, args.tokens)
            engine_throughput(model, max(counts), 2.0, args.tokens)  # warm up graphs and caches
            server_throughput(port, max(counts), 2.0, args.tokens)
            for count in counts:
                rounds = [
                    (
                        engine_throughput(model, count, args.seconds, args.tokens),
                        server_throughput(port, count, args.seconds, args.tokens),
                    )
                    for _ in range(args.rounds)
                ]
                rows.append(throughput_row(count, rounds))
            abused = asyncio.run(abuse(load, max(counts), args.abuse)) if args.abuse else None
        finally:
            server.send_signal(signal.SIGTERM)
            code = server.wait(60)

    print("clients   engine tok/s   server tok/s   share")
    for row in rows:
        print(f"{row['clients']:7d} {row['engine']:14,.0f} {row['server']:14,.0f} {row['share']:7.0%}")
    for key, value in (abused or {}).items():
        print(f"{key:>18}  {value}")
    result = record("serve", model=name, slots=args.slots, tokens=args.tokens, rows=rows, abuse=abused)
    result["exit_code"] = code
    write_result(result, args.save)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
