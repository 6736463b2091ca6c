"""How far a slot can be truncated, what copies contain, and which slot a sequence takes."""

import pytest
import torch
from small_models import CPU, VOCAB, grown

from nanorun.config import scale_model
from nanorun.infer.cache import Cache, SlotPool, common_prefix
from nanorun.infer.forward import decode, prefill
from nanorun.infer.model import inference_copy

CONFIG = scale_model(3, VOCAB, 80, dim=32, heads=2, kv_heads=2, windows="SL", short_window=10)
TOKENS = torch.randint(0, VOCAB, (80,), generator=torch.Generator().manual_seed(0))


def written(high, slack=6, slot=0):
    weights, cache = inference_copy(grown(CONFIG)), Cache(CONFIG, 4, CPU, torch.float32, slack)
    prefill(weights, cache, [slot], [TOKENS[:high].tolist()], [0])
    return weights, cache


def continues_correctly(weights, cache, slot, length, steps=12):
    """Whether a slot truncated to `length` tokens continues as if nothing had followed them."""
    text = torch.cat([TOKENS[:length], TOKENS.flip(0)])[:80]
    with torch.no_grad():
        expected = grown(CONFIG).logits(text[None])[0]
    right = True
    for at in range(length, min(length + steps, 80)):
        logits = decode(weights, cache, torch.tensor([slot]), text[at : at + 1], torch.tensor([at]))
        right &= torch.allclose(logits[0], expected[at], atol=2e-5)
    return right


@pytest.mark.parametrize("high", [5, 16, 17, 20, 50])
def test_a_slot_can_be_truncated_exactly_as_far_as_the_rule_says(high):
    earliest = written(high)[1].min_truncation(high)
    assert earliest == (0 if high <= 16 else high - 6)
    for length in range(max(earliest, 1), high):
        weights, cache = written(high)
        assert continues_correctly(weights, cache, 0, length)
    if earliest > 3:
        weights, cache = written(high)
        assert not continues_correctly(weights, cache, 0, earliest - 3), (
            "further back, keys of the window are overwritten"
        )


def test_a_truncated_slot_can_be_truncated_again_from_its_high_water_mark():
    weights, cache = written(40)
    assert continues_correctly(weights, cache, 0, 36, steps=3)
    assert continues_correctly(weights, cache, 0, 34)


def test_a_copy_continues_independently():
    weights, cache = written(40, slot=1)
    cache.copy(1, [0, 3], 40)
    for slot in (0, 3, 1):
        assert continues_correctly(weights, cache, slot, 40)


def test_memory_is_windows_and_not_contexts():
    cache = Cache(CONFIG, 4, CPU, torch.float32, slack=6)
    token = 2 * 2 * 16 * 4  # keys and values, heads, channels, fp32
    assert cache.bytes == 5 * ((16 + 80 + 80) * token + 80 * 8)
    assert cache.bytes_read(3) == 3 * 3 * token
    assert cache.bytes_read(50) == (10 + 50 + 50) * token


def test_common_prefixes():
    for a, b, length in (
        ([], [1], 0),
        ([1, 2], [1, 2, 3], 2),
        ([1, 2, 3, 4], [1, 2, 3, 5], 3),
        ([2], [1], 0),
    ):
        assert common_prefix(a, b) == common_prefix(b, a) == length


def test_the_next_turn_takes_the_same_slot_and_other_prompts_the_least_recently_used():
    slots = SlotPool([Cache(CONFIG, 3, CPU, torch.float32)])
    first = slots.acquire(list(range(20)))
    first.cached_tokens = first.high_water_mark = 19
    slots.release(first)
    other = slots.acquire(list(range(50, 70)))
    assert (other is not first, other.cached_tokens) == (True, 0)
    again = slots.acquire(list(range(30)))
    assert (again is first, again.cached_tokens) == (True, 19)


def test_a_shared_prefix_is_copied_and_its_owner_keeps_it():
    weights, cache = written(40)
    slots = SlotPool([cache])
    text = TOKENS.tolist()
    owner = slots.slots[0]
    owner.tokens, owner.cached_tokens, owner.high_water_mark, owner.in_use = text[:40], 40, 40, True
    taken = slots.acquire([*text[:36], 1, 2, 3])
    assert (taken is not owner, taken.cached_tokens, taken.high_water_mark) == (True, 36, 40)
    assert continues_correctly(weights, cache, taken.index, 36)
    assert continues_correctly(weights, cache, owner.index, 40)
    assert slots.acquire([*text[:20], 1, 2, 3]).cached_tokens == 0, "the ring has overwritten this prefix"
