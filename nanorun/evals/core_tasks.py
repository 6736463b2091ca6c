"""CORE's 22 tasks as a bundle describes them, and their prompts as text.

A task has one of three types:

    multiple_choice     one question, several answers: which answer is most likely after the question?
    schema              several contexts, one continuation: after which context is it most likely?
    language_modeling   one context, one continuation: is it, token by token, the model's greedy continuation?

A prompt has solved examples ("shots"), each followed by an empty line, and then the question. The task's
delimiter separates question and answer. The rules that make scores comparable between implementations:

- The examples of a task are shuffled with random.Random(1337). A cap takes the first N.
- The shots of example i are drawn by random.Random(1234 + i) from the other examples (of those under the cap;
  if these are too few for the shots, from the first shots + 1).
- Only in language modeling, whitespace around the context and at the end of the prompt is stripped: whitespace
  before an answer belongs to the answer's first token.
"""

import csv
import io
import os
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

from nanorun.data.bundle import MARKER, MAX_BYTES, Bundle
from nanorun.errors import UserError
from nanorun.json_files import JsonError, parse_json, read_limited

CoreTaskType = Literal["multiple_choice", "schema", "language_modeling"]
Example = dict[str, Any]

_BASELINES = "eval_meta_data.csv"
_MMLU_FILES = ("eval_data/world_knowledge/mmlu.jsonl", "eval_data/world_knowledge/mmlu_test.jsonl")
_MAX_TABLE_BYTES = 1 << 18
_STAND_IN = ("coqa", 495)  # the original has 7,983 questions


@dataclass(frozen=True)
class CoreTask:
    label: str
    kind: CoreTaskType
    shots: int
    delimiter: str
    baseline: float  # the published accuracy of guessing
    file: str
    in_core: bool = True

    def centred(self, accuracy: float) -> float:
        """0 for guessing, 1 for all correct."""
        return (accuracy - self.baseline) / (1 - self.baseline)


def display_name(label: str, questions: int) -> str:
    return f"{label} (stand-in)" if (label, questions) == _STAND_IN else label


# -- tasks -------------------------------------------------------------------------------------------


def read_tasks(bundle: Bundle) -> list[CoreTask]:
    import yaml

    content = _read_small(bundle, MARKER)
    try:
        content = yaml.safe_load(content)
    # PyYAML's constructors look up and index what a tag such as !!int promises
    except (yaml.YAMLError, RecursionError, ValueError, LookupError, TypeError, AttributeError) as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise _invalid(bundle, MARKER, f"is not YAML ({reason:.100})") from error
    entries = content.get("icl_tasks") if isinstance(content, dict) else None
    if not isinstance(entries, list) or not entries:
        raise _invalid(bundle, MARKER, "has no list 'icl_tasks'")
    baselines = _read_baselines(bundle)
    tasks = [_parse_task(bundle, entry, baselines) for entry in entries]
    if len({task.label for task in tasks}) < len(tasks):
        raise _invalid(bundle, MARKER, "names a task twice")
    return tasks


def find_tasks(bundle: Bundle, tasks: list[CoreTask], names: Sequence[str]) -> list[CoreTask]:
    """Tasks by label, or by the first part of one or more: 'arc' is arc_easy and arc_challenge."""
    selected: list[CoreTask] = []
    for name in names:
        matches = [task for task in tasks if task.label == name]
        matches = matches or [task for task in tasks if task.label.startswith(f"{name}_")]
        if not matches and name == "mmlu":
            file = next((file for file in _MMLU_FILES if file in bundle.files), None)
            if file is None:
                raise UserError(
                    f"{bundle.where} has no MMLU: --mmlu FILE names its questions (mmlu_test.jsonl)."
                )
            matches = [_mmlu_task(file)]
        if not matches:
            known = ", ".join(task.label for task in tasks)
            raise UserError(f"There is no task '{name}' in {bundle.where}: choose among mmlu, {known}.")
        selected += [task for task in matches if task not in selected]
    return selected


def open_mmlu(path: Path) -> tuple[Bundle, CoreTask]:
    """MMLU with the questions of a file outside the bundle."""
    if not os.path.isfile(path):
        raise UserError(f"There is no file {path}: --mmlu names MMLU's questions, such as mmlu_test.jsonl.")
    try:
        return Bundle(path.parent, {path.name: read_limited(path, MAX_BYTES)}), _mmlu_task(path.name)
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}): check its permissions.") from error
    except ValueError as error:
        raise UserError(f"{path} holds no questions of MMLU ({error}): name another file.") from error


def _mmlu_task(file: str) -> CoreTask:
    """Not one of the 22: five shots, and a letter as the answer."""
    return CoreTask("mmlu", "multiple_choice", 5, " ", 0.25, file, in_core=False)


def _parse_task(bundle: Bundle, entry: Any, baselines: dict[str, float]) -> CoreTask:
    def required(key: str, kind: type) -> Any:
        value = entry.get(key) if isinstance(entry, dict) else None
        if not isinstance(value, kind):
            raise _invalid(bundle, MARKER, f"has a task without a valid '{key}'")
        return value

    label, kind = required("label", str), required("icl_task_type", str)
    shots = required("num_fewshot", list)
    if kind not in ("multiple_choice", "schema", "language_modeling"):
        raise _invalid(bundle, MARKER, f"gives {label!r} the type {kind!r}, which is not one of CORE's three")
    if len(shots) != 1 or type(shots[0]) is not int or not 0 <= shots[0] <= 1000:
        raise _invalid(bundle, MARKER, f"gives {label!r} num_fewshot {shots!r}, not one number such as [10]")
    if label not in baselines:
        raise _invalid(bundle, _BASELINES, f"has no baseline for {label!r}")
    delimiter = entry.get("continuation_delimiter", " ")
    if not isinstance(delimiter, str):
        raise _invalid(bundle, MARKER, f"gives {label!r} a continuation_delimiter that is not text")
    file = f"eval_data/{required('dataset_uri', str)}"
    return CoreTask(label, cast(CoreTaskType, kind), shots[0], delimiter, baselines[label], file)


def _read_baselines(bundle: Bundle) -> dict[str, float]:
    """By label; the file has percentages."""
    try:
        rows = list(csv.DictReader(io.StringIO(_read_small(bundle, _BASELINES).decode("utf-8-sig"))))
        baselines = {row["Eval Task"]: float(row["Random baseline"]) / 100 for row in rows}
    except (KeyError, TypeError, ValueError, csv.Error) as error:
        problem = "is not a table with 'Eval Task' and 'Random baseline'"
        raise _invalid(bundle, _BASELINES, problem) from error
    if bad := next((label for label, value in baselines.items() if not 0 <= value < 1), None):
        raise _invalid(bundle, _BASELINES, f"has a baseline for {bad!r} that is not from 0 to 100 percent")
    return baselines


def _read_small(bundle: Bundle, name: str) -> bytes:
    """One of the two files that describe the tasks. The public ones have some 10 kB, and a parser takes its time."""
    content = bundle.read(name)
    if len(content) > _MAX_TABLE_BYTES:
        limit = f"at most {_MAX_TABLE_BYTES >> 10} kiB are expected"
        raise _invalid(bundle, name, f"has {len(content):,} bytes, {limit}")
    return content


def _invalid(bundle: Bundle, name: str, problem: str) -> UserError:
    return UserError(f"{name} in {bundle.where} {problem}: download the bundle again, or name another one.")


# -- examples ----------------------------------------------------------------------------------------


def read_examples(bundle: Bundle, task: CoreTask) -> list[Example]:
    """All examples, in the standard shuffled order."""
    examples = []
    for number, line in enumerate(bundle.read(task.file).split(b"\n"), 1):
        if line.strip():
            try:
                examples.append(_checked(task, _normalized(parse_json(line))))
            except ValueError as error:
                problem = f"is not JSON ({error.reason})" if isinstance(error, JsonError) else str(error)
                raise UserError(
                    f"Line {number} of {task.file} in {bundle.where} {problem}: download the bundle again."
                ) from error
    if len(examples) <= task.shots:
        raise _invalid(bundle, task.file, f"has {len(examples)} examples, too few for {task.shots} shots")
    random.Random(1337).shuffle(examples)
    return examples


def _normalized(example: Any) -> Any:
    """MMLU's own format as a question with letters for answers; anything else unchanged."""
    if not isinstance(example, dict) or not {"question", "choices", "answer"} <= example.keys():
        return example
    if not isinstance(example["choices"], list) or not 2 <= len(example["choices"]) <= 10:
        raise ValueError("has no list of two to ten choices")
    letters = "ABCDEFGHIJ"[: len(example["choices"])]
    options = "\n".join(f"{a}. {choice}" for a, choice in zip(letters, example["choices"], strict=True))
    query = f"{str(example['question']).strip()}\n{options}\nAnswer:"
    return {"query": query, "choices": list(letters), "gold": example["answer"]}


def _checked(task: CoreTask, example: Any) -> Example:
    """The example, or a ValueError that names the problem."""
    if not isinstance(example, dict):
        raise ValueError("is not an object")
    text = {"multiple_choice": "query", "schema": "continuation", "language_modeling": "context"}[task.kind]
    if not isinstance(example.get(text), str):
        raise ValueError(f"has no text '{text}'")
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


def apply_cap(task: CoreTask, examples: list[Example], cap: int | None) -> tuple[int, list[Example]]:
    """How many examples are evaluated, and the pool that they and their shots come from."""
    count = min(cap or len(examples), len(examples))
    return count, examples[: max(count, task.shots + 1)]


# -- prompts -----------------------------------------------------------------------------------------


def draw_shots(task: CoreTask, pool: Sequence[Example], index: int) -> list[Example]:
    """Drawn from all examples but `index`; sampling from a range avoids a list of the others."""
    drawn = random.Random(1234 + index).sample(range(len(pool) - 1), task.shots)
    return [pool[i if i < index else i + 1] for i in drawn]


def render_prompts(task: CoreTask, pool: Sequence[Example], index: int) -> list[str]:
    """The texts to compare, one per choice; in language modeling the prompt without and with its continuation."""
    is_choice = task.kind != "language_modeling"
    shots = ""
    for shot in draw_shots(task, pool, index):
        shots += _render_example(task, shot)[shot["gold"] if is_choice else -1] + "\n\n"
    prompts = [shots + text for text in _render_example(task, pool[index])]
    return prompts if is_choice else [prompts[0].strip(), prompts[1]]


def _render_example(task: CoreTask, example: Example) -> list[str]:
    if task.kind == "multiple_choice":
        return [f"{example['query']}{task.delimiter}{choice}" for choice in example["choices"]]
    if task.kind == "schema":
        end = f"{task.delimiter}{example['continuation']}"
        return [f"{context}{end}" for context in example["context_options"]]
    prompt = f"{example['context'].strip()}{task.delimiter}"
    return [prompt, prompt + example["continuation"]]
