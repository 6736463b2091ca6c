"""Packing keeps its promises for every mixture of lengths: rows are full, nothing is lost, nothing doubled."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanorun.data.packing import PackingPlan, Segments, fill, pack
from nanorun.errors import UserError

BOS = 9999
lengths_of_documents = st.lists(st.integers(1, 70), min_size=0, max_size=60)


def documents(lengths: list[int]) -> tuple[np.ndarray, Segments]:
    """Every token is its own index, so that each can be followed."""
    ends = np.cumsum(np.array(lengths, np.int64))
    return np.arange(sum(lengths), dtype=np.uint16), Segments(ends - lengths, np.array(lengths, np.int64))


def rows_of(plan: PackingPlan, tokens: np.ndarray, capacity: int) -> list[list[int]]:
    if not len(plan):
        return []
    sizes = np.diff(plan.row_ends, prepend=0)
    return fill(plan.segments, sizes, tokens, BOS, capacity)[0].tolist()


def content(segments: Segments) -> list[int]:
    spans = zip(segments.starts.tolist(), segments.lengths.tolist(), strict=True)
    return [token for start, length in spans for token in range(start, start + length)]


@given(lengths_of_documents, st.integers(1, 40), st.sampled_from(["best_fit", "stream"]))
def test_every_token_is_in_exactly_one_row_or_left_over(lengths, context, packing):
    tokens, segments = documents(lengths)
    plan = pack(segments, context, packing)
    placed = [token for row in rows_of(plan, tokens, context + 1) for token in row if token != BOS]
    assert sorted(placed + content(plan.leftover)) == tokens.tolist()
    assert plan.lost == 0


@given(lengths_of_documents, st.integers(1, 40), st.sampled_from(["best_fit", "stream"]), st.booleans())
def test_rows_begin_with_bos_and_are_full_and_the_rest_would_not_fill_one(lengths, context, packing, reuse):
    tokens, segments = documents(lengths)
    plan = pack(segments, context, packing, reuse)
    for row in rows_of(plan, tokens, context + 1):
        assert len(row) == context + 1
        assert row[0] == BOS
    assert int((plan.leftover.lengths + 1).sum()) <= context


@given(lengths_of_documents, st.integers(1, 40), st.sampled_from(["best_fit", "stream"]))
def test_without_reuse_only_cut_tails_are_lost(lengths, context, packing):
    tokens, segments = documents(lengths)
    plan = pack(segments, context, packing, reuse_tails=False)
    placed = [token for row in rows_of(plan, tokens, context + 1) for token in row if token != BOS]
    kept = placed + content(plan.leftover)
    assert len(kept) == len(set(kept))
    assert len(kept) + plan.lost == len(tokens)
    firsts = {int(start) for start in segments.starts}
    assert firsts <= set(kept) or context == 1  # a document's opening is never what is lost


@given(lengths_of_documents, st.integers(1, 40), st.sampled_from(["best_fit", "stream", "padded"]))
def test_between_two_bos_stand_consecutive_tokens_of_one_document(lengths, context, packing):
    if packing == "padded":
        lengths = [min(length, context) for length in lengths]
    tokens, segments = documents(lengths)
    owner = np.repeat(np.arange(len(lengths)), lengths)
    plan = pack(segments, context, packing)
    for row in rows_of(plan, tokens, context + 1):
        for before, after in pairwise(row):
            if before != BOS and after != BOS:
                assert after == before + 1
                assert owner[before] == owner[after]


@given(st.lists(st.integers(1, 40), max_size=60), st.integers(40, 80))
def test_padded_rows_hold_each_conversation_whole_and_none_is_all_padding(lengths, context):
    tokens, segments = documents(lengths)
    plan = pack(segments, context, "padded")
    whole = sorted(zip(plan.segments.starts.tolist(), plan.segments.lengths.tolist(), strict=True))
    assert whole == sorted(zip(segments.starts.tolist(), segments.lengths.tolist(), strict=True))
    for row in rows_of(plan, tokens, context + 1):
        assert any(token != BOS for token in row)


def test_a_conversation_longer_than_the_row_is_refused_not_cut():
    _, segments = documents([10])
    with pytest.raises(UserError, match="11 tokens does not fit a row of 10"):
        pack(segments, 9, "padded")


def test_best_fit_takes_the_largest_that_fits():
    _, segments = documents([3, 8, 5, 9])
    plan = pack(segments, 15, "best_fit")  # 16 places: 1+9 and then 1+5
    assert plan.row_segments(0, 1).lengths.tolist() == [9, 5]


def test_stream_keeps_the_order_of_documents():
    tokens, segments = documents([3, 8, 5, 9, 2])
    plan = pack(segments, 6, "stream")
    placed = [token for row in rows_of(plan, tokens, 7) for token in row if token != BOS]
    assert placed == sorted(placed)


@given(lengths_of_documents, st.integers(1, 20), st.randoms())
def test_reordering_rows_changes_their_order_and_nothing_else(lengths, context, random):
    tokens, segments = documents(lengths)
    plan = pack(segments, context, "best_fit")
    order = list(range(len(plan)))
    random.shuffle(order)
    rows = rows_of(plan, tokens, context + 1)
    assert rows_of(plan.reordered(np.array(order, np.int64)), tokens, context + 1) == [rows[i] for i in order]


def test_reuse_saves_what_cropping_loses_on_ordinary_lengths():
    lengths = (np.random.default_rng(0).lognormal(6.5, 1.2, 4000) + 1).astype(int).tolist()
    _, segments = documents(lengths)
    assert pack(segments, 2048, "best_fit").lost == 0
    lost = pack(segments, 2048, "best_fit", reuse_tails=False).lost
    assert lost > 0.15 * sum(lengths)
