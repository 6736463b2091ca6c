"""Batches for a GPU wait in pinned memory and arrive unchanged while the next ones are made."""

import numpy as np
import torch

from nanorun.data.bins import BinWriter
from nanorun.data.loader import Loader
from nanorun.data.sources import BinSource


def test_pinned_batches_arrive_unchanged_by_asynchronous_copies(tmp_path):
    writer = BinWriter(tmp_path, "train", bos=5000)
    lengths = np.random.default_rng(0).geometric(0.002, 2000)
    tokens = np.random.default_rng(1).integers(0, 5000, lengths.sum()).astype(np.uint16)
    writer.add(tokens, np.concatenate([[0], np.cumsum(lengths)]), [0] * len(lengths))
    source = BinSource([tmp_path / shard.file for shard in writer.finish()], bos=5000)
    with (
        Loader(source, rows=16, context=512, pin_memory=True) as pinned,
        Loader(source, rows=16, context=512) as plain,
    ):
        for _ in range(100):
            batch, reference = next(pinned), next(plain)
            assert batch.inputs.is_pinned()
            assert batch.targets.is_pinned()
            inputs = batch.inputs.to("cuda", non_blocking=True)
            targets = batch.targets.to("cuda", non_blocking=True)
            starts = batch.doc_starts.to("cuda", non_blocking=True)
            del batch
            assert torch.equal(inputs.cpu(), reference.inputs)
            assert torch.equal(targets.cpu(), reference.targets)
            assert torch.equal(starts.cpu(), reference.doc_starts)
