"""Rotary position embedding and QK norm in one pass, directly on the output of the fused q/k/v GEMM.

A compiler makes several kernels of this: one rotates, one sums squares for the norm, and in the backward pass the three
gradients are written separately and then concatenated for the GEMM. Here one program takes a few tokens of one head,
holds both halves of the head in registers, and reads and writes each number once. The backward kernel writes dq, dk
and dv into the one tensor that the GEMM reads.

    r = rotate(x)        the channels (i, i + half) of a head rotated by the angle of the position
    y = gain·r·s         s = (mean(r²) + eps)^-½, the inverse RMS
    dr = gain·s·(dy - r·s²·mean(dy·r))        dx = rotate back(dr)

Values are unchanged: `rope_norm` returns them as a view.

FP8 layers (kernel_fp8.py) run the same forward kernel in place, so that attention and the backward pass keep one
tensor: given y and s, x is not needed,

    dr = gain·s·(dy - y·mean(dy·y)/gain²)

A layer with value embeddings adds them in the same pass, times their gate. The backward kernel writes e5m2 with its
transpose (fp8). Its scale must be known before: |dx| ≤ gain·s·√D·amax(dy) for queries and keys, with the largest s of
all tokens and heads, which the forward kernel finds on the way. It is the maximum over a few slots: a maximum does not
depend on the order of the writes. The amax of dy is that of every eighth token, with the headroom that fp8 explains.

Shapes: N tokens (B·T), H heads, K kv heads, D head dimension; qkv is (N, (H + 2K)·D).
"""

from nanorun.model.kernels.rope_norm.kernel import is_supported_head_dim as is_supported_head_dim
from nanorun.model.kernels.rope_norm.kernel import rope_norm as rope_norm
from nanorun.model.kernels.rope_norm.kernel_fp8 import backward_fp8 as backward_fp8
from nanorun.model.kernels.rope_norm.kernel_fp8 import gemm_rope_norm as gemm_rope_norm
from nanorun.model.kernels.rope_norm.kernel_fp8 import rope_norm_inplace as rope_norm_inplace
