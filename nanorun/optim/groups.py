"""Which parameter is trained how, decided by its name.

The matrices inside the blocks go to Muon. What is left goes to AdamW, in groups with rates and betas of their
own. A name that no rule knows is an error: a new kind of parameter must be entered here by hand, so that none
is trained by accident or, worse, not at all.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import Parameter

from nanorun.config import OptimConfig
from nanorun.memory import stacked

LARGE = 2**20  # numbers in a parameter


@dataclass(frozen=True)
class Group:
    """Parameters that share their hyperparameters. Rate and decay are at their peak, before any schedule."""

    name: str
    rate: float
    decay: float
    betas: tuple[float, float] | None = None  # of AdamW; None: matrices for Muon
    names: tuple[str, ...] = ()
    params: tuple[Parameter, ...] = ()

    @property
    def state_dtype(self) -> torch.dtype:
        """What the optimizer remembers is kept in fp32, also for bf16 parameters (and in fp64 for fp64)."""
        return torch.promote_types(self.params[0].dtype, torch.float32)

    def gradients(self) -> list[Tensor]:
        grads = [param.grad for param in self.params if param.grad is not None]
        if len(grads) < len(self.params):
            lacking = [n for n, p in zip(self.names, self.params, strict=True) if p.grad is None]
            raise ValueError(
                f"no gradient for {', '.join(lacking)}: run backward before step, "
                "and freeze what has no part in the loss (requires_grad_(False)) before grouping"
            )
        return grads


class Scalars:
    """A group's hyperparameters as 0-D tensors on its device: compiled code reads them like any input.

    They change without a new compilation and without a wait: one copy from pinned memory for all of them.
    (0-D tensors on the CPU would do as well, but torch 2.11 fails to launch kernels that take them.)
    """

    def __init__(self, group: Group, many: int) -> None:
        # Four numbers apart, since compiled code wants its inputs to begin at multiples of 16 bytes.
        self._values = torch.zeros(many, 4, dtype=group.state_dtype, device=group.params[0].device)[:, 0]

    def set(self, *values: float) -> tuple[Tensor, ...]:
        host = torch.tensor(values, dtype=self._values.dtype)
        if self._values.device.type == "cuda":
            host = host.pin_memory()
        self._values.copy_(host, non_blocking=True)
        return self._values.unbind()


def group_parameters(named_parameters: Iterable[tuple[str, Parameter]], config: OptimConfig) -> list[Group]:
    """The groups of a model's parameters, without the empty ones. Frozen parameters are left out."""
    rules = _rules(config)
    members: dict[str, dict[str, Parameter]] = {group.name: {} for group, _ in rules}
    for name, param in named_parameters:
        if not param.requires_grad:
            continue
        found = next((group for group, pattern in rules if re.fullmatch(pattern, name)), None)
        if found is None:
            raise ValueError(
                f"no rule says how to train the parameter {name} of shape {tuple(param.shape)}: "
                "give its name a group in nanorun/optim/groups.py, or freeze it"
            )
        if found.betas is None and param.dim() != 2:
            raise ValueError(f"Muon trains matrices, and {name} has shape {tuple(param.shape)}")
        members[found.name][name] = param
    return [
        replace(group, names=tuple(members[group.name]), params=tuple(members[group.name].values()))
        for group, _ in rules
        if members[group.name]
    ]


def _rules(config: OptimConfig) -> list[tuple[Group, str]]:
    return [
        (
            Group("matrices", config.matrix_rate, config.matrix_decay),
            r"blocks\.\d+\.(attention\.(q|k|v|out)|mlp\.(up|down))\.weight",
        ),
        (Group("head", config.head_rate, 0.01, (0.8, 0.96)), r"head\.weight"),
        (Group("embedding", config.embedding_rate, 0.001, (0.8, 0.995)), r"embed\.weight"),
        (
            Group("value_embeddings", config.value_embedding_rate, 0.01, (0.8, 0.995)),
            r"value_embeds\.\d+\.weight",
        ),
        (Group("lambdas", config.lambda_rate, 0.05, (0.8, 0.95)), r"lambdas"),
        (Group("mus", config.mu_rate, 0.0, (0.96, 0.95)), r"mus"),
        (
            Group("gates", config.gate_rate, 0.0, (0.8, 0.95)),
            r"blocks\.\d+\.attention\.value_gate\.weight|smear_gate\.weight|smear_scale|backout_scale",
        ),
    ]


def split_by_shape(group: Group) -> list[Group]:
    """One group for each shape (and dtype and device) in it: what can be stacked. Of large matrices several, equally
    long, so that one compiled graph serves them all: an update takes several times its stack's memory."""
    alike: dict[tuple[torch.Size, torch.dtype, torch.device], dict[str, Parameter]] = {}
    for name, param in zip(group.names, group.params, strict=True):
        alike.setdefault((param.shape, param.dtype, param.device), {})[name] = param
    stacks = []
    for members in alike.values():
        names, params = tuple(members), tuple(members.values())
        length = stacked(len(params), params[0].numel())
        for first in range(0, len(params), length):
            part = slice(first, first + length)
            stacks.append(replace(group, names=names[part], params=params[part]))
    return stacks


def split_by_size(group: Group) -> list[Group]:
    """Tables alone, all else together. Of several tables a compiler makes one kernel, and to find out how to run it
    best it copies all that it writes: of a deep model's value embeddings, more than there is room for."""
    large = [param.numel() >= LARGE for param in group.params]
    parts = [[at] for at, alone in enumerate(large) if alone]
    parts += [small] if (small := [at for at, alone in enumerate(large) if not alone]) else []
    return [
        replace(
            group, names=tuple(group.names[at] for at in part), params=tuple(group.params[at] for at in part)
        )
        for part in parts
    ]
