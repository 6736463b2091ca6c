"""The parsers that the fuzzer attacks: what a valid input looks like, how to change it, and how it is read.

Each is a class with a `name`, whose constructor writes the files around the input into an empty folder. `make` returns
an input and `parse` reads it, as the commands do. It may return, or raise a UserError (or one of `refusals`).
"""

import csv
import gzip
import hashlib
import importlib.util
import io
import json
import lzma
import random
import shutil
import tarfile
import zipfile
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, ClassVar, Protocol

import pyarrow
import pyarrow.parquet
import torch
from mutate import mutate_bytes, mutate_json

from nanorun import checkpoint, resume, run_list, runs, tables
from nanorun.config import Config, OptimConfig, TrainConfig, scale_model
from nanorun.console import Progress
from nanorun.data.add import write_dataset
from nanorun.data.bins import BinWriter, bin_tokens, read_bin, tokenize_dataset
from nanorun.data.bundle import open_bundle
from nanorun.data.dataset import Dataset, Shard, open_dataset
from nanorun.data.get import dataset_record, datasets_table
from nanorun.data.hub import check_parquet
from nanorun.data.loader import Loader
from nanorun.data.readers import read_documents, read_records
from nanorun.data.rows import BlockCache, Position, RowOrder, RowSequence
from nanorun.data.shards import read_texts
from nanorun.data.sources import BinSource, open_source
from nanorun.errors import UserError
from nanorun.evals.chat import read_replies
from nanorun.evals.core_tasks import read_examples, read_tasks, render_prompts
from nanorun.infer.load import check_tokenizer
from nanorun.model.fast.recipe import DEFAULT_RECIPE
from nanorun.report import plots
from nanorun.runs import Run
from nanorun.tasks.catalogue import open_examples
from nanorun.tasks.layouts import read_conversation_file
from nanorun.tasks.mixture import find_mixture, prepare_mixture
from nanorun.tasks.task import question_messages
from nanorun.text.chat import render
from nanorun.text.tokenizer import PATTERN, SPECIAL_TOKENS, Tokenizer
from nanorun.train import base, loop
from nanorun.train.guard import LossScaler, TrainingGuard

TEXTS = [f"{i} gulls sat on {i * 7919 % 100} masts. " * 3 for i in range(12)]
TALK: list[dict[str, Any]] = [
    {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello!"}]},
    {
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "2+2?"},
            {
                "role": "assistant",
                "content": [{"type": "python", "text": "2+2"}, {"type": "text", "text": "4"}],
            },
        ]
    },
]
STEPS = 4


def byte_tokenizer() -> Tokenizer:
    ranks = {bytes([b]): b for b in range(256)}
    return Tokenizer("bytes", PATTERN, ranks, {name: 256 + i for i, name in enumerate(SPECIAL_TOKENS)})


def small_config() -> Config:
    model = scale_model(2, 265, context=32, dim=32, heads=2, kv_heads=1)
    return Config(model, OptimConfig(), TrainConfig(steps=STEPS, batch_tokens=256), "text", "bytes")


def lines_of(*records: Any) -> bytes:
    return "".join(json.dumps(record) + "\n" for record in records).encode()


class Parser(Protocol):
    name: str
    refusals: tuple[type[Exception], ...] = ()

    def __init__(self, folder: Path) -> None: ...

    def make(self, dice: random.Random) -> Any: ...

    def parse(self, content: Any) -> None: ...


class JsonFile:
    """A parser of one JSON file, whose valid contents are `seeds`."""

    name: str
    refusals: tuple[type[Exception], ...] = ()
    seeds: list[Any]
    path: Path

    def make(self, dice: random.Random) -> bytes:
        seed = dice.choice(self.seeds)
        if dice.random() < 0.7:
            return mutate_json(dice, seed)
        return mutate_bytes(dice, json.dumps(seed).encode())


# -- datasets and their shards -----------------------------------------------------------------------


class DatasetFile(JsonFile):
    name = "dataset"

    def __init__(self, folder: Path) -> None:
        self.tokenizer = byte_tokenizer()
        text = write_dataset("text", iter(TEXTS[:9]), iter(TEXTS[9:]), "made up", Progress("writing"))
        tokens = tokenize_dataset(text, self.tokenizer)
        self.folder = folder / "dataset"
        self.folder.mkdir()
        for dataset in (text, tokens):
            for path in [*dataset.files("train"), *dataset.files("val")]:
                shutil.copy(path, self.folder)
        self.seeds = [json.loads((each.folder / "dataset.json").read_text()) for each in (text, tokens)]
        self.path = self.folder / "dataset.json"

    def parse(self, content: bytes) -> None:
        self.path.write_bytes(content)
        dataset = open_dataset(str(self.folder))
        json.dumps(dataset_record(dataset))
        datasets_table([dataset])
        source = open_source(dataset, "train", self.tokenizer)
        source.load(range(min(source.units, 3)))


class BinHeader:
    name = "bin"
    refusals: tuple[type[Exception], ...] = ()

    def __init__(self, folder: Path) -> None:
        import numpy as np

        writer = BinWriter(folder, "train", 256)
        writer.add(np.arange(90, dtype=np.uint16), np.array([0, 20, 50, 90]), [20, 30, 40])
        (shard,) = writer.finish()
        self.path = folder / shard.file
        self.seed = self.path.read_bytes()

    def make(self, dice: random.Random) -> bytes:
        if dice.random() < 0.5:  # the header alone
            return mutate_bytes(dice, self.seed[:12]).ljust(12, b"\0")[:12] + self.seed[12:]
        return mutate_bytes(dice, self.seed)

    def parse(self, content: bytes) -> None:
        self.path.write_bytes(content)
        if bin_tokens(self.path):
            read_bin(self.path)[:5].tolist()
        source = BinSource([self.path], 256, vocab_size=265)
        source.load(range(source.units))


class ParquetFile:
    name = "parquet"
    refusals: tuple[type[Exception], ...] = (ValueError,)  # of check_parquet alone

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.path = folder / "shard.parquet"
        text = pyarrow.table({"text": TEXTS, "n": list(range(len(TEXTS)))})
        talk = pyarrow.Table.from_pylist(TALK[:1])
        odd = pyarrow.table({"text": pyarrow.array([b"\xff", None]), "m": [{"a": 1}, None]})
        self.seeds = []
        for table, options in (
            (text, {"compression": "zstd"}),
            (text, {"compression": "none", "use_dictionary": False}),
            (text, {"compression": "snappy", "row_group_size": 3}),
            (talk, {}),
            (odd, {}),
        ):
            pyarrow.parquet.write_table(table, self.path, **options)
            self.seeds.append(self.path.read_bytes())

    def make(self, dice: random.Random) -> bytes:
        seed = dice.choice(self.seeds)
        if dice.random() < 0.5:  # the footer, where the structure is
            at = dice.randrange(len(seed) - 600, len(seed)) if len(seed) > 600 else 0
            return seed[:at] + mutate_bytes(dice, seed[at:])
        return mutate_bytes(dice, seed)

    def parse(self, content: bytes) -> None:
        self.path.write_bytes(content)
        self._read(lambda: check_parquet(self.path))
        self._read(lambda: list(read_documents(self.path)))
        self._read(lambda: read_conversation_file(self.path))
        shard = Shard(self.path.name, "train", 1, 1, len(content), hashlib.sha256(content).hexdigest(), 1)
        list(read_texts(Dataset("odd", self.folder, "parquet", (shard,)), "train"))

    def _read(self, read: Any) -> None:
        try:
            read()
        except UserError:
            pass
        except ValueError:
            if read.__code__.co_names[0] != "check_parquet":
                raise RuntimeError("a ValueError where a UserError is due") from None


# -- runs --------------------------------------------------------------------------------------------


def add_run(name: str, config: dict[str, Any], summary: dict[str, Any] | None = None) -> Path:
    with Run.open(name, config, fresh=True) as run:
        for step in range(1, STEPS + 1):
            run.log(
                {
                    "kind": "step",
                    "step": step,
                    "loss": 5.0 / step,
                    "tokens_per_s": 100.0,
                    "tokens": 256 * step,
                }
            )
        run.log({"kind": "eval", "step": STEPS, "val_bpb": 1.5, "val_loss": 2.0, "tokens": 1024})
        weights = {"w": torch.zeros(2)}
        checkpoint.save(run.checkpoints, STEPS, weights, {}, training_state())
        if summary is not None:
            run.write_summary(summary)
    return run.folder


def training_state() -> dict[str, Any]:
    guard = TrainingGuard()
    for _ in range(3):
        guard.check(4.0, 1.0)
    order = {"packing": "best_fit", "reuse_tails": True, "shuffle": True, "seed": 0}
    position = {"epoch": 0, "block": 0, "carry": [[1, 2, 3]], "taken": [[8, 2]], "rows": 2, "lost": 0}
    return {
        "step": STEPS,
        "tokens": 1024,
        "seconds": 1.5,
        "rows": 4,
        "loader": {"version": 1, "data": "", **order, "position": position},
        "guard": guard.state_dict(),
        "scale": LossScaler(False).state_dict(),
        "recipe": DEFAULT_RECIPE.to_dict(),
        "tokenizer": byte_tokenizer().fingerprint,
        "numerics": {"device": "cpu"},
    }


def list_and_show(name: str) -> None:
    """What `runs`, `runs show` and the choice of a model for `chat` read."""
    records = run_list.list_records()
    assert {record["name"] for record in records} >= {"sound", name}, "a bad run must hide no other"
    tables.runs_table(records)
    assert "sound" in runs.default_runs(), "a bad run must not break chat for all"
    tables.run_page(run_list.show_record(name))


class ConfigFile(JsonFile):
    name = "config"

    def __init__(self, folder: Path) -> None:
        base_config = small_config().to_dict()
        entry = {"task": "me.jsonl", "split": "train", "start": None, "stop": None, "repeat": 1}
        mixture = {"name": "me", "train": [entry], "val": [], "fingerprint": "f"}
        sft = {
            **base_config,
            "kind": "sft",
            "parent": "sound",
            "warm_start": True,
            "epochs": 2,
            "mixture": mixture,
        }
        rl = {**base_config, "kind": "rl", "rl": {"parent": "sound", "parent_step": 4, "tasks": ["gsm8k"]}}
        self.seeds = [base_config, sft, rl]
        add_run("sound", base_config)
        self.path = add_run("fuzzed", base_config) / "config.json"

    def parse(self, content: bytes) -> None:
        self.path.write_bytes(content)
        config = None
        try:
            config = runs.load_config("fuzzed")
        finally:
            try:
                list_and_show("fuzzed")
            except UserError:
                if config is not None:
                    raise
        assert config.model.flops_per_token > 0
        with suppress(UserError):
            resume.changed_settings("fuzzed", runs.read_config("fuzzed"), config.to_dict(), self.path)
        base.read_config(self.path)


class StateFile(JsonFile):
    name = "state"
    refusals = (checkpoint.Damaged,)

    def __init__(self, folder: Path) -> None:
        record = {"format": "nanorun-checkpoint", "version": 1, "step": STEPS, "state": training_state()}
        self.seeds = [record]
        saved = checkpoint.save(folder, STEPS, {"w": torch.zeros(2)}, {}, training_state())
        self.path, self.sums = saved / "state.json", json.loads((saved / "checksums.json").read_text())
        self.tokenizer, self.bin = byte_tokenizer(), BinHeader(folder)
        self.bin.path.write_bytes(self.bin.seed)

    def parse(self, content: bytes) -> None:
        self.path.write_bytes(content)
        self.sums["files"]["state.json"] = {
            "bytes": len(content),
            "sha256": hashlib.sha256(content).hexdigest(),
        }
        (self.path.parent / "checksums.json").write_text(json.dumps(self.sums))
        found = checkpoint.load(self.path.parent)
        loop.check_state(found)
        check_tokenizer(self.tokenizer, found)
        loop.recorded_recipe(found)
        guard = TrainingGuard()
        guard.load_state_dict(found.state["guard"])
        guard.check(4.0, 1.0)
        scaler = LossScaler(True)
        scaler.load_state_dict(found.state["scale"])
        scaler.update(1.0, 1.0)
        source = BinSource([self.bin.path], 256, vocab_size=265)
        state = {**found.state["loader"], "data": source.fingerprint}
        Loader(source, rows=2, context=8, state=state).close()
        cache = BlockCache(source, RowOrder())
        try:
            RowSequence(cache, Position.from_dict(state["position"])).take(2, 8)
        finally:
            cache.close()


class ChecksumsFile(JsonFile):
    name = "checksums"
    refusals = (checkpoint.Damaged,)

    def __init__(self, folder: Path) -> None:
        saved = checkpoint.save(folder, STEPS, {"w": torch.zeros(2)}, {}, training_state())
        self.path = saved / "checksums.json"
        self.seeds = [json.loads(self.path.read_text())]

    def parse(self, content: bytes) -> None:
        self.path.write_bytes(content)
        run_list._is_complete(self.path.parent)
        checkpoint.prune(self.path.parent.parent, 1)
        checkpoint.load(self.path.parent)


class MetricsFile:
    name = "metrics"
    refusals: tuple[type[Exception], ...] = ()

    def __init__(self, folder: Path) -> None:
        add_run("sound", small_config().to_dict())
        self.folder = add_run("fuzzed", small_config().to_dict())
        self.path = self.folder / "metrics.jsonl"
        self.seed = self.path.read_bytes()

    def make(self, dice: random.Random) -> bytes:
        if dice.random() < 0.3:
            return mutate_bytes(dice, self.seed)
        lines = self.seed.splitlines()
        at = dice.randrange(len(lines))
        lines[at] = mutate_json(dice, json.loads(lines[at])).replace(b"\n", b" ")
        return b"\n".join(lines) + b"\n"

    def parse(self, content: bytes) -> None:
        self.path.write_bytes(content)
        records = list(runs.read_metrics(self.folder))
        by_kind = {kind: plots._by_step(records, kind) for kind in ("step", "eval", "chat")}
        for key in ("loss", "tokens_per_s", "val_bpb", "reward"):
            for kind in by_kind:
                plots._Line(by_kind[kind], key)
                base.last_figure(by_kind[kind], key)
                base.median_figure(by_kind[kind], key)
        runs._has_trained(self.folder)
        list_and_show("fuzzed")
        Run("fuzzed", self.folder).rewind_metrics(2)
        assert all(record.get("step", 0) <= 2 for record in runs.read_metrics(self.folder))


class SummaryFile(JsonFile):
    name = "summary"

    def __init__(self, folder: Path) -> None:
        common = {
            "name": "fuzzed",
            "kind": "base",
            "depth": 2,
            "steps": STEPS,
            "tokens": 1024,
            "seconds": 1.5,
            "peak_gib": None,
            "skipped_steps": 1,
            "device": "cpu",
            "finished": "2026-01-02T03:04:05Z",
        }
        planned = {"what": "minutes", "planned": 1.5, "happened": 2.0, "ratio": 1.3}
        trained = {
            **common,
            "total_parameters": 10,
            "scaling_parameters": 5,
            "val_bpb": 1.5,
            "val_loss": 2.0,
            "train_loss": 2.0,
            "tokens_per_s": 100.0,
            "mfu": None,
            "planned": [planned],
            "samples": [{"prompt": "The", "text": " gull"}],
        }
        sample = {"question": "2+2?", "reply": [{"type": "text", "text": "4"}], "reward": 1.0}
        learned = {
            **common,
            "kind": "rl",
            "parent": "sound",
            "parent_step": 4,
            "tasks": ["gsm8k"],
            "first_reward": 0.1,
            "last_reward": 0.2,
            "val_reward_before": 0.1,
            "before": {"val_reward": 0.1},
            "val_reward": 0.3,
            "val_pass@1": 0.3,
            "rollout_tokens_per_s": 5.0,
            "train_tokens_per_s": 6.0,
            "samples": [sample],
        }
        self.seeds = [trained, learned]
        add_run("sound", small_config().to_dict(), trained)
        self.folder = add_run("fuzzed", small_config().to_dict(), trained)
        score = {"task": "sums", "n": 5, "accuracy": 0.5, "low": 0.2, "high": 0.8}
        self.exam = {"step": STEPS, "chatcore": 0.5, "tasks": [score]}
        self.path = self.folder / "summary.json"

    def make(self, dice: random.Random) -> bytes:
        if dice.random() < 0.1:
            (self.folder / "exam.json").write_bytes(mutate_json(dice, self.exam))
        return super().make(dice)

    def parse(self, content: bytes) -> None:
        self.path.write_bytes(content)
        try:
            list_and_show("fuzzed")
        except UserError as error:
            raise RuntimeError("a damaged summary must not hide a run") from error
        summary = runs.read_summary(self.folder)
        tables.run_summary(summary)
        tables.rl_summary(summary)


# -- tokenizers --------------------------------------------------------------------------------------


class TokenizerFolder:
    name = "tokenizer"
    refusals: tuple[type[Exception], ...] = ()

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "tokenizer"
        self.folder.mkdir()
        byte_tokenizer().save(self.folder)
        self.config = json.loads((self.folder / "tokenizer.json").read_text())
        self.ranks = (self.folder / "ranks.tiktoken").read_bytes()

    def make(self, dice: random.Random) -> tuple[bytes, bytes]:
        if dice.random() < 0.6:
            return mutate_json(dice, self.config), self.ranks
        if dice.random() < 0.2:
            return mutate_bytes(dice, json.dumps(self.config).encode()), self.ranks
        ranks = mutate_bytes(dice, self.ranks)
        config = {**self.config, "ranks_sha256": hashlib.sha256(ranks).hexdigest()}
        return json.dumps(config).encode(), ranks

    def parse(self, content: tuple[bytes, bytes]) -> None:
        (self.folder / "tokenizer.json").write_bytes(content[0])
        (self.folder / "ranks.tiktoken").write_bytes(content[1])
        tokenizer = Tokenizer.load(self.folder)
        ids = tokenizer.encode(TEXTS[1])
        assert tokenizer.decode(ids) == TEXTS[1]
        tokenizer.encode_documents(TEXTS[:2])
        tokenizer.token_bytes()


# -- conversations, mixtures and tasks ---------------------------------------------------------------


class ChatFile:
    name = "chat"
    refusals: tuple[type[Exception], ...] = ()

    def __init__(self, folder: Path) -> None:
        self.folder, self.tokenizer = folder, byte_tokenizer()
        shared = {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello!"}]}
        pairs = [
            {"instruction": "Add", "input": "2+2", "output": "4", "system": "Be brief."},
            {"prompt": "Hi", "response": "Hello!"},
            {"question": "2+2?", "answer": "4"},
        ]
        self.seeds = [*TALK, shared, *pairs]

    def make(self, dice: random.Random) -> tuple[str, bytes]:
        suffix, seed = dice.choice((".jsonl", ".jsonl", ".json", ".csv")), dice.choice(self.seeds)
        if suffix == ".csv":
            out = io.StringIO()
            writer = csv.DictWriter(out, list(seed), delimiter=dice.choice(",;\t"))
            writer.writeheader()
            writer.writerows([seed, seed])
            return suffix, mutate_bytes(dice, out.getvalue().encode())
        line = mutate_json(dice, seed).replace(b"\n", b" ")
        if dice.random() < 0.3:
            line = mutate_bytes(dice, json.dumps(seed).encode())
        good = json.dumps(seed).encode()
        if suffix == ".json":
            return suffix, b"[" + good + b",\n" + line + b"]"
        return suffix, good + b"\n" + line + b"\n"

    def parse(self, content: tuple[str, bytes]) -> None:
        path = self.folder / f"talk{content[0]}"
        path.write_bytes(content[1])
        list(read_records(path))
        for conversation in read_conversation_file(path):
            render(conversation, self.tokenizer, 512)


class MixtureFile(JsonFile):
    name = "mixture"

    def __init__(self, folder: Path) -> None:
        (folder / "me.jsonl").write_bytes(lines_of(*TALK * 3))
        self.path = folder / "mixture.json"
        entries = [{"task": "me.jsonl", "repeat": 2}, {"task": "me.jsonl", "start": 1, "stop": 4}]
        self.seeds = [
            {"train": entries, "val": ["me.jsonl"], "name": "mine"},
            entries,
            {"train": ["me.jsonl"]},
        ]

    def parse(self, content: bytes) -> None:
        self.path.write_bytes(content)
        spec = find_mixture(str(self.path))
        if all("me.jsonl" in entry.task for entry in (*spec.train, *spec.val)):  # others are slow to make
            _, train, val = prepare_mixture(spec, self.path.parent)
            for mixture in (train, val):
                for index in range(min(len(mixture), 3)):
                    mixture[index]
        json.dumps(spec.to_dict())


class TaskFiles:
    name = "tasks"
    refusals: tuple[type[Exception], ...] = ()
    FILES: ClassVar = {
        "mmlu": "mmlu_test.jsonl",
        "arc-easy": "arc_easy_test.jsonl",
        "gsm8k": "gsm8k_test.jsonl",
        "humaneval": "humaneval.jsonl",
    }

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        choices = {"question": "Sky?", "choices": ["red", "blue", 3], "answer": 1}
        labelled = {"text": ["red", "blue"], "label": ["A", "2"]}
        solution = "2 + 2 = <<2+2=4>>4\n#### 4"
        function = {"prompt": "def f(x):\n", "canonical_solution": "    return x\n"}
        self.seeds: list[tuple[str, Any]] = [
            ("mmlu", choices),
            ("mmlu", {"train": choices}),
            ("arc-easy", {"question": "Sky?", "choices": labelled, "answerKey": "2"}),
            ("arc-easy", {"query": "Question: Sky?", "choices": ["red", "blue"], "gold": 1}),
            ("arc-easy", choices),
            ("gsm8k", {"question": "2 + 2?", "answer": solution}),
            ("humaneval", {**function, "test": "def check(f): assert f(1) == 1", "entry_point": "f"}),
        ]

    def make(self, dice: random.Random) -> tuple[str, bytes]:
        task, seed = dice.choice(self.seeds)
        line = mutate_json(dice, seed).replace(b"\n", b" ")
        if dice.random() < 0.2:
            line = mutate_bytes(dice, json.dumps(seed).encode())
        return task, json.dumps(seed).encode() + b"\n" + line + b"\n"

    def parse(self, content: tuple[str, bytes]) -> None:
        spec, lines = content
        (self.folder / self.FILES[spec]).write_bytes(lines)
        task = open_examples(spec, "test", self.folder)
        for index in range(len(task)):
            question_messages(task[index])
            if spec != "humaneval":
                task.reward(index, [{"type": "text", "text": "#### 4"}])  # type: ignore[attr-defined]


class RepliesFile:
    """What `eval chat --keep` writes and `--judge` reads."""

    name = "replies"
    refusals: tuple[type[Exception], ...] = ()

    def __init__(self, folder: Path) -> None:
        self.path = folder / "replies.jsonl"
        about = {"format": "nanorun-replies", "version": 1, "model": "m", "step": 4, "split": "test"}
        reply = {
            "task": "gsm8k",
            "index": 0,
            "sample": 0,
            "question": "2+2?",
            "finish": "stop",
            "reward": None,
        }
        self.seeds = [
            {**about, "questions": {"gsm8k": 2}},
            {**reply, "reply": [{"type": "text", "text": "4"}]},
        ]

    def make(self, dice: random.Random) -> bytes:
        lines = [json.dumps(seed).encode() for seed in self.seeds]
        at = dice.randrange(len(lines))
        lines[at] = mutate_json(dice, self.seeds[at]).replace(b"\n", b" ")
        return mutate_bytes(dice, b"\n".join(lines)) if dice.random() < 0.3 else b"\n".join(lines) + b"\n"

    def parse(self, content: bytes) -> None:
        self.path.write_bytes(content)
        about, replies = read_replies(self.path)
        json.dumps([about, *map(asdict, replies)])


# -- CORE --------------------------------------------------------------------------------------------


class CoreBundle:
    name = "core"
    refusals: tuple[type[Exception], ...] = ()
    YAML = b"""icl_tasks:
- label: choice
  dataset_uri: a/choice.jsonl
  num_fewshot: [1]
  icl_task_type: multiple_choice
  continuation_delimiter: ' '
- label: schema
  dataset_uri: a/schema.jsonl
  num_fewshot: [0]
  icl_task_type: schema
- label: words
  dataset_uri: a/words.jsonl
  num_fewshot: [1]
  icl_task_type: language_modeling
"""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.records = {
            "choice": {"query": "Sky?", "choices": ["red", "blue"], "gold": 1},
            "schema": {"context_options": ["He", "She"], "continuation": "sang", "gold": 0},
            "words": {"context": "One two", "continuation": "three"},
        }
        self.mmlu = {"question": "Sky?", "choices": ["red", "blue"], "answer": 1}
        baselines = "".join(f"{label},50\n" for label in self.records)
        self.files = {
            "core.yaml": self.YAML,
            "eval_meta_data.csv": f"Eval Task,Random baseline\n{baselines}".encode(),
        }
        self.files |= {
            f"eval_data/a/{label}.jsonl": lines_of(*[record] * 4) for label, record in self.records.items()
        }

    def make(self, dice: random.Random) -> tuple[str, bytes]:
        files = dict(self.files)
        name = dice.choice(list(files))
        if name.endswith(".jsonl") and dice.random() < 0.8:
            seed = dice.choice((self.records[Path(name).stem], self.mmlu))
            files[name] += mutate_json(dice, seed).replace(b"\n", b" ") + b"\n"
        else:
            files[name] = mutate_bytes(dice, files[name])
        if dice.random() < 0.6:
            files = dict(self.files) if dice.random() < 0.3 else files
            kind = dice.choice((".zip", ".tar", ".tar.gz", ".tar.xz"))
            archive = archive_of(files, kind)
            return kind, mutate_bytes(dice, archive) if dice.random() < 0.7 else archive
        return "", json.dumps({name: content.decode("latin1") for name, content in files.items()}).encode()

    def parse(self, content: tuple[str, bytes]) -> None:
        kind, data = content
        if kind:
            path = self.folder / f"bundle{kind}"
            path.write_bytes(data)
        else:
            path = self.folder / "bundle"
            for name, text in json.loads(data).items():
                (path / name).parent.mkdir(parents=True, exist_ok=True)
                (path / name).write_bytes(text.encode("latin1"))
        bundle = open_bundle(path)
        for task in read_tasks(bundle):
            examples = read_examples(bundle, task)
            for index in range(min(len(examples), 2)):
                render_prompts(task, examples, index)


def archive_of(files: dict[str, bytes], kind: str) -> bytes:
    out = io.BytesIO()
    if kind == ".zip":
        with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, content in files.items():
                archive.writestr(zipfile.ZipInfo(f"eval_bundle/{name}"), content)
        return out.getvalue()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for name, content in files.items():
            member = tarfile.TarInfo(f"eval_bundle/{name}")
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    compress = {".tar": bytes, ".tar.gz": lambda data: gzip.compress(data, mtime=0), ".tar.xz": lzma.compress}
    return compress[kind](out.getvalue())


# -- requests ----------------------------------------------------------------------------------------


REQUEST_PARSER = (
    "nanorun.serve.parsing"  # its parse_body(bytes, kind) returns a request, or raises an ApiError
)


class Requests:
    """The body of a request to the server, as bytes."""

    name = "requests"

    def __init__(self, folder: Path) -> None:

        from nanorun.serve.errors import ApiError
        from nanorun.serve.schema import ChatRequest, CompletionRequest

        self.refusals: tuple[type[Exception], ...] = (ApiError,)
        self._parse_body = importlib.import_module(REQUEST_PARSER).parse_body
        self._kinds = {"chat": ChatRequest, "text": CompletionRequest}
        common = {
            "model": "m",
            "max_tokens": 5,
            "temperature": 0.5,
            "top_p": 0.9,
            "seed": 1,
            "stop": ["\n"],
            "n": 1,
        }
        messages = [*TALK[1]["messages"], {"role": "user", "content": [{"type": "text", "text": "And 3+3?"}]}]
        options = {
            "stream": True,
            "stream_options": {"include_usage": True},
            "logprobs": True,
            "top_logprobs": 2,
        }
        self.seeds: list[tuple[str, Any]] = [
            ("chat", {**common, **options, "messages": messages}),
            ("text", {**common, "prompt": "Once"}),
            ("text", {**common, "prompt": [256, 72, 105], "logprobs": 1}),
            ("text", {**common, "prompt": [[256, 72], [256, 105]]}),
        ]

    def make(self, dice: random.Random) -> tuple[str, bytes]:
        kind, seed = dice.choice(self.seeds)
        if dice.random() < 0.7:
            return kind, mutate_json(dice, seed)
        return kind, mutate_bytes(dice, json.dumps(seed).encode())

    def parse(self, content: tuple[str, bytes]) -> None:
        self._parse_body(content[1], self._kinds[content[0]])


PARSERS: dict[str, Any] = {
    parser.name: parser
    for parser in (
        *(DatasetFile, ConfigFile, StateFile, ChecksumsFile, MetricsFile, SummaryFile, TokenizerFolder),
        *(BinHeader, ParquetFile, ChatFile, MixtureFile, CoreBundle, TaskFiles, RepliesFile),
        *((Requests,) if importlib.util.find_spec(REQUEST_PARSER) else ()),
    )
}
