# mypy: disallow-untyped-defs=False
"""The end of a step: the final norm and the head, and the next token from the logits without leaving the GPU.

A token is drawn by the Gumbel trick: the largest of logit/temperature + noise is distributed as softmax,
and a largest is found in two small passes: each block of the vocabulary names its best, and `pick` takes
the best of those. The head can name its blocks' best while it has the logits in registers. Noise is a
counter-based hash of (the row's seed, its position, the token): a row draws the same whatever it is
batched with and whichever kernel draws it. Temperature 0 takes the largest logit, ties to the lower token.
Not covered: top-k and nucleus sampling, which need the logits sorted.
"""

import torch
from torch import Tensor

from nanorun.infer.kernels.language import (
    jit,
    largest_power_of_two_in,
    let_next_start,
    tl,
    triton,
    wait_for_previous,
)
from nanorun.infer.kernels.linear import EPS, Matrix, Tile, activated, load_matrix_rows, multiply

SAMPLE_BLOCK = 1024


def plain_pick(logits: Tensor, noise: Tensor, temperatures: Tensor) -> Tensor:
    """The token of each row, given Gumbel noise (B, vocabulary)."""
    hot = temperatures > 0
    perturbed = logits / torch.where(hot, temperatures, 1.0)[:, None] + noise
    return torch.where(hot[:, None], perturbed, logits).argmax(1)


@jit
def gumbel(seed, position, token):
    """Gumbel noise, -log of an exponential number, itself -log(1 - uniform).

    Large noise decides the draw and comes from uniform numbers near 0, where floats are finest: there
    -log(1 - u) is taken as u + u²/2.
    """
    u = tl.maximum(tl.rand(seed + position * 0x9E3779B97F4A7C1, token), 2e-10)
    return -tl.log(tl.where(u < 1e-3, u + 0.5 * u * u, -tl.log(1.0 - u)))


@jit
def store_best(
    logits, token, vocab, row, block, blocks, seeds, positions, temperatures, best_value, best_token
):
    """The best token of a block of logits, and how good it is."""
    temperature = tl.load(temperatures + row)
    hot = temperature > 0
    seed = tl.load(seeds + row).to(tl.int64)
    noise = gumbel(seed, tl.load(positions + row).to(tl.int64), token)
    score = tl.where(hot, logits / tl.where(hot, temperature, 1.0) + noise, logits)
    score = tl.where(token < vocab, score, float("-inf"))
    value, index = tl.max(score, 0, return_indices=True)
    tl.store(best_value + row * blocks + block, value)
    tl.store(best_token + row * blocks + block, tl.min(token, 0) + index)


@jit
def _head_rows(
    x,
    w,
    scales,
    logits,
    vocab,
    cap,
    seeds,
    positions,
    temperatures,
    best_value,
    best_token,
    B: tl.constexpr,
    K: tl.constexpr,
    EPS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    SCALED: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    let_next_start(PDL)
    block = tl.program_id(0)
    r = block * ROWS + tl.arange(0, ROWS)
    tiles = load_matrix_rows(w, r, vocab, K, BLOCK_K)
    wait_for_previous(PDL)
    for b in tl.static_range(B):
        z = multiply(tiles, x + b * K, True, EPS, K, BLOCK_K)
        if SCALED:
            z *= tl.load(scales + r, mask=r < vocab, other=0.0)
        z = activated(z, cap, ACTIVATION)
        tl.store(logits + b * vocab + r, z, mask=r < vocab)
        store_best(
            z, r, vocab, b, block, tl.num_programs(0), seeds, positions, temperatures, best_value, best_token
        )


@jit
def _best_of_blocks(
    logits,
    vocab,
    seeds,
    positions,
    temperatures,
    best_value,
    best_token,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    let_next_start(PDL)
    wait_for_previous(PDL)
    row, block = tl.program_id(0), tl.program_id(1)
    token = block * BLOCK + tl.arange(0, BLOCK)
    z = tl.load(logits + row * vocab + token, mask=token < vocab, other=0.0)
    store_best(
        z,
        token,
        vocab,
        row,
        block,
        tl.num_programs(1),
        seeds,
        positions,
        temperatures,
        best_value,
        best_token,
    )


@jit
def _pick(best_value, best_token, tokens, blocks, BLOCKS: tl.constexpr, PDL: tl.constexpr):
    let_next_start(PDL)
    wait_for_previous(PDL)
    row = tl.program_id(0)
    block = tl.arange(0, BLOCKS)
    value = tl.load(best_value + row * blocks + block, mask=block < blocks, other=float("-inf"))
    winner = tl.argmax(value, 0)
    token = tl.load(best_token + row * blocks + winner)
    tl.store(tokens + row, token.to(tokens.dtype.element_ty))


def head_logits_and_best(
    x: Tensor,
    matrix: Matrix,
    logits: Tensor,
    cap: float,
    seeds: Tensor,
    positions: Tensor,
    temperatures: Tensor,
    *,
    tile: Tile,
    pdl: bool = False,
) -> tuple[Tensor, Tensor]:
    """fp32 logits (B, vocabulary) of norm(x), and each block's best value and token: (B, blocks) each.

    For few rows; where the token is chosen elsewhere, `norm_linear` with a softcap gives the logits alone.
    """
    batch, width = x.shape
    vocab = logits.size(1)
    blocks = triton.cdiv(vocab, tile.rows)
    best_value = torch.empty(batch, blocks, device=x.device)
    best_token = torch.empty(batch, blocks, device=x.device, dtype=torch.int32)
    _head_rows[(blocks,)](
        x, matrix.weight, matrix.scales, logits, vocab, cap, seeds, positions, temperatures,
        best_value, best_token,
        B=batch, K=width, EPS=EPS, ACTIVATION="softcap" if cap else "none", SCALED=matrix.scales is not None,
        ROWS=tile.rows, BLOCK_K=largest_power_of_two_in(width, tile.inputs), PDL=pdl,
        num_warps=tile.warps, launch_pdl=pdl,
    )  # fmt: skip
    return best_value, best_token


def best_of_blocks(
    logits: Tensor, seeds: Tensor, positions: Tensor, temperatures: Tensor, *, pdl: bool = False
) -> tuple[Tensor, Tensor]:
    """The same from logits that are there already."""
    batch, vocab = logits.shape
    blocks = triton.cdiv(vocab, SAMPLE_BLOCK)
    best_value = torch.empty(batch, blocks, device=logits.device)
    best_token = torch.empty(batch, blocks, device=logits.device, dtype=torch.int32)
    _best_of_blocks[(batch, blocks)](
        logits, vocab, seeds, positions, temperatures, best_value, best_token,
        BLOCK=SAMPLE_BLOCK, PDL=pdl, num_warps=4, launch_pdl=pdl,
    )  # fmt: skip
    return best_value, best_token


def pick(best_value: Tensor, best_token: Tensor, tokens: Tensor, *, pdl: bool = False) -> Tensor:
    """tokens (B,) = the best of each row's blocks."""
    batch, blocks = best_value.shape
    _pick[(batch,)](
        best_value, best_token, tokens, blocks,
        BLOCKS=triton.next_power_of_2(blocks), PDL=pdl, num_warps=4, launch_pdl=pdl,
    )  # fmt: skip
    return tokens
