"""The policy gradient, compared with plain arithmetic in float64."""

import math
import random

import pytest
import torch
from small_tasks import tiny_config

from nanorun.model.gpt import build
from nanorun.train import policy
from nanorun.train.policy import Rollout, advantages, micro_batches, policy_loss, token_logprobs

TOKENS, VOCAB = 7, 5


def plain_loss(logits, targets, old, worth, reference, clip, kl, temperature):
    """Written out for one number after the other; only `logits` are trained."""
    total = 0.0
    for row, target, was, advantage, other in zip(logits, targets, old, worth, reference, strict=True):
        z = [value / temperature for value in row]
        now = z[target] - math.log(sum(math.exp(value) for value in z))
        ratio = math.exp(now - was)
        gain = ratio * advantage
        if clip is not None:
            gain = min(gain, min(max(ratio, 1 - clip), 1 + clip) * advantage)
        d = other - now
        total += -gain + kl * (math.exp(d) - d - 1)
    return total


def differences(function, logits, by=1e-6):
    """The gradient by central differences."""
    found = torch.zeros_like(logits)
    for i in range(logits.size(0)):
        for j in range(logits.size(1)):
            up, down = logits.clone(), logits.clone()
            up[i, j] += by
            down[i, j] -= by
            found[i, j] = (function(up.tolist()) - function(down.tolist())) / (2 * by)
    return found


@pytest.mark.parametrize(
    ("clip", "kl", "moved"), [(None, 0.0, 0.0), (0.2, 0.0, 1.0), (None, 0.3, 0.0), (0.2, 0.1, 1.0)]
)
def test_the_gradient_is_that_of_plain_arithmetic(clip, kl, moved):
    dice = torch.Generator().manual_seed(3)
    logits = torch.randn(TOKENS, VOCAB, dtype=torch.float64, generator=dice)
    targets = torch.randint(VOCAB, (TOKENS,), generator=dice)
    worth = torch.randn(TOKENS, dtype=torch.float64, generator=dice)
    temperature = 0.7

    def logprobs(z):
        return (z / temperature).log_softmax(1).gather(1, targets[:, None])[:, 0]

    old = logprobs(logits + moved * torch.randn(TOKENS, VOCAB, dtype=torch.float64, generator=dice))
    reference = logprobs(torch.randn(TOKENS, VOCAB, dtype=torch.float64, generator=dice))
    moving = logits.clone().requires_grad_()
    loss, clipped_tokens, divergence = policy_loss(
        logprobs(moving), old, worth, clip=clip, reference_logprobs=reference if kl else None, kl=kl
    )
    loss.backward()

    def plain(rows):
        parts = (targets.tolist(), old.tolist(), worth.tolist(), reference.tolist())
        return plain_loss(rows, *parts, clip, kl, temperature)

    assert loss.item() == pytest.approx(plain(logits.tolist()), abs=1e-12)
    assert torch.allclose(moving.grad, differences(plain, logits), atol=1e-7)
    if clip:
        ratio = (logprobs(logits) - old).exp()
        outside = ((ratio > 1 + clip) & (worth > 0)) | ((ratio < 1 - clip) & (worth < 0))
        assert clipped_tokens == outside.sum() > 0
        assert (moving.grad[outside] == 0).all() or kl
    else:
        assert clipped_tokens == 0
    assert (divergence > 0) == bool(kl)


def test_one_update_is_reinforce_with_a_baseline():
    """advantage · (softmax - onehot), as in every textbook."""
    logits = torch.randn(TOKENS, VOCAB, dtype=torch.float64).requires_grad_()
    targets, worth = torch.randint(VOCAB, (TOKENS,)), torch.randn(TOKENS, dtype=torch.float64)
    now = logits.log_softmax(1).gather(1, targets[:, None])[:, 0]
    policy_loss(now, now.detach(), worth)[0].backward()
    onehot = torch.nn.functional.one_hot(targets, VOCAB)
    expected = worth[:, None] * (logits.detach().softmax(1) - onehot)
    assert torch.allclose(logits.grad, expected, atol=1e-12)


def test_advantages_are_rewards_minus_their_mean_and_zero_where_all_are_equal():
    assert advantages([1.0, 0.0, 0.0, 0.0]) == [0.75, -0.25, -0.25, -0.25]
    assert advantages([0.1] * 3) == [0.0] * 3, "whatever the mean rounds to"
    assert advantages([0.1] * 3, normalize=True) == [0.0] * 3
    assert advantages([1.0, 0.0], normalize=True) == [1.0, -1.0]
    graded = advantages([0.0, 0.25, 0.5, 1.0], normalize=True)
    assert sum(graded) == pytest.approx(0)
    assert sum(a * a for a in graded) == pytest.approx(4)


def some_samples(count, seed=0):
    dice = random.Random(seed)
    samples = []
    for _ in range(count):
        ids = [dice.randrange(265) for _ in range(dice.randint(1, 12))]
        chosen = [dice.random() < 0.7 for _ in ids]
        prompt = [dice.randrange(265) for _ in range(dice.randint(1, 9))]
        samples.append(Rollout(prompt, ids, chosen, [-1.0] * len(ids), 0.5, dice.uniform(-1, 1), True))
    return samples


@pytest.mark.parametrize("rows", [1, 2, 4, 15, 99])
def test_every_rollout_is_in_one_micro_batch_whatever_is_left_over(rows):
    samples = some_samples(15)
    batches = micro_batches(samples, rows)
    assert [batch.tokens.size(0) for batch in batches] == [rows] * (15 // rows) + [15 % rows] * bool(
        15 % rows
    )
    seen = [
        tuple(row[:length])
        for batch in batches
        for row, length in zip(batch.tokens.tolist(), lengths(samples, batch), strict=True)
    ]
    assert sorted(seen) == sorted((*sample.prompt, *sample.ids) for sample in samples)
    assert sum(len(batch.targets) for batch in batches) == sum(sample.sampled_tokens for sample in samples)


def lengths(samples, batch):
    whole = {(*s.prompt, *s.ids) for s in samples}
    return [
        next(n for n in range(len(row), 0, -1) if tuple(row[:n]) in whole) for row in batch.tokens.tolist()
    ]


def double_model():
    model = build(tiny_config().model, torch.device("cpu"), torch.float64, seed=5).double()
    dice = torch.Generator().manual_seed(6)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=dice, dtype=torch.float64)
    return model


@pytest.mark.parametrize("rows", [2, 15])
def test_the_gradient_through_the_model_is_that_of_each_sample_alone(rows, monkeypatch):
    """Padding, micro-batches and chunks of logits change nothing."""
    monkeypatch.setattr(policy, "CHUNK_LOGITS", 3 * 320)  # three tokens at a time
    model, samples, temperature = double_model(), some_samples(15), 1.3
    for batch in micro_batches(samples, rows):
        now = token_logprobs(model, batch, temperature)
        policy_loss(now, now.detach(), batch.advantages)[0].backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    for sample in samples:
        tokens = torch.tensor([[*sample.prompt, *sample.ids]])
        z = model.head(model.hidden(tokens))[0, :, :265]
        z = (15 * torch.tanh(z / 15) / temperature).log_softmax(1)
        for at, (token, chosen) in enumerate(
            zip(sample.ids, sample.is_sampled, strict=True), len(sample.prompt)
        ):
            if chosen:
                (-sample.advantage * z[at - 1, token]).backward(retain_graph=True)
    for name, parameter in model.named_parameters():
        assert torch.allclose(found[name], parameter.grad, atol=1e-7, rtol=1e-6), name


def test_prompts_tool_outputs_and_padding_are_not_trained_and_the_last_token_is():
    """Only the states before chosen tokens get a gradient; padding has no effect."""
    model = double_model()
    samples = [
        Rollout([1, 2, 3], [4, 5, 6, 7, 8], [True, True, False, False, True], [0.0] * 5, 1.0, 1.0, True),
        Rollout([9], [10, 11], [True, True], [0.0] * 2, 0.0, -0.5, True),
    ]
    [batch] = micro_batches(samples, 2)
    states, original = [], model.hidden

    def hidden(tokens):
        states.append(original(tokens))
        states[-1].retain_grad()
        return states[-1]

    model.hidden = hidden
    now = token_logprobs(model, batch, 1.0)
    policy_loss(now, now.detach(), batch.advantages)[0].backward()
    moved = states[0].grad.abs().sum(-1) > 0
    short, long = moved.tolist()
    assert long == [False, False, True, True, False, False, True, False]  # before 4, 5 and the ending 8
    assert short == [True, True, *[False] * 6]
    tokens = batch.tokens.clone()
    tokens[0, 3:] = 200
    other = token_logprobs(model, policy.RolloutTensors(tokens, *list(vars(batch).values())[1:]), 1.0)
    assert torch.equal(now, other)
    tokens[1, 4] = 201  # a chosen token of the other sample is another context for what follows
    changed = token_logprobs(model, policy.RolloutTensors(tokens, *list(vars(batch).values())[1:]), 1.0)
    assert not torch.equal(now, changed)
