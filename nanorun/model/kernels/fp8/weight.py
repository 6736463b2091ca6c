"""A weight in FP8."""

import torch
from torch import Tensor, nn

from nanorun.model.kernels.fp8.kernel import E4M3, amax_of_rows, quantize_into


class Fp8Weight(nn.Module):
    """A weight in FP8 with its transpose; several weights, stacked, as one. Call `requantize` after each update.

    Requantizing takes few launches, none through torch's dispatcher: every update requantizes all weights, and the GPU
    must not wait for the host.
    """

    data: Tensor  # (outputs, inputs)
    data_t: Tensor  # (inputs, outputs)
    scale: Tensor
    max_norms: Tensor  # the largest row norm and column norm, with `norms`

    def __init__(self, outputs: int, inputs: int, norms: bool = True, pingpong: bool = False) -> None:
        super().__init__()
        self.norms = norms
        self.pingpong = pingpong  # whether gemm's ping-pong kernels multiply it, or cuBLAS
        self.register_buffer("data", torch.empty(outputs, inputs, dtype=E4M3), persistent=False)
        self.register_buffer("data_t", torch.empty(inputs, outputs, dtype=E4M3), persistent=False)
        self.register_buffer("scale", torch.empty(1), persistent=False)
        self.register_buffer("max_norms", torch.empty(2), persistent=False)

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.data, self.data_t, self.scale, self.max_norms

    @torch.no_grad()
    def requantize(self, *weights: Tensor) -> None:
        weight = torch.cat(weights) if len(weights) > 1 else weights[0]
        amax = amax_of_rows(weight, stride=1)
        quantize_into(self.data, self.data_t, self.scale, weight, amax)
        if self.norms:
            self.max_norms[0].copy_(amax[1])
            torch.amax(torch.linalg.vector_norm(weight, dim=0), 0, out=self.max_norms[1])
