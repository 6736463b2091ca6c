"""The models that CORE scores: ours, and Hugging Face's. Both return logits at the scored positions only.

Our model reads a prefix once for all its branches. The prefix uses the usual attention. Branches attend to their
prefix and to themselves, with an explicit mask: they are short, so that costs little. Everything else in the model
depends only on a token, the previous token and the position, so prefix and branches run through the trunk of
model/gpt.py together, on a copy of the model for inference (infer/model.py).

A Hugging Face model has its own forward pass; a hook selects the scored positions from the input of its head, so
that whatever the model does to its logits afterwards still applies.
"""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from nanorun.errors import UserError
from nanorun.evals.core_prompts import Encoder
from nanorun.evals.core_scoring import ScoringBatch, ScoringModel
from nanorun.infer.forward import hidden_at
from nanorun.infer.model import inference_copy
from nanorun.model.attention import attend, disable_cudnn_sdpa
from nanorun.model.gpt import GPT


class NanorunModel:
    shares_prefixes = True

    def __init__(self, model: GPT) -> None:
        self.model, self.inference_model = model, inference_copy(model)
        self.context, self.vocab_size = model.config.context, model.config.vocab_size
        self.device = self.inference_model.device

    @torch.no_grad()
    def logits(self, batch: ScoringBatch) -> Tensor:
        tokens, previous_tokens, positions, branch = _to_device(
            np.stack([batch.tokens, batch.previous, batch.positions, batch.branch]), self.device
        )
        rows, prefix = tokens.size(0), batch.prefix
        masks: dict[int, Tensor] = {}

        def attend_prefix_and_branches(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            q, k, v = (x.unflatten(0, (rows, -1)) for x in (q, k, v))  # (B, T, heads, D)
            backend, window = self.model.batch_attention.backends[layer], self.model.config.window(layer)
            out = attend(q[:, :prefix], k[:, :prefix], v[:, :prefix], min(window, prefix), backend)
            if q.size(1) > prefix:
                if window not in masks:
                    masks[window] = branch_mask(positions, branch, prefix, window)
                out = torch.cat([out, _attend_masked(q[:, prefix:], k, v, masks[window])], 1)
            return out.flatten(0, 1)

        inputs = tokens.flatten(), previous_tokens.flatten(), positions.flatten()
        x = hidden_at(self.inference_model, *inputs, attend_prefix_and_branches)
        return self.inference_model.logits_of(x[_to_device(batch.logit_positions, self.device)])

    @torch.no_grad()
    def all_logits(self, tokens: Tensor) -> Tensor:
        return self.model.logits(tokens)


def branch_mask(positions: Tensor, branch: Tensor, prefix: int, window: int) -> Tensor:
    """(B, 1, queries after the prefix, keys): the earlier tokens of the prefix and of the query's own branch."""
    query_at, key_at = positions[:, prefix:, None], positions[:, None, :]
    query_branch, key_branch = branch[:, prefix:, None], branch[:, None, :]
    in_window = (key_at <= query_at) & (key_at > query_at - window)
    return (in_window & ((key_branch == 0) | (key_branch == query_branch)))[:, None]


def _attend_masked(q_bthd: Tensor, k_bskd: Tensor, v_bskd: Tensor, mask: Tensor) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q_bthd, k_bskd, v_bskd))
    grouped = q.size(1) != k.size(1)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=grouped).transpose(1, 2)


def _to_device(values: np.ndarray, device: torch.device) -> Tensor:
    tensor = torch.from_numpy(values)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


class HuggingFaceModel:
    """A causal model of `transformers`."""

    shares_prefixes = False

    def __init__(self, model: Any, context: int) -> None:
        self.model, self.context = model, context
        self.vocab_size, self.device = int(model.config.vocab_size), model.device

    @torch.no_grad()
    def logits(self, batch: ScoringBatch) -> Tensor:
        positions = _to_device(batch.logit_positions, self.device)

        def select(module: Any, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            return inputs[0].flatten(0, 1)[positions][None], *inputs[1:]

        with self.model.get_output_embeddings().register_forward_pre_hook(select):
            return self.all_logits(_to_device(batch.tokens, self.device))[0]

    @torch.no_grad()
    def all_logits(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.model(input_ids=tokens, use_cache=False).logits
        return logits.float()


class HuggingFaceTokenizer:
    def __init__(self, tokenizer: Any, bos: int) -> None:
        self.tokenizer, self.bos = tokenizer, bos
        fast = getattr(tokenizer, "backend_tokenizer", None)
        about = fast.to_str() if fast is not None else json.dumps(sorted(tokenizer.get_vocab().items()))
        self.fingerprint = hashlib.sha256(f"{type(tokenizer).__name__} {about}".encode()).hexdigest()

    def encode_documents(self, texts: Sequence[str], threads: int = 1) -> tuple[np.ndarray, np.ndarray]:
        encoded = self.tokenizer(list(texts), add_special_tokens=False)["input_ids"]
        offsets = np.cumsum([0, *map(len, encoded)])
        return np.array([token for tokens in encoded for token in tokens], dtype=np.uint32), offsets


def open_hugging_face(folder: Path, device: torch.device, dtype: torch.dtype) -> tuple[ScoringModel, Encoder]:
    """The model and the tokenizer of a folder. Downloads nothing and runs no code from the folder."""
    try:
        from transformers import AutoModelForCausalLM, AutoTokenizer
    except ImportError as error:
        raise UserError(
            "--hf needs transformers, which is not installed: pip install transformers"
        ) from error
    if not (folder / "config.json").is_file():
        raise UserError(f"{folder} has no config.json: --hf names a folder saved by transformers.")
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        model = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True, dtype=dtype)
    except (OSError, ValueError, KeyError, ImportError, RuntimeError) as error:
        reason = " ".join(str(error).split())[:300]
        raise UserError(
            f"transformers cannot open {folder} ({reason}): give a causal model's folder."
        ) from error
    disable_cudnn_sdpa()
    candidates = (tokenizer.bos_token_id, tokenizer.cls_token_id, tokenizer.eos_token_id)
    bos = next((token for token in candidates if token is not None), None)
    if bos is None:
        raise UserError(f"The tokenizer in {folder} has no token to start a text with: set its bos_token.")
    context = getattr(model.config, "max_position_embeddings", None) or 2048
    return HuggingFaceModel(model.to(device).eval(), int(context)), HuggingFaceTokenizer(tokenizer, int(bos))
