"""CORE scores what its rules say, and the fast way gives every single verdict of the slow one."""

import json
import math
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from core_worlds import (
    KnownModel,
    byte_tokenizer,
    grown_model,
    oracle,
    questions,
    small_bundle,
    task,
    write_bundle,
)

from nanorun.cli import main
from nanorun.data.bundle import open_bundle
from nanorun.errors import UserError
from nanorun.evals.core import GPT2_CORE, CoreOptions, evaluate, select_tasks
from nanorun.evals.core_models import NanorunModel
from nanorun.evals.core_prompts import EncodedTask, encode_examples, encode_task
from nanorun.evals.core_scoring import (
    correct_examples,
    group_rows,
    make_batch,
    plan_rows,
    score_one_at_a_time,
    score_tasks,
)
from nanorun.evals.core_tasks import read_examples, read_tasks
from nanorun.report.core_plot import plot_core
from nanorun.text.store import public_tokenizer

ROOT = Path(__file__).resolve().parents[2]
TOKENIZER = byte_tokenizer()
KINDS = ("multiple_choice", "schema", "language_modeling")


def bigram(row: list[int]) -> torch.Tensor:
    """After token a, token b has the logit ((7a + 3b) mod 11) / 2: anyone can work out a loss."""
    return ((7 * row[-1] + 3 * torch.arange(TOKENIZER.vocab_size)) % 11) / 2


def bigram_loss(text: str, first: int) -> float:
    """The mean loss of the bytes of `text` from the first on, by the definition."""
    ids = text.encode()
    losses = []
    for a, b in list(pairwise(ids))[first - 1 :]:
        total = sum(math.exp(((7 * a + 3 * c) % 11) / 2) for c in range(TOKENIZER.vocab_size))
        losses.append(math.log(total) - ((7 * a + 3 * b) % 11) / 2)
    return sum(losses) / len(losses)


def all_right(encoded: EncodedTask, model, batch_tokens: int = 500) -> np.ndarray:
    scores = score_tasks(model, [encoded], batch_tokens)
    return correct_examples(encoded, scores.losses, scores.is_greedy)


# The three types, by hand


def test_multiple_choice_takes_the_lowest_mean_loss_of_the_choices_own_tokens():
    pool: list[dict[str, Any]] = [{"query": "colour?", "choices": ["red", "reddish", "blue"], "gold": 0}]
    encoded = encode_examples(task("multiple_choice"), pool, 1, TOKENIZER)
    scores = score_tasks(KnownModel(TOKENIZER.vocab_size, bigram), [encoded], 100)
    shared = len("colour? ")
    expected = [bigram_loss(f"colour? {choice}", shared) for choice in pool[0]["choices"]]
    assert scores.losses == pytest.approx(expected, rel=1e-5)
    for gold in range(3):
        right = correct_examples(
            EncodedTask(**{**vars(encoded), "gold": np.array([gold])}), scores.losses, scores.is_greedy
        )
        assert right.tolist() == [gold == int(np.argmin(expected))]


def test_schema_scores_the_common_end_after_each_context():
    pool: list[dict[str, Any]] = [
        {"context_options": ["The cat", "A dog here"], "continuation": "sat.", "gold": 1}
    ]
    encoded = encode_examples(task("schema"), pool, 1, TOKENIZER)
    scores = score_tasks(KnownModel(TOKENIZER.vocab_size, bigram), [encoded], 100)
    expected = [bigram_loss(f"{c} sat.", len(c)) for c in pool[0]["context_options"]]
    assert scores.losses == pytest.approx(expected, rel=1e-5)
    right = correct_examples(encoded, scores.losses, scores.is_greedy)
    assert right.tolist() == [expected[1] < expected[0]]


def test_a_continuation_is_correct_only_if_every_token_is_the_argmax():
    then = {ord("a"): "b", ord("b"): " ", ord(" "): "c", ord("c"): "d"}

    def rule(row: list[int]) -> torch.Tensor:
        logits = torch.zeros(TOKENIZER.vocab_size)
        logits[ord(then.get(row[-1], "?"))] = 3.0
        return logits

    pool = [
        {"context": "xab", "continuation": "cd"},
        {"context": "xab", "continuation": "ce"},
        {"context": "xab", "continuation": "dd"},
    ]
    encoded = encode_examples(task("language_modeling"), pool, 3, TOKENIZER)
    assert all_right(encoded, KnownModel(TOKENIZER.vocab_size, rule)).tolist() == [True, False, False]


def test_the_first_of_equal_choices_wins():
    pool: list[dict[str, Any]] = [
        {"query": "q", "choices": ["same", "same"], "gold": gold} for gold in (0, 1)
    ]
    encoded = encode_examples(task("multiple_choice"), pool, 2, TOKENIZER)
    assert all_right(encoded, KnownModel(TOKENIZER.vocab_size, bigram)).tolist() == [True, False]


def test_a_sequence_longer_than_the_context_is_truncated_from_the_left():
    pool: list[dict[str, Any]] = [{"query": "a long question", "choices": ["yes", "no, never"], "gold": 0}]
    encoded = encode_examples(task("multiple_choice"), pool, 1, TOKENIZER)
    seen: list[list[int]] = []

    def watch(row: list[int]) -> torch.Tensor:
        seen.append(row)
        return bigram(row)

    score_tasks(KnownModel(TOKENIZER.vocab_size, watch, context=12), [encoded], 100)
    texts = {bytes(row).decode() for row in seen}  # no BOS is left, or this would fail
    whole = [f"a long question {choice}"[-12:] for choice in pool[0]["choices"]]
    assert {text for text in texts if len(text) == 11} == {text[:-1] for text in whole}


def test_a_continuation_longer_than_the_context_is_scored_after_its_first_token():
    pool: list[dict[str, Any]] = [{"context": "x", "continuation": "abcdefgh"}]
    encoded = encode_examples(task("language_modeling"), pool, 1, TOKENIZER)
    model = KnownModel(TOKENIZER.vocab_size, bigram, context=4)
    scores = score_tasks(model, [encoded], 100)
    assert scores.losses == pytest.approx([bigram_loss("efgh", 1)], rel=1e-5)


# Oracles and dice


@pytest.mark.parametrize("shots", [0, 3])
def test_an_oracle_gets_every_example_correct(shots):
    answers = [
        ("one?", " uno"), ("two?", " dos"), ("three?", " tres"), ("four?", " cuatro"), ("five?", " cinco"),
    ]  # fmt: skip
    knows = oracle(TOKENIZER, answers)
    words = [then.strip() for _, then in answers]
    asked = {
        "multiple_choice": [
            {"query": q, "choices": [words[i], words[(i + 1) % 5]], "gold": 0}
            for i, (q, _) in enumerate(answers)
        ],
        "schema": [
            {"context_options": [answers[(i + 1) % 5][0], q], "continuation": a.strip(), "gold": 1}
            for i, (q, a) in enumerate(answers)
        ],
        "language_modeling": [{"context": q, "continuation": a.strip()} for q, a in answers],
    }
    for kind in KINDS:
        encoded = encode_examples(task(kind, shots), asked[kind], 5, TOKENIZER)
        assert all_right(encoded, knows).tolist() == [True] * 5, kind


def test_a_random_model_scores_within_noise_of_chance():
    model = NanorunModel(grown_model(TOKENIZER.vocab_size, depth=1, dim=32, context=96))
    for kind, chance in (("multiple_choice", 0.25), ("schema", 0.5), ("language_modeling", 0.0)):
        encoded = encode_examples(task(kind), questions(kind, 300), 300, TOKENIZER)
        accuracy = all_right(encoded, model, 2048).mean()
        assert abs(accuracy - chance) <= 4 * math.sqrt(chance * (1 - chance) / 300), kind


# Fast and slow


@pytest.fixture(scope="module")
def mixed() -> list[EncodedTask]:
    """Every type with and without shots; some prompts longer than a context of 160."""
    made = []
    for i, kind in enumerate(KINDS):
        for shots in (0, 2, 6):
            pool = questions(kind, 9, seed=10 * i + shots)
            made.append(encode_examples(task(kind, shots, "\nAnswer: "), pool, 9, TOKENIZER))
    letters = [{"query": f"{i}?", "choices": list("ABCD"), "gold": i % 4} for i in range(9)]
    beginnings = [{"query": "q" * i, "choices": ["yes", "yes sir", "no"], "gold": i % 3} for i in range(9)]
    made += [
        encode_examples(task("multiple_choice", 1), pool, 9, TOKENIZER) for pool in (letters, beginnings)
    ]
    return made


SHAPES = {
    "grouped, windows": {},
    "full windows": {"windows": "L", "kv_heads": 4},
    "bare": {
        "value_embeddings": False, "smear": False, "backout": False, "residual_scalars": False, "softcap": 0.0,
    },
}  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("context", [160, 1024])
def test_every_example_gets_the_same_result_batched_and_one_at_a_time(mixed, shape, context):
    model = NanorunModel(grown_model(TOKENIZER.vocab_size, context=context, **SHAPES[shape]))
    slow = [score_one_at_a_time(model, task) for task in mixed]
    assert 0.2 < np.concatenate(slow).mean() < 0.6
    for model.shares_prefixes, batch_tokens in ((True, 1), (True, 3000), (True, 100_000), (False, 3000)):
        scores, at = score_tasks(model, mixed, batch_tokens), 0
        for task_of_mixed, expected in zip(mixed, slow, strict=True):
            mine = slice(at, at + len(task_of_mixed.suffix_lengths))
            fast = correct_examples(task_of_mixed, scores.losses[mine], scores.is_greedy[mine])
            assert fast.tolist() == expected.tolist()
            at = mine.stop


def test_shared_prefixes_change_no_loss(mixed):
    model = NanorunModel(grown_model(TOKENIZER.vocab_size))
    shared = score_tasks(model, mixed, 3000)
    model.shares_prefixes = False
    apart = score_tasks(model, mixed, 3000)
    assert shared.losses == pytest.approx(apart.losses, abs=2e-5)
    assert shared.tokens.sum() < 0.8 * apart.tokens.sum()


def test_batches_respect_the_token_limit_and_contain_every_target_once(mixed):
    rows = plan_rows(mixed, 160, share_prefixes=True)
    groups = group_rows(rows, 800, 60)
    batches = [make_batch(group) for group in groups]
    assert all(batch.tokens.size <= 800 or len(batch.tokens) == 1 for batch in batches)
    assert all(len(batch.targets) <= 60 or len(batch.tokens) == 1 for batch in batches)
    counts = np.bincount(np.concatenate([batch.sequences for batch in batches]))
    lengths = [np.repeat(task.prefix_lengths, task.choices) + task.suffix_lengths for task in mixed]
    whole = np.minimum(np.concatenate(lengths), 160) - 1
    assert counts.tolist() == np.minimum(np.concatenate([task.scored for task in mixed]), whole).tolist()
    assert sum((batch.branch >= 0).sum() for batch in batches) == sum(row.tokens for row in rows)


def test_letters_as_answers_are_one_row_for_all_choices():
    pool: list[dict[str, Any]] = [{"query": f"{i}?", "choices": list("ABCD"), "gold": 0} for i in range(3)]
    encoded = encode_examples(task("multiple_choice"), pool, 3, TOKENIZER)
    rows = plan_rows([encoded], 1024, share_prefixes=False)
    assert [row.tokens for row in rows] == [len("0? ") + 1] * 3
    assert make_batch(rows[:1]).logit_positions.tolist() == [3]  # one place for four targets


# The whole


def test_core_is_the_mean_of_centred_accuracies_and_every_task_is_reported(home, tmp_path):
    bundle = open_bundle(small_bundle(tmp_path / "bundle"))
    options = CoreOptions(max_per_task=8, batch_tokens=1000)
    model = NanorunModel(grown_model(TOKENIZER.vocab_size))
    result = evaluate(model, TOKENIZER, select_tasks(bundle, options), options, "mine")
    assert list(result["tasks"]) == ["choose", "choose_blind", "who", "next"]
    for label, each in result["tasks"].items():
        base = each["baseline"]
        assert each["centred"] == pytest.approx((each["accuracy"] - base) / (1 - base)), label
        assert each["standard_error"] == pytest.approx(
            math.sqrt(each["accuracy"] * (1 - each["accuracy"]) / 8)
        )
        assert (each["examples"], each["of"]) == (8, 12)
    assert result["core"] == pytest.approx(np.mean([each["centred"] for each in result["tasks"].values()]))
    assert sum(each["seconds"] for each in result["tasks"].values()) == pytest.approx(
        result["seconds"], rel=0.5, abs=0.3
    )
    assert result["gpt2"] == GPT2_CORE
    some = CoreOptions(tasks=["who", "choose"])
    part = evaluate(model, TOKENIZER, select_tasks(bundle, some), some, "mine")
    assert part["core"] is None
    assert list(part["tasks"]) == ["who", "choose"]
    json.dumps([result, part])


def test_the_plot_shows_tasks_and_gpt2_beside_the_model(home, tmp_path):
    pytest.importorskip("matplotlib")
    bundle = open_bundle(small_bundle(tmp_path / "bundle"))
    model = NanorunModel(grown_model(TOKENIZER.vocab_size))
    for options, whole in ((CoreOptions(max_per_task=4), True), (CoreOptions(tasks=["who"]), False)):
        result = evaluate(model, TOKENIZER, select_tasks(bundle, options), options, "my model")
        drawn = plot_core(result, tmp_path / "new" / "core.svg").read_text()
        assert "<!-- CORE of my model" in drawn  # matplotlib says in comments what its letters spell
        assert "<!-- who -->" in drawn
        assert ("<!-- 0.2565 -->" in drawn) == whole
    with pytest.raises(UserError, match="neither"):
        plot_core(result, tmp_path / "core.pdf")


TWO_RANKS = """
    import json, sys, torch
    sys.path.insert(0, "tests/evals")
    torch.set_num_threads(1)
    from core_worlds import byte_tokenizer, grown_model
    from pathlib import Path
    from nanorun.data.bundle import open_bundle
    from nanorun.evals.core import CoreOptions, select_tasks, evaluate, process_group
    from nanorun.evals.core_models import NanorunModel
    from nanorun.evals.core_scoring import rank_and_world
    with process_group():
        options = CoreOptions(batch_tokens=300)
        model = NanorunModel(grown_model(byte_tokenizer().vocab_size))
        chosen = select_tasks(open_bundle(Path(sys.argv[1])), options)
        result = evaluate(model, byte_tokenizer(), chosen, options, "mine")
        accuracies = {label: each["accuracy"] for label, each in result["tasks"].items()}
        path = Path(sys.argv[2]) / f"{rank_and_world()[0]}-of-{rank_and_world()[1]}.json"
        path.write_text(json.dumps([accuracies, result["core"], result["tokens"]]))
"""


def test_two_ranks_share_the_work_and_get_the_result_of_one(home, tmp_path):
    bundle = small_bundle(tmp_path / "bundle", count=20)
    script = tmp_path / "ranks.py"
    script.write_text(textwrap.dedent(TWO_RANKS))
    for world in (1, 2):
        started = [
            subprocess.Popen(
                [sys.executable, str(script), str(bundle), str(tmp_path)],
                cwd=ROOT,
                env={
                    **os.environ, "RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank),
                    "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(20_000 + os.getpid() % 20_000),
                    "PYTHONPATH": str(ROOT),
                },
            )
            for rank in range(world)
        ]  # fmt: skip
        assert [process.wait(200) for process in started] == [0] * world
    alone, first, second = (
        json.loads((tmp_path / f"{name}.json").read_text()) for name in ("0-of-1", "0-of-2", "1-of-2")
    )
    assert alone == first == second


# The real bundle


@pytest.fixture
def core_archive(shared_data: Path) -> Path:
    path = shared_data / "core.tar.xz"
    if not path.is_file():
        pytest.skip(f"no CORE bundle at {path}")
    return path


REAL = {
    "hellaswag_zeroshot": 10042, "jeopardy": 2117, "bigbench_qa_wikidata": 20321, "arc_easy": 2376,
    "arc_challenge": 1172, "copa": 100, "commonsense_qa": 1221, "piqa": 1838, "openbook_qa": 500,
    "lambada_openai": 5153, "hellaswag": 10042, "winograd": 273, "winogrande": 1267,
    "bigbench_dyck_languages": 1000, "agi_eval_lsat_ar": 230, "bigbench_cs_algorithms": 1320,
    "bigbench_operators": 210, "bigbench_repeat_copy_logic": 32, "squad": 10570, "coqa": 495, "boolq": 3270,
    "bigbench_language_identification": 10000,
}  # fmt: skip


def test_all_tasks_of_the_real_bundle_load(core_archive):
    bundle = open_bundle(core_archive)
    tasks = read_tasks(bundle)
    assert {each.label: len(read_examples(bundle, each)) for each in tasks} == REAL
    delimiters = {each.label for each in tasks if each.delimiter == "\nAnswer: "}
    assert delimiters == {"jeopardy", "arc_easy", "arc_challenge", "piqa", "boolq"}
    assert {each.delimiter for each in tasks if each.label not in delimiters} == {" "}
    assert {each.label: each.baseline for each in tasks}["commonsense_qa"] == pytest.approx(0.403)


def test_the_real_bundle_is_evaluated_fast_and_like_one_at_a_time(home, core_archive, shared_data):
    bundle = open_bundle(core_archive)
    tokenizer = public_tokenizer("gpt2", shared_data / "gpt2.tiktoken")
    model = NanorunModel(grown_model(tokenizer.vocab_size, depth=1, dim=32, context=512))
    options = CoreOptions(max_per_task=3)
    began = time.monotonic()
    result = evaluate(model, tokenizer, select_tasks(bundle, options), options, "random")
    assert time.monotonic() - began < 120
    assert list(result["tasks"]) == list(REAL)
    assert result["tasks"]["coqa"]["name"] == "coqa (stand-in)"
    assert {each["examples"] for each in result["tasks"].values()} == {3}
    for label in ("hellaswag", "winogrande", "squad", "boolq"):
        (only,) = [each for each in read_tasks(bundle) if each.label == label]
        encoded, _ = encode_task(bundle, only, tokenizer, 3)
        slow = score_one_at_a_time(model, encoded)
        assert result["tasks"][label]["accuracy"] == pytest.approx(slow.mean())


# The command line


@pytest.fixture
def nanorun(capsys: pytest.CaptureFixture[str]) -> Iterator[Callable[..., tuple[str, str]]]:
    """The command line without the time that a process takes to start: what it prints on stdout and stderr."""
    handler = signal.getsignal(signal.SIGTERM)

    def run(*args: object, code: int = 0) -> tuple[str, str]:
        capsys.readouterr()
        with pytest.raises(SystemExit) as end:
            main([str(arg) for arg in args])
        out, errors = capsys.readouterr()
        assert end.value.code == code, errors
        return out, errors

    yield run
    signal.signal(signal.SIGTERM, handler)


def test_a_trained_model_is_evaluated_from_the_command_line(home, tmp_path, nanorun):
    bundle = small_bundle(tmp_path / "bundle")
    nanorun("data", "get", "sample", "--size", "100kB")
    nanorun("tok", "train", "--vocab", "400")
    small = ["--depth", "1", "--context", "64", "--batch-tokens", "128", "--steps", "2"]
    nanorun("train", "base", *small, "--name", "tiny")
    plot, save = tmp_path / "core.png", tmp_path / "kept.json"
    shown, said = nanorun(
        "eval", "core", "--bundle", bundle, "--max-per-task", 5, "--plot", plot, "--save", save, "--json"
    )  # fmt: skip
    result = json.loads(shown.splitlines()[-1])
    assert result["model"] == "tiny"
    assert result == json.loads(save.read_text())
    assert result == json.loads((home / "runs" / "tiny" / "core-max5.json").read_text())
    assert plot.stat().st_size > 10_000
    assert f"plotted: {plot}" in said
    shown, _ = nanorun("eval", "core", "--bundle", bundle)
    assert "CORE " in shown
    assert "1.5B 0.2565" in shown
    assert "who" in nanorun("eval", "core", "--bundle", bundle, "--tasks", "who")[0]
    for args, words in (
        ([], "nanorun data get core"),
        (["--bundle", tmp_path / "none"], "There is no"),
        (["--bundle", bundle, "--tasks", "chess"], "There is no task 'chess'"),
        (["--bundle", bundle, "--tasks", ","], "--tasks names no task"),
        (["--bundle", bundle, "--model", "other"], "other"),
        (["--bundle", bundle, "--plot", "x.pdf"], "neither"),
        (["--bundle", bundle, "--hf", tmp_path, "--model", "tiny"], "give one of them"),
    ):
        out, errors = nanorun("eval", "core", *args, code=2)
        assert out == ""
        assert len(errors.strip().splitlines()) == 1
        assert words in errors


def test_a_bundle_without_a_tasks_file_names_it(tmp_path):
    about = {"icl_task_type": "schema", "num_fewshot": [0], "examples": questions("schema", 3)}
    bundle = write_bundle(tmp_path, {"here": about, "gone": about})
    (bundle / "eval_data" / "some" / "gone.jsonl").unlink()
    with pytest.raises(UserError, match="which 'gone' needs"):
        select_tasks(open_bundle(bundle), CoreOptions())
    assert len(select_tasks(open_bundle(bundle), CoreOptions(tasks=["here"]))) == 1


def test_a_model_with_non_finite_losses_gets_no_score(home, tmp_path):
    chosen = select_tasks(open_bundle(small_bundle(tmp_path / "bundle")), CoreOptions())
    broken = KnownModel(TOKENIZER.vocab_size, lambda row: torch.full((TOKENIZER.vocab_size,), math.nan))
    with pytest.raises(UserError, match="not all finite"):
        evaluate(broken, TOKENIZER, chosen, CoreOptions(), "broken")
