"""Requests end when and how they should, text is never broken, and a failing request affects no other."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from small_models import TEXT, grown, shape, some_prompts

from nanorun.errors import UserError
from nanorun.infer import plain
from nanorun.infer.engine import Engine, Request, Sampling, Settings
from nanorun.infer.request import join_text
from nanorun.infer.sequence import TextStream

GREEDY = Sampling(temperature=0)


@pytest.fixture
def engine(parrot, tokenizer):
    with Engine(parrot, tokenizer, Settings(slots=3)) as engine:
        yield engine


def ask(tokenizer, text="Gr", **more):
    return Request([tokenizer.bos, *tokenizer.encode(text)], GREEDY, **more)


def test_text_comes_in_whole_characters_and_adds_up(engine, tokenizer):
    events = list(engine.events(ask(tokenizer, max_tokens=60)))
    assert "".join(event.text for event in events) == events[-1].reply.text
    assert "\ufffd" not in events[-1].reply.text
    assert (TEXT * 4)[2:].startswith(events[-1].reply.text)
    assert [i for event in events for i in event.ids] == events[-1].reply.ids


@pytest.mark.parametrize("tokens", range(1, 24))
def test_a_reply_cut_inside_a_character_leaves_it_out(engine, tokenizer, tokens):
    watched = list(engine.events(ask(tokenizer, max_tokens=tokens)))[-1].reply
    silent = engine.generate([ask(tokenizer, max_tokens=tokens)])[0]
    assert watched.text == silent.text
    assert TEXT[2:].startswith(silent.text)
    assert silent.finish == "length"
    assert len(silent.ids) == tokens


@pytest.mark.parametrize(
    ("stop", "text"),
    [
        (["京!"], "üße aus 東"),
        (["aus", "xyz"], "üße "),
        (["ß"], "ü"),
        (["Grüße aus Rom", "für d"], "üße aus 東京! Ein 🙂 "),
        (["🙂 für", "Ein 🙂 f"], "üße aus 東京! "),
        (["dich. Gr"], "üße aus 東京! Ein 🙂 für "),
    ],
)
@pytest.mark.parametrize("speculate", [None, "lookup"])
def test_stop_strings_span_tokens_and_are_not_part_of_the_reply(parrot, tokenizer, stop, text, speculate):
    with Engine(parrot, tokenizer, Settings(speculate=speculate, async_scheduling=True)) as engine:
        events = list(engine.events(ask(tokenizer, stop=stop)))
        reply = events[-1].reply
        assert (reply.text, reply.finish) == (text, "stop")
        assert "".join(event.text for event in events) == text
        assert engine.generate([ask(tokenizer, stop=stop)])[0].text == text


@pytest.mark.parametrize(
    ("before", "after", "text"),
    [
        ("Let me see: ", " Quite so.", "Let me see: Quite so."),
        ("12 + 30 = ", "42.", "12 + 30 = 42."),
        ("It costs $", "42.", "It costs $42."),
        ("Let me see.", " Quite so.", "Let me see. Quite so."),
        ("", " \n 12 + 30 = 42.", "12 + 30 = 42."),
        ("Python says ", "\n#### 3", "Python says \n#### 3"),
        ("One:\n", "  two\n  three", "One:\ntwo\n  three"),
    ],
)
def test_a_tool_call_leaves_no_gap_in_the_text(before, after, text):
    call = [("python", ""), ("python", "12+30"), ("output", ""), ("output", "42")]
    assert join_text([("text", before), *call, ("text", after)]) == text
    letters = [[("text", letter) for letter in part] for part in (before, after)]
    assert join_text([*letters[0], *call, *letters[1]]) == text, "as it streams"


def test_a_possible_stop_string_is_held_back_and_emitted_at_the_end(tokenizer):
    stream = TextStream(tokenizer, ["ab-", "b--"])
    shown = [join_text(stream.push(ord(letter))) for letter in "xaab"]
    assert shown == ["x", "", "a", ""]
    assert stream.push(ord("c")) == [("text", "abc")]
    assert [stream.push(ord(letter)) for letter in "ab"] == [[], []]
    assert stream.flush() == [("text", "ab")]


@pytest.mark.parametrize("stop", [(), ("nothing like it",)])
def test_rate_limited_events_are_complete_and_the_first_token_comes_at_once(parrot, tokenizer, stop):
    request = ask(tokenizer, max_tokens=60, logprobs=0, stop=stop)
    told = []
    for rate in (None, 1):
        with Engine(parrot, tokenizer, Settings(events_per_s=rate)) as engine:
            events = list(engine.events(request))
        ids = [token_id for event in events for token_id in event.ids]
        logprobs = [of for event in events for _, of in event.logprobs]
        told.append((ids, logprobs, "".join(event.text for event in events)))
        assert (ids, logprobs, told[-1][2]) == (
            events[-1].reply.ids,
            events[-1].reply.logprobs,
            events[-1].reply.text,
        )
        assert len(events[0].ids) == 1
        assert len(events) == 60 if rate is None else len(events) <= 4
    assert told[0] == told[1]


def test_a_stop_token_ends_the_reply_and_is_its_last_id(engine, tokenizer):
    space = ord(" ")
    reply = engine.generate([ask(tokenizer, stop_ids=[space])])[0]
    assert (reply.text, reply.finish, reply.ids[-1]) == ("üße", "stop", space)
    assert reply.ids.count(space) == 1


def test_a_reply_ends_with_the_context(engine, tokenizer):
    reply = engine.generate([ask(tokenizer)])[0]
    assert reply.finish == "length"
    assert reply.prompt_tokens + len(reply.ids) == engine.context


def test_many_clients_stream_at_once(engine, tokenizer):
    def client(n):
        return list(engine.events(ask(tokenizer, max_tokens=10 + n, samples=2)))

    for n, events in enumerate(ThreadPoolExecutor(9).map(client, range(9))):
        replies = {event.sample: event.reply for event in events if event.reply}
        assert len(replies) == 2
        assert {len(reply.ids) for reply in replies.values()} == {10 + n}


def test_closing_a_stream_frees_its_slot(parrot, tokenizer):
    with Engine(parrot, tokenizer, Settings(slots=1)) as engine:
        events = engine.events(ask(tokenizer))
        next(events)
        events.close()
        reply = engine.generate([ask(tokenizer, max_tokens=4)])[0]
        assert reply.finish == "length"
        assert engine.stats.sampled_tokens < 100, "the closed stream did not run to its end"


def test_cancelled_requests_end_as_such_wherever_they_are(parrot, tokenizer):
    with Engine(parrot, tokenizer, Settings(slots=1)) as engine:
        running = engine.submit(ask(tokenizer, samples=2))
        waiting = engine.submit(ask(tokenizer, samples=2))
        waiting.cancel()
        assert [reply.finish for reply in waiting.result(10)] == ["cancelled"] * 2
        running.cancel()
        assert running.result(10)[-1].finish == "cancelled"
        assert engine.generate([ask(tokenizer, max_tokens=3)])[0].finish == "length"


def test_invalid_requests_are_rejected_with_one_sentence(engine, tokenizer):
    for request, word in [
        (Request([]), "empty"),
        (Request([1] * 160), "160 tokens"),
        (Request([9999]), "9999"),
        (Request([1], max_tokens=0), "max_tokens"),
        (Request([1], samples=0), "samples"),
        (Request([1], logprobs=99), "logprobs"),
        (Request([1], stop=[""]), "stop"),
        (Request([1], stop=["x"] * 99), "stop"),
    ]:
        with pytest.raises(UserError, match=word):
            engine.generate([request])
    with pytest.raises(UserError, match="slots"):
        Settings(slots=0)
    with pytest.raises(UserError, match="draft model"):
        Engine(grown(shape("all")), None, Settings(speculate="draft"))


def test_a_full_queue_rejects_requests_and_recovers(parrot, tokenizer):
    with Engine(parrot, tokenizer, Settings(slots=1, max_queue=3)) as engine:
        handles = [engine.submit(ask(tokenizer)) for _ in range(3)]
        time.sleep(0.05)
        handles.append(engine.submit(ask(tokenizer)))
        with pytest.raises(UserError, match="try again"):
            engine.submit(ask(tokenizer, samples=2))
        for handle in handles:
            handle.result(20)
        assert engine.submit(ask(tokenizer, max_tokens=2)).result(20)[0].finish == "length"
        assert len(engine.generate([ask(tokenizer, max_tokens=2)] * 20)) == 20, "a batch can have any size"


def test_a_failing_engine_raises_its_error_in_every_waiting_request(parrot, tokenizer):
    decoding, all_wait = threading.Event(), threading.Event()

    def out_of_memory(weights, cache):
        def decode(slots, tokens, positions, longest):
            decoding.set()
            all_wait.wait(10)
            raise MemoryError("no room")

        return decode

    with Engine(parrot, tokenizer, Settings(slots=1), make_decode=out_of_memory) as engine:
        handles = [engine.submit(ask(tokenizer)), engine.submit(ask(tokenizer, samples=2))]
        assert decoding.wait(10)  # else warming might come first
        warming = ThreadPoolExecutor(1).submit(engine.warm_up)
        while not engine._inbox.tasks:
            time.sleep(0.01)
        all_wait.set()
        with pytest.raises(MemoryError, match="no room"):
            warming.result(10)
        for handle in handles:
            with pytest.raises(MemoryError, match="no room"):
                handle.result(10)
        with pytest.raises(RuntimeError, match="has failed"):
            engine.generate([ask(tokenizer)])


def test_a_closed_engine_says_so(parrot, tokenizer):
    engine = Engine(parrot, tokenizer)
    handle = engine.submit(ask(tokenizer))
    engine.close()
    with pytest.raises(UserError, match="closed"):
        handle.result(5)
    with pytest.raises(UserError, match="closed"):
        engine.generate([ask(tokenizer)])


class Shout:
    """A tool that "E" calls. It returns its bytes, or raises, and calls `meanwhile` first."""

    def __init__(self, answer=b"<42>", meanwhile=lambda: None, breaks=False):
        self.answer_bytes, self.meanwhile, self.breaks = answer, meanwhile, breaks

    def push(self, token_id):
        return "call" if token_id == ord("E") else None

    def answer(self, call):
        self.meanwhile()
        if self.breaks:
            raise ValueError("the tool broke")
        return list(self.answer_bytes)


@pytest.mark.parametrize("async_scheduling", [False, True])
@pytest.mark.parametrize("speculate", [None, "lookup"])
def test_a_tool_interrupts_and_its_answer_is_forced(parrot, tokenizer, async_scheduling, speculate):
    settings = Settings(async_scheduling=async_scheduling, speculate=speculate)
    with Engine(parrot, tokenizer, settings) as engine:
        request = ask(tokenizer, tool=Shout, max_tokens=40, logprobs=0)
        events = list(engine.events(request))
        reply = events[-1].reply
    before = "üße aus 東京! E"
    assert reply.text.startswith(before + "<42>")
    at = reply.ids.index(ord("<"))
    assert reply.forced[at : at + 4] == [True] * 4
    assert sum(reply.forced) % 4 == 0
    assert len(reply.ids) - sum(reply.forced) == 40
    assert [lp.under_model for lp in reply.logprobs][at : at + 4] == [0.0] * 4
    assert "".join(event.text for event in events) == reply.text
    assert next(event.ids for event in events if ord("<") in event.ids) == tuple(b"<42>"), (
        "an event of its own"
    )
    prompt = [*request.prompt, *reply.ids[: at + 4]]
    after = plain.generate(parrot, [prompt], 3, temperature=0)[0]
    assert reply.ids[at + 4 : at + 7] == after, "what follows is conditioned on the output"


def test_other_requests_continue_while_a_tool_runs(engine, tokenizer):
    called, may_answer = threading.Event(), threading.Event()

    def wait():
        called.set()
        assert may_answer.wait(30)

    slow = engine.submit(ask(tokenizer, tool=lambda: Shout(meanwhile=wait), max_tokens=30))
    assert called.wait(30)
    engine.generate([ask(tokenizer, max_tokens=40)])
    may_answer.set()
    assert slow.result(30)[0].finish == "length"


def test_a_tool_that_breaks_ends_only_its_own_request(engine, tokenizer):
    broken = engine.submit(ask(tokenizer, tool=lambda: Shout(breaks=True), samples=2))
    fine = engine.submit(ask(tokenizer, max_tokens=30))
    with pytest.raises(ValueError, match="the tool broke"):
        broken.result(10)
    assert len(fine.result(10)[0].ids) == 30


def test_a_listener_that_breaks_ends_only_its_own_request(engine, tokenizer):
    def listen(event):
        raise ZeroDivisionError

    broken = engine.submit(ask(tokenizer, samples=2), listen)
    fine = engine.submit(ask(tokenizer, max_tokens=30))
    with pytest.raises(ZeroDivisionError):
        broken.result(10)
    assert len(fine.result(10)[0].ids) == 30


def test_an_answer_too_long_for_the_context_ends_the_reply(engine, tokenizer):
    reply = engine.generate([ask(tokenizer, tool=lambda: Shout(answer=b"z" * 500))])[0]
    assert reply.finish == "length"
    assert reply.prompt_tokens + len(reply.ids) == engine.context


def test_a_long_prompt_does_not_delay_the_others():
    config = shape("all")
    with Engine(grown(config), None, Settings(slots=2, prefill_tokens=4)) as engine:
        engine.stats.trace = []
        short = engine.submit(Request([1], GREEDY, max_tokens=40))
        long = engine.submit(Request([i % 97 for i in range(60)], GREEDY, max_tokens=2))
        short.result(10), long.result(10)
        alone = [rows for _, rows, _ in engine.stats.trace[:12]]
        assert alone.count(1) >= 10, "it was decoded between the chunks"


def test_requests_from_many_threads_do_not_mix():
    config = shape("all")
    model = grown(config)
    prompts = some_prompts(8, 30, seed=6)
    expected = [plain.generate(model, [p], 12, temperature=0)[0] for p in prompts]
    found = {}
    with Engine(model, None, Settings(slots=3)) as engine:

        def client(n):
            for _ in range(3):
                found.setdefault(n, []).append(
                    engine.generate([Request(prompts[n], GREEDY, max_tokens=12)])[0].ids
                )

        threads = [threading.Thread(target=client, args=(n,)) for n in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert found == {n: [expected[n]] * 3 for n in range(8)}
