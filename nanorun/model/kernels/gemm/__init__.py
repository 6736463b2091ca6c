"""FP8 and bf16 GEMMs on Hopper whose epilogues apply ReLU² or the residual addition: faster than cuBLAS.

The epilogue of a GEMM is where the accumulators leave the registers: they are scaled, rounded and written. In a library
kernel the tensor cores wait meanwhile, and where the reduction is short (768 at d12) that is a good part of the time.
Here two warp groups alternate ("ping-pong"): while one runs its epilogue, the other multiplies.

And the epilogue is a Python function of an accumulator, so it can do the work of the next kernel. The hidden layer of
the MLP is the largest tensor of a block. Its GEMM would write it in 16 bits, and another kernel would read it back to
square and quantize it (relu2); here the epilogue squares it and writes 8 bits. (x·wᵀ/√scale is squared, so the result
is h/scale.) Likewise the epilogue adds what a half-block contributes to the residual stream, and mixes in x0 if the
next half-block wants that (residual_norm), so that the next norm reads one tensor instead of three.

An epilogue must be short, or the other warp group waits for it. Three that were too long: transposes, which would be
stored byte by byte; the gradient of ReLU², which has to read h first; and the exponentials of logits for the loss
(docs/lab-notebook.md).

The kernels come from quack, the package that FlashAttention-4 is built on. Like that, it is optional; without it the
Triton kernels of fp8 and relu2 and cuBLAS do the same. `reference` has every epilogue in plain PyTorch, which is also
what a CPU computes. Shapes: N tokens, D width, F hidden width.
"""

from nanorun.model.kernels.gemm.kernel import gemm_bf16 as gemm_bf16
from nanorun.model.kernels.gemm.kernel import gemm_bf16_residual as gemm_bf16_residual
from nanorun.model.kernels.gemm.kernel import gemm_fp8 as gemm_fp8
from nanorun.model.kernels.gemm.kernel import gemm_fp8_grads as gemm_fp8_grads
from nanorun.model.kernels.gemm.kernel import gemm_fp8_pingpong as gemm_fp8_pingpong
from nanorun.model.kernels.gemm.kernel import gemm_fp8_relu2 as gemm_fp8_relu2
from nanorun.model.kernels.gemm.kernel import gemm_fp8_residual as gemm_fp8_residual
from nanorun.model.kernels.gemm.kernel import is_supported as is_supported
from nanorun.model.kernels.gemm.kernel import relu2_scales as relu2_scales
from nanorun.model.kernels.gemm.kernel import self_test as self_test
