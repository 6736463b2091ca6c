"""The decode kernels against their references in float64, and a whole step against the model.

On a machine without a GPU the kernels run through Triton's interpreter, so shapes are tiny. What the
interpreter cannot show (layouts, tensor cores, launches ahead) is left to tests/gpu.
"""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from nanorun.config import ModelConfig
from nanorun.infer.cache import Cache
from nanorun.infer.engine import Engine, Request, Sampling, Settings
from nanorun.infer.forward import decode, prefill
from nanorun.infer.kernels import attention, elementwise, linear
from nanorun.infer.kernels.attention import Heads, KVSplit
from nanorun.infer.kernels.decode import FastDecode, make_fast_decode, tune, unsupported
from nanorun.infer.kernels.linear import Tile
from nanorun.infer.kernels.weights import DecodeWeights
from nanorun.infer.model import Matrix, inference_copy, quantize
from nanorun.model.gpt import build
from nanorun.model.kernels.language import HAS_TRITON, triton

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
EXACT = 1e-6 if DEVICE.type == "cpu" else 1e-5  # a GPU's exp and rsqrt are approximate in the last bits
needs_triton = pytest.mark.skipif(
    not HAS_TRITON, reason="Triton is not installed (pip install triton==3.6.0 --no-deps): kernels not run"
)


def randn(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def poison(*shape, dtype=torch.float32):
    return torch.full(shape, float("nan"), device=DEVICE, dtype=dtype)


def relative_error(fast, truth):
    return ((fast.double() - truth.double()).norm() / truth.double().norm()).item()


def matrices(rows, inputs):
    weight = 0.1 * randn(rows, inputs, seed=5)
    return {"fp32": Matrix(weight), "bf16": Matrix(weight.bfloat16()), "int8": quantize(weight)}


# ---- matrices


@needs_triton
@pytest.mark.parametrize("tensor_cores", [False, True])
@pytest.mark.parametrize("kind", ["fp32", "bf16", "int8"])
@pytest.mark.parametrize("batch", [1, 3, 17])
def test_norm_linear_agrees_with_float64(batch, kind, tensor_cores):
    matrix = matrices(40, 96)[kind]
    x = 3 * randn(batch, 96)
    for activation in ("none", "relu2", "softcap"):
        y = poison(batch, 48)
        linear.norm_linear(
            x,
            matrix,
            y,
            tile=Tile(16, 32),
            rows=37,
            activation=activation,
            cap=2.0,
            tensor_cores=tensor_cores,
        )
        truth = linear.norm_linear_reference(x.double(), matrix, activation, 2.0)[:, :37]
        assert relative_error(y[:, :37], truth) < (2e-2 if DEVICE.type == "cuda" and tensor_cores else EXACT)
        assert y[:, 37:].isnan().all(), "wrote past its rows"


@needs_triton
@pytest.mark.parametrize("tensor_cores", [False, True])
@pytest.mark.parametrize("kind", ["fp32", "bf16", "int8"])
@pytest.mark.parametrize("batch", [1, 3, 17])
def test_linear_residual_agrees_with_float64_and_may_write_over_its_input(batch, kind, tensor_cores):
    matrix = matrices(40, 96)[kind]
    h, x, extra = randn(batch, 96), randn(batch, 40, seed=1), randn(batch, 40, seed=2)
    stream, after = linear.linear_residual_reference(
        h.double(), matrix, x.double(), alpha=1.1, beta=0.3, extra=extra.double()
    )
    keep = poison(batch, 40)
    linear.linear_residual(
        h,
        matrix,
        x,
        x,
        tile=Tile(16, 32),
        alpha=1.1,
        beta=0.3,
        extra=extra,
        keep=keep,
        tensor_cores=tensor_cores,
    )
    bound = 2e-2 if DEVICE.type == "cuda" and tensor_cores else EXACT
    assert relative_error(x, stream) < bound
    assert relative_error(keep, after) < bound


def test_int8_rows_are_within_half_a_step_of_the_weight():
    weight = randn(33, 64)
    matrix = quantize(weight)
    assert ((matrix.dense(torch.float32) - weight).abs() <= matrix.scale[:, None] * 0.5001).all()


# ---- attention


def attention_case(heads, length, positions, values, seed=0, dtype=torch.float32):
    """qkv, both caches, slots out of order, positions, tables, tokens and value embedding."""
    batch, slots = len(positions), len(positions) + 2
    width = (heads.heads + 2 * heads.kv_heads) * heads.head_dim
    qkv = randn(batch, width + 16, seed=seed, dtype=dtype)
    shape = (slots, heads.kv_heads, length, heads.head_dim)
    k_cache = torch.nn.functional.rms_norm(randn(*shape, seed=seed + 1), (heads.head_dim,)) * heads.gain
    v_cache = randn(*shape, seed=seed + 2, dtype=dtype)
    where = torch.arange(slots, device=DEVICE).flip(0)[:batch].int()
    at = torch.tensor(positions, device=DEVICE, dtype=torch.int32)
    angle = torch.arange(max(positions) + 1, device=DEVICE)[:, None] * randn(heads.head_dim // 2, seed=3)
    tokens = torch.arange(batch, device=DEVICE, dtype=torch.int32) * 3 % 7
    table = randn(7, heads.kv_heads * heads.head_dim, seed=4, dtype=dtype) if values else None
    return qkv, k_cache.to(dtype), v_cache, where, at, angle.cos(), angle.sin(), tokens, table


def fast_attention(case, heads, window, split):
    """The attention output (B, H·D) of the kernel, with its splits combined."""
    qkv, k_cache, v_cache, slots, positions, cos, sin, tokens, table = case
    shape = (qkv.size(0), heads.heads, split.splits)
    partial, denominators = poison(*shape, heads.head_dim, dtype=qkv.dtype), poison(*shape)
    attention.rope_cache_attention(
        qkv,
        k_cache,
        v_cache,
        slots,
        positions,
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
    out = poison(qkv.size(0), heads.heads * heads.head_dim, dtype=qkv.dtype)
    return (
        (attention.combine_splits(partial, denominators, out) if split.splits > 1 else partial.view_as(out)),
        partial,
        denominators,
    )


@needs_triton
@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize("preload", [False, True])
@pytest.mark.parametrize(
    ("heads", "tensor_cores"),
    [(Heads(2, 2, 32, 1.2), False), (Heads(2, 2, 32, 1.2), True), (Heads(6, 2, 64, 1.2), True)],
    ids=["one query", "one query, tensor_cores", "grouped"],
)
def test_attention_over_a_ring_agrees_with_float64(heads, tensor_cores, preload, splits):
    """Rows before, at and far past the window, the ring both longer than the window and wrapped."""
    for window, length, values in ((10, 10, True), (10, 13, False), (24, 32, True)):
        case = attention_case(heads, length, [0, 1, window - 1, window, 3 * length + 5], values)
        exact = [x.clone().double() if torch.is_tensor(x) and x.is_floating_point() else x for x in case]
        fast, _, _ = fast_attention(
            case,
            heads,
            window,
            KVSplit(splits, 16 if tensor_cores else 8, preload=preload, tensor_cores=tensor_cores),
        )
        qkv, k_cache, v_cache, slots, positions, cos, sin, tokens, table = exact
        truth = attention.rope_cache_attention_reference(
            qkv,
            k_cache,
            v_cache,
            slots.long(),
            positions.long(),
            cos,
            sin,
            heads,
            window,
            tokens.long(),
            table,
        )
        assert relative_error(fast, truth) < (5e-3 if DEVICE.type == "cuda" else EXACT)
        for mine, theirs in ((case[1], k_cache), (case[2], v_cache)):
            torch.testing.assert_close(mine.double(), theirs, rtol=1e-5, atol=1e-5)


@needs_triton
def test_a_split_without_keys_contributes_nothing():
    heads = Heads(2, 2, 32, 1.2)
    case = attention_case(heads, 64, [0, 3, 40], values=False)
    _, partial, denominators = fast_attention(case, heads, 64, KVSplit(8, 8))
    assert (denominators[0, :, 1:] == 0).all()
    assert (partial[0, :, 1:] == 0).all()
    assert (denominators[:, :, 0] > 0).all()
    assert not partial.isnan().any()


@needs_triton
def test_the_output_projection_combines_the_splits():
    heads = Heads(4, 4, 32, 1.2)
    case = attention_case(heads, 64, [50, 7, 20], values=True)
    mixed, partial, denominators = fast_attention(case, heads, 64, KVSplit(4, 8))
    x = randn(3, 40)
    for matrix in matrices(40, 128).values():
        truth, _ = linear.linear_residual_reference(mixed.double(), matrix, x.double())
        out = poison(3, 40)
        attention.combine_and_project(partial, denominators, matrix, x, out, tile=Tile(16, 128))
        assert relative_error(out, truth) < EXACT


def test_attention_rejects_unsupported_shapes():
    def ask(heads, window, length):
        case = attention_case(heads, length, [0], values=False)
        out = poison(1, heads.heads, heads.head_dim)
        call: Any = attention.rope_cache_attention
        call(*case[:7], heads, window, out, split=KVSplit())

    with pytest.raises(ValueError, match="window of 20"):
        ask(Heads(2, 2, 32, 1.2), 20, 16)
    with pytest.raises(ValueError, match="gain of 4"):
        ask(Heads(2, 2, 32, 4.0), 8, 16)
    with pytest.raises(ValueError, match="too many queries per kv head: 32"):
        ask(Heads(32, 1, 32, 1.2), 8, 16)


# ---- the small kernels


@needs_triton
@pytest.mark.parametrize("smear", [False, True])
def test_smear_reads_the_previous_token_of_the_same_slot(smear):
    table, gate = randn(11, 96), randn(11, 1, seed=1)
    history = torch.randint(0, 11, (5, 8), device=DEVICE, dtype=torch.int32)
    tokens, slots, positions = (
        torch.tensor(x, device=DEVICE, dtype=torch.int32) for x in ([3, 9, 0], [4, 0, 2], [0, 8, 21])
    )
    expected = history.clone()
    weight = gate if smear else None
    truth = elementwise.embed_reference(
        table.double(), weight, tokens, expected, slots, positions, torch.float64
    )
    start, stream = poison(3, 96), poison(3, 96)
    elementwise.embed(table, weight, tokens, history, slots, positions, start, stream, 1.3)
    assert relative_error(start, truth) < EXACT
    assert relative_error(stream, 1.3 * truth) < EXACT
    assert torch.equal(history, expected)


@needs_triton
@pytest.mark.parametrize("vocab", [500, 40_000])
def test_greedy_sampling_agrees_with_its_reference(vocab):
    logits = randn(4, vocab)
    logits[1, 7] = logits[1, vocab - 1] = logits[1, 300] = 50.0  # the first of equal maxima
    logits[2] = float("nan")
    slots = torch.tensor([3, 0, 2, 4], device=DEVICE)
    table = torch.tensor([[5, 9, 9, 9, 0], [1, 1, 1, 1, 1], [8, 9, 9, 9, 0], [7, 7, 7, 7, 7]], device=DEVICE)
    expected_table = table.clone()
    expected = elementwise.greedy_sample_reference(logits.nan_to_num(), slots, expected_table)
    assert torch.equal(elementwise.greedy_sample(logits, slots, table), expected)
    assert torch.equal(table, expected_table)
    assert expected[1].tolist() == [1, 7]
    assert table[:2, 4].tolist() == [0, expected[3, 1]], "a slot at its maximum length"


@needs_triton
def test_residual_and_norm_and_activations_agree_with_float64():
    x, y, extra = randn(3, 96), randn(3, 96, seed=1), randn(3, 96, seed=2)
    truth = elementwise.residual_norm_reference(x.double(), y.double(), 1.1, 0.2, extra.double())
    normed, keep = poison(3, 96), poison(3, 96)
    elementwise.residual_norm(x, y, x, normed, alpha=1.1, beta=0.2, extra=extra, keep=keep)
    for fast, exact in zip((x, normed, keep), truth, strict=True):
        assert relative_error(fast, exact) < EXACT
    z = randn(3, 96, seed=3)
    square = torch.relu(z.double()).square()
    capped = poison(3, 90)
    elementwise.softcap(40 * z, capped, 15.0)
    assert (
        relative_error(capped, linear.activation_reference(40 * z.double(), "softcap", 15.0)[:, :90]) < EXACT
    )
    assert relative_error(elementwise.relu2_(z), square) < EXACT


# ---- the whole step


def awake_model(**shape):
    """A model in which every parameter has an effect (a fresh one has zeros)."""
    shape = {"depth": 3, "dim": 64, "heads": 2, "kv_heads": 2, "vocab_size": 90, "context": 40, **shape}
    config = ModelConfig(**{"short_window": 10, **shape})
    model = build(config, torch.device("cpu"), torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 2:
                parameter.normal_(std=1.0 if "embed" in name else parameter.size(1) ** -0.5)
        if config.smear:
            model.smear_scale.fill_(0.7)
    return model.to(DEVICE)


SHAPES = {
    "plain": {},
    "grouped": {"dim": 128, "heads": 4, "kv_heads": 2},
    "two layers, wide heads": {"dim": 128, "heads": 2, "depth": 2},
    "one layer": {"depth": 1},
    "bare": {
        "value_embeddings": False, "residual_scalars": False, "smear": False, "backout": False, "softcap": 0.0,
    },
}  # fmt: skip


@needs_triton
@pytest.mark.parametrize(
    ("shape", "batch", "matmul"),
    [
        ("plain", 1, "gemv"),
        ("one layer", 17, "cublas"),
        ("grouped", 3, "gemm"),
        ("two layers, wide heads", 17, "gemm"),
        ("two layers, wide heads", 3, "gemv"),
        ("plain", 3, "cublas"),
        ("bare", 1, "gemm"),
    ],
)
@torch.no_grad()
def test_a_step_of_ragged_rows_is_the_model(shape, batch, matmul):
    """Rows of different lengths, some past the short window's ring; two steps, the second on the cache of the first."""
    model = awake_model(**SHAPES[shape])
    config, frozen = model.config, inference_copy(model)
    tokens = torch.randint(0, 90, (batch, 40), generator=torch.Generator().manual_seed(1)).to(DEVICE)
    lengths = [(37 - 7 * row) % 38 for row in range(batch)]
    truth = model.logits(tokens)
    cache = Cache(config, batch + 1, DEVICE, torch.float32, slack=0)
    slots = torch.arange(batch, 0, -1, device=DEVICE, dtype=torch.int32)
    for row, length in enumerate(lengths):
        if length:
            prefill(frozen, cache, [int(slots[row])], [tokens[row, :length].tolist()], [0])
    small = Tile(rows=16, inputs=32)
    windows = {config.window(layer) for layer in range(config.depth)}
    tuning = replace(
        tune(config, batch, DEVICE), matmul=matmul, qkv=small, out=small, up=small, down=small, head=small,
        splits={w: KVSplit(splits=2 if w > 10 else 1, keys=16, preload=matmul == "gemv") for w in windows},
    )  # fmt: skip
    rows, step = torch.arange(batch, device=DEVICE), FastDecode(DecodeWeights.of(frozen), cache, tuning)
    for more in range(2):
        positions = torch.tensor(lengths, device=DEVICE, dtype=torch.int32) + more
        logits = step(slots, tokens[rows, positions.long()].int(), positions)
        expected = truth[rows, positions.long()]
        assert relative_error(logits, expected) < (1e-2 if DEVICE.type == "cuda" else 1e-5)


@needs_triton
@torch.no_grad()
def test_a_step_with_int8_weights_is_the_plain_step_with_them():
    frozen = inference_copy(awake_model(depth=2), int8=True)
    weights = DecodeWeights.of(frozen)
    caches = [Cache(frozen.config, 1, DEVICE, torch.float32, slack=0) for _ in range(2)]
    slots, tokens, positions = (torch.tensor([x], device=DEVICE) for x in (0, 5, 0))
    assert weights.qkv[0].weight.dtype == torch.int8
    truth = decode(frozen, caches[0], slots, tokens, positions)
    assert relative_error(FastDecode(weights, caches[1])(slots, tokens, positions), truth) < 1e-5


def test_the_fast_step_names_the_fields_that_it_does_not_support():
    config = ModelConfig(depth=2, dim=64, heads=2, kv_heads=2, vocab_size=90)
    assert unsupported(config) == []
    assert unsupported(replace(config, dim=80)) == ["heads=2"]
    assert unsupported(replace(config, dim=8 * 33, heads=33, kv_heads=1)) == [
        "heads=33",
        "dim=264",
        "kv_heads=1",
    ]
    assert unsupported(replace(config, qk_gain=5.0)) == ["qk_gain=5.0"]


def test_the_kernels_can_be_imported_without_triton():
    code = (
        "import sys; sys.modules['triton'] = None\n"
        "from nanorun.infer.kernels import decode, language\n"
        "from nanorun.errors import UserError\n"
        "assert not language.HAS_TRITON\n"
        "try:\n    decode.FastDecode(None, None)\n"
        "except UserError as error:\n    assert 'pip install triton' in str(error)\n"
        "else:\n    raise SystemExit(1)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


@needs_triton
def test_a_step_compiles_for_hopper_without_spilling_registers():
    script = Path(__file__).with_name("compile_for_hopper.py")
    command = [sys.executable, str(script), "--depths", "12", "--batches", "1", "128"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "_rope_cache_attention" in done.stdout


@needs_triton
def test_the_interpreter_runs_these_tests_where_there_is_no_gpu():
    assert DEVICE.type == "cuda" or triton.knobs.runtime.interpret


@needs_triton
@pytest.mark.parametrize("int8", [False, True])
def test_the_engine_generates_the_same_with_the_fast_step(int8):
    model = awake_model(**SHAPES["plain"])
    rng = torch.Generator().manual_seed(3)
    prompts = [torch.randint(0, model.config.vocab_size, (n,), generator=rng).tolist() for n in (3, 9)]
    asked = [
        Request(p, Sampling(temperature=t, seed=5), max_tokens=4)  # a step takes a second in the interpreter
        for p, t in zip(prompts, (0, 0.8), strict=True)
    ]
    said = []
    for make_decode in (None, make_fast_decode):
        with Engine(model, settings=Settings(slots=4, int8=int8), make_decode=make_decode) as engine:
            said.append([reply.ids for reply in engine.generate(asked)])
            engine.load_weights(model)
            assert [reply.ids for reply in engine.generate(asked[:1])] == said[-1][:1]
    assert said[0] == said[1]
