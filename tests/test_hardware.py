"""What is asked of the machine itself."""

import os
import platform
import subprocess
import sys

import pytest

FREED_AND_ASKED_FOR = """
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


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other allocators have other habits")
def test_memory_that_is_kept_does_not_fault_again():
    """In a process that begins by giving all of it back, which others do by chance."""
    done = subprocess.run(
        [sys.executable, "-c", FREED_AND_ASKED_FOR],
        env={**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    usual, kept = map(int, done.stdout.split())
    assert kept < 100 < usual
