"""Peak GPU memory of training, by arithmetic: the largest micro-batch and the deepest model that fit.

Memory of one GPU at its peak, between the forward and the backward pass of any micro-batch but the first:

    weights      fp32: 4 bytes per parameter
    gradients    fp32: 4 bytes per parameter
    optimizer    matrices (Muon): a momentum, 4 bytes, and NorMuon's second moment, one number per row of the
                 longer side; all other parameters (AdamW): two moments, 8 bytes. Sharded over the GPUs.
    copies       what GEMMs read: matrices and head in the compute dtype
    activations  what the backward pass needs. torch.compile saves for every token and layer (counted in the
                 output of its partitioner for our model): the residual stream at three places, both norms'
                 outputs, queries and keys before and after their norm, values, value embeddings where a layer
                 has them, attention's output, and the MLP's hidden layer before and after ReLU²: 19 to 20
                 times the width. The FP8 path saves less: the residual stream at two places, queries, keys and
                 values once, attention's output, and one byte per element of both norms and of the hidden layer
                 after ReLU²: 18 bytes times the width instead of 39. With `recompute`, the residual stream at two
                 places, and the rest for one layer at a time.
    loss         the logits of one chunk and their gradient, the gradient of the final residual stream (twice,
                 while its chunks are concatenated), and one chunk's share of the head's gradient. With an FP8
                 head, logits cover a part of a chunk and their gradient takes one byte, twice. (That path
                 concatenates nothing, but measurements show as much memory in use.)
                 With many rows, the backward pass of the last layer then needs more: 22 bytes times the width for
                 each token (benchmarks/fake_gpu.py).
    scratch      memory needed later, after activations are freed. Only what exceeds them counts, which happens only
                 for a large model with few rows. The larger of two: the last micro-batch's gradients of the matrices
                 and the head, before they are accumulated; and Muon's update of a stack of matrices, 6.6 times
                 their size, in stacks of at most STACK_BYTES. (The latter must fit in any case: a captured CUDA
                 graph keeps its memory pool to itself.)

The same count of activations puts nanochat's d12 at 28.6 GiB with its own logits and optimizer states; 28.1 were
measured. Not counted: CUDA's context and fragmentation (`_RESERVE_GB`, `_USABLE`), and evaluation.
"""

from nanorun import hardware
from nanorun.config import ModelConfig, scale_model
from nanorun.errors import UserError
from nanorun.hardware import Gpu
from nanorun.model.fast.loss import SLICE_LOGITS
from nanorun.model.fast.recipe import DEFAULT_RECIPE, Fp8, Recipe, default_fp8
from nanorun.model.loss import CHUNK_LOGITS, CHUNK_LOGITS_GPU
from nanorun.optim.groups import stack_length

# Tokens in a micro-batch: 65,536 take 15.8 GiB of an H200 at d12 and are 2.5% faster than 32,768, which take 10.5;
# a few thousand stay in a CPU's caches.
_MICRO_TOKENS = {"cuda": 65_536, "mps": 32_768, "cpu": 4_096}
_LAST_LAYER_BYTES = 22
_STACK_COPIES = 6.6  # copies of a stack at the peak of its update (benchmarks/fake_gpu.py, d40)
_RESERVE_GB = 1.0  # CUDA's context, libraries' workspaces
_USABLE = {"cuda": 0.94, "mps": 0.6, "cpu": 0.6}  # of the rest: fragmentation, other programs on the machine
_MAX_ROWS = 4096
_MAX_DEPTH = 256


def preferred_rows(model: ModelConfig, device: str) -> int:
    """The micro-batch that keeps a device busy: more rows take memory and gain little speed."""
    return max(_MICRO_TOKENS[device] // model.context, 1)


def micro_batch_rows(model: ModelConfig, machine: hardware.Hardware, recipe: Recipe = DEFAULT_RECIPE) -> int:
    """The micro-batch: as many rows as keep the device busy and fit its estimated memory."""
    preferred = preferred_rows(model, machine.device)
    if machine.device == "cpu":
        return preferred
    gpu = hardware.find_gpu(machine.name) if machine.device == "cuda" else None
    fits = largest_batch(model, gpu or hardware.this_gpu(), 1, recipe)
    if fits < 1:
        raise UserError(
            f"A model of depth {model.depth} does not fit the {machine.name} even one row at a time: choose "
            "a smaller --depth or --context, or --recompute."
        )
    return min(preferred, fits)


def chosen_fp8(model: ModelConfig, gpu: Gpu, recipe: Recipe) -> Fp8:
    """Which GEMMs run in FP8 on this GPU."""
    if gpu.device != "cuda":
        return "none"
    return default_fp8(model, gpu.fp8_by_default) if recipe.fp8 == "auto" else recipe.fp8


def memory_gb(
    model: ModelConfig, rows: int, gpu: Gpu, gpus: int = 1, recipe: Recipe = DEFAULT_RECIPE
) -> dict[str, float]:
    """Peak memory of one GPU by part, in units of 2^30 bytes, for micro-batches of `rows` rows."""
    groups = model.parameters()
    total, matrices = sum(groups.values()), groups["matrices"]
    second_moments = model.depth * (4 + 2 * model.mlp_ratio) * model.dim
    states = matrices + second_moments + 2 * (total - matrices)
    copies = 0 if gpu.compute_bytes == 4 else gpu.compute_bytes * model.scaling_parameters
    tokens = rows * model.context
    chunk = CHUNK_LOGITS_GPU if gpu.device == "cuda" else CHUNK_LOGITS
    logits = min(tokens * model.padded_vocab, chunk)
    last_stream = tokens * model.dim * gpu.compute_bytes
    head_gradient = 4 * groups["head"]
    fp8 = chosen_fp8(model, gpu, recipe)
    if fp8 in ("head", "all"):
        head_gradient *= 2
        loss = 2 * logits + gpu.compute_bytes * min(logits, SLICE_LOGITS)
    else:
        logit_bytes = 2 * gpu.compute_bytes if gpu.device == "cuda" else 2 * gpu.compute_bytes + 4 * 4
        loss = logit_bytes * logits
    loss += 2 * last_stream + head_gradient
    parts = {
        "weights": 4 * total,
        "gradients": 4 * total,
        "optimizer": 4 * states / gpus,
        "copies": copies,
        "activations": tokens * _activation_bytes(model, gpu.compute_bytes, recipe, fp8),
        "loss": loss if fp8 == "none" else max(loss, tokens * _LAST_LAYER_BYTES * model.dim),
    }
    scratch = max(4 * matrices + head_gradient, _update_bytes(model))
    parts["scratch"] = max(scratch - parts["activations"] - parts["loss"], 0)
    return {part: size / 2**30 for part, size in parts.items()}


def _update_bytes(model: ModelConfig) -> float:
    """Muon's update of its largest stack of matrices."""
    square = model.dim**2
    kinds = ((4 * model.depth, square), (model.depth, model.mlp_ratio * square))
    return _STACK_COPIES * 4 * max(stack_length(count, size) * size for count, size in kinds)


def _activation_bytes(model: ModelConfig, item: int, recipe: Recipe, fp8: Fp8) -> int:
    """For one token; `item` is the size of one activation in bytes."""
    dim, kv_dim = model.dim, model.kv_heads * model.head_dim
    values = sum(model.has_value_embedding(layer) for layer in range(model.depth)) * kv_dim
    stream, normed, attention_out = 3 * dim, 2 * dim, dim
    queries_keys_values = 2 * (dim + kv_dim) + kv_dim
    hidden = 2 * model.mlp_ratio * dim
    fp8_bytes = 0
    if fp8 != "none":
        hidden, fp8_bytes = 0, (1 + model.mlp_ratio) * dim
        normed -= dim
    if fp8 not in ("none", "mlp"):
        stream, normed = 2 * dim, 0
        fp8_bytes += dim
        queries_keys_values = dim + 2 * kv_dim  # rotated in place
        values = 0 if recipe.inplace_embedding_grads else values
    layer = item * (stream + normed + attention_out + queries_keys_values + hidden) + fp8_bytes
    layer += 4 * (2 * model.heads + model.kv_heads + 2)  # fp32: attention's log-sum-exp, the norms' scales
    around = 3 * dim * item  # the embedding, its norm, the last norm's input
    if recipe.recompute:
        return around + item * (model.depth * 2 * dim + kv_dim) + layer
    return around + item * values + model.depth * layer


def largest_batch(model: ModelConfig, gpu: Gpu, gpus: int = 1, recipe: Recipe = DEFAULT_RECIPE) -> int:
    """The largest power of two of rows that fits, 0 when not even one does."""
    rows = 0
    while rows < _MAX_ROWS and _fits(model, max(2 * rows, 1), gpu, gpus, recipe):
        rows = max(2 * rows, 1)
    return rows


def deepest(
    gpu: Gpu, gpus: int = 1, vocab_size: int = 32768, context: int = 2048, recipe: Recipe = DEFAULT_RECIPE
) -> int:
    """The largest depth that trains with one row at a time, 0 when none does."""
    depth = 0
    while depth < _MAX_DEPTH and _fits(scale_model(depth + 1, vocab_size, context), 1, gpu, gpus, recipe):
        depth += 1
    return depth


def _fits(model: ModelConfig, rows: int, gpu: Gpu, gpus: int, recipe: Recipe) -> bool:
    total = sum(memory_gb(model, rows, gpu, gpus, recipe).values())
    if gpu.device == "cuda":
        total += _update_bytes(model) / 2**30
    return total <= _USABLE[gpu.device] * (gpu.memory_gb - _RESERVE_GB)
