"""Eight-bit matmuls at real shapes: against float64, compiled, odd numbers of tokens, and a run that learns."""

import functools
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from near import assert_values_are_added, normed, relative_error
from torch._dynamo.utils import counters

from nanorun.config import OptimConfig, scale_model
from nanorun.model.attention import choose_backends
from nanorun.model.compiling import compiled
from nanorun.model.fast import layers
from nanorun.model.fast.layers import ResidualStream
from nanorun.model.fast.loss import fp8_loss
from nanorun.model.fast.path import FastPath
from nanorun.model.fast.recipe import Recipe, resolve
from nanorun.model.gpt import build
from nanorun.model.kernels import embedding_grad, fp8, relu2, residual_norm
from nanorun.model.kernels.rope_norm.reference import rope_norm as rope_norm_reference
from nanorun.model.kernels.softcap_loss import softcap_loss_fp8
from nanorun.model.loss import chunk_loss, plain_loss
from nanorun.optim import schedules
from nanorun.optim.groups import group_parameters
from nanorun.optim.optimizer import Optimizer

CUDA = torch.device("cuda")


@pytest.fixture(autouse=True)
def needs_eight_bits():
    if not fp8.is_supported(torch.device("cuda", 0)):
        pytest.skip("this GPU has no 8-bit matmuls")
    torch._dynamo.reset()  # it allows a piece of code eight graphs


def draw(*shape, seed=0, size=1.0, dtype=torch.float32):
    dice = torch.Generator("cuda").manual_seed(seed)
    return (torch.randn(shape, device="cuda", generator=dice) * size).to(dtype)


def meant(q, unit):
    return q.double() * unit.double()


def copied(*weights):
    copies = fp8.Fp8Weight(sum(w.shape[0] for w in weights), weights[0].shape[1]).cuda()
    copies.requantize(*weights)
    return copies


SHAPES = [(4096, 768), (1000, 768), (33, 1280), (2049, 1536), (1, 16)]


def test_a_row_far_larger_than_all_that_were_looked_at_is_clipped_and_no_other_suffers():
    x = draw(40_000, 64, dtype=torch.bfloat16)
    x[12_345] *= 1e6
    q, qt, unit = fp8.quantize(x, fp8.amax_and_row_norm(x), 0.0, fp8.E5M2)
    assert q.float().isfinite().all()
    assert torch.equal(qt[:, :40_000].float(), q.float().T)
    clipped, others = meant(q, unit)[12_345], torch.arange(40_000, device="cuda") != 12_345
    assert clipped.abs().max() >= 16 * x[::8].abs().max().double()
    assert clipped.sign().equal(x[12_345].double().sign())
    assert relative_error(meant(q, unit)[others], x[others].double()) < 0.06


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_what_is_quantized_on_the_gpu_is_what_torch_casts_both_ways(shape):
    for dtype in (fp8.E4M3, fp8.E5M2):
        x = draw(*shape, size=3e-5, dtype=torch.bfloat16)
        q, qt, unit = fp8.quantize(x, fp8.amax_and_row_norm(x), 0.0, dtype)
        assert torch.equal(q.float(), (x.float() / unit).to(dtype).float())
        assert torch.equal(qt[:, : shape[0]].float(), q.float().T)
        assert qt[:, shape[0] :].float().eq(0).all()
    q, qt, unit, _ = residual_norm.norm_quantize(draw(*shape, size=9.0, dtype=torch.bfloat16))
    assert (
        relative_error(meant(q, unit), normed(draw(*shape, size=9.0, dtype=torch.bfloat16).double())) < 0.035
    )
    assert torch.equal(qt[:, : shape[0]].float(), q.float().T)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_no_number_is_not_hidden(bad):
    x = draw(100, 64)
    x[50, 3] = bad
    q, _, unit = fp8.quantize(x, fp8.amax_and_row_norm(x), 0.0, fp8.E5M2)
    assert not meant(q, unit).isfinite().all()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_compiled_mlp_agrees_with_float64_forward_and_backward(shape):
    rows, width = shape
    x = draw(1, rows, width, size=3.0, dtype=torch.bfloat16).requires_grad_()
    up = draw(4 * width, width, seed=1, size=width**-0.5).requires_grad_()
    down = draw(width, 4 * width, seed=2, size=0.02).requires_grad_()
    above = draw(1, rows, width, seed=3, size=1e-7)
    norm_mlp = torch.compile(layers.norm_mlp, dynamic=False, fullgraph=True)
    fast = norm_mlp(ResidualStream(x), copied(up), copied(down), up, down, False, None).delta
    (fast.float() * above).sum().backward()
    exact = [t.detach().double().requires_grad_() for t in (x, up, down)]
    truth = F.linear(F.relu(F.linear(normed(exact[0]), exact[1])).square(), exact[2])
    (truth * above).sum().backward()
    assert relative_error(fast, truth) < 0.08
    for one, other in zip((x, up, down), exact, strict=True):
        assert relative_error(one.grad, other.grad) < 0.13


@pytest.mark.parametrize("shape", [(2, 1000, 6, 6, 128), (1, 33, 4, 2, 64), (16, 2048, 6, 6, 128)], ids=str)
@pytest.mark.parametrize("own_angles", [False, True])
def test_compiled_eight_bit_heads_agree_with_float64(shape, own_angles):
    batch, time, heads, kv_heads, dim = shape
    width = heads * dim
    x = draw(batch, time, width, dtype=torch.bfloat16, size=3.0).requires_grad_()
    sizes = (width, kv_heads * dim, kv_heads * dim)
    weights = [draw(n, width, seed=i, size=width**-0.5).requires_grad_() for i, n in enumerate(sizes)]
    angle = draw(*((batch, time) if own_angles else (time,)), dim // 2, seed=7)
    cos, sin = angle.cos().bfloat16(), angle.sin().bfloat16()
    _, *fast = torch.compile(layers.norm_qkv_rope, dynamic=False, fullgraph=True)(
        ResidualStream(x), copied(*weights), weights, 12, cos, sin, heads, kv_heads, 1.2
    )
    exact = [t.detach().double().requires_grad_() for t in (x, *weights)]
    n = normed(exact[0])
    mixed = F.linear(n, torch.cat(exact[1:]))
    truth = (*rope_norm_reference(mixed, cos.double(), sin.double(), heads, kv_heads, 1.2), n[..., :12])
    above = [draw(*out.shape, seed=i, size=1e-7) for i, out in enumerate(truth)]
    for outs in (fast, truth):
        sum((out.double() * weight).sum() for out, weight in zip(outs, above, strict=True)).backward()
    for one, other in zip(fast, truth, strict=True):
        assert relative_error(one, other) < 0.06
    for one, other in zip((x, *weights), exact, strict=True):
        assert relative_error(one.grad, other.grad) < 0.12


@pytest.mark.parametrize("shape", [(2, 1000, 6, 6, 128), (1, 33, 4, 2, 64), (16, 2048, 6, 6, 128)], ids=str)
def test_values_added_on_the_way_agree_with_float64_when_compiled(shape):
    compiled_heads = torch.compile(layers.norm_qkv_rope, dynamic=False, fullgraph=True)
    assert_values_are_added(compiled_heads, draw, copied, shape)


@pytest.mark.parametrize("vocab", [(97, 128), (32768, 32768), (50257, 50304)], ids=str)
@pytest.mark.parametrize("rows", [65, 1024])
def test_the_gradient_of_logits_in_eight_bits_agrees_with_float64(vocab, rows):
    size, padded = vocab
    logits = draw(rows, padded, size=6.0, dtype=torch.bfloat16)
    targets = torch.randint(-1, size, (rows,), device="cuda")
    losses, gradient = chunk_loss(logits.double(), targets, 15.0, size, True)
    q = torch.empty(rows, padded, device="cuda", dtype=fp8.E5M2)
    qt = torch.empty(padded, fp8.padded(rows), device="cuda", dtype=fp8.E5M2)
    fast = torch.empty(logits.shape[0], device="cuda")
    unit = softcap_loss_fp8(logits, targets, 15.0, size, fast, q, qt, 0)
    assert relative_error(fast, losses) < 5e-3
    assert relative_error(meant(q, unit), gradient) < 0.08
    assert torch.equal(qt[:, :rows].float(), q.float().T)
    assert qt[:, rows:].float().eq(0).all()


@pytest.mark.parametrize("rows", [1000, 4096])
def test_the_compiled_loss_with_its_head_in_eight_bits_agrees_with_float64(rows):
    x = normed(draw(rows, 256)).bfloat16().requires_grad_()
    weight = draw(1024, 256, seed=1, size=0.1).requires_grad_()
    targets = torch.randint(-1, 1000, (rows,), device="cuda")
    exact = [x.detach().double().requires_grad_(), weight.detach().double().requires_grad_()]
    fast = torch.compile(fp8_loss, dynamic=False, fullgraph=True)(
        x, weight, targets, copied(weight), 15.0, 1000, False
    )
    truth = plain_loss(exact[0], exact[1], targets, 15.0, 1000)
    fast.backward()
    truth.backward()
    assert abs(fast.item() / truth.item() - 1) < 2e-3
    assert relative_error(x.grad, exact[0].grad) < 0.1
    assert relative_error(weight.grad, exact[1].grad) < 0.1


@pytest.mark.parametrize("width", [128, 768, 1536])
def test_rows_are_added_into_a_table_s_gradient(width):
    rows = draw(3, 1001, width, dtype=torch.bfloat16)
    tokens = (torch.rand(3, 1001, device="cuda") ** 4 * 500).int()  # a few are very common
    sums = draw(500, width, seed=1)
    truth = embedding_grad.reference.accumulate(sums.double(), tokens, rows)
    embedding_grad.accumulate(sums, tokens, rows)
    torch.testing.assert_close(sums.double(), truth, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("shape", [(1, 64), (1001, 768), (32_768, 3072)], ids=str)
def test_a_hidden_layer_turned_on_the_way_gives_the_same_gradient(shape):
    h, ht, unit = relu2.quantize(draw(*shape, dtype=torch.bfloat16), torch.full((2,), 3.0).cuda(), 64)
    dh = draw(*shape, seed=1, size=1e-4, dtype=torch.bfloat16)
    lengths = fp8.amax_and_row_norm(dh), torch.full((2,), 3.0).cuda()
    turned = (*relu2.backward(dh, ht, unit, *lengths), ht)
    turning = relu2.backward_with_transpose(dh, h, unit, *lengths)
    for one, other in zip(turning, turned, strict=True):
        assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))


@pytest.mark.parametrize("heads", [1, 6, 12])
def test_values_through_a_gate_learn_as_the_plain_sum_does(heads):
    v, dy = (draw(2, 1001, heads, 128, seed=i, dtype=torch.bfloat16) for i in range(2))
    gate, table = draw(2, 1001, heads, seed=2, dtype=torch.bfloat16), draw(500, heads * 128, seed=3)
    tokens = (torch.rand(2, 1001, device="cuda") ** 4 * 500).int()  # a few are very common
    given = [each.clone().requires_grad_() for each in (v, gate, table)]
    sums = torch.zeros_like(table)
    fast = torch.compile(embedding_grad.add_gated_embedding, dynamic=False, fullgraph=True)(
        *given, sums, tokens
    )
    fast.backward(dy)
    exact = [each.detach().double().requires_grad_() for each in (v, gate, table.bfloat16())]
    truth = embedding_grad.reference.add_gated_rows(exact[0], exact[1], exact[2][tokens])
    truth.backward(dy.double())
    assert relative_error(fast, truth) < 0.01
    assert torch.equal(given[0].grad, dy)
    assert relative_error(given[1].grad, exact[1].grad) < 0.01
    assert relative_error(sums, exact[2].grad) < 1e-4


@functools.cache
def trained(steps, **changes):
    """Losses of a small model on one batch, and how many graphs there were after ten steps and at the end."""
    config = scale_model(4, 1000, context=512, dim=256, heads=2, kv_heads=2, short_window=128)
    backends = choose_backends(config, CUDA)
    model = build(config, CUDA, torch.bfloat16, backends, seed=3)
    recipe = Recipe(**{"fp8": "none", "sparse_tables": False, **changes})
    path = FastPath(model, resolve(recipe, config, CUDA, torch.bfloat16))
    forward = compiled(path)
    optim = replace(OptimConfig(), warmup_steps=5)
    optimizer = Optimizer(group_parameters(model.named_parameters(), optim), optim, compiled=True)
    dice = torch.Generator("cuda").manual_seed(1)
    tokens = torch.randint(0, 1000, (2, 4, 513), device="cuda", generator=dice)
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


def test_two_hundred_steps_with_every_fast_path_learn_and_compile_nothing_after_ten():
    losses, early, late = trained(200, fp8="all", sparse_tables=True)
    assert early == late > 0
    assert losses[-1] < losses[0] - 2


@pytest.mark.parametrize("changes", [{"fp8": "all"}, {"sparse_tables": True}], ids=str)
def test_a_fast_path_learns_as_bf16_does(changes):
    fast, plain = trained(30, **changes)[0], trained(30)[0]
    # Only the first steps: then rounding is amplified (Adam makes full steps of gradients that are zero at first).
    assert fast[:3] == pytest.approx(plain[:3], abs=0.03)
    assert fast[-1] == pytest.approx(plain[-1], abs=0.3)


def test_recomputed_blocks_give_the_same_in_eight_bits():
    one, other = trained(30, fp8="all")[0], trained(30, fp8="all", recompute=True)[0]
    assert one[:3] == pytest.approx(other[:3], abs=0.01)
