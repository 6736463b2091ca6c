"""CORE's 22 tasks as a bundle describes them, and the prompts they become.

A task has one of three types:

    multiple_choice     one question, several answers: which answer follows it most readily?
    schema              several beginnings, one end: after which beginning does the end follow most readily?
    language_modeling   one text to go on with: is the next of it, word for word, what the model would say?

A prompt is so many solved examples ("shots"), each followed by an empty line, and then the question. Between
question and answer stands the task's delimiter. The rules that make scores comparable between programs:

- The examples of a task are shuffled with random.Random(1337). A cap takes the first N.
- The shots of example i are drawn by random.Random(1234 + i) from the other examples (of those under the cap;
  where these are too few for the shots, from the first shots + 1).
- The text to go on with (and only there) loses the blanks around it, and so does the prompt's end: blanks
  before an answer belong to its first token.
"""

import csv
import io
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

from nanorun.data.bundle import MARKER, Bundle
from nanorun.errors import UserError

Kind = Literal["multiple_choice", "schema", "language_modeling"]
Example = dict[str, Any]

_BASELINES = "eval_meta_data.csv"
_MMLU_FILES = ("eval_data/world_knowledge/mmlu.jsonl", "eval_data/world_knowledge/mmlu_test.jsonl")
_STAND_IN = ("coqa", 495)  # the real one has 7,983 questions


@dataclass(frozen=True)
class Task:
    label: str
    kind: Kind
    shots: int
    delimiter: str
    baseline: float  # the published share of right answers of someone who guesses
    file: str
    in_core: bool = True

    def centred(self, accuracy: float) -> float:
        """0 for guessing, 1 for all right."""
        return (accuracy - self.baseline) / (1 - self.baseline)


def shown_name(label: str, questions: int) -> str:
    return f"{label} (stand-in)" if (label, questions) == _STAND_IN else label


# Tasks


def read_tasks(bundle: Bundle) -> list[Task]:
    import yaml

    try:
        described = yaml.safe_load(bundle.read(MARKER))
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise _unusable(bundle, MARKER, f"is not YAML ({str(error).splitlines()[0]})") from error
    entries = described.get("icl_tasks") if isinstance(described, dict) else None
    if not isinstance(entries, list) or not entries:
        raise _unusable(bundle, MARKER, "has no list 'icl_tasks'")
    baselines = _read_baselines(bundle)
    tasks = [_task(bundle, entry, baselines) for entry in entries]
    if len({task.label for task in tasks}) < len(tasks):
        raise _unusable(bundle, MARKER, "names a task twice")
    return tasks


def choose_tasks(bundle: Bundle, tasks: list[Task], names: Sequence[str]) -> list[Task]:
    """Those meant by a label, or by the beginning of one or more: 'arc' is arc_easy and arc_challenge."""
    chosen: list[Task] = []
    for name in names:
        found = [task for task in tasks if task.label == name]
        found = found or [task for task in tasks if task.label.startswith(f"{name}_")]
        if not found and name == "mmlu":
            found = [_mmlu(bundle)]
        if not found:
            known = ", ".join(task.label for task in tasks)
            raise UserError(f"There is no task '{name}' in {bundle.where}: choose among mmlu, {known}.")
        chosen += [task for task in found if task not in chosen]
    return chosen


def _task(bundle: Bundle, entry: Any, baselines: dict[str, float]) -> Task:
    def need(key: str, kind: type) -> Any:
        value = entry.get(key) if isinstance(entry, dict) else None
        if not isinstance(value, kind):
            raise _unusable(bundle, MARKER, f"has a task without a proper '{key}'")
        return value

    label, kind, shots = need("label", str), need("icl_task_type", str), need("num_fewshot", list)
    if kind not in ("multiple_choice", "schema", "language_modeling"):
        raise _unusable(
            bundle, MARKER, f"gives {label!r} the type {kind!r}, which is not one of CORE's three"
        )
    if len(shots) != 1 or type(shots[0]) is not int or not 0 <= shots[0] <= 1000:
        raise _unusable(bundle, MARKER, f"gives {label!r} num_fewshot {shots!r}, not one number such as [10]")
    if label not in baselines:
        raise _unusable(bundle, _BASELINES, f"has no baseline for {label!r}")
    delimiter = entry.get("continuation_delimiter", " ")
    if not isinstance(delimiter, str):
        raise _unusable(bundle, MARKER, f"gives {label!r} a continuation_delimiter that is no text")
    file = f"eval_data/{need('dataset_uri', str)}"
    return Task(label, cast(Kind, kind), shots[0], delimiter, baselines[label], file)


def _read_baselines(bundle: Bundle) -> dict[str, float]:
    """By label; the file has percents."""
    try:
        rows = list(csv.DictReader(io.StringIO(bundle.read(_BASELINES).decode("utf-8-sig"))))
        found = {row["Eval Task"]: float(row["Random baseline"]) / 100 for row in rows}
    except (KeyError, TypeError, ValueError, csv.Error) as error:
        fault = "is not a table with 'Eval Task' and 'Random baseline'"
        raise _unusable(bundle, _BASELINES, fault) from error
    if bad := next((label for label, value in found.items() if not 0 <= value < 1), None):
        raise _unusable(bundle, _BASELINES, f"has a baseline for {bad!r} that is not from 0 to 100 percent")
    return found


def _mmlu(bundle: Bundle) -> Task:
    """Not one of the 22: five shots, and a letter as the answer."""
    file = next((name for name in _MMLU_FILES if name in bundle.names), None)
    if file is None:
        raise UserError(f"{bundle.where} has no MMLU: --mmlu FILE names its questions (mmlu_test.jsonl).")
    return Task("mmlu", "multiple_choice", 5, " ", 0.25, file, in_core=False)


def mmlu_from(path: Path) -> tuple[Task, Bundle]:
    """The task whose questions are in a file of one's own."""
    if not path.is_file():
        raise UserError(f"There is no file {path}: --mmlu names MMLU's questions, such as mmlu_test.jsonl.")
    task = Task("mmlu", "multiple_choice", 5, " ", 0.25, path.name, in_core=False)
    return task, Bundle(path.parent, frozenset([path.name]), lambda name: (path.parent / name).read_bytes())


def _unusable(bundle: Bundle, name: str, fault: str) -> UserError:
    return UserError(f"{name} in {bundle.where} {fault}: get the bundle anew, or name another one.")


# Examples


def read_examples(bundle: Bundle, task: Task, content: bytes | None = None) -> list[Example]:
    """All of them, in the order of everyone's shuffle."""
    lines = (content if content is not None else bundle.read(task.file)).split(b"\n")
    examples = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                examples.append(_checked(task, _standard(json.loads(line))))
            except (ValueError, RecursionError) as error:
                fault = str(error) if type(error) is ValueError else "is not JSON"
                raise UserError(
                    f"Line {number} of {task.file} in {bundle.where} {fault}: get the bundle anew."
                ) from error
    if len(examples) <= task.shots:
        raise _unusable(bundle, task.file, f"has {len(examples)} examples, too few for {task.shots} shots")
    random.Random(1337).shuffle(examples)
    return examples


def _standard(example: Any) -> Any:
    """MMLU's own form as a question that is answered by a letter; anything else as it is."""
    if not isinstance(example, dict) or not {"question", "choices", "answer"} <= example.keys():
        return example
    letters = "ABCDEFGHIJ"[: len(example["choices"])]
    options = "\n".join(f"{a}. {choice}" for a, choice in zip(letters, example["choices"], strict=True))
    query = f"{str(example['question']).strip()}\n{options}\nAnswer:"
    return {"query": query, "choices": list(letters), "gold": example["answer"]}


def _checked(task: Task, example: Any) -> Example:
    """The example, or a ValueError that says what is wrong with it."""
    if not isinstance(example, dict):
        raise ValueError("is not an object")
    texts = {"multiple_choice": "query", "schema": "continuation", "language_modeling": "context"}[task.kind]
    if not isinstance(example.get(texts), str):
        raise ValueError(f"has no text '{texts}'")
    if task.kind != "multiple_choice" and not str(example.get("continuation") or "").strip():
        raise ValueError("has no 'continuation'")
    if task.kind == "language_modeling":
        if not isinstance(example["continuation"], str):
            raise ValueError("has no text 'continuation'")
        return example
    options = example.get("choices" if task.kind == "multiple_choice" else "context_options")
    if not isinstance(options, list) or len(options) < 2 or not all(isinstance(o, str) for o in options):
        raise ValueError("has no list of two or more texts to choose from")
    if type(example.get("gold")) is not int or not 0 <= example["gold"] < len(options):
        raise ValueError(f"has gold {example.get('gold')!r}, which is none of its {len(options)} choices")
    return example


def under_cap(task: Task, examples: list[Example], most: int | None) -> tuple[int, list[Example]]:
    """How many examples are asked, and the list that they and their shots are taken from."""
    asked = min(most or len(examples), len(examples))
    return asked, examples[: max(asked, task.shots + 1)]


# Prompts


def shots_of(task: Task, pool: Sequence[Example], index: int) -> list[Example]:
    """Drawn from the others, whose numbers skip `index`; a range spares us writing all of them down."""
    drawn = random.Random(1234 + index).sample(range(len(pool) - 1), task.shots)
    return [pool[i if i < index else i + 1] for i in drawn]


def render(task: Task, pool: Sequence[Example], index: int) -> list[str]:
    """The texts to compare, one a choice; of a text to go on with: without its continuation, and with it."""
    example, between = pool[index], task.delimiter
    before = "".join(f"{_solved(task, shot)}\n\n" for shot in shots_of(task, pool, index))
    if task.kind == "multiple_choice":
        return [f"{before}{example['query']}{between}{choice}" for choice in example["choices"]]
    if task.kind == "schema":
        end = f"{between}{example['continuation']}"
        return [f"{before}{context}{end}" for context in example["context_options"]]
    prompt = f"{before}{example['context'].strip()}{between}"
    return [prompt.strip(), prompt + example["continuation"]]


def _solved(task: Task, example: Example) -> str:
    if task.kind == "multiple_choice":
        return f"{example['query']}{task.delimiter}{example['choices'][example['gold']]}"
    if task.kind == "schema":
        return f"{example['context_options'][example['gold']]}{task.delimiter}{example['continuation']}"
    return f"{example['context'].strip()}{task.delimiter}{example['continuation']}"


def rendered(task: Task, pool: Sequence[Example], asked: int) -> Iterator[list[str]]:
    return (render(task, pool, index) for index in range(asked))
