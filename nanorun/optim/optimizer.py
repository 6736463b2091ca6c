"""The optimizer: Muon for the matrices and AdamW for the rest, behind one `step`.

The work is divided into independent update groups: stacks of equal matrices for Muon, parts of a parameter group for
AdamW. They are what ranks will shard: a rank steps those it owns and all-gathers the results. The state dict is keyed
by parameter, not by group, so that a run can resume with other stacks or another world size.

One update is `optimizer.step(scheduled_hyperparameters(step, steps, config))`. It never syncs with the device.
"""

from collections.abc import Callable, Mapping, Sequence
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from nanorun.config import OptimConfig
from nanorun.errors import UserError
from nanorun.optim.adamw import AdamWGroup, adamw_update_
from nanorun.optim.groups import ParameterGroup, split_by_shape, split_by_size
from nanorun.optim.muon import MuonGroup, muon_update
from nanorun.optim.schedules import ScheduledHyperparameters

UPDATES = "updates"  # the one entry of the state dict that belongs to no parameter


class Optimizer:
    """Compiled on CUDA; eager elsewhere, where compiling takes longer than it saves. Trains the groups' parameters."""

    def __init__(
        self, groups: Sequence[ParameterGroup], config: OptimConfig, compiled: bool, backend: str = "inductor"
    ) -> None:
        muon: Callable[..., Any] = _compile(muon_update, backend) if compiled else muon_update
        adamw: Callable[..., Any] = _compile(adamw_update_, backend) if compiled else adamw_update_
        self.update_groups: list[MuonGroup | AdamWGroup] = []
        for group in groups:
            if group.betas is None:
                self.update_groups += [MuonGroup(stack, config, muon) for stack in split_by_shape(group)]
            else:
                self.update_groups += [AdamWGroup(part, adamw) for part in split_by_size(group)]
        self.params = [param for each in self.update_groups for param in each.group.params]
        self.updates = 0  # completed
        if compiled and any(param.dtype == torch.float64 for param in self.params):
            # torch 2.13 treats a 0-D fp64 tensor as a Python number and drops what is written to it
            raise ValueError("fp64 parameters cannot be trained compiled: use compiled=False, or fp32")

    @torch.no_grad()
    def step(self, now: ScheduledHyperparameters, apply_update: Tensor | None = None) -> None:
        """One update. `apply_update` is a 0-D bool on the device: where it is false, nothing changes.

        So an update can be launched before the host knows whether it is accepted. If it was not, call `discard_step`.
        """
        # Raises where one is missing, before anything is changed.
        gradients = [each.group.gradients() for each in self.update_groups]
        self.updates += 1
        for each, grads in zip(self.update_groups, gradients, strict=True):
            each.step(grads, now, self.updates, apply_update)

    def discard_step(self) -> None:
        """The last step was launched with `apply_update` false: it changed nothing and does not count."""
        self.updates -= 1

    def zero_grad(self, keep_buffers: bool = False) -> None:
        """Clears the gradients; `keep_buffers` zeroes them in place, for CUDA graphs that captured their addresses."""
        grads = self._gradients()
        if keep_buffers and grads:
            torch._foreach_zero_(grads)
        elif not keep_buffers:
            for param in self.params:
                param.grad = None

    @torch.no_grad()
    def clip_grad_norm(self, max_norm: float | None = None, loss_scale: float = 1.0) -> Tensor:
        """Scales the gradients down to a total norm of `max_norm`; returns the norm before clipping.

        `loss_scale` is the factor that multiplied the loss: the gradients are divided by it first.
        """
        grads = self._gradients()
        if loss_scale != 1.0:
            torch._foreach_mul_(grads, 1 / loss_scale)
        norm = torch.nn.utils.get_total_norm(grads)
        if max_norm is not None:
            torch.nn.utils.clip_grads_with_norm_(self.params, max_norm, norm)
        return norm

    def state_dict(self) -> dict[str, Tensor]:
        """Tensors by `parameter.kind`, and the number of updates. They share memory with the optimizer: save or clone
        them before the next step."""
        state = {UPDATES: torch.tensor(self.updates)}
        for each in self.update_groups:
            for kind, tensors in each.state().items():
                state |= {f"{name}.{kind}": t for name, t in zip(each.group.names, tensors, strict=True)}
        return state

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Loads a saved state. It must match exactly; one that does not is rejected and changes nothing."""
        own = self.state_dict()
        _require_match(own, state)
        for name, tensor in own.items():
            tensor.copy_(state[name])
        self.updates = int(state[UPDATES])

    def _gradients(self) -> list[Tensor]:
        return [param.grad for param in self.params if param.grad is not None]


def _require_match(own: Mapping[str, Tensor], saved: Mapping[str, Tensor]) -> None:
    mismatches = [f"{name} is missing" for name in own.keys() - saved.keys()]
    mismatches += [f"{name} is unexpected" for name in saved.keys() - own.keys()]
    mismatches += [
        f"{name} is {_describe(saved[name])}, expected {_describe(own[name])}"
        for name in own.keys() & saved.keys()
        if _describe(saved[name]) != _describe(own[name])
    ]
    if mismatches:
        more = f"; and {len(mismatches) - 4} more" if len(mismatches) > 4 else ""
        raise UserError(
            "This optimizer state was saved by a run with another model or optimizer: "
            f"{'; '.join(sorted(mismatches)[:4])}{more}. Use the configuration it was saved with, or start with a "
            "fresh optimizer."
        )


def _describe(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"


def _compile(function: Callable[..., Any], backend: str) -> Callable[..., Any]:
    """Compiles a copy of the function, once for each shape. torch caches at most eight graphs per code object and
    counts those of every model in the process, so each optimizer compiles its own copy."""
    assert isinstance(function, FunctionType)
    copy = FunctionType(function.__code__.replace(), function.__globals__, function.__name__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return torch.compile(copy, fullgraph=True, dynamic=False, backend=backend)
