"""Compiles the training kernels for an H100 or H200, on a machine that needs no GPU.

    python tests/model/compile_model_kernels.py --widths 768 1536

As tests/infer/compile_for_hopper.py does for decoding, with the same figures. Exits with 1 if anything spills.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "infer"))

import compile_for_hopper as hopper  # first: it turns interpreting off
import torch
from triton.runtime.jit import JITFunction

from nanorun.model.kernels import ahead, relu2, residual_norm, rope_norm, softcap_loss


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype)


def launch_all(width: int, tokens: int = 256, vocab: int = 32_768) -> None:
    """Every kernel of a first step with all levers on, and those of a step with some of them off."""
    heads = width // 128
    ahead.kernels_task(heads, heads, 128, 2048, width, 4 * width, vocab, vocab, device="cpu")
    x, u, qkv = empty(tokens, width), empty(tokens, 4 * width), empty(tokens, 3 * width)
    scalar, two = empty(1, dtype=torch.float32), empty(2, dtype=torch.float32)
    for mixed in ((x, scalar, scalar), (None, None, None)):
        residual_norm.residual_norm_quantize(x, x, *mixed)
    _, ht, _ = relu2.quantize(u, two, width)
    relu2.backward(u, ht, scalar, two, two)
    angle, gradients = empty(2048, 64), [empty(tokens, heads, 128) for _ in "qkv"]
    rope_norm.kernel.rope_norm_forward(qkv, angle, angle, heads, heads, 1.2)
    rope_norm.kernel.rope_norm_backward(qkv, angle, angle, *gradients, heads, heads, 1.2)
    targets = empty(tokens, dtype=torch.int64)
    softcap_loss.softcap_loss(empty(tokens, vocab), targets, 15.0, vocab, True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--widths", type=int, nargs="+", default=[768])
    args = parser.parse_args()
    JITFunction.run = hopper.compile_instead
    failed = False
    for width in args.widths:
        hopper.seen.clear()
        launch_all(width)
        for name, figures in hopper.seen.values():
            shown = {k: v for k, v in figures.items() if k != "loads before wait"}
            print(f"{width:>5} {name:<24}", *(f"{v:>6} {k}" for k, v in shown.items()), flush=True)
            failed |= figures["stack"] > 0
    sys.exit("something spills" if failed else 0)


if __name__ == "__main__":
    main()
