"""Servers for these tests, which are left out where the server's packages are missing."""

from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("fastapi", reason="the server's packages are not installed: pip install 'nanorun[serve]'")
pytest.importorskip("openai", reason="needs the openai client")

from live_server import Server, running
from openai import OpenAI


@pytest.fixture(scope="session")
def server(trained: Path) -> Iterator[Server]:
    with running(trained) as server:
        yield server
        assert not any("Traceback" in line for line in server.errors), "".join(server.errors)


@pytest.fixture(scope="session")
def client(server: Server) -> OpenAI:
    return server.client()


@pytest.fixture
def narrow(trained: Path) -> Iterator[Server]:
    """One answer at a time, and one may wait."""
    with running(trained, "--slots", "1", "--queue", "1", "--drain", "20") as server:
        yield server
