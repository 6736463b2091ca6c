"""The loader's one promise: whatever interrupts it, the same documents come in the same order."""

import json
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nanorun.config import IGNORE
from nanorun.console import Progress
from nanorun.data import sources
from nanorun.data.add import write_dataset
from nanorun.data.bins import BinWriter, tokenize_dataset
from nanorun.data.dataset import Dataset
from nanorun.data.loader import Batch, Loader
from nanorun.data.rows import RowOrder, count_rows, shuffled
from nanorun.data.sources import BinSource, ConversationSource, open_source
from nanorun.errors import UserError
from nanorun.text.tokenizer import Tokenizer, train_tokenizer

BOS = 500


def write_bin(path: Path, lengths: list[int], first_token: int = 0) -> Path:
    writer = BinWriter(path, "train", BOS)
    tokens = (np.arange(sum(lengths)) + first_token) % BOS
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    writer.add(tokens.astype(np.uint16), offsets, [0] * len(lengths))
    (shard,) = writer.finish()
    return path / shard.file


@pytest.fixture
def small_units(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many small blocks, so that short tests cross many block boundaries."""
    monkeypatch.setattr(sources, "BIN_UNIT_TOKENS", 700)
    monkeypatch.setattr(sources, "CONVERSATION_UNIT", 5)


@pytest.fixture
def token_source(tmp_path: Path, small_units: None) -> BinSource:
    lengths = np.random.default_rng(1).geometric(0.02, 400).tolist()
    (tmp_path / "bins").mkdir()
    return BinSource([write_bin(tmp_path / "bins", lengths)], BOS)


@pytest.fixture(scope="module")
def text_home(tmp_path_factory: pytest.TempPathFactory) -> tuple[Dataset, Dataset, Tokenizer]:
    """A small dataset of text, its tokens, and the tokenizer."""
    patch = pytest.MonkeyPatch()
    patch.setenv("NANORUN_HOME", str(tmp_path_factory.mktemp("home")))
    patch.setattr("nanorun.data.dataset.ROW_GROUP_DOCUMENTS", 20)
    dice = random.Random(5)
    words = "the gull sat on a mast and ate the captain's hat while ünïcode rain fell on 1234 boats".split()
    texts = [" ".join(dice.choices(words, k=dice.randrange(1, 90))) for _ in range(500)]
    dataset = write_dataset("text", iter(texts[:450]), iter(texts[450:]), "made up", Progress("writing"))
    tokenizer = train_tokenizer(texts, 300, "small")
    tokens = tokenize_dataset(dataset, tokenizer, threads=2)
    patch.undo()
    return dataset, tokens, tokenizer


def rows(batch: Batch) -> list[tuple[list[int], list[int]]]:
    return list(zip(batch.inputs.tolist(), batch.targets.tolist(), strict=True))


def all_ranks(source, world: int, *, steps: int, state=None, **options):
    """What the ranks of one run see, put together in the order of ranks, and the state behind it."""
    loaders = [Loader(source, rank=rank, world=world, state=state, **options) for rank in range(world)]
    seen = []
    for _ in range(steps):
        for loader in loaders:
            seen += rows(next(loader))
    states = [loader.state() for loader in loaders]
    for loader in loaders:
        loader.close()
    assert all(s == states[0] for s in states), "every rank saves the same state"
    return seen, json.loads(json.dumps(states[0]))


@pytest.mark.parametrize("packing", ["best_fit", "stream"])
def test_cut_at_20_random_points_on_1_2_and_4_ranks_it_goes_on_exactly_on_another_number(
    token_source, packing
):
    options = {"rows": 8, "context": 33, "order": RowOrder(packing=packing, seed=3)}
    reference, _ = all_ranks(token_source, 1, steps=130, **options)
    dice = random.Random(0)
    for _ in range(20):
        cut, more = dice.randrange(1, 90), dice.randrange(5, 40)
        before, after = dice.sample([1, 2, 4], 2)
        seen, state = all_ranks(token_source, before, steps=cut, **options)
        rest, _ = all_ranks(token_source, after, steps=more, state=state, **options)
        assert seen + rest == reference[: (cut + more) * 8], (cut, more, before, after)


@pytest.mark.parametrize("kind", ["text", "tokens"])
def test_resuming_text_and_tokens_on_another_number_of_ranks_is_exact(text_home, kind):
    dataset, tokens, tokenizer = text_home
    source = open_source(dataset if kind == "text" else tokens, "train", tokenizer)
    options = {"rows": 4, "context": 40}
    reference, _ = all_ranks(source, 1, steps=120, **options)  # more than one epoch
    for cut, before, after in [(1, 1, 4), (50, 2, 1), (77, 4, 2)]:
        seen, state = all_ranks(source, before, steps=cut, **options)
        rest, _ = all_ranks(source, after, steps=120 - cut, state=state, **options)
        assert seen + rest == reference


def test_tokens_on_disk_are_the_documents_of_the_text(text_home):
    dataset, tokens, tokenizer = text_home
    assert tokens.total("documents") == dataset.total("documents") == 500
    assert tokens.total("text_bytes") == dataset.total("text_bytes")
    for split in ("train", "val"):
        by_kind = []
        for each in (dataset, tokens):
            source = open_source(each, split, tokenizer)
            block = source.load(range(source.units))
            spans = zip(block.documents.starts.tolist(), block.documents.lengths.tolist(), strict=True)
            by_kind.append([block.tokens[start : start + length].tolist() for start, length in spans])
        assert by_kind[0] == by_kind[1]


def test_the_order_of_rows_does_not_depend_on_the_number_of_ranks_even_an_odd_one(token_source):
    options = {"rows": 10, "context": 20, "steps": 30}
    reference, _ = all_ranks(token_source, 1, **options)
    for world in (2, 3, 4, 7):
        assert all_ranks(token_source, world, **options)[0] == reference


def test_an_epoch_trains_every_token_exactly_once(token_source):
    loader = Loader(token_source, rows=6, context=31, order=RowOrder(epochs=1))
    trained: list[int] = []
    count = 0
    for batch in loader:
        kept = batch.targets[batch.targets != IGNORE]
        trained += kept[kept != BOS].tolist()
        count += batch.trained_tokens
        assert batch.trained_tokens == int((batch.targets != IGNORE).sum())
    block = token_source.load(range(token_source.units))
    content = [
        block.tokens[s : s + n].tolist()
        for s, n in zip(block.documents.starts.tolist(), block.documents.lengths.tolist(), strict=True)
    ]
    assert sorted(trained) == sorted(token for document in content for token in document)
    assert count >= len(trained)
    loader.close()


def test_epochs_differ_in_order_and_a_seed_repeats_it(token_source):
    def order(seed: int, steps: int = 40):
        return all_ranks(token_source, 1, steps=steps, rows=4, context=30, order=RowOrder(seed=seed))[0]

    assert order(1) == order(1)
    assert order(1) != order(2)
    long = order(1, 400)
    epochs = [row for row in long if row == long[0]]
    assert len(epochs) < 4, "the second epoch must not replay the first"


def test_the_shape_may_change_at_any_step_and_nothing_is_skipped_or_repeated(token_source):
    shapes = [(4, 30)] * 3 + [(2, 64)] * 4 + [(7, 15)] * 5 + [(4, 30)] * 6 + [(1, 200)] * 3 + [(4, 30)] * 60

    def run(resume_at: int | None = None):
        seen, state = [], None
        loader = Loader(token_source, rows=4, context=30, order=RowOrder(epochs=1))
        for step, (n, context) in enumerate(shapes):
            if step == resume_at:
                state = json.loads(json.dumps(loader.state()))
                loader.close()
                loader = Loader(token_source, rows=n, context=context, order=RowOrder(epochs=1), state=state)
            loader.set_shape(n, context)
            batch = next(loader, None)
            if batch is None:
                break
            assert batch.inputs.shape == (n, context)
            seen.append(rows(batch))
        loader.set_shape(4, 30)
        seen += [rows(batch) for batch in loader]
        loader.close()
        return seen

    reference = run()
    trained = sorted(
        t for batch in reference for _, targets in batch for t in targets if t not in (IGNORE, BOS)
    )
    block = token_source.load(range(token_source.units))
    assert len(trained) == int(block.documents.lengths.sum())
    for resume_at in (1, 4, 7, 9, 12, 17, 19, 22):
        assert run(resume_at) == reference


def test_what_was_prefetched_is_not_part_of_the_state(token_source):
    eager = Loader(token_source, rows=4, context=30, ahead=16)
    lazy = Loader(token_source, rows=4, context=30, ahead=1)
    for _ in range(5):
        next(eager), next(lazy)
    assert eager.state() == lazy.state()
    eager.close()
    lazy.close()


def test_document_starts_are_where_bos_stands(token_source):
    with Loader(token_source, rows=5, context=37) as loader:
        for _ in range(20):
            batch = next(loader)
            at = torch.nonzero(batch.inputs.flatten() == BOS).flatten().tolist()
            assert batch.doc_starts.tolist() == at
            assert set(range(0, 5 * 37, 37)) <= set(at)


def test_targets_are_the_inputs_one_place_later(token_source):
    with Loader(token_source, rows=5, context=37) as loader:
        batch = next(loader)
    assert batch.inputs.dtype == torch.int32
    assert batch.targets.dtype == torch.int64
    assert batch.inputs[:, 1:].tolist() == batch.targets[:, :-1].tolist()


@settings(max_examples=30, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 300), min_size=1, max_size=40),
    context=st.integers(1, 90),
    n=st.integers(1, 5),
    cut=st.integers(0, 30),
    seed=st.integers(0, 3),
)
def test_any_small_corpus_resumes_exactly(tmp_path_factory, lengths, context, n, cut, seed):
    source = BinSource([write_bin(tmp_path_factory.mktemp("bins"), lengths)], BOS)
    options = {"rows": n, "context": context, "order": RowOrder(seed=seed)}
    reference, _ = all_ranks(source, 1, steps=cut + 8, **options)
    seen, state = all_ranks(source, 1, steps=cut, **options)
    rest, _ = all_ranks(source, n, steps=8, state=state, **options)
    assert seen + rest == reference


def test_a_corpus_shorter_than_one_row_still_trains(tmp_path):
    source = BinSource([write_bin(tmp_path, [3, 4])], BOS)
    with Loader(source, rows=2, context=64) as loader:
        batch = next(loader)
    assert sorted(set(batch.inputs.flatten().tolist())) == [*range(7), BOS]


def conversations(n: int, seed: int = 0):
    dice = random.Random(seed)
    items = []
    for i in range(n):
        length = dice.randrange(2, 40)
        ids = [BOS] + [i % BOS] * length
        mask = [0] * (1 + length // 2) + [1] * (length - length // 2)
        items.append((ids, mask))
    return items


def test_conversations_are_trained_whole_once_an_epoch_with_padding_ignored(small_units):
    items = conversations(60)
    source = ConversationSource(items, BOS, "made up")
    trained = []
    with Loader(source, rows=3, context=64, order=RowOrder(packing="padded", epochs=1)) as loader:
        for batch in loader:
            kept = batch.targets[batch.targets != IGNORE].tolist()
            assert len(kept) == batch.trained_tokens
            trained += kept
    expected = [token for ids, mask in items for token, m in zip(ids, mask, strict=True) if m]
    assert sorted(trained) == sorted(expected)


def test_conversations_resume_exactly_on_another_number_of_ranks(small_units):
    source = ConversationSource(conversations(70), BOS, "made up")
    options = {"rows": 6, "context": 50, "order": RowOrder(packing="padded", seed=4)}
    reference, _ = all_ranks(source, 1, steps=40, **options)
    for cut, before, after in [(3, 1, 2), (11, 2, 3), (25, 3, 1)]:
        seen, state = all_ranks(source, before, steps=cut, **options)
        rest, _ = all_ranks(source, after, steps=40 - cut, state=state, **options)
        assert seen + rest == reference


def test_conversations_and_text_are_not_packed_in_each_others_way(token_source):
    source = ConversationSource(conversations(20), BOS, "made up")
    for wrong, packing in ((source, "best_fit"), (token_source, "padded"), (token_source, "tight")):
        with pytest.raises(ValueError, match="pack"):
            Loader(wrong, rows=2, context=50, order=RowOrder(packing=packing))


@pytest.mark.parametrize("damage", [{"rows": -1}, {"block": 10**6}, {"taken": [[30]]}, {"carry": [["x"]]}])
def test_a_damaged_position_is_one_sentence(token_source, damage):
    with Loader(token_source, rows=4, context=30) as loader:
        next(loader)
        state = loader.state()
    state["position"].update(damage)

    def go_on():
        with Loader(token_source, rows=4, context=30, state=state) as loader:
            next(loader)

    with pytest.raises(UserError, match="saved position"):
        go_on()


def test_it_goes_on_exactly_in_another_process(text_home, tmp_path):
    dataset, _, tokenizer = text_home
    source = open_source(dataset, "train", tokenizer)
    reference, _ = all_ranks(source, 1, steps=60, rows=4, context=40)
    seen, state = all_ranks(source, 2, steps=25, rows=4, context=40)
    (tmp_path / "tokenizer").mkdir()
    tokenizer.save(tmp_path / "tokenizer")
    (tmp_path / "state.json").write_text(json.dumps(state))
    code = """if True:
        import json, sys
        from pathlib import Path
        from nanorun.data.dataset import open_dataset
        from nanorun.data.loader import Loader
        from nanorun.data.sources import open_source
        from nanorun.text.tokenizer import Tokenizer
        dataset, folder = open_dataset(sys.argv[1]), Path(sys.argv[2])
        source = open_source(dataset, "train", Tokenizer.load(folder / "tokenizer"))
        state = json.loads((folder / "state.json").read_text())
        with Loader(source, rows=4, context=40, state=state) as loader:
            for _ in range(35):
                batch = next(loader)
                print(json.dumps(list(zip(batch.inputs.tolist(), batch.targets.tolist()))))"""
    command = [sys.executable, "-c", code, str(dataset.folder), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    rest = [(row[0], row[1]) for line in done.stdout.splitlines() for row in json.loads(line)]
    assert seen + rest == reference


def test_no_row_of_an_endless_padded_loader_is_all_padding(small_units):
    source = ConversationSource(conversations(23), BOS, "made up")
    with Loader(source, rows=4, context=64, order=RowOrder(packing="padded")) as loader:
        for _ in range(50):
            assert bool((next(loader).targets != IGNORE).any(dim=1).all())


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("rows", [3, 4, 7, 64])
def test_the_last_batch_of_an_epoch_may_be_short_and_then_no_row_is_all_padding(small_units, rows, world):
    source = ConversationSource(conversations(23), BOS, "made up")
    order = RowOrder(packing="padded", epochs=1)
    trained = 0
    for rank in range(world):
        options = {"rows": rows, "context": 64, "order": order, "rank": rank, "world": world}
        with Loader(source, short_last=True, **options) as loader:
            for batch in loader:
                trained += int((batch.targets != IGNORE).sum())
                full = (batch.targets != IGNORE).any(dim=1)
                assert bool(full.all()) or (batch.inputs.size(0) == 1 and world > 1)
    assert trained == sum(sum(mask) for _, mask in source._items)
    assert count_rows(source, order, 64) == len(taken_rows(source, order))


def taken_rows(source, order) -> list[int]:
    with Loader(source, rows=1, context=64, order=order) as loader:
        return [batch.trained_tokens for batch in loader]


def test_other_data_or_another_seed_is_refused_with_what_to_do(token_source, tmp_path):
    loader = Loader(token_source, rows=4, context=30)
    next(loader)
    state = loader.state()
    loader.close()
    with pytest.raises(UserError, match="seed = 0, not 1"):
        Loader(token_source, rows=4, context=30, order=RowOrder(seed=1), state=state)
    other = BinSource([write_bin(tmp_path, [5, 6, 7])], BOS)
    with pytest.raises(UserError, match="differs from the one this run began with"):
        Loader(other, rows=4, context=30, state=state)


def test_an_error_while_loading_reaches_the_training_loop(token_source, monkeypatch):
    def fail(units):
        raise OSError("the disk went away")

    monkeypatch.setattr(token_source, "load", fail)
    with Loader(token_source, rows=4, context=30) as loader:
        for _ in range(2):
            with pytest.raises(OSError, match="the disk went away"):
                next(loader)


def test_tokens_of_another_tokenizer_are_refused(text_home):
    _, tokens, _ = text_home
    other = train_tokenizer(["abc abd abe " * 50], 266, "other")
    with pytest.raises(UserError, match="made by tokenizer 'small', not by 'other'"):
        open_source(tokens, "train", other)


def test_a_shard_that_opens_inside_a_document_and_empty_documents_are_read(tmp_path):
    path = tmp_path / "odd.bin"
    header = np.zeros(256, "<i4")
    tokens = np.array([7, 8, BOS, 1, 2, BOS, BOS, 3], "<u2")
    header[:3] = 20240520, 1, len(tokens)
    path.write_bytes(header.tobytes() + tokens.tobytes())
    block = BinSource([path], BOS).load([0])
    spans = zip(block.documents.starts.tolist(), block.documents.lengths.tolist(), strict=True)
    assert [block.tokens[s : s + n].tolist() for s, n in spans] == [[7, 8], [1, 2], [3]]


def test_a_shuffle_is_a_permutation_pinned_for_all_time():
    assert sorted(shuffled(1000, 1, 2).tolist()) == list(range(1000))
    assert shuffled(8, 0).tolist() == PINNED_SHUFFLE
    assert shuffled(50, 1, 2).tolist() != shuffled(50, 2, 1).tolist()


PINNED_SHUFFLE = [5, 7, 2, 0, 3, 1, 6, 4]
