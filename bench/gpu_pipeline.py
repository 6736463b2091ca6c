"""Everything that needs a GPU, one stage after the other: tests, speed, and what can only be said of trained weights.

    python bench/gpu_pipeline.py WORK --minutes 25 [--stages pretrain,sft] [--tokens 180000000]

WORK is a NANORUN_HOME that already holds the text (`shared`, tokenized as `shared-shared-32768`, tokenizer
`shared-32768`) and the tasks' files (`tasks/`). Each stage is one or more commands of nanorun itself; what it prints
goes to WORK/results/STAGE.log, figures to WORK/results/*.json. A stage that is done is not done again, and one
that would not end within the minutes left is not begun. The last line printed is a JSON object: seconds and exit
code of every stage.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DATA = ["--data", "shared-shared-32768", "--tokenizer", "shared-32768"]


@dataclass(frozen=True)
class Stage:
    name: str
    seconds: float  # about; more than half as much again, and it is stopped
    commands: tuple[tuple[str, ...], ...]  # side by side


def nanorun(*args: str) -> tuple[str, ...]:
    return (sys.executable, "-m", "nanorun", *args)


def tests(*args: str) -> tuple[str, ...]:
    return (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/gpu", *args)


def stages(results: Path, tokens: int) -> list[Stage]:
    def kept(name: str) -> tuple[str, str, str]:
        return "--json", "--save", str(results / f"{name}.json")

    def chat_core(model: str) -> tuple[str, ...]:
        answers = str(results / f"answers-{model}.jsonl")
        return nanorun("eval", "chat", "--model", model, "--max-per-task", "200", "--keep", answers, "--json")

    infer = ("bench", "infer", "--model", "d12", "--prompt", "1024", "--new", "256")
    return [
        Stage(
            "tests",
            160,
            (
                tests("-k", "killed and no-compile"),
                tests("-k", "killed and not no-compile"),
                tests("-k", "not killed"),
            ),
        ),
        Stage(
            "bench-train",
            110,
            (
                nanorun(
                    "bench",
                    "train",
                    "--depth",
                    "12",
                    *DATA,
                    "--batch-tokens",
                    "524288",
                    *kept("train-d12-h200"),
                ),
            ),
        ),
        Stage(
            "pretrain",
            420,
            (
                nanorun(
                    *("train", "base", "--depth", "12", "--tokens", str(tokens), *DATA),
                    *("--eval-every", "100", "--name", "d12", "--json"),
                ),
            ),
        ),
        Stage("infer-d12", 60, (nanorun("bench", "infer", "--depth", "12", *kept("infer-d12-h200")),)),
        Stage("infer-d20", 70, (nanorun("bench", "infer", "--depth", "20", *kept("infer-d20-h200")),)),
        Stage("infer-int8", 60, (nanorun(*infer, "--int8", *kept("infer-d12-int8-h200")),)),
        Stage(
            "infer-lookup", 60, (nanorun(*infer, "--speculate", "lookup", *kept("infer-d12-lookup-h200")),)
        ),
        Stage("chat-base", 60, (chat_core("d12"),)),
        Stage("sft", 200, (nanorun("train", "sft", "--from", "d12", "--name", "d12-sft", "--json"),)),
        Stage("chat-sft", 60, (chat_core("d12-sft"),)),
        Stage(
            "rl",
            240,
            (
                nanorun(
                    "train",
                    "rl",
                    "--from",
                    "d12-sft",
                    "--name",
                    "d12-rl",
                    "--task",
                    "gsm8k",
                    "--steps",
                    "60",
                    "--json",
                ),
            ),
        ),
        Stage("chat-rl", 60, (chat_core("d12-rl"),)),
        Stage("core", 120, (nanorun("eval", "core", "--model", "d12", "--json"),)),
    ]


def run(stage: Stage, work: Path, results: Path) -> tuple[int, float]:
    begin = time.monotonic()
    env = {**os.environ, "NANORUN_HOME": str(work), "PYTHONUNBUFFERED": "1"}
    with (results / f"{stage.name}.log").open("wb") as log:
        children = [
            subprocess.Popen(command, cwd=ROOT, env=env, stdout=log, stderr=subprocess.STDOUT)
            for command in stage.commands
        ]
        codes = []
        for child in children:
            try:
                codes.append(child.wait(max(1.5 * stage.seconds - (time.monotonic() - begin), 1)))
            except subprocess.TimeoutExpired:
                child.terminate()
                codes.append(child.wait(30))
    return max(codes, key=abs), time.monotonic() - begin


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("work", type=Path)
    parser.add_argument("--minutes", type=float, default=25)
    parser.add_argument("--stages", help="only these, by name, with commas")
    parser.add_argument("--tokens", type=int, default=180_000_000, help="to pretrain on")
    args = parser.parse_args()
    results = args.work / "results"
    results.mkdir(parents=True, exist_ok=True)
    state_file = results / "pipeline.json"
    done = json.loads(state_file.read_text()) if state_file.exists() else {}
    until = time.monotonic() + 60 * args.minutes
    wanted = args.stages.split(",") if args.stages else None
    for stage in stages(results, args.tokens):
        if (wanted is not None and stage.name not in wanted) or done.get(stage.name, {}).get("code") == 0:
            continue
        left = until - time.monotonic()
        if left < stage.seconds:
            print(f"{stage.name}: not begun, {left:.0f} s are left", flush=True)
            continue
        code, seconds = run(stage, args.work, results)
        done[stage.name] = {"code": code, "seconds": round(seconds, 1)}
        state_file.write_text(json.dumps(done, indent=1))
        print(f"{stage.name}: exit code {code} after {seconds:.0f} s", flush=True)
    print(json.dumps(done))


if __name__ == "__main__":
    main()
