"""Cross entropy of softcapped logits and its gradient, in one kernel.

The logits are the largest tensor of a step, so the cost of the loss is the bytes it moves. One program takes one row,
in blocks, twice: first it sums the exponentials, then it overwrites the logits with the gradient; the second read hits
the cache. (Holding the whole row in registers was slower: it spills.)

    t = tanh(z/cap)      Σ = sum exp(cap·t)      loss = log Σ - cap·t[target]
    dz = (exp(cap·t)/Σ - onehot(target))·(1 - t²)

For 16-bit logits tanh is the GPU's approximate instruction: its relative error (2⁻¹¹) is a quarter of the rounding of
the logits to bf16.

An FP8 head needs the gradient in e5m2 with its transpose (fp8 explains why), so it is written in tiles. Then the sums
and the gradient are two kernels, and the logits are read twice from memory; but half as much is written, so it takes
about as long.

Not covered: no softcap, or one so large that the exponentials need a maximum subtracted; targets past the vocabulary.
"""

from nanorun.model.kernels.softcap_loss.kernel import softcap_loss as softcap_loss
from nanorun.model.kernels.softcap_loss.kernel import softcap_loss_fp8 as softcap_loss_fp8
