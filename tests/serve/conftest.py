"""Servers for these tests, which are skipped if the packages of the server are missing."""

import http.server
import json
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

pytest.importorskip("fastapi", reason="the server's packages are not installed: pip install 'nanorun[serve]'")
pytest.importorskip("openai", reason="needs the openai client")

from live_server import CHAT, Server, running
from openai import OpenAI
from page_driver import expect

DESKTOP = {"width": 1280, "height": 800}
GREEDY = "localStorage['nanorun:settings'] ??= JSON.stringify({ temperature: 0 });"


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
    """One slot, and a queue of one."""
    with running(trained, "--slots", "1", "--queue", "1", "--drain", "20") as server:
        yield server


@pytest.fixture(scope="module")
def browser():
    """The system's Chromium: no browser is ever downloaded."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="needs playwright")
    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if chromium is None:
        pytest.skip("Chromium is not installed: apt install chromium")
    with sync_api.sync_playwright() as playwright:
        # Chromium's sandbox does not work as root, and it only loads our page.
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def visit(browser):
    """Opens the page, and checks at the end that it violated no policy and requested no other origin."""
    opened, broken, asked = [], [], []

    def open_page(server, start=GREEDY, **options):
        context = browser.new_context(reduced_motion="reduce", **{"viewport": DESKTOP, **options})
        context.set_default_timeout(20_000)
        page = context.new_page()
        page.on("pageerror", lambda error: broken.append(str(error)))
        page.on("console", lambda message: broken.append(message.text) if _is_breach(message.text) else None)
        page.on("request", lambda request: asked.append(request.url))
        page.add_init_script(start)
        page.goto(server.url)
        opened.append((context, server.url))
        return page

    yield open_page
    for context, _ in opened:
        context.close()
    assert broken == []
    origins = {urlsplit(url).netloc for _, url in opened}
    assert [url for url in asked if urlsplit(url).netloc not in origins and not url.startswith("blob:")] == []


def _is_breach(text):
    return any(word in text for word in ("Content Security Policy", "Content-Security-Policy", "Trusted"))


@pytest.fixture
def page(server, visit):
    page = visit(server)
    expect(page.locator("#model")).to_have_attribute("data-state", "ready")
    yield page
    page.close()
    server.wait_until(server.idle)


@pytest.fixture
def slowly():
    """Streams an answer for as long as a test needs, which no small model does."""
    stop = threading.Event()

    class Slow(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            self.send_response(200)
            self.send_header("content-type", "text/event-stream")
            self.end_headers()
            word = {"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": None}]}
            try:
                while not stop.is_set():
                    self.wfile.write(f"data: {json.dumps(word)}\n\n".encode())
                    time.sleep(0.02)
            except OSError:
                pass  # the page disconnected

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Slow)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    text = ""

    def route(page, word):
        nonlocal text
        text = word
        url = f"http://127.0.0.1:{server.server_port}/"
        page.route(f"**{CHAT}", lambda route: route.continue_(url=url))

    yield route
    stop.set()
    server.shutdown()
    server.server_close()
