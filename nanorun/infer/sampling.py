"""Choosing the next token on the device, for many rows at once, each with its own rules and its own seed.

A token is drawn by the Gumbel-max trick: add noise -log(-log u) to each logit and take the largest. The
noise is not drawn from a generator with a state. It is a hash of (the row's seed, the position in the text,
the token's id), integer arithmetic that gives the same bits on every device. So what a seed yields
depends on nothing else: not on the batch around it, not on how many tokens are computed in one pass. It
also makes speculation exact at any temperature. A guess is right if it is the token that this position's
noise chooses, which is found out by choosing.

A `Plan` is what the host knows of all rows of a step together: whether anything is drawn at all, whether
any row needs the vocabulary sorted. What no row asks for is not computed. Rows are filtered by a least
logit, so tokens that tie with the last one kept are kept, too.

Two log-probabilities of the chosen token exist and are not the same: by the distribution that it was drawn
from (`sampled`: penalised, tempered, cut, normalised; policy gradients need this one; 0 where nothing is
left to chance) and by the model alone (`model`).

This is part of a captured step: no value is looked at on the host, nor copied from it (which a
`torch.where` with a Python number does).
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from nanorun.infer.request import Sampling

_32_BITS = 0xFFFFFFFF
_ALMOST_ONE = 1 - 2**-24
Pick = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
INTS, FLOATS = 2, 4  # numbers in a row's rules: top_k, seed; temperature, top_p, min_p, penalty


@dataclass(frozen=True)
class Plan:
    """The union of what the rows want. Few values each, as every plan is a captured graph of its own."""

    draw: bool = False  # some row has a temperature
    top_k: int = 0  # the largest k, as a power of two; unused where `sort` is set
    sort: bool = False  # some row has a top_p
    min_p: bool = False
    penalty: bool = False
    logprobs: bool = False
    top: int = 0  # likeliest tokens to report

    @staticmethod
    def of(wishes: Iterable[tuple[Sampling, int | None]], most_top: int) -> "Plan":
        rules, logprobs = zip(*wishes, strict=True)
        drawn = [s for s in rules if s.temperature > 0]
        largest = max((s.top_k for s in drawn), default=0)
        sort = any(s.top_p < 1 for s in drawn) or largest > 1024
        return Plan(
            draw=bool(drawn),
            top_k=1 << (largest - 1).bit_length() if largest and not sort else 0,
            sort=sort,
            min_p=any(s.min_p > 0 for s in drawn),
            penalty=any(s.repetition_penalty != 1 for s in rules),
            logprobs=any(n is not None for n in logprobs),
            top=most_top if any(logprobs) else 0,
        )


@dataclass(frozen=True)
class Rules:
    """How each of N rows samples, as device tensors (N,)."""

    top_k: Tensor
    seed: Tensor
    temperature: Tensor
    top_p: Tensor
    min_p: Tensor
    penalty: Tensor

    @staticmethod
    def packed(sampling: Sampling, seed: int) -> tuple[list[int], list[float]]:
        s = sampling
        return [s.top_k, seed], [s.temperature, s.top_p, s.min_p, s.repetition_penalty]

    @staticmethod
    def unpacked(ints: Tensor, floats: Tensor) -> "Rules":
        """From the columns of rows, (2, N) and (4, N)."""
        return Rules(*ints.unbind(0), *floats.unbind(0))


@dataclass(frozen=True)
class Drawn:
    tokens: Tensor  # (N,)
    logprobs: Tensor | None  # (N, 2): sampled, model
    top: tuple[Tensor, Tensor] | None  # log-probabilities and ids, (N, plan.top)


def draw(logits: Tensor, seed: Tensor, positions: Tensor, hot: Tensor) -> Tensor:
    """The largest of each row (N, V) after adding noise, or without it where a row is not hot."""
    return (logits + hot[:, None] * gumbel(seed, positions, logits.size(1))).argmax(-1)


def sample(
    logits: Tensor, rules: Rules, positions: Tensor, plan: Plan, history: Tensor | None, pick: Pick = draw
) -> Drawn:
    """Tokens for these positions from fp32 logits (N, V).

    `history` (N, context) holds each row's text, of which the first `positions` tokens count; it is only
    looked at where the plan has a penalty. `pick` is `draw` or something faster.
    """
    z = _penalised(logits, rules, positions, history) if plan.penalty and history is not None else logits
    if not plan.draw:
        tokens, kept = z.argmax(-1), None
    else:
        kept = z / rules.temperature.masked_fill(rules.temperature == 0, 1.0)[:, None]
        if plan.top_k or plan.sort or plan.min_p:  # the largest always stays, so greedy rows lose nothing
            kept = kept.masked_fill(kept < _least(kept, rules, plan), float("-inf"))
        tokens = pick(kept, rules.seed, positions, rules.temperature > 0)
    logprobs, top = None, None
    if plan.logprobs:
        of_model = logits.log_softmax(-1)
        chosen = of_model.gather(1, tokens[:, None])[:, 0]
        if kept is None:
            sampled = torch.zeros_like(chosen)
        else:
            sampled = kept.gather(1, tokens[:, None])[:, 0] - kept.logsumexp(-1)
            sampled = sampled.masked_fill(rules.temperature == 0, 0.0)
        logprobs = torch.stack([sampled, chosen], 1)
        top = of_model.topk(plan.top, dim=-1) if plan.top else None
    return Drawn(tokens, logprobs, (top[0], top[1]) if top is not None else None)


def gumbel(seed: Tensor, positions: Tensor, vocab: int) -> Tensor:
    """Noise (N, V) that depends on nothing but seed, position and token.

    With v uniform, -log(-log(1 - v)) is the noise; log1p keeps small v exact, where the largest values
    come from.
    """
    v = (noise_bits(seed, positions, vocab).float() + 0.5) * 2**-32
    return -torch.log(-torch.log1p(-v.clamp(max=_ALMOST_ONE)))


def noise_bits(seed: Tensor, positions: Tensor, vocab: int) -> Tensor:
    """32 random bits for each row and token, in int64."""
    key = _mix(_mix(seed & _32_BITS) ^ ((seed >> 32) & _32_BITS))
    first = _mix(key ^ positions)
    second = _mix(first ^ 0x9E3779B9)
    token = torch.arange(vocab, device=seed.device)
    return _mix(_mix(token ^ first[:, None]) ^ second[:, None])


def _mix(x: Tensor) -> Tensor:
    """A permutation of 32-bit numbers in which every bit depends on every other. No product overflows."""
    x = x ^ (x >> 16)
    x = (x * 0x21F0AAAD) & _32_BITS
    x = x ^ (x >> 15)
    x = (x * 0x735A2D97) & _32_BITS
    return x ^ (x >> 15)


def _penalised(logits: Tensor, rules: Rules, positions: Tensor, history: Tensor) -> Tensor:
    at = torch.arange(history.size(1), device=logits.device)
    # Tokens beyond the text count for a column that is cut off again.
    ids = history.masked_fill(at >= positions[:, None], logits.size(1))
    seen = torch.zeros(logits.size(0), logits.size(1) + 1, device=logits.device, dtype=torch.bool)
    seen = seen.scatter(1, ids, True)[:, :-1]
    penalty = rules.penalty[:, None]
    return torch.where(seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits)


def _least(z: Tensor, rules: Rules, plan: Plan) -> Tensor:
    """The least logit (N, 1) that top-k, top-p and min-p let through, in that order."""
    least = torch.full_like(z[:, :1], float("-inf"))
    k = rules.top_k.masked_fill(rules.top_k == 0, z.size(1)).clamp(max=z.size(1))[:, None]
    if plan.sort:
        ordered = z.sort(-1, descending=True).values
        rank = torch.arange(z.size(1), device=z.device)
        p = ordered.masked_fill(rank >= k, float("-inf")).softmax(-1)
        before = p.cumsum(-1) - p
        top_p = rules.top_p.masked_fill(rules.top_p >= 1, 2.0)[:, None]  # 1 is all, whatever sums round to
        count = ((before < top_p) & (rank < k)).sum(-1, keepdim=True)
        least = ordered.gather(1, count.clamp(min=1) - 1)
    elif plan.top_k:
        most = min(plan.top_k, z.size(1))
        largest = z.topk(most, dim=-1).values
        least = torch.where(k <= most, largest.gather(1, k.clamp(max=most) - 1), least)
    if plan.min_p:
        # log of 0 is -inf: no limit
        least = torch.maximum(least, z.amax(-1, keepdim=True) + rules.min_p[:, None].log())
    return least
