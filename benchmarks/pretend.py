"""Training on a GPU that does nothing: what it would take of one's memory, on a machine that has none.

    python benchmarks/pretend.py WORK [--depth 12] [--rows 16 32] [--gib 140]

All that the host does in a step is done: tracing, compiling by Inductor and Triton, every request for memory, the
recording of a CUDA graph. Only kernels are not run, so losses and times mean nothing. What torch then says it took at
the peak is what it says on an H200, to a hundredth of a GiB: 10.45 and 15.79 of a d12 with 16 and 32 rows.

It takes a CUDA 13 build of torch, FlashAttention-4, and gcc with nm; CUDA's own libraries stay out of it, since
pretend.c is put before them. Kernels in CuTe are not even compiled (their runtime wants a driver that answers).
WORK is a NANORUN_HOME with text and tokenizer (--data, --tokenizer), as for benchmarks/speed.py.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]
CUDA_NAME = re.compile(r"\b(cuda[A-Z]\w*|__cuda\w+|cublas\w+|cu[A-Z]\w*)\b")


def build(folder: Path, gib: float) -> Path:
    """The library, under the driver's own name, so that who asks for that finds this."""
    import torch

    packages = Path(torch.__file__).parents[1]
    headers = packages / "nvidia" / "cu13" / "include"
    more_headers = packages / "triton" / "backends" / "nvidia" / "include"  # what those include in turn
    source = (ROOT / "benchmarks" / "pretend.c").read_text()
    known = set(re.findall(r"\b(\w+)\(", source))
    wanted = set(re.findall(r"\b(cu[A-Z]\w+)\s*\(", (headers / "cuda.h").read_text()))
    wanted |= {f"{name}_v2" for name in wanted}
    for library in (Path(torch.__file__).parent / "lib").glob("lib*.so"):
        said = subprocess.run(
            ["nm", "-D", "--undefined-only", str(library)], capture_output=True, text=True, check=True
        )
        wanted |= set(CUDA_NAME.findall(said.stdout))
    rest = folder / "rest.c"
    rest.write_text("".join(f"int {name}(void) {{ return 0; }}\n" for name in sorted(wanted - known)))
    library = folder / "libcuda.so.1"
    (folder / "libcuda.so").symlink_to(library.name)
    options = ["-shared", "-fPIC", "-w", "-Wl,-soname,libcuda.so.1", f"-I{headers}", f"-I{more_headers}"]
    options += [f"-DPRETENDED_BYTES={int(gib * 2**30)}ull", "-o", str(library)]
    subprocess.run(["gcc", *options, str(ROOT / "benchmarks" / "pretend.c"), str(rest)], check=True)
    return library


def pretended(library: Path, ask: dict[str, Any]) -> dict[str, Any]:
    """One run, in a process that believes in the GPU."""
    env = {
        **os.environ,
        "LD_PRELOAD": str(library),
        "LD_LIBRARY_PATH": str(library.parent),
        "TRITON_LIBCUDA_PATH": str(library.parent),
        "CUTE_DSL_ARCH": "sm_90a",
        "QUACK_ARCH": "90",
        "QUACK_CACHE_ENABLED": "0",
        "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED": "0",
        "NANORUN_HOME": ask["work"],
    }
    command = [sys.executable, __file__, "--child", json.dumps(ask)]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    if done.returncode != 0:
        said = [line for line in done.stderr.splitlines() if line.strip()]
        sys.exit(f"With {ask['rows']} rows it failed: {said[-1] if said else 'nothing was said'}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


# In the process that believes


class Uncompiled:
    """Stands for `cute.compile`: whatever it is given becomes a kernel that can be called, and does nothing."""

    def __call__(self, *given: Any, **options: Any) -> Any:
        return lambda *arguments, **more: None

    def __getitem__(self, options: Any) -> "Uncompiled":
        return self


def child(ask: dict[str, Any]) -> dict[str, Any]:
    import cutlass.cute as cute
    import quack.cute_dsl_utils
    import quack.gemm_runtime.host
    import torch
    from speed import configured

    from nanorun.model.kernels import flash, fp8, products
    from nanorun.runs import Run
    from nanorun.train import base, loop

    cute.compile = Uncompiled()
    for module in (quack.cute_dsl_utils, quack.gemm_runtime.host):
        module.get_max_active_clusters = lambda size: 132 // size
    flash.works = lambda device, head_dim: True  # type: ignore[assignment]
    fp8.works = products.work = lambda device: True  # type: ignore[assignment]
    config, options = configured({**ask, "changes": {"options": {"device_batch": ask["rows"]}}})
    with tempfile.TemporaryDirectory() as folder:
        training = base.assemble(config, Run("pretended", Path(folder), {}, None), options, None)
        with training.loader:
            loop.train_step(training)
            loop.train_step(training)
    return {"gib": torch.cuda.max_memory_allocated() / 2**30}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("work", type=Path, metavar="WORK")
    parser.add_argument("--depth", type=int, default=12)
    parser.add_argument("--rows", type=int, nargs="+", default=[16, 32], help="rows of a micro-batch")
    parser.add_argument("--gib", type=float, default=140, help="the pretended GPU's memory")
    parser.add_argument("--data", default="shared-shared-32768")
    parser.add_argument("--tokenizer", default="shared-32768")
    parser.add_argument("--batch-tokens", type=int, default=524_288)
    args = parser.parse_args()
    import torch

    from nanorun.config import scale_model
    from nanorun.hardware import named_gpu
    from nanorun.plan.memory import memory_gb

    if torch.cuda.is_available() or not (torch.version.cuda or "").startswith("13."):
        parser.error("This is for machines without a GPU, and takes a CUDA 13 build of torch all the same.")
    for needed in ("gcc", "nm"):
        if shutil.which(needed) is None:
            parser.error(f"There is no {needed} here: install gcc and binutils.")
    for needed in ("flash_attn", "quack", "triton"):
        if find_spec(needed) is None:
            parser.error(f"{needed} is not installed: pip install 'nanorun[flash]'.")
    if not args.work.is_dir():
        parser.error(f"There is no folder {args.work}: name a NANORUN_HOME with text and a tokenizer.")
    print(f"d{args.depth}: rows, GiB estimated by plan/memory.py, GiB at the peak", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        library = build(Path(folder), args.gib)
        for rows in args.rows:
            ask = {**vars(args), "work": str(args.work), "rows": rows}
            found = pretended(library, ask)
            estimated = sum(memory_gb(scale_model(args.depth, 32_768), rows, named_gpu("h200")).values())
            print(f"{rows:>6} {estimated:>8.2f} {found['gib']:>8.2f}", flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        print(json.dumps(child(json.loads(sys.argv[2]))))
    else:
        main()
