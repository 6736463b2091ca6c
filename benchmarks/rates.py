"""The GEMMs of a d12 and the kernels around them, each measured alone, with a cold cache, by CUDA events.

    python benchmarks/speed.py WORK --parts rates

The predictions in docs/speed.md are computed from such rates (nanorun/bench/budget.py). In training, where the GPU
does not idle between kernels, they are lower.
"""

from typing import Any


def measure_rates() -> dict[str, Any]:
    """TFLOP/s of the GEMMs; microseconds and TB/s of the kernels."""
    import torch

    from nanorun.model.kernels import embedding_grad, fp8, gemm, relu2, residual_norm, rope_norm
    from nanorun.model.kernels.softcap_loss import softcap_loss, softcap_loss_fp8

    tokens, width, vocab, rows = 32_768, 768, 32_768, 8_192
    flush = torch.empty(2**27, device="cuda")  # writing 512 MiB empties the L2 cache

    def microseconds(call: Any, times: int = 8) -> float:
        call()
        measured = []
        for _ in range(times):
            flush.zero_()
            before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            before.record()
            call()
            after.record()
            torch.cuda.synchronize()
            measured.append(1e3 * before.elapsed_time(after))
        return sorted(measured)[len(measured) // 2]

    def random(*shape: int) -> Any:
        return torch.randn(shape, device="cuda").bfloat16()

    one, low, high = torch.ones(1, device="cuda"), torch.bfloat16, torch.float32
    matmuls = []
    for name, n, inputs, outputs in (
        ("qkv", tokens, width, 3 * width), ("out", tokens, width, width), ("up", tokens, width, 4 * width),
        ("down", tokens, 4 * width, width), ("head", rows, width, vocab),
    ):  # fmt: skip
        x, w, g = random(n, inputs), random(outputs, inputs), random(n, outputs)
        flops = 2 * n * inputs * outputs
        x8, w8 = x.to(fp8.E4M3), w.to(fp8.E4M3)
        xt8, wt8 = x.T.contiguous().to(fp8.E4M3), w.T.contiguous().to(fp8.E4M3)
        g8, gt8 = g.to(fp8.E5M2), g.T.contiguous().to(fp8.E5M2)
        calls: dict[str, Any] = {
            "bf16 forward": lambda x=x, w=w: x @ w.T,
            "bf16 dx": lambda g=g, w=w: g @ w,
            "bf16 dw": lambda g=g, x=x: g.T @ x,
        }
        for fast in (True, False):
            kind = "fast" if fast else "exact"
            calls |= {
                f"fp8 {kind} forward": lambda a=x8, b=w8, f=fast: fp8.scaled_mm(a, b, one, one, low, f),
                f"fp8 {kind} dx": lambda a=g8, b=wt8, f=fast: fp8.scaled_mm(a, b, one, one, low, f),
                f"fp8 {kind} dw": lambda a=gt8, b=xt8, f=fast: fp8.scaled_mm(a, b, one, one, high, f),
            }
        calls |= {
            "ping-pong forward": lambda a=x8, b=w8: gemm.gemm_fp8_pingpong(a, b, one, one),
            "ping-pong dx": lambda a=g8, b=wt8: gemm.gemm_fp8_pingpong(a, b, one, one),
        }
        row: dict[str, Any] = {"matrix": name}
        for kind, call in calls.items():
            try:
                row[kind] = round(flops / microseconds(call) / 1e6)
            except Exception as error:
                row[kind] = f"failed: {str(error)[:80]}"
        matmuls.append(row)

    x, u = random(tokens, width), random(tokens, 4 * width)
    y, g, start, first = (random(tokens, n) for n in (width, width, width, 12))
    *_, inverse = residual_norm.norm_quantize(y)
    longest = torch.full((2,), 5.0, device="cuda")
    h8, ht, unit = relu2.quantize(u, longest, width)
    x8, square = x.to(fp8.E4M3), random(width, width)
    up8, down8 = (random(*shape).to(fp8.E4M3) for shape in ((4 * width, width), (width, 4 * width)))
    parts = fp8.amax_and_row_norm(x)
    logits, targets = random(rows, vocab), torch.randint(vocab, (rows,), device="cuda")
    losses = torch.empty(rows, device="cuda")
    dz, dzt = (torch.empty(*shape, device="cuda", dtype=fp8.E5M2) for shape in ((rows, vocab), (vocab, rows)))
    narrow, wide, whole = tokens * width, 4 * tokens * width, rows * vocab
    qkv, angle, heads = random(tokens, 3 * width), random(2048, 64), width // 128
    rotary_args = (qkv, angle, angle)
    nothing = (None, None, None, heads, heads, 1.2)
    inv_rms, max_inv_rms = rope_norm.rope_norm_inplace(*rotary_args, *nothing)
    gradients = [random(tokens, heads, 128) for _ in "qkv"]
    table, picked = torch.zeros(vocab, width, device="cuda"), torch.randint(vocab, (tokens,), device="cuda")
    common = (picked.float() / vocab).pow(4).mul(vocab - 1).int()  # some tokens are frequent, as in text
    gate = random(tokens, heads)
    kernels: list[dict[str, Any]] = []
    measurements: tuple[tuple[str, float, Any], ...] = (  # name, bytes moved, the call
        ("copy", 8 * 2**26, lambda: flush[: 2**26].copy_(flush[2**26 :])),
        ("measure", 2 * narrow / fp8.kernel.amax_stride(tokens), lambda: fp8.amax_and_row_norm(x)),
        ("quantize", 4 * narrow, lambda: fp8.quantize(x, fp8.E5M2, amax=parts)),
        ("norm_quantize", 4 * narrow, lambda: residual_norm.norm_quantize(x)),
        ("stream forward", 10 * narrow, lambda: residual_norm.residual_norm_quantize(x, y, start, one, one)),
        (
            "stream forward, unmixed",
            8 * narrow,
            lambda: residual_norm.residual_norm_quantize(x, y, None, None, None),
        ),
        ("stream backward", 10 * narrow, lambda: residual_norm.backward(x, y, inverse, g, first, start, one)),
        (
            "stream backward, unmixed",
            8 * narrow,
            lambda: residual_norm.backward(x, y, inverse, g, None, None, None),
        ),
        ("relu2_quantize", 4 * wide, lambda: relu2.quantize(u, longest, width)),
        ("relu2_backward", 5 * wide, lambda: relu2.backward(u, ht, unit, parts, longest)),
        (
            "the same, h transposed as well",
            6 * wide,
            lambda: relu2.backward_with_transpose(u, h8, unit, parts, longest),
        ),
        (
            "product, then ReLU²",
            wide + narrow,
            lambda: gemm.gemm_fp8_relu2(x8, up8, one, one, longest, width),
        ),
        ("product onto the stream", 6 * narrow, lambda: gemm.gemm_bf16(x, square, y)),
        (
            "product onto the stream, mixed",
            wide + 6 * narrow,
            lambda: gemm.gemm_fp8_residual(h8, down8, one, one, x, start, one, one),
        ),
        (
            "rope_norm forward",
            8 * narrow,
            lambda: rope_norm.kernel.rope_norm_forward(*rotary_args, heads, heads, 1.2),
        ),
        ("the same in place", 8 * narrow, lambda: rope_norm.rope_norm_inplace(*rotary_args, *nothing)),
        (
            "the same, values added",
            16 * narrow,
            lambda: rope_norm.rope_norm_inplace(*rotary_args, gate, table, common, heads, heads, 1.2),
        ),
        (
            "rope_norm backward",
            16 * narrow,
            lambda: rope_norm.kernel.rope_norm_backward(*rotary_args, *gradients, heads, heads, 1.2),
        ),
        (
            "rope_norm backward_fp8",
            (16 + 6 / fp8.kernel.amax_stride(tokens)) * narrow,
            lambda: rope_norm.backward_fp8(
                qkv, inv_rms, angle, angle, *gradients, max_inv_rms, heads, heads, 1.2
            ),
        ),
        ("add_rows", 10 * narrow, lambda: embedding_grad.accumulate(table, picked, x)),
        ("add_rows, common tokens", 10 * narrow, lambda: embedding_grad.accumulate(table, common, x)),
        (
            "gated_backward, common tokens",
            14 * narrow,
            lambda: embedding_grad.gated_embedding_backward(table, gradients[0], gate, table, common),
        ),
        ("index_add_ (torch)", 18 * narrow, lambda: table.index_add_(0, picked, x.float())),
        ("softcap_loss", 4 * whole, lambda: softcap_loss(logits.clone(), targets, 15.0, vocab, True)),
        ("logits.clone", 4 * whole, lambda: logits.clone()),
        (
            "softcap_loss_fp8",
            6 * whole,
            lambda: softcap_loss_fp8(logits, targets, 15.0, vocab, losses, dz, dzt, 0),
        ),
    )
    for name, moved, call in measurements:
        try:
            us = microseconds(call)
            kernels.append({"name": name, "us": round(us, 1), "tb_s": round(moved / us / 1e6, 2)})
        except Exception as error:
            kernels.append({"name": name, "us": 0.0, "tb_s": 0.0, "failed": str(error)[:120]})
    return {"matmuls": matmuls, "kernels": kernels}
