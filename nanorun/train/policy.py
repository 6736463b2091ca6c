"""The policy gradient: which way to move the weights so that replies with a higher reward become likelier.

    reward      of each sampled reply, from its task
    advantage   reward - mean reward of all replies to the same problem (optionally / their standard deviation)
    loss        - Σ over sampled tokens of  advantage · ratio  / number of sampled tokens of the whole step
    ratio       importance ratio: p(token) now / p(token) when it was sampled

With one update a step the policy gradient is on-policy: the ratio is 1 and its gradient that of the log-probability,
which is REINFORCE with a baseline. With more, `clip` stops the gradient of a token once its ratio has left
[1 - clip, 1 + clip] in the direction it is pushed in (PPO), and `kl` adds a KL penalty towards a reference model by
the estimator k3 = exp(d) - d - 1, d = log p_reference - log p, which is never negative and zero where they agree. All
of them together, with the standard deviation, are GRPO.

Every token counts the same, whether its reply is long or short. Problems whose replies all have the same reward have
no advantage and no gradient: they are left out of the computation, but not out of the count.

The probabilities are those of the distribution that was sampled from: the model's logits divided by the temperature,
over the whole vocabulary. What the model did not sample (the prompt, a tool's output, padding) is not part of the loss;
the token that ends a reply is.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from nanorun.evals.replies import pad_rows
from nanorun.model.gpt import GPT

CHUNK_LOGITS = 2**25  # held at a time: 1,024 tokens of a vocabulary of 32,768


@dataclass(frozen=True)
class Rollout:
    """One sampled reply to a problem. The lists have one entry for each token of the reply."""

    prompt: list[int]
    ids: list[int]  # sampled, or forced by a tool
    is_sampled: list[bool]
    logprobs: list[float]  # under the distribution it was sampled from, by the engine
    reward: float
    advantage: float
    has_stopped: bool  # by itself, not at the length limit

    @property
    def sampled_tokens(self) -> int:
        return sum(self.is_sampled)


@dataclass(frozen=True)
class RolloutTensors:
    """A micro-batch of B rollouts, padded to T tokens, with N sampled tokens in all."""

    tokens: Tensor  # (B, T)
    positions: Tensor  # (N,), in the flattened tokens: the one whose hidden state predicts each sampled token
    targets: Tensor  # (N,)
    advantages: Tensor  # (N,)
    logprobs: Tensor  # (N,), by the engine

    def to(self, device: torch.device) -> "RolloutTensors":
        return RolloutTensors(*(tensor.to(device, non_blocking=True) for tensor in vars(self).values()))


def advantages(rewards: Sequence[float], normalize: bool = False) -> list[float]:
    """How much each reply to one problem exceeds their mean reward; exactly 0 where all rewards are equal."""
    if max(rewards) == min(rewards):
        return [0.0] * len(rewards)
    mean = sum(rewards) / len(rewards)
    centred = [reward - mean for reward in rewards]
    if not normalize:
        return centred
    deviation = (sum(each * each for each in centred) / len(centred)) ** 0.5
    return [each / deviation for each in centred]


def micro_batches(rollouts: Sequence[Rollout], rows: int) -> list[RolloutTensors]:
    """Every rollout once, `rows` at a time, sorted by length so that little is padding."""
    ordered = sorted(rollouts, key=lambda rollout: len(rollout.prompt) + len(rollout.ids))
    return [_collate(ordered[start : start + rows]) for start in range(0, len(ordered), rows)]


def _collate(rollouts: Sequence[Rollout]) -> RolloutTensors:
    tokens = pad_rows([[*rollout.prompt, *rollout.ids] for rollout in rollouts])
    sampled = [
        (row * tokens.size(1) + len(r.prompt) + i - 1, r.ids[i], r.advantage, r.logprobs[i])
        for row, r in enumerate(rollouts)
        for i in range(len(r.ids))
        if r.is_sampled[i]
    ]
    columns = zip(*sampled, strict=True) if sampled else ((),) * 4
    return RolloutTensors(tokens, *map(torch.tensor, columns))


def token_logprobs(model: GPT, batch: RolloutTensors, temperature: float) -> Tensor:
    """The log-probability (N,) of each sampled token, in fp32 (or fp64)."""
    states = model.hidden(batch.tokens).flatten(0, 1)[batch.positions]
    size = max(CHUNK_LOGITS // model.config.padded_vocab, 1)
    chunks = list(zip(states.split(size), batch.targets.split(size), strict=True))
    if len(chunks) > 1 and torch.is_grad_enabled():  # logits are recomputed rather than kept
        parts = [checkpoint(_logprobs, model, s, t, temperature, use_reentrant=False) for s, t in chunks]
    else:
        parts = [_logprobs(model, s, t, temperature) for s, t in chunks]
    return torch.cat(parts)


def _logprobs(model: GPT, states: Tensor, targets: Tensor, temperature: float) -> Tensor:
    z = model.logits_of(states) / temperature
    return z.gather(1, targets[:, None])[:, 0] - z.logsumexp(1)


def policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantage: Tensor,
    *,
    clip: float | None = None,
    reference_logprobs: Tensor | None = None,
    kl: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """The loss, the number of clipped tokens and the KL divergence, each summed over tokens.

    Log-probabilities (N,) of each token: now, when it was sampled, and by the reference. Only the first is trained.
    """
    ratio = (logprobs - old_logprobs).exp()
    objective = ratio * advantage
    clipped_tokens = divergence = torch.zeros((), device=logprobs.device)
    if clip is not None:
        clipped = ratio.clamp(1 - clip, 1 + clip) * advantage
        clipped_tokens = (clipped < objective).sum()
        objective = torch.minimum(objective, clipped)
    loss = -objective.sum()
    if reference_logprobs is not None:
        d = reference_logprobs - logprobs
        divergence = (d.exp() - d - 1).sum()
        loss = loss + kl * divergence
    return loss, clipped_tokens.detach(), divergence.detach()
