"""The kernels of the fast decode step: one new token for each of B rows, on a GPU, inside a CUDA graph.

Generation at small batch sizes is bound by two things: reading every weight once from memory, and the gaps between
kernels. A layer is therefore five kernels, with everything elementwise in their epilogues:

    norm_linear            x → norm → query, key, value (and the value gate)
    rope_cache_attention   RoPE, QK-norm, this token's key and value to the cache, attention, split-KV
    combine_and_project    the splits combined, output projection, residual
    norm_linear            x → norm → up-projection → relu²
    linear_residual        down-projection, residual, and λ·x + μ·x0 for the next layer

and each asks to be launched before the previous one has finished (programmatic dependent launch): it loads its
weights into registers, then waits, so that memory is never idle between kernels.

Kernels are functions of tensors, each with its PyTorch reference in the same file. `decode.py` composes them; its
reference is `forward.decode`, the plain model.
"""
