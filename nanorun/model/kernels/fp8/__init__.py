"""FP8 quantization: which tensors are quantized, with which scale, and in which layout.

A GPU multiplies FP8 numbers about 1.7 times as fast as bf16 (measured on an H200 at our shapes). The inputs of a GEMM
are quantized, its output is not: it accumulates in fp32 and returns bf16 or fp32. Weights and activations are e4m3
(three mantissa bits, up to 448), gradients e5m2 (two mantissa bits, but 32 powers of two of range).

Scales. A quantized tensor stands for q·scale. There is one scale per tensor, a power of two, so that scaling itself
never rounds. It comes from a bound on the tensor itself, never from the amax of an earlier step ("delayed scaling").
So there is no amax history (resume is bit-exact, and a recomputed block gives the same bits), and the host never
synchronizes with the device:

    normed activations     an entry of a vector with RMS 1 is at most √D
    weights                their amax, computed when they are quantized, once per update
    relu(x·wᵀ)²            Cauchy-Schwarz: |x·w| ≤ √D·‖w‖, with the largest row norm of w. The bound is loose, but the
                           relative precision of a float does not depend on its scale until it underflows, and the
                           range is wide: e4m3 spans 2¹⁷. A quarter of the bound is used, and larger values are
                           clipped. That takes a row within 60° of an input: in 768 dimensions, 14 standard deviations
                           away from chance
    gradients into a layer 16 times the amax of every eighth row (`AMAX_HEADROOM`, `amax_stride`). The bound need be
                           neither exact nor tight where the range has 31 powers of two: 26 are left below the sampled
                           amax, and a value more than 16 times as large as anything in thousands of other rows is
                           clipped (also an infinity in such a row, but never a NaN). Reading all rows took 1.7% of a
                           step
    gradients of q and k   likewise; rope_norm explains how
    gradient of relu²      Cauchy-Schwarz again, from the largest row norm of the gradient and column norm of the
                           weight. Typical entries are 17 powers of two below it, and e5m2 has 13 more below them
    gradient of logits     |softmax - onehot| ≤ 1

Layout. The tensor cores want the reduction dimension of both operands contiguous, and the three GEMMs of a layer reduce
over different dimensions: x·wᵀ over inputs, g·w (dgrad) over outputs, gᵀ·x (wgrad) over tokens. So the kernel that
produces a tensor writes it twice, as it is and transposed, and reads each tile once. That is two bytes where bf16 would
write two, so where quantization is fused with a norm or ReLU² it costs no bandwidth.

Every operator also runs on a CPU, for tests (Triton's interpreter and torch's own `_scaled_mm`). Shapes: N tokens, D
width, F hidden width; q is (N, D), its transpose (D, N) with N padded with zeros to a multiple of 16.
"""

from nanorun.model.kernels.fp8.kernel import *  # noqa: F403
