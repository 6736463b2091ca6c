"""Small models to generate with: random ones of many shapes, and one that has memorized a text."""

import random
from typing import Any

import torch

from nanorun.config import ModelConfig, scale_model
from nanorun.model.gpt import GPT, build
from nanorun.text.tokenizer import SPECIAL_TOKENS, Tokenizer

CPU = torch.device("cpu")
VOCAB = 97
TEXT = "Grüße aus 東京! Ein 🙂 für dich. "

# Windows shorter than any prompt, odd sizes, each switch off, grouped queries, one layer.
SHAPES: dict[str, dict[str, Any]] = {
    "all": {},
    "grouped": {"kv_heads": 2, "short_window": 5},
    "one kv head": {"kv_heads": 1, "windows": "S", "short_window": 1},
    "full windows": {"windows": "L"},
    "one layer": {"depth": 1},
    "odd": {"depth": 5, "dim": 78, "heads": 3, "kv_heads": 3, "short_window": 7, "context": 61},
    "no values": {"value_embeddings": False},
    "no smear": {"smear": False},
    "no backout": {"backout": False},
    "bare": {
        "value_embeddings": False, "smear": False, "backout": False, "residual_scalars": False, "softcap": 0.0,
    },
}  # fmt: skip


def shape(name: str) -> ModelConfig:
    changes = {"dim": 48, "heads": 4, "kv_heads": 4, "short_window": 6, **SHAPES[name]}
    return scale_model(changes.pop("depth", 4), VOCAB, changes.pop("context", 64), **changes)


def grown(config: ModelConfig, seed: int = 0) -> GPT:
    """A model whose parameters are all far from their (partly zero) initialization, so that each has an effect."""
    model = build(config, CPU, torch.float32, seed=seed)
    rng = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=rng)
    return model


def some_prompts(count: int, longest: int, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(VOCAB) for _ in range(rng.randint(1, longest))] for _ in range(count)]


def byte_tokenizer() -> Tokenizer:
    """Every byte is a token, and so are two pairs; a character takes up to four tokens."""
    ranks = {bytes([b]): b for b in range(256)} | {b"Gr": 256, b"us": 257}
    special = {name: 258 + i for i, name in enumerate(SPECIAL_TOKENS)}
    return Tokenizer("bytes", r"\S+|\s+", ranks, special)


def taught(tokenizer: Tokenizer, depth: int = 2, steps: int = 80) -> GPT:
    """A model that has learned to say TEXT over and over."""
    config = scale_model(
        depth, tokenizer.vocab_size, context=160, dim=64, heads=2, kv_heads=2, short_window=32
    )
    model = build(config, CPU, torch.float32)
    row = torch.tensor([[tokenizer.bos, *tokenizer.encode(TEXT * 6)][:161]])
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    for _ in range(steps):
        loss = model(row[:, :-1], row[:, 1:].clone()) / (row.size(1) - 1)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert loss.item() < 0.2
    return model.eval()
