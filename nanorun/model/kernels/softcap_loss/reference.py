"""Cross entropy of softcapped logits in plain PyTorch, differentiable by autograd."""

import torch
import torch.nn.functional as F
from torch import Tensor


def softcap_loss(logits: Tensor, targets: Tensor, softcap: float, vocab_size: int) -> Tensor:
    """The loss of each row of (n, V) logits, 0 where the target is -1."""
    capped = softcap * torch.tanh(logits[:, :vocab_size] / softcap)
    return F.cross_entropy(capped, targets, ignore_index=-1, reduction="none")
