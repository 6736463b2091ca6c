"""The page in Chromium, on the real server: chatting, text that stays text, conversations, settings."""

import json

import pytest
from live_server import CHAT
from page_driver import answers, ask, done, expect, questions, script
from talkers import ANSWERS, EVIL, HI, byte_tokenizer

NASTY = "<img src=x onerror=\"document.title='owned'\"><b>bold</b> &amp; <|assistant_end|><script>1</script>"


# -- chatting ----------------------------------------------------------------------------------------------


def test_a_question_gets_an_answer_with_its_speed(page):
    ask(page, "hi")
    expect(answers(page)).to_have_text(HI)
    expect(page.locator(".stats")).to_contain_text("tokens/s")
    expect(page.locator(".stats")).to_contain_text(f"{len(HI.encode()) + 1} tokens")
    expect(page.get_by_label("Message", exact=True)).to_have_value("")
    expect(page.get_by_role("heading", level=1)).to_have_text("hi")
    assert page.title() == "hi · nanorun"


STOP_WHEN_IT_HAS_GROWN = """() => {
  window.lengths = new Set();
  const watch = new MutationObserver(() => {
    const length = document.querySelector('.answer .body')?.textContent.length ?? 0;
    window.lengths.add(length);
    if (window.lengths.size < 5 || length < 'tick tock tick'.length) return;
    watch.disconnect();
    document.querySelector('[aria-label=Stop]').click();
  });
  watch.observe(document.querySelector('#log'), { childList: true, subtree: true });
}"""


def test_stop_keeps_the_text_so_far_and_frees_the_slot(page, server):
    page.evaluate(STOP_WHEN_IT_HAS_GROWN)
    left = server.metric("nanorun_disconnects_total")
    ask(page, "loop", wait=False)
    expect(page.locator(".stats")).to_contain_text("stopped")
    done(page)
    server.wait_until(lambda: server.metric("nanorun_disconnects_total") == left + 1)
    server.wait_until(server.idle)
    said = answers(page).text_content()
    assert len(said) >= max(page.evaluate("[...window.lengths]")) > min(page.evaluate("[...window.lengths]"))
    assert said.startswith("tick tock tick")
    tokens = int(page.locator(".stats .count").text_content().removesuffix(" tokens"))
    assert len(said) <= tokens <= len(said) + 1, "a token is a letter here; a space at the end is not shown"
    page.get_by_role("button", name="New conversation").click()  # a partial answer confuses a tiny model
    ask(page, "hi")
    expect(answers(page)).to_have_text(HI)


def test_regenerate_replaces_the_answer(page):
    ask(page, "hi")
    with page.expect_request(f"**{CHAT}") as again:
        page.get_by_label("Regenerate the answer").click()
    done(page)
    assert again.value.post_data_json["messages"] == [{"role": "user", "content": "hi"}]
    expect(answers(page)).to_have_count(1)
    expect(answers(page)).to_have_text(HI)


def test_an_edited_question_replaces_later_messages_with_undo(page):
    ask(page, "sum")
    ask(page, "hi")
    page.locator("article.question").first.hover()
    page.get_by_label("Edit the message").first.click()
    page.get_by_role("textbox", name="Edit the message").fill("half")
    page.get_by_role("textbox", name="Edit the message").press("Enter")
    expect(answers(page)).to_have_count(1)
    done(page)
    assert questions(page) == ["half"]
    expect(answers(page)).to_contain_text("ab")
    page.get_by_role("button", name="Undo").click()
    assert questions(page) == ["sum", "hi"]
    expect(answers(page).nth(1)).to_have_text(HI)


def test_editing_a_question_restarts_its_answer(page, server):
    ask(page, "loop", wait=False)
    expect(answers(page)).to_contain_text("tick")
    page.get_by_label("Edit the message").click()
    page.get_by_role("textbox", name="Edit the message").fill("hi")
    page.keyboard.press("Enter")
    expect(answers(page)).to_have_text(HI)
    done(page)
    assert questions(page) == ["hi"]
    server.wait_until(server.idle)


def test_reload_keeps_the_conversation_the_draft_and_a_partial_answer(page):
    ask(page, "hi")
    page.get_by_label("Message", exact=True).fill("not yet sent")
    page.reload()
    expect(answers(page)).to_have_text(HI)
    expect(page.get_by_label("Message", exact=True)).to_have_value("not yet sent")
    ask(page, "loop", wait=False)
    expect(answers(page).nth(1)).to_contain_text("tick tock")
    page.reload()
    expect(answers(page).nth(1)).to_contain_text("tick tock")
    expect(page.locator(".stats").nth(1)).to_contain_text("the page was closed before the end")


def test_a_tool_call_is_a_block_and_is_sent_back_to_the_model(page):
    ask(page, "sum")
    call = page.get_by_role("group", name="Tool: calculator")
    expect(call.locator("code")).to_have_text("12+30")
    expect(call.locator("output")).to_have_text("42")
    expect(answers(page)).to_have_text("Let me see: calculator12+30→42Quite so.")
    with page.expect_request(f"**{CHAT}") as next_one:
        ask(page, "hi")
    sent = next_one.value.post_data_json["messages"][1]
    assert sent["nanorun_parts"] == ANSWERS["sum"]
    assert sent["content"] == "Let me see: Quite so."


def test_an_output_that_the_model_made_up_is_marked(page):
    parts = [{"type": "python", "text": "a = 1\nprint(a)"}, {"type": "guess", "text": "2"}]
    script(page, {"nanorun_parts": parts})
    ask(page, "run")
    expect(page.get_by_role("group", name="Tool: python")).to_contain_text("made up by the model")


# -- text stays text ---------------------------------------------------------------------------------------


def test_input_is_shown_and_encoded_as_plain_text(page, server):
    with page.expect_request(f"**{CHAT}") as sent:
        ask(page, NASTY, wait=False)
    page.keyboard.press("Escape")
    done(page)
    assert questions(page) == [NASTY]
    assert page.locator("article.question .bubble *").count() == 0
    assert page.locator("#list").get_by_role("button", name=NASTY[:30]).count() >= 1
    asked = {**sent.value.post_data_json, "stream": False, "max_tokens": 1}
    asked.pop("stream_options")
    assert asked["messages"] == [{"role": "user", "content": NASTY}]
    usage = server.http.post(CHAT, json=asked).json()["usage"]
    assert usage["prompt_tokens"] == len(NASTY.encode()) + 4, "every byte is a token, and none is special"
    page.reload()
    assert questions(page) == [NASTY]
    assert page.title() != "owned"


def test_an_answer_never_becomes_markup(page):
    said = f"{NASTY}\n\n- {NASTY}\n\n## {NASTY}\n\n> {NASTY}\n\n```<i>\n{NASTY}\n```\n\n**{NASTY}** [x](javascript:1)"
    call = [{"type": "python", "text": NASTY}, {"type": "output", "text": NASTY}]
    script(page, {"content": said}, {"nanorun_parts": call}, {"content": NASTY})
    ask(page, "go")
    shown = answers(page).inner_text()
    assert shown.count(NASTY) == 9
    tags = page.evaluate("[...new Set([...document.querySelectorAll('#log .body *')].map(n => n.tagName))]")
    ours = "DIV SPAN P UL LI H4 BLOCKQUOTE PRE CODE STRONG BUTTON svg use"
    assert set(tags) <= set(ours.split()), tags
    assert page.title() != "owned"
    page.reload()
    assert answers(page).inner_text() == shown


def test_control_characters_of_an_answer_are_harmless(page):
    ask(page, "evil")
    assert answers(page).text_content() == EVIL


def test_markdown_is_rendered_and_copied_as_source(page):
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    said = "Two **bold** `words`:\n\n1. one\n   - in\n2. two\n\n```python\nprint(1)\n```\n\n  kept   spaces\nand more"
    script(page, {"content": said[:9]}, {"content": said[9:]})
    ask(page, "go")
    body = answers(page)
    expect(body.locator("strong")).to_have_text("bold")
    expect(body.locator("ol > li")).to_have_count(2)
    expect(body.locator("ol ul > li")).to_have_text("in")
    expect(body.locator("pre code")).to_have_text("print(1)")
    assert body.locator("p").last.text_content() == "  kept   spaces\nand more"
    page.get_by_label("Copy the answer").click()
    expect(page.get_by_label("Copied")).to_be_visible()
    assert page.evaluate("navigator.clipboard.readText()") == said
    page.get_by_label("Copy the code").click()
    page.wait_for_function("() => navigator.clipboard.readText().then(text => text === 'print(1)')")


def test_the_policy_blocks_injected_markup_styles_and_scripts(server, browser):
    policy = server.http.get("/").headers["content-security-policy"]
    assert "unsafe" not in policy
    assert "http" not in policy
    with browser.new_page() as page:
        page.goto(server.url)
        with pytest.raises(Exception, match="TrustedHTML"):
            page.evaluate("document.body.innerHTML = '<b>x</b>'")
        add = "([tag, text]) => document.head.appendChild(document.createElement(tag)).textContent = text"
        page.evaluate(add, ["style", "#app { display: none }"])
        expect(page.locator("#app")).to_be_visible()
        with pytest.raises(Exception, match="TrustedScript"):
            page.evaluate(add, ["script", "document.title = 'owned'"])


def test_unchanged_files_of_the_page_are_not_sent_again(server):
    first = server.http.get("/page.js")
    again = server.http.get("/page.js", headers={"if-none-match": first.headers["etag"]})
    assert (first.status_code, again.status_code, again.content) == (200, 304, b"")


# -- conversations -----------------------------------------------------------------------------------------


def test_conversations_are_stored_searched_renamed_deleted_and_restored(page):
    ask(page, "hi")
    page.get_by_role("button", name="New conversation").click()
    expect(page.locator("#empty")).to_be_visible()
    ask(page, "sum")
    titles = page.locator("#list .open")
    expect(titles).to_have_text(["sum", "hi"])

    page.get_by_label("Search conversations").fill("東京")
    expect(titles).to_have_text(["hi"])
    page.get_by_label("Search conversations").fill("")

    titles.nth(1).click()
    expect(answers(page)).to_have_text(HI)
    page.get_by_label("Rename hi").click()
    page.get_by_label("Name of the conversation").fill("Greetings")
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", level=1)).to_have_text("Greetings")

    page.locator("#list .item").nth(1).hover()
    page.get_by_label("Delete Greetings").click()
    expect(titles).to_have_text(["sum"])
    expect(page.locator("#empty")).to_be_visible()
    page.get_by_role("button", name="Undo").click()
    expect(titles).to_have_text(["sum", "Greetings"])
    expect(answers(page)).to_have_text(HI)
    page.reload()
    expect(titles).to_have_text(["sum", "Greetings"])


def test_an_answer_continues_while_another_conversation_is_open(page, slowly):
    slowly(page, "tick")
    ask(page, "long", wait=False)
    expect(answers(page)).to_contain_text("tick")
    before = len(answers(page).text_content())
    page.unroute(f"**{CHAT}")
    page.keyboard.press("Control+k")
    ask(page, "hi")
    expect(answers(page)).to_have_text(HI)
    expect(page.locator("#list .running")).to_have_text("long")
    page.keyboard.press("Alt+ArrowDown")
    expect(answers(page)).to_contain_text("tick")
    assert len(answers(page).text_content()) > before
    page.keyboard.press("Escape")
    expect(page.locator(".stats")).to_contain_text("stopped")


def test_an_export_is_valid_chat_data(page, tmp_path):
    from nanorun.text.chat import render

    ask(page, "sum")
    for name, action in (("x.jsonl", "Save as JSON"), ("x.md", "Save as Markdown")):
        page.get_by_label("This conversation").first.click()
        with page.expect_download() as download:
            page.get_by_role("button", name=action).click()
        download.value.save_as(tmp_path / name)
    record = json.loads((tmp_path / "x.jsonl").read_text())
    assert record["messages"][1]["content"] == ANSWERS["sum"]
    assert render(record, byte_tokenizer()).ids
    assert "```python\n12+30\n```" in (tmp_path / "x.md").read_text()


# -- settings ----------------------------------------------------------------------------------------------


def test_settings_apply_to_the_next_request_and_persist(page):
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("Temperature").fill("0")
    page.get_by_label("Top-p").fill("0.5")
    page.get_by_label("Maximum tokens").fill("3")
    page.get_by_label("Seed").fill("7")
    page.get_by_label("System prompt").fill("Be kind.")
    page.get_by_role("button", name="Done").click()
    page.reload()
    with page.expect_request(f"**{CHAT}") as sent:
        ask(page, "sum")
    asked = sent.value.post_data_json
    assert {name: asked[name] for name in ("temperature", "top_p", "max_tokens", "seed")} == {
        "temperature": 0,
        "top_p": 0.5,
        "max_tokens": 3,
        "seed": 7,
    }
    assert asked["messages"][0] == {"role": "system", "content": "Be kind."}
    expect(page.locator(".stats")).to_contain_text("cut off at the token limit")


CONTRASTS = """() => {
  const canvas = document.createElement('canvas').getContext('2d', { willReadFrequently: true });
  const probe = document.body.appendChild(document.createElement('i'));
  const light = name => {
    probe.style.color = `var(--${name})`;
    canvas.fillStyle = getComputedStyle(probe).color;
    canvas.fillRect(0, 0, 1, 1);
    const linear = v => (v /= 255) <= .04045 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4;
    const [r, g, b] = [...canvas.getImageData(0, 0, 1, 1).data].map(linear);
    return .2126 * r + .7152 * g + .0722 * b;
  };
  return PAIRS.map(([over, under]) => {
    const [a, b] = [light(over), light(under)].sort((x, y) => y - x);
    return [over, under, (a + .05) / (b + .05)];
  });
}"""


def test_both_themes_have_enough_contrast_and_the_choice_persists(page):
    grounds = ("ground", "side", "raised", "sunk", "hover")
    pairs = [(text, ground) for text in ("text", "soft") for ground in grounds]
    pairs += [("accent", "accent-soft"), ("on-accent", "accent"), ("text", "accent-soft"), ("accent", "side")]
    pairs += [
        ("text", "danger-soft"),
        ("danger", "danger-soft"),
        ("danger", "accent-soft"),
        ("danger", "raised"),
    ]
    shades = {}
    for theme in ("Dark", "Light"):
        page.keyboard.press("Control+,")
        page.get_by_text(theme, exact=True).click()
        page.keyboard.press("Escape")
        shades[theme] = page.evaluate("getComputedStyle(document.body).backgroundColor")
        low = [pair for pair in page.evaluate(CONTRASTS.replace("PAIRS", json.dumps(pairs))) if pair[2] < 4.5]
        assert low == [], theme
    assert shades == {"Dark": "rgb(16, 18, 21)", "Light": "rgb(255, 255, 255)"}
    page.emulate_media(color_scheme="dark")
    page.reload()
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == shades["Light"]
