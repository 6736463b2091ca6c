"""The engine process: it emits the events of an engine, exits with the server, and its death is reported."""

import asyncio
import concurrent.futures
import contextlib
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from live_server import CHAT, ROOT, events, running
from talkers import HI, byte_tokenizer

from nanorun.errors import UserError
from nanorun.infer.engine import Settings
from nanorun.infer.load import ServedModel
from nanorun.infer.request import Request, Sampling
from nanorun.serve.app import Service, build_app
from nanorun.serve.engines import RemoteEngine, RemoteModel
from nanorun.serve.options import ServeOptions
from nanorun.text.chat import join_pieces, render_prompt

LOOP = {"messages": [{"role": "user", "content": "loop"}], "temperature": 0}
linux = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")


def prompt(question):
    return render_prompt([{"role": "user", "content": question}], byte_tokenizer())


def gone(pid):
    """Whether the process is dead, or a zombie whose exit code was not collected yet."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] == "Z"
    except FileNotFoundError:
        return True


def wait_until(condition, seconds=20):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


async def all_events(engine, request):
    arrived = asyncio.Queue()
    engine.submit(request, arrived.put_nowait)
    said = []
    while sum(event.reply is not None for event in said) < request.samples:
        said.append(await asyncio.wait_for(arrived.get(), 30))
        assert not isinstance(said[-1], BaseException), said[-1]
    return said


@pytest.fixture
def remote(trained, monkeypatch):
    monkeypatch.setenv("NANORUN_HOME", str(trained))
    with contextlib.closing(RemoteModel(ServeOptions(slots=2))) as model:
        yield model


def test_a_remote_engine_emits_the_events_of_a_local_one(remote):
    common = {"sampling": Sampling(temperature=0), "stop_ids": remote.stop_ids}
    ask = [
        {"prompt": prompt("sum"), "logprobs": 3, "tool": True},  # calls the calculator
        {"prompt": prompt("hi"), "stop": ("o",), "samples": 2},
        {"prompt": prompt("loop"), "max_tokens": 7},
    ]

    def requests(model):
        return [
            Request(**{**common, **asked, "tool": model.tool if "tool" in asked else None}) for asked in ask
        ]

    async def there():
        await remote.connect()
        return [await all_events(remote.engines[0], request) for request in requests(remote)]

    def plain(said):
        """By sample, without timings: an event holds one token or several, depending on the clock."""
        told = []
        for sample in sorted({event.sample for event in said}):
            events = [event for event in said if event.sample == sample]
            ids = [token_id for event in events for token_id in event.ids]
            parts = join_pieces(piece for event in events for piece in event.pieces)
            logprobs = [pair for event in events for pair in event.logprobs]
            reply = replace(events[-1].reply, first_token_s=0, seconds=0, logprobs=None)
            told.append((ids, parts, logprobs, reply))
        return told

    elsewhere = asyncio.run(there())
    with ServedModel(settings=Settings(slots=2)) as model:
        here = [list(model.engine.events(request)) for request in requests(model)]
        known = (
            model.name,
            model.step,
            model.is_chat_model,
            model.config.model.total_parameters,
            model.stop_ids,
            model.tool_name,
        )
    assert any(here[0][-1].reply.forced), "the tool was called"
    assert [plain(said) for said in elsewhere] == [plain(said) for said in here]
    assert known == (
        remote.name,
        remote.step,
        remote.is_chat_model,
        remote.parameters,
        remote.stop_ids,
        remote.tool_name,
    )


def test_a_cancelled_request_frees_its_slots(remote):
    engine = remote.engines[0]

    async def talk():
        await remote.connect()
        for _ in range(3):
            arrived = asyncio.Queue()
            endless = Request(prompt("loop"), Sampling(temperature=0), stop_ids=remote.stop_ids, samples=3)
            key = engine.submit(endless, arrived.put_nowait)
            while engine.occupancy != (2, 1):
                await asyncio.wait_for(arrived.get(), 30)
            engine.cancel(key)
            engine.cancel(key)
            async with asyncio.timeout(30):
                while engine.occupancy != (0, 0):
                    await asyncio.sleep(0.01)
        said = await all_events(
            engine, Request(prompt("hi"), Sampling(temperature=0), stop_ids=remote.stop_ids)
        )
        return said[-1].reply.text

    assert asyncio.run(talk()) == HI


@linux
def test_the_server_itself_loads_no_weights(server):
    (engine,) = server.engines
    maps = [Path(f"/proc/{pid}/maps").read_text() for pid in (server.process.pid, engine)]
    assert ["libtorch" in loaded for loaded in maps] == [False, True]


@linux
def test_a_killed_engine_is_reported(trained):
    with running(trained) as server, concurrent.futures.ThreadPoolExecutor() as pool:
        (engine,) = server.engines
        whole = pool.submit(httpx.post, server.url + CHAT, json=LOOP, timeout=60)
        with server.http.stream("POST", CHAT, json={**LOOP, "stream": True}) as stream:
            said = events(stream.iter_lines())
            next(said)
            server.wait_until(lambda: httpx.get(f"{server.url}/health").json()["slots_busy"] == 2)
            os.kill(engine, signal.SIGKILL)
            assert list(said)[-1]["error"]["code"] == "engine_failed"
        for answer in (whole.result(), server.ask()):
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_failed")
        health = server.http.get("/health")
        assert (health.status_code, health.json()["status"]) == (503, "broken")
        wait_until(lambda: any("was ended by SIGKILL" in line for line in server.errors))
        assert not any("Traceback" in line for line in server.errors), server.errors
        assert server.stop() == 0


@linux
@pytest.mark.parametrize("stuck", [False, True])
def test_no_engine_outlives_a_server_that_is_killed(trained, stuck):
    with running(trained) as server:
        (engine,) = server.engines
        if stuck:  # it cannot read the end of its socket
            os.kill(engine, signal.SIGSTOP)
        server.process.kill()
        wait_until(lambda: gone(engine))


@linux
def test_engines_ignore_signals(trained):
    with running(trained) as server:
        (engine,) = server.engines
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            os.kill(engine, number)
        assert os.getpgid(engine) != os.getpgid(server.process.pid), "Ctrl-C goes to the server alone"
        assert server.ask().json()["choices"][0]["message"]["content"] == HI
        assert server.stop() == 0
        assert gone(engine)


@linux
def test_an_interrupted_start_exits_at_once_with_its_engine(trained):
    with subprocess.Popen(
        [sys.executable, "-m", "nanorun", "serve", "--port", "0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "NANORUN_HOME": str(trained)},
    ) as server:
        try:
            assert server.stderr.readline() == "Loading the model ...\n"
            children = Path(f"/proc/{server.pid}/task/{server.pid}/children")
            wait_until(lambda: children.read_text())
            (engine,) = map(int, children.read_text().split())
            server.send_signal(signal.SIGINT)
            assert server.wait(4) == 130
            assert gone(engine)
            assert "Traceback" not in server.stderr.read()
        finally:
            server.kill()


def test_requests_go_to_the_engines_that_still_run(remote):
    wanted = {"model": remote.name, "slots": 2}
    remote.engines.append(RemoteEngine(wanted))
    remote.engines[1].wait_until_ready()
    service = Service(remote, ServeOptions())
    asked = {"messages": [{"role": "user", "content": "hi"}], "temperature": 0}

    async def talk():
        await remote.connect()
        remote.engines[0].process.kill()
        async with asyncio.timeout(30):
            while not remote.engines[0].broken:
                await asyncio.sleep(0.01)
        transport = httpx.ASGITransport(build_app(service))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=60) as http:
            return await asyncio.gather(*(http.post(CHAT, json=asked) for _ in range(4)))

    answers = [answer.json() for answer in asyncio.run(talk())]
    assert [answer["choices"][0]["message"]["content"] for answer in answers] == [HI] * 4
    assert service.health()[0] == 503


def serve(home, *args):
    return subprocess.run(
        [sys.executable, "-m", "nanorun", "serve", "--port", "0", *args],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "NANORUN_HOME": str(home)},
        timeout=60,
    )


def test_a_model_that_cannot_be_loaded_is_reported_in_one_sentence(trained, tmp_path):
    for home, args, named in ((trained, ("--model", "nobody"), "nobody"), (tmp_path, (), "no trained model")):
        done = serve(home, *args)
        assert done.returncode == 2
        loading, sentence = done.stderr.splitlines()
        assert loading == "Loading the model ..."
        assert sentence.startswith("nanorun: ")
        assert named in sentence


def test_an_engine_that_dies_while_loading_is_reported_in_one_sentence():
    engine = RemoteEngine({"slots": 1})
    with contextlib.closing(engine):
        engine.process.kill()
        with pytest.raises(UserError, match="ended by SIGKILL"):
            engine.wait_until_ready()
