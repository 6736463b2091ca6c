"""`nanorun speedrun`: from nothing to a chat model, stage by stage, each done once.

    data → tokenizer → base → mid → sft → rl      with an exam of the chat model after sft and after rl

An interrupted speedrun resumes in the stage that it was in; run again, it skips every finished stage. A stage is
finished when its result exists under its final name, since results appear whole or not at all.
"""

import functools
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from nanorun import home
from nanorun.config import sample_preset
from nanorun.console import command, say, seconds
from nanorun.data import sample, vocabulary
from nanorun.data.get import make_sample
from nanorun.data.vocabulary import SAMPLE_DATA, SAMPLE_TOKENIZER, SAMPLE_VOCAB
from nanorun.json_files import read_json
from nanorun.provenance import record
from nanorun.runs import CHECKPOINTS, EXAM, EXAM_SHAPE, SUMMARY, read_summary, write_json
from nanorun.tables import table
from nanorun.text.store import open_tokenizer

BASE, MID, SFT, RL = "sample-base", "sample-mid", "sample-sft", "sample-rl"
RL_TASKS = ("sample-counting", "sample-spelling")  # sampled replies are right about half of the time
# Of the parent's learning rates. A large model would forget; one so small, trained so briefly,
# does not.
RL_LR_FRACTION = 0.2
MAX_REPLY_TOKENS = 96
QUESTIONS = (
    "What is 12 + 30?",
    "What are the Lantern Isles?",
    "Which dish is Pennywell famous for?",
    "Can you spell dolphin?",
)


@dataclass(frozen=True)
class Budget:
    """How much of everything: about six minutes of two cores."""

    base_steps: int = 370
    chat_steps: int | None = None  # None: one pass over the mixture
    rl_steps: int = 50
    problems: int = 16  # per RL step
    eval_problems: int = 128  # held out, to measure RL
    exam_questions: int = 200  # of each task, if it has as many


def budget() -> Budget:
    steps = int(os.environ.get("NANORUN_SPEEDRUN_STEPS") or 0)  # a few, to test the pipeline itself
    return Budget(steps, steps, steps, 2, 4, 8) if steps else Budget()


@dataclass(frozen=True)
class Stage:
    name: str
    doing: str
    done: str
    seconds: float  # approximate, on two cores: for the time left
    folder: Path
    is_done: bool
    make: Callable[[], object]


def stages() -> list[Stage]:
    def training(
        name: str, doing: str, done: str, takes: float, make: Callable[[], object], result: str = SUMMARY
    ) -> Stage:
        folder = home.runs_dir() / name
        is_done = (folder / result).is_file() and any((folder / CHECKPOINTS).glob("[0-9]*"))
        return Stage(name, doing, done, takes, folder, is_done, make)

    mid = functools.partial(_train_on_mixture, BASE, "sample-mid", MID)
    return [
        Stage(
            "data",
            "writing the sample world",
            "the sample world is written",
            3,
            home.data_dir() / SAMPLE_DATA,
            vocabulary.has_sample_data(),
            lambda: make_sample(name=SAMPLE_DATA, replace=True),
        ),
        Stage(
            "tokenizer",
            f"training a tokenizer of {SAMPLE_VOCAB:,} tokens on it",
            "its tokenizer is trained",
            3,
            home.tokenizers_dir() / SAMPLE_TOKENIZER,
            vocabulary.has_sample_tokenizer(),
            vocabulary.train_sample_tokenizer,
        ),
        training(BASE, "pretraining: a model reads it", "the base model is trained", 162, _base),
        training(MID, "midtraining: the model practises", "midtraining is done", 21, mid),
        training(SFT, "fine-tuning: it learns to talk", "fine-tuning is done", 74, _sft, EXAM),
        training(RL, "reinforcement: it learns by trying", "reinforcement learning is done", 74, _rl, EXAM),
    ]


def run() -> dict[str, Any]:
    """Runs the stages that are not done yet. Returns all results as one record."""
    start = time.perf_counter()
    all_stages, records = stages(), list[dict[str, Any]]()
    missing = [stage for stage in all_stages if not stage.is_done]
    # Of the stages done now. The first minute is what the plan expects, so that its estimates and these agree.
    estimated, took = 60.0, 60.0 * (_relative_time() if missing else 1)
    for number, stage in enumerate(all_stages, 1):
        position = f"{number}/{len(all_stages)}"
        if stage not in missing:
            say(f"{position} {stage.done} already ({stage.folder})")
            records.append({"stage": stage.name, "did": "already done"})
            continue
        left = sum(stage.seconds for stage in missing[missing.index(stage) :]) * took / estimated
        say(f"{position} {stage.doing} (about {seconds(left)} to the end)")
        stage_start = time.perf_counter()
        stage.make()
        spent = time.perf_counter() - stage_start
        estimated, took = estimated + stage.seconds, took + spent
        say(f"    done in {seconds(spent)}")
        records.append({"stage": stage.name, "did": stage.doing, "seconds": round(spent, 1)})
    runs = {"base": BASE, "mid": MID, "sft": SFT, "rl": RL}
    return record(
        "speedrun",
        stages=records,
        seconds=round(time.perf_counter() - start, 3),
        home=str(home.home()),
        **{stage: read_summary(home.runs_dir() / name) for stage, name in runs.items()},
        exams={name: _read_exam(home.runs_dir() / name) for name in (SFT, RL)},
        answers=answers(QUESTIONS),
    )


def _relative_time() -> float:
    """The time that the base stage will take here, relative to the machine that the stages were timed on."""
    from nanorun.plan.estimate import make_plan

    base = next(stage for stage in stages() if stage.name == BASE)
    steps = budget().base_steps
    seconds = make_plan(sample_preset(SAMPLE_VOCAB, steps=steps), validation_tokens=150_000).seconds
    return seconds / (base.seconds * steps / Budget().base_steps)


# -- the stages --------------------------------------------------------------------------------------


def _base() -> None:
    from nanorun.train.base import BaseOptions, train_base

    vocab_size = open_tokenizer(SAMPLE_TOKENIZER).vocab_size
    config = sample_preset(vocab_size, SAMPLE_DATA, SAMPLE_TOKENIZER, budget().base_steps)
    say(f"    {config.model.total_parameters:,} parameters, {config.tokens:,} tokens")
    train_base(config, BaseOptions(name=BASE, samples=6))


def _sft() -> None:
    _train_on_mixture(MID, "sample", SFT, chat_every=150)
    _exam(SFT)


def _train_on_mixture(parent: str, mixture: str, name: str, chat_every: int = 0) -> None:
    from nanorun.train.base import BaseOptions
    from nanorun.train.sft import SFTOptions, train_sft

    choices = SFTOptions(
        parent,
        mixture,
        batch_tokens=2048,
        steps=budget().chat_steps,
        save_every=50,
        chat_every=chat_every,
        chat_problems=budget().exam_questions // 8,
    )
    train_sft(choices, BaseOptions(name=name))


def _rl() -> None:
    from nanorun.train import rl

    name, config, learning = rl.configure(
        RL_TASKS,
        parent=SFT,
        name=RL,
        steps=budget().rl_steps,
        train={"save_every": 10, "eval_every": 30},
        problems=budget().problems,
        samples=8,
        max_tokens=MAX_REPLY_TOKENS,
        eval_problems=budget().eval_problems,
        lr_fraction=RL_LR_FRACTION,
    )
    rl.train_rl(name, config, learning, rl.RLOptions())
    _exam(RL)


def _exam(name: str) -> None:
    """Writes the model's accuracy on each kind of question about the sample world to its run folder."""
    from nanorun.evals import chat
    from nanorun.evals.replies import ReplySettings

    folder, per_task = home.runs_dir() / name, budget().exam_questions
    say(f"    exam: up to {per_task} questions of each task")
    options = chat.ChatEvalOptions(
        name,
        chat.SAMPLE_TASKS,
        max_per_task=per_task,
        settings=ReplySettings(MAX_REPLY_TOKENS),
        replies_file=folder / "exam.jsonl",
    )
    write_json(folder / EXAM, chat.evaluate_chat(options))


def _read_exam(folder: Path) -> dict[str, Any]:
    exam: dict[str, Any] = read_json(folder / EXAM, "remove it, and speedrun makes it again", EXAM_SHAPE)
    return exam


# -- the results -------------------------------------------------------------------------------------


def answers(questions: tuple[str, ...]) -> list[dict[str, Any]]:
    """The final model's greedy answers, as `nanorun chat -p` gives them."""
    from nanorun.chat.conversation import ChatOptions, Dialogue
    from nanorun.infer.load import ServedModel
    from nanorun.infer.request import Sampling

    results = []
    options = ChatOptions(sampling=Sampling(temperature=0.0), max_tokens=MAX_REPLY_TOKENS)
    with ServedModel(RL) as model:
        for question in questions:
            answer = Dialogue(model, options).ask(question)
            list(answer)
            results.append({"question": question, **answer.record()})
    return results


def show(result: dict[str, Any]) -> str:
    """One screen: the text, the base model's continuations, the exam, answers, and the next commands."""
    tokenizer, base, rl = open_tokenizer(SAMPLE_TOKENIZER), result["base"], result["rl"]
    early = islice(sample.documents("val", 10**6), 100)
    story = max((text for text in early if not set("?-0123456789") & set(text)), key=len)
    line = max(story.splitlines(), key=len)
    line = line[: line.find(". ", 80) + 1] or line
    pieces = [tokenizer.decode([i]) for i in tokenizer.encode(line)]
    rewards = [
        f"{task} {rl['before'].get(f'val_reward_{task}', 0):.2f} → {rl[f'val_reward_{task}']:.2f}"
        for task in RL_TASKS
    ]
    folder = Path(result["home"]).resolve()
    lines = [
        "",
        f"THE LANTERN ISLES, AS THE MODEL READS THEM ({len(line.encode())} bytes, {len(pieces)} tokens)",
        "",
        "│".join(pieces),
        "",
        f"HOW THE BASE MODEL CONTINUES AFTER THE BAR ({base['val_bpb']:.3f} bits per byte on validation text)",
        "",
        *(f"{each['prompt']}│ {' '.join(each['text'].split())}" for each in base["samples"][:2]),
        "",
        "ACCURACY OF THE CHAT MODEL (held-out phrasings of the questions, with 95% intervals)",
        "",
        exam_table(result["exams"][SFT], result["exams"][RL]),
        "",
        "Mean reward of sampled replies to held-out questions, before and after reinforcement learning:",
        ", ".join(rewards) + ".",
        "",
        "WHAT IT ANSWERS",
        "",
        *(f"> {each['question']}\n{_one_line(each['parts'])}" for each in result["answers"]),
        "",
        f"Everything is in {folder}: data/{SAMPLE_DATA}, tokenizers/{SAMPLE_TOKENIZER}, and in runs/",
        f"{BASE}, {MID}, {SFT} and {RL}, with plots: loss.png, and in {RL} reward.png.",
        "",
        "NEXT",
        "",
        *_next_commands(),
    ]
    return "\n".join(lines)


def _next_commands() -> list[str]:
    uses = {
        "chat": f"talk to it, or: {command('chat')} -p '{QUESTIONS[0]}'",
        "serve": "the same in a browser, and for programs",
        "runs": "what was trained, with scores",
        "make FOLDER": "a model of your own text; --conversations FILE teaches it to answer",
    }
    width = max(len(command(verb)) for verb in uses) + 4
    return [f"{command(verb):{width}}{use}" for verb, use in uses.items()]


def exam_table(before: dict[str, Any], after: dict[str, Any]) -> str:
    def accuracy(row: dict[str, Any]) -> list[str]:
        return [f"{row['accuracy']:.1%}", f"{row['low']:.0%} to {row['high']:.0%}"]

    pairs = zip(before["tasks"], after["tasks"], strict=True)
    rows = [[one["task"], f"{one['n']}", *accuracy(one), *accuracy(other)] for one, other in pairs]
    return table(["task", "questions", "after SFT", "", "after RL", ""], rows)


def _one_line(parts: list[dict[str, str]]) -> str:
    """An answer on one line, its tool calls in brackets: [12+30 = 42]."""
    marks = {"text": "{}", "python": "[{}", "output": " = {}]"}
    return " ".join("".join(marks[part["type"]].format(part["text"]) for part in parts).split())
