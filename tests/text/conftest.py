"""A small tokenizer, trained once from text made here, and GPT-2's where this machine has it."""

import functools
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from nanorun.text.store import public_tokenizer
from nanorun.text.tokenizer import Tokenizer, train_tokenizer

WORDS = """
the a of and to in harbour light river machine learns reading answer question small green morning letter
window because before under table music number returns value while Straße garçon 水 山 서울 🎂
"""


def make_text(documents: int = 60, seed: int = 0) -> list[str]:
    """Sentences, code, numbers and other scripts: enough for a vocabulary of about 600."""
    rng, words = random.Random(seed), WORDS.split()
    texts = []
    for _ in range(documents):
        sentence = " ".join(rng.choices(words, k=40)).capitalize()
        code = f"def f{rng.randrange(100)}(x):\n    return x + {rng.randrange(10_000)}\n"
        texts.append(f"{sentence}. It's {rng.randrange(3000)}, isn't it?\n\n{code}<|user|> said |> <| ok")
    return texts


@pytest.fixture(scope="session")
def made_text() -> Callable[..., list[str]]:
    return make_text


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return train_tokenizer(make_text(), 512, "small", dataset="made")


@pytest.fixture
def gpt2(shared_data: Path) -> Tokenizer:
    return _gpt2(shared_data / "gpt2.tiktoken")


_gpt2 = functools.cache(functools.partial(public_tokenizer, "gpt2"))
