"""The kernels of one decode step: one new token for each of B rows, on a GPU, inside a CUDA graph.

Generation at small batches is bound by two things: reading every weight once from memory, and the gaps
between kernels. A layer is therefore five kernels, with everything elementwise folded into their ends:

    norm_linear           x → norm → query, key, value (and the value gate)
    rope_cache_attention  rotary, norms, this token's key and value into the cache, attention in splits
    attention_out         the splits added up, output projection, residual
    norm_linear           x → norm → up → relu²
    linear_residual       down, residual, and λ·x + μ·x0 for the next layer

and each asks to be started before the one ahead of it has finished (programmatic dependent launch): it
loads its weights into registers, then waits, so memory never rests while kernels change over.

Every file has the plain torch truth beside the kernel. `step.py` strings them together.
"""
