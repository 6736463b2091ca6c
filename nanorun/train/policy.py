"""The policy gradient: which way to move the weights so that replies that earned more become likelier.

    reward      of each sampled reply, from its task
    advantage   reward - mean reward of all replies to the same problem (optionally / their deviation)
    loss        - Σ over sampled tokens of  advantage · ratio  / number of sampled tokens of the whole step
    ratio       p(token) now / p(token) when it was sampled

With one update a step the ratio is 1 and its gradient that of the log-probability: REINFORCE with a baseline,
and nothing else. With more, `clip` stops a token from being pushed once its ratio has left [1 - clip, 1 + clip]
in the direction it is pushed in (PPO), and `kl` pulls the policy back to a reference model by the estimator
k3 = exp(d) - d - 1, d = log p_reference - log p, which is never negative and zero where they agree. All of them
together, with the deviation, are GRPO.

Every token counts the same, whether its reply is long or short. The problems whose replies all earned the same
have no advantage: they move nothing, so they are left out of the computation, not out of the count.

The probabilities are those of the distribution that was sampled from: the model's logits divided by the
temperature, over the whole vocabulary. What the model did not choose (the prompt, a tool's output, padding) is
no part of the loss; the token that ends a reply is.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from nanorun.evals.replies import padded
from nanorun.model.gpt import GPT

CHUNK_LOGITS = 2**25  # held at a time: 1,024 tokens of a vocabulary of 32,768


@dataclass(frozen=True)
class Sample:
    """One reply of the model to a problem."""

    prompt: list[int]
    ids: list[int]  # sampled and forced
    chosen: list[bool]  # as long as ids: the model chose this token
    logprobs: list[float]  # as long as ids: by the distribution it was drawn from, as the engine says
    reward: float
    advantage: float
    stopped: bool  # by itself, not by the limit

    @property
    def trained(self) -> int:
        return sum(self.chosen)


@dataclass(frozen=True)
class MicroBatch:
    """Some samples as tensors. B samples, T tokens with padding, N trained tokens."""

    tokens: Tensor  # (B, T)
    before: Tensor  # (N,): where, in the flattened tokens, the token before each trained one is
    targets: Tensor  # (N,)
    advantages: Tensor  # (N,)
    logprobs: Tensor  # (N,), the engine's

    def to(self, device: torch.device) -> "MicroBatch":
        parts = (self.tokens, self.before, self.targets, self.advantages, self.logprobs)
        return MicroBatch(*(part.to(device, non_blocking=True) for part in parts))


def advantages(rewards: Sequence[float], normalize: bool = False) -> list[float]:
    """How much better each reply to one problem is than their mean; exactly 0 where all earned the same."""
    if max(rewards) == min(rewards):
        return [0.0] * len(rewards)
    mean = sum(rewards) / len(rewards)
    centred = [reward - mean for reward in rewards]
    if not normalize:
        return centred
    deviation = (sum(each * each for each in centred) / len(centred)) ** 0.5
    return [each / deviation for each in centred]


def micro_batches(samples: Sequence[Sample], rows: int) -> list[MicroBatch]:
    """Every sample once, `rows` at a time, in the order of their lengths (so that little is padding)."""
    ordered = sorted(samples, key=lambda sample: len(sample.prompt) + len(sample.ids))
    return [_pack(ordered[start : start + rows]) for start in range(0, len(ordered), rows)]


def _pack(samples: Sequence[Sample]) -> MicroBatch:
    rows = [[*sample.prompt, *sample.ids] for sample in samples]
    tokens = padded(rows)
    before, targets, worth, logprobs = list[int](), list[int](), list[float](), list[float]()
    for i, sample in enumerate(samples):
        for j, (token, chosen) in enumerate(zip(sample.ids, sample.chosen, strict=True)):
            if chosen:
                before.append(i * tokens.size(1) + len(sample.prompt) + j - 1)
                targets.append(token)
                worth.append(sample.advantage)
                logprobs.append(sample.logprobs[j])
    return MicroBatch(
        tokens, torch.tensor(before), torch.tensor(targets), torch.tensor(worth), torch.tensor(logprobs)
    )


def token_logprobs(model: GPT, batch: MicroBatch, temperature: float) -> Tensor:
    """The log-probability (N,) of each trained token, in fp32 (or fp64), where it stands."""
    states = model.hidden(batch.tokens).flatten(0, 1)[batch.before]
    size = max(CHUNK_LOGITS // model.config.padded_vocab, 1)
    chunks = list(zip(states.split(size), batch.targets.split(size), strict=True))
    if len(chunks) > 1 and torch.is_grad_enabled():  # logits are computed again rather than kept
        parts = [checkpoint(_logprobs, model, s, t, temperature, use_reentrant=False) for s, t in chunks]
    else:
        parts = [_logprobs(model, s, t, temperature) for s, t in chunks]
    return torch.cat(parts)


def _logprobs(model: GPT, states: Tensor, targets: Tensor, temperature: float) -> Tensor:
    z, cap = model.head(states)[:, : model.config.vocab_size], model.config.softcap
    z = z.to(torch.promote_types(z.dtype, torch.float32))
    z = (cap * torch.tanh(z / cap) if cap else z) / temperature
    return z.gather(1, targets[:, None])[:, 0] - z.logsumexp(1)


def policy_loss(
    now: Tensor,
    old: Tensor,
    advantage: Tensor,
    *,
    clip: float | None = None,
    reference: Tensor | None = None,
    kl: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """The loss summed over tokens, and sums for the log: tokens whose push was stopped, and KL.

    Log-probabilities of each token (N,): now, when it was sampled, and by the reference. Only `now` is trained.
    """
    ratio = (now - old).exp()
    gain = ratio * advantage
    stopped = torch.zeros((), device=now.device)
    if clip is not None:
        limited = ratio.clamp(1 - clip, 1 + clip) * advantage
        stopped = (limited < gain).sum()
        gain = torch.minimum(gain, limited)
    loss, distance = -gain.sum(), torch.zeros((), device=now.device)
    if reference is not None:
        d = reference - now
        apart = (d.exp() - d - 1).sum()
        loss, distance = loss + kl * apart, apart.detach()
    return loss, torch.stack([stopped.to(now.dtype), distance.to(now.dtype)])
