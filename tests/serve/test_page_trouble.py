"""The page with errors, by keyboard, on a phone, and with other models and servers."""

import functools
import json

import httpx
import pytest
from live_server import CHAT, running
from page_driver import answers, ask, chunks, done, expect, questions, script
from talkers import HI, STORY

PHONE = {"viewport": {"width": 390, "height": 844}, "has_touch": True, "is_mobile": True}


# -- errors ------------------------------------------------------------------------------------------------


def _refusal(status, code):
    return {
        "status": status,
        "body": json.dumps({"error": {"message": "The server's own words.", "code": code}}),
    }


TROUBLE = [
    ({"status": 429, "headers": {"retry-after": "3"}}, "is at capacity: try again in 3 s."),
    (_refusal(503, "shutting_down"), "The server is shutting down: try again when it is back."),
    (_refusal(503, "engine_failed"), "The model has stopped: restart the server, then try again."),
    (_refusal(503, "engine_silent"), "The server's own words."),
    ({"status": 503}, "The server answered with 503."),
    ({"status": 500, "body": "<h1>oops</h1>"}, "The server answered with 500."),
    ({"status": 400, "body": '{"error": {"message": "Too <b>odd</b>."}}'}, "Too <b>odd</b>."),
    ({"body": chunks({"content": "Half a"}, end=False)}, "lost before the answer was complete: try again."),
    ({"body": 'data: {"error": {"message": "It broke."}}\n\n'}, "It broke."),
    ({"body": "data: {nonsense\n\n"}, "The server's response is malformed: try again."),
    (None, "The server cannot be reached: check that it is running, then try again."),
]


def _respond(answer, route):
    if answer is None:
        route.abort()
    else:
        route.fulfill(**answer)


def test_an_error_is_one_sentence_with_a_retry_and_no_input_is_lost(page):
    for answer, sentence in TROUBLE:
        respond = functools.partial(_respond, answer)
        page.route(f"**{CHAT}", respond)
        if questions(page):
            page.get_by_role("button", name="Retry").click()
        else:
            ask(page, "hi")
        expect(page.locator(".trouble p")).to_contain_text(sentence)
        page.unroute(f"**{CHAT}")
    page.reload()
    expect(page.locator(".trouble p")).to_contain_text(TROUBLE[-1][1])
    assert questions(page) == ["hi"]
    page.get_by_role("button", name="Retry").click()
    expect(answers(page)).to_have_text(HI)
    expect(page.locator(".trouble")).to_have_count(0)


def test_a_full_server_is_reported_and_the_retry_succeeds(narrow, visit):
    page = visit(narrow)
    loop = {"messages": [{"role": "user", "content": "loop"}], "temperature": 0, "stream": True}
    with httpx.Client(base_url=narrow.url, timeout=60) as http:
        with http.stream("POST", CHAT, json=loop), http.stream("POST", CHAT, json=loop):
            narrow.wait_until(lambda: narrow.metric("nanorun_queue") == 1)
            ask(page, "hi")
            expect(page.locator(".trouble p")).to_contain_text("is at capacity: try again in")
        narrow.wait_until(narrow.idle)
    page.get_by_role("button", name="Retry").click()
    expect(answers(page)).to_have_text(HI)


@pytest.mark.parametrize("device", [{}, PHONE], ids=["desktop", "phone"])
def test_a_toast_covers_no_error_and_no_message(server, visit, device):
    page = visit(server, **device)
    for question in ("hi", "sum") * 3:
        ask(page, question)
    page.route(f"**{CHAT}", lambda route: route.abort())
    page.get_by_label("Regenerate the answer").last.click()
    expect(page.locator(".trouble p")).to_contain_text("cannot be reached")
    expect(page.locator("#toast")).to_contain_text("The answer was replaced.")
    page.wait_for_function("""() => {
      const [error, view, toast] = ['.trouble', '#scroll', '#toast'].map(
        (name) => document.querySelector(name).getBoundingClientRect());
      return error.bottom <= view.bottom && view.bottom <= toast.top;
    }""")
    page.get_by_role("button", name="Undo").click()
    expect(answers(page)).to_have_count(6)
    expect(page.locator(".trouble")).to_have_count(0)


def test_a_deleted_conversation_can_be_restored_on_a_phone(server, visit):
    page = visit(server, **PHONE)
    ask(page, "hi")
    page.get_by_label("Conversations", exact=True).and_(page.locator("button")).tap()
    page.get_by_label("Delete hi").tap()
    page.get_by_role("button", name="Undo").tap()  # above the open drawer
    expect(page.locator("#list .open")).to_have_text(["hi"])


def conversation(name, **changes):
    messages = [{"role": "user", "content": name}, {"role": "assistant", "content": "yes", "finish": "stop"}]
    return {"id": name, "title": "", "updated": 1, "messages": messages, **changes}


def test_damaged_storage_loses_only_the_damaged_entries(server, visit):
    kept = {
        "nanorun:settings": '{"theme": 7, "temperature": "hot", "top_p": 5',
        "nanorun:chat:good": json.dumps(conversation("good")),
        "nanorun:chat:torn": '{"id": "torn", "mess',
        "nanorun:chat:odd": json.dumps(conversation("odd", messages=[None])),
        "nanorun:chat:null": "null",
        "other": "not ours",
    }
    page = visit(server, f"if (!localStorage.other) Object.assign(localStorage, {json.dumps(kept)})")
    expect(page.locator("#notice")).to_contain_text("3 conversations in this browser could not be read")
    page.get_by_role("button", name="good", exact=True).click()
    expect(answers(page)).to_have_text("yes")
    ask(page, "hi")
    expect(answers(page).nth(1)).to_have_text(HI)
    page.reload()
    expect(page.locator("#notice")).to_be_hidden()
    assert page.evaluate("localStorage['nanorun:damaged:torn']") == kept["nanorun:chat:torn"]


@pytest.mark.parametrize(
    ("start", "sentence"),
    [
        (
            "Storage.prototype.setItem = () => { throw new DOMException('', 'QuotaExceededError'); };",
            "no room left",
        ),
        (
            "Object.defineProperty(window, 'localStorage', { get() { throw new DOMException(''); } });",
            "keep nothing",
        ),
    ],
)
def test_the_page_works_with_full_or_forbidden_storage(server, visit, start, sentence):
    page = visit(server, start)
    script(page, {"content": "yes"})
    ask(page, "hi")
    expect(answers(page)).to_have_text("yes")
    expect(page.locator("#notice")).to_contain_text(sentence)


# -- accessibility -----------------------------------------------------------------------------------------


def test_a_conversation_that_exceeds_the_context_shows_what_was_left_out(page):
    ask(page, "Once upon a time. " * 30)
    expect(page.get_by_text("left out", exact=False)).to_have_count(0)
    for _ in range(4):
        ask(page, "And again upon a time. " * 30)
    expect(page.locator("article.answer").last).to_contain_text("messages are left out")


def test_every_action_works_by_keyboard(page):
    page.keyboard.type("loop")  # the message has the focus at the start
    page.keyboard.press("Shift+Enter")
    page.keyboard.press("Backspace")
    page.keyboard.press("Enter")
    expect(answers(page)).to_contain_text("tick")
    page.keyboard.press("Escape")
    expect(page.locator(".stats")).to_contain_text("stopped")
    page.keyboard.press("ArrowUp")
    expect(page.get_by_role("textbox", name="Edit the message")).to_be_focused()
    page.keyboard.press("Control+a")
    page.keyboard.type("hi")
    page.keyboard.press("Enter")
    expect(answers(page)).to_have_text(HI)
    page.keyboard.press("Control+k")
    expect(page.locator("#empty")).to_be_visible()
    page.keyboard.type("sum")
    page.keyboard.press("Enter")
    expect(answers(page)).to_contain_text("Quite so.")
    page.keyboard.press("Alt+ArrowDown")
    expect(answers(page)).to_have_text(HI)
    page.keyboard.type("?")  # in a message it is a question mark
    expect(page.get_by_label("Message", exact=True)).to_have_value("?")
    page.locator("#open-keys").focus()
    page.keyboard.press("?")
    expect(page.get_by_role("dialog", name="Keyboard shortcuts")).to_be_visible()
    page.keyboard.press("Escape")
    page.keyboard.press("Control+b")
    expect(page.locator("#drawer")).to_be_hidden()


def test_every_focusable_element_has_a_name_and_a_focus_ring(page):
    ask(page, "sum")
    described = """() => {
      const node = document.activeElement, style = getComputedStyle(node);
      const name = node.ariaLabel || node.labels?.[0]?.textContent || node.textContent;
      const framed = { text: '#composer', search: '#search' }[node.id]; // whose border is their ring
      const frame = framed && getComputedStyle(document.querySelector(framed)).borderColor;
      return [node.tagName, name.trim(), style.outlineStyle !== 'none' || frame === 'rgb(194, 65, 12)'];
    }"""
    stops = []
    for _ in range(24):
        page.keyboard.press("Tab")
        stops.append(tuple(page.evaluate(described)))
    reached = {name for _, name, _ in stops}
    wanted = {"Settings", "Copy the answer", "Regenerate the answer", "Edit the message", "This conversation"}
    assert wanted <= reached
    assert [stop for stop in stops if stop[0] != "BODY" and not (stop[1] and stop[2])] == []


def test_a_screen_reader_announces_the_answer_once(page):
    ask(page, "hi")
    expect(page.locator("#announce")).to_have_text(f"The answer is complete. {HI}")
    expect(page.get_by_role("log")).to_have_attribute("aria-live", "off")


def test_a_phone_has_a_drawer_and_never_scrolls_sideways(server, visit):
    page = visit(server, **PHONE)
    expect(page.locator("#model")).to_have_attribute("data-state", "ready")
    sideways = """() => {
      const inner = document.querySelector('#scroll');
      return document.documentElement.scrollWidth - innerWidth + inner.scrollWidth - inner.clientWidth;
    }"""
    assert page.evaluate(sideways) <= 0
    script(page, {"content": f"{'long' * 200}\n\n```\n{'wide ' * 100}\n```\n\n| {'table ' * 60}"})
    ask(page, "w" * 300)
    assert page.evaluate(sideways) <= 0
    expect(page.locator("#drawer")).to_be_hidden()
    page.get_by_label("Conversations", exact=True).and_(page.locator("button")).tap()
    expect(page.locator("#drawer")).to_be_visible()
    page.get_by_role("button", name="New conversation").tap()
    expect(page.locator("#drawer")).to_be_hidden()
    expect(page.locator("#empty")).to_be_visible()
    page.keyboard.press("Control+,")
    assert page.evaluate(sideways) <= 0
    sizes = """() => {
      const typed = document.querySelectorAll('textarea, input:not([type=radio], [type=checkbox], [type=range])');
      return [...typed].map(node => parseFloat(getComputedStyle(node).fontSize));
    }"""
    assert min(page.evaluate(sizes)) >= 16, "with a smaller font a phone zooms in"


def test_scrolling_up_stops_following_the_answer(server, visit, slowly):
    page = visit(server, viewport={"width": 900, "height": 360})
    slowly(page, "a line\n\n")
    ask(page, "long", wait=False)
    scroll = page.locator("#scroll").element_handle()
    page.wait_for_function("scroll => scroll.scrollTop > 60", arg=scroll)
    page.mouse.move(500, 150)
    page.mouse.wheel(0, -20)  # a small movement suffices
    behind = "scroll => scroll.scrollHeight - scroll.scrollTop - scroll.clientHeight > 100"
    page.wait_for_function(behind, arg=scroll)
    page.keyboard.press("PageUp")
    page.mouse.wheel(0, -4000)
    page.wait_for_function("scroll => scroll.scrollTop === 0", arg=scroll)
    before = len(answers(page).text_content())
    page.wait_for_function(
        "n => document.querySelector('.answer .body').textContent.length > n + 50", arg=before
    )
    assert scroll.evaluate("scroll => scroll.scrollTop") == 0
    page.get_by_role("button", name="Newest").click()
    page.wait_for_function("s => s.scrollTop + s.clientHeight > s.scrollHeight - 60", arg=scroll)
    page.keyboard.press("Escape")
    done(page)


# -- other models ------------------------------------------------------------------------------------------


def test_a_base_model_continues_a_text_and_is_labelled(trained, visit):
    with running(trained, "--model", "writer") as server:
        page = visit(server)
        expect(page.locator("#fine")).to_have_text(
            "A base model: it continues text and does not answer questions."
        )
        page.get_by_role("button", name="Settings").click()
        page.get_by_label("Temperature").fill("0")
        page.get_by_label("Maximum tokens").fill("12")
        page.get_by_role("button", name="Done").click()
        ask(page, STORY[:7])
        first = answers(page).text_content()
        page.get_by_role("button", name="Continue").click()
        done(page)
        whole = answers(page).text_content()
        assert whole.startswith(first)
        assert len(whole) > len(first)
        assert STORY.startswith(STORY[:7] + whole)


def test_suggestions_mention_entities_of_the_sample_world(page):
    from nanorun.data.sample.world import ENTITIES
    from nanorun.serve.app import SUGGESTIONS

    cards = page.get_by_role("group", name="Suggestions").get_by_role("button")
    expect(cards).to_have_count(4)
    texts = " ".join(
        text for (data, _), known in SUGGESTIONS.items() if data == "sample" for text in known.values()
    )
    assert {name for name in ("Jasper", "Candlebay", "Odo") if name in texts} <= set(ENTITIES)
    cards.nth(1).click()
    expect(answers(page)).to_have_count(1)
    page.keyboard.press("Escape")
    done(page)


def test_the_api_key_is_requested_and_stored_with_the_tab_and_an_unreachable_server_is_reported(
    trained, visit
):
    with running(trained, NANORUN_API_KEY="sesame") as server:
        page = visit(server)
        expect(page.locator("#notice")).to_have_text(
            "The server requires an API key: enter it in the settings.Settings"
        )
        ask(page, "hi")
        expect(page.locator(".trouble p")).to_have_text(
            "The server requires an API key: enter it in the settings."
        )
        page.locator("#notice").get_by_role("button", name="Settings").click()
        expect(page.get_by_label("API key")).to_be_focused()
        page.keyboard.type("abracadabra")
        page.keyboard.press("Tab")
        expect(page.locator("#notice")).to_contain_text("does not accept this API key: correct it")
        page.get_by_label("API key").fill("sesame")
        page.get_by_role("button", name="Done").click()
        expect(page.locator("#notice")).to_be_hidden()
        page.get_by_role("button", name="Retry").click()
        expect(answers(page)).to_have_text(HI)
        assert (
            page.evaluate("Object.keys(localStorage).filter(k => localStorage[k].includes('sesame'))") == []
        )
        page.reload()
        expect(page.locator("#model-name")).to_have_text("talker")

        ask(page, "loop", wait=False)
        expect(answers(page).nth(1)).to_contain_text("tick")
        server.process.kill()
        expect(page.locator(".trouble p")).to_contain_text(
            "The connection was lost before the answer was complete"
        )
        expect(answers(page).nth(1)).to_contain_text("tick")
        page.get_by_role("button", name="Retry").click()
        expect(page.locator(".trouble p")).to_contain_text("The server cannot be reached")
        assert questions(page) == ["hi", "loop"]
