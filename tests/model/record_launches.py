"""Prints which kernels a first step in FP8 launches, and which ones `precompile.train_one_step` launches.

Nothing is computed: launches are recorded, so this needs Triton but no GPU. A launch is the kernel's name and whatever
a compiled kernel depends on.
"""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from triton.runtime.jit import JITFunction

from nanorun.config import scale_model
from nanorun.model.fast import precompile
from nanorun.model.fast.path import FastPath
from nanorun.model.fast.recipe import Recipe
from nanorun.model.gpt import GPT

seen: set[str] = set()


def record(kernel, *args, grid, warmup, num_warps=4, **constants):
    given = dict(zip(kernel.arg_names, args, strict=False)) | constants
    kinds = []
    for name, parameter in zip(kernel.arg_names, kernel.params, strict=True):
        value = given[name]
        if isinstance(value, torch.Tensor):
            kinds.append(f"{value.dtype} {value.data_ptr() % 16 == 0}")
        elif parameter.is_constexpr or value is None:
            kinds.append(repr(value))
        elif isinstance(value, int):
            kinds.append(f"int {value == 1} {value % 16 == 0}")
        else:
            kinds.append(type(value).__name__)
    seen.add(f"{kernel.fn.__name__}({', '.join(kinds)}) {num_warps}")


def launched(call) -> set[str]:
    seen.clear()
    call()
    return set(seen)


def main() -> None:
    JITFunction.run = record
    step, ahead = set(), set()
    for kv_heads, vocab, rows in ((2, 512, 4), (1, 500, 2)):
        sizes = {"context": 64, "dim": 256, "heads": 2, "kv_heads": kv_heads, "short_window": 32}
        config, recipe = scale_model(12, vocab, **sizes), Recipe(fp8="all")
        tokens = torch.zeros(rows, 64, dtype=torch.int32)

        def first_step(config=config, tokens=tokens, recipe=recipe) -> None:
            model = GPT(config, dtype=torch.bfloat16)
            model.init_weights()
            (FastPath(model, recipe)(tokens, tokens.long()) / tokens.numel()).backward()

        step |= launched(first_step)
        small = precompile.smaller(config)
        ahead |= launched(
            lambda small=small, recipe=recipe: precompile.train_one_step(small, recipe, torch.device("cpu"))
        )
    print(json.dumps({"step": sorted(step), "ahead": sorted(ahead)}))


main()
