"""What training takes of a GPU's memory, by arithmetic: how many rows fit, and how deep a model.

Memory of one GPU at its peak, which is between the forward and the backward pass of any micro-batch but the first:

    weights      fp32: 4 bytes a parameter
    gradients    fp32: 4 bytes a parameter
    optimizer    matrices (Muon): a momentum, 4 bytes, and NorMuon's second moment, a number per row of the
                 longer side; all else (AdamW): two moments, 8 bytes. Shared out over the GPUs.
    copies       what matmuls read: matrices and head in the compute dtype
    activations  what the backward pass needs. torch.compile keeps, for every token and layer (counted in
                 what its partitioner saves of our model): the stream at three places, both norms' outputs,
                 queries and keys before and after their norm, values, value embeddings where a layer has
                 them, attention's output, and the MLP's hidden layer before and after ReLU²: 19 to 20
                 times the width. In eight bits less (model/kernels/layers8.py): the stream at two places, queries,
                 keys and values once, attention's output, and a byte for each number of both norms and of the
                 hidden layer after ReLU²: 18 bytes times the width instead of 39. With `recompute`, two places of
                 the stream, and the rest for one layer at a time.
    loss         logits of one chunk and their gradient, the gradient of the last stream (twice, while its
                 chunks are joined), and one chunk's share of the head's gradient. Where the head is in eight bits,
                 logits are of a piece of a chunk and their gradient is a byte, twice. (Nothing is joined there, but
                 as much is found to be taken.)
                 Then, with many rows, the backward pass of the last layer takes more: for a token 22 bytes times the
                 width (benchmarks/pretend.py)
    scratch      what is needed later, when activations have made room: only what they do not cover counts, and that
                 is nothing but in a large model with few rows. The more of two: gradients of the matrices and the
                 head by the last micro-batch, before they are added to the others; and what Muon takes to update a
                 stack of matrices, 6.6 times their size, in stacks (optim/groups.py). (To fit, the latter has to
                 be there in any case: a recorded CUDA graph keeps its room for itself.)

The same count of activations puts nanochat's d12 at 28.6 GiB with its own logits and states; 28.1 were
measured. Not counted: CUDA's own share and fragmentation (`_RESERVE_GB`, `_USABLE`), and evaluation.
"""

from nanorun import hardware
from nanorun.config import Fp8, ModelConfig, scale_model
from nanorun.errors import UserError
from nanorun.hardware import Gpu, named_gpu

# Tokens in a micro-batch: 65,536 take 15.8 GiB of an H200 at d12 and are 2.5% faster than 32,768, which take 10.5;
# a few thousand stay in a CPU's caches.
_MICRO_TOKENS = {"cuda": 65_536, "mps": 32_768, "cpu": 4_096}
_LAST_LAYER_BYTES = 22
_STACKS_AT_ONCE = 6.6  # copies of a stack, at the peak of its update (benchmarks/pretend.py, d40)
CHUNK_LOGITS = {"cuda": 2**28, "mps": 2**25, "cpu": 2**25}  # as in model/loss.py
PIECE_LOGITS = 2**27  # likewise
_RESERVE_GB = 1.0  # CUDA's context, libraries' workspaces
_USABLE = {"cuda": 0.94, "mps": 0.6, "cpu": 0.6}  # of what is left: fragments, and whatever else runs there
_MOST_ROWS = 4096


def comfortable_rows(model: ModelConfig, device: str) -> int:
    """The micro-batch that keeps a device busy: more would take memory and give little."""
    return max(_MICRO_TOKENS[device] // model.context, 1)


def micro_batch_rows(model: ModelConfig, machine: hardware.Hardware) -> int:
    """The micro-batch: as many rows as keep the device busy and fit its estimated memory."""
    wanted = comfortable_rows(model, machine.device)
    if machine.device == "cpu":
        return wanted
    gpu = hardware.find_gpu(machine.name) if machine.device == "cuda" else None
    fits = largest_batch(model, gpu or hardware.this_gpu(), 1, model.recompute)
    if fits < 1:
        raise UserError(
            f"A model of depth {model.depth} does not fit the {machine.name} even one row at a time: choose "
            "a smaller --depth or --context, or --recompute."
        )
    return min(wanted, fits)


def eight_bits(model: ModelConfig, gpu: Gpu) -> Fp8:
    return model.eight_bits(gpu.eight_bits) if gpu.device == "cuda" else "none"


def largest_divisor(total: int, at_most: int) -> int:
    """So that a step is whole micro-batches."""
    return next(n for n in range(min(at_most, total), 0, -1) if total % n == 0)


def _update_bytes(model: ModelConfig) -> float:
    from nanorun.optim.groups import stack_length  # imports torch, which takes a second

    square = model.dim**2
    kinds = ((4 * model.depth, square), (model.depth, model.mlp_ratio * square))
    return _STACKS_AT_ONCE * 4 * max(stack_length(matrices, numbers) * numbers for matrices, numbers in kinds)


def memory_gb(
    model: ModelConfig, rows: int, gpu: Gpu, gpus: int = 1, recompute: bool = False
) -> dict[str, float]:
    """Peak memory of one GPU by part, in units of 2^30 bytes, for micro-batches of so many rows."""
    groups = model.parameters()
    total, matrices = sum(groups.values()), groups["matrices"]
    second_moments = model.depth * (4 + 2 * model.mlp_ratio) * model.dim
    states = matrices + second_moments + 2 * (total - matrices)
    copies = 0 if gpu.compute_bytes == 4 else gpu.compute_bytes * model.scaling_parameters
    tokens = rows * model.context
    logits = min(tokens * model.padded_vocab, CHUNK_LOGITS[gpu.device])
    last_stream = tokens * model.dim * gpu.compute_bytes
    head_gradient = 4 * groups["head"]
    eight = eight_bits(model, gpu)
    if eight in ("head", "all"):
        head_gradient *= 2
        loss = 2 * logits + gpu.compute_bytes * min(logits, PIECE_LOGITS)
    else:
        logit_bytes = 2 * gpu.compute_bytes if gpu.device == "cuda" else 2 * gpu.compute_bytes + 4 * 4
        loss = logit_bytes * logits
    loss += 2 * last_stream + head_gradient
    parts = {
        "weights": 4 * total,
        "gradients": 4 * total,
        "optimizer": 4 * states / gpus,
        "copies": copies,
        "activations": tokens * _activation_bytes(model, gpu.compute_bytes, recompute, eight),
        "loss": loss if eight == "none" else max(loss, tokens * _LAST_LAYER_BYTES * model.dim),
    }
    scratch = max(4 * matrices + head_gradient, _update_bytes(model))
    parts["scratch"] = max(scratch - parts["activations"] - parts["loss"], 0)
    return {part: size / 2**30 for part, size in parts.items()}


def _activation_bytes(model: ModelConfig, item: int, recompute: bool, eight: Fp8) -> int:
    """For one token; `item` is the bytes of one activation."""
    dim, kv_dim = model.dim, model.kv_heads * model.head_dim
    values = sum(model.has_value_embedding(layer) for layer in range(model.depth)) * kv_dim
    stream, normed, attention_out = 3 * dim, 2 * dim, dim
    queries_keys_values = 2 * (dim + kv_dim) + kv_dim
    hidden = 2 * model.mlp_ratio * dim
    bytes_alone = 0
    if eight != "none":
        hidden, bytes_alone = 0, (1 + model.mlp_ratio) * dim
        normed -= dim
    if eight not in ("none", "mlp"):
        stream, normed = 2 * dim, 0
        bytes_alone += dim
        if model.fused_rope and model.fused_qkv:  # and turned in place, where head_dim is a power of two
            queries_keys_values = dim + 2 * kv_dim
            values = 0 if model.sparse_tables else values
    layer = item * (stream + normed + attention_out + queries_keys_values + hidden) + bytes_alone
    layer += 4 * (model.heads + model.heads + model.kv_heads + 2)  # fp32: attention's sums, the norms' scales
    around = 3 * dim * item  # the embedding, its norm, the last norm's input
    if recompute:
        return around + item * (model.depth * 2 * dim + kv_dim) + layer
    return around + item * values + model.depth * layer


def largest_batch(model: ModelConfig, gpu: Gpu, gpus: int = 1, recompute: bool = False) -> int:
    """The largest power of two of rows that fits, 0 when not even one does."""
    rows = 0
    while rows < _MOST_ROWS and _fits(model, max(2 * rows, 1), gpu, gpus, recompute):
        rows = max(2 * rows, 1)
    return rows


def deepest(
    gpu: Gpu | str, gpus: int = 1, vocab_size: int = 32768, context: int = 2048, recompute: bool = False
) -> int:
    """The largest depth whose model trains with one row at a time, 0 when none does."""
    gpu = named_gpu(gpu) if isinstance(gpu, str) else gpu
    depth = 0
    while depth < 256 and _fits(scale_model(depth + 1, vocab_size, context), 1, gpu, gpus, recompute):
        depth += 1
    return depth


def _fits(model: ModelConfig, rows: int, gpu: Gpu, gpus: int, recompute: bool) -> bool:
    total = sum(memory_gb(model, rows, gpu, gpus, recompute).values())
    if gpu.device == "cuda":
        total += _update_bytes(model) / 2**30
    return total <= _USABLE[gpu.device] * (gpu.memory_gb - _RESERVE_GB)
