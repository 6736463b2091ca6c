"""`bench infer`: generation throughput of the engine at several batch sizes.

For each batch size a fresh engine completes that many prompts at once, with the same number of tokens each. Only
steps with the full batch are timed, from the first to the last.

    ttft_ms       time to first token: from submission until every sequence has one, prefill of all prompts included
    ms_per_step   one decode step
    mbu           memory bandwidth utilization: bytes that a step must read (all matrices once, and the visible keys
                  and values of each sequence) per second, as a share of the device's bandwidth

A depth is a model with random weights. A name is a trained run, prompted with its validation text; then int8 is
measured in bits per byte, too, and speculation in its acceptance rate.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal

import torch

from nanorun import hardware
from nanorun.config import Config, scale_model
from nanorun.console import say
from nanorun.data.dataset import open_dataset
from nanorun.data.loader import Loader
from nanorun.data.rows import RowOrder
from nanorun.data.sources import open_source
from nanorun.errors import UserError
from nanorun.evals.bpb import evaluate_model
from nanorun.infer.cache import Cache
from nanorun.infer.engine import Engine, Request, Sampling, Settings
from nanorun.infer.load import load_model
from nanorun.infer.model import InferenceGPT, inference_copy, rounded
from nanorun.model.gpt import GPT, build
from nanorun.provenance import record
from nanorun.runs import load_config
from nanorun.text.store import open_tokenizer

VOCAB, CONTEXT = 32768, 2048
BPB_TOKENS = 1_000_000
WARMUP_TOKENS = 8


@dataclass(frozen=True)
class InferenceWorkload:
    batches: Sequence[int] = (1, 8, 32, 128)
    prompt_tokens: int = 1024
    new_tokens: int = 256
    temperature: float = 0.0
    int8: bool = False
    speculate: Literal["lookup", "draft"] | None = None
    draft_tokens: int = 4


def bench_infer(
    depth: int | None, name: str | None, workload: InferenceWorkload, draft: str | None = None
) -> dict[str, Any]:
    """One row per batch size, reported on stderr as it is measured."""
    _check(workload, load_config(name).model.context if name is not None else CONTEXT)
    details: dict[str, Any] = {}
    if name is not None:
        loaded = load_model(name)
        config, model = loaded.config, loaded.model
        draft_model = load_model(draft).model if draft else None
        details = {"model": name, "step": loaded.step}
        if workload.int8:
            dataset = open_dataset(config.data)
            for key, variant in (("bpb", model), ("bpb_int8", rounded(model))):
                details[key] = evaluate_model(variant, loaded.tokenizer, dataset, BPB_TOKENS).bpb
        prompts = _validation_prompts(config, workload.prompt_tokens)
    else:
        machine, depth = hardware.detect(), depth or 12
        device, dtype = torch.device(machine.device), hardware.compute_dtype(machine)
        model = build(scale_model(depth, VOCAB, CONTEXT), device, dtype)
        draft_model = None
        if workload.speculate == "draft":
            draft_model = build(scale_model(max(depth // 3, 1), VOCAB, CONTEXT), device, dtype)
        prompts = _random_prompts(model.config.vocab_size, workload.prompt_tokens)
    weights = inference_copy(model, int8=workload.int8)
    rows: list[dict[str, Any]] = []
    for batch in workload.batches:
        say(f"timing batch size {batch} ({len(rows) + 1} of {len(workload.batches)})")
        row = _measure(model, draft_model, batch, prompts, workload, weights)
        say(
            f"    {row['tokens_per_s']:,.0f} tokens/s, {row['ms_per_step']:.3g} ms per step, "
            f"{row['ttft_ms']:.3g} ms to the first token"
        )
        rows.append(row)
    return record(
        "infer",
        depth=model.config.depth,
        vocab_size=model.config.vocab_size,
        context=model.config.context,
        dtype=str(weights.dtype).removeprefix("torch."),
        int8=workload.int8,
        speculate=workload.speculate,
        temperature=workload.temperature,
        prompt=workload.prompt_tokens,
        new=workload.new_tokens,
        weight_bytes_per_step=weights.bytes_per_step,
        **details,
        rows=rows,
    )


def _check(workload: InferenceWorkload, context: int) -> None:
    """Before anything is loaded: the sequences fit, and are long enough for steps with the full batch.

    Prompts are prefilled some at a time while earlier sequences decode, so the last sequence starts `delay` steps
    after the first.
    """
    prompt, new = workload.prompt_tokens, workload.new_tokens
    if prompt + new > context:
        raise UserError(
            f"A prompt of {prompt} and {new} new tokens do not fit in the model's context of {context}: choose a "
            "smaller --prompt or --new."
        )
    chunk = _prefill_tokens()
    for batch in workload.batches:
        if prompt <= chunk:
            delay = -(-batch // (chunk // prompt)) - 1
        else:
            delay = (batch - 1) * -(-prompt // chunk)
        if new < delay + 2:
            raise UserError(
                f"{new} tokens are too few to time a step at batch size {batch}, whose prefill takes {delay} steps: "
                f"choose --new {delay + 2} or more, a shorter --prompt or a smaller --batch."
            )


def _prefill_tokens() -> int:
    return 8192 if hardware.detect().device == "cuda" else 512


def _measure(
    model: GPT,
    draft: GPT | None,
    batch: int,
    prompts: Iterator[list[int]],
    workload: InferenceWorkload,
    weights: InferenceGPT,
) -> dict[str, Any]:
    is_cuda = weights.device.type == "cuda"
    if is_cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    settings = Settings(
        slots=batch,
        int8=workload.int8,
        speculate=workload.speculate,
        draft_tokens=workload.draft_tokens,
        prefill_tokens=_prefill_tokens(),
    )
    sampling = Sampling(temperature=workload.temperature, seed=0)
    with Engine(model, None, settings, draft=draft) as engine:
        # The first round loads kernels and captures graphs; the second, with other prompts, is timed.
        for new_tokens in (min(workload.new_tokens, WARMUP_TOKENS), workload.new_tokens):
            trace: list[tuple[float, int, int]] = []
            engine.stats.trace = trace
            drafted, accepted = engine.stats.drafted_tokens, engine.stats.accepted_tokens
            requests = [Request(prompt, sampling, max_tokens=new_tokens) for prompt in islice(prompts, batch)]
            replies = engine.generate(requests)
    full = [(when, tokens) for when, rows, tokens in trace if rows == batch]
    if len(full) < 2:
        raise UserError(
            f"{workload.new_tokens} tokens are too few to time a step at batch size {batch}: choose a larger --new."
        )
    seconds = full[-1][0] - full[0][0]
    row = {
        "batch": batch,
        "ttft_ms": round(1e3 * max(reply.first_token_s for reply in replies), 3),
        "ms_per_step": round(1e3 * seconds / (len(full) - 1), 4),
        "tokens_per_s": round(sum(count for _, count in full[1:]) / seconds, 1),
        "mbu": _mbu(weights, batch, workload, seconds / (len(full) - 1)),
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if is_cuda else None,
    }
    if workload.speculate is not None:
        accepted, drafted = engine.stats.accepted_tokens - accepted, engine.stats.drafted_tokens - drafted
        row["acceptance"] = accepted / max(drafted, 1)
    return row


def _mbu(weights: InferenceGPT, batch: int, workload: InferenceWorkload, seconds: float) -> float | None:
    """None where the bandwidth is unknown, and for speculation, which reads more than it must."""
    bandwidth = hardware.this_gpu().bandwidth_tb_s
    if bandwidth is None or workload.speculate is not None:
        return None
    cache = Cache(weights.config, 1, torch.device("meta"), weights.dtype)
    lengths = range(workload.prompt_tokens + 1, workload.prompt_tokens + workload.new_tokens + 1)
    visible = sum(cache.bytes_read(length) for length in lengths) / len(lengths)
    return (weights.bytes_per_step + batch * visible) / seconds / (bandwidth * 1e12)


def _validation_prompts(config: Config, length: int) -> Iterator[list[int]]:
    """Validation text in pieces of this many tokens, repeated when it ends."""
    source = open_source(open_dataset(config.data), "val", open_tokenizer(config.tokenizer))
    with Loader(source, rows=1, context=length, order=RowOrder(shuffle=False)) as loader:
        for batch in loader:
            yield batch.inputs[0].tolist()


def _random_prompts(vocab_size: int, length: int) -> Iterator[list[int]]:
    generator = torch.Generator().manual_seed(0)
    while True:
        yield torch.randint(0, vocab_size, (length,), generator=generator).tolist()
