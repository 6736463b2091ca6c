"""Sampling on the device, for many rows at once, each with its own parameters and its own seed.

A token is sampled by the Gumbel-max trick: add noise -log(-log u) to each logit and take the argmax. The noise
does not come from a stateful generator. It is a hash of (the row's seed, the position in the sequence, the
token id) in integer arithmetic, which gives the same bits on every device. So the result of a seed depends on
nothing else: not on the other rows of the batch, not on how many tokens one forward pass computes. It also
makes speculative decoding exact at any temperature: a draft token is accepted if it equals the token that this
position's noise selects, which sampling itself determines.

`SamplingFeatures` is what the host knows about all rows of a step together: whether any row samples at random,
whether any row needs the sorted vocabulary. What no row needs is not computed. Rows are filtered by a minimum
logit, so tokens that tie with the last one kept are kept, too.

A sampled token has two log-probabilities: under the distribution it was sampled from (`under_sampling`:
penalized, scaled by temperature, truncated, normalized; policy gradients need this one; 0 for greedy rows), and
under the model alone (`under_model`).

This is part of a captured CUDA graph: no value is read on the host, nor copied from it (which `torch.where`
with a Python number does).
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from nanorun.infer.request import Sampling

_32_BITS = 0xFFFFFFFF
_ALMOST_ONE = 1 - 2**-24
INT_PARAMS, FLOAT_PARAMS = 2, 4  # top_k, seed; temperature, top_p, min_p, repetition penalty


@dataclass(frozen=True)
class SamplingFeatures:
    """The union of what the rows need. Few distinct values, because each combination is its own CUDA graph."""

    random: bool = False  # some row has a temperature
    top_k: int = 0  # the largest k, rounded up to a power of two; unused with `sort`
    sort: bool = False  # some row has a top_p
    min_p: bool = False
    penalty: bool = False
    logprobs: bool = False
    top_logprobs: int = 0  # how many of the most likely tokens to report

    @staticmethod
    def union(rows: Iterable[tuple[Sampling, int | None]], max_top_logprobs: int) -> "SamplingFeatures":
        """What any of these rows needs: each is a row's sampling parameters, and how many log-probabilities it requests
        (None: not even its own)."""
        params, logprobs = zip(*rows, strict=True)
        random = [s for s in params if s.temperature > 0]
        largest = max((s.top_k for s in random), default=0)
        sort = any(s.top_p < 1 for s in random) or largest > 1024
        return SamplingFeatures(
            random=bool(random),
            top_k=1 << (largest - 1).bit_length() if largest and not sort else 0,
            sort=sort,
            min_p=any(s.min_p > 0 for s in random),
            penalty=any(s.repetition_penalty != 1 for s in params),
            logprobs=any(n is not None for n in logprobs),
            top_logprobs=max_top_logprobs if any(logprobs) else 0,
        )


@dataclass(frozen=True)
class SamplingParams:
    """The sampling parameters of N rows, as device tensors (N,)."""

    top_k: Tensor
    seed: Tensor
    temperature: Tensor
    top_p: Tensor
    min_p: Tensor
    penalty: Tensor

    @staticmethod
    def pack(s: Sampling, seed: int) -> tuple[list[int], list[float]]:
        return [s.top_k, seed], [s.temperature, s.top_p, s.min_p, s.repetition_penalty]

    @staticmethod
    def unpack(ints: Tensor, floats: Tensor) -> "SamplingParams":
        """From packed columns, (2, N) and (4, N)."""
        return SamplingParams(*ints.unbind(0), *floats.unbind(0))


@dataclass(frozen=True)
class SampledTokens:
    tokens: Tensor  # (N,)
    logprobs: Tensor | None  # (N, 2): sampled, model
    top: tuple[Tensor, Tensor] | None  # log-probabilities and ids, (N, features.top_logprobs)


def gumbel_argmax(logits: Tensor, seed: Tensor, positions: Tensor, random: Tensor) -> Tensor:
    """The argmax of each row (N, V) after adding Gumbel noise, or without noise where `random` is false."""
    return (logits + random[:, None] * gumbel(seed, positions, logits.size(1))).argmax(-1)


GumbelArgmax = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]  # `gumbel_argmax`, possibly compiled


def sample(
    logits: Tensor,
    params: SamplingParams,
    positions: Tensor,
    features: SamplingFeatures,
    history: Tensor | None,
    select: GumbelArgmax = gumbel_argmax,
) -> SampledTokens:
    """Tokens for these positions from fp32 logits (N, V).

    `history` (N, context) holds each row's sequence, of which the first `positions` tokens count; it is read
    only for the repetition penalty.
    """
    z = logits
    if features.penalty and history is not None:
        z = _apply_repetition_penalty(logits, params, positions, history)
    if not features.random:
        tokens, filtered = z.argmax(-1), None
    else:
        filtered = z / params.temperature.masked_fill(params.temperature == 0, 1.0)[:, None]
        if features.top_k or features.sort or features.min_p:  # the argmax always stays: greedy rows are safe
            filtered = filtered.masked_fill(filtered < min_logit(filtered, params, features), float("-inf"))
        tokens = select(filtered, params.seed, positions, params.temperature > 0)
    logprobs, top = None, None
    if features.logprobs:
        model_logprobs = logits.log_softmax(-1)
        model = model_logprobs.gather(1, tokens[:, None])[:, 0]
        if filtered is None:
            sampled = torch.zeros_like(model)
        else:
            sampled = filtered.gather(1, tokens[:, None])[:, 0] - filtered.logsumexp(-1)
            sampled = sampled.masked_fill(params.temperature == 0, 0.0)
        logprobs = torch.stack([sampled, model], 1)
        top = model_logprobs.topk(features.top_logprobs, dim=-1) if features.top_logprobs else None
    return SampledTokens(tokens, logprobs, (top[0], top[1]) if top is not None else None)


def gumbel(seed: Tensor, positions: Tensor, vocab: int) -> Tensor:
    """Gumbel noise (N, V) that depends only on seed, position and token.

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
    """A permutation of 32-bit integers in which every bit depends on every other. No product overflows."""
    x = x ^ (x >> 16)
    x = (x * 0x21F0AAAD) & _32_BITS
    x = x ^ (x >> 15)
    x = (x * 0x735A2D97) & _32_BITS
    return x ^ (x >> 15)


def _apply_repetition_penalty(
    logits: Tensor, params: SamplingParams, positions: Tensor, history: Tensor
) -> Tensor:
    at = torch.arange(history.size(1), device=logits.device)
    # Tokens beyond the end of the sequence go to an extra column, which is dropped.
    ids = history.masked_fill(at >= positions[:, None], logits.size(1))
    seen = torch.zeros(logits.size(0), logits.size(1) + 1, device=logits.device, dtype=torch.bool)
    seen = seen.scatter(1, ids, True)[:, :-1]
    penalty = params.penalty[:, None]
    return torch.where(seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits)


def min_logit(z: Tensor, params: SamplingParams, features: SamplingFeatures) -> Tensor:
    """The smallest logit (N, 1) that passes top-k, top-p and min-p, in that order."""
    threshold = torch.full_like(z[:, :1], float("-inf"))
    k = params.top_k.masked_fill(params.top_k == 0, z.size(1)).clamp(max=z.size(1))[:, None]
    if features.sort:
        ordered = z.sort(-1, descending=True).values
        rank = torch.arange(z.size(1), device=z.device)
        p = ordered.masked_fill(rank >= k, float("-inf")).softmax(-1)
        before = p.cumsum(-1) - p
        # 1 keeps all, whatever sums round to.
        top_p = params.top_p.masked_fill(params.top_p >= 1, 2.0)[:, None]
        count = ((before < top_p) & (rank < k)).sum(-1, keepdim=True)
        threshold = ordered.gather(1, count.clamp(min=1) - 1)
    elif features.top_k:
        most = min(features.top_k, z.size(1))
        largest = z.topk(most, dim=-1).values
        threshold = torch.where(k <= most, largest.gather(1, k.clamp(max=most) - 1), threshold)
    if features.min_p:
        # log(0) is -inf: no limit
        threshold = torch.maximum(threshold, z.amax(-1, keepdim=True) + params.min_p[:, None].log())
    return threshold
