"""ChatCORE, `nanorun eval chat`: how often a chat model answers correctly, over several tasks.

    accuracy   the mean reward of a task's replies
    centred    (accuracy - baseline) / (1 - baseline): 0 is guessing, 1 is perfect
    ChatCORE   the mean of the centred accuracies

The 95% interval of an accuracy is Wilson's, which stays between 0 and 1 and is valid for few questions, too. It
counts questions, not samples: several replies to one question say little about other questions. With several
samples, pass@k is the probability that at least one of k replies is correct, by the unbiased estimate from n
samples: 1 - C(n - correct, k) / C(n, k).

Generating and grading are two steps, with a readable file of JSON lines in between. So a machine with a GPU and
no sandbox generates (`--keep FILE`), and one with a sandbox grades (`--judge FILE`). A reply that could not be
graded has no reward, and then there is no ChatCORE either.
"""

import functools
import json
import math
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from nanorun import home
from nanorun.console import Progress, say
from nanorun.errors import UserError
from nanorun.evals.replies import GradedReply, ReplySettings, generate_replies, question_text
from nanorun.infer.load import load_model, model_from_weights
from nanorun.json_files import check_shape, parse_json, read_limited
from nanorun.model.gpt import GPT
from nanorun.provenance import record
from nanorun.tasks import catalogue, sample
from nanorun.tasks.task import Task
from nanorun.text.tokenizer import Tokenizer
from nanorun.tools.sandbox import SandboxUnavailable

SAMPLE_TASKS = tuple(sample.TASKS)
SHUFFLE_SEED = 1337  # selects the questions of a task when not all are asked
Z_95 = 1.959963984540054
_FORMAT, _VERSION = "nanorun-replies", 1
_MAX_BYTES = 1 << 28  # of a file of replies
_ABOUT_SHAPE = {"format": str, "version": int, "model": str, "step": int, "split": str, "questions": dict}
_REPLY_SHAPE = {
    **dict.fromkeys(("task", "question", "finish"), str),
    **dict.fromkeys(("index", "sample"), int),
    "reply": [{"type": str, "text": str}],
    "reward?": (float, None),
}


@dataclass(frozen=True)
class ChatEvalOptions:
    model: str | None = None  # a run; None: the chat model that was trained last, or else the base model
    tasks: Sequence[str] = ()  # empty: the tasks of ChatCORE whose files are present
    split: str = "test"
    max_per_task: int | None = None
    settings: ReplySettings = field(default_factory=ReplySettings)
    replies_file: Path | None = None  # None: in the run's folder
    folder: Path | None = None  # of the public tasks' files; None: tasks/ in the home


def evaluate_chat(options: ChatEvalOptions) -> dict[str, Any]:
    """Generates, grades and saves the replies; returns the scores as one record."""
    loaded = load_model(options.model, prefer_chat=True)
    if options.model is None:
        say(f"evaluating {loaded}")
    tasks = open_tasks(options, loaded.config.data)
    replies: list[GradedReply] = []
    for spec, task in tasks.items():
        indices = select_questions(len(task), options.max_per_task)
        with Progress(f"asking {spec}", len(indices), "question") as bar:
            on_reply = functools.partial(bar.advance, 1)
            replies += generate_replies(
                loaded.model, loaded.tokenizer, spec, task, indices, options.settings, on_reply
            )
    graded = grade_replies(tasks, replies, allow_ungraded=options.replies_file is not None)
    about = {
        "model": loaded.run,
        "step": loaded.step,
        "split": options.split,
        **{key: value for key, value in asdict(options.settings).items() if key != "batch"},
        "questions": {spec: len(task) for spec, task in tasks.items()},
    }
    path = options.replies_file or home.runs_dir() / loaded.run / f"chat-{loaded.step:06d}.jsonl"
    write_replies(path, about, graded)
    return record("chat", **about, **score_replies(tasks, graded), replies=str(path))


def grade_file(path: Path, trusted: Sequence[str] = (), folder: Path | None = None) -> dict[str, Any]:
    """Grades the replies of another machine; the rewards go to a second file next to it.

    A task that is code runs only if the command line names it, too: a file must not choose what code runs.
    """
    about, replies = read_replies(path)
    for spec in about["questions"]:
        if ".py" in spec and spec not in trusted:
            raise UserError(
                f"{path} was answered with the code {spec}, which runs if you add --tasks {spec}."
            )
    tasks = {spec: open_task(spec, about["split"], folder) for spec in about["questions"]}
    for reply in replies:
        task = tasks[reply.task]
        if reply.index >= len(task) or question_text(task[reply.index]) != reply.question:
            raise UserError(
                f"Question {reply.index} of {reply.task} differs here from the one in {path}: use the task files "
                "that the replies were generated with."
            )
    graded = grade_replies(tasks, replies, allow_ungraded=False)
    graded_path = path.with_name(f"{path.stem}-judged.jsonl")
    write_replies(graded_path, about, graded)
    return record("chat", **about, **score_replies(tasks, graded), replies=str(graded_path))


def open_task(spec: str, split: str, folder: Path | None = None) -> Task:
    """A task that the command line names, which may be the user's own code, `file.py:Class`."""
    return catalogue.open_task(spec, split, folder, [spec])


def open_tasks(options: ChatEvalOptions, data: str) -> dict[str, Task]:
    """The named tasks or, without names, those of ChatCORE that are present (of the sample world, its own)."""
    if options.tasks:
        return {spec: open_task(spec, options.split, options.folder) for spec in options.tasks}
    tasks, missing = dict[str, Task](), list[str]()
    for spec in SAMPLE_TASKS if data == "sample" else catalogue.CHATCORE:
        try:
            tasks[spec] = open_task(spec, options.split, options.folder)
        except UserError as error:
            missing.append(str(error))
    if not tasks:
        raise UserError(missing[0])
    for message in missing:
        say(f"left out: {message}")
    return tasks


def select_questions(count: int, limit: int | None) -> list[int]:
    """All questions, or a fixed random selection of `limit`."""
    if limit is None or limit >= count:
        return list(range(count))
    order = list(range(count))
    random.Random(SHUFFLE_SEED).shuffle(order)
    return sorted(order[:limit])


# -- grading -----------------------------------------------------------------------------------------


def grade_replies(
    tasks: Mapping[str, Task], replies: Sequence[GradedReply], *, allow_ungraded: bool
) -> list[GradedReply]:
    """The replies with their rewards. A task that needs a missing sandbox stays ungraded, or is an error."""
    graded, ungraded = list[GradedReply](), dict[str, str]()
    for reply in replies:
        if reply.task not in ungraded:
            try:
                graded.append(replace(reply, reward=checked_reward(tasks[reply.task], reply)))
                continue
            except SandboxUnavailable as error:
                if not allow_ungraded:
                    raise UserError(
                        f"{error} Or write the replies to a file here (--keep FILE) and grade them on a machine with a "
                        "sandbox (--judge FILE)."
                    ) from error
                ungraded[reply.task] = error.problem
        graded.append(replace(reply, reward=None))
    for spec, problem in ungraded.items():
        say(f"{spec} is not graded yet: {problem}")
    return graded


def checked_reward(task: Task, reply: GradedReply) -> float:
    reward = float(task.reward(reply.index, reply.reply))
    if not 0 <= reward <= 1:  # also refuses NaN
        raise UserError(
            f"The task {reply.task} rewards reply {reply.index} with {reward}: it must be from 0 to 1."
        )
    return reward


@dataclass(frozen=True)
class ChatScore:
    """ChatCORE during training."""

    scores: Mapping[str, Any]  # what `score_replies` returns

    def figures(self) -> dict[str, Any]:
        each = {f"chat_{row['task']}": row["accuracy"] for row in self.scores["tasks"]}
        return {"chatcore": self.scores["chatcore"], **each}

    def sentence(self) -> str:
        each = ", ".join(f"{row['task']} {row['accuracy']:.0%}" for row in self.scores["tasks"])
        return f"ChatCORE {self.scores['chatcore'] or 0:.3f} ({each})"


def chat_evaluator(
    tokenizer: Tokenizer, tasks: Mapping[str, Task], max_per_task: int
) -> Callable[[GPT], ChatScore]:
    """Returns a function that evaluates a model in training on the same questions of each task every time.

    Tasks that this machine cannot grade are left out. The weights are copied: the model in training may be
    compiled for one row length, and questions have all lengths.
    """

    def evaluate(model: GPT) -> ChatScore:
        device = model.embed.weight.device
        copy = model_from_weights(model.state_dict(), model.config, device, model.dtype).eval()
        replies = list[GradedReply]()
        for spec, task in tasks.items():
            indices = select_questions(len(task), max_per_task)
            replies += generate_replies(copy, tokenizer, spec, task, indices, ReplySettings())
        graded = grade_replies(tasks, replies, allow_ungraded=True)
        ungraded = {reply.task for reply in graded if reply.reward is None}
        known = {spec: task for spec, task in tasks.items() if spec not in ungraded}
        return ChatScore(score_replies(known, [reply for reply in graded if reply.task in known]))

    return evaluate


# -- scores ------------------------------------------------------------------------------------------


def score_replies(tasks: Mapping[str, Task], replies: Iterable[GradedReply]) -> dict[str, Any]:
    by_task: dict[str, dict[int, list[GradedReply]]] = {spec: {} for spec in tasks}
    for reply in replies:
        by_task[reply.task].setdefault(reply.index, []).append(reply)
    rows = [_score_task(spec, tasks[spec], list(groups.values())) for spec, groups in by_task.items()]
    ungraded = [row["task"] for row in rows if row["accuracy"] is None]
    core = low = high = None
    if rows and not ungraded:
        core = sum(row["centred"] for row in rows) / len(rows)
        error = Z_95 * math.sqrt(sum((row["error"] / (1 - row["baseline"])) ** 2 for row in rows)) / len(rows)
        low, high = core - error, core + error
    return {"chatcore": core, "chatcore_low": low, "chatcore_high": high, "tasks": rows, "unjudged": ungraded}


def _score_task(spec: str, task: Task, groups: list[list[GradedReply]]) -> dict[str, Any]:
    """`groups` holds the samples of each question."""
    if not 0 <= task.baseline < 1:
        raise UserError(f"The task {spec} has the baseline {task.baseline}: it must be from 0 to below 1.")
    row: dict[str, Any] = {"task": spec, "n": len(groups), "samples": max(map(len, groups), default=0)}
    row |= {"baseline": task.baseline, "by": "letters" if task.letters is not None else "generation"}
    rewards = [[reply.reward for reply in group if reply.reward is not None] for group in groups]
    if not groups or any(len(known) < len(group) for known, group in zip(rewards, groups, strict=True)):
        return row | dict.fromkeys(("accuracy", "low", "high", "error", "centred", "cut", "pass"))
    means = [sum(known) / len(known) for known in rewards]
    accuracy = sum(means) / len(means)
    low, high = wilson_interval(accuracy, len(means))
    variance = sum((mean - accuracy) ** 2 for mean in means) / len(means)
    truncated = [reply.finish == "length" for group in groups for reply in group]
    return row | {
        "accuracy": accuracy,
        "low": low,
        "high": high,
        "error": math.sqrt(variance / len(means)),
        "centred": (accuracy - task.baseline) / (1 - task.baseline),
        "cut": sum(truncated) / len(truncated),
        "pass": pass_at_k(rewards) if row["samples"] > 1 else None,
    }


def wilson_interval(share: float, n: int) -> tuple[float, float]:
    """The 95% confidence interval of a share observed in n trials."""
    square = Z_95 * Z_95
    middle = (share + square / (2 * n)) / (1 + square / n)
    half = Z_95 / (1 + square / n) * math.sqrt(share * (1 - share) / n + square / (4 * n * n))
    return max(middle - half, 0.0), min(middle + half, 1.0)


def pass_at_k(rewards: Sequence[Sequence[float]]) -> dict[str, float]:
    """pass@k over questions, for k = 1, 2, 4, ... samples of each. A reply is correct if its reward is 1."""
    n = min(map(len, rewards))
    result = {}
    for k in sorted({1 << power for power in range(n.bit_length())} | {n}):
        counts = [(len(samples), sum(reward >= 1 for reward in samples)) for samples in rewards]
        chances = [1 - math.comb(total - correct, k) / math.comb(total, k) for total, correct in counts]
        result[str(k)] = sum(chances) / len(chances)
    return result


# -- files of replies --------------------------------------------------------------------------------


def write_replies(path: Path, about: Mapping[str, Any], replies: Iterable[GradedReply]) -> None:
    """A header line, then a line for each reply. The file is written atomically."""
    records = ({"format": _FORMAT, "version": _VERSION, **about}, *map(asdict, replies))
    text = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
    try:
        home.replace_file(path, text.encode())
    except OSError as error:
        raise UserError(f"{path} cannot be written ({error.strerror}): choose another file.") from error


def read_replies(path: Path) -> tuple[dict[str, Any], list[GradedReply]]:
    try:
        about, *records = [
            parse_json(line) for line in read_limited(path, _MAX_BYTES).split(b"\n") if line
        ] or [{}]
        check_shape(about, _ABOUT_SHAPE)
        check_shape(records, [_REPLY_SHAPE], "reply ")
        if (about.pop("format"), about.pop("version")) != (_FORMAT, _VERSION):
            raise ValueError("its first line is not the header of such a file")
        names = [f.name for f in fields(GradedReply)]
        replies = [GradedReply(**{name: each[name] for name in names if name in each}) for each in records]
        if any(reply.index < 0 for reply in replies):
            raise ValueError("the index of a reply is negative")
        if missing := {reply.task for reply in replies} - set(about["questions"]):
            raise ValueError(f"its header does not mention {', '.join(missing)}")
        return about, replies
    except OSError as error:
        raise UserError(f"Cannot read {path}: {error.strerror}.") from error
    except ValueError as error:
        raise UserError(f"{path} is not what eval chat --keep writes ({error}): name such a file.") from error
