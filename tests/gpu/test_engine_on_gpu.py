"""On CUDA the engine captures graphs and schedules asynchronously; its output is that of the plain forward."""

import gc

import pytest
import torch

from nanorun.config import scale_model
from nanorun.infer import plain
from nanorun.infer.engine import Engine, Request, Sampling, Settings
from nanorun.infer.sampling import gumbel, noise_bits
from nanorun.model.gpt import build

VOCAB, CONTEXT = 500, 256
GREEDY = Sampling(temperature=0)


def grown(seed=0, depth=4, **changes):
    shape = {"dim": 128, "heads": 4, "kv_heads": 2, "short_window": 32, **changes}
    model = build(scale_model(depth, VOCAB, CONTEXT, **shape), torch.device("cuda"), torch.float32, seed=seed)
    rng = torch.Generator("cuda").manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=rng, device="cuda")
    return model


def prompts(count, longest, seed=0):
    rng = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, longest, (count,), generator=rng).tolist()
    return [torch.randint(0, VOCAB, (n,), generator=rng).tolist() for n in lengths]


@pytest.mark.parametrize("speculate", [None, "lookup", "draft"])
@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize("heads", [{}, {"kv_heads": 4, "dim": 96, "heads": 4}])
def test_graphs_async_scheduling_and_speculation_agree_with_the_plain_forward(speculate, graphs, heads):
    model = grown(**heads)
    texts = prompts(9, 200)
    expected = [plain.generate(model, [text], 30, temperature=0)[0] for text in texts]
    settings = Settings(slots=5, speculate=speculate, graphs=graphs, prefill_tokens=128)
    with Engine(model, None, settings, draft=grown(1, depth=2)) as engine:
        replies = engine.generate([Request(text, GREEDY, max_tokens=30) for text in texts])
    assert [reply.ids for reply in replies] == expected


def test_a_seed_gives_the_same_tokens_in_any_batch():
    model = grown()
    rules = [
        Sampling(seed=1),
        Sampling(seed=2, top_k=30),
        Sampling(seed=3, top_p=0.8, temperature=0.7),
        Sampling(seed=4, min_p=0.02, repetition_penalty=1.2),
    ]
    requests = [Request(p, s, max_tokens=25, logprobs=3) for p, s in zip(prompts(4, 99), rules, strict=True)]
    with Engine(model, None, Settings(slots=1)) as engine:
        alone = [engine.generate([request])[0] for request in requests]
    for speculate in (None, "lookup"):
        with Engine(model, None, Settings(slots=16, speculate=speculate)) as engine:
            together = engine.generate([*requests, *requests])
        assert [reply.ids for reply in together] == [reply.ids for reply in alone] * 2


def test_forks_prefix_reuse_and_new_weights_work_with_captured_graphs():
    model, other = grown(), grown(5)
    text = prompts(1, 150, seed=3)[0]
    with Engine(model, None, Settings(slots=8)) as engine:
        single = [engine.generate([Request(text, Sampling(seed=i), max_tokens=9)])[0].ids for i in range(6)]
        forked = engine.generate([Request(text, Sampling(seed=0), samples=6, max_tokens=9)])
        assert [reply.ids for reply in forked] == single
        longer = [*text, *single[0], 7]
        reply = engine.generate([Request(longer, GREEDY, max_tokens=5)])[0]
        assert reply.reused_tokens >= len(text)
        assert reply.ids == plain.generate(model, [longer], 5, temperature=0)[0]
        for loaded in (other, model, other):  # each time the memory of the old graphs is freed
            engine.load_weights(loaded)
            gc.collect()
            reply = engine.generate([Request(longer, GREEDY, max_tokens=5)])[0]
            assert reply.ids == plain.generate(loaded, [longer], 5, temperature=0)[0]


def test_noise_has_the_same_bits_as_on_the_cpu():
    seed, position = torch.tensor([0, 1, -1, 2**40]), torch.tensor([0, 0, 5, 2047])
    there = noise_bits(seed.cuda(), position.cuda(), 32768).cpu()
    assert torch.equal(there, noise_bits(seed, position, 32768))
    torch.testing.assert_close(
        gumbel(seed.cuda(), position.cuda(), 4096).cpu(), gumbel(seed, position, 4096), rtol=1e-5, atol=1e-5
    )


def test_bf16_and_int8_generate():
    model = build(scale_model(4, VOCAB, CONTEXT), torch.device("cuda"), torch.bfloat16)
    for int8 in (False, True):
        with Engine(model, None, Settings(int8=int8)) as engine:
            engine.warm_up((1, 8), (GREEDY, Sampling()))
            replies = engine.generate([Request([1, 2, 3], Sampling(seed=0), max_tokens=40, samples=8)])
            assert {len(reply.ids) for reply in replies} == {40}
