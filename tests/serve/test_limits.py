"""What one client can take from others: time of the event loop, connections, descriptors, memory, lines of the log."""

import asyncio
import contextlib
import gc
import json
import logging
import os
import resource
import signal
import socket
import sys
import threading
import time

import httpx
import pytest
from live_server import CHAT, events, running
from talkers import byte_tokenizer
from uvicorn import Config
from uvicorn.server import ServerState

from nanorun.errors import UserError
from nanorun.serve import engines
from nanorun.serve.app import Service, build_app
from nanorun.serve.connection import ConnectionPool
from nanorun.serve.engines import RemoteModel
from nanorun.serve.errors import ApiError
from nanorun.serve.metrics import Metrics, resident_bytes
from nanorun.serve.options import RequestLimits, ServeOptions
from nanorun.serve.parsing import MAX_VALUES, parse_body
from nanorun.serve.run import RepeatFilter
from nanorun.serve.schema import ChatRequest, CompletionRequest

TEXT = "/v1/completions"
BLOCK_S = 0.1
HI = b'{"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1, '
linux = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")


def many(value: bytes, before: bytes, after: bytes, count: int = 10**9) -> bytes:
    """A body of two megabytes, unless `count` values take fewer."""
    return before + b",".join([value] * min(count, 1_990_000 // (len(value) + 1))) + after


def keys(count: int) -> bytes:
    return b",".join(b'"%x": ""' % number for number in range(count))


TOO_MANY = {
    "negative ids": (TEXT, many(b"-1", b'{"prompt": [', b"]}")),
    "ids": (TEXT, many(b"1", b'{"prompt": [', b"]}")),
    "lists of ids": (TEXT, many(b"[1]", b'{"prompt": [', b"]}")),
    "empty messages": (CHAT, many(b"{}", b'{"messages": [', b"]}")),
    "valid messages": (CHAT, many(b'{"role": "user", "content": ""}', b'{"messages": [', b"]}")),
    "empty parts": (CHAT, many(b"{}", b'{"messages": [{"role": "user", "content": [', b"]}]}")),
    "valid parts": (
        CHAT,
        many(b'{"type": "text", "text": ""}', b'{"messages": [{"role": "user", "content": [', b"]}]}"),
    ),
    "modalities": (CHAT, many(b"1", HI + b'"modalities": [', b"]}")),
    "metadata": (CHAT, many(b"[]", HI + b'"metadata": [', b"]}")),
    "unknown keys": (CHAT, HI + keys(150_000) + b"}"),
    "nested keys": (CHAT, HI + b'"logit_bias": {' + keys(150_000) + b"}}"),
    "depth": (CHAT, HI + b'"metadata": ' + b"[" * 900_000 + b"]" * 900_000 + b"}"),
    "quotes": (CHAT, b'["' + b'","' * 660_000),
}
MOST = {  # as expensive as the limits allow
    "ids": (TEXT, many(b"1", b'{"prompt": [', b"]}", MAX_VALUES - 3)),
    "negative ids": (TEXT, many(b"-1", b'{"prompt": [', b"]}", MAX_VALUES - 3)),
    "lists": (TEXT, many(b"[1]", b'{"prompt": [', b"]}", MAX_VALUES // 2 - 3)),
    "messages": (
        CHAT,
        many(b'{"role": "user", "content": ""}', b'{"messages": [', b"]}", MAX_VALUES // 3 - 3),
    ),
    "empty messages": (CHAT, many(b"{}", b'{"messages": [', b"]}", MAX_VALUES // 2 - 3)),
    "parts": (
        CHAT,
        many(
            b'{"type": "text", "text": ""}',
            b'{"max_tokens": 1, "messages": [{"role": "user", "content": [',
            b"]}]}",
            MAX_VALUES // 3 - 9,
        ),
    ),
    "keys": (CHAT, HI + keys(MAX_VALUES - 9) + b"}"),
    "stream options": (CHAT, HI + b'"stream_options": {' + keys(1000) + b"}}"),
    "integers": (CHAT, many(b"9" * 4300, HI + b'"metadata": [', b"]}")),
    "integer": (CHAT, HI + b'"seed": ' + b"9" * 1_900_000 + b"}"),
    "float": (CHAT, HI + b'"temperature": 0.' + b"7" * 1_900_000 + b"}"),
    "text": (TEXT, b'{"prompt": "' + b"x" * 1_990_000 + b'"}'),
    "escapes": (TEXT, b'{"prompt": "' + b"\\n" * 990_000 + b'"}'),
    "commas in a text": (TEXT, b'{"prompt": "' + b'{\\"a\\": [1, 2]},' * 110_000 + b'"}'),
}


async def longest_block(work) -> float:
    """The most CPU time that passed between two turns of the event loop: not changed by a busy machine."""
    task, longest = asyncio.create_task(work), 0.0
    while not task.done():
        before = time.thread_time()
        await asyncio.sleep(0)
        longest = max(longest, time.thread_time() - before)
    await task
    return longest


@pytest.fixture(scope="module")
def model(trained):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NANORUN_HOME", str(trained))
        with contextlib.closing(RemoteModel(ServeOptions(slots=8))) as model:
            yield model


@pytest.fixture
def frozen():
    """The objects of other tests are no part of a collection, as in a server."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.parametrize(("path", "body"), [*TOO_MANY.values(), *MOST.values()], ids=[*TOO_MANY, *MOST])
def test_no_body_blocks_the_event_loop(model, frozen, path, body):
    app, answers = build_app(Service(model, ServeOptions())), []

    async def ask():
        await model.connect()
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=60) as http:
            headers = {"content-type": "application/json"}
            answers.append(await http.post(path, content=body, headers=headers))

    assert asyncio.run(longest_block(ask())) < BLOCK_S
    (answer,) = answers
    assert answer.status_code in (200, 400)
    assert len(answer.text) < 500


def test_a_body_of_invalid_values_takes_little_memory(server):
    before = resident_bytes(server.process.pid)
    for path, body in (TOO_MANY["negative ids"], TOO_MANY["empty messages"], TOO_MANY["empty parts"]):
        begun = time.monotonic()
        answer = server.http.post(path, content=body, headers={"content-type": "application/json"})
        assert answer.json()["error"]["code"] == "too_many_values"
        assert time.monotonic() - begun < 1
    assert resident_bytes(server.process.pid) - before < 50e6


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        (TOO_MANY["ids"][1], f"The request has more than {MAX_VALUES} JSON values."),
        (HI + keys(1025) + b"}", "An object of the request has 1027 keys (at most 1024)."),
        (HI + b'"seed": ' + b"1" * 401 + b"}", "An integer of the request has 401 digits (at most 400)."),
        (HI + b'"metadata": ' + b"[" * 20_000, "The body of the request is nested too deeply."),
        (HI, "The body of the request is not valid JSON."),
        ("[]".encode("utf-16"), "The body of the request is not valid JSON."),
        (b"[]", "The body must be a JSON object, sent with the header Content-Type: application/json."),
        (HI + b'"body": 1}', "Unrecognized request argument supplied: body"),
    ],
)
def test_a_body_beyond_the_limits_is_reported_in_one_sentence(body, problem):
    with pytest.raises(ApiError) as error:
        parse_body(body, ChatRequest)
    assert (error.value.status, error.value.message) == (400, problem)


def test_the_punctuation_of_a_text_does_not_count_as_values():
    text = '{"a": [1, 2]}, "b\\' * 30_000
    assert parse_body(json.dumps({"prompt": text}).encode(), CompletionRequest).prompt == text
    ids = [1] * (MAX_VALUES - 10)
    assert parse_body(json.dumps({"prompt": ids}).encode(), CompletionRequest).prompt == ids


def test_many_logprobs_do_not_block_the_event_loop(model, frozen):
    app = build_app(Service(model, ServeOptions()))
    asked = {"messages": [{"role": "user", "content": "loop"}], "n": 8, "max_tokens": 500, "temperature": 0}
    asked |= {"logprobs": True, "top_logprobs": 20}
    answers = []

    async def ask():
        await model.connect()
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=60) as http:
            answers.append(await http.post(CHAT, json=asked))

    assert asyncio.run(longest_block(ask())) < BLOCK_S
    choices = answers[0].json()["choices"]
    assert [len(choice["logprobs"]["content"]) for choice in choices] == [500] * 8
    assert {len(token["top_logprobs"]) for token in choices[0]["logprobs"]["content"]} == {20}


def test_clients_that_leave_logprobs_unread_lose_their_answers(model, monkeypatch):
    """Otherwise their memory would grow with the time that they may stall."""
    service = Service(model, ServeOptions())
    monkeypatch.setattr(service.dispatcher, "max_logprobs", 20_000)
    asked = {"messages": [{"role": "user", "content": "loop"}], "n": 4, "temperature": 0, "stream": True}
    body = json.dumps({**asked, "logprobs": True, "top_logprobs": 20}).encode()
    scope = {"type": "http", "method": "POST", "path": CHAT, "raw_path": CHAT.encode(), "query_string": b""}
    headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
    incoming = [{"type": "http.request", "body": body, "more_body": False}]
    sent, may_read = [], asyncio.Event()

    async def receive():
        return incoming.pop() if incoming else await asyncio.Event().wait()

    async def send(message):
        await may_read.wait()
        sent.append(message)

    async def ask():
        await model.connect()
        app = build_app(service)
        task = asyncio.create_task(app({**scope, "headers": headers, "root_path": ""}, receive, send))
        most = 0
        async with asyncio.timeout(30):
            while not service.dispatcher.loads[0]:
                await asyncio.sleep(0.01)
            while service.dispatcher.loads[0]:
                most = max(most, service.dispatcher.waiting_logprobs)
                await asyncio.sleep(0.001)
        may_read.set()
        await task
        return most

    assert 10_000 < asyncio.run(ask()) < 25_000
    assert b'"code": "slow_client"' in sent[-1]["body"]
    assert service.dispatcher.waiting_logprobs == 0


# -- connections -------------------------------------------------------------------------------------------


def connect(server) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", server.port))
    connection.settimeout(10)
    return connection


def is_closed(connection: socket.socket) -> bool:
    connection.setblocking(False)
    try:
        while connection.recv(4096):
            pass
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True


def head(more: str = "", path: str = TEXT) -> bytes:
    return f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n{more}".encode()


@pytest.fixture(scope="module")
def strict(trained, tmp_path_factory):
    """A server with low limits, which could import httptools: uvicorn prefers that parser."""
    folder = tmp_path_factory.mktemp("packages")
    (folder / "httptools.py").write_text("class HttpRequestParser: ...")
    limits = ("--idle", "1", "--stall", "1", "--connections", "8")
    with running(trained, *limits, PYTHONPATH=str(folder)) as server:
        yield server
        assert not any("Traceback" in line for line in server.errors), "".join(server.errors)


def test_connections_without_a_request_are_closed(strict):
    with connect(strict) as idle, connect(strict) as slow, connect(strict) as kept, connect(strict) as early:
        kept.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert kept.recv(4096).startswith(b"HTTP/1.1 200")
        # A response before the end of the body, which never comes.
        early.sendall(b"POST /x HTTP/1.1\r\nHost: evil\r\nTransfer-Encoding: chunked\r\n\r\n")
        assert early.recv(4096).startswith(b"HTTP/1.1 403")
        end = time.monotonic() + 5
        while not all([is_closed(connection) for connection in (idle, slow, kept, early)]):
            assert time.monotonic() < end
            with contextlib.suppress(OSError):
                slow.send(b"x")
                early.send(b"1\r\nx\r\n")
            time.sleep(0.1)
    strict.wait_until(lambda: strict.metric("nanorun_connections") == 1)
    assert strict.metric("nanorun_dropped_connections_total") >= 3  # uvicorn may close the kept one itself


def test_a_client_that_reads_nothing_is_disconnected_after_any_response(strict):
    with socket.socket() as silent:
        silent.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        silent.connect(("127.0.0.1", strict.port))
        silent.settimeout(0.5)
        with contextlib.suppress(OSError):
            silent.sendall(b"GET /page.css HTTP/1.1\r\nHost: localhost\r\n\r\n" * 1000)
        assert silent.recv(1) == b"H"
        strict.wait_until(lambda: strict.metric("nanorun_connections") == 1, 6)
        assert strict.metric("nanorun_open_requests") == 1


def test_connections_that_wait_for_their_clients_make_room_for_new_ones(strict):
    with contextlib.ExitStack() as stack:
        for request in (b"", head()[:20], head("Content-Length: 100\r\n\r\n{")):
            opened = [stack.enter_context(connect(strict)) for _ in range(20)]
            for connection in opened:
                with contextlib.suppress(OSError):
                    connection.sendall(request)
            assert httpx.get(f"{strict.url}/health").status_code == 200
            assert all(map(is_closed, opened[:12]))
            assert not any(map(is_closed, opened[-4:]))
        assert strict.ask().status_code == 200
        assert sum("connections are open" in line for line in strict.errors) <= 2


def test_running_answers_keep_their_connections_and_others_get_503(strict):
    loop = {"messages": [{"role": "user", "content": "loop"}], "temperature": 0, "max_tokens": 700}
    strict.http.close()
    strict.http = httpx.Client(base_url=strict.url, timeout=60)
    with contextlib.ExitStack() as stack:
        streams = []
        for _ in range(8):
            http = stack.enter_context(httpx.Client(base_url=strict.url, timeout=60))
            lines = stack.enter_context(http.stream("POST", CHAT, json={**loop, "stream": True})).iter_lines()
            streams.append(events(lines))
        with connect(strict) as connection:
            refused = connection.recv(4096)
        assert refused.startswith(b"HTTP/1.1 503 Service Unavailable\r\n")
        assert b"\r\nRetry-After: 1\r\n" in refused
        error = json.loads(refused.partition(b"\r\n\r\n")[2])["error"]
        assert error["code"] == "too_many_connections"
        assert error["message"] == "Too many connections (at most 8). Try again later."
        assert [list(stream)[-1]["choices"][0]["finish_reason"] for stream in streams] == ["length"] * 8


def test_headers_are_limited_even_if_httptools_is_installed(strict):
    for headers in (b"x: " + b"y" * 10**6, b"x: y\r\n" * 10**5):
        with connect(strict) as connection, contextlib.suppress(OSError):
            connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n" + headers + b"\r\n\r\n")
    answer = httpx.get(f"{strict.url}/health", headers={"x": "y" * 40_000})
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "invalid_http"
    assert httpx.get(f"{strict.url}/health", headers={"x": "y" * 8_000}).status_code == 200


def test_clients_cannot_flood_the_log(strict):
    for _ in range(100):
        with connect(strict) as connection:
            connection.sendall(b"nonsense\r\n\r\n")
            assert connection.recv(100).startswith(b"HTTP/1.1 400")
    assert sum("Invalid HTTP request" in line for line in strict.errors) <= 2


@linux
def test_at_the_descriptor_limit_the_server_logs_one_line_and_recovers(server):
    pid, lines = server.process.pid, len(server.errors)
    limit = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    assert server.http.get("/health").status_code == 200
    files = len(os.listdir(f"/proc/{pid}/fd"))
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (files + 10, limit[1]))
    try:
        with contextlib.ExitStack() as stack:
            for _ in range(40):
                stack.enter_context(connect(server))
            server.wait_until(lambda: len(server.errors) > lines)
            time.sleep(1.2)  # the event loop tries again every second
            assert server.http.get("/health").status_code == 200  # on its open connection
        assert httpx.get(f"{server.url}/health", timeout=10).status_code == 200
    finally:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, limit)
    assert [line.rstrip() for line in server.errors[lines:]] == [
        "No more files can be opened, so new connections wait: raise the limit with ulimit -n."
    ]


def test_the_limit_of_connections_leaves_descriptors_for_other_files(monkeypatch):
    for limit, expected in ((200, 150), (20_000, 1024), (resource.RLIM_INFINITY, 1024)):
        monkeypatch.setattr(resource, "getrlimit", lambda _, limit=limit: (limit, limit))
        assert ConnectionPool(RequestLimits(), Metrics()).max_connections == expected


def test_small_chunks_and_many_headers_do_not_block_the_event_loop(frozen):
    """What has arrived is parsed in one turn of the event loop: 43,000 chunks, if it receives 256 kB at a time."""
    bodies = []

    async def app(scope, receive, send):
        message = {"more_body": True}
        while message.get("more_body"):
            message = await receive()
            bodies.append(message.get("body", b""))
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    config = Config(app, lifespan="off", log_level="critical", h11_max_incomplete_event_size=16 * 2**10)
    pool = ConnectionPool(RequestLimits(), Metrics())
    requests = (
        head("Transfer-Encoding: chunked\r\n\r\n") + b"1\r\nx\r\n" * 40_000 + b"0\r\n\r\n",
        head() + b"a:\r\n" * 3_000 + b"\r\n",
        head() + b"a:\r\n" * 40_000 + b"\r\n",
    )

    async def serve():
        state = ServerState()
        server = await asyncio.get_running_loop().create_server(
            lambda: pool.create_protocol(config=config, server_state=state, app_state={}), "127.0.0.1", 0
        )
        port, statuses = server.sockets[0].getsockname()[1], []

        def send_all():
            for request in requests:
                with socket.create_connection(("127.0.0.1", port)) as connection:
                    connection.settimeout(30)
                    with contextlib.suppress(OSError):
                        connection.sendall(request)
                    statuses.append(connection.recv(100)[9:12])

        sender = threading.Thread(target=send_all)
        sender.start()
        while sender.is_alive():
            await asyncio.sleep(0.001)
        server.close()
        assert statuses == [b"200", b"200", b"400"]

    assert asyncio.run(longest_block(serve())) < BLOCK_S / 2
    assert sum(map(len, bodies)) == 40_000


@linux
def test_slow_large_bodies_take_little_memory(server):
    with contextlib.ExitStack() as stack:
        before = resident_bytes(server.process.pid)
        for _ in range(120):
            connection = stack.enter_context(connect(server))
            connection.setblocking(False)
            request = memoryview(head("Content-Length: 1990000\r\n\r\n") + b"x" * 1_900_000)
            sent, end = 0, time.monotonic() + 0.05
            while sent < len(request) and time.monotonic() < end:
                with contextlib.suppress(BlockingIOError):
                    sent += connection.send(request[sent:])
        server.wait_until(lambda: server.metric("nanorun_open_requests") == 121)
        time.sleep(1)  # all that it reads has arrived
        assert server.ask().status_code == 200
        assert resident_bytes(server.process.pid) - before < 150e6


# -- the log -----------------------------------------------------------------------------------------------


def test_a_repeated_line_is_logged_again_after_a_while_with_their_number(monkeypatch):
    now, only_some = 0.0, RepeatFilter()
    monkeypatch.setattr(time, "monotonic", lambda: now)
    lines = []
    for second in range(25):
        now = float(second)
        record = logging.LogRecord("x", logging.WARNING, "", 0, "Bad %s.", ("luck",), None)
        if only_some.filter(record):
            lines.append((second, record.getMessage()))
    more = " (9 more such lines were left out.)"
    assert lines == [(0, "Bad luck."), (10, f"Bad luck.{more}"), (20, f"Bad luck.{more}")]


# -- engines, keys and prompts -------------------------------------------------------------------------------


def test_a_stopped_engine_is_reported_until_it_runs_again(model, monkeypatch):
    monkeypatch.setattr(engines, "MAX_SILENCE_S", 1.5, raising=False)
    service, pid = Service(model, ServeOptions()), model.engines[0].process.pid

    async def wait_for(status):
        async with asyncio.timeout(10):
            while service.health()[1]["status"] != status:
                await asyncio.sleep(0.02)

    async def watch():
        await model.connect()
        await asyncio.sleep(2)  # an idle engine is heard, too
        assert service.health() == (200, {**service.health()[1], "status": "ok"})
        os.kill(pid, signal.SIGSTOP)
        try:
            await wait_for("silent")
            assert service.health()[0] == 503
            with pytest.raises(ApiError) as refused:
                service.dispatcher.admit(1)
        finally:
            os.kill(pid, signal.SIGCONT)
        await wait_for("ok")
        service.dispatcher.admit(1).close()
        return refused.value

    refused = asyncio.run(watch())
    assert (refused.status, refused.code) == (503, "engine_silent")


@pytest.mark.parametrize(
    ("key", "problem"),
    [
        (" ", "is empty"),
        ("sesame ", "begins or ends with a blank"),
        ("\tsesame", "begins or ends with a blank"),
        ("sésame", "has characters that no client can send"),
        ("ses\name", "has characters that no client can send"),
    ],
)
def test_an_api_key_that_no_client_can_send_is_rejected(mistake, key, problem):
    assert problem in mistake(["serve", "--api-key", key])
    with pytest.raises(UserError, match=problem):
        ServeOptions(api_key=key)
    ServeOptions(api_key="open sesame! ~")


@pytest.mark.parametrize(
    "args",
    [["--max-body", "9MB"], ["--idle", "0"], ["--idle", "nan"], ["--stall", "inf"], ["--connections", "0"]],
)
def test_limits_that_cannot_be_kept_are_rejected(mistake, args):
    assert "must be" in mistake(["serve", *args]) or args[0] == "--connections"


def test_token_prompts_are_checked_after_a_leading_bos(server):
    bos, special = byte_tokenizer().bos, byte_tokenizer().special["<|user_start|>"]
    for prompt, invalid in (
        ([bos, 5000], 5000),
        ([bos, special], special),
        ([bos, 65, bos], bos),
        ([bos, bos], bos),
        ([[bos, 65], [bos, special]], special),
        ([5000], 5000),
    ):
        answer = server.http.post(TEXT, json={"prompt": prompt, "max_tokens": 1})
        assert answer.status_code == 400
        assert answer.json()["error"]["message"].startswith(f"The prompt has token {invalid}: ")
    for ids, tokens in (([bos, 65], 2), ([65], 2), ([bos], 1), ([], 1)):
        answer = server.http.post(TEXT, json={"prompt": [ids], "max_tokens": 1})
        assert answer.json()["usage"]["prompt_tokens"] == tokens
