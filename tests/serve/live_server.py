"""The real server, as a process on the loopback."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
from openai import OpenAI

ROOT = Path(__file__).resolve().parents[2]
CHAT = "/v1/chat/completions"


class Server:
    def __init__(self, home: Path, *args: str, **environment: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "nanorun", "serve", "--port", "0", *args],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env={**os.environ, "NANORUN_HOME": str(home), **environment},
        )
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        self.errors: list[str] = []
        threading.Thread(target=self.errors.extend, args=(self.process.stderr,), daemon=True).start()
        self.url = self.process.stdout.readline().strip().removesuffix("/v1")
        assert self.url, self.errors
        self.http = httpx.Client(base_url=self.url, timeout=60)

    @property
    def port(self) -> int:
        return int(self.url.rsplit(":", 1)[1])

    @property
    def engines(self) -> list[int]:
        """The engine processes, on Linux."""
        pid = self.process.pid
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]

    def client(self, **options: Any) -> OpenAI:
        return OpenAI(
            **{"base_url": f"{self.url}/v1", "api_key": "any", "max_retries": 0, "timeout": 60, **options}
        )

    def ask(self, question: str = "hi", **more: Any) -> httpx.Response:
        messages = [{"role": "user", "content": question}]
        return self.http.post(CHAT, json={"messages": messages, "temperature": 0, **more})

    def metric(self, name: str) -> float:
        found = re.search(rf"^{re.escape(name)} (\S+)$", self.http.get("/metrics").text, re.MULTILINE)
        return float(found[1]) if found else 0.0

    def wait_until(self, condition: Callable[[], bool], seconds: float = 20) -> None:
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, self.http.get("/metrics").text
            time.sleep(0.02)

    def idle(self) -> bool:
        return not any(map(self.metric, ("nanorun_slots_busy", "nanorun_queue", "nanorun_reserved")))

    def stop(self, seconds: float = 20) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(seconds)


@contextlib.contextmanager
def running(home: Path, *args: str, **environment: str) -> Iterator[Server]:
    server = Server(home, *args, **environment)
    try:
        yield server
    finally:
        server.process.kill()
        server.process.wait()


def events(lines: Iterator[str]) -> Iterator[Any]:
    for line in lines:
        if line.startswith("data: ") and line != "data: [DONE]":
            yield json.loads(line.removeprefix("data: "))
