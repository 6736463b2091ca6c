import pytest

from nanorun.data import sample
from nanorun.text.tokenizer import Tokenizer, train_tokenizer


@pytest.fixture(scope="session")
def tokenizers() -> list[Tokenizer]:
    """A small vocabulary and a larger one, in which letters also begin longer tokens."""
    texts = list(sample.documents("train", 200_000))
    return [train_tokenizer(texts, size, f"t{size}", dataset="sample") for size in (300, 1500)]
