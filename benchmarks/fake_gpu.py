"""Peak GPU memory of a training step on a machine without a GPU: torch runs on a fake CUDA driver.

    python benchmarks/fake_gpu.py WORK [--depth 12] [--rows 16 32] [--gib 140]

Everything that the host does in a step really happens: tracing, compilation by Inductor and Triton, every allocation,
the capture of a CUDA graph. Only kernels do not run, so losses and times mean nothing. The peak that torch reports is
the one that it reports on an H200, to a hundredth of a GiB: 10.45 and 15.79 for a d12 with 16 and 32 rows.

Requires a CUDA 13 build of torch, FlashAttention-4, and gcc with nm. fake_gpu.c is preloaded, so CUDA's own libraries
are not used. CuTe kernels are not compiled either, because their runtime needs a real driver.
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


def build_driver(folder: Path, gib: float) -> Path:
    """Compile fake_gpu.c under the name of the real driver, which torch and Triton look for.

    Every function of CUDA that they link to and fake_gpu.c does not define becomes a stub that returns 0.
    """
    import torch

    packages = Path(torch.__file__).parents[1]
    headers = packages / "nvidia" / "cu13" / "include"
    more_headers = packages / "triton" / "backends" / "nvidia" / "include"  # included by those
    source = ROOT / "benchmarks" / "fake_gpu.c"
    defined = set(re.findall(r"\b(\w+)\(", source.read_text()))
    required = set(re.findall(r"\b(cu[A-Z]\w+)\s*\(", (headers / "cuda.h").read_text()))
    required |= {f"{name}_v2" for name in required}
    for library in (Path(torch.__file__).parent / "lib").glob("lib*.so"):
        symbols = subprocess.run(
            ["nm", "-D", "--undefined-only", str(library)], capture_output=True, text=True, check=True
        )
        required |= set(CUDA_NAME.findall(symbols.stdout))
    stubs = folder / "stubs.c"
    stubs.write_text("".join(f"int {name}(void) {{ return 0; }}\n" for name in sorted(required - defined)))
    library = folder / "libcuda.so.1"
    (folder / "libcuda.so").symlink_to(library.name)
    options = ["-shared", "-fPIC", "-w", "-Wl,-soname,libcuda.so.1", f"-I{headers}", f"-I{more_headers}"]
    options += [f"-DMEMORY_BYTES={int(gib * 2**30)}ull", "-o", str(library)]
    subprocess.run(["gcc", *options, str(source), str(stubs)], check=True)
    return library


def run_child(library: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """Train two steps in a process that uses the fake driver."""
    env = {
        **os.environ,
        "LD_PRELOAD": str(library),
        "LD_LIBRARY_PATH": str(library.parent),
        "TRITON_LIBCUDA_PATH": str(library.parent),
        "CUTE_DSL_ARCH": "sm_90a",
        "QUACK_ARCH": "90",
        "QUACK_CACHE_ENABLED": "0",
        "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED": "0",
        "NANORUN_HOME": settings["work"],
    }
    command = [sys.executable, __file__, "--child", json.dumps(settings)]
    process = subprocess.run(command, env=env, capture_output=True, text=True)
    if process.returncode != 0:
        errors = [line for line in process.stderr.splitlines() if line.strip()]
        sys.exit(f"Failed with {settings['rows']} rows: {errors[-1] if errors else 'no message'}")
    result: dict[str, Any] = json.loads(process.stdout.splitlines()[-1])
    return result


# In the child process


class NoCompiler:
    """Replaces `cute.compile`: returns a kernel that does nothing."""

    def __call__(self, *args: Any, **options: Any) -> Any:
        return lambda *args, **options: None

    def __getitem__(self, options: Any) -> "NoCompiler":
        return self


def child(settings: dict[str, Any]) -> dict[str, Any]:
    import cutlass.cute as cute
    import quack.cute_dsl_utils
    import quack.gemm_runtime.host
    import torch
    from speed import configured

    from nanorun.model.kernels import flash, fp8, gemm
    from nanorun.runs import Run
    from nanorun.train import base, loop

    cute.compile = NoCompiler()
    for module in (quack.cute_dsl_utils, quack.gemm_runtime.host):
        module.get_max_active_clusters = lambda size: 132 // size
    flash.is_supported = lambda device, head_dim: True  # type: ignore[assignment]
    for module in (fp8, fp8.kernel, gemm):
        module.is_supported = lambda device: True  # type: ignore[attr-defined]
    config, options = configured({**settings, "changes": {"options": {"device_batch": settings["rows"]}}})
    with tempfile.TemporaryDirectory() as folder:
        training = base.assemble(config, Run("fake-gpu", Path(folder)), options, None)
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
    parser.add_argument("--gib", type=float, default=140, help="memory of the fake GPU")
    parser.add_argument("--data", default="shared-shared-32768")
    parser.add_argument("--tokenizer", default="shared-32768")
    parser.add_argument("--batch-tokens", type=int, default=524_288)
    args = parser.parse_args()
    import torch

    from nanorun.config import scale_model
    from nanorun.hardware import named_gpu
    from nanorun.plan.memory import memory_gb

    if torch.cuda.is_available() or not (torch.version.cuda or "").startswith("13."):
        parser.error("Requires a machine without a GPU and a CUDA 13 build of torch.")
    for program in ("gcc", "nm"):
        if shutil.which(program) is None:
            parser.error(f"{program} is not installed: install gcc and binutils.")
    for package in ("flash_attn", "quack", "triton"):
        if find_spec(package) is None:
            parser.error(f"{package} is not installed: pip install 'nanorun[flash]'.")
    if not args.work.is_dir():
        parser.error(f"No folder {args.work}: name a NANORUN_HOME with text and a tokenizer.")
    print(f"d{args.depth}: rows, GiB estimated by plan/memory.py, GiB at the peak", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        library = build_driver(Path(folder), args.gib)
        for rows in args.rows:
            result = run_child(library, {**vars(args), "work": str(args.work), "rows": rows})
            estimated = sum(memory_gb(scale_model(args.depth, 32_768), rows, named_gpu("h200")).values())
            print(f"{rows:>6} {estimated:>8.2f} {result['gib']:>8.2f}", flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        print(json.dumps(child(json.loads(sys.argv[2]))))
    else:
        main()
