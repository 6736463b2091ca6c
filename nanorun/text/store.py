"""Where tokenizers come from: `tokenizers/NAME/` of the home, and the public ones of GPT-2 and GPT-4.

The public ones need a file of ranks, which is looked up on this machine and never downloaded.
"""

import hashlib
import os
import tempfile
from pathlib import Path
from typing import Any

from nanorun import home
from nanorun.console import command
from nanorun.errors import UserError
from nanorun.text.tokenizer import (
    CHAT_TOKENS,
    CONFIG_FILE,
    MAX_RANKS_BYTES,
    Tokenizer,
    parse_ranks,
    read_capped,
)

GPT2_PATTERN = r"""'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""
GPT4_PATTERN = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+"
    r"|\s++$|\s*[\r\n]|\s+(?!\S)|\s"
)
_END_OF_TEXT = "<|endoftext|>"
# Both use <|endoftext|> as BOS. The eight chat tokens follow the ids of the original: 50,265 and 100,285 in all.
_PUBLIC: dict[str, dict[str, Any]] = {
    "gpt2": {
        "pattern": GPT2_PATTERN,
        "file": "gpt2.tiktoken",
        "url": "https://openaipublic.blob.core.windows.net/encodings/r50k_base.tiktoken",
        "sha256": "306cd27f03c1a714eca7108e03d66b7dc042abe8c258b44c199a7ed9838dd930",
        "bos": 50_256,
        "chat_from": 50_257,
    },
    "gpt4": {
        "pattern": GPT4_PATTERN,
        "file": "cl100k_base.tiktoken",
        "url": "https://openaipublic.blob.core.windows.net/encodings/cl100k_base.tiktoken",
        "sha256": "223921b76ee99bde995b7ff738513eef100fb51d18c93597a113bcffe865b2a7",
        "bos": 100_257,
        "chat_from": 100_277,  # after cl100k's own special tokens, the last of which is 100276
    },
}


def open_tokenizer(name: str | None = None) -> Tokenizer:
    """The tokenizer of that name (or folder); without a name, the newest."""
    if name is None:
        name = home.newest(home.tokenizers_dir(), CONFIG_FILE)
        if name is None:
            raise UserError(
                f"There is no tokenizer in {home.tokenizers_dir()}: {command('tok train')} makes one."
            )
    for folder in (home.tokenizers_dir() / name, Path(name)):
        if os.path.isfile(folder / CONFIG_FILE):  # False also for a name that no file can have
            return Tokenizer.load(folder)
    if name in _PUBLIC:
        ranks = find_ranks(name)
        if ranks is not None:
            return public_tokenizer(name, ranks)
        raise UserError(
            f"The ranks of {name} are not on this machine: put them into {home.tokenizers_dir()}."
        )
    known = ", ".join(tokenizer_names()) or "none yet"
    raise UserError(f"There is no tokenizer '{name:.100}' in {home.tokenizers_dir()} (there: {known}).")


def tokenizer_names() -> list[str]:
    return sorted(path.parent.name for path in home.tokenizers_dir().glob(f"[!.]*/{CONFIG_FILE}"))


def available_public_tokenizers() -> list[Tokenizer]:
    """The tokenizers of GPT-2 and GPT-4, if this machine has their ranks, to compare others with."""
    return [public_tokenizer(name, ranks) for name in _PUBLIC if (ranks := find_ranks(name)) is not None]


def find_ranks(name: str) -> Path | None:
    """The file with the ranks of "gpt2" or "gpt4" on this machine, or None."""
    public = _PUBLIC[name]
    cache = os.environ.get("TIKTOKEN_CACHE_DIR") or os.environ.get("DATA_GYM_CACHE_DIR")
    cached = hashlib.sha1(public["url"].encode(), usedforsecurity=False).hexdigest()
    places = (
        home.tokenizers_dir() / public["file"],
        Path(cache or Path(tempfile.gettempdir()) / "data-gym-cache") / cached,
        Path("..") / "shared" / "data" / public["file"],
    )
    return next((place for place in places if place.is_file()), None)


def public_tokenizer(name: str, ranks_file: Path) -> Tokenizer:
    """The tokenizer of "gpt2" or "gpt4" (cl100k_base), whose file of ranks is verified."""
    public = _PUBLIC[name]
    text = read_capped(ranks_file, MAX_RANKS_BYTES)
    if hashlib.sha256(text).hexdigest() != public["sha256"]:
        raise UserError(
            f"{ranks_file} does not hold the ranks of {name} unchanged: download it again from {public['url']}"
        )
    special = {_END_OF_TEXT: public["bos"]}
    special |= {token: public["chat_from"] + i for i, token in enumerate(CHAT_TOKENS)}
    return Tokenizer(name, public["pattern"], parse_ranks(text, ranks_file), special, bos=_END_OF_TEXT)
