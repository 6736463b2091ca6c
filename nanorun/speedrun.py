"""`nanorun speedrun`: from nothing to a model that answers, stage by stage, each done once.

    data → tokenizer → base → mid → sft → rl      with an exam of the chat model before and after the last

Interrupted, it goes on in the stage that it was in; typed again, it finds every stage done. A stage is done when
its result stands under its real name, since results appear whole or not at all.
"""

import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from nanorun import home
from nanorun.config import sample_preset
from nanorun.console import say, seconds
from nanorun.data import sample
from nanorun.data.dataset import MANIFEST, open_dataset
from nanorun.data.get import make_sample
from nanorun.data.vocabulary import train_on
from nanorun.errors import UserError
from nanorun.provenance import record
from nanorun.runs import CHECKPOINTS, SUMMARY, write_json
from nanorun.tables import table
from nanorun.text.store import open_tokenizer
from nanorun.text.tokenizer import CONFIG_FILE

DATA, TOKENIZER, VOCAB = "sample", "sample", 1024
BASE, MID, SFT, RL = "sample-base", "sample-mid", "sample-sft", "sample-rl"
REINFORCED = ("sample-counting", "sample-spelling")  # sampled replies are right about half of the time
RATE_SHARE = 0.2  # more than a large model bears; one so small, and so briefly taught, does not forget by it
EXAM, LONGEST_REPLY = "exam.json", 96  # the exam's marks, in a run's folder; tokens
ASKED = ("What is 12 + 30?", "Which dish is Pennywell famous for?", "Can you spell dolphin?")


@dataclass(frozen=True)
class Budget:
    """How much of everything: about six minutes of two cores."""

    base_steps: int = 400
    chat_steps: int | None = None  # all of the mixture
    rl_steps: int = 60
    problems: int = 16  # a step of reinforcement
    held_out: int = 128  # problems that it is measured by
    questions: int = 200  # of each task, in an exam


def budget() -> Budget:
    steps = int(os.environ.get("NANORUN_SPEEDRUN_STEPS") or 0)  # a few, to try the pipeline itself
    return Budget(steps, steps, steps, 2, 4, 8) if steps else Budget()


@dataclass(frozen=True)
class Stage:
    name: str
    doing: str
    done: str
    seconds: float  # about, on two cores: for the time that is left
    folder: Path
    here: Callable[[], bool]
    make: Callable[[], object]


def stages() -> list[Stage]:
    data, tokenizer = home.data_dir() / DATA, home.tokenizers_dir() / TOKENIZER

    def training(
        name: str, doing: str, done: str, takes: float, make: Callable[[], object], result: str = SUMMARY
    ) -> Stage:
        folder = home.runs_dir() / name
        return Stage(name, doing, done, takes, folder, lambda: _trained(folder, result), make)

    return [
        Stage(
            "data",
            "writing the sample world",
            "the sample world is written",
            3,
            data,
            lambda: _whole(open_dataset, DATA, data / MANIFEST),
            lambda: make_sample(name=DATA, replace=True),
        ),
        Stage(
            "tokenizer",
            f"training a tokenizer of {VOCAB:,} tokens on it",
            "its tokenizer is trained",
            3,
            tokenizer,
            lambda: _whole(open_tokenizer, TOKENIZER, tokenizer / CONFIG_FILE),
            _tokenizer,
        ),
        training(BASE, "pretraining: a model reads it", "a base model has read it", 162, _base),
        training(MID, "midtraining: the model practises", "the model has practised", 21, _mid),
        training(SFT, "fine-tuning: it learns to talk", "it has learned to talk", 74, _sft, EXAM),
        training(RL, "reinforcement: it learns by trying", "it has learned by trying", 74, _rl, EXAM),
    ]


def run() -> dict[str, Any]:
    """Whatever is not done yet; what there is then, as one record."""
    start = time.perf_counter()
    plan, records = stages(), list[dict[str, Any]]()
    missing = [stage for stage in plan if not stage.here()]
    planned = took = 60.0  # of the stages done now, and a minute of trust in the plan
    for number, stage in enumerate(plan, 1):
        where = f"{number}/{len(plan)}"
        if stage not in missing:
            say(f"{where} {stage.done} already ({stage.folder})")
            records.append({"stage": stage.name, "did": "nothing, it is done"})
            continue
        left = sum(stage.seconds for stage in missing[missing.index(stage) :]) * took / planned
        say(f"{where} {stage.doing} (about {seconds(left)} to the end)")
        begun = time.perf_counter()
        stage.make()
        spent = time.perf_counter() - begun
        planned, took = planned + stage.seconds, took + spent
        say(f"    done in {seconds(spent)}")
        records.append({"stage": stage.name, "did": stage.doing, "seconds": round(spent, 1)})
    runs = {name: _read(home.runs_dir() / name / SUMMARY) for name in (BASE, MID, SFT, RL)}
    return record(
        "speedrun",
        stages=records,
        seconds=round(time.perf_counter() - start, 3),
        home=str(home.home()),
        base=runs[BASE],
        mid=runs[MID],
        sft=runs[SFT],
        rl=runs[RL],
        exams={name: _read(home.runs_dir() / name / EXAM) for name in (SFT, RL)},
        answers=answers(ASKED),
    )


def build_sample() -> None:
    """The first two stages alone: something to train on."""
    for stage in stages()[:2]:
        if not stage.here():
            stage.make()


# -- the stages --------------------------------------------------------------------------------------


def _tokenizer() -> None:
    dataset = open_dataset(DATA)
    train_on(dataset, VOCAB, name=TOKENIZER, max_bytes=dataset.total("text_bytes", "train"), replace=True)


def _base() -> None:
    from nanorun.train.base import Options, train_base

    vocabulary = open_tokenizer(TOKENIZER).vocab_size
    config = sample_preset(vocabulary, DATA, TOKENIZER, budget().base_steps)
    say(f"    {config.model.total_parameters:,} parameters, {config.tokens:,} tokens")
    train_base(config, Options(name=BASE, samples=6))


def _mid() -> None:
    _converse(BASE, "sample-mid", MID)


def _sft() -> None:
    _converse(MID, "sample", SFT, chat_every=120)
    _exam(SFT)


def _converse(parent: str, mixture: str, name: str, chat_every: int = 0) -> None:
    from nanorun.train.base import Options
    from nanorun.train.sft import Choices, train_sft

    choices = Choices(
        parent,
        mixture,
        batch_tokens=2048,
        steps=budget().chat_steps,
        save_every=50,
        chat_every=chat_every,
        chat_problems=budget().questions // 8,
    )
    train_sft(choices, Options(name=name))


def _rl() -> None:
    from nanorun.train import rl

    name, config, learning = rl.configure(
        REINFORCED,
        parent=SFT,
        name=RL,
        steps=budget().rl_steps,
        train={"save_every": 10, "eval_every": 20},
        problems=budget().problems,
        samples=8,
        max_tokens=LONGEST_REPLY,
        eval_problems=budget().held_out,
        rate_share=RATE_SHARE,
    )
    rl.train_rl(name, config, learning, rl.Options())
    _exam(RL)


def _exam(name: str) -> None:
    """How often the model is right about each kind of question of the world, kept in its folder."""
    from nanorun.evals import chat
    from nanorun.evals.replies import Manner

    folder, many = home.runs_dir() / name, budget().questions
    say(f"    exam: {many} questions of each kind")
    options = chat.Options(
        name, chat.SAMPLE, max_per_task=many, manner=Manner(LONGEST_REPLY), keep=folder / "exam.jsonl"
    )
    write_json(folder / EXAM, chat.evaluate_chat(options))


def _whole(open_it: Callable[[str], object], name: str, marker: Path) -> bool:
    """Whether a stage's result is here and sound; a damaged one is made again, since all of it is generated."""
    if not marker.parent.exists():
        return False
    try:
        open_it(name)
    except UserError as error:
        say(f"{error} Making it again.")
        return False
    return True


def _trained(folder: Path, result: str) -> bool:
    """Whether a run has its last file, and weights to go with it."""
    return (folder / result).is_file() and any((folder / CHECKPOINTS).glob("[0-9]*"))


def _read(path: Path) -> dict[str, Any]:
    kept: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return kept


# -- what came of it ---------------------------------------------------------------------------------


def answers(questions: tuple[str, ...]) -> list[dict[str, Any]]:
    """What the final model says to these, as `nanorun chat -p` does, without chance."""
    from nanorun.chat.conversation import Dialogue, Options, Speaker
    from nanorun.infer.request import Sampling

    said = []
    with Speaker(Options(RL)) as speaker:
        for question in questions:
            answer = Dialogue(speaker, Sampling(temperature=0.0), LONGEST_REPLY).ask(question)
            list(answer)
            said.append({"question": question, **answer.record()})
    return said


def show(result: dict[str, Any]) -> str:
    """One screen: what the model has read, what it has learned, what it answers, and what to do next."""
    tokenizer, base, rl = open_tokenizer(TOKENIZER), result["base"], result["rl"]
    early = islice(sample.documents("val", 10**6), 100)
    told = max((text for text in early if not set("?-0123456789") & set(text)), key=len)
    line = max(told.splitlines(), key=len)
    line = line[: line.find(". ", 80) + 1] or line
    pieces = [tokenizer.decode([i]) for i in tokenizer.encode(line)]
    folder = Path(result["home"]).resolve()
    lines = [
        "",
        f"THE LANTERN ISLES, AS THE MODEL READS THEM ({len(line.encode())} bytes, {len(pieces)} tokens)",
        "",
        "│".join(pieces),
        "",
        f"HOW THE BASE MODEL GOES ON AFTER THE BAR ({base['val_bpb']:.3f} bits per byte on text it has not seen)",
        "",
        *(f"{each['prompt']}│ {' '.join(each['text'].split())}" for each in base["samples"][:2]),
        "",
        "WHAT THE CHAT MODEL GETS RIGHT (questions in phrasings that it has not seen, with 95% intervals)",
        "",
        exam_table(result["exams"][SFT], result["exams"][RL]),
        "",
        "Mean reward of replies drawn by chance to held-out questions, before and after reinforcement:",
        ", ".join(f"{task} {_risen(rl, f'val_reward_{task}')}" for task in REINFORCED) + ".",
        "",
        "WHAT IT ANSWERS",
        "",
        *(f"> {each['question']}\n{spoken(each['parts'])}" for each in result["answers"]),
        "",
        f"Everything is in {folder}: data/{DATA}, tokenizers/{TOKENIZER}, and in runs/",
        f"{BASE}, {MID}, {SFT} and {RL}, with plots: loss.png, and in {RL} reward.png.",
        "",
        "NEXT",
        "",
        f"nanorun chat              talk to it, or: nanorun chat -p '{ASKED[0]}'",
        "nanorun serve             the same in a browser, and for programs",
        "nanorun data add FILES    your own text; then nanorun tok train, nanorun train base --depth 4",
    ]
    return "\n".join(lines)


def exam_table(before: dict[str, Any], after: dict[str, Any]) -> str:
    def right(row: dict[str, Any]) -> list[str]:
        return [f"{row['accuracy']:.1%}", f"{row['low']:.0%} to {row['high']:.0%}"]

    pairs = zip(before["tasks"], after["tasks"], strict=True)
    rows = [[one["task"], f"{one['n']}", *right(one), *right(other)] for one, other in pairs]
    return table(["task", "questions", "after SFT", "", "after RL", ""], rows)


def _risen(summary: dict[str, Any], key: str) -> str:
    return f"{summary['before'].get(key, 0):.2f} → {summary[key]:.2f}"


def spoken(parts: list[dict[str, str]]) -> str:
    """An answer on one line, its calls in brackets: [12+30 = 42]."""
    marks = {"text": "{}", "python": "[{}", "output": " = {}]"}
    return " ".join("".join(marks[part["type"]].format(part["text"]) for part in parts).split())
