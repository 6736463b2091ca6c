"""Speculative decoding: cheap drafts of the next few tokens, verified together in one pass of the model.

Decoding is bound by reading the weights, so a pass over five tokens costs little more than one over a single
token. A drafter proposes `width` tokens; the model reads the last sampled token and the draft together, and at
each position samples what it would have sampled anyway. Draft tokens are accepted as long as they agree, and
the first sampled token that differs replaces a rejected one. So the sequence is the same, token for token, at
any temperature (see sampling.py), and each pass yields 1 to width + 1 tokens.

    PromptLookup   proposes what followed the last few tokens earlier in this sequence. Free, and good where a
                   sequence repeats itself or its prompt. Searched on the device.
    DraftModel     a small model of the same vocabulary proposes, with the same noise as the large one, so that
                   they agree as often as their distributions allow.

No value is read on the host: drafting is part of the captured step.
"""

from dataclasses import replace
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from nanorun.infer.cache import Cache
from nanorun.infer.forward import Decode
from nanorun.infer.sampling import GumbelArgmax, SamplingFeatures, SamplingParams, sample

MAX_MATCH = 4  # tokens of the end of the sequence that prompt lookup compares


class Drafter(Protocol):
    width: int

    def propose(
        self,
        slots: Tensor,
        pending: Tensor,
        positions: Tensor,
        params: SamplingParams,
        features: SamplingFeatures,
        longest: int | None,
    ) -> Tensor:
        """Draft tokens (B, width) for what follows token `pending` at `positions`."""
        ...


class PromptLookup:
    def __init__(self, cache: Cache, width: int) -> None:
        self.cache, self.width = cache, width

    def propose(self, slots: Tensor, pending: Tensor, positions: Tensor, *_: object) -> Tensor:
        tokens = self.cache.tokens[slots].scatter(1, positions[:, None], pending[:, None])  # (B, context)
        at = torch.arange(tokens.size(1), device=tokens.device)
        match = (tokens == pending[:, None]) & (at < positions[:, None])
        length = match.long()  # how many tokens up to here match the end of the sequence
        for back in range(1, MAX_MATCH):
            suffix = tokens.gather(1, (positions[:, None] - back).clamp(min=0))
            match = match & (F.pad(tokens, (back, 0), value=-1)[:, : tokens.size(1)] == suffix)
            length = length + match
        best = (length * tokens.size(1) + at).masked_fill(length == 0, 0).argmax(1, keepdim=True)
        # Beyond its end the sequence is assumed to continue with the same period.
        period = (positions[:, None] - best).clamp(min=1)
        return tokens.gather(1, best + 1 + torch.arange(self.width, device=tokens.device) % period)


class DraftModel:
    def __init__(self, decode: Decode, cache: Cache, width: int, context: int, select: GumbelArgmax) -> None:
        self.decode, self.cache, self.select = decode, cache, select
        self.width, self.max_position = width, context - 1

    def propose(
        self,
        slots: Tensor,
        pending: Tensor,
        positions: Tensor,
        params: SamplingParams,
        features: SamplingFeatures,
        longest: int | None,
    ) -> Tensor:
        features = replace(features, logprobs=False, top_logprobs=0)
        token, draft = pending, []
        for ahead in range(self.width + 1):
            at = (positions + ahead).clamp(max=self.max_position)
            logits = self.decode(slots, token, at, longest)
            if ahead == self.width:
                break  # this pass only fills the cache, which must be complete if all are accepted
            history = self.cache.tokens[slots] if features.penalty else None
            token = sample(logits, params, at + 1, features, history, self.select).tokens
            draft.append(token)
        return torch.stack(draft, 1)
