"""Small bundles, and models whose every answer is known."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nanorun.config import scale_model
from nanorun.evals.core_scoring import ScoringBatch
from nanorun.evals.core_tasks import CoreTask
from nanorun.model.gpt import GPT, build
from nanorun.text.tokenizer import SPECIAL_TOKENS, Tokenizer

CPU = torch.device("cpu")


def byte_tokenizer() -> Tokenizer:
    """A token is a byte, so that anyone can count."""
    special = {name: 256 + i for i, name in enumerate(SPECIAL_TOKENS)}
    return Tokenizer("bytes", r"\S+|\s+", {bytes([b]): b for b in range(256)}, special)


def task(
    kind: str, shots: int = 0, delimiter: str = " ", label: str = "t", baseline: float = 0.0
) -> CoreTask:
    return CoreTask(label, kind, shots, delimiter, baseline, f"eval_data/{label}.jsonl")  # type: ignore[arg-type]


class KnownModel:
    """The logits after a token depend on that token (or on the whole row so far), by a given rule."""

    shares_prefixes = False

    def __init__(self, vocab_size: int, rule: Any, context: int = 10_000) -> None:
        self.vocab_size, self.rule, self.context, self.device = vocab_size, rule, context, CPU

    def all_logits(self, tokens: Tensor) -> Tensor:
        rows = tokens.tolist()
        return torch.stack([torch.stack([self.rule(row[: i + 1]) for i in range(len(row))]) for row in rows])

    def logits(self, batch: ScoringBatch) -> Tensor:
        rows, time = batch.tokens.tolist(), batch.tokens.shape[1]
        return torch.stack(
            [self.rule(rows[at // time][: at % time + 1]) for at in batch.logit_positions.tolist()]
        )


def oracle(tokenizer: Tokenizer, answers: Sequence[tuple[str, str]]) -> KnownModel:
    """Knows what follows each beginning: (the end of a beginning, what comes then)."""
    known = [(tokenizer.encode(begin), tokenizer.encode(then)) for begin, then in answers]

    def rule(row: list[int]) -> Tensor:
        logits = torch.zeros(tokenizer.vocab_size)
        for begin, then in known:
            for said in range(len(then)):
                if row[-len(begin) - said :] == [*begin, *then[:said]]:
                    logits[then[said]] = 20.0
        return logits

    return KnownModel(tokenizer.vocab_size, rule)


def grown_model(vocab_size: int, seed: int = 0, **changes: Any) -> GPT:
    """A small model whose every parameter is far from its (partly zero) start."""
    settings = {"dim": 48, "heads": 4, "kv_heads": 2, "short_window": 24, **changes}
    config = scale_model(settings.pop("depth", 3), vocab_size, settings.pop("context", 256), **settings)
    model = build(config, CPU, torch.float32, seed=seed)
    dice = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=dice)
    return model.eval()


def questions(kind: str, count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Random words: nothing can be known about the answers."""
    dice = np.random.default_rng(seed)

    def words(most: int) -> str:
        letters = "abcdefghijklmnopqrstuvwxyz"
        return " ".join("".join(dice.choice(list(letters), 4)) for _ in range(dice.integers(1, most + 1)))

    made: list[dict[str, Any]] = []
    for _ in range(count):
        if kind == "multiple_choice":
            options = [words(3) for _ in range(4)]
            made.append({"query": words(8), "choices": options, "gold": int(dice.integers(4))})
        elif kind == "schema":
            contexts = [words(5) for _ in range(2)]
            made.append(
                {"context_options": contexts, "continuation": words(4), "gold": int(dice.integers(2))}
            )
        else:
            made.append({"context": words(8), "continuation": words(1)})
    return made


def write_bundle(folder: Path, tasks: dict[str, dict[str, Any]]) -> Path:
    """`tasks`: by label, its settings for core.yaml, and `examples` and `baseline` in percent."""
    entries, baselines = ["icl_tasks:"], ["Eval Task,Random baseline"]
    for label, about in tasks.items():
        settings = {k: v for k, v in about.items() if k not in ("examples", "baseline")}
        settings = {"label": label, "dataset_uri": f"some/{label}.jsonl", **settings}
        entries += ["-", *(f"  {key}: {json.dumps(value)}" for key, value in settings.items())]
        baselines.append(f"{label},{about.get('baseline', 0)}")
        path = folder / "eval_data" / "some" / f"{label}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(example) + "\n" for example in about["examples"]))
    (folder / "core.yaml").write_text("\n".join(entries) + "\n")
    (folder / "eval_meta_data.csv").write_text("\n".join(baselines) + "\n")
    return folder


def small_bundle(folder: Path, count: int = 12) -> Path:
    return write_bundle(
        folder,
        {
            "choose": {
                "icl_task_type": "multiple_choice", "num_fewshot": [2], "baseline": 25,
                "continuation_delimiter": "\nAnswer: ", "examples": questions("multiple_choice", count),
            },
            "choose_blind": {
                "icl_task_type": "multiple_choice", "num_fewshot": [0], "baseline": 25,
                "examples": questions("multiple_choice", count, 1),
            },
            "who": {
                "icl_task_type": "schema", "num_fewshot": [0], "baseline": 50,
                "examples": questions("schema", count),
            },
            "next": {
                "icl_task_type": "language_modeling", "num_fewshot": [3],
                "examples": questions("language_modeling", count),
            },
        },
    )  # fmt: skip
