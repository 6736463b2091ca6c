"""What scoring needs of a model: logits at the places that are asked for. Ours, and Hugging Face's.

Our model reads a trunk once for all its branches. The trunk attends as always. Branches attend to their
trunk and to themselves, under an explicit mask: they are short, so that costs little. Everything else in the
model knows only a token, the one before it and its position, so it runs over trunks and branches alike. The
trunk is that of model/gpt.py, on a frozen copy of the model (infer/frozen.py).

The head is applied to the wanted places only. A model of Hugging Face's has its own forward pass; a hook picks
the wanted states out of what its head is given, so whatever it does to the logits afterwards still happens.
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
from nanorun.infer.frozen import freeze
from nanorun.model.attention import attend, disable_cudnn_sdpa
from nanorun.model.gpt import GPT


class OurModel:
    shares_prefixes = True

    def __init__(self, model: GPT) -> None:
        self.model, self.frozen = model, freeze(model)
        self.context, self.vocab_size = model.config.context, model.config.vocab_size
        self.device = self.frozen.device

    @torch.no_grad()
    def logits(self, batch: ScoringBatch) -> Tensor:
        tokens, previous, positions, branch = _to_device(
            np.stack([batch.tokens, batch.previous, batch.positions, batch.branch]), self.device
        )
        rows, trunk = tokens.size(0), batch.prefix
        masks: dict[int, Tensor] = {}

        def look(i: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            q, k, v = (x.unflatten(0, (rows, -1)) for x in (q, k, v))  # (B, T, heads, D)
            backend, window = self.model.batch_attention.backends[i], self.model.config.window(i)
            before = [x[:, :trunk] for x in (q, k, v)]
            mixed = attend(before[0], before[1], before[2], min(window, trunk), backend)
            if q.size(1) > trunk:
                if window not in masks:
                    masks[window] = seen_by_branches(positions, branch, trunk, window)
                after = _attend_masked(q[:, trunk:], k, v, masks[window])
                mixed = torch.cat([mixed, after], 1)
            return mixed.flatten(0, 1)

        x = self.frozen.hidden_at(tokens.flatten(), previous.flatten(), positions.flatten(), look)
        return self.frozen.logits_of(x[_to_device(batch.logit_positions, self.device)])

    @torch.no_grad()
    def all_logits(self, tokens: Tensor) -> Tensor:
        return self.model.logits(tokens)


def seen_by_branches(positions: Tensor, branch: Tensor, trunk: int, window: int) -> Tensor:
    """(B, 1, queries behind the trunk, keys): the trunk's and their own branch's tokens before them."""
    at_query, at_key = positions[:, trunk:, None], positions[:, None, :]
    of_query, of_key = branch[:, trunk:, None], branch[:, None, :]
    near = (at_key <= at_query) & (at_key > at_query - window)
    return (near & ((of_key == 0) | (of_key == of_query)))[:, None]


def _attend_masked(q_bthd: Tensor, k_bskd: Tensor, v_bskd: Tensor, mask: Tensor) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q_bthd, k_bskd, v_bskd))
    grouped = q.size(1) != k.size(1)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=grouped).transpose(1, 2)


def _to_device(values: np.ndarray, device: torch.device) -> Tensor:
    tensor = torch.from_numpy(values)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


class HuggingFaceModel:
    """A causal model as `transformers` stores it: a folder with its weights and its tokenizer."""

    shares_prefixes = False

    def __init__(self, model: Any, context: int) -> None:
        self.model, self.context = model, context
        self.vocab_size, self.device = int(model.config.vocab_size), model.device

    @torch.no_grad()
    def logits(self, batch: ScoringBatch) -> Tensor:
        at = _to_device(batch.logit_positions, self.device)

        def pick(module: Any, given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            return given[0].flatten(0, 1)[at][None], *given[1:]

        hook = self.model.get_output_embeddings().register_forward_pre_hook(pick)
        try:
            tokens = _to_device(batch.tokens, self.device)
            logits: Tensor = self.model(input_ids=tokens, use_cache=False).logits[0]
            return logits.float()
        finally:
            hook.remove()

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
    """The model and the tokenizer of a folder. Nothing is downloaded, and no code from the folder is run."""
    try:
        from transformers import AutoModelForCausalLM, AutoTokenizer
    except ImportError as error:
        raise UserError(
            "--hf needs transformers, which is not installed: pip install transformers"
        ) from error
    if not (folder / "config.json").is_file():
        raise UserError(f"{folder} has no config.json: --hf names a folder that transformers has saved.")
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        model = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True, dtype=dtype)
    except (OSError, ValueError, KeyError, ImportError, RuntimeError) as error:
        reason = " ".join(str(error).split())[:300]
        raise UserError(
            f"transformers cannot open {folder} ({reason}): give a causal model's folder."
        ) from error
    disable_cudnn_sdpa()
    known = (tokenizer.bos_token_id, tokenizer.cls_token_id, tokenizer.eos_token_id)
    bos = next((token for token in known if token is not None), None)
    if bos is None:
        raise UserError(f"The tokenizer in {folder} has no token to begin a text with: give it a bos_token.")
    context = getattr(model.config, "max_position_embeddings", None) or 2048
    return HuggingFaceModel(model.to(device).eval(), int(context)), HuggingFaceTokenizer(tokenizer, int(bos))
