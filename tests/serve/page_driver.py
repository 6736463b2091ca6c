"""Helpers of the tests of the page."""

import json

from live_server import CHAT

try:
    from playwright.sync_api import expect
except ModuleNotFoundError:
    expect = None  # and the fixtures in conftest.py skip
else:
    expect.set_options(timeout=20_000)  # a machine may be busy with other tests


def ask(page, text, wait=True):
    asked = page.locator("article.question").count()
    page.get_by_label("Message", exact=True).fill(text)
    page.keyboard.press("Enter")
    expect(page.locator("article.question")).to_have_count(asked + 1)
    if wait:
        done(page)


def done(page):
    expect(page.get_by_role("button", name="Send", exact=True)).to_be_visible()


def answers(page):
    return page.locator("article.answer .body")


def questions(page):
    return page.locator("article.question .bubble").all_text_contents()


def chunks(*deltas, end=True):
    """A stream that our model would not generate."""
    frames = [{"choices": [{"index": 0, "delta": delta, "finish_reason": None}]} for delta in deltas]
    lines = [f"data: {json.dumps(frame)}\n\n" for frame in frames]
    if end:
        last = {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}
        lines += [f"data: {json.dumps(last)}\n\n", "data: [DONE]\n\n"]
    return "".join(lines)


def script(page, *deltas):
    def fulfil(route):
        route.fulfill(body=chunks(*deltas), content_type="text/event-stream")

    page.route(f"**{CHAT}", fulfil)
