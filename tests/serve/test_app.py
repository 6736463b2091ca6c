"""What the process tests do not cover: the files of the page, several engines, random requests from the schema."""

import asyncio
import contextlib

import httpx
import pytest
from live_server import CHAT
from talkers import byte_tokenizer

from nanorun.infer.load import ServedModel
from nanorun.infer.request import Request, Sampling
from nanorun.serve.app import Service, build_app
from nanorun.serve.engines import RemoteEngine, RemoteModel
from nanorun.serve.metrics import Histogram
from nanorun.serve.options import RequestLimits, ServeOptions
from nanorun.text.chat import join_pieces, render_prompt


@pytest.fixture
def model(trained, monkeypatch):
    """With two engines."""
    monkeypatch.setenv("NANORUN_HOME", str(trained))
    with contextlib.closing(RemoteModel(ServeOptions(slots=2))) as model:
        model.engines.append(RemoteEngine({"model": model.name, "slots": 2}))
        model.engines[1].wait_until_ready()
        yield model


def visit(app, *requests):
    async def all_of_them():
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(app), base_url="http://localhost", timeout=60
        ) as http:
            return await asyncio.gather(*(http.request(*request[:2], **request[2]) for request in requests))

    return asyncio.run(all_of_them())


def test_only_the_files_of_the_page_are_served_with_a_strict_policy(model, tmp_path):
    (tmp_path / "index.html").write_text("<!doctype html><script src=app.js></script>")
    (tmp_path / "app.js").write_text("1")
    (tmp_path / ".secret").write_text("no")
    app = build_app(Service(model, ServeOptions()), tmp_path)
    paths = ("/", "/index.html", "/app.js", "/.secret", "/../x")
    page, index, script, *others = visit(app, *(("GET", path, {}) for path in paths))
    assert page.text == index.text
    assert page.headers["content-type"].startswith("text/html")
    assert "javascript" in script.headers["content-type"]
    assert [other.status_code for other in others] == [404, 404]
    policy = page.headers["content-security-policy"]
    assert "unsafe" not in policy
    assert "default-src 'none'" in policy


def test_requests_go_to_the_engine_with_the_least_load(model):
    service = Service(model, ServeOptions(limits=RequestLimits(queue=8)))
    asked = {"messages": [{"role": "user", "content": "loop"}], "temperature": 0}

    async def talk():
        await model.connect()
        transport = httpx.ASGITransport(build_app(service))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=60) as http:
            answers = [asyncio.create_task(http.post(CHAT, json=asked)) for _ in range(4)]
            async with asyncio.timeout(30):
                while [engine.occupancy for engine in model.engines] != [(2, 0)] * 2:
                    await asyncio.sleep(0.01)
            return await asyncio.gather(*answers)

    assert [answer.json()["choices"][0]["finish_reason"] for answer in asyncio.run(talk())] == ["length"] * 4


@pytest.mark.parametrize("stops", [(), ("e:",), ("12+",), ("so",), ("42",), ("<|python_start|>",)])
def test_streamed_events_add_up_to_the_event_of_a_request_without_streaming(trained, monkeypatch, stops):
    monkeypatch.setenv("NANORUN_HOME", str(trained))
    prompt = render_prompt([{"role": "user", "content": "sum"}], byte_tokenizer())
    with ServedModel() as model:
        common = {"stop_ids": model.stop_ids, "stop": stops, "tool": model.tool, "logprobs": 1}
        ask = [Request(prompt, Sampling(temperature=0), **common, stream=stream) for stream in (True, False)]
        said, (whole,) = (list(model.engine.events(request)) for request in ask)
    parts = join_pieces(whole.pieces)
    assert join_pieces(piece for event in said for piece in event.pieces) == parts
    assert [token_id for event in said for token_id in event.ids] == list(whole.ids)
    assert [pair for event in said for pair in event.logprobs] == list(whole.logprobs)
    assert not any(stop in part["text"] for part in parts for stop in stops if part["type"] != "output")
    expected = {"e:": "Let me se", "12+": "Let me see: ", "so": "Let me see: Quite "}
    expected["<|python_start|>"] = "Let me see: "
    assert whole.text == expected.get(stops[0] if stops else "", "Let me see: Quite so.")
    sampled = "".join(part["text"] for part in parts if part["type"] == "text")
    assert "".join(chr(token_id) for token_id, _ in whole.logprobs) == sampled, "a token is a byte here"
    assert [event.sampled_tokens for event in (said[-1], whole)] == [whole.reply.forced.count(False)] * 2


def test_a_histogram_counts_up_to_each_bound():
    histogram = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 9.0):
        histogram.add(value)
    lines = list(histogram.lines("x"))
    assert lines == [
        'x_bucket{le="1.0"} 2',
        'x_bucket{le="2.0"} 3',
        'x_bucket{le="+Inf"} 4',
        "x_sum 12.000000",
        "x_count 4",
    ]


@pytest.mark.parametrize("mode", ["positive", "negative"])
def test_random_requests_conform_to_the_schema(server, mode):
    schemathesis = pytest.importorskip("schemathesis")
    from hypothesis import HealthCheck, Phase, given, settings
    from schemathesis.checks import not_a_server_error
    from schemathesis.specs.openapi import checks

    names = ("status_code_conformance", "content_type_conformance", "response_schema_conformance")
    wanted = [not_a_server_error, *(getattr(checks, name) for name in names)]
    bounded = settings(
        max_examples=25,
        deadline=None,
        database=None,
        derandomize=True,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    for operation in (result.ok() for result in schema.get_all_operations()):
        if mode == "negative" and operation.method != "post":
            continue  # it has no invalid input

        def check(case):
            if isinstance(case.body, dict) and mode == "positive":  # short answers suffice
                case.body["max_tokens"] = 4
                case.body.pop("max_completion_tokens", None)
            case.call_and_validate(checks=wanted, timeout=60)

        cases = operation.as_strategy(generation_mode=schemathesis.GenerationMode(mode))
        bounded(given(case=cases)(check))()
    server.wait_until(server.idle)
