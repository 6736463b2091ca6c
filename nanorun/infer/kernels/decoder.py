"""The kernels as the engine's way to decode: one `Decoder` that takes the place of the plain one."""

import functools

import torch
from torch import Tensor

from nanorun.infer.cache import Cache
from nanorun.infer.forward import Decode, plain
from nanorun.infer.frozen import FrozenGPT
from nanorun.infer.kernels.language import pdl_works
from nanorun.infer.kernels.settle import settle
from nanorun.infer.kernels.step import Tuning, decode_step, fits, tune
from nanorun.infer.kernels.weights import DecodeWeights, RingCache, Scratch
from nanorun.infer.step import GreedySample
from nanorun.model.gpt import GPT


def by_kernels(weights: GPT, cache: Cache) -> Decode:
    """Rows that are real must have slots of their own (so no drafts are verified by it); those that only fill up
    a batch may share the scratch slot, where nobody minds what is written. A model of a shape that the kernels
    do not take is decoded the plain way."""
    if not fits(weights.config):
        return plain(weights, cache)
    assert isinstance(weights, FrozenGPT)
    laid_out = DecodeWeights.of(weights)
    ring = RingCache(tuple(cache.k), tuple(cache.v), cache.tokens)
    made: dict[int, tuple[Tuning, Scratch]] = {}  # by batch size; graphs hold on to it

    def decode(slots: Tensor, tokens: Tensor, positions: Tensor, longest: int | None = None) -> Tensor:
        batch = tokens.size(0)
        if batch not in made:
            tuning = tune(weights.config, batch, tokens.device, weights.int8)
            made[batch] = tuning, Scratch(laid_out, batch, tuning.most_splits)
        tuning, scratch = made[batch]
        return decode_step(laid_out, ring, slots, tokens, positions, tuning=tuning, scratch=scratch)

    return decode


def greedy_end(device: torch.device) -> GreedySample:
    return functools.partial(settle, pdl=pdl_works(device))
