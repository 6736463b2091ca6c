"""ChatCORE, `nanorun eval chat`: how often a chat model answers rightly, over several tasks.

    accuracy   the mean reward of a task's answers
    centred    (accuracy - baseline) / (1 - baseline): 0 is guessing, 1 is perfect
    ChatCORE   the mean of the centred accuracies

The 95% interval of an accuracy is Wilson's, which stays between 0 and 1 and is right for few questions, too. It
counts questions, not samples: several replies to one question tell little about other questions. With several
samples, pass@k is the chance that at least one of k replies is right, by the unbiased estimate from n samples:
1 - C(n - right, k) / C(n, k).

Answering and judging are two steps, and the answers between them a file of JSON lines that a person can read.
So a machine with a GPU and no sandbox answers (`--keep FILE`), and one with a sandbox judges (`--judge FILE`).
What could not be judged has no reward, and then there is no ChatCORE either.
"""

import functools
import importlib
import json
import math
import os
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from nanorun import home
from nanorun.console import Progress, say
from nanorun.errors import UserError
from nanorun.evals.replies import Answer, Manner, answer_task, asked
from nanorun.infer.load import load_model, model_from_weights
from nanorun.model.gpt import GPT
from nanorun.provenance import record
from nanorun.runs import runs_for_chat
from nanorun.tasks.task import Task
from nanorun.text.store import open_tokenizer
from nanorun.text.tokenizer import Tokenizer
from nanorun.tools.sandbox import SandboxUnavailable

CHATCORE = ("arc-easy", "arc-challenge", "mmlu", "gsm8k", "humaneval", "spelling")
SAMPLE = ("sample-facts", "sample-sums", "sample-spelling", "sample-counting")
SHUFFLE_SEED = 1337  # which questions stand for a task when not all are asked
Z_95 = 1.959963984540054
_FORMAT, _VERSION = "nanorun-replies", 1


@dataclass(frozen=True)
class Options:
    model: str | None = None  # a run; None: the newest chat model, or else the newest
    tasks: Sequence[str] = ()  # none: those of ChatCORE that are here
    split: str = "test"
    max_per_task: int | None = None
    manner: Manner = field(default_factory=Manner)
    keep: Path | None = None  # where to put the answers; None: into the run's folder
    folder: Path | None = None  # of the public tasks' files; None: tasks/ in the home


def evaluate_chat(options: Options) -> dict[str, Any]:
    """Answers, judges and keeps; the figures as one record."""
    loaded = load_model(options.model, runs_for_chat())
    name, step, config, model = loaded.run, loaded.step, loaded.config, loaded.model
    tokenizer = open_tokenizer(config.tokenizer)
    tasks = open_tasks(options, config.data)
    answers = answer_tasks(model, tokenizer, tasks, options.manner, options.max_per_task)
    judged = judge(tasks, answers, may_wait=options.keep is not None)
    about = {
        "model": name,
        "step": step,
        "split": options.split,
        **{key: value for key, value in asdict(options.manner).items() if key != "batch"},
        "questions": {spec: len(task) for spec, task in tasks.items()},
    }
    kept = options.keep or home.runs_dir() / name / f"chat-{step:06d}.jsonl"
    write_replies(kept, about, judged)
    return record("chat", **about, **score(tasks, judged), replies=str(kept))


def judge_file(path: Path, trusted: Sequence[str] = (), folder: Path | None = None) -> dict[str, Any]:
    """Judges the answers of another machine; the rewards stand in a file beside it.

    A task that is code is only run if it is named here, too: a file must not be able to run what it likes.
    """
    about, answers = read_replies(path)
    for spec in about["questions"]:
        if ".py" in spec and spec not in trusted:
            raise UserError(
                f"{path} was answered with the code {spec}, which runs if you add --tasks {spec}."
            )
    tasks = {spec: open_task(spec, about["split"], folder) for spec in about["questions"]}
    for answer in answers:
        task = tasks[answer.task]
        if answer.index >= len(task) or asked(task[answer.index]) != answer.question:
            raise UserError(
                f"Question {answer.index} of {answer.task} is another one here than in {path}: judge with the "
                "files that the answers were made with."
            )
    judged = judge(tasks, answers, may_wait=False)
    beside = path.with_name(f"{path.stem}-judged.jsonl")
    write_replies(beside, about, judged)
    return record("chat", **about, **score(tasks, judged), replies=str(beside))


def open_task(spec: str, split: str, folder: Path | None = None) -> Task:
    """A task by name, whose files are in the folder, or a person's own, `file.py:Class`: code that may be run."""
    try:
        catalogue = importlib.import_module("nanorun.tasks.catalogue")
    except ModuleNotFoundError as error:
        raise UserError(
            f"This nanorun cannot open '{spec}', it has no tasks ({error}): update it."
        ) from error
    task: Task = catalogue.open_task(spec, split, folder, [spec])
    return task


def open_tasks(options: Options, data: str) -> dict[str, Task]:
    """Those that are named, or else those of ChatCORE that are here; for the sample world, its own."""
    if options.tasks:
        return {spec: open_task(spec, options.split, options.folder) for spec in options.tasks}
    found, absent = dict[str, Task](), list[str]()
    for spec in SAMPLE if data == "sample" else CHATCORE:
        try:
            found[spec] = open_task(spec, options.split, options.folder)
        except UserError as error:
            absent.append(str(error))
    if not found:
        raise UserError(absent[0])
    for sentence in absent:
        say(f"left out: {sentence}")
    return found


# -- answering and judging ---------------------------------------------------------------------------


def answer_tasks(
    model: GPT,
    tokenizer: Tokenizer,
    tasks: Mapping[str, Task],
    manner: Manner,
    max_per_task: int | None = None,
) -> list[Answer]:
    answers: list[Answer] = []
    for spec, task in tasks.items():
        indices = chosen_questions(len(task), max_per_task)
        with Progress(f"asking {spec}", len(indices), "question") as bar:
            tick = functools.partial(bar.advance, 1)
            answers += answer_task(model, tokenizer, spec, task, indices, manner, tick)
    return answers


def chosen_questions(count: int, most: int | None) -> list[int]:
    """All of them, or so many from all over the task, the same every time."""
    if most is None or most >= count:
        return list(range(count))
    order = list(range(count))
    random.Random(SHUFFLE_SEED).shuffle(order)
    return sorted(order[:most])


def judge(tasks: Mapping[str, Task], answers: Sequence[Answer], *, may_wait: bool) -> list[Answer]:
    """The answers with their rewards. What needs a sandbox that is not here may wait, or is refused."""
    judged, waiting = list[Answer](), dict[str, str]()
    for answer in answers:
        if answer.task not in waiting:
            try:
                judged.append(replace(answer, reward=reward_of(tasks[answer.task], answer.task, answer)))
                continue
            except SandboxUnavailable as error:
                if not may_wait:
                    raise UserError(
                        f"{error} Or keep the answers here (--keep FILE) and judge them where there is a sandbox "
                        "(--judge FILE)."
                    ) from error
                waiting[answer.task] = error.problem
        judged.append(replace(answer, reward=None))
    for spec, problem in waiting.items():
        say(f"{spec} waits to be judged elsewhere: {problem}")
    return judged


def reward_of(task: Task, spec: str, answer: Answer) -> float:
    reward = float(task.reward(answer.index, answer.reply))
    if not 0 <= reward <= 1:  # nor is NaN
        raise UserError(
            f"The task {spec} rewards answer {answer.index} with {reward}: it must be from 0 to 1."
        )
    return reward


@dataclass(frozen=True)
class Marks:
    """ChatCORE while a model trains."""

    scored: Mapping[str, Any]  # what `score` returns

    def figures(self) -> dict[str, Any]:
        each = {f"chat_{row['task']}": row["accuracy"] for row in self.scored["tasks"]}
        return {"chatcore": self.scored["chatcore"], **each}

    def sentence(self) -> str:
        each = ", ".join(f"{row['task']} {row['accuracy']:.0%}" for row in self.scored["tasks"])
        return f"ChatCORE {self.scored['chatcore'] or 0:.3f} ({each})"


def examiner(tokenizer: Tokenizer, tasks: Mapping[str, Task], most: int) -> Callable[[GPT], Marks]:
    """Asks a model that is in training at most so many questions of each task, always the same.

    What this machine cannot judge counts for nothing. The weights are copied: the model in training may be
    compiled for rows of one length, and questions have all lengths.
    """

    def ask(model: GPT) -> Marks:
        device = model.embed.weight.device
        copy = model_from_weights(model.state_dict(), model.config, device, model.dtype)
        answers = list[Answer]()
        for spec, task in tasks.items():
            chosen = chosen_questions(len(task), most)
            answers += answer_task(copy.eval(), tokenizer, spec, task, chosen, Manner())
        judged = judge(tasks, answers, may_wait=True)
        known = {spec: task for spec, task in tasks.items() if judgeable(spec, judged)}
        return Marks(score(known, [answer for answer in judged if answer.task in known]))

    return ask


def judgeable(spec: str, judged: Iterable[Answer]) -> bool:
    return all(answer.reward is not None for answer in judged if answer.task == spec)


# -- the figures -------------------------------------------------------------------------------------


def score(tasks: Mapping[str, Task], answers: Iterable[Answer]) -> dict[str, Any]:
    by_task: dict[str, dict[int, list[Answer]]] = {spec: {} for spec in tasks}
    for answer in answers:
        by_task[answer.task].setdefault(answer.index, []).append(answer)
    rows = [_score_task(spec, tasks[spec], list(groups.values())) for spec, groups in by_task.items()]
    unjudged = [row["task"] for row in rows if row["accuracy"] is None]
    core = low = high = None
    if rows and not unjudged:
        core = sum(row["centred"] for row in rows) / len(rows)
        error = Z_95 * math.sqrt(sum((row["error"] / (1 - row["baseline"])) ** 2 for row in rows)) / len(rows)
        low, high = core - error, core + error
    return {"chatcore": core, "chatcore_low": low, "chatcore_high": high, "tasks": rows, "unjudged": unjudged}


def _score_task(spec: str, task: Task, groups: list[list[Answer]]) -> dict[str, Any]:
    """`groups` holds the samples of each question."""
    if not 0 <= task.baseline < 1:
        raise UserError(f"The task {spec} has the baseline {task.baseline}: it must be from 0 to below 1.")
    row: dict[str, Any] = {"task": spec, "n": len(groups), "samples": max(map(len, groups), default=0)}
    row |= {"baseline": task.baseline, "by": "letters" if task.letters is not None else "generation"}
    rewards = [[answer.reward for answer in group if answer.reward is not None] for group in groups]
    if not groups or any(len(mine) < len(group) for mine, group in zip(rewards, groups, strict=True)):
        return row | dict.fromkeys(("accuracy", "low", "high", "error", "centred", "cut", "pass"))
    means = [sum(mine) / len(mine) for mine in rewards]
    accuracy = sum(means) / len(means)
    low, high = wilson(accuracy, len(means))
    spread = sum((mean - accuracy) ** 2 for mean in means) / len(means)
    cut = [answer.finish == "length" for group in groups for answer in group]
    return row | {
        "accuracy": accuracy,
        "low": low,
        "high": high,
        "error": math.sqrt(spread / len(means)),
        "centred": (accuracy - task.baseline) / (1 - task.baseline),
        "cut": sum(cut) / len(cut),
        "pass": pass_at(rewards) if row["samples"] > 1 else None,
    }


def wilson(share: float, n: int) -> tuple[float, float]:
    """The 95% interval of a share seen in n trials."""
    square = Z_95 * Z_95
    middle = (share + square / (2 * n)) / (1 + square / n)
    half = Z_95 / (1 + square / n) * math.sqrt(share * (1 - share) / n + square / (4 * n * n))
    return max(middle - half, 0.0), min(middle + half, 1.0)


def pass_at(rewards: Sequence[Sequence[float]]) -> dict[str, float]:
    """pass@k over questions, for k = 1, 2, 4, ... samples of each. A reply is right when its reward is 1."""
    n = min(map(len, rewards))
    found = {}
    for k in sorted({1 << power for power in range(n.bit_length())} | {n}):
        chances = [1 - _none_right(len(mine), sum(r >= 1 for r in mine), k) for mine in rewards]
        found[str(k)] = sum(chances) / len(chances)
    return found


def _none_right(n: int, right: int, k: int) -> float:
    return math.comb(n - right, k) / math.comb(n, k)


# -- files of answers --------------------------------------------------------------------------------


def write_replies(path: Path, about: Mapping[str, Any], answers: Iterable[Answer]) -> None:
    """A line about all, then a line for each answer. The file is there whole or not at all."""
    beside = path.with_name(f".{path.name}.tmp")
    try:
        with open(beside, "w", encoding="utf-8") as file:
            for line in ({"format": _FORMAT, "version": _VERSION, **about}, *map(asdict, answers)):
                file.write(json.dumps(line, ensure_ascii=False) + "\n")
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    except OSError as error:
        raise UserError(f"{path} cannot be written ({error.strerror}): choose another file.") from error


def read_replies(path: Path) -> tuple[dict[str, Any], list[Answer]]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
        about, *records = [json.loads(line) for line in lines]
        if about.pop("format", None) != _FORMAT or about.pop("version", None) != _VERSION:
            raise ValueError("its first line is not that of such a file")
        answers = [Answer(**each) for each in records]
        missing = {answer.task for answer in answers} - set(about["questions"])
        if missing or "split" not in about:
            raise ValueError(f"its first line does not tell of {', '.join(missing) or 'a split'}")
        return about, answers
    except OSError as error:
        raise UserError(f"Cannot read {path}: {error.strerror}.") from error
    except (ValueError, TypeError, AttributeError, KeyError) as error:
        raise UserError(f"{path} is not what eval chat --keep writes ({error}): name such a file.") from error
