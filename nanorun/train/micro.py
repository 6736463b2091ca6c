"""One micro-batch: forward and backward, its gradients added to those so far. Launched, or replayed.

Launched, the host hands the GPU one kernel after the other, with Python between many. For a d12 in eight bits on
an H200 it was the slower of the two: 695 thousand tokens a second, where the kernels alone would have made 820
(docs/speed.md). Replayed, all of it is recorded once as a CUDA graph and then started by a single call.

A graph is a list of kernels with the addresses they read and write. So what goes in is copied to fixed places,
gradients stay in theirs from step to step (zeroed, not forgotten), and weights must change in place, as all ours
do. Both ways compute the same bits, and `Replayed` launches what it cannot replay: the first micro-batches, which
compile, and any of another shape.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from nanorun.console import say

LAUNCHED_FIRST = 2  # micro-batches before recording: by then everything is compiled and loaded


class Micro(Protocol):
    keeps_gradients: bool  # where they are; who forgets them must zero them instead

    def __call__(
        self, inputs: Tensor, targets: Tensor, docs: Tensor | None, trained: int, scale: float
    ) -> Tensor:
        """The loss, summed and divided by `trained`; gradients are of the loss times `scale`."""
        ...


class Launched:
    keeps_gradients = False

    def __init__(self, forward: Callable[..., Tensor]) -> None:
        self.forward = forward

    def __call__(
        self, inputs: Tensor, targets: Tensor, docs: Tensor | None, trained: int, scale: float
    ) -> Tensor:
        loss = self.forward(inputs, targets, docs) / trained
        (loss * scale).backward()
        return loss.detach()


class Replayed:
    """As a CUDA graph. What the driver does not record is launched, after a word about it."""

    keeps_gradients = True

    def __init__(self, forward: Callable[..., Tensor], parameters: Sequence[nn.Parameter]) -> None:
        self.forward = forward
        self.launched = 0
        self.graph: torch.cuda.CUDAGraph | None = None
        self.possible = True
        self.given: list[Tensor] = []  # where the graph reads its inputs
        self.loss = torch.empty(0)
        self.share, self.scale = (torch.ones((), device=parameters[0].device) for _ in range(2))
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)

    def __call__(
        self, inputs: Tensor, targets: Tensor, docs: Tensor | None, trained: int, scale: float
    ) -> Tensor:
        given = [x.contiguous() for x in (inputs, targets, docs) if x is not None]
        self.share.fill_(1 / trained)  # as torch divides by a number: through its inverse
        self.scale.fill_(scale)
        if self.graph is None and self.possible and self.launched >= LAUNCHED_FIRST:
            self._record(given)
        if self.graph is None or [x.shape for x in given] != [x.shape for x in self.given]:
            self.launched += 1
            return self._launch(given)
        for mine, new in zip(self.given, given, strict=True):
            mine.copy_(new)
        self.graph.replay()
        return self.loss

    def _launch(self, given: list[Tensor]) -> Tensor:
        loss = self.forward(*given) * self.share
        (loss * self.scale).backward()
        return loss.detach()

    def _record(self, given: list[Tensor]) -> None:
        self.given = [x.clone() for x in given]
        graph = torch.cuda.CUDAGraph()
        try:
            # thread_local: the loader's thread may pin memory meanwhile
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                self.loss = self._launch(self.given)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            self.possible = False
            # A recording that broke off leaves torch's random numbers waiting for its end.
            dice = torch.cuda.default_generators[self.share.device.index or 0]
            dice.graphsafe_set_state(dice.clone_state())
            say(f"training goes on without a CUDA graph: {str(error).splitlines()[0]}")
        else:
            self.graph = graph
