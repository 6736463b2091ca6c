"""Compiles the training kernels for an H100 or H200, on a machine that needs no GPU.

    python tests/model/compile_model_kernels.py --widths 768 1536 --tokens 32768

As tests/infer/compile_for_hopper.py does for decoding, with the same figures. Exits with 1 if anything spills.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "infer"))

import compile_for_hopper as hopper  # first: it turns interpreting off
import torch
from triton.runtime.jit import JITFunction

from nanorun.model.kernels import add_rows, fp8, relu2, rope_norm, softcap_loss, stream


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, device="meta", dtype=dtype)


def launch_all(tokens: int, width: int, vocab: int = 32_768) -> None:
    """Every operator once, without data: `_init_fn` is what it runs on a device."""
    x, u, qkv = empty(tokens, width), empty(tokens, 4 * width), empty(tokens, 3 * width)
    scalar, two = empty(1, dtype=torch.float32), empty(2, dtype=torch.float32)
    for gradient in (x, qkv):
        largest = fp8.measure._init_fn(gradient)
        fp8.quantize._init_fn(gradient, largest, 0.0, fp8.E5M2)
    fp8.quantize._init_fn(x, None, width**0.5, fp8.E4M3)
    weight = empty(4 * width, width, dtype=torch.float32)
    fp8.quantize._init_fn(weight, fp8.measure._init_fn(weight), 0.0, fp8.E4M3)
    *_, inverse = fp8.norm_quantize._init_fn(x)
    first = empty(tokens, 12)
    for mixed in ((x, scalar, scalar), (None, None, None)):
        fp8.stream_norm_quantize._init_fn(x, x, *mixed)
        for dfirst in (first, None):
            stream.backward._init_fn(x, x, inverse, x, dfirst, *mixed[:2])
    _, ht, _ = relu2.quantize._init_fn(u, two, width)
    relu2.backward._init_fn(u, ht, scalar, largest, two)
    relu2.backward_turning._init_fn(u, empty(tokens, 4 * width, dtype=fp8.E4M3), scalar, largest, two)
    heads = width // 128
    angle = empty(2048, 64)
    gradients = [empty(tokens, heads, 128) for _ in "qkv"]
    rope_norm._forward._init_fn(qkv, angle, angle, heads, heads, 1.2)
    table = empty(vocab, width, dtype=torch.float32)
    gate, words = empty(tokens, heads), empty(tokens, dtype=torch.int32)
    rope_norm.turn_in_place(qkv, angle, angle, gate, table, words, heads, heads, 1.2)
    inverses, steepest = rope_norm.turn_in_place(qkv, angle, angle, None, None, None, heads, heads, 1.2)
    rope_norm._backward._init_fn(qkv, angle, angle, *gradients, heads, heads, 1.2)
    rope_norm.backward_fp8._init_fn(qkv, inverses, angle, angle, *gradients, steepest, heads, heads, 1.2)
    targets = empty(8192, dtype=torch.int64)
    both = empty(8192, vocab, dtype=fp8.E5M2), empty(vocab, 8192, dtype=fp8.E5M2)
    softcap_loss.softcap_loss_fp8._init_fn(empty(4096, vocab), targets[:4096], 15.0, vocab, *both, 4096)
    tokens_of_rows, gate = empty(16, 2048, dtype=torch.int32), empty(16, 2048, heads)
    add_rows.add_rows._init_fn(table, tokens_of_rows, empty(16, 2048, width))
    add_rows.gated_backward._init_fn(table, empty(16, 2048, heads, 128), gate, table, tokens_of_rows)
    softcap_loss.softcap_loss._init_fn(empty(8192, vocab), targets, 15.0, vocab, True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--widths", type=int, nargs="+", default=[768])
    parser.add_argument("--tokens", type=int, default=32_768)
    args = parser.parse_args()
    JITFunction.run = hopper.compile_instead
    failed = False
    for width in args.widths:
        hopper.seen.clear()
        launch_all(args.tokens, width)
        for name, figures in hopper.seen.values():
            shown = {k: v for k, v in figures.items() if k != "loads before wait"}
            print(f"{width:>5} {name:<24}", *(f"{v:>6} {k}" for k, v in shown.items()), flush=True)
            failed |= figures["stack"] > 0
    sys.exit("something spills" if failed else 0)


if __name__ == "__main__":
    main()
