"""Kernels that compile themselves, compiled ahead by other processes.

FlashAttention-4's kernels, quack's products and our own are Python that is compiled when first called, one after the
other, while all cores but one wait. So where the caches on disk are empty, helpers are sent ahead: each calls some of
the kernels on a handful of numbers, and the run, which has its own compiling to do meanwhile, finds them in the cache
when it comes to them. What a helper has not compiled is compiled by the run, and a run that needs the GPU's last
gigabytes ends them (`recall`).
"""

import getpass
import itertools
import os
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

import torch

from nanorun.config import VALUE_GATE_CHANNELS, ModelConfig
from nanorun.hardware import usable_cores
from nanorun.model.kernels import (
    embedding_grad,
    flash,
    fp8,
    gemm,
    relu2,
    residual_norm,
    rope_norm,
    softcap_loss,
)

CORES = 8  # with fewer, helpers would only be in the way
PRODUCT_PARTS = 3  # the run checks its products before it has anything else to compile
_helpers: list[subprocess.Popen[bytes]] = []


def send_ahead(config: ModelConfig, device: torch.device) -> int:
    """Starts the helpers, where they help, for a model that attends by FlashAttention-4; how many."""
    if not welcome(device):
        return 0
    tasks = []
    shape = f"{config.heads}, {config.kv_heads}, {config.head_dim}, {config.context}"
    if _empty("flash_attention_cute_dsl_cache", "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR"):
        windows = sorted({min(config.window(layer), config.context) for layer in range(config.depth)})
        tasks += [f"flash_task({shape}, {window})" for window in windows]
    if config.eight_bits(True) == "all" and _installed("quack") and _empty("quack_cache", "QUACK_CACHE_DIR"):
        sizes = f"{config.dim}, {config.mlp_ratio * config.dim}, {config.vocab_size}, {config.padded_vocab}"
        tasks += [
            f"kernels_task({shape}, {sizes})",
            *(f"products_task({part})" for part in range(PRODUCT_PARTS)),
        ]
    _helpers.extend(_started(task) for task in tasks)
    return len(tasks)


def recall() -> bool:
    """Ends helpers that are still at work; whether there were any."""
    busy = [helper for helper in _helpers if helper.poll() is None]
    for helper in busy:
        helper.kill()
        helper.wait()
    _helpers.clear()
    return bool(busy)


def welcome(device: torch.device) -> bool:
    """On a Hopper GPU with cores to spare, where FlashAttention-4 is there and keeps its kernels."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] != 9 or usable_cores() < CORES:
        return False
    return os.environ.get(flash.DISK_CACHE, "1") == "1" and _installed("flash_attn.cute")


def _installed(package: str) -> bool:
    try:
        return find_spec(package) is not None
    except Exception:  # its parent is not there, or breaks
        return False


def _empty(usual: str, told: str) -> bool:
    """Whether a package has kept nothing: neither where it was told to nor, if not told, where it usually does."""
    try:
        place = os.environ.get(told) or Path(tempfile.gettempdir()) / getpass.getuser() / usual
    except Exception:  # a user without a name
        return False
    return not any(Path(place).rglob("*.o"))


def _started(task: str) -> subprocess.Popen[bytes]:
    code = f"from nanorun.model.kernels import ahead; ahead.{task}"
    nowhere = subprocess.DEVNULL
    root = str(Path(__file__).resolve().parents[3])
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([root, *sys.path[1:]])}
    return subprocess.Popen(
        [sys.executable, "-c", code], env=env, stdin=nowhere, stdout=nowhere, stderr=nowhere
    )


# What helpers do


def flash_task(heads: int, kv_heads: int, head_dim: int, length: int, window: int) -> None:
    """Attention as a model of this shape asks for it, both ways."""
    os.environ.setdefault(flash.DISK_CACHE, "1")
    qkv = torch.zeros(1, length, heads + 2 * kv_heads, head_dim, device="cuda", dtype=torch.bfloat16)
    q, k, v = (each.requires_grad_() for each in qkv.split([heads, kv_heads, kv_heads], dim=2))
    flash.flash_attention(q, k, v, window).sum().backward()


def kernels_task(
    heads: int,
    kv_heads: int,
    head_dim: int,
    length: int,
    dim: int,
    hidden: int,
    vocab: int,
    padded: int,
    device: str = "cuda",
) -> None:
    """Our own, as layers and head in eight bits call them in a first step. (Elsewhere than on a GPU: for tests.)"""

    def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.zeros(shape, device=device, dtype=dtype)

    tokens = 256
    one, two = empty(1, dtype=torch.float32), empty(2, dtype=torch.float32)
    x, targets = empty(tokens, dim), empty(tokens, dtype=torch.int64)
    first, words = empty(tokens, VALUE_GATE_CHANNELS), empty(tokens, dtype=torch.int32)
    for outputs, inputs in ((3 * dim, dim), (hidden, dim), (dim, hidden)):
        weight = empty(outputs, inputs, dtype=torch.float32)
        fp8.quantize(weight, fp8.amax_and_row_norm(weight), 0.0, fp8.E4M3)
    # the MLP
    *_, inverse = residual_norm.norm_quantize(x)
    h = empty(tokens, hidden, dtype=fp8.E4M3)
    gemm.relu2_scales(one, one, two, dim, one, one)
    largest = fp8.amax_and_row_norm(x)
    fp8.quantize(x, largest, 0.0, fp8.E5M2)
    relu2.backward_with_transpose(empty(tokens, hidden), h, one, largest, two)
    residual_norm.backward(x, x, inverse, x, None, None, None)
    # attention
    aligned, another = two[:1], two[1:]  # a layer's λ and μ, which lie side by side with the other layers'
    for scalar in (aligned, another):
        residual_norm.residual_norm_quantize(x, None, x, scalar, scalar)
    qkv, angle = empty(tokens, (heads + 2 * kv_heads) * head_dim), empty(length, head_dim // 2)
    table, gate = empty(padded, kv_heads * head_dim, dtype=torch.float32), empty(tokens, kv_heads)
    rope_norm.rope_norm_inplace(qkv, angle, angle, gate, table, words, heads, kv_heads, 1.2)
    inverses, steepest = rope_norm.rope_norm_inplace(
        qkv, angle, angle, None, None, None, heads, kv_heads, 1.2
    )
    dq, dk, dv = (empty(tokens, n, head_dim) for n in (heads, kv_heads, kv_heads))
    embedding_grad.gated_embedding_backward(table, dv, gate, table, words)
    rope_norm.backward_fp8(qkv, inverses, angle, angle, dq, dk, dv, steepest, heads, kv_heads, 1.2)
    for kept, scalar in itertools.product((first, None), (aligned, another)):
        residual_norm.backward(x, x, inverse, x, kept, x, scalar)
    # the head, and the embedding
    fp8.quantize(x, None, dim**0.5, fp8.E4M3)
    both = (empty(n, m, dtype=fp8.E5M2) for n, m in ((tokens, padded), (padded, tokens)))
    losses = empty(tokens, dtype=torch.float32)
    softcap_loss.softcap_loss_fp8(empty(tokens, padded), targets, 15.0, vocab, losses, *both, 0)
    embedding_grad.accumulate(empty(padded, dim, dtype=torch.float32), words, x)


def products_task(part: int) -> None:
    """Every third product; one that the run comes to meanwhile it waits for."""
    gemm.self_test(torch.device("cuda"), slice(part, None, PRODUCT_PARTS))
