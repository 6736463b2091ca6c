"""Clients that disconnect, flood, stall or send garbage: no other client is affected, and no slot leaks."""

import concurrent.futures
import contextlib
import json
import signal
import socket
import subprocess
import sys
import time

import httpx
import openai
import pytest
from live_server import CHAT, ROOT, events, running
from talkers import HI

LOOP = {"messages": [{"role": "user", "content": "loop"}], "temperature": 0, "stream": True}


@contextlib.contextmanager
def streaming(server, **more):
    """An endless answer that has started."""
    with (
        httpx.Client(base_url=server.url, timeout=60) as http,
        http.stream("POST", CHAT, json={**LOOP, **more}) as stream,
    ):
        said = events(stream.iter_lines())
        next(said)
        yield said


def test_a_client_that_disconnects_frees_its_slot(narrow):
    for _ in range(3):
        with streaming(narrow) as said:
            next(said)
            assert narrow.metric("nanorun_slots_busy") == 1
        narrow.wait_until(narrow.idle)
    with pytest.raises(httpx.ReadTimeout):  # a client that does not stream may disconnect, too
        httpx.post(narrow.url + CHAT, json={**LOOP, "stream": False}, timeout=0.2)
    narrow.wait_until(narrow.idle)
    assert narrow.metric("nanorun_disconnects_total") == 4
    assert narrow.ask().json()["choices"][0]["message"]["content"] == HI


def test_a_full_queue_returns_429_with_retry_after(narrow):
    with streaming(narrow), streaming(narrow):
        narrow.wait_until(lambda: narrow.metric("nanorun_queue") == 1)
        with pytest.raises(openai.RateLimitError) as refused:
            narrow.client().chat.completions.create(model="talker", messages=LOOP["messages"])
        assert refused.value.code == "rate_limit_exceeded"
        assert 1 <= int(refused.value.response.headers["retry-after"]) <= 60
        assert narrow.http.get("/health").json()["queue"] == 1
    narrow.wait_until(narrow.idle)
    assert narrow.ask().status_code == 200


def test_small_writes_on_a_keep_alive_connection_are_not_delayed(server):
    """Without TCP_NODELAY, small writes wait for the acknowledgement of the one before: 40 ms each."""
    took = []
    for _ in range(20):
        begun = time.perf_counter()
        with server.http.stream("POST", CHAT, json={**LOOP, "max_tokens": 2}) as stream:
            assert len(list(events(stream.iter_lines()))) > 1
        took.append(time.perf_counter() - begun)
    assert min(took[10:]) < 0.035, took


def test_sigterm_finishes_running_answers_and_rejects_new_requests(narrow):
    with streaming(narrow, max_tokens=600) as said:
        narrow.process.send_signal(signal.SIGTERM)
        narrow.wait_until(lambda: narrow.http.get("/health").status_code == 503)
        refused = narrow.ask()
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "shutting_down"
        chunks = list(said)
        assert chunks[-1]["choices"][0]["finish_reason"] == "length"
    assert narrow.process.wait(20) == 0
    assert not any("Traceback" in line for line in narrow.errors)


def test_a_second_signal_stops_the_server_at_once(narrow):
    with streaming(narrow), contextlib.suppress(httpx.HTTPError):
        narrow.process.send_signal(signal.SIGTERM)
        narrow.wait_until(lambda: narrow.http.get("/health").status_code == 503)
        narrow.process.send_signal(signal.SIGINT)
        narrow.process.wait(10)
    assert narrow.process.poll() is not None


@contextlib.contextmanager
def not_reading(server):
    """A client that requests megabytes and then reads nothing."""
    body = json.dumps({**LOOP, "logprobs": True, "top_logprobs": 20, "n": 2}).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    with socket.socket() as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.connect(("127.0.0.1", server.port))
        slow.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        server.wait_until(lambda: server.metric("nanorun_slots_busy") > 0)
        yield


def test_a_slow_client_does_not_block_others(narrow):
    with not_reading(narrow):
        narrow.wait_until(narrow.idle, 60)  # both answers are complete, though the client has read nothing
        assert narrow.ask().status_code == 200
        assert narrow.metric("nanorun_open_requests") == 2, "that of the slow client, and this one"
    narrow.wait_until(lambda: narrow.metric("nanorun_open_requests") == 1)


def test_a_stalled_client_is_disconnected(trained):
    with running(trained, "--stall", "0.5") as server, not_reading(server):
        server.wait_until(lambda: server.metric("nanorun_open_requests") == 1, 60)
        server.wait_until(server.idle)
        assert server.metric("nanorun_disconnects_total") == 1


def test_an_answer_times_out(trained):
    with running(trained, "--timeout", "1") as server:
        late = server.ask("loop", n=8)
        assert late.status_code == 408
        assert late.json()["error"] == {**late.json()["error"], "type": "timeout_error", "code": "timeout"}
        with streaming(server, n=8) as said:
            assert list(said)[-1]["error"]["code"] == "timeout"
        server.wait_until(server.idle)


def test_bodies_of_ten_megabytes_are_rejected(server):
    huge = server.ask("x" * 10_000_000)
    assert (huge.status_code, huge.json()["error"]["code"]) == (413, "request_too_large")
    chunked = server.http.post(CHAT, content=(b"x" * 100_000 for _ in range(100)))
    assert chunked.status_code == 413
    assert server.ask().status_code == 200


def test_two_thousand_messages_are_truncated_or_rejected(server):
    messages = [{"role": ("user", "assistant")[at % 2], "content": f"number {at}"} for at in range(2000)]
    messages.append({"role": "user", "content": "hi"})
    asked = {"messages": messages, "temperature": 0}
    refused = server.http.post(CHAT, json=asked)
    assert refused.json()["error"]["code"] == "context_length_exceeded"
    cut = server.http.post(CHAT, json={**asked, "truncation": "auto", "max_tokens": 5})
    assert 2048 - 60 < cut.json()["usage"]["prompt_tokens"] <= 2048 - 5
    assert 1000 < int(cut.headers["nanorun-left-out"]) < 2000
    assert "nanorun-left-out" not in server.ask().headers
    many = server.http.post(CHAT, json={"messages": messages * 3})
    assert many.json()["error"]["code"] == "too_many_messages"


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"null",
        b"[]",
        b'"x"',
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"messages": [{"role": "user", "content": "x"}], "temperature": NaN}',
        b'{"messages": [{"role": "user", "content": "x"}], "model": "\\ud800"}',
        b'{"messages": [{"role": "user", "content": "x"}], "n": 1e400}',
        b'{"messages": [{"role": "user", "content": "x"}], "seed": ' + b"9" * 5000 + b"}",
    ],
)
def test_malformed_bodies_return_a_client_error(server, body):
    answer = server.http.post(CHAT, content=body, headers={"content-type": "application/json"})
    assert answer.status_code in (400, 404), answer.text
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


def test_a_lone_surrogate_becomes_the_replacement_character(server):
    body = b'{"messages": [{"role": "user", "content": "\\ud800"}], "max_tokens": 1}'
    answer = server.http.post(CHAT, content=body, headers={"content-type": "application/json"})
    assert answer.json()["usage"]["prompt_tokens"] == len("\ufffd".encode()) + 4


def test_unknown_paths_and_methods_return_404_and_405(server):
    for method, path, status in (("GET", "/nothing", 404), ("GET", CHAT, 405), ("POST", "/health", 405)):
        answer = server.http.request(method, path)
        assert answer.status_code == status
        assert answer.json()["error"]["type"] == "invalid_request_error"
    for path in ("/../pyproject.toml", "/%2e%2e/app.py", "//etc/passwd", "/docs"):
        assert server.http.get(path).status_code == 404


def test_an_api_key_is_required(trained):
    with running(trained, NANORUN_API_KEY="sesame") as server:
        assert server.client(api_key="sesame").models.list().data[0].id == "talker"
        for wrong in ("Bearer", "sesame", "Basic sesame", "Bearer sesam", "Bearer sesame2", "Bearer sésame"):
            headers = {"authorization": wrong.encode()}
            refused = server.http.get("/v1/models", headers=headers)
            assert refused.status_code == 401
            assert refused.json()["error"]["code"] == "invalid_api_key"
        with pytest.raises(openai.AuthenticationError):
            server.client(api_key="wrong").chat.completions.create(model="talker", messages=LOOP["messages"])
        assert server.http.get("/metrics").status_code == 401
        assert server.http.get("/health").status_code == 200


def test_a_local_server_accepts_local_hosts_and_no_other_origin(server):
    assert server.http.get("/v1/models", headers={"host": "evil.example"}).status_code == 403
    assert server.http.get("/v1/models", headers={"host": f"localhost:{server.port}"}).status_code == 200
    answer = server.http.get("/v1/models", headers={"origin": "http://evil.example"})
    assert "access-control-allow-origin" not in answer.headers
    assert answer.headers["content-security-policy"].startswith("default-src 'none'; script-src 'self'")
    assert answer.headers["x-content-type-options"] == "nosniff"
    # a page of another origin can send this without a preflight; it is not parsed as JSON
    asked = json.dumps({"messages": LOOP["messages"]})
    plain = server.http.post(CHAT, content=asked, headers={"content-type": "text/plain"})
    assert plain.status_code == 400


def test_an_allowed_origin_may_call_the_api(trained):
    with running(trained, "--cors", "http://localhost:3000") as server:
        for origin, allowed in (("http://localhost:3000", True), ("http://evil.example", False)):
            asked = {"origin": origin, "access-control-request-method": "POST"}
            answer = server.http.options(CHAT, headers=asked)
            assert ("access-control-allow-origin" in answer.headers) == allowed


def test_many_clients_of_which_a_third_disconnects(server):
    def one(number):
        try:
            with streaming(server, max_tokens=120) as said:
                return sum(1 for _ in zip(said, range(5 if number % 3 == 0 else 10_000), strict=False))
        except httpx.HTTPError as error:
            return error

    with concurrent.futures.ThreadPoolExecutor(32) as pool:
        results = list(pool.map(one, range(48)))
        assert all(isinstance(count, int) and count > 0 for count in results), results
    server.wait_until(server.idle)
    assert server.http.get("/health").status_code == 200


def test_missing_packages_are_reported_in_one_sentence():
    program = "import sys; sys.modules['uvicorn'] = None; from nanorun.cli import main; main(['serve'])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 2
    assert done.stderr.splitlines() == [
        "nanorun: The server needs uvicorn, which is not installed: pip install 'nanorun[serve]'."
    ]


def test_a_port_in_use_is_reported_before_the_model_is_loaded(server):
    begun = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "nanorun", "serve", "--port", str(server.port)],
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert done.returncode == 2
    assert "choose another --port" in done.stderr
    assert time.monotonic() - begun < 30
