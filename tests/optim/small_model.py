"""Parameters as our GPT names them, gradients and updates, at a size that a test can afford."""

import torch
from torch import nn

from nanorun.config import OptimConfig
from nanorun.optim.groups import group_parameters
from nanorun.optim.optimizer import Optimizer
from nanorun.optim.schedules import scheduled_hyperparameters

CONFIG = OptimConfig()


def model_parameters(dtype: torch.dtype = torch.float64, layers: int = 2) -> dict[str, nn.Parameter]:
    """Every kind of name our GPT has, at a size that a test can afford."""
    shapes: dict[str, tuple[int, ...]] = {"embed.weight": (20, 8), "head.weight": (20, 8)}
    for i in range(layers):
        shapes |= {f"blocks.{i}.attention.{kind}.weight": (8, 8) for kind in ("q", "out")}
        shapes |= {f"blocks.{i}.attention.{kind}.weight": (4, 8) for kind in ("k", "v")}
        shapes |= {f"blocks.{i}.mlp.up.weight": (32, 8), f"blocks.{i}.mlp.down.weight": (8, 32)}
    last = layers - 1
    shapes |= {f"value_embeds.{last}.weight": (20, 4), f"blocks.{last}.attention.value_gate.weight": (1, 12)}
    shapes |= {"smear_gate.weight": (1, 24), "smear_scale": (), "backout_scale": (1,)}
    shapes |= {"lambdas": (layers,), "mus": (layers,)}
    generator = torch.Generator().manual_seed(5)
    return {
        name: nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype))
        for name, shape in shapes.items()
    }


def set_gradients(params: dict[str, nn.Parameter], step: int) -> None:
    """Gradients as from a loss: they depend on the parameters, and differ from step to step."""
    generator = torch.Generator().manual_seed(100 + step)
    for param in params.values():
        noise = torch.randn(param.shape, generator=generator, dtype=torch.float64).to(param.dtype)
        param.grad = 0.3 * param.detach() + noise


def build(params: dict[str, nn.Parameter], config: OptimConfig = CONFIG, **options) -> Optimizer:
    options = {"compiled": False, **options}
    return Optimizer(group_parameters(params.items(), config), config, **options)


def train(params: dict[str, nn.Parameter], optimizer: Optimizer, first: int, last: int) -> None:
    for step in range(first, last):
        set_gradients(params, step)
        optimizer.step(scheduled_hyperparameters(step, 10, CONFIG))
