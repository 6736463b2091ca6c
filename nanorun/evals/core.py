"""`eval core`: the CORE score, the standard comparison of base models.

CORE is the mean, over 22 tasks that need no chat format, of the centred accuracy (accuracy - baseline) /
(1 - baseline): 0 for guessing, 1 for all correct. The steps:

    core_tasks.py     the tasks of a bundle, and their prompts as text
    core_prompts.py   prompts as tokens, cached on disk
    core_scoring.py   rows, batches, losses, and which examples are correct, over all ranks
    core_models.py    our model and Hugging Face's

Batches mix tasks, so a task's time is that of encoding its prompts plus its share, by tokens, of the scoring time.
"""

import contextlib
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from nanorun import hardware, home
from nanorun.console import Progress, say
from nanorun.data.bundle import Bundle, open_bundle
from nanorun.errors import UserError
from nanorun.evals.core_models import NanorunModel, open_hugging_face
from nanorun.evals.core_prompts import EncodedTask, Encoder, encode_task
from nanorun.evals.core_scoring import ScoringModel, correct_examples, rank_and_world, score_tasks
from nanorun.evals.core_tasks import CoreTask, display_name, find_tasks, open_mmlu, read_tasks
from nanorun.infer.load import load_model
from nanorun.model.attention import choose_backends
from nanorun.model.gpt import GPT
from nanorun.provenance import record, write_result

GPT2_CORE = {"124M": 0.1139, "355M": 0.1849, "774M": 0.2146, "1.5B": 0.2565}  # published, by size
# A GPU needs many tokens at a time to be busy. A CPU is busy with few, and small batches have less padding.
BATCH_TOKENS_GPU, BATCH_TOKENS_CPU = 65_536, 2_048


@dataclass(frozen=True)
class CoreOptions:
    bundle: Path | None = None
    tasks: Sequence[str] = ()  # empty: all 22
    max_per_task: int | None = None
    batch_tokens: int | None = None
    mmlu: Path | None = None


def evaluate_core(run: str | None, hugging_face: Path | None, options: CoreOptions) -> dict[str, Any] | None:
    """Evaluates a run, or a causal model in a folder that transformers reads. Returns None on ranks other than 0.

    The complete result of a run is written to its folder.
    """
    with process_group():
        selected = select_tasks(open_bundle(options.bundle), options)  # fails before the model is loaded
        if hugging_face is not None:
            machine = hardware.detect()
            device, dtype = torch.device(machine.device), hardware.compute_dtype(machine)
            model, tokenizer = open_hugging_face(hugging_face, device, dtype)
            result = evaluate(model, tokenizer, selected, options, hugging_face.resolve().name)
            return None if rank_and_world()[0] else result
        loaded = load_model(run)
        if run is None and not rank_and_world()[0]:
            say(f"evaluating {loaded}")
        use_fastest_attention(loaded.model)
        model = NanorunModel(loaded.model)
        result = evaluate(model, loaded.tokenizer, selected, options, loaded.run, loaded.step)
        if rank_and_world()[0]:
            return None
        if result["core"] is not None:
            suffix = f"-max{options.max_per_task}" if options.max_per_task else ""
            write_result(result, home.runs_dir() / loaded.run / f"core{suffix}.json")
        return result


def select_tasks(bundle: Bundle, options: CoreOptions) -> list[tuple[Bundle, CoreTask]]:
    """The tasks to evaluate, each with the bundle that holds its examples."""
    tasks, names = read_tasks(bundle), list(options.tasks)
    extra: list[tuple[Bundle, CoreTask]] = []
    if options.mmlu is not None:
        extra, names = [open_mmlu(options.mmlu)], [name for name in names if name != "mmlu"]
        if not names and options.tasks:
            return extra
    selected = find_tasks(bundle, tasks, names) if names else tasks
    missing = next((task for task in selected if task.file not in bundle.files), None)
    if missing is not None:
        raise UserError(
            f"{bundle.where} has no {missing.file}, which '{missing.label}' needs: download the bundle again, or "
            "name the tasks it has with --tasks."
        )
    return [*((bundle, task) for task in selected), *extra]


def evaluate(
    model: ScoringModel,
    tokenizer: Encoder,
    selected: Sequence[tuple[Bundle, CoreTask]],
    options: CoreOptions,
    name: str,
    step: int | None = None,
) -> dict[str, Any]:
    """Scores the tasks. Every rank returns the same result, except for the times."""
    start = time.perf_counter()
    prompts = _encode_tasks(tokenizer, selected, options.max_per_task)
    encoded = [task for task, _, _ in prompts]
    scoring_start = time.perf_counter()
    batch_tokens = options.batch_tokens or default_batch_tokens(model.device)
    try:
        scores = score_tasks(model, encoded, batch_tokens, show_progress=True)
    except torch.cuda.OutOfMemoryError as error:
        raise UserError(
            f"The GPU has no memory for {batch_tokens} tokens at a time: choose a smaller --batch-tokens."
        ) from error
    scoring = time.perf_counter() - scoring_start
    if not np.isfinite(scores.losses).all():
        raise UserError(
            f"The losses of {name} are not all finite: its weights are damaged, or its dtype overflows."
        )
    tokens, results, first = int(scores.tokens.sum()), {}, 0
    for (_, task), prompt, read in zip(selected, prompts, scores.tokens.tolist(), strict=True):
        own, total, seconds = prompt
        last = first + len(own.scored)
        correct = correct_examples(own, scores.losses[first:last], scores.is_greedy[first:last])
        results[task.label] = _task_result(task, correct, total, seconds + scoring * read / max(tokens, 1))
        first = last
    elapsed, examples = time.perf_counter() - start, sum(map(len, encoded))
    return record(
        "core",
        model=name,
        step=step,
        bundle=str(selected[0][0].where),
        max_per_task=options.max_per_task,
        **_core_score(results, selected, complete=not options.tasks),
        tasks=results,
        gpt2=GPT2_CORE,
        examples=examples,
        seconds=round(elapsed, 3),
        prompt_seconds=round(scoring_start - start, 3),
        examples_per_s=examples / scoring,
        tokens=tokens,
        tokens_per_s=tokens / scoring,
        padding=round(scores.padding, 4),
        ranks=rank_and_world()[1],
    )


def default_batch_tokens(device: torch.device) -> int:
    return BATCH_TOKENS_GPU if device.type == "cuda" else BATCH_TOKENS_CPU


def _encode_tasks(
    tokenizer: Encoder, selected: Sequence[tuple[Bundle, CoreTask]], cap: int | None
) -> list[tuple[EncodedTask, int, float]]:
    """The prompts of each task, the number of examples of the whole task, and the seconds it took.

    Rank 0 encodes and caches the prompts; the other ranks then read the cache.
    """
    prompts = []
    rank, world = rank_and_world()
    if rank:
        dist.barrier()
    with Progress("encoding prompts", None, "doc") as bar:
        for bundle, task in selected:
            start = time.perf_counter()
            encoded, total = encode_task(bundle, task, tokenizer, cap, None if rank else bar)
            prompts.append((encoded, total, time.perf_counter() - start))
    if world > 1 and not rank:
        dist.barrier()
    return prompts


def _task_result(task: CoreTask, correct: np.ndarray, total: int, seconds: float) -> dict[str, Any]:
    accuracy = float(correct.mean())
    return {
        "name": display_name(task.label, total),
        "type": task.kind,
        "shots": task.shots,
        "examples": len(correct),
        "of": total,
        "accuracy": accuracy,
        "standard_error": float((accuracy * (1 - accuracy) / len(correct)) ** 0.5),
        "baseline": task.baseline,
        "centred": task.centred(accuracy),
        "seconds": round(seconds, 3),
    }


def _core_score(
    results: dict[str, dict[str, Any]], selected: Sequence[tuple[Bundle, CoreTask]], complete: bool
) -> dict[str, float | None]:
    """The mean of the centred accuracies and its standard error, if no task was left out."""
    if not complete:
        return {"core": None, "core_standard_error": None}
    counted = [results[task.label] for _, task in selected if task.in_core]
    errors = [each["standard_error"] / (1 - each["baseline"]) for each in counted]
    return {
        "core": float(np.mean([each["centred"] for each in counted])),
        "core_standard_error": float(np.sqrt(np.square(errors).sum()) / len(errors)),
    }


def use_fastest_attention(model: GPT) -> None:
    """FlashAttention if installed. The other fast backends need compilation and rows of one length."""
    device = model.embed.weight.device
    if choose_backends(model.config, device, "auto", model.dtype, compiled=False)[0] == "flash":
        model.batch_attention.use_backend("flash")


@contextlib.contextmanager
def process_group() -> Iterator[None]:
    """Under torchrun, initializes the process group unless it is initialized already; one GPU per rank."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1 or dist.is_initialized():
        yield
        return
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    # Rank 0 can take minutes to encode the prompts.
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo", timeout=timedelta(hours=1))
    try:
        yield
    finally:
        dist.destroy_process_group()
