"""The hardware of this machine: the device that trains, its memory, its compute dtype and its peak throughput.

`GPUS` holds published figures of common training devices, for MFU and for plans. A device that is not in it, such
as any CPU, is measured with a short matmul on request.
"""

import ctypes
import os
import platform
import re
import shutil
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from nanorun.config import Dtype
from nanorun.errors import UserError

if TYPE_CHECKING:
    import torch

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of glibc's mallopt


@dataclass(frozen=True)
class Hardware:
    device: str  # cuda, mps or cpu
    name: str
    devices: int
    memory_bytes: int  # of one device; of the machine for cpu and mps
    native_bf16: bool
    cores: int


@dataclass(frozen=True)
class Gpu:
    """Peak figures of one device, which may also be a CPU."""

    name: str
    pattern: str  # a regular expression for the name that torch reports
    bf16_tflops: float  # dense, with fp32 accumulation; fp16 where there is no bf16
    memory_gb: float  # usable, in units of 2^30 bytes, as torch and nvidia-smi report it
    bandwidth_tb_s: float | None  # None: unknown
    dollars_per_hour: float | None  # None: not for rent
    device: Literal["cuda", "mps", "cpu"] = "cuda"
    mfu: float = 0.40  # of a well-tuned run, where no measurement exists
    same_chip: str | None = None  # a GPU with other memory, whose measurements hold here as well, nearly

    @property
    def compute_bytes(self) -> int:
        """Of one activation: training is in fp32 on a CPU and on Apple's GPU (`compute_dtype`)."""
        return 2 if self.device == "cuda" else 4

    @property
    def fp8_by_default(self) -> bool:
        """Whether GEMMs run in FP8 unless configured otherwise: on the GPUs where it was measured to pay."""
        return self.name.startswith(("h100", "h200"))


# Prices are an assumption: typical on-demand prices of specialised clouds for one device, rounded. The large clouds
# charge two or three times as much, spot markets half. Patterns match the names that torch reports: whole words, so
# that GH200 does not match H200, and no laptop variants. The first match counts.
PRICES_AS_OF = "May 2026"
GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu("b200", r"B200\b", 2250, 179, 8.0, 6.00),
        Gpu("h200", r"H200\b(?! NVL)", 989, 140, 4.8, 3.80),
        Gpu("h100-pcie", r"H100 PCIe\b", 756, 80, 2.0, 2.40),
        Gpu("h100", r"H100\b(?! NVL)", 989, 80, 3.35, 3.00, same_chip="h200"),
        Gpu("a100-80", r"A100\b.*\b80GB", 312, 80, 2.04, 1.50),
        Gpu("a100-40", r"A100\b", 312, 40, 1.56, 1.30),
        Gpu("mi300x", r"MI300X\b", 1307, 192, 5.3, 3.00, mfu=0.30),
        Gpu("l40s", r"L40S\b", 362, 45, 0.86, 1.00, mfu=0.35),
        Gpu("a10g", r"A10G\b", 70, 22.5, 0.60, 1.00),
        Gpu("l4", r"L4\b", 121, 22.5, 0.30, 0.70, mfu=0.30),
        Gpu("t4", r"T4\b", 65, 15, 0.32, 0.50, mfu=0.25),
        Gpu("v100", r"V100\b", 125, 16, 0.90, 0.60, mfu=0.25),
        Gpu("rtx5090", r"RTX 5090\b(?! (D|Laptop))", 210, 32, 1.79, 0.90),
        Gpu("rtx4090", r"RTX 4090\b(?! (D|Laptop))", 165, 24, 1.01, 0.50),
        Gpu("rtx3090", r"RTX 3090\b(?! (Ti|Laptop))", 71, 24, 0.94, 0.30),
        Gpu("apple", r"Apple\b", 14, 24, 0.27, None, device="mps", mfu=0.20),  # about an M4 Pro
    )
}


def compute_dtype(machine: Hardware, requested: Dtype = "auto") -> "torch.dtype":
    """The dtype of activations: bf16 where the GPU supports it in hardware, else fp16 with loss scaling.

    CPUs compute the small models they train in fp32, which is exact and as fast; so does Apple's GPU.
    """
    import torch

    if requested != "auto":
        return {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[requested]
    if machine.device != "cuda":
        return torch.float32
    return torch.bfloat16 if machine.native_bf16 else torch.float16


def named_gpu(name: str) -> Gpu:
    """The entry for a name as users write it: 'h100', 'H100' or 'RTX 4090'."""
    plain = re.sub(r"[^a-z0-9]", "", name.lower())
    for known, gpu in GPUS.items():
        if known.replace("-", "") == plain:
            return gpu
    raise UserError(f"Unknown GPU '{name}': choose one of {', '.join(GPUS)}.")


def find_gpu(torch_name: str) -> Gpu | None:
    """The entry for the device name that torch reports, such as 'NVIDIA H100 80GB HBM3'."""
    return next((g for g in GPUS.values() if re.search(rf"\b{g.pattern}", torch_name, re.IGNORECASE)), None)


def this_gpu(seconds: float = 0.3) -> Gpu:
    """This machine's device with its actual memory; one that is not in the table is measured."""
    found = detect()
    memory_gb = found.memory_bytes / 2**30
    known = find_gpu(found.name) if found.device != "cpu" else None
    if known is None and found.device == "mps":
        known = GPUS["apple"]
    if known is not None:
        return replace(known, memory_gb=memory_gb or known.memory_gb)
    tflops = matmul_tflops(found, seconds)
    kind: Literal["cuda", "cpu"] = "cpu" if found.device == "cpu" else "cuda"
    return Gpu(found.name, re.escape(found.name), tflops, memory_gb, None, None, device=kind)


def matmul_tflops(found: Hardware, seconds: float = 0.3) -> float:
    """The best of a few large matmuls in the dtype of training, in about this many seconds."""
    import torch

    side = 512 if found.device == "cpu" else 8192
    a = torch.ones(side, side, dtype=compute_dtype(found), device=found.device)
    best, end = float("inf"), time.perf_counter() + seconds
    a @ a  # the first call also loads libraries
    while time.perf_counter() < end or best == float("inf"):
        start = time.perf_counter()
        float((a @ a)[0, 0])  # reading a value waits for the device
        best = min(best, time.perf_counter() - start)
    return 2 * side**3 / best / 1e12


def detect() -> Hardware:
    import torch

    cores = usable_cores()
    if torch.cuda.is_available():
        gpu, devices = torch.cuda.get_device_properties(0), torch.cuda.device_count()
        has_bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
        return Hardware("cuda", gpu.name, devices, gpu.total_memory, has_bf16, cores)
    if torch.backends.mps.is_available():
        return Hardware("mps", platform.processor() or "Apple GPU", 1, machine_memory(), True, cores)
    return Hardware("cpu", _cpu_name(), 1, machine_memory(), _cpu_has_bf16(), cores)


def usable_cores() -> int:
    """The cores this process may use, which in a container can be fewer than the machine has."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # macOS, Windows
        return os.cpu_count() or 1


def keep_freed_memory() -> None:
    """Makes glibc reuse freed blocks of up to 32 MB instead of returning them to the operating system.

    A step frees its tensors and the next one allocates the same sizes. If their pages are returned in between, they
    fault again: up to a thousand page faults a step and a fifth of the time, depending on the heap's layout.
    """
    if platform.libc_ver()[0] == "glibc":
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_TRIM_THRESHOLD, 2**30)
        libc.mallopt(_M_MMAP_THRESHOLD, 2**25)


def machine_memory() -> int:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return 0


def free_disk(folder: Path) -> int:
    """Free bytes on the disk of `folder`, which need not exist yet."""
    return shutil.disk_usage(next(p for p in (folder, *folder.parents) if p.exists())).free


def _cpu_name() -> str:
    named = re.search(r"^model name\s*:\s*(.*)$", _cpuinfo(), re.MULTILINE)
    return named[1] if named else platform.processor() or platform.machine()


def _cpu_has_bf16() -> bool:
    """Without these instructions bf16 on a CPU is emulated, about fifty times slower than fp32."""
    return any(flag in _cpuinfo() for flag in ("avx512_bf16", "amx_bf16"))


def _cpuinfo() -> str:
    try:
        return Path("/proc/cpuinfo").read_text()
    except OSError:
        return ""
