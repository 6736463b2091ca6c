"""`eval core`: the score of base models that everyone compares.

CORE is the mean, over 22 tasks that need no chat, of the centred accuracy (accuracy - baseline) / (1 - baseline):
0 for guessing, 1 for all right. How it is computed stands in the files that do it:

    core_data.py      the tasks of a bundle, and their prompts
    core_prompts.py   prompts as tokens, kept on disk
    core_rows.py      what a model must read of them, in batches
    core_model.py     our model and Hugging Face's
    core_score.py     losses and verdicts, over all ranks

Batches mix tasks, so a task's time is that of making its prompts and, of the scoring, the share of the tokens
that were its own.
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
from nanorun.console import Progress
from nanorun.data.bundle import Bundle, open_bundle
from nanorun.errors import UserError
from nanorun.evals.core_data import Task, choose_tasks, mmlu_from, read_tasks, shown_name
from nanorun.evals.core_model import CausalModel, OurModel, open_hugging_face
from nanorun.evals.core_prompts import Encoded, Encoder, encode_task
from nanorun.evals.core_score import Scores, ranks, score, verdicts
from nanorun.infer.load import load_model
from nanorun.model.attention import choose_backends
from nanorun.model.gpt import GPT
from nanorun.provenance import record, write_result

GPT2_CORE = {"124M": 0.1139, "355M": 0.1849, "774M": 0.2146, "1.5B": 0.2565}  # published, by size
# More tokens at a time keep a GPU busy; a CPU is busy with few, and then less of a batch is padding.
BATCH_TOKENS_GPU, BATCH_TOKENS = 65_536, 2_048


@dataclass(frozen=True)
class Options:
    bundle: Path | None = None
    tasks: Sequence[str] = ()  # empty: all 22
    max_per_task: int | None = None
    batch_tokens: int | None = None
    mmlu: Path | None = None


def evaluate_run_core(name: str | None, options: Options) -> dict[str, Any] | None:
    """One of our runs. A whole evaluation is kept in its folder. None on ranks other than the first."""
    with joined_ranks():
        bundle = open_bundle(options.bundle)  # a mistake here should not wait for a model
        chosen = choose(bundle, options)
        loaded = load_model(name)
        fastest_attention(loaded.model)
        result = evaluate(OurModel(loaded.model), loaded.tokenizer, chosen, options, loaded.run, loaded.step)
        if ranks()[0]:
            return None
        if result["core"] is not None:
            few = f"-max{options.max_per_task}" if options.max_per_task else ""
            write_result(result, home.runs_dir() / loaded.run / f"core{few}.json")
        return result


def evaluate_hugging_face(folder: Path, options: Options) -> dict[str, Any] | None:
    """A causal model in a folder that transformers reads. None on ranks other than the first."""
    with joined_ranks():
        chosen = choose(open_bundle(options.bundle), options)
        machine = hardware.detect()
        model, tokenizer = open_hugging_face(
            folder, torch.device(machine.device), hardware.compute_dtype(machine)
        )
        result = evaluate(model, tokenizer, chosen, options, folder.resolve().name)
        return None if ranks()[0] else result


def choose(bundle: Bundle, options: Options) -> list[tuple[Bundle, Task]]:
    """The tasks that are asked for, each with the bundle that has its examples."""
    tasks, names = read_tasks(bundle), list(options.tasks)
    chosen: list[tuple[Bundle, Task]] = []
    if options.mmlu is not None:
        task, beside = mmlu_from(options.mmlu)
        chosen, names = [(beside, task)], [name for name in names if name != "mmlu"]
        if not names and options.tasks:
            return chosen
    wanted = choose_tasks(bundle, tasks, names) if names else tasks
    missing = next((task for task in wanted if task.file not in bundle.names), None)
    if missing is not None:
        raise UserError(
            f"{bundle.where} has no {missing.file}, which '{missing.label}' needs: get the bundle anew, or name "
            "the tasks it has with --tasks."
        )
    return [*((bundle, task) for task in wanted), *chosen]


def evaluate(
    model: CausalModel,
    tokenizer: Encoder,
    chosen: Sequence[tuple[Bundle, Task]],
    options: Options,
    name: str,
    step: int | None = None,
) -> dict[str, Any]:
    """Scores the tasks. Every rank gets the same result, but for the times."""
    start = time.perf_counter()
    prompts = _encode(tokenizer, chosen, options.max_per_task)
    encoded = [each.encoded for each in prompts]
    began = time.perf_counter()
    scores = _score(model, encoded, options.batch_tokens)
    scoring = time.perf_counter() - began
    if not np.isfinite(scores.losses).all():
        raise UserError(
            f"The losses of {name} are not all numbers: its weights are damaged, or its dtype too narrow."
        )
    results, at = {}, 0
    for (_, task), prompt, read in zip(chosen, prompts, scores.tokens.tolist(), strict=True):
        mine = slice(at, at + len(prompt.encoded.tails))
        right = verdicts(prompt.encoded, scores.losses[mine], scores.likeliest[mine])
        spent = prompt.seconds + scoring * read / max(int(scores.tokens.sum()), 1)
        results[task.label] = _task_result(task, right, prompt.of, spent)
        at = mine.stop
    elapsed, examples = time.perf_counter() - start, sum(map(len, encoded))
    return record(
        "core",
        model=name,
        step=step,
        bundle=str(chosen[0][0].where),
        max_per_task=options.max_per_task,
        **_core(results, chosen, whole=not options.tasks),
        tasks=results,
        gpt2=GPT2_CORE,
        examples=examples,
        seconds=round(elapsed, 3),
        prompt_seconds=round(began - start, 3),
        examples_per_s=examples / scoring,
        tokens=int(scores.tokens.sum()),
        tokens_per_s=int(scores.tokens.sum()) / scoring,
        padding=round(scores.padding, 4),
        ranks=ranks()[1],
    )


@dataclass(frozen=True)
class _Prompts:
    encoded: Encoded
    of: int  # examples that the task has in all
    seconds: float


def _encode(tokenizer: Encoder, chosen: Sequence[tuple[Bundle, Task]], most: int | None) -> list[_Prompts]:
    """The prompts of all tasks. The first rank makes and stores them, the others then find them."""
    made = []
    rank, world = ranks()
    if rank:
        dist.barrier()
    with Progress("making prompts", None, "doc") as bar:
        for bundle, task in chosen:
            start = time.perf_counter()
            encoded, of = encode_task(bundle, task, tokenizer, most, None if rank else bar)
            made.append(_Prompts(encoded, of, time.perf_counter() - start))
    if world > 1 and not rank:
        dist.barrier()
    return made


def _score(model: CausalModel, encoded: Sequence[Encoded], batch_tokens: int | None) -> Scores:
    default = BATCH_TOKENS_GPU if model.device.type == "cuda" else BATCH_TOKENS
    try:
        return score(model, encoded, batch_tokens or default, watched=True)
    except torch.cuda.OutOfMemoryError as error:
        raise UserError(
            f"The GPU has no room for {batch_tokens or default} tokens at a time: choose a smaller --batch-tokens."
        ) from error


def _task_result(task: Task, right: np.ndarray, of: int, spent: float) -> dict[str, Any]:
    accuracy = float(right.mean())
    return {
        "name": shown_name(task.label, of),
        "type": task.kind,
        "shots": task.shots,
        "examples": len(right),
        "of": of,
        "accuracy": accuracy,
        "standard_error": float((accuracy * (1 - accuracy) / len(right)) ** 0.5),
        "baseline": task.baseline,
        "centred": task.centred(accuracy),
        "seconds": round(spent, 3),
    }


def _core(
    results: dict[str, dict[str, Any]], chosen: Sequence[tuple[Bundle, Task]], whole: bool
) -> dict[str, float | None]:
    """The mean of the centred values and its standard error, if no task was left out."""
    if not whole:
        return {"core": None, "core_standard_error": None}
    counted = [results[task.label] for _, task in chosen if task.in_core]
    errors = [each["standard_error"] / (1 - each["baseline"]) for each in counted]
    return {
        "core": float(np.mean([each["centred"] for each in counted])),
        "core_standard_error": float(np.sqrt(np.square(errors).sum()) / len(errors)),
    }


def fastest_attention(model: GPT) -> None:
    """FlashAttention where it is installed. The other backends are for compiled code and rows of one length."""
    device = model.embed.weight.device
    if choose_backends(model.config, device, "auto", model.dtype, compiled=False)[0] == "flash":
        model.use_backend("flash")


@contextlib.contextmanager
def joined_ranks() -> Iterator[None]:
    """Under torchrun, and where nobody has done it yet: this process joins the others, with a GPU of its own."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1 or dist.is_initialized():
        yield
        return
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    # the first rank may take minutes to make the prompts
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo", timeout=timedelta(hours=1))
    try:
        yield
    finally:
        dist.destroy_process_group()
