"""Tokenizers and datasets together: `tok train` trains one on a dataset, training takes the one that belongs to its
dataset, `tok eval` evaluates one on another."""

import math
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from nanorun import home
from nanorun.console import Progress, say
from nanorun.data.dataset import Dataset, open_dataset
from nanorun.data.get import make_sample, newest_text
from nanorun.data.shards import read_texts
from nanorun.errors import UserError
from nanorun.provenance import record
from nanorun.text.evaluate import evaluate_tokenizers
from nanorun.text.store import available_public_tokenizers, open_tokenizer, tokenizer_names
from nanorun.text.tokenizer import CONFIG_FILE, Tokenizer, train_tokenizer

SAMPLE_DATA, SAMPLE_TOKENIZER, SAMPLE_VOCAB = "sample", "sample", 1024
SMALLEST_VOCABULARY, LARGEST_VOCABULARY = 512, 32_768  # by default


def size_for(text_bytes: int) -> int:
    """The default size of a vocabulary for so much text: the power of two nearest to its square root. A larger one
    has tokens that occur too rarely to be learned, and costs time in the head; a smaller one makes longer rows."""
    size = 2 ** round(math.log2(math.sqrt(max(text_bytes, 1))))
    return int(min(max(size, SMALLEST_VOCABULARY), LARGEST_VOCABULARY))


def train_on(
    dataset: Dataset,
    vocab_size: int | None,
    *,
    name: str | None = None,
    max_bytes: int,
    replace: bool = False,
) -> dict[str, Any]:
    """Trains a tokenizer on a dataset's training text and stores it as `tokenizers/NAME/`. Without a size, one that
    fits the text."""
    total = min(dataset.total("text_bytes", "train"), max_bytes)
    fills = vocab_size is not None
    if vocab_size is None:
        vocab_size = size_for(total)
        say(f"{total:,} bytes of text: a vocabulary of {vocab_size:,} tokens (--vocab chooses another)")
    name = home.check_name(name or f"{dataset.name}-{vocab_size}"[:64], "tokenizer")
    start = time.perf_counter()
    with (
        home.new_folder(home.tokenizers_dir() / name, replace=replace) as folder,
        Progress(f"reading {dataset.name}", total, "B") as bar,
    ):
        texts = _at_most(read_texts(dataset, "train"), max_bytes, bar)
        tokenizer = train_tokenizer(texts, vocab_size, name, dataset=dataset.name, fill=fills)
        tokenizer.save(folder)
    return {
        "name": name,
        "folder": str(home.tokenizers_dir() / name),
        "vocab_size": tokenizer.vocab_size,
        "fingerprint": tokenizer.fingerprint,
        "trained_on": dict(tokenizer.trained_on),
        "seconds": round(time.perf_counter() - start, 3),
    }


def tokenizer_for(dataset: Dataset) -> Tokenizer:
    """The tokenizer that a dataset of tokens was made with; for text the newest that was trained on it, or else the
    newest."""
    made_by = dataset.tokenizer or {}
    tokenizers = []
    for name in sorted(tokenizer_names(), key=_trained_at, reverse=True):
        with suppress(UserError):  # a damaged one is none that training could use
            tokenizers.append(open_tokenizer(name))
    if dataset.kind == "bin":
        same = (t for t in tokenizers if t.fingerprint == made_by.get("fingerprint"))
        return next(same, None) or open_tokenizer(made_by.get("name"))
    own = next((t for t in tokenizers if t.trained_on.get("dataset") == dataset.name), None)
    chosen = own or open_tokenizer()
    if own is None:
        say(
            f"using the newest tokenizer, '{chosen.name}', since none was trained on '{dataset.name}' "
            "(--tokenizer chooses another)"
        )
    elif len(tokenizers) > 1:
        say(f"using the tokenizer '{chosen.name}', trained on '{dataset.name}' (--tokenizer chooses another)")
    return chosen


def _trained_at(tokenizer: str) -> float:
    return (home.tokenizers_dir() / tokenizer / CONFIG_FILE).stat().st_mtime


def build_sample() -> None:
    """Makes the sample world and its tokenizer, whichever is missing, so that there is something to train on."""
    if not has_sample_data():
        make_sample(name=SAMPLE_DATA, replace=True)
    if not has_sample_tokenizer():
        train_sample_tokenizer()


def train_sample_tokenizer() -> None:
    dataset = open_dataset(SAMPLE_DATA)
    size = dataset.total("text_bytes", "train")
    train_on(dataset, SAMPLE_VOCAB, name=SAMPLE_TOKENIZER, max_bytes=size, replace=True)


def has_sample_data() -> bool:
    return _is_intact(open_dataset, home.data_dir() / SAMPLE_DATA)


def has_sample_tokenizer() -> bool:
    return _is_intact(open_tokenizer, home.tokenizers_dir() / SAMPLE_TOKENIZER)


def _is_intact(open_it: Callable[[str], object], folder: Path) -> bool:
    """Whether the result exists and is valid. A damaged one is made again, because all of it is generated."""
    if not folder.exists():
        return False
    try:
        open_it(folder.name)
    except UserError as error:
        say(f"{error} Making it again.")
        return False
    return True


def evaluate(names: Iterable[str], data: str | None, max_bytes: int) -> dict[str, Any]:
    """Compression and throughput of tokenizers on validation text, beside GPT-2's and GPT-4's if available."""
    tokenizers = [open_tokenizer(name) for name in names] or [open_tokenizer()]
    if data is None:
        data = tokenizers[0].trained_on.get("dataset")
    dataset = newest_text(data)
    texts = list(_at_most(read_texts(dataset, "val"), max_bytes))
    named = {tokenizer.name for tokenizer in tokenizers}
    others = [tokenizer for tokenizer in available_public_tokenizers() if tokenizer.name not in named]
    say(f"encoding {len(texts):,} validation documents of '{dataset.name}'")
    reports = evaluate_tokenizers(texts, [*tokenizers, *others])
    return record(
        "tokenizers",
        data=dataset.name,
        documents=len(texts),
        bytes=sum(len(text.encode()) for text in texts),
        tokenizers=reports,
    )


def _at_most(texts: Iterator[str], max_bytes: int, bar: Progress | None = None) -> Iterator[str]:
    if max_bytes < 1:
        raise UserError("--max-bytes must be at least 1.")
    for text in texts:
        yield text
        read = len(text.encode())
        if bar is not None:
            bar.advance(read)
        max_bytes -= read
        if max_bytes <= 0:
            return
