"""The two functions at the heart of generation: `prefill` processes many tokens, `decode` one per row.

Both run the trunk of model/gpt.py, on a copy of the model for inference (model.py), and store keys and values in the
cache; they differ in what attention reads.

    prefill   chunks of some sequences. A chunk attends to the cached tokens of its sequence, and to itself. A
              prompt may be split into chunks of any size: the result is that of a single chunk.
    decode    one token for each of N rows, whose slots and positions are device tensors. Nothing depends on
              values on the host and all shapes are fixed, so a step can be captured as a CUDA graph.

The rows of `decode` may be several tokens of one sequence: all keys are written before any query attends, and each
row attends only up to its own position. That is how drafts are verified: N rows for N draft tokens, one pass.

Of a prompt, only the logits after its last token are needed. So a prompt is prefilled without its last token, which
is then the first to be decoded: prefill has no head, and samples that share a prompt diverge at their first decode
step.

All of this is plain PyTorch, for any device, and the reference for the fast decode step (kernels/decode.py). A
`DecodeFactory` makes the decode function of an engine, once.
"""

import functools
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from nanorun.infer.cache import Cache, on_device
from nanorun.infer.model import InferenceGPT
from nanorun.model.gpt import Attend

# Shapes: N rows or tokens, R sequences, T tokens of a chunk, S slots, L length of a ring, H heads, K kv heads,
# D head dimension.
Decode = Callable[[Tensor, Tensor, Tensor, int | None], Tensor]  # `decode` of one model and cache
DecodeFactory = Callable[[InferenceGPT, Cache], Decode]


def make_plain_decode(model: InferenceGPT, cache: Cache) -> Decode:
    return functools.partial(decode, model, cache)


def make_compiled_decode(model: InferenceGPT, cache: Cache) -> Decode:
    """The same through torch.compile: far fewer kernels, for GPUs that ours do not support."""
    return torch.compile(functools.partial(decode, model, cache), dynamic=False)


def decode(
    model: InferenceGPT,
    cache: Cache,
    slots: Tensor,
    tokens: Tensor,
    positions: Tensor,
    longest: int | None = None,
) -> Tensor:
    """fp32 logits (N, vocabulary) after each token; a position is also the number of tokens before it.

    `longest` is an upper bound of positions + 1, where the host knows one; attention then reads less.
    """
    cache.tokens[slots, positions] = tokens
    previous_tokens = cache.tokens[slots, (positions - 1).clamp(min=0)]
    masks: dict[tuple[int, int], Tensor] = {}  # by ring length and window, of which there are at most two

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        cache.write(layer, slots, positions, k, v)
        ring, window = kind = cache.lengths[layer], model.config.window(layer)
        if kind not in masks:
            index = torch.arange(min(ring, longest or ring), device=positions.device)
            age = (positions[:, None] - index) % ring  # how many tokens before the newest this key is
            visible = age < (positions + 1).clamp(max=window)[:, None]
            masks[kind] = _additive_mask(visible, model.dtype)[:, None, None]
        mask = masks[kind]
        keys, values = (x[layer][:, :, : mask.size(3)].index_select(0, slots) for x in (cache.k, cache.v))
        grouped = q.unflatten(1, (k.size(1), -1))  # heads that share a key are queries of one head
        return F.scaled_dot_product_attention(grouped, keys, values, attn_mask=mask).flatten(1, 2)

    return model.logits_of(hidden_at(model, tokens, previous_tokens, positions, attend))


def prefill(
    model: InferenceGPT,
    cache: Cache,
    slots: Sequence[int],
    chunks: Sequence[Sequence[int]],
    starts: Sequence[int],
) -> None:
    """Stores the keys and values of each chunk in its slot, which already holds the `start` tokens before it."""
    device, time = cache.tokens.device, max(len(chunk) for chunk in chunks)
    padded = [[*chunk, *([0] * (time - len(chunk)))] for chunk in chunks]
    tokens = on_device(padded, device)  # (R, T)
    layout = on_device([list(starts), [len(chunk) for chunk in chunks], list(slots)], device)
    start, size, rows = layout[:, :, None]
    step = torch.arange(time, device=device)
    positions = (start + step).clamp(max=model.config.context - 1)  # padding may exceed the context
    targets = rows.expand(-1, time).masked_fill(step >= size, cache.scratch)  # the slot of each token
    before = cache.tokens[rows, (start - 1).clamp(min=0)]
    previous_tokens = torch.cat([before, tokens[:, :-1]], 1)
    cache.tokens[targets, positions] = tokens
    max_start = max(starts)
    masks: dict[tuple[int, int], Tensor | None] = {}

    def mask(ring: int, window: int) -> Tensor | None:
        """Which keys each token attends to: of the ring as it was before, and of the chunks themselves."""
        if max_start == 0 and time <= window:
            return None  # nothing cached or outside the window: causal attention, which has a fast kernel
        index = torch.arange(min(ring, max_start), device=device)
        cached = start - 1 - (start - 1 - index) % ring  # the position of each key in the ring, < 0: none
        key = torch.cat([cached.masked_fill(cached < 0, -window), positions], 1)[:, None]  # (R, 1, keys)
        query = positions[:, :, None]
        return _additive_mask((key <= query) & (key > query - window), model.dtype)[:, None]

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        ring, window = kind = cache.lengths[layer], model.config.window(layer)
        if kind not in masks:
            masks[kind] = mask(ring, window)
        q, k, v = (x.unflatten(0, (-1, time)).transpose(1, 2) for x in (q, k, v))  # (R, H or K, T, D)
        cached = [
            x[layer][:, :, : min(ring, max_start)].index_select(0, rows[:, 0]) for x in (cache.k, cache.v)
        ]
        keys, values = (torch.cat(pair, 2) for pair in zip(cached, (k, v), strict=True))
        if (group := q.size(1) // k.size(1)) > 1:
            keys, values = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)
        y = F.scaled_dot_product_attention(
            q, keys, values, attn_mask=masks[kind], is_causal=masks[kind] is None
        )
        kept = targets.masked_fill(step < size - ring, cache.scratch)  # the ring keeps the end of a chunk
        cache.write(layer, kept.flatten(), positions.flatten(), _flatten_rows(k), _flatten_rows(v))
        return _flatten_rows(y)

    hidden_at(model, tokens.flatten(), previous_tokens.flatten(), positions.flatten(), attend)


def hidden_at(
    model: InferenceGPT, tokens: Tensor, previous_tokens: Tensor, positions: Tensor, attend: Attend
) -> Tensor:
    """The trunk over tokens (N,) of any sequences, each with the token before it and its position, to (N, D)."""
    rope = F.embedding(positions, model.cos).unsqueeze(-2), F.embedding(positions, model.sin).unsqueeze(-2)

    def smear(_x: Tensor) -> Tensor:  # from tables: embedding and gate depend on the token alone
        assert model.smear_gates is not None
        gate = F.embedding(tokens, model.smear_gates) * (positions > 0).unsqueeze(-1)
        return gate * model.embedded(previous_tokens)

    return model.trunk(tokens, rope, smear, attend)


def _additive_mask(visible: Tensor, dtype: torch.dtype) -> Tensor:
    """A mask to add to scores. From a boolean mask, torch would compute this one in every layer, with a copy from
    the host that a CUDA graph cannot contain."""
    return torch.zeros(visible.shape, device=visible.device, dtype=dtype).masked_fill_(
        ~visible, float("-inf")
    )


def _flatten_rows(x: Tensor) -> Tensor:
    """(R, H, T, D) with one row per token, (R·T, H, D)."""
    return x.transpose(1, 2).flatten(0, 1)
