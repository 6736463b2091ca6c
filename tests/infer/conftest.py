"""Small models for these tests."""

import pytest
import torch
from interpreter import accept_array_loop_bounds
from small_models import byte_tokenizer, taught

from nanorun.model.gpt import GPT
from nanorun.text.tokenizer import Tokenizer

accept_array_loop_bounds()


@pytest.fixture(autouse=True, scope="session")
def few_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(min(2, before))
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return byte_tokenizer()


@pytest.fixture(scope="session")
def parrot(tokenizer: Tokenizer) -> GPT:
    return taught(tokenizer)
