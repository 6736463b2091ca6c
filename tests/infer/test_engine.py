"""Every way to generate gives what the plain forward gives, token for token, in fp32."""

import random
import time
from dataclasses import replace

import pytest
import torch
from small_models import CPU, SHAPES, VOCAB, grown, shape, some_prompts
from torch.utils._python_dispatch import TorchDispatchMode

from nanorun.config import scale_model
from nanorun.infer import forward, plain
from nanorun.infer.cache import Cache, Slot
from nanorun.infer.engine import Engine, Request, Sampling, Settings
from nanorun.infer.model import inference_copy
from nanorun.infer.sampling import SamplingFeatures
from nanorun.infer.sequence import SequenceState
from nanorun.infer.step import CapturedGraph, Stepper

GREEDY = Sampling(temperature=0)


def small_draft(context=64):
    return grown(scale_model(2, VOCAB, context, dim=32, heads=2, kv_heads=1, short_window=4), seed=3)


def twin(config):
    """A draft model with a high acceptance rate: the model itself, slightly perturbed."""
    model, other = grown(config), grown(config, seed=8)
    state = {k: v + 0.01 * other.state_dict()[k] for k, v in model.state_dict().items()}
    model.load_state_dict(state)
    return model


WAYS = {
    "one at a time": Settings(slots=1),
    "batched": Settings(slots=4),
    "in small chunks": Settings(slots=4, prefill_tokens=5),
    "async": Settings(slots=3, async_scheduling=True),
    "prompt lookup": Settings(slots=3, speculate="lookup"),
    "prompt lookup, async": Settings(slots=3, speculate="lookup", draft_tokens=7, async_scheduling=True),
    "draft": Settings(slots=3, speculate="draft", draft_tokens=2),
    "draft, async": Settings(slots=4, speculate="draft", async_scheduling=True, prefill_tokens=9),
}


def engine_for(model, settings, draft=None):
    draft = draft or (small_draft(model.config.context) if settings.speculate == "draft" else None)
    return Engine(model, None, settings, draft=draft)


@pytest.mark.parametrize("name", SHAPES)
def test_every_way_of_generating_agrees_with_the_plain_forward(name):
    config = shape(name)
    model = grown(config)
    prompts = some_prompts(7, config.context - 1)
    loop = [5, 9, 3] * 6  # prompt lookup should find something
    prompts.append(loop)
    lengths = [1 + 5 * i % (config.context - len(p)) for i, p in enumerate(prompts)]
    lengths[-1] = config.context - len(loop)
    expected = [
        plain.generate(model, [p], n, temperature=0)[0] for p, n in zip(prompts, lengths, strict=True)
    ]
    requests = [Request(p, GREEDY, max_tokens=n) for p, n in zip(prompts, lengths, strict=True)]
    for way, settings in WAYS.items():
        with engine_for(model, settings) as engine:
            replies = engine.generate(requests)
            assert [reply.ids for reply in replies] == expected, way
            assert {reply.finish for reply in replies} == {"length"}


@pytest.mark.parametrize("name", ["all", "grouped", "bare"])
def test_a_seed_gives_the_same_sample_whatever_is_beside_it(name):
    config = shape(name)
    model = grown(config)
    rules = [
        Sampling(seed=1),
        Sampling(temperature=0.7, top_k=12, seed=2),
        Sampling(temperature=1.3, top_p=0.8, seed=3),
        Sampling(min_p=0.05, repetition_penalty=1.2, seed=4),
        GREEDY,
    ]
    prompts = some_prompts(5, 50, seed=4)
    requests = [Request(p, s, max_tokens=12, logprobs=2) for p, s in zip(prompts, rules, strict=True)]
    with Engine(model) as engine:
        alone = [engine.generate([request])[0] for request in requests]
    for way, settings in WAYS.items():
        with engine_for(model, settings) as engine:
            together = engine.generate([*requests, *requests])
        for one, other in zip([*alone, *alone], together, strict=True):
            assert one.ids == other.ids, way
            for a, b in zip(one.logprobs, other.logprobs, strict=True):
                assert a.under_sampling == pytest.approx(b.under_sampling, abs=1e-4)
                assert a.under_model == pytest.approx(b.under_model, abs=1e-4)
                assert [token for token, _ in a.top] == [token for token, _ in b.top]


def test_good_drafts_are_accepted_and_save_steps():
    config = shape("all")
    model = grown(config)
    prompts = some_prompts(6, 20, seed=2)
    for sampling in (GREEDY, Sampling(seed=5, temperature=0.8)):
        requests = [Request(prompt, sampling) for prompt in prompts]
        with Engine(model) as engine:
            expected = [reply.ids for reply in engine.generate(requests)]
            steps = engine.stats.steps
        settings = Settings(speculate="draft", draft_tokens=3)
        with Engine(model, None, settings, draft=twin(config)) as engine:
            assert [reply.ids for reply in engine.generate(requests)] == expected
            assert engine.stats.acceptance_rate > 0.5
            assert engine.stats.steps < 0.6 * steps
        with Engine(model, None, settings, draft=model) as engine:
            assert [reply.ids for reply in engine.generate(requests)] == expected
            assert engine.stats.acceptance_rate > 0.9, "its own draft"


def test_prompt_lookup_follows_a_learned_repetition(parrot, tokenizer):
    from small_models import TEXT

    prompt = [tokenizer.bos, *tokenizer.encode(TEXT + TEXT[:9])]
    with Engine(parrot, tokenizer) as engine:
        expected = engine.generate([Request(prompt, GREEDY, max_tokens=60)])[0]
    with Engine(parrot, tokenizer, Settings(speculate="lookup", draft_tokens=5)) as engine:
        reply = engine.generate([Request(prompt, GREEDY, max_tokens=60)])[0]
        assert reply.ids == expected.ids
        assert (TEXT * 4)[9:].startswith(reply.text)
        assert engine.stats.acceptance_rate > 0.8
        assert engine.stats.steps < 16


@pytest.mark.parametrize("slots", [1, 3, 16])
@pytest.mark.parametrize("speculate", [None, "draft"])
def test_samples_of_one_prompt_are_those_of_single_requests(slots, speculate):
    config = shape("grouped")
    model = grown(config)
    prompt = some_prompts(1, 40, seed=9)[0] * 3
    prompt = prompt[:45]
    with Engine(model) as engine:
        expected = [engine.generate([Request(prompt, Sampling(seed=70 + i))])[0].ids for i in range(6)]
    assert len({tuple(ids) for ids in expected}) == 6
    with engine_for(model, Settings(slots=slots, speculate=speculate)) as engine:
        replies = engine.generate([Request(prompt, Sampling(seed=70), samples=6)])
        assert [reply.ids for reply in replies] == expected
        if slots == 16:
            assert engine.stats.prefilled_tokens == len(prompt) - 1, "the prompt is prefilled once"


def test_turns_of_a_conversation_reuse_the_cached_prefix():
    config = shape("all")
    model = grown(config)
    with Engine(model, None, Settings(slots=2, async_scheduling=True)) as engine:
        text, stranger = some_prompts(1, 9, seed=1)[0], some_prompts(1, 30, seed=2)[0]
        for turn in range(5):
            reply = engine.generate([Request(text, GREEDY, max_tokens=5)])[0]
            assert reply.ids == plain.generate(model, [text], 5, temperature=0)[0]
            assert reply.reused_tokens == (0 if turn == 0 else len(text) - 4)
            engine.generate([Request(stranger, GREEDY, max_tokens=2)])
            text = [*text, *reply.ids, 7, 8, 9]


def test_a_sequence_that_is_edited_far_back_is_prefilled_again():
    config = scale_model(3, VOCAB, 400, dim=32, heads=2, kv_heads=2, short_window=16)
    model = grown(config)
    text = some_prompts(1, 1, seed=3)[0] + [i * i % VOCAB for i in range(330)]
    for changed_at, reused in ((325, 325), (250, 250), (20, 0)):
        with Engine(model, None, Settings(slots=1)) as engine:
            engine.generate([Request(text, GREEDY, max_tokens=3)])
            edited = [*text[:changed_at], 1, 1, 2, 3]
            reply = engine.generate([Request(edited, GREEDY, max_tokens=6)])[0]
            assert reply.ids == plain.generate(model, [edited], 6, temperature=0)[0]
            assert reply.reused_tokens == reused


@pytest.mark.parametrize("way", ["batched", "prompt lookup, async", "draft, async"])
def test_a_mixed_load_agrees_with_the_plain_forward(way):
    """Sequences that share prefixes, samples, stops, cancellations, all at once, in rings that wrap around."""
    config = scale_model(3, VOCAB, 400, dim=32, heads=2, kv_heads=1, short_window=16)
    model, rng = grown(config), random.Random(way)
    base = [rng.randrange(VOCAB) for _ in range(330)]
    requests = []
    for _ in range(24):
        cut = rng.choice([0, rng.randint(1, 330), rng.randint(200, 330)])
        prompt = [*base[:cut], *(rng.randrange(VOCAB) for _ in range(rng.randint(1, 20)))]
        stops = [rng.randrange(VOCAB) for _ in range(rng.choice([0, 0, 9]))]
        requests.append(
            Request(prompt, GREEDY, rng.randint(1, 40), stop_ids=stops, samples=rng.choice([1, 1, 3]))
        )
    settings = replace(WAYS[way], slots=5, prefill_tokens=rng.choice([7, 64, 512]))
    with engine_for(model, settings) as engine:
        assert max(engine._scheduler.cache.lengths[:2]) == 144, "which wraps around"
        handles = []
        for request in requests:
            handles.append(engine.submit(request))
            if rng.random() < 0.3:
                time.sleep(0.02)
            if rng.random() < 0.2:
                handles[rng.randrange(len(handles))].cancel()
        ended = [(request, handle.result(60)) for request, handle in zip(requests, handles, strict=True)]
        assert engine.stats.reused_tokens > 300
    for request, replies in ended:
        assert len(replies) == request.samples
        expected = plain.generate(
            model, [request.prompt], request.max_tokens, temperature=0, stop=request.stop_ids
        )[0]
        for reply in replies:
            said = reply.ids[:-1] if reply.finish == "stop" else reply.ids
            assert said == (expected[: len(said)] if reply.finish == "cancelled" else expected)


def test_new_weights_take_effect_and_old_prefixes_are_dropped():
    config = shape("all")
    model, other = grown(config), grown(config, seed=4)
    prompt = some_prompts(1, 30)[0]
    with Engine(model) as engine:
        before = engine.generate([Request(prompt, GREEDY, max_tokens=8)])[0].ids
        engine.load_weights(other)
        after = engine.generate([Request(prompt, GREEDY, max_tokens=8)])[0]
    assert after.reused_tokens == 0
    assert after.ids == plain.generate(other, [prompt], 8, temperature=0)[0] != before


def test_a_model_with_other_windows_and_context_replaces_caches_and_steps():
    model, other = (
        grown(shape("all")),
        grown(replace(shape("grouped"), windows="SL", short_window=9, context=48)),
    )
    prompt = some_prompts(1, 30)[0]
    with Engine(model) as engine:
        engine.generate([Request(prompt, GREEDY, max_tokens=8)])
        engine.load_weights(other)
        assert engine.context == 48
        after = engine.generate([Request(prompt, GREEDY, max_tokens=8)])[0]
    assert (after.ids, after.reused_tokens) == (plain.generate(other, [prompt], 8, temperature=0)[0], 0)


def test_padding_rows_do_not_affect_the_others():
    model = grown(shape("all"))
    expected = plain.generate(model, [[3, 1, 4]], 20, temperature=0)[0]
    cache = Cache(model.config, 2, CPU, torch.float32)
    stepper = Stepper(forward.make_plain_decode(inference_copy(model), cache), cache, model.config.context)
    forward.prefill(inference_copy(model), cache, [1], [[3, 1]], [0])
    sequence = SequenceState(Request([3, 1, 4], GREEDY), 0, 0, model.config.context, None, None)
    sequence.slot = Slot(1, cached_tokens=2)
    stepper.write_rows([sequence])
    batches = [[1], [1, cache.scratch], [cache.scratch, 1, cache.scratch]]
    found = [
        stepper.launch(batches[i % 3], SamplingFeatures(), 64).wait().tokens[i % 3 == 2] for i in range(20)
    ]
    assert [token for tokens in found for token in tokens] == expected
    assert stepper._ints[0, cache.scratch] == 0, "they do not advance"


def test_graphs_are_captured_per_batch_size_and_features_and_again_after_any_change():
    """The rule for captured graphs, with an eager function in place of a CUDA graph."""
    model, other = grown(shape("all")), grown(shape("all"), seed=4)
    captures = []

    def capture(step, pool):
        outputs = step()
        captures.append(outputs[0].size(0))
        replay = lambda: [old.copy_(new) for old, new in zip(outputs, step(), strict=True)]  # noqa: E731
        return CapturedGraph(replay, outputs, pool)

    engine = Engine(model, None, Settings(slots=5))
    scheduler = engine._scheduler
    scheduler.stepper._capture = capture
    with engine:
        for expected in (model, other):
            prompts = some_prompts(3, 20)
            replies = engine.generate([Request(prompt, GREEDY, max_tokens=9) for prompt in prompts])
            assert [r.ids for r in replies] == plain.generate(expected, prompts, 9, temperature=0)
            assert captures == [4], "three rows and one of padding, captured once"
            engine.generate([Request(prompts[0], GREEDY, max_tokens=2)])
            engine.generate([Request(prompts[0], Sampling(seed=1), max_tokens=2)])
            assert captures == [4, 1, 1], "for each batch size and each set of features"
            engine.generate([Request(prompts[0], GREEDY, max_tokens=2)])
            assert len(captures) == 3
            captures.clear()
            engine.load_weights(other)
        engine.generate([Request([1], GREEDY, max_tokens=2)])
        scheduler.stepper.invalidate()
        engine.generate([Request([1], GREEDY, max_tokens=2)])
        assert captures == [1, 1]


class NothingOnTheHost(TorchDispatchMode):
    """Rejects what a CUDA graph cannot contain: values read by the host, and copies from it."""

    FORBIDDEN = ("_local_scalar_dense", "nonzero", "lift_fresh", "masked_select", "equal.default")

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        assert not any(word in str(operation) for word in self.FORBIDDEN), operation
        if "where" in str(operation):  # turns a Python number into a tensor, which CUDA then has to copy
            assert all(argument.dim() for argument in args)
        return operation(*args, **(kwargs or {}))


@pytest.mark.parametrize("speculate", [None, "lookup", "draft"])
def test_a_step_can_be_captured(speculate):
    model = grown(shape("grouped"))
    plans = [
        SamplingFeatures(),
        SamplingFeatures(random=True),
        SamplingFeatures(random=True, top_k=16, min_p=True, penalty=True, logprobs=True, top_logprobs=5),
        SamplingFeatures(random=True, sort=True),
    ]
    engine = engine_for(model, Settings(speculate=speculate))
    slots = torch.tensor([0, 3, 8, 8])
    for plan in plans:
        with NothingOnTheHost():
            outputs = engine._scheduler.stepper._step(slots, plan, None)
        assert {output.size(0) for output in outputs} == {4}


def test_int8_generates_too(parrot, tokenizer):
    prompt = [tokenizer.bos, *tokenizer.encode("Gr")]
    with Engine(parrot, tokenizer, Settings(int8=True)) as engine:
        assert engine.generate([Request(prompt, GREEDY, max_tokens=30)])[0].text.startswith("üße aus 東京!")
        full = Engine(parrot, tokenizer)
        assert engine.memory["weights"] < full.memory["weights"]
        full.close()


class Chatty:
    """A tool that every fourth token calls."""

    def __init__(self):
        self.pushed = 0

    def push(self, token_id):
        self.pushed += 1
        return token_id if self.pushed % 4 == 0 else None

    def answer(self, call):
        return [call, 65, 66]


def test_the_same_batch_gives_the_same_bits_every_time(parrot, tokenizer):
    """Not only the same tokens: which sequences share a step depends on neither timing nor history."""
    prompts = [[tokenizer.bos, *tokenizer.encode(text)] for text in ("Gr", "aus", "für dich", "1+1", "7*6 ")]
    requests = [
        Request(prompt, Sampling(temperature=1.3, seed=i), 20, samples=3, logprobs=0, tool=Chatty)
        for i, prompt in enumerate(prompts)
    ]
    found = []
    for _ in range(3):
        with Engine(parrot, tokenizer, Settings(slots=4, tool_threads=0)) as engine:
            engine.generate(requests[len(found) :])
            engine.load_weights(parrot)
            found.append([(reply.ids, reply.forced, reply.logprobs) for reply in engine.generate(requests)])
    assert found[0] == found[1] == found[2]
    assert any(found[0][0][1]), "tools were called"
