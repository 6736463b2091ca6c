"""Small models for these tests; and Triton's interpreter, where it runs kernels, with the numpy that is pinned."""

import os

import pytest
import torch
from small_models import byte_tokenizer, taught

from nanorun.model.gpt import GPT
from nanorun.text.tokenizer import Tokenizer

if os.environ.get("TRITON_INTERPRET") == "1":
    try:
        from triton.runtime import interpreter
    except ImportError:
        interpreter = None

    if interpreter is not None:
        patch = interpreter._patch_lang_tensor

        def patch_for_numpy_2_4(tensor, scope):
            """Loop bounds are arrays of one element, which numpy no longer takes for numbers by itself."""
            patch(tensor, scope)
            scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

        interpreter._patch_lang_tensor = patch_for_numpy_2_4


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
