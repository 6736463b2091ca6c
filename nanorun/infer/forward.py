"""The two functions at the heart of generation: `prefill` reads many tokens, `decode` one a row.

Both run the trunk of model/gpt.py, on a frozen copy of the model (frozen.py), and leave keys and values in the
cache; they differ in what attention looks at.

    prefill   chunks of some texts. A chunk sees what the cache holds of its text, and itself. A text may
              come in chunks of any size: the result is that of reading it at once.
    decode    one token for each of N rows, which say by device tensors where they belong. Nothing depends
              on values on the host and all shapes are fixed, so a step can be captured as a CUDA graph.

The rows of `decode` may be several tokens of one text: all keys are written before any query looks, and
each row sees only up to its own position. That is how drafts are verified: N rows for N guesses, one pass.

Nobody needs the logits of a prompt but those after its last token. So a prompt is read without its last
token, which then is the first that is decoded: prefill has no head, and samples that share a prompt differ
from their first decode step on.

All of this is plain torch, for any device, and the truth that kernels are compared with. A `Decoder` is
the place where one takes over: an engine asks it once for the function that decodes.
"""

import functools
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from nanorun.infer.cache import Cache, on_device
from nanorun.model.gpt import GPT

# Shapes: N rows or tokens, R texts, T tokens of a chunk, S slots, L length of a ring, H heads, K kv heads,
# D head dimension.
Decode = Callable[[Tensor, Tensor, Tensor, int | None], Tensor]  # `decode` for some weights and cache
Decoder = Callable[[GPT, Cache], Decode]


def plain(model: GPT, cache: Cache) -> Decode:
    return functools.partial(decode, model, cache)


def compiled_plain(model: GPT, cache: Cache) -> Decode:
    """The same through torch.compile: far fewer kernels, for GPUs that our own do not run on."""
    return torch.compile(functools.partial(decode, model, cache), dynamic=False)


def decode(
    model: GPT,
    cache: Cache,
    slots: Tensor,
    tokens: Tensor,
    positions: Tensor,
    longest: int | None = None,
) -> Tensor:
    """fp32 logits (N, vocabulary) after each token; its position is also how many tokens precede it.

    `longest` bounds all positions + 1 where the host knows it; plain attention then reads less.
    """
    cache.tokens[slots, positions] = tokens
    previous = cache.tokens[slots, (positions - 1).clamp(min=0)]
    masks: dict[tuple[int, int], Tensor] = {}  # by ring and window, of which there are two at most

    def attend(i: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        cache.write(i, slots, positions, k, v)
        kind = (cache.lengths[i], model.config.window(i))
        if kind not in masks:
            seen = visible(positions, *kind, longest or cache.lengths[i])
            masks[kind] = additive(seen, model.dtype)[:, None, None]
        return decode_attention(q, cache.k[i], cache.v[i], slots, masks[kind])

    return model.logits_of(model.hidden_at(tokens, previous, positions, attend))


def prefill(
    model: GPT,
    cache: Cache,
    slots: Sequence[int],
    chunks: Sequence[Sequence[int]],
    starts: Sequence[int],
) -> None:
    """Reads each chunk into its slot, which already holds the `start` tokens before it."""
    device, time = cache.tokens.device, max(len(chunk) for chunk in chunks)
    padded = [[*chunk, *([0] * (time - len(chunk)))] for chunk in chunks]
    tokens = on_device(padded, device)  # (R, T)
    about = on_device([list(starts), [len(chunk) for chunk in chunks], list(slots)], device)
    start, size, rows = about[:, :, None]
    step = torch.arange(time, device=device)
    positions = (start + step).clamp(max=model.config.context - 1)  # padding may lie beyond
    real = rows.expand(-1, time).masked_fill(step >= size, cache.scratch)  # where each token is written
    before = cache.tokens[rows, (start - 1).clamp(min=0)]
    previous = torch.cat([before, tokens[:, :-1]], 1)
    cache.tokens[real, positions] = tokens
    oldest = max(starts)
    masks: dict[tuple[int, int], Tensor | None] = {}

    def mask(ring: int, window: int) -> Tensor | None:
        """What each token sees: of the ring as it was before, and of the chunks themselves."""
        if oldest == 0 and time <= window:
            return None  # nothing before, nothing out of sight: plain causal attention, its fast kernel
        index = torch.arange(min(ring, oldest), device=device)
        held = start - 1 - (start - 1 - index) % ring  # the position of each key in the ring, < 0: none
        at = torch.cat([held.masked_fill(held < 0, -window), positions], 1)[:, None]  # (R, 1, keys)
        query = positions[:, :, None]
        return additive((at <= query) & (at > query - window), model.dtype)[:, None]

    def attend(i: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        kind = ring, _ = cache.lengths[i], model.config.window(i)
        if kind not in masks:
            masks[kind] = mask(*kind)
        q, k, v = (x.unflatten(0, (-1, time)).transpose(1, 2) for x in (q, k, v))  # (R, H or K, T, D)
        old = [x[i][:, :, : min(ring, oldest)].index_select(0, rows[:, 0]) for x in (cache.k, cache.v)]
        mixed = _attend_chunk(q, torch.cat([old[0], k], 2), torch.cat([old[1], v], 2), masks[kind])
        kept = real.masked_fill(step < size - ring, cache.scratch)  # the ring holds the last of a chunk
        cache.write(i, kept.flatten(), positions.flatten(), _rows(k), _rows(v))
        return _rows(mixed)

    model.hidden_at(tokens.flatten(), previous.flatten(), positions.flatten(), attend)


def visible(positions: Tensor, ring: int, window: int, longest: int) -> Tensor:
    """Which places of a ring (N, places) a query at each position sees; only so many have been written."""
    index = torch.arange(min(ring, longest), device=positions.device)
    age = (positions[:, None] - index) % ring  # how many tokens before the newest this key is
    return age < (positions + 1).clamp(max=window)[:, None]


def additive(seen: Tensor, dtype: torch.dtype) -> Tensor:
    """A mask to add to scores. Given a boolean one, torch would make this of it in every layer, with a copy
    from the host that no graph may hold."""
    return torch.zeros(seen.shape, device=seen.device, dtype=dtype).masked_fill_(~seen, float("-inf"))


def decode_attention(q_nhd: Tensor, k_skld: Tensor, v_skld: Tensor, slots: Tensor, mask: Tensor) -> Tensor:
    """One query a row over what it may see of its slot; the mask is (N, 1, 1, places)."""
    k, v = (x[:, :, : mask.size(3)].index_select(0, slots) for x in (k_skld, v_skld))
    grouped = q_nhd.unflatten(1, (k.size(1), -1))  # heads that share a key are queries of one head
    return F.scaled_dot_product_attention(grouped, k, v, attn_mask=mask).flatten(1, 2)


def _attend_chunk(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """Queries (R, H, T, D) over all keys (R, K, keys, D); causal where there is no mask."""
    if (repeat := q.size(1) // k.size(1)) > 1:
        k, v = k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)


def _rows(x: Tensor) -> Tensor:
    """(R, H, T, D) as one row a token, (R·T, H, D)."""
    return x.transpose(1, 2).flatten(0, 1)
