"""Text to tokens and back: byte-level BPE, trained by rustbpe and run by tiktoken.

A tokenizer is three plain things: a regular expression that cuts text into words, a list of byte strings
(the ranks: the earlier one is merged first), and a few special tokens. Encoding cuts the text with the
expression, then merges the bytes of each word until no listed pair is left. All 256 single bytes are
listed, so any text can be encoded, and decoding gives back exactly the same text.

Special tokens mark structure (a document begins, the user speaks). tiktoken never learns of them: their
ids exist only here, and only code that names one adds it. So whatever a text contains, "<|user_end|>"
included, it becomes ordinary tokens.

Two rules make `encode` total:
- Surrogate pairs in a Python string are joined; a lone surrogate, which is no character, becomes U+FFFD.
- The engine's regular expressions overflow on about a million blanks in a row. A text is therefore cut
  after each of its 65,536-character blocks that is all blank. Other texts are never cut.
"""

import base64
import binascii
import functools
import hashlib
import json
import os
import re
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import tiktoken

from nanorun.errors import UserError
from nanorun.home import check_name, tokenizers_dir

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

# GPT-4's expression with numbers in groups of two digits instead of three: small vocabularies have no
# room for a thousand three-digit numbers.
PATTERN = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,2}| ?[^\s\p{L}\p{N}]++[\r\n]*"
    r"|\s*[\r\n]|\s+(?!\S)|\s+"
)
GPT2_PATTERN = r"""'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""
GPT4_PATTERN = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+"
    r"|\s++$|\s*[\r\n]|\s+(?!\S)|\s"
)

MIN_VOCAB = 256 + len(SPECIAL_TOKENS) + 1
MAX_VOCAB = 2**20

_FORMAT, _VERSION = "nanorun-tokenizer", 1
CONFIG_FILE, _RANKS_FILE = "tokenizer.json", "ranks.tiktoken"
_MAX_CONFIG_BYTES, _MAX_RANKS_BYTES = 2**20, 2**27
_SPECIAL_NAME = re.compile(r"<\|[a-z_]{1,60}\|>")
_BLOCK = 65_536
# tiktoken's fast array encoder is slow and unsafe without any special token (its search then matches the
# empty string everywhere), so it gets this one, which is never allowed: text that contains it is
# encoded as ordinary text, and its id is nobody's.
_NEVER_ALLOWED = {"\0<|never|>\0": 2**31}


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
        # The bytes of every id. Ids between the ranks and the special tokens (GPT-4's have gaps) are empty.
        self._bytes = [b""] * self.vocab_size
        for token, rank in ranks.items():
            self._bytes[rank] = token
        for token_name, token_id in special.items():
            self._bytes[token_id] = token_name.encode()
        try:
            self._engine = tiktoken.Encoding(
                name, pat_str=pattern, mergeable_ranks=self._ranks, special_tokens=_NEVER_ALLOWED
            )
        except ValueError as error:
            raise UserError(
                f"The split pattern of tokenizer {name!r} is not a valid expression ({error}): "
                "train it again or copy its folder anew."
            ) from error
        self._pools: dict[tuple[int, int], ThreadPoolExecutor] = {}

    def __repr__(self) -> str:
        return f"Tokenizer({self.name!r}, vocab_size={self.vocab_size})"

    def is_special(self, token_id: int) -> bool:
        return token_id in self._special_ids

    # -- encoding ------------------------------------------------------------------------------------

    def encode(self, text: str) -> list[int]:
        """Ordinary tokens only, whatever the text says; no bos."""
        if len(text) <= _BLOCK:
            return self._engine.encode_ordinary(_valid(text))
        return [i for piece in _pieces(_valid(text)) for i in self._engine.encode_ordinary(piece)]

    def encode_documents(self, texts: Sequence[str], threads: int = 1) -> tuple[np.ndarray, np.ndarray]:
        """All tokens of all texts in one flat array, without bos, and where each text starts in it.

        Text i is `tokens[offsets[i]:offsets[i + 1]]`. The result does not depend on `threads`.
        """
        # Chunks are small so that threads end together, and each thread hands over few large arrays.
        chunks = _chunks(texts, 32 * threads) if threads > 1 else [texts]
        if len(chunks) > 1:
            parts = list(self._pool(threads).map(self._encode_chunk, chunks))
        else:
            parts = [self._encode_chunk(chunk) for chunk in chunks]
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
        if len(text) > _BLOCK:
            pieces = _pieces(_valid(text))
            if len(pieces) > 1:
                return np.concatenate([self._encode_array_whole(piece) for piece in pieces])
        return self._encode_array_whole(text)

    def _encode_array_whole(self, text: str) -> np.ndarray:
        try:
            return self._engine.encode_to_numpy(text, disallowed_special=())
        except UnicodeEncodeError:
            return self._engine.encode_to_numpy(_valid(text), disallowed_special=())

    def _pool(self, threads: int) -> ThreadPoolExecutor:
        key = (os.getpid(), threads)  # a forked child must not wait for its parent's threads
        if key not in self._pools:
            self._pools[key] = ThreadPoolExecutor(threads, thread_name_prefix="encode")
        return self._pools[key]

    # -- decoding ------------------------------------------------------------------------------------

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        """The bytes of the tokens; special tokens appear as their names."""
        table = self._bytes
        try:
            return b"".join([table[i] for i in _not_negative(ids)])
        except IndexError:
            raise UserError(
                f"A token id is outside the vocabulary of {self.name!r} (0 to {self.vocab_size - 1}): the "
                "tokens were made with another tokenizer."
            ) from None

    def decode(self, ids: Iterable[int]) -> str:
        """Text; bytes that are not UTF-8 (a model may produce them) become U+FFFD."""
        return self.decode_bytes(ids).decode("utf-8", errors="replace")

    def token_bytes(self, padded_to: int | None = None) -> np.ndarray:
        """How many bytes of text each id stands for (int32); 0 for special tokens and padding."""
        size = self.vocab_size if padded_to is None else padded_to
        if size < self.vocab_size:
            raise ValueError(f"padded_to={size} is less than the vocabulary ({self.vocab_size})")
        lengths = np.zeros(size, dtype=np.int32)
        for token, rank in self._ranks.items():
            lengths[rank] = len(token)
        return lengths

    # -- identity and files --------------------------------------------------------------------------

    @functools.cached_property
    def fingerprint(self) -> str:
        """The same for two tokenizers exactly when they encode alike: sha256 of pattern, specials, ranks."""
        special = sorted(self.special.items())
        head = json.dumps([_FORMAT, _VERSION, self.pattern, special, self.bos_name]).encode()
        return hashlib.sha256(head + b"\n" + self._ranks_text()).hexdigest()

    def save(self, folder: Path) -> None:
        """Writes two plain files into an existing folder."""
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
        """Reads what `save` wrote; anything missing, changed or inconsistent is one clear UserError."""
        config = _read_config(folder / CONFIG_FILE)
        ranks_text = _read_capped(folder / _RANKS_FILE, _MAX_RANKS_BYTES)
        if hashlib.sha256(ranks_text).hexdigest() != config["ranks_sha256"]:
            raise UserError(
                f"{folder / _RANKS_FILE} is damaged (its checksum is not the one in {CONFIG_FILE}): "
                "copy the tokenizer folder anew or train it again."
            )
        tokenizer = cls(
            check_name(config["name"], "tokenizer"),
            config["pattern"],
            _parse_ranks(ranks_text, folder / _RANKS_FILE),
            config["special_tokens"],
            bos=config["bos"],
            trained_on=config["trained_on"],
        )
        if tokenizer.vocab_size != config["vocab_size"]:
            raise UserError(
                f"{folder / CONFIG_FILE} says vocab_size {config['vocab_size']} but its tokens make "
                f"{tokenizer.vocab_size}: copy the tokenizer folder anew or train it again."
            )
        return tokenizer

    def _ranks_text(self) -> bytes:
        in_order = sorted(self._ranks.items(), key=lambda item: item[1])
        return b"".join(b"%s %d\n" % (base64.b64encode(token), rank) for token, rank in in_order)


# -- training ----------------------------------------------------------------------------------------


def train_tokenizer(
    texts: Iterable[str], vocab_size: int, name: str, *, dataset: str | None = None
) -> Tokenizer:
    """BPE of `vocab_size` tokens, the nine special ones included. The same texts give the same tokenizer.

    Texts are counted in blocks of 65,536 characters, which bounds the longest word the trainer sees.
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
    if reached < vocab_size:
        raise UserError(
            f"{seen} bytes of text are too few for a vocabulary of {vocab_size}: they fill {reached}. "
            f"Give more text or ask for at most {reached}."
        )
    trained_on = {
        "dataset": dataset,
        "bytes": seen,
        "seconds": round(time.perf_counter() - start, 3),
        "trainer": "rustbpe",
        "trainer_version": version("rustbpe"),
    }
    return Tokenizer(name, PATTERN, ranks, after_ranks(len(ranks)), trained_on=trained_on)


def after_ranks(first: int) -> dict[str, int]:
    """The nine special tokens with ids from `first` on."""
    return {token: first + i for i, token in enumerate(SPECIAL_TOKENS)}


# -- GPT-2's and GPT-4's -----------------------------------------------------------------------------

_END_OF_TEXT = "<|endoftext|>"
_KNOWN: dict[str, dict[str, Any]] = {
    "gpt2": {
        "pattern": GPT2_PATTERN,
        "file": "gpt2.tiktoken",
        "url": "https://openaipublic.blob.core.windows.net/encodings/r50k_base.tiktoken",
        "sha256": "306cd27f03c1a714eca7108e03d66b7dc042abe8c258b44c199a7ed9838dd930",
        "ranks": 50_256,
        "bos": 50_256,
        "chat_from": 50_257,
    },
    "gpt4": {
        "pattern": GPT4_PATTERN,
        "file": "cl100k_base.tiktoken",
        "url": "https://openaipublic.blob.core.windows.net/encodings/cl100k_base.tiktoken",
        "sha256": "223921b76ee99bde995b7ff738513eef100fb51d18c93597a113bcffe865b2a7",
        "ranks": 100_256,
        "bos": 100_257,
        "chat_from": 100_277,  # after cl100k's own special tokens, the last of which is 100276
    },
}


def gpt2_tokenizer(ranks_file: Path) -> Tokenizer:
    """GPT-2's vocabulary: <|endoftext|> (50256) is the bos, the eight chat tokens follow; 50,265 in all."""
    return _known_tokenizer("gpt2", ranks_file)


def gpt4_tokenizer(ranks_file: Path) -> Tokenizer:
    """GPT-4's (cl100k_base): <|endoftext|> (100257) is the bos, chat tokens from 100277; 100,285 in all."""
    return _known_tokenizer("gpt4", ranks_file)


def find_ranks(name: str) -> Path | None:
    """Where this machine has the ranks of "gpt2" or "gpt4", or None. Nothing is downloaded."""
    known = _KNOWN[name]
    places = [tokenizers_dir() / known["file"]]
    cache = os.environ.get("TIKTOKEN_CACHE_DIR") or os.environ.get("DATA_GYM_CACHE_DIR")
    cached = hashlib.sha1(known["url"].encode(), usedforsecurity=False).hexdigest()
    places.append(Path(cache or Path(tempfile.gettempdir()) / "data-gym-cache") / cached)
    places.append(Path("..") / "shared" / "data" / known["file"])
    return next((place for place in places if place.is_file()), None)


def _known_tokenizer(name: str, ranks_file: Path) -> Tokenizer:
    known = _KNOWN[name]
    text = _read_capped(ranks_file, _MAX_RANKS_BYTES)
    ranks = _parse_ranks(text, ranks_file)
    if len(ranks) != known["ranks"] or hashlib.sha256(text).hexdigest() != known["sha256"]:
        raise UserError(
            f"{ranks_file} does not hold {name}'s {known['ranks']} ranks unchanged (it has {len(ranks)}): "
            f"get it anew from {known['url']}"
        )
    special = {_END_OF_TEXT: known["bos"]}
    special |= {token: known["chat_from"] + i for i, token in enumerate(CHAT_TOKENS)}
    return Tokenizer(name, known["pattern"], ranks, special, bos=_END_OF_TEXT)


# -- text that tiktoken can take ---------------------------------------------------------------------


def _valid(text: str) -> str:
    """The text itself, or with surrogate pairs joined and lone surrogates as U+FFFD."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def _pieces(text: str) -> list[str]:
    """The text, cut after each aligned block of 65,536 characters that is all blank."""
    pieces, start = [], 0
    for end in range(_BLOCK, len(text), _BLOCK):
        if text[end - _BLOCK : end].isspace():
            pieces.append(text[start:end])
            start = end
    pieces.append(text[start:])
    return pieces


def _chunks(texts: Sequence[str], wanted: int) -> list[Sequence[str]]:
    """Consecutive texts in at most about `wanted` groups of similar size in characters."""
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


def _not_negative(ids: Iterable[int]) -> Iterator[int]:
    for i in ids:
        if i < 0:
            raise IndexError(i)
        yield i


# -- checks ------------------------------------------------------------------------------------------


def _check_ids(name: str, ranks: Mapping[bytes, int], special: Mapping[str, int], bos: str) -> None:
    def fail(fault: str) -> UserError:
        return UserError(f"Tokenizer {name!r} {fault}: copy its folder anew or train it again.")

    if sorted(ranks.values()) != list(range(len(ranks))):
        raise fail(f"has ranks that are not 0 to {len(ranks) - 1}, each once")
    missing = sum(bytes([b]) not in ranks for b in range(256))
    if missing:
        raise fail(f"lacks {missing} of the 256 single bytes")
    if odd := next((token for token in special if not _SPECIAL_NAME.fullmatch(token)), None):
        raise fail(f"has a special token named {odd!r}")
    if lacking := next((token for token in (bos, *CHAT_TOKENS) if token not in special), None):
        raise fail(f"lacks the special token {lacking!r}")
    if len(set(special.values())) < len(special):
        raise fail("gives two special tokens the same id")
    if min(special.values()) < len(ranks):
        raise fail(f"has a special token with id {min(special.values())}, which is an ordinary one")
    if max(special.values()) >= MAX_VOCAB:
        raise fail(f"has a special token with id {max(special.values())}, past the limit of {MAX_VOCAB}")


def _read_capped(path: Path, limit: int) -> bytes:
    try:
        with path.open("rb") as file:
            content = file.read(limit + 1)
    except OSError as error:
        raise UserError(f"Cannot read {path} ({error.strerror}): name a tokenizer that is there.") from error
    if len(content) > limit:
        raise UserError(f"{path} is larger than {limit} bytes: it is no tokenizer file.")
    return content


def _parse_ranks(text: bytes, path: Path) -> dict[bytes, int]:
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(text.split(b"\n"), 1):
        if not line:
            continue
        try:
            token, rank = line.split(b" ")
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except (ValueError, binascii.Error):
            raise UserError(
                f"{path} line {number} is not 'base64 rank': copy the folder anew or train it again."
            ) from None
        if len(ranks) > MAX_VOCAB:
            raise UserError(f"{path} has more than {MAX_VOCAB} ranks: it is no tokenizer of ours.")
    return ranks


def _read_config(path: Path) -> dict[str, Any]:
    def fail(fault: str) -> UserError:
        return UserError(f"{path} {fault}: copy the tokenizer folder anew or train it again.")

    try:
        config = json.loads(_read_capped(path, _MAX_CONFIG_BYTES).decode("utf-8"))
    except (ValueError, RecursionError):
        raise fail("is not JSON") from None
    if not isinstance(config, dict) or config.get("format") != _FORMAT:
        raise fail(f"is not a {_FORMAT} file")
    if config.get("version") != _VERSION:
        raise UserError(
            f"{path} has version {config.get('version')!r} and this nanorun reads {_VERSION}: update nanorun "
            "or train the tokenizer again."
        )
    kinds = {
        "name": str,
        "vocab_size": int,
        "pattern": str,
        "bos": str,
        "special_tokens": dict,
        "ranks_sha256": str,
        "trained_on": dict,
    }
    for field, kind in kinds.items():
        if type(config.get(field)) is not kind:
            raise fail(f"lacks a proper {field!r}")
    if any(type(token_id) is not int for token_id in config["special_tokens"].values()):
        raise fail("has a special token whose id is not a whole number")
    return config
