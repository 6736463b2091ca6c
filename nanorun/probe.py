"""How fast this machine trains a model, found by training one like it for a second or two.

The largest matmuls say what a CPU can do at most, and a small model is far from that: its matmuls are narrow,
and what stands between them (norms, rotary positions, the loss, the optimizer's own work) takes as long as they
do. So a plan for a CPU takes a step: the model itself where that is quick, else one of the same width with fewer
layers and shorter rows, or of the widest that is worth its memory.
"""

import time
from dataclasses import dataclass, replace
from statistics import median

from nanorun.config import Config, ModelConfig

SECONDS = 0.5  # of measuring, more or less: a micro-batch and another are always done
MICRO_FLOPS = 4e10  # of the micro-batch that is tried: half a second, or a few
WIDEST = 1024  # wider matmuls are no faster
LARGEST_VOCAB = 32_768


@dataclass(frozen=True)
class Pace:
    """Seconds, by what they depend on."""

    per_flop: float  # of a micro-batch, forward and backward
    per_parameter: float  # of an update of the weights, once a step

    def seconds_per_step(self, config: Config) -> float:
        flops = config.train.batch_tokens * config.model.flops_per_token
        return self.per_flop * flops + self.per_parameter * config.model.total_parameters


def measure(config: Config, rows: int, seconds: float = SECONDS) -> Pace:
    """The pace of training this on the CPU with micro-batches of so many rows."""
    import torch

    from nanorun.model.gpt import build
    from nanorun.optim.groups import group_parameters
    from nanorun.optim.optimizer import Optimizer
    from nanorun.optim.schedules import scheduled_hyperparameters

    like, rows = smaller(config.model, rows)
    dice = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, like.vocab_size, (rows, like.context), generator=dice)
    with torch.random.fork_rng(devices=[]):
        model = build(like, torch.device("cpu"), torch.float32)
    optimizer = Optimizer(
        group_parameters(model.named_parameters(), config.optim), config.optim, compiled=False
    )
    passes: list[float] = []
    updates: list[float] = []
    end = time.perf_counter() + seconds
    while len(passes) < 2 or (time.perf_counter() < end and len(passes) < 20):
        start = time.perf_counter()
        (model(tokens, tokens) / tokens.numel()).backward()
        between = time.perf_counter()
        optimizer.clip_grad_norm(config.optim.max_grad_norm)
        optimizer.step(scheduled_hyperparameters(0, 1, config.optim))
        optimizer.zero_grad()
        passes.append(between - start)
        updates.append(time.perf_counter() - between)
    flops = tokens.numel() * like.flops_per_token
    # the first of each also loads libraries
    return Pace(median(passes[1:]) / flops, median(updates[1:]) / like.total_parameters)


def smaller(model: ModelConfig, rows: int) -> tuple[ModelConfig, int]:
    """A model like this one and a micro-batch of it that are quick to try: themselves, where they are."""
    if model.dim > WIDEST:
        heads = max(WIDEST // model.head_dim, 1)
        model = replace(model, dim=heads * model.head_dim, heads=heads, kv_heads=heads)
    model = replace(model, vocab_size=min(model.vocab_size, LARGEST_VOCAB), recompute=False)

    def flops() -> float:
        return rows * model.context * model.flops_per_token

    while rows > 1 and flops() > MICRO_FLOPS:
        rows //= 2
    while model.depth > 2 and flops() > MICRO_FLOPS:
        model = replace(model, depth=model.depth // 2)
    while model.context > 256 and flops() > MICRO_FLOPS:
        model = replace(model, context=model.context // 2)
    return model, rows
