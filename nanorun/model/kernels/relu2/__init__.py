"""ReLU² of the MLP's hidden layer in FP8, and its gradient: one kernel each between two GEMMs.

    h  = relu(u)²          for u = n·wᵀ, with the scale that Cauchy-Schwarz allows (fp8)
    du = dh·2√h            the slope 2·relu(u) from h itself, so that u need not be saved

Both are written with their transposes, for the GEMMs on either side. Where the GEMM itself applies ReLU² (gemm), only h
exists, and the backward kernel, which reads it anyway, writes its transpose too. Shapes: N tokens, F hidden width.
"""

from nanorun.model.kernels.relu2.kernel import backward as backward
from nanorun.model.kernels.relu2.kernel import backward_with_transpose as backward_with_transpose
from nanorun.model.kernels.relu2.kernel import quantize as quantize
