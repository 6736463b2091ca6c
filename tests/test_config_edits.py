"""Hand edits of config.json: each is one sentence that names the file and the value, in every command that reads it."""

import json
from pathlib import Path

import pytest

from nanorun import run_list, runs
from nanorun.config import scale
from nanorun.errors import UserError
from nanorun.infer.load import load_model
from nanorun.runs import Run

DEEP = json.loads("[" * 50 + "]" * 50)

# (the part, the field, its new value, what the sentence says)
EDITS = [
    ("model", "depth", 0, "depth is 0: it must be from 1 to 1,024"),
    ("model", "depth", -4, "depth is -4"),
    ("model", "depth", 10**9, "depth is 1000000000"),
    ("model", "depth", 2.5, "depth is 2.5: it must be a whole number"),
    ("model", "depth", "4", 'depth is "4": it must be a whole number'),
    ("model", "depth", None, "depth is null"),
    ("model", "depth", True, "depth is true"),
    ("model", "dim", 0, "dim is 0"),
    ("model", "dim", 10**30, "dim is 1000000000000000000000000000000"),
    ("model", "dim", [256], "dim is [256]"),
    ("model", "dim", 250, "do not divide a width of 250"),
    ("model", "heads", 0, "heads is 0"),
    ("model", "heads", 3, "3 heads"),
    ("model", "kv_heads", -1, "kv_heads is -1"),
    ("model", "kv_heads", 5, "5 kv heads"),
    ("model", "vocab_size", 1, "vocab_size is 1"),
    ("model", "vocab_size", 2**40, "vocab_size is 1099511627776"),
    ("model", "context", 1, "context is 1"),
    ("model", "context", 2**40, "context is 1099511627776"),
    ("model", "windows", "", "windows is ''"),
    ("model", "windows", "SXL", "windows is 'SXL'"),
    ("model", "windows", 5, "windows is 5: it must be text"),
    ("model", "short_window", 0, "short_window is 0"),
    ("model", "short_window", -128, "short_window is -128"),
    ("model", "mlp_ratio", 0, "mlp_ratio is 0"),
    ("model", "rope_base", 0, "rope_base is 0"),
    ("model", "rope_base", -1e5, "rope_base is -100000.0"),
    ("model", "qk_gain", 0, "qk_gain is 0"),
    ("model", "qk_gain", float("nan"), "qk_gain is NaN"),
    ("model", "softcap", -15.0, "softcap is -15.0: it must be from 0 to"),
    ("model", "softcap", float("inf"), "softcap is Infinity"),
    ("model", "smear", "yes", 'smear is "yes": it must be true or false'),
    ("model", "new_idea", 1, "does not know: new_idea"),
    ("optim", "matrix_lr", -0.02, "matrix_lr is -0.02: it must be from 0"),
    ("optim", "embedding_lr", -1, "embedding_lr is -1"),
    ("optim", "head_lr", 1e300, "head_lr is 1e+300"),
    ("optim", "mu_lr", None, "mu_lr is null"),
    ("optim", "matrix_weight_decay", -0.1, "matrix_weight_decay is -0.1"),
    ("optim", "beta2", 1.5, "beta2 is 1.5"),
    ("optim", "max_grad_norm", -1.0, "max_grad_norm is -1.0"),
    ("optim", "max_grad_norm", 0, "max_grad_norm is 0"),
    ("optim", "clip", -1.0, "max_grad_norm is -1.0"),  # as earlier versions named it
    ("optim", "warmup_steps", -1, "warmup_steps is -1"),
    ("optim", "warmdown", 2.0, "warmdown is 2.0"),
    ("optim", "final_lr_fraction", -0.5, "final_lr_fraction is -0.5"),
    ("optim", "orthogonalize", "qr", 'orthogonalize is "qr": choose among'),
    ("optim", "orthogonalize", ["qr"], "orthogonalize is"),
    ("optim", "normuon", 1, "normuon is 1"),
    ("train", "steps", 0, "steps is 0"),
    ("train", "steps", -5, "steps is -5"),
    ("train", "steps", 10**12, "steps is 1000000000000"),
    ("train", "batch_tokens", 0, "batch_tokens is 0"),
    ("train", "batch_tokens", "many", "batch_tokens is"),
    ("train", "minutes", -1.0, "minutes is -1.0"),
    ("train", "seed", -1, "seed is -1"),
    ("train", "seed", 2**64, "seed is 18446744073709551616"),
    ("train", "eval_every", -1, "eval_every is -1"),
    ("train", "eval_tokens", 0, "eval_tokens is 0"),
    ("train", "save_every", 0, "save_every is 0"),
    ("train", "save_minutes", -1, "save_minutes is -1"),
    ("train", "keep_checkpoints", 0, "keep_checkpoints is 0"),
    ("train", "packing", "tight", 'packing is "tight": choose among'),
    ("train", "reuse_tails", None, "reuse_tails is null"),
    ("", "model", None, "model is null"),
    ("", "model", [], "model is []"),
    ("", "optim", 3, "optim is 3"),
    ("", "train", "x", "train is"),
    ("", "data", 5, "data is 5"),
    ("", "data", DEEP, "data is"),
    ("", "tokenizer", ["sample"], "tokenizer is"),
    ("", "kind", "chat", 'kind is "chat": choose among base, sft, rl'),
    ("", "kind", {}, "kind is {}"),
    ("", "parent", ["x"], "parent is"),
    ("", "rl", {"parent": 5}, "rl.parent is 5"),
    ("", "rl", [], "rl is []"),
    ("", "mixture", {}, "mixture has no 'name'"),
]


@pytest.fixture
def edited(home: Path):
    """Runs 'sound' and 'edited', and a function that edits the config.json of the second."""
    config = scale(4, 1024, context=128).to_dict()
    for name in ("sound", "edited"):
        with Run.open(name, config) as run:
            (run.checkpoints / "000004").mkdir()
    path = home / "runs" / "edited" / "config.json"

    def edit(part: str, field: str, value: object) -> Path:
        record = json.loads(json.dumps(config))
        (record[part] if part else record)[field] = value
        path.write_text(json.dumps(record))
        return path

    return edit


@pytest.mark.parametrize(("part", "field", "value", "words"), EDITS)
def test_a_hand_edit_is_one_sentence_and_hides_no_other_run(edited, part, field, value, words):
    path = edited(part, field, value)
    for read in (runs.load_config, load_model, run_list.show_record):
        with pytest.raises(UserError) as refused:
            read("edited")
        assert str(refused.value).startswith(str(path))
        assert words in str(refused.value)
        assert "\n" not in str(refused.value)
    shown = {record["name"]: record["error"] for record in run_list.list_records()}
    assert words in shown["edited"]
    assert "sound" in runs.default_runs()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "line 1, column 1"),
        (b"{", "line 1, column 2"),
        (b"[]", "it is [], not an object"),
        (b"null", "it is null"),
        (b"\xff\xfe{}", "not UTF-8"),
        (b"[" * 300_000, "nested more than 64 levels"),
        (b'{"model": ' + b'{"a":' * 5_000 + b"1" + b"}" * 5_001, "nested more than 64 levels"),
        (b" " * (2 << 20), "2,097,152 bytes, at most 1,048,576"),
        (b'{"seed": ' + b"1" * 5_000 + b"}", "4300 digits"),
    ],
)
def test_a_config_that_is_no_json_object_breaks_neither_chat_nor_runs(edited, content, words):
    path = edited("", "data", "x")
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"config\.json is damaged") as refused:
        runs.load_config("edited")
    assert words in str(refused.value)
    assert {record["name"] for record in run_list.list_records()} == {"sound", "edited"}
    assert runs.default_runs() == ["sound"]


def test_a_config_that_is_a_pipe_is_not_waited_for(edited):
    import os

    path = edited("", "data", "x")
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(UserError, match="not a regular file"):
        runs.load_config("edited")


def test_values_at_the_ends_of_their_ranges_are_accepted():
    config = scale(4, 1024).to_dict()
    config["optim"] |= {"matrix_lr": 0, "max_grad_norm": None, "warmdown": 1, "final_lr_fraction": 0}
    config["train"] |= {"eval_every": 0, "seed": 2**63 - 1, "save_minutes": 0}
    from nanorun.config import Config

    assert Config.from_dict(config).train.seed == 2**63 - 1
