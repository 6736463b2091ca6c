"""Parameter groups: which optimizer trains a parameter and with which hyperparameters, decided by its name.

Muon trains the matrices inside the blocks, AdamW everything else, in groups with their own learning rate and betas.
To train a new kind of parameter, add its name to a rule in `_rules` (or add a rule). A trainable parameter that no
rule matches is an error, so that none is trained by accident or silently left out.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import Parameter

from nanorun.config import OptimConfig, largest_divisor

LARGE_NUMEL = 2**20
STACK_BYTES = 2**28  # largest stack of fp32 matrices that Muon updates at once


def _rules(c: OptimConfig) -> "list[tuple[ParameterGroup, str]]":
    """Each group with a regular expression for its parameter names."""
    matrix, value_gate = (
        r"(attention\.(q|k|v|out)|mlp\.(up|down))\.weight",
        r"attention\.(value|head)_gate\.weight",
    )
    embedding_betas = (0.8, 0.995)
    return [
        (ParameterGroup("matrices", c.matrix_lr, c.matrix_weight_decay), rf"blocks\.\d+\.{matrix}"),
        (ParameterGroup("head", c.head_lr, 0.01, (0.8, 0.96)), r"head\.weight"),
        (ParameterGroup("embedding", c.embedding_lr, 0.001, embedding_betas), r"embed\.weight"),
        (
            ParameterGroup("value_embeddings", c.value_embedding_lr, 0.01, embedding_betas),
            r"value_embeds\.\d+\.weight",
        ),
        (ParameterGroup("lambdas", c.lambda_lr, 0.05, (0.8, 0.95)), r"lambdas"),
        (ParameterGroup("mus", c.mu_lr, 0.0, (0.96, 0.95)), r"mus"),
        (
            ParameterGroup("gates", c.gate_lr, 0.0, (0.8, 0.95)),
            rf"blocks\.\d+\.{value_gate}|smear_gate\.weight|smear_scale|backout_scale",
        ),
    ]


@dataclass(frozen=True)
class ParameterGroup:
    """Parameters that share hyperparameters. Learning rate and weight decay are peak values, before any schedule."""

    name: str
    lr: float
    weight_decay: float
    betas: tuple[float, float] | None = None  # AdamW's; None: Muon
    names: tuple[str, ...] = ()
    params: tuple[Parameter, ...] = ()

    @property
    def state_dtype(self) -> torch.dtype:
        """Optimizer state is fp32, also for bf16 parameters (and fp64 for fp64)."""
        return torch.promote_types(self.params[0].dtype, torch.float32)

    def gradients(self) -> list[Tensor]:
        grads = [param.grad for param in self.params if param.grad is not None]
        if len(grads) < len(self.params):
            missing = [n for n, p in zip(self.names, self.params, strict=True) if p.grad is None]
            raise ValueError(
                f"no gradient for {', '.join(missing)}: run backward before step, and freeze parameters that take no "
                "part in the loss (requires_grad_(False)) before grouping"
            )
        return grads

    def subset(self, indices: Sequence[int]) -> "ParameterGroup":
        return replace(
            self,
            names=tuple(self.names[i] for i in indices),
            params=tuple(self.params[i] for i in indices),
        )


def group_parameters(
    named_parameters: Iterable[tuple[str, Parameter]], config: OptimConfig
) -> list[ParameterGroup]:
    """The non-empty groups of a model's parameters. Frozen parameters are left out."""
    rules = _rules(config)
    members: list[dict[str, Parameter]] = [{} for _ in rules]
    for name, param in named_parameters:
        if not param.requires_grad:
            continue
        rule = next((i for i, (_, pattern) in enumerate(rules) if re.fullmatch(pattern, name)), None)
        if rule is None:
            raise ValueError(
                f"no rule matches the parameter {name} of shape {tuple(param.shape)}: add its name to a group in "
                "nanorun/optim/groups.py, or freeze it"
            )
        if rules[rule][0].betas is None and param.dim() != 2:
            raise ValueError(f"Muon trains matrices, but {name} has shape {tuple(param.shape)}")
        members[rule][name] = param
    return [
        replace(group, names=tuple(named), params=tuple(named.values()))
        for (group, _), named in zip(rules, members, strict=True)
        if named
    ]


def stack_length(matrices: int, numel: int) -> int:
    """How many of `matrices` fp32 matrices Muon stacks: a divisor, so that all stacks are equally long."""
    return largest_divisor(matrices, max(STACK_BYTES // (4 * numel), 1))


def split_by_shape(group: ParameterGroup) -> list[ParameterGroup]:
    """One group per shape, dtype and device: what can be stacked. Large matrices make several stacks of equal length,
    which share one compiled graph, since an update takes several times the memory of its stack."""
    alike: dict[tuple[torch.Size, torch.dtype, torch.device], list[int]] = {}
    for i, param in enumerate(group.params):
        alike.setdefault((param.shape, param.dtype, param.device), []).append(i)
    stacks = []
    for indices in alike.values():
        length = stack_length(len(indices), group.params[indices[0]].numel())
        stacks += [group.subset(indices[i : i + length]) for i in range(0, len(indices), length)]
    return stacks


def split_by_size(group: ParameterGroup) -> list[ParameterGroup]:
    """One group per large table, and one for the rest. The compiler would fuse several tables into one kernel, and its
    autotuning copies everything that kernel writes: for a deep model's value embeddings more than fits in memory."""
    is_large = [param.numel() >= LARGE_NUMEL for param in group.params]
    parts = [[i] for i, large in enumerate(is_large) if large]
    small = [i for i, large in enumerate(is_large) if not large]
    return [group.subset(part) for part in (*parts, small) if part]


class HyperparameterBuffer:
    """A group's hyperparameters as 0-D tensors on its device, which compiled code reads like any other input.

    They change without recompilation and without a sync: one copy from pinned memory sets all of them. (0-D tensors on
    the CPU would do as well, but torch 2.11 fails to launch kernels that take them.)
    """

    def __init__(self, group: ParameterGroup, count: int) -> None:
        # A stride of four elements, because compiled code expects inputs aligned to 16 bytes.
        self._values = torch.zeros(count, 4, dtype=group.state_dtype, device=group.params[0].device)[:, 0]

    def set(self, *values: float) -> tuple[Tensor, ...]:
        host = torch.tensor(values, dtype=self._values.dtype)
        if self._values.device.type == "cuda":
            host = host.pin_memory()
        self._values.copy_(host, non_blocking=True)
        return self._values.unbind()
