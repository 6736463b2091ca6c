"""FP8 kernels at real shapes against float64, compiled half-blocks, and training."""

import functools
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from near import assert_adds_value_embeddings, fp8_loss, norm_mlp, norm_qkv_rope, normed, relative_error
from torch._dynamo.utils import counters

from nanorun.config import OptimConfig, scale_model
from nanorun.model.attention import choose_backends
from nanorun.model.compiling import compiled
from nanorun.model.fast.half_blocks import Fp8Weight
from nanorun.model.fast.path import FastPath
from nanorun.model.fast.recipe import Recipe, resolve
from nanorun.model.gpt import build
from nanorun.model.kernels import embedding_grad, fp8, relu2, residual_norm
from nanorun.model.kernels.fp8.reference import dequantize
from nanorun.model.kernels.rope_norm.reference import rope_norm as rope_norm_reference
from nanorun.model.kernels.softcap_loss import softcap_loss_fp8
from nanorun.model.loss import chunk_loss, plain_loss
from nanorun.optim import schedules
from nanorun.optim.groups import group_parameters
from nanorun.optim.optimizer import Optimizer

CUDA = torch.device("cuda")


@pytest.fixture(autouse=True)
def require_fp8():
    if not fp8.is_supported(torch.device("cuda", 0)):
        pytest.skip("this GPU does not support FP8")
    torch._dynamo.reset()  # Dynamo compiles at most eight graphs for a function


def draw(*shape, seed=0, size=1.0, dtype=torch.float32):
    generator = torch.Generator("cuda").manual_seed(seed)
    return (torch.randn(shape, device="cuda", generator=generator) * size).to(dtype)


def fp8_weight(*weights):
    weight8 = Fp8Weight(sum(w.shape[0] for w in weights), weights[0].shape[1]).cuda()
    weight8.requantize(*weights)
    return weight8


SHAPES = [(4096, 768), (1000, 768), (33, 1280), (2049, 1536), (1, 16)]


def test_a_row_far_larger_than_the_sampled_ones_is_clipped_and_others_keep_their_precision():
    x = draw(40_000, 64, dtype=torch.bfloat16)
    x[12_345] *= 1e6
    q, q_t, scale = fp8.quantize(x, fp8.E5M2, amax=fp8.amax_and_row_norm(x))
    assert q.float().isfinite().all()
    assert torch.equal(q_t[:, :40_000].float(), q.float().T)
    clipped, others = dequantize(q, scale)[12_345], torch.arange(40_000, device="cuda") != 12_345
    assert clipped.abs().max() >= 16 * x[::8].abs().max().double()
    assert clipped.sign().equal(x[12_345].double().sign())
    assert relative_error(dequantize(q, scale)[others], x[others].double()) < 0.06


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_quantization_rounds_as_torch_does_and_writes_the_transpose(shape):
    for dtype in (fp8.E4M3, fp8.E5M2):
        x = draw(*shape, size=3e-5, dtype=torch.bfloat16)
        q, q_t, scale = fp8.quantize(x, dtype, amax=fp8.amax_and_row_norm(x))
        assert torch.equal(q.float(), (x.float() / scale).to(dtype).float())
        assert torch.equal(q_t[:, : shape[0]].float(), q.float().T)
        assert q_t[:, shape[0] :].float().eq(0).all()
    q, q_t, scale, _ = residual_norm.norm_quantize(draw(*shape, size=9.0, dtype=torch.bfloat16))
    assert (
        relative_error(dequantize(q, scale), normed(draw(*shape, size=9.0, dtype=torch.bfloat16).double()))
        < 0.035
    )
    assert torch.equal(q_t[:, : shape[0]].float(), q.float().T)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_nonfinite_values_stay_nonfinite(bad):
    x = draw(100, 64)
    x[50, 3] = bad
    q, _, scale = fp8.quantize(x, fp8.E5M2, amax=fp8.amax_and_row_norm(x))
    assert not dequantize(q, scale).isfinite().all()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_compiled_mlp_agrees_with_float64_forward_and_backward(shape):
    rows, width = shape
    x = draw(1, rows, width, size=3.0, dtype=torch.bfloat16).requires_grad_()
    up = draw(4 * width, width, seed=1, size=width**-0.5).requires_grad_()
    down = draw(width, 4 * width, seed=2, size=0.02).requires_grad_()
    douts = draw(1, rows, width, seed=3, size=1e-7)
    compiled_mlp = torch.compile(norm_mlp, dynamic=False, fullgraph=True)
    fast = compiled_mlp(x, fp8_weight(up), fp8_weight(down), up, down)
    (fast.float() * douts).sum().backward()
    exact = [t.detach().double().requires_grad_() for t in (x, up, down)]
    truth = F.linear(F.relu(F.linear(normed(exact[0]), exact[1])).square(), exact[2])
    (truth * douts).sum().backward()
    assert relative_error(fast, truth) < 0.08
    for ours, expected in zip((x, up, down), exact, strict=True):
        assert relative_error(ours.grad, expected.grad) < 0.13


@pytest.mark.parametrize("shape", [(2, 1000, 6, 6, 128), (1, 33, 4, 2, 64), (16, 2048, 6, 6, 128)], ids=str)
@pytest.mark.parametrize("own_angles", [False, True])
def test_compiled_fp8_queries_keys_and_values_agree_with_float64(shape, own_angles):
    batch, time, heads, kv_heads, dim = shape
    width = heads * dim
    x = draw(batch, time, width, dtype=torch.bfloat16, size=3.0).requires_grad_()
    sizes = (width, kv_heads * dim, kv_heads * dim)
    weights = [draw(n, width, seed=i, size=width**-0.5).requires_grad_() for i, n in enumerate(sizes)]
    angle = draw(*((batch, time) if own_angles else (time,)), dim // 2, seed=7)
    cos, sin = angle.cos().bfloat16(), angle.sin().bfloat16()
    fast = torch.compile(norm_qkv_rope, dynamic=False, fullgraph=True)(
        x, fp8_weight(*weights), weights, 12, cos, sin, heads, kv_heads, 1.2
    )
    exact = [t.detach().double().requires_grad_() for t in (x, *weights)]
    n = normed(exact[0])
    qkv = F.linear(n, torch.cat(exact[1:]))
    truth = (*rope_norm_reference(qkv, cos.double(), sin.double(), heads, kv_heads, 1.2), n[..., :12])
    douts = [draw(*out.shape, seed=i, size=1e-7) for i, out in enumerate(truth)]
    for outs in (fast, truth):
        sum((out.double() * weight).sum() for out, weight in zip(outs, douts, strict=True)).backward()
    for ours, expected in zip(fast, truth, strict=True):
        assert relative_error(ours, expected) < 0.06
    for ours, expected in zip((x, *weights), exact, strict=True):
        assert relative_error(ours.grad, expected.grad) < 0.12


@pytest.mark.parametrize("shape", [(2, 1000, 6, 6, 128), (1, 33, 4, 2, 64), (16, 2048, 6, 6, 128)], ids=str)
def test_value_embeddings_added_by_the_kernel_agree_with_float64_when_compiled(shape):
    compiled_heads = torch.compile(norm_qkv_rope, dynamic=False, fullgraph=True)
    assert_adds_value_embeddings(compiled_heads, draw, fp8_weight, shape)


@pytest.mark.parametrize("vocab", [(97, 128), (32768, 32768), (50257, 50304)], ids=str)
@pytest.mark.parametrize("rows", [65, 1024])
def test_the_fp8_gradient_of_logits_agrees_with_float64(vocab, rows):
    size, padded = vocab
    logits = draw(rows, padded, size=6.0, dtype=torch.bfloat16)
    targets = torch.randint(-1, size, (rows,), device="cuda")
    losses, gradient = chunk_loss(logits.double(), targets, 15.0, size, True)
    q = torch.empty(rows, padded, device="cuda", dtype=fp8.E5M2)
    q_t = torch.empty(padded, fp8.padded(rows), device="cuda", dtype=fp8.E5M2)
    fast = torch.empty(logits.shape[0], device="cuda")
    scale = softcap_loss_fp8(logits, targets, 15.0, size, fast, q, q_t, 0)
    assert relative_error(fast, losses) < 5e-3
    assert relative_error(dequantize(q, scale), gradient) < 0.08
    assert torch.equal(q_t[:, :rows].float(), q.float().T)
    assert q_t[:, rows:].float().eq(0).all()


@pytest.mark.parametrize("rows", [1000, 4096])
def test_the_compiled_loss_with_an_fp8_head_agrees_with_float64(rows):
    x = normed(draw(rows, 256)).bfloat16().requires_grad_()
    weight = draw(1024, 256, seed=1, size=0.1).requires_grad_()
    targets = torch.randint(-1, 1000, (rows,), device="cuda")
    exact = [x.detach().double().requires_grad_(), weight.detach().double().requires_grad_()]
    fast = torch.compile(fp8_loss, dynamic=False, fullgraph=True)(
        x, weight, targets, fp8_weight(weight), 15.0, 1000, False
    )
    truth = plain_loss(exact[0], exact[1], targets, 15.0, 1000)
    fast.backward()
    truth.backward()
    assert abs(fast.item() / truth.item() - 1) < 2e-3
    assert relative_error(x.grad, exact[0].grad) < 0.1
    assert relative_error(weight.grad, exact[1].grad) < 0.1


@pytest.mark.parametrize("width", [128, 768, 1536])
def test_embedding_gradients_are_accumulated_in_place(width):
    rows = draw(3, 1001, width, dtype=torch.bfloat16)
    tokens = (torch.rand(3, 1001, device="cuda") ** 4 * 500).int()  # a few are very common
    grad_buffer = draw(500, width, seed=1)
    truth = embedding_grad.reference.accumulate(grad_buffer.double(), tokens, rows)
    embedding_grad.accumulate(grad_buffer, tokens, rows)
    torch.testing.assert_close(grad_buffer.double(), truth, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("shape", [(1, 64), (1001, 768), (32_768, 3072)], ids=str)
def test_relu2_backward_gives_the_same_from_h_and_from_its_transpose(shape):
    h, h_t, scale = relu2.quantize(draw(*shape, dtype=torch.bfloat16), torch.full((2,), 3.0).cuda(), 64)
    dh = draw(*shape, seed=1, size=1e-4, dtype=torch.bfloat16)
    lengths = fp8.amax_and_row_norm(dh), torch.full((2,), 3.0).cuda()
    from_transpose = (*relu2.backward(dh, h_t, scale, *lengths), h_t)
    with_transpose = relu2.backward_with_transpose(dh, h, scale, *lengths)
    for ours, expected in zip(with_transpose, from_transpose, strict=True):
        assert torch.equal(ours.view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.parametrize("heads", [1, 6, 12])
def test_gated_value_embeddings_and_their_gradients_agree_with_float64(heads):
    v, dy = (draw(2, 1001, heads, 128, seed=i, dtype=torch.bfloat16) for i in range(2))
    gate, table = draw(2, 1001, heads, seed=2, dtype=torch.bfloat16), draw(500, heads * 128, seed=3)
    tokens = (torch.rand(2, 1001, device="cuda") ** 4 * 500).int()  # a few are very common
    inputs = [each.clone().requires_grad_() for each in (v, gate, table)]
    grad_buffer = torch.zeros_like(table)
    fast = torch.compile(embedding_grad.add_gated_embedding, dynamic=False, fullgraph=True)(
        inputs[0], inputs[1], inputs[2], grad_buffer, tokens
    )
    fast.backward(dy)
    exact = [each.detach().double().requires_grad_() for each in (v, gate, table.bfloat16())]
    truth = embedding_grad.reference.add_gated_rows(exact[0], exact[1], exact[2][tokens])
    truth.backward(dy.double())
    assert relative_error(fast, truth) < 0.01
    assert torch.equal(inputs[0].grad, dy)
    assert relative_error(inputs[1].grad, exact[1].grad) < 0.01
    assert relative_error(grad_buffer, exact[2].grad) < 1e-4


@functools.cache
def trained(steps, **changes):
    """Losses of a small model on one batch, and how many graphs there were after ten steps and at the end."""
    config = scale_model(4, 1000, context=512, dim=256, heads=2, kv_heads=2, short_window=128)
    backends = choose_backends(config, CUDA)
    model = build(config, CUDA, torch.bfloat16, backends, seed=3)
    recipe = Recipe(**{"fp8": "none", "inplace_embedding_grads": False, **changes})
    path = FastPath(model, resolve(recipe, config, CUDA, torch.bfloat16))
    forward = compiled(path)
    optim = replace(OptimConfig(), warmup_steps=5)
    optimizer = Optimizer(group_parameters(model.named_parameters(), optim), optim, compiled=True)
    generator = torch.Generator("cuda").manual_seed(1)
    tokens = torch.randint(0, 1000, (2, 4, 513), device="cuda", generator=generator)
    counters.clear()
    losses, graphs = [], 0
    for step in range(steps):
        seen = []
        for micro in tokens:
            loss = forward(micro[:, :-1].int(), micro[:, 1:]) / tokens[..., 1:].numel()
            loss.backward()
            seen.append(loss.detach())
        optimizer.step(schedules.scheduled_hyperparameters(step, steps, optim))
        optimizer.zero_grad()
        path.refresh()
        losses.append(torch.stack(seen).sum().item())
        if step == 9:
            graphs = counters["stats"]["unique_graphs"]
    return losses, graphs, counters["stats"]["unique_graphs"]


def test_two_hundred_steps_of_the_fast_path_reduce_the_loss_and_compile_nothing_after_ten():
    losses, early, late = trained(200, fp8="all", inplace_embedding_grads=True)
    assert early == late > 0
    assert losses[-1] < losses[0] - 2


@pytest.mark.parametrize("changes", [{"fp8": "all"}, {"inplace_embedding_grads": True}], ids=str)
def test_each_part_of_the_recipe_trains_as_bf16_does(changes):
    fast, plain = trained(30, **changes)[0], trained(30)[0]
    # Only the first steps: then rounding is amplified (Adam makes full steps of gradients that are zero at first).
    assert fast[:3] == pytest.approx(plain[:3], abs=0.03)
    assert fast[-1] == pytest.approx(plain[-1], abs=0.3)


def test_recomputed_blocks_give_the_same_in_fp8():
    ours, expected = trained(30, fp8="all")[0], trained(30, fp8="all", recompute=True)[0]
    assert ours[:3] == pytest.approx(expected[:3], abs=0.01)
