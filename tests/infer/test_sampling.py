"""Samples follow the requested distribution and depend only on seed and position."""

import math

import numpy as np
import pytest
import torch

from nanorun.errors import UserError
from nanorun.infer.request import Sampling
from nanorun.infer.sampling import SamplingFeatures, SamplingParams, noise_bits, sample


def params_of(samplings, seeds=None):
    seeds = seeds or range(len(samplings))
    packed = [SamplingParams.pack(s, seed) for s, seed in zip(samplings, seeds, strict=True)]
    return SamplingParams.unpack(
        torch.tensor([i for i, _ in packed]).t(), torch.tensor([f for _, f in packed]).t()
    )


def draw(logits, sampling, draws, **more):
    """Many tokens for one row of logits, each at its own position."""
    rows = logits.expand(draws, -1)
    plan = SamplingFeatures.union([(sampling, more.get("logprobs"))], 5)
    return sample(rows, params_of([sampling] * draws, [7] * draws), torch.arange(draws), plan, None)


def naive(logits, s, history=()):
    """The distribution by definition, in float64."""
    z = logits.double().numpy().copy()
    for token in set(history):
        z[token] = z[token] / s.repetition_penalty if z[token] > 0 else z[token] * s.repetition_penalty
    if s.temperature == 0:
        return np.eye(len(z))[z.argmax()]
    p = np.exp(z / s.temperature - (z / s.temperature).max())
    if s.top_k:
        p[np.argsort(-p)[s.top_k :]] = 0
    p /= p.sum()
    order = np.argsort(-p)
    before = np.cumsum(p[order]) - p[order]
    p[order[before >= s.top_p]] = 0
    p[p < s.min_p * p.max()] = 0
    return p / p.sum()


SAMPLINGS = [
    Sampling(),
    Sampling(temperature=0.5),
    Sampling(temperature=2, top_k=5),
    Sampling(top_p=0.7),
    Sampling(min_p=0.2),
    Sampling(temperature=1.5, top_k=9, top_p=0.8, min_p=0.05),
]


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
def test_frequencies_are_those_of_the_distribution(sampling):
    logits = 2 * torch.randn(1, 24, generator=torch.Generator().manual_seed(3))
    draws = 20_000
    counts = np.bincount(draw(logits, sampling, draws).tokens.numpy(), minlength=24)
    expected = naive(logits[0], sampling) * draws
    assert (counts[expected == 0] == 0).all()
    kept = expected > 0
    chi_square = ((counts[kept] - expected[kept]) ** 2 / expected[kept]).sum()
    freedom = kept.sum() - 1
    assert chi_square < freedom + 4 * math.sqrt(2 * freedom) + 4


@pytest.mark.parametrize("seed", range(5))
def test_rows_with_different_parameters_follow_their_own_distributions(seed):
    rng = np.random.default_rng(seed)
    samplings = [
        Sampling(
            temperature=rng.choice([0, 0.3, 1, 3]),
            top_k=int(rng.choice([0, 1, 4, 40])),
            top_p=float(rng.choice([1, 0.9, 0.3])),
            min_p=float(rng.choice([0, 0.1])),
            repetition_penalty=float(rng.choice([1, 1.3, 0.8])),
        )
        for _ in range(40)
    ]
    logits = 3 * torch.randn(40, 33, generator=torch.Generator().manual_seed(seed))
    history = torch.randint(0, 33, (40, 12), generator=torch.Generator().manual_seed(seed + 9))
    positions = torch.from_numpy(rng.integers(0, 13, 40))
    plan = SamplingFeatures.union([(s, 3) for s in samplings], 3)
    drawn = sample(logits, params_of(samplings), positions, plan, history)
    model = logits.double().log_softmax(-1)
    for i, s in enumerate(samplings):
        token = int(drawn.tokens[i])
        expected = naive(logits[i], s, history[i, : positions[i]].tolist())
        assert expected[token] > 0
        assert drawn.logprobs[i, 0].item() == pytest.approx(math.log(expected[token]), abs=1e-4)
        assert drawn.logprobs[i, 1].item() == pytest.approx(model[i, token].item(), abs=1e-4)
        alone = SamplingFeatures.union([(s, None)], 3)
        row = slice(i, i + 1)
        rules = params_of([s], [i])
        assert sample(logits[row], rules, positions[row], alone, history[row]).tokens.item() == token
    assert torch.equal(drawn.top[1], logits.topk(3).indices)


def test_a_plan_asks_only_for_what_rows_want():
    assert SamplingFeatures.union([(Sampling(temperature=0, top_p=0.5), None)], 9) == SamplingFeatures()
    assert SamplingFeatures.union([(Sampling(), None)], 9) == SamplingFeatures(random=True)
    assert SamplingFeatures.union([(Sampling(top_k=50), 0), (Sampling(), None)], 9) == SamplingFeatures(
        random=True, top_k=64, logprobs=True
    )
    assert SamplingFeatures.union([(Sampling(top_k=50, top_p=0.9), 2)], 9) == SamplingFeatures(
        random=True, sort=True, logprobs=True, top_logprobs=9
    )


def reference_bits(seed, position, token):
    """The same hash in Python integers."""

    def mix(x):
        x ^= x >> 16
        x = x * 0x21F0AAAD % 2**32
        x ^= x >> 15
        x = x * 0x735A2D97 % 2**32
        return x ^ x >> 15

    seed %= 2**64
    key = mix(mix(seed % 2**32) ^ seed >> 32)
    first = mix(key ^ position)
    return mix(mix(token ^ first) ^ mix(first ^ 0x9E3779B9))


def test_noise_is_integer_arithmetic_that_is_the_same_everywhere():
    rows = [(0, 0), (1, 0), (-1, 5), (2**40, 2047), (-(2**63), 1)]
    bits = noise_bits(torch.tensor([seed for seed, _ in rows]), torch.tensor([at for _, at in rows]), 32768)
    for i, (seed, at) in enumerate(rows):
        for token in (0, 1, 4711, 32767):
            assert bits[i, token].item() == reference_bits(seed, at, token)
    assert reference_bits(1, 0, 1) == 2580529673


def test_noise_of_other_seeds_positions_and_tokens_is_unrelated():
    seeds, positions = torch.arange(64).repeat_interleave(8), torch.arange(8).repeat(64)
    bits = noise_bits(seeds, positions, 512)
    assert bits.unique().numel() > 0.999 * bits.numel()
    uniform = bits.double() / 2**32
    assert uniform.mean().item() == pytest.approx(0.5, abs=0.005)
    centred = uniform - 0.5
    for other in (centred.roll(1, 0), centred.roll(1, 1), centred.roll(8, 0)):
        assert abs((centred * other).mean().item() * 12) < 0.02


@pytest.mark.parametrize(
    "wrong",
    [{"temperature": -1}, {"temperature": float("nan")}, {"top_p": 0}, {"top_p": 1.1}, {"top_k": -2},
     {"min_p": 2}, {"repetition_penalty": 0}, {"seed": 2**64}],
    ids=str,
)  # fmt: skip
def test_invalid_parameters_are_rejected_by_name(wrong):
    with pytest.raises(UserError, match=next(iter(wrong))):
        Sampling(**wrong)
