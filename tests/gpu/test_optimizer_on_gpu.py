"""The compiled optimizer on CUDA: it follows the eager one, never recompiles, and never syncs."""

import torch
from torch import nn
from torch._dynamo.utils import counters

from nanorun.config import OptimConfig
from nanorun.optim.groups import group_parameters
from nanorun.optim.optimizer import Optimizer
from nanorun.optim.schedules import scheduled_hyperparameters

CONFIG = OptimConfig()


def parameters(layers: int = 2, dim: int = 256) -> dict[str, nn.Parameter]:
    torch.manual_seed(0)
    shapes: dict[str, tuple[int, ...]] = {"embed.weight": (512, dim), "head.weight": (512, dim)}
    for i in range(layers):
        shapes |= {f"blocks.{i}.attention.{kind}.weight": (dim, dim) for kind in ("q", "k", "v", "out")}
        shapes |= {f"blocks.{i}.mlp.up.weight": (4 * dim, dim), f"blocks.{i}.mlp.down.weight": (dim, 4 * dim)}
    shapes |= {"smear_gate.weight": (1, 24), "smear_scale": (), "backout_scale": ()}
    shapes |= {"lambdas": (layers,), "mus": (layers,)}
    return {name: nn.Parameter(torch.randn(shape, device="cuda")) for name, shape in shapes.items()}


def test_compiled_steps_follow_eager_ones_without_a_sync_or_a_second_compile():
    torch._dynamo.reset()
    counters.clear()
    compiled, eager = parameters(), parameters()
    optimizers = [
        Optimizer(group_parameters(params.items(), CONFIG), CONFIG, compiled=how)
        for params, how in ((compiled, True), (eager, False))
    ]
    start = {name: param.detach().clone() for name, param in eager.items()}
    for step in range(5):
        for name in eager:
            eager[name].grad = torch.randn_like(eager[name])
            compiled[name].grad = eager[name].grad.clone()
        for optimizer in optimizers:
            torch.cuda.set_sync_debug_mode("error" if step else "default")
            try:
                optimizer.clip_grad_norm(1.0)
                apply_update = optimizer.clip_grad_norm() < 1e9  # known on the device alone
                optimizer.step(scheduled_hyperparameters(step, 10, CONFIG), apply_update)
            finally:
                torch.cuda.set_sync_debug_mode("default")
        if step == 0:
            graphs = counters["stats"]["unique_graphs"]
    assert counters["stats"]["unique_graphs"] == graphs
    for name in eager:
        moved = (eager[name] - start[name]).norm()
        # bf16 products are rounded at other places when fused, and orthogonalizing magnifies small singular values:
        # 0.08 to 0.16 were measured on an H200
        assert (compiled[name] - eager[name]).norm() < (0.25 if "blocks" in name else 1e-3) * moved, name
