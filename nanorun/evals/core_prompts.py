"""Prompts as tokens, encoded once for a tokenizer and a task, and cached on disk.

The texts to compare in one example share most of their tokens, so an example is stored as their common prefix and
the suffix of each:

    BOS shots question ─┬─ answer A       prefix: up to the first token that differs
                        ├─ answer B       suffixes: the rest of each, of which the last `scored` tokens count
                        └─ answer C

Which tokens count is decided on tokens, not characters, since a tokenizer can merge the end of a question with the
beginning of an answer: in multiple choice those after the common prefix, in a schema the common suffix, in language
modeling those after the tokens of the prompt alone. At least the last token of every sequence counts, also where
one answer is a prefix of another; never the first, which nothing predicts.

data/core-prompts/ holds one .npz per task (plain arrays, no pickle). Its name is a hash of everything that the
tokens depend on, so a cached file is never stale; deleting the folder costs only the time to encode again.
"""

import contextlib
import hashlib
import io
import json
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Protocol, Self

import numpy as np

from nanorun import home
from nanorun.console import Progress
from nanorun.data.bundle import Bundle
from nanorun.evals.core_tasks import CoreTask, CoreTaskType, Example, apply_cap, read_examples, render_prompts
from nanorun.hardware import usable_cores

_VERSION = 1
_KEYS = ("tokens", "trunks", "choices", "gold", "tails", "scored")  # of the .npz, in the order of the fields
_EXAMPLES_AT_ONCE = 256  # whose texts can take some megabytes


# The prefix, the suffixes, and how many tokens count at the end of each sequence.
EncodedExample = tuple[np.ndarray, list[np.ndarray], list[int]]


class Encoder(Protocol):
    """The part of a tokenizer used here; `text.tokenizer.Tokenizer` implements it."""

    bos: int

    @property
    def fingerprint(self) -> str: ...

    def encode_documents(self, texts: Sequence[str], threads: int = 1) -> tuple[np.ndarray, np.ndarray]: ...


@dataclass(frozen=True)
class EncodedTask:
    """The examples of one task. A sequence is the prefix of its example followed by its own suffix."""

    tokens: np.ndarray  # of each example: the prefix, then its suffixes
    prefix_lengths: np.ndarray  # (examples,)
    choices: np.ndarray  # (examples,) number of sequences
    gold: np.ndarray  # (examples,) index of the correct sequence; 0 where there is only one
    suffix_lengths: np.ndarray  # (sequences,)
    scored: np.ndarray  # (sequences,) how many tokens at the end count

    @classmethod
    def from_examples(cls, examples: Sequence[EncodedExample], gold: Sequence[int]) -> Self:
        counts = (
            [len(prefix) for prefix, _, _ in examples],
            [len(suffixes) for _, suffixes, _ in examples],
            gold,
            [len(suffix) for _, suffixes, _ in examples for suffix in suffixes],
            [count for _, _, scored in examples for count in scored],
        )
        tokens = np.concatenate([part for prefix, suffixes, _ in examples for part in (prefix, *suffixes)])
        return cls(tokens, *(np.array(each, dtype=np.int32) for each in counts))

    def __len__(self) -> int:
        return len(self.prefix_lengths)

    def examples(self) -> Iterator[EncodedExample]:
        at, sequence = 0, 0
        for prefix, choices in zip(self.prefix_lengths.tolist(), self.choices.tolist(), strict=True):
            lengths = self.suffix_lengths[sequence : sequence + choices]
            ends = at + prefix + np.cumsum(lengths)
            suffixes = [self.tokens[end - n : end] for end, n in zip(ends, lengths, strict=True)]
            yield self.tokens[at : at + prefix], suffixes, self.scored[sequence : sequence + choices].tolist()
            at, sequence = int(ends[-1]), sequence + choices


def encode_task(
    bundle: Bundle, task: CoreTask, encoder: Encoder, cap: int | None = None, bar: Progress | None = None
) -> tuple[EncodedTask, int]:
    """A task's prompts as tokens, from the cache if present, and the number of examples of the whole task."""
    examples = read_examples(bundle, task)
    count, pool = apply_cap(task, examples, cap)
    key = _cache_key(task, encoder, bundle.read(task.file), count)
    path = cache_folder() / f"{task.label}-{key}.npz"
    encoded = _load(path)
    if encoded is None:
        encoded = encode_examples(task, pool, count, encoder, bar)
        _store(encoded, path)
    elif bar is not None:
        bar.advance(count)
    return encoded, len(examples)


def encode_examples(
    task: CoreTask, pool: Sequence[Example], count: int, encoder: Encoder, bar: Progress | None = None
) -> EncodedTask:
    """Encodes the first `count` examples of the pool, with shots from all of it."""
    examples = []
    for start in range(0, count, _EXAMPLES_AT_ONCE):
        group = [render_prompts(task, pool, i) for i in range(start, min(start + _EXAMPLES_AT_ONCE, count))]
        flat, offsets = encoder.encode_documents([text for texts in group for text in texts], usable_cores())
        bos = np.array([encoder.bos], dtype=flat.dtype)
        sequences_of_group = iter([np.concatenate([bos, flat[a:b]]) for a, b in pairwise(offsets)])
        for texts in group:
            sequences, starts = scored_spans(task.kind, [next(sequences_of_group) for _ in texts])
            prefix = starts[0] if len(sequences) == 1 else common_prefix(sequences)
            scored = [len(s) - start for s, start in zip(sequences, starts, strict=True)]
            examples.append((sequences[0][:prefix], [s[prefix:] for s in sequences], scored))
        if bar is not None:
            bar.advance(len(group))
    gold = [0 if task.kind == "language_modeling" else pool[i]["gold"] for i in range(count)]
    return EncodedTask.from_examples(examples, gold)


def scored_spans(kind: CoreTaskType, sequences: list[np.ndarray]) -> tuple[list[np.ndarray], list[int]]:
    """The sequences to score, and the first token of each that counts."""
    if kind == "schema":
        shared = common_prefix([sequence[::-1] for sequence in sequences])
        return sequences, [max(len(sequence) - shared, 1) for sequence in sequences]
    start = common_prefix(sequences)
    if kind == "language_modeling":
        sequences = sequences[1:]  # the first is the prompt alone
    shortest = min(len(sequence) for sequence in sequences)
    return sequences, [max(min(start, shortest - 1), 1)] * len(sequences)


def common_prefix(sequences: Sequence[np.ndarray]) -> int:
    """The number of leading tokens that all sequences share."""
    length = min(map(len, sequences))
    same = np.all([sequence[:length] == sequences[0][:length] for sequence in sequences], axis=0)
    return length if same.all() else int(same.argmin())


# -- the cache on disk -------------------------------------------------------------------------------


def cache_folder() -> Path:
    return home.data_dir() / "core-prompts"


def _cache_key(task: CoreTask, encoder: Encoder, content: bytes, count: int) -> str:
    settings = [_VERSION, task.label, task.kind, task.shots, task.delimiter, count, encoder.bos]
    about = json.dumps([*settings, encoder.fingerprint, hashlib.sha256(content).hexdigest()])
    return hashlib.sha256(about.encode()).hexdigest()[:24]


def _load(path: Path) -> EncodedTask | None:
    """The cached file, or None if it is missing or fails its checksums."""
    try:
        with np.load(path, allow_pickle=False) as stored:
            return EncodedTask(*(stored[key] for key in _KEYS))
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
        return None


def _store(encoded: EncodedTask, path: Path) -> None:
    """If the home is read-only, the next evaluation encodes again."""
    content = io.BytesIO()
    np.savez(content, **dict(zip(_KEYS, vars(encoded).values(), strict=True)))
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        home.replace_file(path, content.getvalue())
