"""`nanorun speedrun`: every stage in turn, each done once. Interrupted, it goes on with the first unfinished.

A stage is finished when its folder stands under its real name, since folders appear whole or not at all.
"""

import os
import time
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

from nanorun import home
from nanorun.config import sample_preset
from nanorun.console import say, seconds, size
from nanorun.data import sample
from nanorun.data.dataset import MANIFEST, open_dataset
from nanorun.data.get import make_sample
from nanorun.data.vocabulary import train_on
from nanorun.errors import UserError
from nanorun.text.chat import render
from nanorun.text.store import open_tokenizer
from nanorun.text.tokenizer import CONFIG_FILE, Tokenizer

DATA, TOKENIZER, VOCAB, RUN = "sample", "sample", 1024, "sample-base"


def run() -> dict[str, Any]:
    """The sample world, its tokenizer and a base model that has read it, unless they are here already."""
    start = time.perf_counter()
    done = [_data(), _tokenizer()]
    base = _base()
    done.append(base.pop("stage"))
    dataset, tokenizer = open_dataset(DATA), open_tokenizer(TOKENIZER)
    return {
        "stages": done,
        "seconds": round(time.perf_counter() - start, 3),
        "data": {
            "name": DATA,
            "documents": dataset.total("documents"),
            "bytes": dataset.total("text_bytes"),
            "folder": str(dataset.folder),
        },
        "tokenizer": {
            "name": TOKENIZER,
            "vocab_size": tokenizer.vocab_size,
            "folder": str(home.tokenizers_dir() / TOKENIZER),
        },
        "base": {"folder": str(home.runs_dir() / RUN), **base},
    }


def build_sample() -> None:
    """The first two stages alone: something to train on."""
    _data()
    _tokenizer()


def _data() -> dict[str, Any]:
    if _whole(open_dataset, DATA, home.data_dir() / DATA / MANIFEST):
        say(f"1/3 the sample world is written already ({home.data_dir() / DATA})")
        return {"stage": "data", "did": "nothing, it is done"}
    start = time.perf_counter()
    say("1/3 writing the sample world")
    dataset = make_sample(name=DATA, replace=True)
    took = time.perf_counter() - start
    say(
        f"    {dataset.total('documents'):,} documents, {size(dataset.total('text_bytes'))} in {seconds(took)}"
    )
    return {"stage": "data", "did": "wrote the sample world", "seconds": round(took, 3)}


def _tokenizer() -> dict[str, Any]:
    if _whole(open_tokenizer, TOKENIZER, home.tokenizers_dir() / TOKENIZER / CONFIG_FILE):
        say(f"2/3 its tokenizer is trained already ({home.tokenizers_dir() / TOKENIZER})")
        return {"stage": "tokenizer", "did": "nothing, it is done"}
    start = time.perf_counter()
    say(f"2/3 training a tokenizer of {VOCAB:,} tokens on it")
    dataset = open_dataset(DATA)
    train_on(dataset, VOCAB, name=TOKENIZER, max_bytes=dataset.total("text_bytes", "train"), replace=True)
    took = time.perf_counter() - start
    say(f"    done in {seconds(took)}")
    return {"stage": "tokenizer", "did": "trained", "seconds": round(took, 3)}


def _base() -> dict[str, Any]:
    from nanorun.train.base import Options, train_base

    steps = int(os.environ.get("NANORUN_SPEEDRUN_STEPS") or 400)  # fewer, to try the pipeline itself
    config = sample_preset(open_tokenizer(TOKENIZER).vocab_size, DATA, TOKENIZER, steps)
    finished = (home.runs_dir() / RUN / "summary.json").is_file()
    model = config.model
    if finished:
        say(f"3/3 its base model is trained already ({home.runs_dir() / RUN})")
    else:
        say(f"3/3 training a model of {model.total_parameters:,} parameters on {config.tokens:,} tokens")
    summary = train_base(config, Options(name=RUN, samples=6))
    did = "nothing, it is done" if finished else "trained"
    return {"stage": {"stage": "base", "did": did, "seconds": summary["seconds"]}, **summary}


def _whole(open_it: Callable[[str], object], name: str, marker: Path) -> bool:
    """Whether a stage's result is here and sound; a damaged one is made again, since all of it is generated."""
    if not marker.parent.exists():
        return False
    try:
        open_it(name)
    except UserError as error:
        say(f"{error} Making it again.")
        return False
    return True


def show(result: dict[str, Any]) -> str:
    """A look at the world and at how the tokenizer cuts it up."""
    tokenizer, base = open_tokenizer(TOKENIZER), result["base"]
    early = list(islice(sample.documents("val", 10**6), 100))
    told = sorted((text for text in early if "?" not in text and not any(c.isdigit() for c in text)), key=len)
    documents = [*told[-2:], next(text for text in early if " + " in text)]
    talk = min(filter(_calculates, sample.conversations("train", 300)), key=lambda c: len(str(c)))
    text = max(documents[0].splitlines(), key=len)
    text = text[: text.find(". ", 80) + 1] or text
    pieces = [tokenizer.decode([i]) for i in tokenizer.encode(text)]
    lines = [
        "",
        "FROM THE LANTERN ISLES",
        *(f"\n{document}" for document in documents),
        "",
        "HOW THE MODEL WILL READ IT",
        "",
        "│".join(pieces),
        f"({len(text.encode())} bytes, {len(pieces)} tokens)",
        "",
        "HOW IT WILL LEARN TO TALK (what it is trained to say stands in [brackets])",
        "",
        _masked(talk, tokenizer),
        "",
        "WHAT THE BASE MODEL HAS LEARNED (it goes on after the bar)",
        "",
        *(f"{sample['prompt']}│ {' '.join(sample['text'].split())}" for sample in base["samples"]),
        "",
        f"{base['val_bpb']:.3f} bits per byte on text it has not seen, after {base['tokens']:,} tokens in "
        f"{seconds(base['seconds'])}.",
        f"The world is in {result['data']['folder']}, the tokenizer in {result['tokenizer']['folder']}, the model in",
        f"{base['folder']} (loss.png there shows how it learned).",
        'See how it goes on with what you write: nanorun chat, or nanorun chat -p "The lantern".',
        "Next, with your own text: nanorun data add FILES; nanorun tok train; nanorun plan --depth 4 (how long it",
        "would take here); nanorun train base --depth 4.",
    ]
    return "\n".join(lines)


def _calculates(conversation: dict[str, Any]) -> bool:
    return any(not isinstance(message["content"], str) for message in conversation["messages"])


def _masked(conversation: dict[str, Any], tokenizer: Tokenizer) -> str:
    rendered = render(conversation, tokenizer)
    out, inside = [], False
    for token, trained in zip(rendered.ids, rendered.mask, strict=True):
        if bool(trained) != inside:
            out.append("[" if trained else "]")
            inside = bool(trained)
        out.append(tokenizer.decode([token]))
    return "".join(out) + ("]" if inside else "")
