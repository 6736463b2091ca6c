"""The optimizer: Muon for the matrices and AdamW for the rest, behind one `step`.

The work is cut into units, each a stack of equal matrices or a group for AdamW, that share nothing. That is
where ranks will divide it: a rank steps the units it owns and sends the results to the others. The state, too, is
handed out by parameter, not by unit, so that a run can go on with other stacks or another number of ranks.

One update is `optimizer.step(rates(step, steps, config))`. It waits for the device nowhere.
"""

from collections.abc import Callable, Mapping, Sequence
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from nanorun.config import OptimConfig
from nanorun.errors import UserError
from nanorun.optim.adamw import AdamWGroup, adamw_update_
from nanorun.optim.groups import Group, split_by_shape, split_by_size
from nanorun.optim.muon import MuonStack, muon_update
from nanorun.optim.schedules import Rates

UPDATES = "updates"  # the one entry of the state that belongs to no parameter


class Optimizer:
    """Compiled on CUDA; eager elsewhere, where compiling takes longer than it saves. Groups say what is trained."""

    def __init__(
        self, groups: Sequence[Group], config: OptimConfig, compiled: bool, backend: str = "inductor"
    ) -> None:
        muon: Callable[..., Any] = _compile(muon_update, backend) if compiled else muon_update
        adamw: Callable[..., Any] = _compile(adamw_update_, backend) if compiled else adamw_update_
        self.units: list[MuonStack | AdamWGroup] = []
        for group in groups:
            if group.betas is None:
                self.units += [MuonStack(stack, config, muon) for stack in split_by_shape(group)]
            else:
                self.units += [AdamWGroup(part, adamw) for part in split_by_size(group)]
        self.params = [param for unit in self.units for param in unit.group.params]
        self.updates = 0  # done so far
        if compiled and any(param.dtype == torch.float64 for param in self.params):
            # torch 2.13 takes a 0-D fp64 tensor for a Python number and drops what is written to it
            raise ValueError("fp64 parameters cannot be trained compiled: use compiled=False, or fp32")

    @torch.no_grad()
    def step(self, rates: Rates, wanted: Tensor | None = None) -> None:
        """One update. `wanted` is a 0-D bool on the device: where it is false, nothing changes.

        So a doubtful update can be launched before the host knows whether it will count; once it knows that it
        did not, it says so by `take_back`.
        """
        gradients = [unit.group.gradients() for unit in self.units]  # all, or nothing is changed
        self.updates += 1
        for unit, grads in zip(self.units, gradients, strict=True):
            unit.step(grads, rates, self.updates, wanted)

    def take_back(self) -> None:
        """The last update was not wanted: it changed nothing and is not counted."""
        self.updates -= 1

    def zero_grad(self, keep_buffers: bool = False) -> None:
        """Forget the gradients; `keep_buffers` zeroes them where they are, for what holds on to their memory."""
        grads = self._gradients()
        if keep_buffers and grads:
            torch._foreach_zero_(grads)
        elif not keep_buffers:
            for param in self.params:
                param.grad = None

    @torch.no_grad()
    def clip(self, max_norm: float | None = None, loss_scale: float = 1.0) -> Tensor:
        """The norm of all gradients together, as they came; above `max_norm` they are scaled down to it.

        `loss_scale` is what the loss was multiplied by: the gradients are divided by it first.
        """
        grads = self._gradients()
        if loss_scale != 1.0:
            torch._foreach_mul_(grads, 1 / loss_scale)
        norm = torch.nn.utils.get_total_norm(grads)
        if max_norm is not None:
            torch.nn.utils.clip_grads_with_norm_(self.params, max_norm, norm)
        return norm

    def state_dict(self) -> dict[str, Tensor]:
        """Plain tensors by `parameter.kind`, and the number of updates. They are the state itself, not copies:
        write or clone them before the next step."""
        state = {UPDATES: torch.tensor(self.updates)}
        for unit in self.units:
            state |= unit.state()
        return state

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Go on from a saved state. It must fit exactly; one that does not is refused and changes nothing."""
        own = self.state_dict()
        _require_fit(own, state)
        for name, tensor in own.items():
            tensor.copy_(state[name])
        self.updates = int(state[UPDATES])

    def _gradients(self) -> list[Tensor]:
        return [param.grad for param in self.params if param.grad is not None]


def _require_fit(own: Mapping[str, Tensor], given: Mapping[str, Tensor]) -> None:
    missing, extra = own.keys() - given.keys(), given.keys() - own.keys()
    unlike = [
        f"{name} is {_describe(given[name])} and not {_describe(own[name])}"
        for name in own.keys() & given.keys()
        if _describe(given[name]) != _describe(own[name])
    ]
    wrong = [f"{name} is missing" for name in missing] + [f"{name} is not known" for name in extra] + unlike
    if wrong:
        shown = "; ".join(sorted(wrong)[:4]) + (f"; and {len(wrong) - 4} more" if len(wrong) > 4 else "")
        raise UserError(
            f"This optimizer state was saved by a run with another model or optimizer: {shown}. "
            "Use the configuration it was saved with, or start with a fresh optimizer."
        )


def _describe(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"


def _compile(function: Callable[..., Any], backend: str) -> Callable[..., Any]:
    """Compiled for each shape it meets. torch keeps at most eight graphs for one piece of code, and counts
    those of every model in the process, so each optimizer compiles a copy of its own."""
    assert isinstance(function, FunctionType)
    copy = FunctionType(function.__code__.replace(), function.__globals__, function.__name__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return torch.compile(copy, fullgraph=True, dynamic=False, backend=backend)
