"""`bench infer`: the speed of generation as the engine does it, for several numbers of texts at a time.

For each batch size a fresh engine answers that many prompts at once, the same number of tokens each. Only
steps with all texts in them are timed, from the first to the last.

    ttft_ms       until every text has its first token, from submission: reading all prompts included
    ms_per_step   one decode step
    mbu           bytes that a step must read (all matrices once, and the keys and values that each text
                  sees) per second, as a share of what the device's memory can deliver

A depth is a model with random weights; a name is a trained run, prompted with its validation text, and then
int8 and speculation show what they cost in bits per byte and how often they guess right.
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
from nanorun.evals.bpb import bpb_evaluator
from nanorun.infer.cache import Cache
from nanorun.infer.engine import Engine, Request, Sampling, Settings
from nanorun.infer.load import load_model
from nanorun.infer.weights import Weights, rounded
from nanorun.model.gpt import GPT, build
from nanorun.plan import memory
from nanorun.provenance import record
from nanorun.runs import read_config
from nanorun.text.store import open_tokenizer

VOCAB, CONTEXT = 32768, 2048
BPB_TOKENS = 1_000_000


@dataclass(frozen=True)
class Setting:
    batches: Sequence[int] = (1, 8, 32, 128)
    prompt: int = 1024
    new: int = 256
    temperature: float = 0.0
    int8: bool = False
    speculate: Literal["lookup", "draft"] | None = None
    guesses: int = 4


def bench_infer(
    depth: int | None, name: str | None, setting: Setting, draft: str | None = None
) -> dict[str, Any]:
    """One row for each batch size, told on stderr as it comes."""
    shape = Config.from_dict(read_config(name)).model if name is not None else None
    _check(setting, shape.context if shape is not None else CONTEXT)
    if name is not None:
        loaded = load_model(name)
        config, model = loaded.config, loaded.model
        draft_model = load_model(draft).model if draft else None
        about = {"model": name, "step": loaded.step, **_bits(config, model, setting)}
        prompts = _texts(config, setting.prompt)
    else:
        machine = hardware.detect()
        device, dtype = torch.device(machine.device), hardware.compute_dtype(machine)
        model = build(scale_model(depth or 12, VOCAB, CONTEXT), device, dtype)
        small = build(scale_model(max((depth or 12) // 3, 1), VOCAB, CONTEXT), device, dtype)
        draft_model = small if setting.speculate == "draft" else None
        about, prompts = {}, _random(model.config.vocab_size, setting.prompt)
    weights = Weights.of(model, int8=setting.int8)
    rows: list[dict[str, Any]] = []
    for batch in setting.batches:
        say(f"timing {batch} text{'s' * (batch > 1)} at a time ({len(rows) + 1} of {len(setting.batches)})")
        row = _row(model, draft_model, batch, prompts, setting, weights)
        say(
            f"    {row['tokens_per_s']:,.0f} tokens/s, {row['ms_per_step']:.3g} ms a step, {row['ttft_ms']:.3g} ms to "
            "the first token"
        )
        rows.append(row)
    return record(
        "infer",
        depth=model.config.depth,
        vocab_size=model.config.vocab_size,
        context=model.config.context,
        dtype=str(weights.dtype).removeprefix("torch."),
        int8=setting.int8,
        speculate=setting.speculate,
        temperature=setting.temperature,
        prompt=setting.prompt,
        new=setting.new,
        weight_bytes_per_step=weights.bytes_per_step,
        **about,
        rows=rows,
    )


def _check(setting: Setting, context: int) -> None:
    """Before anything is loaded: the texts fit, and are long enough for steps with all of them in it.

    Prompts are read some at a time while others are being answered already, so that the last text begins when
    the first has had `late` tokens.
    """
    if setting.prompt + setting.new > context:
        raise UserError(
            f"A prompt of {setting.prompt} and {setting.new} new tokens do not fit in the model's context of "
            f"{context}: choose a smaller --prompt or --new."
        )
    chunk = _prefill_tokens()
    for batch in setting.batches:
        if setting.prompt <= chunk:
            late = -(-batch // (chunk // setting.prompt)) - 1
        else:
            late = (batch - 1) * -(-setting.prompt // chunk)
        if setting.new < late + 2:
            raise UserError(
                f"{setting.new} tokens are too few to time a step of {batch} texts, whose prompts take {late} steps to "
                f"read: choose --new {late + 2} or more, a shorter --prompt or a smaller --batch."
            )


def _prefill_tokens() -> int:
    return 8192 if hardware.detect().device == "cuda" else 512


def _row(
    model: GPT,
    draft: GPT | None,
    batch: int,
    prompts: Iterator[list[int]],
    setting: Setting,
    weights: Weights,
) -> dict[str, Any]:
    cuda = weights.device.type == "cuda"
    if cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    options = Settings(
        slots=batch,
        int8=setting.int8,
        speculate=setting.speculate,
        draft_tokens=setting.guesses,
        prefill_tokens=_prefill_tokens(),
    )
    sampling = Sampling(temperature=setting.temperature, seed=0)
    with Engine(model, None, options, draft=draft) as engine:
        # The first round loads and captures what the second, with other prompts, only uses.
        for new in (min(setting.new, 8), setting.new):
            trace: list[tuple[float, int, int]] = []
            engine.stats.trace = trace
            drafted, accepted = engine.stats.drafted_tokens, engine.stats.accepted_tokens
            requests = [Request(prompt, sampling, max_tokens=new) for prompt in islice(prompts, batch)]
            replies = engine.generate(requests)
    full = [(when, tokens) for when, rows, tokens in trace if rows == batch]
    if len(full) < 2:
        raise UserError(
            f"{setting.new} tokens are too few to time a step of {batch} texts: choose a larger --new."
        )
    seconds = full[-1][0] - full[0][0]
    tokens = sum(count for _, count in full[1:])
    row = {
        "batch": batch,
        "ttft_ms": round(1e3 * max(reply.first_token_s for reply in replies), 3),
        "ms_per_step": round(1e3 * seconds / (len(full) - 1), 4),
        "tokens_per_s": round(tokens / seconds, 1),
        "mbu": _mbu(weights, batch, setting, seconds / (len(full) - 1)),
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if cuda else None,
    }
    if setting.speculate is not None:
        accepted, drafted = engine.stats.accepted_tokens - accepted, engine.stats.drafted_tokens - drafted
        row["acceptance"] = accepted / max(drafted, 1)
    return row


def _mbu(weights: Weights, batch: int, setting: Setting, seconds: float) -> float | None:
    """None where the bandwidth is not known, and for speculation, which reads more than it must."""
    bandwidth = hardware.this_gpu().bandwidth_tb_s
    if bandwidth is None or setting.speculate is not None:
        return None
    shapes = Cache(weights.config, 1, torch.device("meta"), weights.dtype)
    lengths = range(setting.prompt + 1, setting.prompt + setting.new + 1)
    visible = sum(shapes.bytes_read(length) for length in lengths) / len(lengths)
    return (weights.bytes_per_step + batch * visible) / seconds / (bandwidth * 1e12)


def _bits(config: Config, model: GPT, setting: Setting) -> dict[str, float]:
    """What int8 does to the bits per byte of validation text."""
    if not setting.int8:
        return {}
    tokenizer = open_tokenizer(config.tokenizer)
    source = open_source(open_dataset(config.data), "val", tokenizer)
    rows, device = memory.micro_batch_rows(config.model, hardware.detect()), model.embed.weight.device

    def bpb(which: GPT) -> float:
        return bpb_evaluator(source, config.model, tokenizer, which, device, rows, BPB_TOKENS)().bpb

    return {"bpb": bpb(model), "bpb_int8": bpb(rounded(model))}


def _texts(config: Config, length: int) -> Iterator[list[int]]:
    """Validation text in pieces of this many tokens, from the start again when it ends."""
    source = open_source(open_dataset(config.data), "val", open_tokenizer(config.tokenizer))
    with Loader(source, rows=1, context=length, order=RowOrder(shuffle=False)) as loader:
        for batch in loader:
            yield batch.inputs[0].tolist()


def _random(vocab_size: int, length: int) -> Iterator[list[int]]:
    dice = torch.Generator().manual_seed(0)
    while True:
        yield torch.randint(0, vocab_size, (length,), generator=dice).tolist()
