"""CORE in batches against one example at a time: the same examples, the same model, in one run.

    python benchmarks/core.py --bundle ../shared/data/core.tar.xz --depth 4 --max-per-task 8
    python benchmarks/core.py --bundle ../shared/data/core.tar.xz --model base-d12 --slow-per-task 50    # on a GPU

Three methods: batched with shared prefixes, batched with a copy of the question before each answer, and one example
at a time with all logits, as evaluators usually do it. The slow method can use fewer examples of each task
(--slow-per-task): its time is then extrapolated to the whole task. Building prompts is not timed. Verdicts are
compared wherever two methods judged the same example. Without --model the weights are random and the tokenizer is
GPT-2's. Prints a table and, last, one JSON line.
"""

import argparse
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402
import torch  # noqa: E402
from tables import TABLES  # noqa: E402

from nanorun import hardware  # noqa: E402
from nanorun.config import scale_model  # noqa: E402
from nanorun.data.bundle import open_bundle  # noqa: E402
from nanorun.errors import UserError  # noqa: E402
from nanorun.evals.core import default_batch_tokens, use_fastest_attention  # noqa: E402
from nanorun.evals.core_models import NanorunModel  # noqa: E402
from nanorun.evals.core_prompts import EncodedTask, Encoder, encode_task  # noqa: E402
from nanorun.evals.core_scoring import correct_examples, score_one_at_a_time, score_tasks  # noqa: E402
from nanorun.evals.core_tasks import read_tasks  # noqa: E402
from nanorun.infer.load import load_model  # noqa: E402
from nanorun.model.gpt import GPT, build  # noqa: E402
from nanorun.provenance import record, write_and_print_result  # noqa: E402
from nanorun.text.store import open_tokenizer  # noqa: E402


def open_model(name: str | None, depth: int) -> tuple[GPT, Encoder]:
    if name is not None:
        loaded = load_model(name)
        return loaded.model, loaded.tokenizer
    machine, tokenizer = hardware.detect(), open_tokenizer("gpt2")
    device = torch.device(machine.device)
    model = build(scale_model(depth, tokenizer.vocab_size, 2048), device, hardware.compute_dtype(machine))
    dice = torch.Generator(device).manual_seed(1)
    with torch.no_grad():  # weights that start at zero would score every choice the same
        for parameter in model.parameters():
            parameter += 0.02 * torch.randn(parameter.shape, generator=dice, device=device)
    return model.eval(), tokenizer


def batched(model: NanorunModel, tasks: list[EncodedTask], share: bool, batch_tokens: int) -> dict[str, Any]:
    model.shares_prefixes = share
    start = time.perf_counter()
    scores = score_tasks(model, tasks, batch_tokens)
    seconds, ends = time.perf_counter() - start, np.cumsum([len(task.scored) for task in tasks])
    judged = [
        correct_examples(
            task, scores.losses[end - len(task.scored) : end], scores.is_greedy[end - len(task.scored) : end]
        )
        for task, end in zip(tasks, ends, strict=True)
    ]
    way = "batched, trunks shared" if share else "batched, trunks copied"
    read, padding = int(scores.tokens.sum()), round(scores.padding, 4)
    return {"way": way, "seconds": seconds, "tokens": read, "padding": padding, "verdicts": judged}


def slowly(model: NanorunModel, tasks: list[EncodedTask], counts: list[int]) -> dict[str, Any]:
    """One example at a time; the time is extrapolated to `counts` examples of each task."""
    total, judged = 0.0, []
    for task, count in zip(tasks, counts, strict=True):
        start = time.perf_counter()
        judged.append(score_one_at_a_time(model, task))
        total += (time.perf_counter() - start) * count / len(task)
    lengths = [
        (np.repeat(t.prefix_lengths, t.choices) + t.suffix_lengths).sum() * n / len(t)
        for t, n in zip(tasks, counts, strict=True)
    ]
    return {
        "way": "one at a time",
        "seconds": total,
        "tokens": int(sum(lengths)),
        "padding": None,
        "verdicts": judged,
    }


def compare(arguments: argparse.Namespace) -> dict[str, Any]:
    gpt, tokenizer = open_model(arguments.model, arguments.depth)
    use_fastest_attention(gpt)
    model, bundle = NanorunModel(gpt), open_bundle(arguments.bundle)
    most, fewer = arguments.max_per_task, arguments.slow_per_task or arguments.max_per_task
    listed = read_tasks(bundle)
    tasks = [encode_task(bundle, task, tokenizer, most)[0] for task in listed]
    some = tasks if fewer == most else [encode_task(bundle, task, tokenizer, fewer)[0] for task in listed]
    counts = [len(task) for task in tasks]
    budget = arguments.batch_tokens or default_batch_tokens(model.device)
    warm = [encode_task(bundle, task, tokenizer, 2)[0] for task in listed[:3]]
    shared = (True,) if arguments.no_copies else (True, False)
    for share in shared:
        batched(model, warm, share, budget)
    slowly(model, warm, [2] * len(warm))

    ways = [batched(model, tasks, share, budget) for share in shared]
    ways.append(slowly(model, some, counts))
    if fewer != most:  # the cap changes the shots, so the same examples are judged again
        again = batched(model, some, True, budget)["verdicts"]
    else:
        again = ways[0]["verdicts"]
    slow = ways[-1]["seconds"]
    rows = [
        {k: v for k, v in way.items() if k != "verdicts"}
        | {"examples_per_s": sum(counts) / way["seconds"], "times_faster": slow / way["seconds"]}
        for way in ways
    ]
    pairs = zip(again, ways[-1]["verdicts"], strict=True)
    return record(
        "core speed",
        model=arguments.model or f"d{gpt.config.depth}, random weights",
        depth=gpt.config.depth,
        dtype=str(gpt.dtype).removeprefix("torch."),
        vocab_size=gpt.config.vocab_size,
        examples=sum(counts),
        slow_examples=sum(map(len, some)),
        batch_tokens=budget,
        rows=rows,
        other_verdicts=int(sum((fast != truth).sum() for fast, truth in pairs)),
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--bundle", type=Path, default=None)
    parser.add_argument("--model", default=None, help="a run's name; without one, random weights")
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--max-per-task", type=int, default=None)
    parser.add_argument("--slow-per-task", type=int, default=None)
    parser.add_argument("--no-copies", action="store_true", help="skip the second method")
    parser.add_argument("--batch-tokens", type=int, default=None)
    parser.add_argument("--save", type=Path, default=None)
    arguments = parser.parse_args()
    try:
        result = compare(arguments)
    except UserError as error:
        sys.exit(str(error))
    print(TABLES["core speed"](result))
    write_and_print_result(result, arguments.save)


if __name__ == "__main__":
    main()
