"""What runs on a GPU gives what the plain definitions give, forward and backward."""

from dataclasses import replace

import pytest
import torch

from nanorun.config import OptimConfig, scale_model
from nanorun.model.attention import attend, choose_backends
from nanorun.model.fast.loss import fused_chunk_loss
from nanorun.model.fast.path import FastPath
from nanorun.model.fast.recipe import Recipe, resolve
from nanorun.model.gpt import build
from nanorun.model.kernels import flash, rope_norm
from nanorun.model.kernels.rope_norm.reference import rope_norm as rope_norm_reference
from nanorun.model.kernels.softcap_loss import softcap_loss
from nanorun.model.loss import chunk_loss, chunked_loss, plain_loss
from nanorun.optim import schedules
from nanorun.optim.groups import group_parameters
from nanorun.optim.optimizer import Optimizer


def leaves(*shapes, dtype, seed=0):
    dice = torch.Generator("cuda").manual_seed(seed)
    return [
        torch.randn(s, device="cuda", dtype=torch.float64, generator=dice).to(dtype).requires_grad_()
        for s in shapes
    ]


def relative_error(fast, truth):
    return ((fast.double() - truth.double()).norm() / truth.double().norm()).item()


@pytest.mark.parametrize("window", [128, 300, 1000])
@pytest.mark.parametrize("backend", ["flash", "flex", "cudnn", "sdpa"])
@pytest.mark.parametrize("kv_heads", [2, 4])
def test_attention_backends_agree_with_the_definition_in_float64(backend, window, kv_heads):
    length, dim = 1000, 128
    if backend == "cudnn" and window < length:
        pytest.skip("cuDNN takes the full window only")
    if backend == "flash" and not flash.is_supported(torch.device("cuda", 0), dim):
        pytest.skip("flash-attn-4 is not installed or does not run here")
    shapes = [(2, length, 4, dim), (2, length, kv_heads, dim), (2, length, kv_heads, dim)]
    q, k, v = leaves(*shapes, dtype=torch.bfloat16)
    exact = [x.detach().double().requires_grad_() for x in (q, k, v)]
    torch._dynamo.reset()  # it allows a piece of code eight graphs
    call = torch.compile(attend, dynamic=False, fullgraph=True) if backend in ("flex", "flash") else attend
    outs = [call(q, k, v, window, backend), attend(exact[0], exact[1], exact[2], window, "plain")]
    weight = torch.linspace(-1, 1, outs[0].numel(), device="cuda").view_as(outs[0])
    for out in outs:
        (out.double() * weight).sum().backward()
    assert relative_error(outs[0], outs[1]) < 0.01
    for fast, truth in zip((q, k, v), exact, strict=True):
        assert relative_error(fast.grad, truth.grad) < 0.02


def test_documents_are_masked_by_flex_as_by_the_definition():
    docs = torch.randint(0, 2, (2, 512), device="cuda").cumsum(1)
    q, k, v = leaves(*[(2, 512, 2, 64)] * 3, dtype=torch.float32)
    fast = torch.compile(attend, dynamic=False)(q, k, v, 200, "flex", docs)
    torch.testing.assert_close(fast, attend(q, k, v, 200, "plain", docs), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("shape", [(2, 100, 6, 6, 128), (1, 33, 4, 2, 64), (3, 17, 2, 1, 32)], ids=str)
@pytest.mark.parametrize("own_angles", [False, True])
def test_the_rope_kernel_agrees_with_float64_forward_and_backward(shape, own_angles):
    batch, time, heads, kv_heads, dim = shape
    (low,) = leaves((batch, time, (heads + 2 * kv_heads) * dim), dtype=torch.bfloat16)
    exact = low.detach().double().requires_grad_()
    angle = torch.randn(*((batch, time) if own_angles else (time,)), dim // 2, device="cuda")
    cos, sin = angle.cos().bfloat16(), angle.sin().bfloat16()
    fast = torch.compile(rope_norm.rope_norm, dynamic=False, fullgraph=True)(
        low, cos, sin, heads, kv_heads, 1.2
    )
    truth = rope_norm_reference(exact, cos.double(), sin.double(), heads, kv_heads, 1.2)
    for one, other in zip(fast, truth, strict=True):
        assert relative_error(one, other) < 5e-3
    weights = [torch.randn_like(out) for out in truth]
    for outs in (fast, truth):
        torch.stack(
            [(out.double() * weight).sum() for out, weight in zip(outs, weights, strict=True)]
        ).sum().backward()
    assert relative_error(low.grad, exact.grad) < 1e-2


@pytest.mark.parametrize("vocab", [(97, 128), (32768, 32768), (50257, 50304)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_loss_kernel_agrees_with_float64_row_by_row(vocab, dtype):
    size, padded = vocab
    logits = (torch.randn(65, padded, device="cuda") * 6).to(dtype)
    targets = torch.randint(-1, size, (65,), device="cuda")
    losses, gradient = chunk_loss(logits.double(), targets, 15.0, size, True)
    fast = softcap_loss(logits, targets, 15.0, size, True)
    rounding = 1e-5 if dtype == torch.float32 else 5e-3
    assert relative_error(fast, losses) < rounding
    assert relative_error(logits, gradient) < rounding
    assert logits[targets == -1].eq(0).all()
    assert logits[:, size:].eq(0).all()


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("rows", [1000, 4096])
def test_the_compiled_chunked_loss_agrees_with_float64(rows, fused):
    x, weight = leaves((rows, 256), (1024, 256), dtype=torch.float32)
    with torch.no_grad():
        weight *= 0.1
    targets = torch.randint(-1, 1000, (rows,), device="cuda")
    low = x.detach().bfloat16().requires_grad_()
    exact = [low.detach().double().requires_grad_(), weight.detach().double().requires_grad_()]
    fast = torch.compile(chunked_loss, dynamic=False, fullgraph=True)(
        low, weight, targets, 15.0, 1000, "sum", 512, fused_chunk_loss if fused else chunk_loss
    )
    truth = plain_loss(exact[0], exact[1], targets, 15.0, 1000)
    fast.backward()
    truth.backward()
    assert abs(fast.item() / truth.item() - 1) < 1e-3
    assert relative_error(low.grad, exact[0].grad) < 0.02
    assert relative_error(weight.grad, exact[1].grad) < 0.02


def test_the_compiled_model_trains_as_the_plain_one_does_and_never_recompiles():
    config = scale_model(4, 1000, context=512, dim=256, heads=2, kv_heads=2, short_window=128)
    device = torch.device("cuda")
    backends = choose_backends(config, device)
    tokens = torch.randint(0, 1000, (4, 513), device="cuda", generator=torch.Generator("cuda").manual_seed(1))
    losses = {}
    for kind in ("plain", "fast"):
        fast = kind == "fast"
        ways = backends if fast else ("plain",) * 4
        model = build(config, device, torch.bfloat16 if fast else torch.float32, ways, seed=3)
        path = FastPath(model, resolve(Recipe(fp8="none"), config, device, torch.bfloat16)) if fast else None
        forward = model if path is None else torch.compile(path, dynamic=False, fullgraph=True)
        optim = replace(OptimConfig(), warmup_steps=5)
        optimizer = Optimizer(group_parameters(model.named_parameters(), optim), optim, compiled=fast)
        seen = []
        if fast:
            torch._dynamo.reset()
        for step in range(20):
            loss = forward(tokens[:, :-1].int(), tokens[:, 1:]) / tokens[:, 1:].numel()
            loss.backward()
            optimizer.step(schedules.scheduled_hyperparameters(step, 20, optim))
            optimizer.zero_grad()
            if path is not None:
                path.refresh()
            seen.append(loss.item())
            if fast and step == 10:
                compiled = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        losses[kind] = seen
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == compiled
    assert losses["fast"][-1] < losses["fast"][0] - 0.5
    # Only the first steps: then rounding is amplified (Adam makes full steps of gradients that are zero at first).
    assert losses["fast"][:3] == pytest.approx(losses["plain"][:3], abs=0.02)
