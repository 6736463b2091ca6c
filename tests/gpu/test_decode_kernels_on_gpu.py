"""The decode kernels at real shapes: bf16 against float64, odd lengths, with programmatic launch, in a graph."""

from dataclasses import replace

import pytest
import torch

from nanorun.config import scale_model
from nanorun.infer.cache import Cache
from nanorun.infer.forward import decode
from nanorun.infer.kernels import attention, linear
from nanorun.infer.kernels.attention import Heads, KVSplit
from nanorun.infer.kernels.decode import FastDecode, tune
from nanorun.infer.kernels.linear import Tile
from nanorun.infer.kernels.weights import DecodeWeights
from nanorun.infer.model import Matrix, inference_copy, quantize
from nanorun.model.gpt import build

pytest.importorskip("triton", reason="Triton is not installed")
CUDA = torch.device("cuda")


def randn(*shape, dtype=torch.bfloat16, seed=0):
    rng = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(shape, device="cuda", generator=rng).to(dtype)


def poison(*shape, dtype=torch.bfloat16):
    return torch.full(shape, float("nan"), device="cuda", dtype=dtype)


def relative_error(fast, truth):
    return ((fast.double() - truth.double()).norm() / truth.double().norm()).item()


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize(
    ("batch", "tensor_cores"), [(1, False), (3, False), (8, False), (8, True), (17, True), (64, True)]
)
@pytest.mark.parametrize("inputs", [768, 1280])
def test_matrix_kernels_agree_with_float64(inputs, batch, tensor_cores, int8):
    weight = randn(3 * inputs + 16, inputs) * inputs**-0.5
    up = quantize(weight) if int8 else Matrix(weight)
    down_weight = randn(inputs, 4 * inputs, seed=1) * inputs**-0.5
    down = quantize(down_weight) if int8 else Matrix(down_weight)
    x, h = randn(batch, inputs, dtype=torch.float32), randn(batch, 4 * inputs)
    extra = randn(batch, inputs, dtype=torch.float32, seed=2)
    at_once = 4096 // linear.padded(batch)
    tile = Tile(16, at_once, stages=4) if tensor_cores else Tile(4, 256)
    for pdl in (False, True):
        y = poison(batch, 3 * inputs + 16)
        rows = 3 * inputs + 6
        linear.norm_linear(
            x, up, y, tile=tile, rows=rows, activation="relu2", tensor_cores=tensor_cores, pdl=pdl
        )
        truth = linear.norm_linear_reference(x.double(), up, "relu2")[:, :rows]
        assert relative_error(y[:, :rows], truth) < 1e-2
        assert y[:, rows:].isnan().all()
        out, keep = poison(batch, inputs, dtype=torch.float32), poison(batch, inputs, dtype=torch.float32)
        linear.linear_residual(
            h,
            down,
            x,
            out,
            tile=tile,
            alpha=1.1,
            beta=0.2,
            extra=extra,
            keep=keep,
            tensor_cores=tensor_cores,
            pdl=pdl,
        )
        truth, after = linear.linear_residual_reference(
            h.double(), down, x.double(), 1.1, 0.2, extra.double()
        )
        assert relative_error(out, truth) < 5e-3
        assert relative_error(keep, after) < 5e-3


SPLITS = [
    KVSplit(1),
    KVSplit(1, 64, 4, 3, tensor_cores=True),
    KVSplit(1, 128, 8, 2),
    KVSplit(8, preload=True),
    KVSplit(16, 32, preload=True),
]


@pytest.mark.parametrize("split", SPLITS, ids=str)
@pytest.mark.parametrize(
    "heads", [Heads(6, 6, 128, 1.2), Heads(16, 4, 128, 1.2), Heads(4, 4, 64, 1.2)], ids=str
)
@pytest.mark.parametrize(("window", "length"), [(512, 512), (500, 700), (2048, 2048)])
def test_attention_over_a_ring_agrees_with_float64(window, length, heads, split):
    positions = [0, 1, 63, 64, 65, 511, 512, 513, 777, 1023, 1999]
    batch, slots = len(positions), len(positions) + 3
    shape = (slots, heads.kv_heads, length, heads.head_dim)
    k_cache = torch.nn.functional.rms_norm(randn(*shape, seed=1), (heads.head_dim,)) * heads.gain
    v_cache = randn(*shape, seed=2)
    kv_dim = heads.kv_heads * heads.head_dim
    qkv = randn(batch, (heads.heads + 2 * heads.kv_heads) * heads.head_dim + 16)
    angle = (
        torch.arange(2048, device="cuda")[:, None] * 0.01 * randn(heads.head_dim // 2, dtype=torch.float32)
    )
    cos, sin = angle.cos().bfloat16(), angle.sin().bfloat16()
    at = torch.tensor(positions, device="cuda", dtype=torch.int32)
    where = torch.randperm(slots, device="cuda")[:batch].int()
    tokens = torch.randint(0, 100, (batch,), device="cuda", dtype=torch.int32)
    table = randn(100, kv_dim, seed=3)
    exact_k, exact_v = k_cache.double(), v_cache.double()
    truth = attention.rope_cache_attention_reference(
        qkv.double(), exact_k, exact_v, where.long(), at.long(), cos, sin, heads, window, tokens.long(), table
    )
    partial = poison(batch, heads.heads, split.splits, heads.head_dim)
    denominators = poison(batch, heads.heads, split.splits, dtype=torch.float32)
    out = poison(batch, heads.heads * heads.head_dim)
    attention.rope_cache_attention(
        qkv,
        k_cache,
        v_cache,
        where,
        at,
        cos,
        sin,
        heads,
        window,
        partial,
        denominators,
        tokens,
        table,
        split=split,
    )
    fast = attention.combine_splits(partial, denominators, out) if split.splits > 1 else partial.view_as(out)
    assert relative_error(fast, truth) < 1e-2
    for row in range(batch):  # long sums average noise away: no row may hide behind another
        assert relative_error(fast[row], truth[row]) < 2e-2, positions[row]
    assert relative_error(k_cache, exact_k) < 4e-3
    assert relative_error(v_cache, exact_v) < 4e-3
    if split.splits > 1:
        x = randn(8, 768, dtype=torch.float32)
        matrix = Matrix(randn(768, out.size(1), seed=4) * 0.03)
        projected = poison(8, 768, dtype=torch.float32)
        attention.combine_and_project(partial[:8], denominators[:8], matrix, x, projected, tile=Tile(8, 128))
        expected, _ = linear.linear_residual_reference(fast[:8].double(), matrix, x.double())
        assert relative_error(projected, expected) < 5e-3


@torch.no_grad()
def awake_model(depth):
    """A d12 or d20 with random weights that are exact in bf16, every part of which does something."""
    model = build(scale_model(depth, 32_768), CUDA, torch.bfloat16)
    model.smear_scale.fill_(0.5)
    for name, parameter in model.named_parameters():
        if parameter.ndim == 2:
            parameter.normal_(std=1.0 if "embed" in name else parameter.size(1) ** -0.5)
        parameter.copy_(parameter.bfloat16())
    return model


@torch.no_grad()
def filled_cache(config, slots):
    cache = Cache(config, slots, CUDA, torch.bfloat16)
    for keys, values in zip(cache.k, cache.v, strict=True):
        keys.copy_(torch.nn.functional.rms_norm(torch.randn_like(keys), (config.head_dim,)) * config.qk_gain)
        values.normal_()
    cache.tokens.random_(0, config.vocab_size)
    return cache


def copied(cache, dtype=torch.bfloat16):
    copy = Cache(cache.config, cache.slots, CUDA, dtype)
    for mine, theirs in zip((*copy.k, *copy.v, copy.tokens), (*cache.k, *cache.v, cache.tokens), strict=True):
        mine.copy_(theirs)
    return copy


@pytest.mark.parametrize("int8", [False, True])
@torch.no_grad()
def test_steps_of_every_size_agree_with_the_plain_step_in_float64(int8):
    model = awake_model(12)
    exact, weights = (
        inference_copy(model, torch.float64, int8),
        DecodeWeights.of(inference_copy(model, int8=int8)),
    )
    config = model.config
    for batch in (1, 3, 8, 17, 65, 128):
        cache = filled_cache(config, batch + 2)
        slots = torch.randperm(batch + 2, device="cuda")[:batch]
        tokens = torch.randint(0, config.vocab_size, (batch,), device="cuda")
        positions = torch.randint(0, config.context, (batch,), device="cuda")
        positions[0] = 1023
        truth = decode(exact, copied(cache, torch.float64), slots, tokens, positions)
        ways = {"gemm"} | ({"gemv"} if batch <= 8 else set()) | ({"cublas"} if not int8 else set())
        for way in sorted(ways):
            tuning = tune(config, batch, CUDA, int8)
            if way != tuning.matmul:
                other = {"gemv": 1, "gemm": 64, "cublas": 128}[way]
                tuning = replace(tune(config, other, CUDA, int8=way == "gemm"), splits=tuning.splits)
            if batch > 64 and way == "gemm":
                tuning = replace(
                    tuning,
                    qkv=Tile(32, 32),
                    out=Tile(32, 32),
                    up=Tile(32, 32),
                    down=Tile(32, 64),
                    head=Tile(64, 32),
                )
            logits = FastDecode(weights, copied(cache), tuning)(slots, tokens, positions)
            assert relative_error(logits, truth) < 3e-2, (batch, way)


@pytest.mark.parametrize("batch", [1, 8, 32, 128])
@torch.no_grad()
def test_a_replayed_graph_gives_the_same_bits_as_separate_kernels(batch):
    """Kernels that start before their predecessors end must not see half-written data: forty steps, twice."""
    weights = DecodeWeights.of(inference_copy(awake_model(12)))
    config = weights.config
    started = filled_cache(config, batch)
    slots = torch.arange(batch, device="cuda", dtype=torch.int32)
    tokens = torch.zeros(batch, device="cuda", dtype=torch.int32)
    positions = torch.zeros(batch, device="cuda", dtype=torch.int32)
    first = torch.randint(500, 520, (batch,), device="cuda", dtype=torch.int32)
    overlapped = tune(config, batch, CUDA)

    def steps(run):
        positions.copy_(first)
        said = []
        for step in range(40):
            tokens.fill_(7919 * step % config.vocab_size)
            said.append(run().clone())
            positions.add_(1)
        return torch.stack(said)

    serial = FastDecode(weights, copied(started), replace(overlapped, pdl=False))
    truth = steps(lambda: serial(slots, tokens, positions))
    cache = copied(started)
    graphed = FastDecode(weights, cache, overlapped)
    graphed(slots, tokens, positions)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        logits = graphed(slots, tokens, positions)
    for _ in range(2):
        for mine, theirs in zip((*cache.k, *cache.v), (*started.k, *started.v), strict=True):
            mine.copy_(theirs)
        cache.tokens.copy_(started.tokens)

        def replayed():
            logits.fill_(float("nan"))
            graph.replay()
            return logits

        said = steps(replayed)
        if overlapped.matmul == "cublas":  # free to add up in another order inside a graph
            assert relative_error(said, truth) < 1e-2
        else:
            assert torch.equal(said, truth)
