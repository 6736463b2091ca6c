"""Compiles the training kernels for an H100 or H200, without a GPU.

    python tests/model/compile_model_kernels.py --widths 768 1536

Like tests/infer/compile_for_hopper.py for decoding, with the same figures. Exits with 1 if a kernel spills registers.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "infer"))

import compile_for_hopper as hopper  # first: it turns the interpreter off
import torch
from triton.runtime.jit import JITFunction

from nanorun.config import scale_model
from nanorun.model.fast import precompile
from nanorun.model.fast.recipe import Recipe
from nanorun.model.kernels import relu2, residual_norm, rope_norm, softcap_loss


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype)


def launch_all(width: int, tokens: int = 256, vocab: int = 32_768) -> None:
    """Every kernel of a step with the whole recipe, and those of a step without some of its parts."""
    heads = width // 128
    config = scale_model(12, vocab, context=2048, dim=width, heads=heads, kv_heads=heads)
    precompile.train_one_step(precompile.smaller(config), Recipe(fp8="all"), torch.device("cpu"))
    x, u, qkv = empty(tokens, width), empty(tokens, 4 * width), empty(tokens, 3 * width)
    scalar, two = empty(1, dtype=torch.float32), empty(2, dtype=torch.float32)
    for mix in ((x, scalar, scalar), (None, None, None)):
        residual_norm.residual_norm_quantize(x, x, *mix)
    _, h_t, _ = relu2.quantize(u, two, width)
    relu2.backward(u, h_t, scalar, two, two)
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
    sys.exit("a kernel spills registers" if failed else 0)


if __name__ == "__main__":
    main()
