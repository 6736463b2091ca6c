"""The residual stream between two half-blocks: the pending additions are done where the next norm reads the stream.

A compiler cannot look into kernels like ours, so around each of them it writes the stream to memory and reads it back:
x + y in one kernel, its norm in the next. Here a half-block passes on its input x and its output y separately. The
kernel that norms and quantizes for the next half-block adds them on the way; the backward pass is one kernel too:

    s = λ·(x + y) + μ·x0        what the next half-block sees (x0 is mixed in before attention, else s = x + y)
    n = s·inv_rms               its norm, quantized to e4m3
    d = ds + inv_rms·(dn - n·mean(dn·n))        the gradient of s, from the later layers and from its norm
    dx = dy = λ·d        dμ = Σ d·x0        dλ = Σ d·(x + y) = (Σ d·s - μ·Σ d·x0)/λ

Where the GEMM that computes y adds to the stream in its epilogue (gemm), y is s already and only `norm_quantize` is
left. Gradients do not see the difference.

The backward pass needs neither x nor y: s is enough, unless λ is 0 (then λ and x0 get no gradient, which is
wrong; λ starts above 1 and stays there). λ and μ are rounded to the dtype of the stream, as they are
in evaluation. Shapes: N tokens, D width.
"""

from nanorun.model.kernels.residual_norm.kernel import backward as backward
from nanorun.model.kernels.residual_norm.kernel import input_grads as input_grads
from nanorun.model.kernels.residual_norm.kernel import norm_quantize as norm_quantize
from nanorun.model.kernels.residual_norm.kernel import residual_norm_quantize as residual_norm_quantize
