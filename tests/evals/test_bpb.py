"""Bits per byte counts every byte of text once, and nothing else."""

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from nanorun.config import IGNORE
from nanorun.data.bins import BinWriter
from nanorun.data.loader import Loader
from nanorun.data.rows import RowOrder
from nanorun.data.sources import BinSource
from nanorun.errors import UserError
from nanorun.evals.bpb import evaluate_bpb
from nanorun.text.tokenizer import train_tokenizer

BOS = 500


def with_targets(targets: Tensor) -> Any:
    """A batch of which only the targets matter."""
    return SimpleNamespace(targets=targets)


@pytest.fixture
def source(tmp_path: Path) -> BinSource:
    lengths = np.random.default_rng(1).geometric(0.02, 200)
    tokens = np.random.default_rng(2).integers(0, BOS, lengths.sum()).astype(np.uint16)
    writer = BinWriter(tmp_path, "val", BOS)
    writer.add(tokens, np.concatenate([[0], np.cumsum(lengths)]), [0] * len(lengths))
    (shard,) = writer.finish()
    return BinSource([tmp_path / shard.file], BOS)


def bytes_per_token() -> Tensor:
    """Token i stands for 1 to 7 bytes; BOS and the padding behind it for none."""
    lengths = torch.arange(512, dtype=torch.int32) % 7 + 1
    lengths[BOS:] = 0
    return lengths


def loss_by_token(batch) -> Tensor:
    """A loss that depends on the target alone, and nonsense where there is none."""
    loss = 0.5 + (batch.targets * 37 % 101) / 50
    return torch.where(batch.targets == IGNORE, float("nan"), loss)


def test_a_small_case_matches_a_manual_calculation():
    # token 0: special, 1: one byte, 2: three bytes
    token_bytes = torch.tensor([0, 1, 3], dtype=torch.int32)
    batches = [
        with_targets(torch.tensor([[1, 2, 0], [2, IGNORE, IGNORE]])),
        with_targets(torch.tensor([[1, IGNORE]])),
    ]
    losses = iter([torch.tensor([[1.0, 2.0, 10.0], [3.0, 99.0, float("nan")]]), torch.tensor([[4.0, 0.0]])])
    result = evaluate_bpb(lambda batch: next(losses), batches, token_bytes)
    assert result.bytes == 1 + 3 + 3 + 1
    assert result.bpb == pytest.approx((1 + 2 + 3 + 4) / (math.log(2) * 8), rel=1e-12)
    assert (result.tokens, result.text_tokens) == (5, 4)
    assert result.loss == pytest.approx((1 + 2 + 3 + 4 + 10) / 5, rel=1e-12)


def test_a_uniform_model_needs_log2_of_the_vocabulary_for_each_token(source):
    token_bytes = bytes_per_token()
    with Loader(source, rows=4, context=64, order=RowOrder(epochs=1)) as loader:
        result = evaluate_bpb(
            lambda batch: torch.full(batch.targets.shape, math.log(512), dtype=torch.float64),
            loader,
            token_bytes,
        )
    assert result.bpb == pytest.approx(math.log2(512) * result.text_tokens / result.bytes, rel=1e-12)
    assert result.loss == pytest.approx(math.log(512), rel=1e-12)


@pytest.mark.parametrize("packing", ["best_fit", "stream"])
@pytest.mark.parametrize(("rows", "context"), [(1, 16), (3, 31), (8, 64), (5, 257)])
def test_batch_size_context_and_packing_do_not_change_the_result(source, packing, rows, context):
    token_bytes = bytes_per_token()
    block = source.load(range(source.units))
    content = np.concatenate(
        [
            block.tokens[s : s + n]
            for s, n in zip(block.documents.starts, block.documents.lengths, strict=True)
        ]
    )
    text = with_targets(torch.from_numpy(content.astype(np.int64)))
    n_bytes = int(token_bytes[text.targets].sum())
    nats = loss_by_token(text).double().sum().item()
    order = RowOrder(packing=packing, epochs=1)
    with Loader(source, rows=rows, context=context, order=order) as loader:
        result = evaluate_bpb(loss_by_token, loader, token_bytes)
    assert (result.bytes, result.text_tokens) == (n_bytes, len(content))
    assert result.bpb == pytest.approx(nats / (math.log(2) * n_bytes), rel=1e-12)


def test_three_ranks_get_the_result_of_one(source):
    token_bytes, order = bytes_per_token(), RowOrder(epochs=1)
    with Loader(source, rows=6, context=40, order=order) as loader:
        alone = evaluate_bpb(loss_by_token, loader, token_bytes)
    sums: list[Tensor] = []

    def keep(totals: Tensor) -> Tensor:
        sums.append(totals.clone())
        return totals

    for rank in range(3):
        with Loader(source, rows=6, context=40, order=order, rank=rank, world=3) as loader:
            share = evaluate_bpb(loss_by_token, loader, token_bytes, reduce=keep)
        assert share.bytes < alone.bytes
    whole = torch.stack(sums).sum(0)
    together = evaluate_bpb(loss_by_token, [], token_bytes, reduce=lambda own: own + whole)
    assert together.bpb == pytest.approx(alone.bpb, rel=1e-12)
    assert together.loss == pytest.approx(alone.loss, rel=1e-12)
    assert (together.tokens, together.bytes) == (alone.tokens, alone.bytes)


def test_characters_split_over_several_tokens_count_their_bytes_once():
    texts = ["Grüße aus 東京 🎉", "plain words and plain words"]
    tokenizer = train_tokenizer(texts, 280, "small")
    ids = [i for text in texts for i in [tokenizer.bos, *tokenizer.encode(text)]]
    batch = with_targets(torch.tensor([ids]))
    result = evaluate_bpb(
        lambda b: torch.ones(b.targets.shape), [batch], torch.from_numpy(tokenizer.token_bytes())
    )
    assert result.bytes == sum(len(text.encode()) for text in texts)
    assert result.tokens - result.text_tokens == 2


@pytest.mark.parametrize("batches", [[], [[[IGNORE, IGNORE]]], [[[BOS, IGNORE]]]])
def test_no_text_to_evaluate_is_a_user_error(batches):
    with pytest.raises(UserError, match="no text to evaluate on"):
        evaluate_bpb(loss_by_token, [with_targets(torch.tensor(b)) for b in batches], bytes_per_token())


def test_a_loss_that_is_already_a_mean_is_rejected():
    with pytest.raises(ValueError, match="one for each"):
        evaluate_bpb(
            lambda batch: torch.tensor(1.0), [with_targets(torch.tensor([[1, 2]]))], bytes_per_token()
        )
