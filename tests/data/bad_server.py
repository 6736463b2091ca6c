"""A real HTTP server on 127.0.0.1 that misbehaves on request.

    server.files["/a"] = b"..."
    server.script("/a", Act(drop_after=1000), Act(status=503))   # the next two GETs of /a; then it behaves
    server.always["/a"] = Act(ignore_range=True)                  # every GET that has no scripted act

A HEAD or POST request is scripted as "HEAD /a" or "POST /a". POST /a is answered by server.posts["/a"](body).
It records the requests and counts the body bytes it sent for each path.
"""

import hashlib
import socket
import struct
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Self

import pytest
from huggingface_hub import constants


def prepare_client(monkeypatch: pytest.MonkeyPatch) -> None:
    """huggingface_hub without a proxy or a token, with short pauses between attempts and a short timeout."""
    sleep = time.sleep
    monkeypatch.setenv("no_proxy", "127.0.0.1,localhost")
    for name in ("HF_TOKEN", "HF_HUB_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(time, "sleep", lambda seconds: sleep(min(seconds, 0.01)))
    monkeypatch.setattr(constants, "HF_HUB_DOWNLOAD_TIMEOUT", 2)
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 10_000)


@dataclass(frozen=True)
class Act:
    status: int | None = None  # this answer, with an empty body
    headers: dict[str, str] = field(default_factory=dict)  # added, or instead of the usual ones
    body: bytes | None = None  # these bytes instead of the file's
    drop_after: int | None = None  # the connection ends after so many bytes of the body
    reset: bool = False  # ... with a reset instead of an orderly end
    stall_after: int | None = None  # silence after so many bytes
    ignore_range: bool = False  # 200 and the whole file, whatever was asked
    ignore_if_range: bool = False  # 206 although the file is another one by now
    corrupt: bool = False  # one byte in the middle of the answer is wrong
    shift_range: int = 0  # the range begins so many bytes late
    no_length: bool = False  # neither Content-Length nor chunks: the end of the connection is the end
    chunked: bool = False
    extra: bytes = b""  # after the file's last byte
    pause: float = 0.0  # seconds between pieces of 16 kB
    hang: float = 0.0  # seconds before the answer


@dataclass(frozen=True)
class Seen:
    path: str
    headers: dict[str, str]
    method: str = "GET"


class BadServer:
    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.etags: dict[str, str] = {}  # "" sends none; a hash of the content by default
        self.always: dict[str, Act] = {}
        self.posts: dict[str, Callable[[bytes], bytes]] = {}
        self.seen: list[Seen] = []
        self.sent: dict[str, int] = defaultdict(int)
        self.at_once = self.most_at_once = 0
        self.closing = threading.Event()
        self._scripts: dict[str, deque[Act]] = defaultdict(deque)
        self._lock = threading.Lock()
        handler = type("Handler", (_Handler,), {"bad": self})
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._http.daemon_threads = True
        self._thread = threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.02})

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._http.server_address[1]}"

    def script(self, path: str, *acts: Act) -> None:
        self._scripts[path].extend(acts)

    def requests(self, path: str, method: str = "GET") -> list[Seen]:
        return [seen for seen in self.seen if seen.path == path and seen.method == method]

    def etag(self, path: str) -> str:
        return self.etags.get(path, '"' + hashlib.md5(self.files[path]).hexdigest() + '"')

    def next_act(self, path: str) -> Act:
        with self._lock:
            waiting = self._scripts[path]
            return waiting.popleft() if waiting else self.always.get(path, Act())

    def busy(self, change: int) -> None:
        with self._lock:
            self.at_once += change
            self.most_at_once = max(self.most_at_once, self.at_once)

    def count(self, path: str, n: int) -> None:
        with self._lock:
            self.sent[path] += n

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.closing.set()
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()


class _Handler(BaseHTTPRequestHandler):
    bad: BadServer
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._answer(self._file)

    def do_HEAD(self) -> None:
        self._answer(self._file)

    def do_POST(self) -> None:
        sent = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self._answer(lambda act: self._posted(sent, act))

    def _answer(self, send: Callable[[Act], None]) -> None:
        self.close_connection = True
        headers = {name.lower(): value for name, value in self.headers.items()}
        self.bad.seen.append(Seen(self.path, headers, self.command))
        act = self.bad.next_act(self.path if self.command == "GET" else f"{self.command} {self.path}")
        self.bad.busy(+1)
        try:
            self.bad.closing.wait(act.hang)
            if act.status is not None:
                self._head(act.status, {"Content-Length": "0", **act.headers})
            elif self.path not in (self.bad.posts if self.command == "POST" else self.bad.files):
                self._head(404, {"Content-Length": "0"})
            else:
                send(act)
        except OSError:
            pass  # the client left, as killed clients do
        finally:
            self.bad.busy(-1)

    def _posted(self, sent: bytes, act: Act) -> None:
        body = self.bad.posts[self.path](sent) if act.body is None else act.body
        self._head(200, {"Content-Length": str(len(body)), **act.headers})
        self._body(body, act)

    def _file(self, act: Act) -> None:
        whole = self.bad.files[self.path] if act.body is None else act.body
        etag = self.bad.etag(self.path)
        wanted = self.headers.get("Range", "")
        condition = self.headers.get("If-Range")
        usable = condition is None or condition == etag or act.ignore_if_range
        headers = {"ETag": etag} if etag else {}
        if wanted and not act.ignore_range and usable:
            begin = int(wanted.removeprefix("bytes=").rstrip("-"))
            if begin >= len(whole):
                return self._head(416, {"Content-Range": f"bytes */{len(whole)}", "Content-Length": "0"})
            begin += act.shift_range
            status, body = 206, whole[begin:]
            headers["Content-Range"] = f"bytes {begin}-{len(whole) - 1}/{len(whole)}"
        else:
            status, body = 200, whole
        if act.corrupt and body:
            middle = len(body) // 2
            body = body[:middle] + bytes([body[middle] ^ 1]) + body[middle + 1 :]
        if act.chunked:
            headers["Transfer-Encoding"] = "chunked"
        elif not act.no_length:
            headers["Content-Length"] = str(len(body))
        headers["X-Repo-Commit"] = "3" * 40
        self._head(status, {**headers, **act.headers})
        return self._body(body + act.extra, act) if self.command == "GET" else None

    def _head(self, status: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Connection", "close")
        self.end_headers()

    def _body(self, body: bytes, act: Act) -> None:
        end = len(body) if act.drop_after is None else min(act.drop_after, len(body))
        for at in range(0, end, 16384):
            piece = body[at : min(at + 16384, end)]
            if act.stall_after is not None and at + len(piece) > act.stall_after:
                self._send(piece[: max(0, act.stall_after - at)], act)
                self.bad.closing.wait(20)
                return
            self.bad.closing.wait(act.pause)
            self._send(piece, act)
        if act.chunked and act.drop_after is None:
            self.wfile.write(b"0\r\n\r\n")
        if act.reset:
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    def _send(self, piece: bytes, act: Act) -> None:
        self.bad.count(self.path, len(piece))
        self.wfile.write(b"%x\r\n%s\r\n" % (len(piece), piece) if act.chunked and piece else piece)

    def log_message(self, *_: object) -> None:
        pass
