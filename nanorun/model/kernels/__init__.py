"""Kernels written by hand in Triton, each with its plain PyTorch reference. Where there is no Triton, none is used."""

from importlib.util import find_spec

import torch


def kernels_run_on(device: torch.device) -> bool:
    return device.type == "cuda" and find_spec("triton") is not None
