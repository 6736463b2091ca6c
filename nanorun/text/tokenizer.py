"""Text to tokens and back: byte-level BPE, trained by rustbpe and run by tiktoken.

A tokenizer has three parts: a split pattern (a regular expression that cuts text into words), the ranks (a list of
byte strings; earlier ones are merged first), and a few special tokens. Encoding splits the text with the pattern,
then merges the bytes of each word until no listed pair is left. All 256 single bytes are listed, so any text can be
encoded, and decoding returns exactly the same text.

Special tokens mark structure (the beginning of a document, a user message). tiktoken does not know them: their ids
exist only here, and only code that names one adds it. So any text, even one that contains "<|user_end|>", becomes
ordinary tokens.

Two rules make `encode` work for every string:
- Surrogate pairs in a Python string are joined; a lone surrogate, which is not a character, becomes U+FFFD.
- tiktoken's regular expressions overflow on about a million whitespace characters in a row. A text is therefore cut
  after each aligned block of 65,536 characters that is all whitespace. Other texts are never cut.
"""

import base64
import binascii
import functools
import hashlib
import json
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import numpy as np
import tiktoken

from nanorun.errors import UserError
from nanorun.home import check_name
from nanorun.json_files import check_shape, read_json, read_limited

T = TypeVar("T")

CHAT_TOKENS = (
    "<|user_start|>",
    "<|user_end|>",
    "<|assistant_start|>",
    "<|assistant_end|>",
    "<|python_start|>",
    "<|python_end|>",
    "<|output_start|>",
    "<|output_end|>",
)
SPECIAL_TOKENS = ("<|bos|>", *CHAT_TOKENS)

# GPT-4's pattern with numbers in groups of two digits instead of three: a small vocabulary has no room for a thousand
# three-digit numbers.
PATTERN = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,2}| ?[^\s\p{L}\p{N}]++[\r\n]*"
    r"|\s*[\r\n]|\s+(?!\S)|\s+"
)
MIN_VOCAB = 256 + len(SPECIAL_TOKENS) + 1
MAX_VOCAB = 2**20

_FORMAT, _VERSION = "nanorun-tokenizer", 1
CONFIG_FILE, _RANKS_FILE = "tokenizer.json", "ranks.tiktoken"
_MAX_CONFIG_BYTES, MAX_RANKS_BYTES = 2**20, 2**27
REMEDY = "copy the tokenizer folder again or train it again"
_CONFIG_SHAPE = {
    **dict.fromkeys(("name", "pattern", "bos", "ranks_sha256"), str),
    "vocab_size": int,
    "special_tokens": dict,
    "trained_on": {"dataset?": (str, None), "bytes?": int, "seconds?": float},
}
_SPECIAL_NAME = re.compile(r"<\|[a-z_]{1,60}\|>")
_BLOCK = 65_536
# tiktoken's fast array encoder is slow and unsafe without any special token (its search then matches the empty string
# everywhere), so it gets this one, which is never allowed: text that contains it is encoded as ordinary text, and its
# id is unused.
_NEVER_ALLOWED = {"\0<|never|>\0": 2**31}
# tiktoken panics when the pattern matches the empty string, unless that has a rank.
_EMPTY_MATCH = 2**31 + 1
_PROBE = "".join(map(chr, range(256))) + "Grüße, 東京! It's   1234 €\n\n \t«Δx» नमस्ते 🙂 \u2028\ufeff."


class Tokenizer:
    """`encode`, `encode_documents`, `decode`, and the ids of the special tokens by name."""

    def __init__(
        self,
        name: str,
        pattern: str,
        ranks: Mapping[bytes, int],
        special: Mapping[str, int],
        *,
        bos: str = SPECIAL_TOKENS[0],
        trained_on: Mapping[str, Any] | None = None,
    ) -> None:
        self.name = name
        self.pattern = pattern
        self.special: Mapping[str, int] = MappingProxyType(dict(special))
        self.trained_on: Mapping[str, Any] = MappingProxyType(dict(trained_on or {}))
        _check_ids(name, ranks, special, bos)
        self.bos_name = bos
        self.bos: int = special[bos]
        self.vocab_size: int = max(special.values()) + 1
        self.dtype = np.dtype(np.uint16 if self.vocab_size <= 2**16 else np.uint32)

        self._ranks = dict(ranks)
        self._special_ids = frozenset(special.values())
        # The bytes of every id; empty for unused ids (GPT-4 has gaps between the ranks and the special tokens).
        self._bytes = [b""] * self.vocab_size
        for token, rank in ranks.items():
            self._bytes[rank] = token
        for token_name, token_id in special.items():
            self._bytes[token_id] = token_name.encode()
        try:
            self._engine = tiktoken.Encoding(
                name,
                pat_str=pattern,
                mergeable_ranks={**self._ranks, b"": _EMPTY_MATCH},
                special_tokens=_NEVER_ALLOWED,
            )
        except ValueError as error:
            raise _damaged(
                f"The split pattern of tokenizer {name!r} is not a valid regular expression ({error})"
            ) from error
        self._check_pattern()

    def _check_pattern(self) -> None:
        """A pattern that matches nothing at all, or that skips characters, is refused here and not found in a loss."""
        ids = self._run(self._engine.encode_ordinary, _PROBE)
        if _EMPTY_MATCH in ids or self.decode(ids) != _PROBE:
            fault = "matches the empty string" if _EMPTY_MATCH in ids else "leaves out characters of a text"
            raise _damaged(f"The split pattern of tokenizer {self.name!r} {fault}")

    def _run(self, encode: Callable[[str], T], text: str) -> T:
        """Encodes a text. An expression that backtracks without end makes the Rust code panic: no Exception."""
        try:
            return encode(text)
        except BaseException as error:
            if type(error).__name__ != "PanicException":
                raise
            raise _damaged(
                f"The split pattern of tokenizer {self.name!r} fails on a text ({error})"
            ) from error

    def __repr__(self) -> str:
        return f"Tokenizer({self.name!r}, vocab_size={self.vocab_size})"

    def is_special(self, token_id: int) -> bool:
        return token_id in self._special_ids

    # -- encoding ------------------------------------------------------------------------------------

    def encode(self, text: str) -> list[int]:
        """Ordinary tokens only, whatever the text contains; no BOS."""
        encode = self._engine.encode_ordinary
        return [i for piece in _pieces(_valid(text)) for i in self._run(encode, piece)]

    def encode_documents(self, texts: Sequence[str], threads: int = 1) -> tuple[np.ndarray, np.ndarray]:
        """The tokens of all texts in one flat array, without BOS, and the offset of each text.

        Text i is `tokens[offsets[i]:offsets[i + 1]]`. The result does not depend on `threads`.
        """
        # Chunks are small so that all threads finish at about the same time.
        if threads > 1:
            chunks = _chunks(texts, 32 * threads)
            parts = list(_pool(threads, os.getpid()).map(self._encode_chunk, chunks))
        else:
            parts = [self._encode_chunk(texts)]
        offsets = np.zeros(len(texts) + 1, dtype=np.int64)
        np.cumsum(np.concatenate([lengths for _, lengths in parts]), out=offsets[1:])
        tokens = parts[0][0] if len(parts) == 1 else np.concatenate([flat for flat, _ in parts])
        return tokens, offsets

    def _encode_chunk(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        arrays = [self._encode_array(text) for text in texts]
        lengths = np.fromiter(map(len, arrays), dtype=np.int64, count=len(arrays))
        flat = np.empty(int(lengths.sum()), dtype=self.dtype)
        if arrays:
            np.concatenate(arrays, out=flat, casting="unsafe")
        return flat, lengths

    def _encode_array(self, text: str) -> np.ndarray:
        encode = functools.partial(self._engine.encode_to_numpy, disallowed_special=())
        pieces = [self._run(encode, piece) for piece in _pieces(_valid(text))]
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)

    # -- decoding ------------------------------------------------------------------------------------

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        """The bytes of the tokens. A special token is decoded to its name."""
        ids, table = list(ids), self._bytes
        if ids and not 0 <= min(ids) <= max(ids) < self.vocab_size:
            raise UserError(
                f"A token id is outside the vocabulary of {self.name!r} (0 to {self.vocab_size - 1}): the "
                "tokens were made with another tokenizer."
            )
        return b"".join([table[i] for i in ids])

    def decode(self, ids: Iterable[int]) -> str:
        """The text of the tokens. Bytes that are not UTF-8 (a model can produce them) become U+FFFD."""
        return self.decode_bytes(ids).decode("utf-8", errors="replace")

    def token_bytes(self, padded_to: int | None = None) -> np.ndarray:
        """The number of bytes of text of each id (int32); 0 for special tokens and padding."""
        size = self.vocab_size if padded_to is None else padded_to
        if size < self.vocab_size:
            raise ValueError(f"padded_to={size} is less than the vocabulary ({self.vocab_size})")
        lengths = np.zeros(size, dtype=np.int32)
        for token, rank in self._ranks.items():
            lengths[rank] = len(token)
        return lengths

    @functools.cached_property
    def max_token_bytes(self) -> int:
        return max(map(len, self._ranks), default=1)

    # -- identity and files --------------------------------------------------------------------------

    @functools.cached_property
    def fingerprint(self) -> str:
        """SHA-256 of pattern, special tokens and ranks: equal exactly for tokenizers that encode alike."""
        special = sorted(self.special.items())
        head = json.dumps([_FORMAT, _VERSION, self.pattern, special, self.bos_name]).encode()
        return hashlib.sha256(head + b"\n" + self._ranks_text()).hexdigest()

    def save(self, folder: Path) -> None:
        """Writes the config and the ranks into an existing folder."""
        ranks_text = self._ranks_text()
        config = {
            "format": _FORMAT,
            "version": _VERSION,
            "name": self.name,
            "vocab_size": self.vocab_size,
            "pattern": self.pattern,
            "bos": self.bos_name,
            "special_tokens": dict(self.special),
            "ranks_sha256": hashlib.sha256(ranks_text).hexdigest(),
            "trained_on": dict(self.trained_on),
        }
        (folder / _RANKS_FILE).write_bytes(ranks_text)
        (folder / CONFIG_FILE).write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", "utf-8")

    @classmethod
    def load(cls, folder: Path) -> "Tokenizer":
        """Reads what `save` wrote. Anything missing, changed or inconsistent raises a UserError."""
        config = _read_config(folder / CONFIG_FILE)
        ranks_text = read_capped(folder / _RANKS_FILE, MAX_RANKS_BYTES)
        if hashlib.sha256(ranks_text).hexdigest() != config["ranks_sha256"]:
            raise _damaged(
                f"{folder / _RANKS_FILE} is damaged (its checksum differs from the one in {CONFIG_FILE})"
            )
        tokenizer = cls(
            check_name(config["name"], "tokenizer"),
            config["pattern"],
            parse_ranks(ranks_text, folder / _RANKS_FILE),
            config["special_tokens"],
            bos=config["bos"],
            trained_on=config["trained_on"],
        )
        if tokenizer.vocab_size != config["vocab_size"]:
            raise _damaged(
                f"{folder / CONFIG_FILE} says vocab_size {config['vocab_size']} but its tokens make "
                f"{tokenizer.vocab_size}"
            )
        return tokenizer

    def _ranks_text(self) -> bytes:
        in_order = sorted(self._ranks.items(), key=lambda item: item[1])
        return b"".join(b"%s %d\n" % (base64.b64encode(token), rank) for token, rank in in_order)


# -- training ----------------------------------------------------------------------------------------


def train_tokenizer(
    texts: Iterable[str], vocab_size: int, name: str, *, dataset: str | None = None, fill: bool = True
) -> Tokenizer:
    """Trains BPE with `vocab_size` tokens, the nine special ones included. Deterministic for given texts. Text with
    fewer different pairs makes fewer tokens, which is an error unless `fill` is false.

    Texts are passed on in blocks of 65,536 characters, which bounds the longest word the trainer sees.
    """
    check_name(name, "tokenizer")
    if not MIN_VOCAB <= vocab_size <= MAX_VOCAB:
        raise UserError(f"The vocabulary must have {MIN_VOCAB} to {MAX_VOCAB} tokens, not {vocab_size}.")
    try:
        import rustbpe
    except ImportError as error:
        raise UserError("Training a tokenizer needs rustbpe: pip install rustbpe") from error

    seen = 0

    def blocks() -> Iterator[str]:
        nonlocal seen
        for text in texts:
            text = _valid(text)
            seen += len(text.encode())
            for start in range(0, len(text), _BLOCK):
                yield text[start : start + _BLOCK]

    start = time.perf_counter()
    trainer = rustbpe.Tokenizer()
    trainer.train_from_iterator(blocks(), vocab_size - len(SPECIAL_TOKENS), pattern=PATTERN)
    ranks = {bytes(token): rank for token, rank in trainer.get_mergeable_ranks()}
    reached = len(ranks) + len(SPECIAL_TOKENS)
    if fill and reached < vocab_size:
        raise UserError(
            f"{seen} bytes of text are too few for a vocabulary of {vocab_size}: they fill {reached}. "
            f"Use more text, a vocabulary of at most {reached}, or no --vocab for one that fits the text."
        )
    trained_on = {
        "dataset": dataset,
        "bytes": seen,
        "seconds": round(time.perf_counter() - start, 3),
        "trainer": "rustbpe",
        "trainer_version": version("rustbpe"),
    }
    return Tokenizer(name, PATTERN, ranks, special_ids_from(len(ranks)), trained_on=trained_on)


def special_ids_from(first: int) -> dict[str, int]:
    """Consecutive ids for the nine special tokens, starting at `first`."""
    return {token: first + i for i, token in enumerate(SPECIAL_TOKENS)}


# -- text that tiktoken accepts ----------------------------------------------------------------------


def _valid(text: str) -> str:
    """The text, with surrogate pairs joined and lone surrogates replaced by U+FFFD."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def _pieces(text: str) -> list[str]:
    """The text, cut after each aligned block of 65,536 characters that is all whitespace."""
    pieces, start = [], 0
    for end in range(_BLOCK, len(text), _BLOCK):
        if text[end - _BLOCK : end].isspace():
            pieces.append(text[start:end])
            start = end
    pieces.append(text[start:])
    return pieces


@functools.cache  # threads that stay have their compiled pattern at hand
def _pool(threads: int, process: int) -> ThreadPoolExecutor:
    """`process` is the caller's: a forked child must not use its parent's threads."""
    return ThreadPoolExecutor(threads, thread_name_prefix="encode")


def _chunks(texts: Sequence[str], wanted: int) -> list[Sequence[str]]:
    """Groups of consecutive texts, at most about `wanted`, with similar numbers of characters."""
    target = sum(map(len, texts)) / wanted
    chunks, start, size = [], 0, 0
    for end, text in enumerate(texts, 1):
        size += len(text)
        if size >= target:
            chunks.append(texts[start:end])
            start, size = end, 0
    if start < len(texts) or not chunks:
        chunks.append(texts[start:])
    return chunks


# -- checks ------------------------------------------------------------------------------------------


def _damaged(fault: str) -> UserError:
    return UserError(f"{fault}: {REMEDY}.")


def _check_ids(name: str, ranks: Mapping[bytes, int], special: Mapping[str, int], bos: str) -> None:
    def fail(fault: str) -> UserError:
        return _damaged(f"Tokenizer {name!r} {fault}")

    if sorted(ranks.values()) != list(range(len(ranks))):
        raise fail(f"has ranks that are not 0 to {len(ranks) - 1}, each once")
    missing = sum(bytes([b]) not in ranks for b in range(256))
    if missing:
        raise fail(f"lacks {missing} of the 256 single bytes")
    if odd := [token for token in special if not _SPECIAL_NAME.fullmatch(token)]:
        raise fail(f"has a special token named {odd[0]!r:.80}")
    if lacking := [token for token in (bos, *CHAT_TOKENS) if token not in special]:
        raise fail(f"lacks the special token {lacking[0]!r:.80}")
    if len(set(special.values())) < len(special):
        raise fail("gives two special tokens the same id")
    if min(special.values()) < len(ranks):
        raise fail(f"has a special token with id {min(special.values())}, which is an ordinary token")
    if max(special.values()) >= MAX_VOCAB:
        raise fail(f"has a special token with id {max(special.values())}, above the limit of {MAX_VOCAB}")


def read_capped(path: Path, limit: int) -> bytes:
    try:
        return read_limited(path, limit)
    except OSError as error:
        raise UserError(f"Cannot read {path} ({error.strerror}): name an existing tokenizer.") from error
    except ValueError as error:
        raise _damaged(f"{path} is not a tokenizer file ({error})") from error


def parse_ranks(text: bytes, path: Path) -> dict[bytes, int]:
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(text.split(b"\n"), 1):
        if not line:
            continue
        try:
            token, rank = line.split(b" ")
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except (ValueError, binascii.Error):
            raise _damaged(f"{path} line {number} is not 'base64 rank'") from None
        if len(ranks) > MAX_VOCAB:
            raise UserError(f"{path} has more than {MAX_VOCAB} ranks: it is not a nanorun tokenizer.")
    return ranks


def _read_config(path: Path) -> dict[str, Any]:
    config: dict[str, Any] = read_json(path, REMEDY, {"format": str}, max_bytes=_MAX_CONFIG_BYTES)
    if config["format"] != _FORMAT:
        raise _damaged(f"{path} is not a {_FORMAT} file")
    if config.get("version") != _VERSION:
        raise UserError(
            f"{path} has version {config.get('version')!r} and this nanorun reads {_VERSION}: update nanorun "
            "or train the tokenizer again."
        )
    try:
        check_shape(config, _CONFIG_SHAPE)
        check_shape(config["special_tokens"], dict.fromkeys(config["special_tokens"], int), "special_tokens")
    except ValueError as error:
        raise _damaged(f"{path} is damaged ({error})") from error
    return config
