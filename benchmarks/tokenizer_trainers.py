"""BPE training with rustbpe and with Hugging Face tokenizers: same text, same split pattern, in one run.

    python benchmarks/tokenizer_trainers.py ../shared/data/pretrain/train-00.jsonl.xz --mb 100 \\
        --held-out ../shared/data/pretrain/val.jsonl.xz

Both vocabularies are loaded into our Tokenizer and encode the same held-out text.
Prints a table and, last, one JSON line.
"""

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tables import TABLES  # noqa: E402

from nanorun.data.readers import read_documents  # noqa: E402
from nanorun.errors import UserError  # noqa: E402
from nanorun.provenance import record, write_and_print_result  # noqa: E402
from nanorun.text.evaluate import bytes_per_token  # noqa: E402
from nanorun.text.tokenizer import (  # noqa: E402
    MIN_VOCAB,
    PATTERN,
    SPECIAL_TOKENS,
    Tokenizer,
    special_ids_from,
    train_tokenizer,
)

Trained = tuple[Tokenizer, float]  # with the seconds of training


def train_with_rustbpe(texts: list[str], vocab_size: int) -> Trained:
    start = time.perf_counter()
    tokenizer = train_tokenizer(texts, vocab_size, "rustbpe")
    return tokenizer, time.perf_counter() - start


def train_with_tokenizers(texts: list[str], vocab_size: int) -> Trained:
    from tokenizers import Regex, models, pre_tokenizers, trainers
    from tokenizers import Tokenizer as HubTokenizer

    start = time.perf_counter()
    hub = HubTokenizer(models.BPE())
    hub.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(without_possessives(PATTERN)), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    hub.train_from_iterator(texts, trainer, length=len(texts))
    seconds = time.perf_counter() - start
    byte_of = {char: byte for byte, char in byte_level_alphabet().items()}
    ranks = {bytes(byte_of[char] for char in token): rank for token, rank in hub.get_vocab().items()}
    return Tokenizer("tokenizers", PATTERN, ranks, special_ids_from(len(ranks))), seconds


def without_possessives(pattern: str) -> str:
    """The pattern for Oniguruma, without possessive quantifiers.

    The matches are the same: what follows each of them cannot match what it consumed.
    """
    return pattern.replace("?+", "?").replace("++", "+")


def byte_level_alphabet() -> dict[int, str]:
    """The printable character for each byte in GPT-2's byte-level alphabet, which Hugging Face uses."""
    printable = [
        *range(ord("!"), ord("~") + 1),
        *range(ord("¡"), ord("¬") + 1),
        *range(ord("®"), ord("ÿ") + 1),
    ]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}


TRAINERS: dict[str, Callable[[list[str], int], Trained]] = {
    "rustbpe": train_with_rustbpe,
    "tokenizers": train_with_tokenizers,
}


def read_texts(files: list[Path], mb: float) -> tuple[list[str], int]:
    """Documents of jsonl files, in order, until `mb` million bytes are reached."""
    texts, size = [], 0
    for text in documents(files):
        texts.append(text)
        size += len(text.encode("utf-8", "replace"))
        if size >= mb * 1e6:
            break
    return texts, size


def documents(files: list[Path]) -> Iterator[str]:
    for path in files:
        yield from read_documents(path)


def compare(arguments: argparse.Namespace) -> dict[str, Any]:
    texts, size = read_texts(arguments.files, arguments.mb)
    if arguments.held_out:
        held_out, _ = read_texts([arguments.held_out], arguments.held_out_mb)
    else:
        held_out, texts = texts[::20], [text for i, text in enumerate(texts) if i % 20]
        size -= sum(len(text.encode("utf-8", "replace")) for text in held_out)
    if not texts or not held_out:
        raise UserError("Too few documents to train on and hold some out: name more files or raise --mb.")

    trained: dict[str, Tokenizer] = {}
    seconds = dict.fromkeys(TRAINERS, float("inf"))
    for repeat in range(arguments.repeats):
        for name in list(TRAINERS)[:: 1 if repeat % 2 == 0 else -1]:
            trained[name], took = TRAINERS[name](texts, arguments.vocab)
            seconds[name] = min(seconds[name], took)
    rows = [
        {
            "trainer": name,
            "version": version(name),
            "vocab_size": tokenizer.vocab_size,
            "seconds": round(seconds[name], 2),
            "mb_per_s": round(size / seconds[name] / 1e6, 2),
            "held_out_bytes_per_token": round(bytes_per_token(tokenizer, held_out), 4),
        }
        for name, tokenizer in trained.items()
    ]
    vocabularies = [token_set(tokenizer) for tokenizer in trained.values()]
    common = len(vocabularies[0] & vocabularies[1]) / max(map(len, vocabularies))
    return record(
        "tokenizer trainers",
        train_mb=round(size / 1e6, 2),
        documents=len(texts),
        repeats=arguments.repeats,
        rows=rows,
        tokens_in_common=round(common, 4),
        rustbpe_times_faster=round(seconds["tokenizers"] / seconds["rustbpe"], 2),
    )


def token_set(tokenizer: Tokenizer) -> set[bytes]:
    return {tokenizer.decode_bytes([i]) for i in range(tokenizer.vocab_size) if not tokenizer.is_special(i)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="+", type=Path, help='jsonl files of {"text": ...}, plain or .xz')
    parser.add_argument("--mb", type=float, default=100, help="million bytes of text to train on")
    parser.add_argument(
        "--vocab", type=int, default=32768, help="vocabulary size, with the nine special tokens"
    )
    parser.add_argument(
        "--held-out", type=Path, help="jsonl to measure compression on (default: every 20th document)"
    )
    parser.add_argument("--held-out-mb", type=float, default=10)
    parser.add_argument("--repeats", type=int, default=1, help="rounds; the fastest counts")
    parser.add_argument("--save", type=Path, help="write the result to this file")
    arguments = parser.parse_args()
    if arguments.vocab < MIN_VOCAB or arguments.repeats < 1:
        parser.error(f"--vocab must be at least {MIN_VOCAB} and --repeats at least 1")
    try:
        result = compare(arguments)
        print(TABLES["tokenizer trainers"](result), end="\n\n")
        write_and_print_result(result, arguments.save)
    except UserError as error:
        print(error, file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
