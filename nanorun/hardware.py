"""What this machine is: the device that trains, its memory, and what it can do. Decides, never guesses later."""

import os
import platform
import shutil
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Hardware:
    device: str  # cuda, mps or cpu
    name: str
    devices: int
    memory_bytes: int  # of one device; of the machine for cpu and mps
    native_bf16: bool
    cores: int


def detect() -> Hardware:
    import torch

    cores = usable_cores()
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        return Hardware(
            "cuda",
            properties.name,
            torch.cuda.device_count(),
            properties.total_memory,
            torch.cuda.is_bf16_supported(including_emulation=False),
            cores,
        )
    if torch.backends.mps.is_available():
        return Hardware("mps", platform.processor() or "Apple GPU", 1, machine_memory(), True, cores)
    return Hardware("cpu", _cpu_name(), 1, machine_memory(), _cpu_has_bf16(), cores)


def usable_cores() -> int:
    """The cores this process may run on, which in a container can be fewer than the machine has."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # macOS, Windows
        return os.cpu_count() or 1


def machine_memory() -> int:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return 0


def free_disk(folder: Path) -> int:
    """Bytes free where `folder` is, or will be."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return shutil.disk_usage(folder).free


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _cpu_has_bf16() -> bool:
    """Without these instructions bf16 on a CPU is emulated, about fifty times slower than fp32."""
    try:
        flags = Path("/proc/cpuinfo").read_text()
    except OSError:
        return False
    return "avx512_bf16" in flags or "amx_bf16" in flags
