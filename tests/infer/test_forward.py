"""Prefill and decode give the logits of the plain forward, for any chunks and any batch."""

import random

import pytest
import torch
from small_models import CPU, SHAPES, VOCAB, grown, shape

from nanorun.config import scale_model
from nanorun.infer.cache import SLACK, Cache
from nanorun.infer.forward import decode, prefill
from nanorun.infer.model import inference_copy, quantize


def close(got, expected):
    torch.testing.assert_close(got, expected, rtol=0, atol=2e-5)


def setting(name, slots=3, slack=SLACK, seed=0):
    config = shape(name)
    model = grown(config, seed)
    tokens = torch.randint(0, VOCAB, (config.context,), generator=torch.Generator().manual_seed(seed))
    with torch.no_grad():
        expected = model.logits(tokens[None])[0]
    return inference_copy(model), Cache(config, slots, CPU, torch.float32, slack), tokens, expected


def decode_from(weights, cache, slot, tokens, expected, start, stop=None):
    for at in range(start, stop or len(tokens)):
        logits = decode(weights, cache, torch.tensor([slot]), tokens[at : at + 1], torch.tensor([at]))
        close(logits[0], expected[at])


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("slack", [0, 9, SLACK])
def test_a_prompt_in_any_chunks_has_the_logits_of_one_forward(name, slack):
    for seed in range(3):
        weights, cache, tokens, expected = setting(name, slack=slack, seed=seed)
        rng, at = random.Random(seed), 0
        while at < 40:
            size = rng.randint(1, min(25, 40 - at))
            prefill(weights, cache, [1], [tokens[at : at + size].tolist()], [at])
            at += size
        decode_from(weights, cache, 1, tokens, expected, at)


@pytest.mark.parametrize("name", SHAPES)
def test_decoding_from_the_first_token(name):
    weights, cache, tokens, expected = setting(name, slack=2)
    decode_from(weights, cache, 0, tokens, expected, 0)


@pytest.mark.parametrize("name", ["all", "grouped", "odd"])
def test_several_tokens_of_one_sequence_in_one_pass(name):
    weights, cache, tokens, expected = setting(name, slack=4)
    prefill(weights, cache, [2], [tokens[:10].tolist()], [0])
    for at in range(10, 55, 5):
        positions = torch.arange(at, at + 5)
        logits = decode(weights, cache, torch.full((5,), 2), tokens[at : at + 5], positions)
        close(logits, expected[at : at + 5])


@pytest.mark.parametrize("name", ["all", "grouped", "odd"])
def test_sequences_of_different_lengths_share_a_batch(name):
    weights, cache, tokens, expected = setting(name, slack=3)
    other = tokens.flip(0)
    with torch.no_grad():
        other_expected = grown(shape(name)).logits(other[None])[0]
    prefill(weights, cache, [2], [other[:17].tolist()], [0])
    prefill(weights, cache, [0, 2], [tokens[:31].tolist(), other[17:19].tolist()], [0, 17])
    scratch = cache.scratch
    for step in range(20):
        slots, positions = torch.tensor([2, scratch, 0, scratch]), torch.tensor([19 + step, 0, 31 + step, 0])
        now = torch.stack([other[19 + step], tokens[0], tokens[31 + step], tokens[1]])
        logits = decode(weights, cache, slots, now, positions)
        close(logits[[0, 2]], torch.stack([other_expected[19 + step], expected[31 + step]]))


def test_rings_wrap_around_many_times():
    config = scale_model(3, VOCAB, 700, dim=32, heads=2, kv_heads=2, windows="S", short_window=5)
    weights, cache = inference_copy(grown(config)), Cache(config, 1, CPU, torch.float32, slack=3)
    assert cache.lengths == [8, 8, 700]
    tokens = torch.randint(0, VOCAB, (700,), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = grown(config).logits(tokens[None])[0]
    for start, size in ((0, 300), (300, 1), (301, 99)):
        prefill(weights, cache, [0], [tokens[start : start + size].tolist()], [start])
    decode_from(weights, cache, 0, tokens, expected, 400)


def test_an_upper_bound_on_lengths_changes_nothing():
    weights, cache, tokens, expected = setting("all", slack=2)
    prefill(weights, cache, [0], [tokens[:12].tolist()], [0])
    for at in range(12, 40):
        logits = decode(weights, cache, torch.tensor([0]), tokens[at : at + 1], torch.tensor([at]), at + 1)
        close(logits[0], expected[at])


def test_a_frozen_model_is_a_copy_that_loads_weights_in_place():
    config = shape("all")
    model, other = grown(config, 0), grown(config, 5)
    weights = inference_copy(model)
    places = [tensor.data_ptr() for tensor in weights.tensors()]
    model.load_state_dict(other.state_dict())
    assert any(
        not torch.equal(a, b) for a, b in zip(weights.tensors(), inference_copy(other).tensors(), strict=True)
    )
    weights.load(model)
    assert [tensor.data_ptr() for tensor in weights.tensors()] == places
    for mine, its in zip(weights.tensors(), inference_copy(other).tensors(), strict=True):
        assert torch.equal(mine, its)


def test_int8_is_off_by_at_most_half_a_step_and_a_quarter_of_the_bytes():
    weight = (
        torch.randn(40, 64, generator=torch.Generator().manual_seed(0)) * torch.logspace(-6, 2, 40)[:, None]
    )
    weight[3] = 0
    matrix = quantize(weight)
    assert matrix.weight.dtype == torch.int8
    assert matrix.scale is not None
    assert ((matrix.weight * matrix.scale[:, None] - weight).abs() <= 0.5001 * matrix.scale[:, None]).all()
    model = grown(shape("all"))
    full, narrow = inference_copy(model), inference_copy(model, int8=True)
    assert narrow.bytes_per_step < 0.3 * full.bytes_per_step


def test_int8_has_nearly_the_same_loss(parrot, tokenizer):
    from small_models import TEXT

    ids = torch.tensor([tokenizer.bos, *tokenizer.encode(TEXT * 3)])
    bits = []
    for int8 in (False, True):
        weights = inference_copy(parrot, int8=int8)
        cache = Cache(parrot.config, 1, CPU, torch.float32)
        logits = decode(weights, cache, torch.zeros_like(ids), ids, torch.arange(len(ids)))
        loss = torch.nn.functional.cross_entropy(logits[:-1], ids[1:])
        bits.append(loss.item() / 0.6931 * (len(ids) - 1) / len((TEXT * 3).encode()))
    assert bits[1] == pytest.approx(bits[0], abs=0.01)
    assert bits[1] != bits[0]
