"""Forward and backward of one micro-batch, captured once as a CUDA graph and replayed.

Launched eagerly, the host hands the GPU one kernel after the other, with Python between many. For a d12 in FP8 on an
H200 the host was the slower of the two: 695 thousand tokens a second, where the kernels alone would have reached 820
(docs/speed.md). A CUDA graph records all launches of a micro-batch and starts them by a single call.

A graph is a list of kernels with the addresses they read and write. So inputs are copied to static buffers, gradients
keep their buffers from step to step (zeroed, not freed), and weights must change in place, as all of ours do. What a
graph has baked in besides is its `key`: addresses of parameters, gradients and buffers, and the window and backend of
each layer. When the key changes, the graph is dropped and captured anew. A micro-batch of another shape runs eagerly.
Eager and replayed micro-batches compute the same bits.
"""

from collections.abc import Callable, Hashable, Sequence

import torch
from torch import Tensor, nn

from nanorun.console import say
from nanorun.model.gpt import GPT

EAGER_FIRST = 2  # micro-batches before capturing: by then everything is compiled and loaded


class GraphedMicroStep:
    """Runs eagerly what it cannot replay: the first micro-batches, which compile, those of another shape than the
    captured one, and everything on a driver that fails to capture (logged once)."""

    def __init__(
        self, forward: Callable[..., Tensor], model: GPT, parameters: Sequence[nn.Parameter]
    ) -> None:
        self.forward, self.model = forward, model
        self.eager_steps = 0
        self.graph: torch.cuda.CUDAGraph | None = None
        self.key: Hashable = None
        self.can_capture = True
        self.inputs: list[Tensor] = []  # the static buffers that the graph reads
        self.loss = torch.empty(0)
        self.inv_trained_tokens, self.scale = (torch.ones((), device=parameters[0].device) for _ in range(2))
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)

    def __call__(
        self, tokens: Tensor, targets: Tensor, docs: Tensor | None, trained_tokens: int, loss_scale: float
    ) -> Tensor:
        """The summed loss divided by `trained_tokens`; gradients are of the loss times `loss_scale`.

        The graph multiplies by 1/`trained_tokens`, a tensor. On CUDA torch divides by a number in the same way.
        """
        inputs = [x.contiguous() for x in (tokens, targets, docs) if x is not None]
        self.inv_trained_tokens.fill_(1 / trained_tokens)
        self.scale.fill_(loss_scale)
        if self.graph is not None and self.key != graph_key(self.model):
            self.graph, self.eager_steps = None, 0
        if self.graph is None and self.can_capture and self.eager_steps >= EAGER_FIRST:
            self.inputs, graph = [x.clone() for x in inputs], torch.cuda.CUDAGraph()
            try:
                # thread_local: the loader's thread may pin memory meanwhile
                with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                    loss = self.forward(*self.inputs) * self.inv_trained_tokens
                    (loss * self.scale).backward()
                    self.loss = loss.detach()
            except torch.OutOfMemoryError:
                raise
            except RuntimeError as error:
                self.can_capture = False
                # A failed capture leaves torch's random generator waiting for its end.
                generator = torch.cuda.default_generators[self.inv_trained_tokens.device.index or 0]
                generator.graphsafe_set_state(generator.clone_state())
                say(f"training without a CUDA graph, capturing failed: {str(error).splitlines()[0]}")
            else:
                self.graph, self.key = graph, graph_key(self.model)
        if self.graph is None or [x.shape for x in inputs] != [x.shape for x in self.inputs]:
            self.eager_steps += 1
            loss = self.forward(*inputs) * self.inv_trained_tokens
            (loss * self.scale).backward()
            return loss.detach()
        for static, new in zip(self.inputs, inputs, strict=True):
            static.copy_(new)
        self.graph.replay()
        return self.loss


def graph_key(model: GPT) -> Hashable:
    """What a captured graph of this model depends on, besides the shapes of its inputs: windows and backends of
    attention, and the addresses of parameters (tied or not), of their gradients and of the rotary tables."""
    attention = model.batch_attention
    tensors = [*model.parameters(), *model.buffers()]
    gradients = [p.grad.data_ptr() for p in model.parameters() if p.grad is not None]
    return attention.windows, attention.backends, tuple(t.data_ptr() for t in tensors), tuple(gradients)
