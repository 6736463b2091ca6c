"""Settings of the machine."""

import os
import platform
import subprocess
import sys

import pytest

FREE_AND_ALLOCATE = """
import resource
import torch
from nanorun.hardware import keep_freed_memory

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(20):
        parts = [torch.ones(2**20) for _ in range(4)]  # 4 MB each
        del parts
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

faults()
usual = faults()
keep_freed_memory()
faults()
print(usual, faults())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs glibc")
def test_kept_memory_does_not_page_fault_again():
    """In a process configured to return all freed memory at first, as others do by chance."""
    done = subprocess.run(
        [sys.executable, "-c", FREE_AND_ALLOCATE],
        env={**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    usual, kept = map(int, done.stdout.split())
    assert kept < 100 < usual
