"""Compiles the kernels of a decode step for an H100 or H200, on a machine without a GPU.

    python tests/infer/compile_for_hopper.py --depths 12 20 --batches 1 8 32 128

The step runs on meta tensors, and each launch compiles the kernel instead of running it. Prints registers, bytes
of stack (spills), shared memory and the 16-byte loads that are issued before the kernel waits for the previous
one. Exits with 1 if anything spills. The interpreter must be off: this sets TRITON_INTERPRET to 0.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "0"
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from nanorun.config import scale_model
from nanorun.infer.cache import Cache
from nanorun.infer.kernels.decode import FastDecode, tune
from nanorun.infer.kernels.elementwise import greedy_sample
from nanorun.infer.kernels.weights import DecodeWeights
from nanorun.infer.model import Matrix

META = torch.device("meta")
TOOLS = Path(triton.__file__).parent / "backends/nvidia/bin"
POINTERS = {
    torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.int8: "*i8", torch.int32: "*i32", torch.int64: "*i64",
    torch.float8_e4m3fn: "*fp8e4nv", torch.float8_e5m2: "*fp8e5",
}  # fmt: skip
seen: dict[str, tuple[str, dict[str, int]]] = {}


def compile_instead(kernel, *args, grid, warmup, num_warps=4, num_stages=3, launch_pdl=False, **constants):
    """Stands in for a launch; arguments are specialized as a launch specializes them."""
    given = dict(zip(kernel.arg_names, args, strict=False)) | constants
    signature, values, hints = {}, {}, {}
    for i, (name, parameter) in enumerate(zip(kernel.arg_names, kernel.params, strict=True)):
        value = given[name]
        if isinstance(value, torch.Tensor):
            signature[name], hints[(i,)] = POINTERS[value.dtype], [["tt.divisibility", 16]]
        elif parameter.is_constexpr or value is None or (type(value) is int and value == 1):
            signature[name], values[(i,)] = "constexpr", value
        elif type(value) is int:
            signature[name] = "i32"
            if value % 16 == 0:
                hints[(i,)] = [["tt.divisibility", 16]]
        else:
            signature[name] = "fp32"
    key = f"{kernel.fn.__name__} {signature} {values} {hints} {num_warps} {launch_pdl}"
    if key in seen:
        return
    source = ASTSource(kernel, signature=signature, constexprs=values, attrs=hints)
    options = {"num_warps": num_warps, "num_stages": num_stages, "launch_pdl": launch_pdl}
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    seen[key] = (kernel.fn.__name__, examine(compiled))


def examine(compiled) -> dict[str, int]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()

        def dump(what: str) -> str:
            command = [TOOLS / "cuobjdump", what, file.name]
            return subprocess.run(command, capture_output=True, text=True, check=True).stdout

        usage, sass = dump("-res-usage"), dump("-sass")
    registers, stack = (int(n) for n in re.search(r"REG:(\d+) STACK:(\d+)", usage).groups())
    before_wait = sass.split("ACQBULK")[0] if "ACQBULK" in sass else ""
    return {
        "registers": registers,
        "stack": stack,
        "shared": compiled.metadata.shared,
        "loads before wait": before_wait.count("LDG.E.128"),
        "loads of 16": sass.count("LDG.E.128"),
        "stores of 16": sass.count("STG.E.128"),
        "copies": sass.count("LDGSTS"),
        "tensor core": sass.count("HMMA") + sass.count("HGMMA"),
        "barriers": sass.count("BAR.SYNC"),
    }


def weights_without_data(depth: int, vocab: int, kv_heads: int | None, int8: bool) -> DecodeWeights:
    config = scale_model(depth, vocab)
    config = replace(config, kv_heads=kv_heads or config.kv_heads)
    width, hidden, kv_dim = config.dim, config.mlp_ratio * config.dim, config.kv_heads * config.head_dim

    def stack(rows: int, inputs: int) -> tuple[Matrix, ...]:
        weight = torch.empty(rows, inputs, device=META, dtype=torch.int8 if int8 else torch.bfloat16)
        return (Matrix(weight, torch.empty(rows, device=META) if int8 else None),) * depth

    def table(*shape: int) -> torch.Tensor:
        return torch.empty(shape, device=META, dtype=torch.bfloat16)

    return DecodeWeights(
        config, torch.bfloat16, table(vocab, width), table(vocab, 1),
        {i: table(vocab, kv_dim) for i in range(depth) if config.has_value_embedding(i)},
        stack(width + 2 * kv_dim + 16, width), stack(width, width), stack(hidden, width), stack(width, hidden),
        Matrix(table(vocab, width)), (1.1,) * depth, (0.1,) * depth, 0.2,
        table(config.context, config.head_dim // 2), table(config.context, config.head_dim // 2),
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--depths", type=int, nargs="+", default=[12])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32, 128])
    parser.add_argument("--kv-heads", type=int, help="fewer than heads: grouped queries")
    parser.add_argument("--int8", action="store_true")
    args = parser.parse_args()
    JITFunction.run = compile_instead
    failed = False
    for depth in args.depths:
        weights = weights_without_data(depth, 32_768, args.kv_heads, args.int8)
        config = weights.config
        for batch in args.batches:
            seen.clear()
            cache = Cache(config, batch, META, torch.bfloat16)
            rows = torch.empty(batch, device=META, dtype=torch.int32)
            tuning = replace(tune(config, batch, META, args.int8), pdl=True)
            logits = FastDecode(weights, cache, tuning)(rows, rows, rows)
            greedy_sample(logits, rows.long(), torch.zeros(5, batch, device=META, dtype=torch.long), pdl=True)
            for name, figures in seen.values():
                print(
                    f"d{depth} B{batch:<4} {name:<24}",
                    *(f"{v:>6} {k}" for k, v in figures.items()),
                    flush=True,
                )
                failed |= figures["stack"] > 0
    sys.exit("something spills" if failed else 0)


if __name__ == "__main__":
    main()
