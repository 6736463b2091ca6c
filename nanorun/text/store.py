"""The tokenizers of a home: `tokenizers/NAME/`, by name, or the newest; and GPT-2's and GPT-4's by theirs."""

from pathlib import Path

from nanorun import home
from nanorun.errors import UserError
from nanorun.text.tokenizer import CONFIG_FILE, Tokenizer, find_ranks, gpt2_tokenizer, gpt4_tokenizer

_KNOWN = {"gpt2": gpt2_tokenizer, "gpt4": gpt4_tokenizer}


def open_tokenizer(name: str | None = None) -> Tokenizer:
    """The tokenizer of that name (or folder), or without one the newest."""
    if name is None:
        name = home.newest(home.tokenizers_dir(), CONFIG_FILE)
        if name is None:
            raise UserError(f"There is no tokenizer in {home.tokenizers_dir()}: nanorun tok train makes one.")
    for folder in (home.tokenizers_dir() / name, Path(name)):
        if (folder / CONFIG_FILE).is_file():
            return Tokenizer.load(folder)
    if name in _KNOWN:
        ranks = find_ranks(name)
        if ranks is not None:
            return _KNOWN[name](ranks)
        raise UserError(
            f"The ranks of {name} are not on this machine: put them into {home.tokenizers_dir()}."
        )
    known = ", ".join(tokenizer_names()) or "none yet"
    raise UserError(f"There is no tokenizer '{name}' in {home.tokenizers_dir()} (there: {known}).")


def tokenizer_names() -> list[str]:
    return sorted(path.parent.name for path in home.tokenizers_dir().glob(f"[!.]*/{CONFIG_FILE}"))


def at_hand() -> list[Tokenizer]:
    """Those of GPT-2's and GPT-4's whose ranks this machine has: what others are compared with."""
    return [make(ranks) for name, make in _KNOWN.items() if (ranks := find_ranks(name)) is not None]
