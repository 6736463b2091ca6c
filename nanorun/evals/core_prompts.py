"""Prompts as tokens: made once for a tokenizer and a task, and kept on disk.

The texts to compare in one example share most of their tokens, so an example is stored as what all of them
begin with (the trunk) and what each goes on with (its tail):

    BOS shots question ─┬─ answer A       trunk: up to where the first of them differs
                        ├─ answer B       tails: the rest of each, the last `scored` tokens of which count
                        └─ answer C

What counts is found among tokens, not characters, since a tokenizer may join the end of a question with the
beginning of an answer: in a multiple choice what follows the common beginning, in a schema the common end,
in a text to go on with what follows the tokens that the prompt alone would have. At least the last token
counts of every sequence, also where one answer begins with the whole of another; never the first, which
nothing predicts.

data/core-prompts/ holds one .npz a task (plain arrays, no pickle). Its name is a hash of everything that the
tokens depend on, so nothing in it is ever out of date; removing the folder costs only the time to make it
again.
"""

import hashlib
import json
import os
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import islice, pairwise
from pathlib import Path
from typing import Protocol

import numpy as np

from nanorun import home
from nanorun.console import Progress
from nanorun.data.bundle import Bundle
from nanorun.evals.core_data import Example, Kind, Task, read_examples, rendered, under_cap
from nanorun.hardware import usable_cores

_VERSION = 1
_AT_ONCE = 256  # examples; their texts may be some megabytes


class Encoder(Protocol):
    """What is needed of a tokenizer; `text.tokenizer.Tokenizer` is one."""

    bos: int

    @property
    def fingerprint(self) -> str: ...

    def encode_documents(self, texts: Sequence[str], threads: int = 1) -> tuple[np.ndarray, np.ndarray]: ...


@dataclass(frozen=True)
class Encoded:
    """The examples of one task. Sequence c has the trunk of its example and its own tail."""

    tokens: np.ndarray  # of each example: the trunk, then its tails one after the other
    trunks: np.ndarray  # (examples,) lengths
    choices: np.ndarray  # (examples,) how many sequences each has
    gold: np.ndarray  # (examples,) the right one of them; 0 where there is only one
    tails: np.ndarray  # (sequences,) lengths
    scored: np.ndarray  # (sequences,) how many tokens at the end count

    def __len__(self) -> int:
        return len(self.trunks)

    def examples(self) -> Iterator[tuple[np.ndarray, list[np.ndarray], np.ndarray]]:
        """Trunk, tails and scored counts of each example."""
        at, sequence = 0, 0
        for trunk, choices in zip(self.trunks.tolist(), self.choices.tolist(), strict=True):
            lengths = self.tails[sequence : sequence + choices]
            ends = at + trunk + np.cumsum(lengths)
            tails = [self.tokens[end - n : end] for end, n in zip(ends, lengths, strict=True)]
            yield self.tokens[at : at + trunk], tails, self.scored[sequence : sequence + choices]
            at, sequence = int(ends[-1]), sequence + choices


def encode_task(
    bundle: Bundle, task: Task, encoder: Encoder, most: int | None = None, bar: Progress | None = None
) -> tuple[Encoded, int]:
    """A task's prompts as tokens, from disk if they are there, and how many examples the task has in all."""
    content = bundle.read(task.file)
    examples = read_examples(bundle, task, content)
    asked, pool = under_cap(task, examples, most)
    path = cache_folder() / f"{task.label}-{_key(task, encoder, content, asked)}.npz"
    encoded = _load(path, asked)
    if encoded is None:
        encoded = encode_examples(task, pool, asked, encoder, bar)
        _store(encoded, path)
    elif bar is not None:
        bar.advance(asked)
    return encoded, len(examples)


def encode_examples(
    task: Task, pool: Sequence[Example], asked: int, encoder: Encoder, bar: Progress | None = None
) -> Encoded:
    texts, parts = rendered(task, pool, asked), []
    trunks, choices, tails, scored = [], [], [], []
    while group := list(islice(texts, _AT_ONCE)):
        flat, offsets = encoder.encode_documents([t for texts in group for t in texts], usable_cores())
        number = 0
        for texts_of_one in group:
            ends = offsets[number : number + len(texts_of_one) + 1]
            sequences = [_behind_bos(flat[a:b], encoder.bos) for a, b in pairwise(ends)]
            sequences, starts = what_counts(task.kind, sequences)
            trunk = _trunk(sequences, starts)
            parts += [sequences[0][:trunk], *(s[trunk:] for s in sequences)]
            trunks.append(trunk)
            choices.append(len(sequences))
            tails += [len(s) - trunk for s in sequences]
            scored += [len(s) - start for s, start in zip(sequences, starts, strict=True)]
            number += len(texts_of_one)
        if bar is not None:
            bar.advance(len(group))
    gold = [0 if task.kind == "language_modeling" else pool[i]["gold"] for i in range(asked)]
    counts = (np.array(each, dtype=np.int32) for each in (trunks, choices, gold, tails, scored))
    return Encoded(np.concatenate(parts), *counts)


def what_counts(kind: Kind, sequences: list[np.ndarray]) -> tuple[list[np.ndarray], list[int]]:
    """The sequences to score, and where in each the tokens that count begin."""
    if kind == "language_modeling":
        prompt, whole = sequences
        sequences, start = [whole], common_length([prompt, whole])
        starts = [start]
    elif kind == "multiple_choice":
        starts = [common_length(sequences)] * len(sequences)
    else:
        shared = common_length([sequence[::-1] for sequence in sequences])
        starts = [len(sequence) - shared for sequence in sequences]
    shortest = min(len(sequence) for sequence in sequences)
    return sequences, [max(min(start, shortest - 1 if kind != "schema" else start), 1) for start in starts]


def common_length(sequences: Sequence[np.ndarray]) -> int:
    """How many tokens all of them begin with."""
    length = min(len(sequence) for sequence in sequences)
    first = sequences[0][:length]
    for other in sequences[1:]:
        differing = np.flatnonzero(first[:length] != other[:length])
        if len(differing):
            length = int(differing[0])
    return length


def _trunk(sequences: list[np.ndarray], starts: list[int]) -> int:
    """What all sequences begin with; of a single one, what comes before the tokens that count."""
    return starts[0] if len(sequences) == 1 else common_length(sequences)


def _behind_bos(tokens: np.ndarray, bos: int) -> np.ndarray:
    return np.concatenate([np.array([bos], dtype=tokens.dtype), tokens])


# On disk


def cache_folder() -> Path:
    return home.data_dir() / "core-prompts"


def _key(task: Task, encoder: Encoder, content: bytes, asked: int) -> str:
    settings = [_VERSION, task.label, task.kind, task.shots, task.delimiter, asked, encoder.bos]
    about = json.dumps([*settings, encoder.fingerprint, hashlib.sha256(content).hexdigest()])
    return hashlib.sha256(about.encode()).hexdigest()[:24]


def _load(path: Path, asked: int) -> Encoded | None:
    """What is stored there; None where there is nothing, or nothing usable."""
    try:
        with np.load(path, allow_pickle=False) as stored:
            encoded = Encoded(*(stored[field.name] for field in fields(Encoded)))
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
        return None
    repeated = np.repeat(encoded.trunks, encoded.choices)
    fits = (
        len(encoded.trunks) == len(encoded.choices) == len(encoded.gold) == asked
        and len(encoded.tails) == len(encoded.scored) == len(repeated)
        and len(encoded.tokens) == int(encoded.trunks.sum()) + int(encoded.tails.sum())
    )
    return encoded if fits else None


def _store(encoded: Encoded, path: Path) -> None:
    """Whole or not at all. A home that cannot be written costs the next evaluation the time of this one."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("wb") as file:
            np.savez(file, **{field.name: getattr(encoded, field.name) for field in fields(Encoded)})
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
