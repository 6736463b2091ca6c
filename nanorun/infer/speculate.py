"""Guessing ahead: cheap guesses of the next few tokens, all checked in one pass of the model.

Decoding is bound by reading the weights, so a pass over five tokens costs little more than over one. A
drafter guesses `width` tokens; the model reads the last true token and the guesses together, and at each
position chooses what it would have chosen anyway. Guesses count as long as they agree with it, and the
first choice that differs takes the place of a wrong guess. So the text is the same, token for token, at any
temperature (see sampling.py), and each pass yields 1 to width + 1 tokens of it.

    Lookup   the guess is what followed when the last few tokens came before in this text. Free, and good
             where a text repeats itself or its prompt. Searched on the device.
    Draft    a small model of the same vocabulary guesses, with the same noise as the large one, so that
             they agree as often as their distributions allow.

Nothing here looks at a value on the host: guesses are part of the captured step.
"""

from dataclasses import replace
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from nanorun.infer.cache import Cache
from nanorun.infer.forward import Decode
from nanorun.infer.sampling import Pick, Plan, Rules, sample

LONGEST_MATCH = 4


class Drafter(Protocol):
    width: int

    def propose(
        self, slots: Tensor, pending: Tensor, positions: Tensor, rules: Rules, plan: Plan, longest: int | None
    ) -> Tensor:
        """Guesses (B, width) of what follows token `pending` at `positions`."""
        ...


class Lookup:
    def __init__(self, cache: Cache, width: int) -> None:
        self.cache, self.width = cache, width

    def propose(
        self, slots: Tensor, pending: Tensor, positions: Tensor, rules: Rules, plan: Plan, longest: int | None
    ) -> Tensor:
        text = self.cache.tokens[slots].scatter(1, positions[:, None], pending[:, None])  # (B, context)
        at = torch.arange(text.size(1), device=text.device)
        match = (text == pending[:, None]) & (at < positions[:, None])
        depth = match.long()  # how many tokens up to here are those that end the text
        for back in range(1, LONGEST_MATCH):
            ending = text.gather(1, (positions[:, None] - back).clamp(min=0))
            match = match & (F.pad(text, (back, 0), value=-1)[:, : text.size(1)] == ending)
            depth = depth + match
        found = (depth * text.size(1) + at).masked_fill(depth == 0, 0).argmax(1, keepdim=True)
        # Behind its end the text is taken to go on with the same period.
        period = (positions[:, None] - found).clamp(min=1)
        return text.gather(1, found + 1 + torch.arange(self.width, device=text.device) % period)


class Draft:
    def __init__(self, decode: Decode, cache: Cache, width: int, context: int, pick: Pick) -> None:
        self.decode, self.cache, self.pick = decode, cache, pick
        self.width, self.last = width, context - 1

    def propose(
        self, slots: Tensor, pending: Tensor, positions: Tensor, rules: Rules, plan: Plan, longest: int | None
    ) -> Tensor:
        plan = replace(plan, logprobs=False, top=0)
        token, guesses = pending, []
        for ahead in range(self.width + 1):
            at = (positions + ahead).clamp(max=self.last)
            logits = self.decode(slots, token, at, longest)
            if ahead == self.width:  # only read, so that nothing is missing in its cache if all are right
                break
            history = self.cache.tokens[slots] if plan.penalty else None
            token = sample(logits, rules, at + 1, plan, history, self.pick).tokens
            guesses.append(token)
        return torch.stack(guesses, 1)
