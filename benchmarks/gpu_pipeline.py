"""Everything that needs a GPU, stage by stage: tests, throughput, and measurements that need trained weights.

    python benchmarks/gpu_pipeline.py WORK --minutes 25 [--stages pretrain,sft] [--tokens 180000000]

WORK is a NANORUN_HOME that already holds the text (`shared`, tokenized as `shared-shared-32768`, tokenizer
`shared-32768`), the tasks' files (`tasks/`) and the CORE bundle (`core.tar.xz`). Each stage is one or more
nanorun commands; their output goes to WORK/results/STAGE.log (the second command's to STAGE-1.log), results to
WORK/results/*.json. Finished stages are skipped, and so are stages that would not finish within the minutes left.
The last line printed is a JSON object: seconds and exit code of every stage.
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
QUESTIONS = (
    "What is the capital of France?",
    "What is 12 + 30?",
    "Tell me about the moon in two sentences.",
    "Write a short poem about the sea.",
    "How do I make a cup of tea?",
    "Spell the word lantern.",
)
DATA = ["--data", "shared-shared-32768", "--tokenizer", "shared-32768"]


@dataclass(frozen=True)
class Stage:
    name: str
    seconds: float  # estimate; the stage is stopped after 1.5 times as long
    commands: tuple[tuple[str, ...], ...]  # run concurrently


def nanorun(*args: str) -> tuple[str, ...]:
    return (sys.executable, "-m", "nanorun", *args)


def tests(*args: str) -> tuple[str, ...]:
    return (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/gpu", *args)


def stages(results: Path, tokens: int) -> list[Stage]:
    def save(name: str) -> tuple[str, str, str]:
        return "--json", "--save", str(results / f"{name}.json")

    def chat_core(model: str) -> tuple[str, ...]:
        answers = str(results / f"answers-{model}.jsonl")
        few = ("--max-per-task", "256", "--max-tokens", "256", "--batch", "256")
        return nanorun("eval", "chat", "--model", model, *few, "--keep", answers, "--json")

    bundle = ("--bundle", str(results.parent / "core.tar.xz"))

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
                    *save("train-d12-h200"),
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
        # Training and evaluation share the GPU, since neither is timed.
        Stage(
            "sft",
            130,
            (
                nanorun("train", "sft", "--from", "d12", "--name", "d12-sft", "--epochs", "3", "--json"),
                chat_core("d12"),
            ),
        ),
        Stage(
            "rl",
            170,
            (
                nanorun(
                    *("train", "rl", "--from", "d12-sft", "--name", "d12-rl", "--task", "gsm8k"),
                    *("--task", "spelling", "--steps", "50", "--max-tokens", "192", "--json"),
                ),
                chat_core("d12-sft"),
            ),
        ),
        Stage(
            "answers",
            60,
            (
                chat_core("d12-rl"),
                *(
                    nanorun("chat", "--model", "d12-rl", "--temperature", "0.7", "--seed", "1", "-p", text)
                    for text in QUESTIONS
                ),
            ),
        ),
        Stage("infer-d12", 40, (nanorun("bench", "infer", "--depth", "12", *save("infer-d12-h200")),)),
        Stage("infer-d20", 50, (nanorun("bench", "infer", "--depth", "20", *save("infer-d20-h200")),)),
        Stage("infer-trained", 40, (nanorun(*infer, *save("infer-d12-trained-h200")),)),
        Stage("infer-int8", 40, (nanorun(*infer, "--int8", *save("infer-d12-int8-h200")),)),
        Stage(
            "infer-lookup", 40, (nanorun(*infer, "--speculate", "lookup", *save("infer-d12-lookup-h200")),)
        ),
        Stage(
            "core",
            120,
            (
                nanorun(
                    *("eval", "core", "--model", "d12", *bundle, *save("core-d12-h200")),
                    *("--plot", str(results / "core-d12.png")),
                ),
            ),
        ),
        Stage(
            "core-speed",
            150,
            (
                (
                    *(
                        sys.executable,
                        "benchmarks/core.py",
                        "--model",
                        "d12",
                        *bundle,
                        "--slow-per-task",
                        "30",
                    ),
                    "--no-copies",
                    *("--save", str(results / "core-speed-d12-h200.json")),
                ),
            ),
        ),
    ]


def run(stage: Stage, work: Path, results: Path) -> tuple[int, float]:
    begin = time.monotonic()
    env = {**os.environ, "NANORUN_HOME": str(work), "PYTHONUNBUFFERED": "1"}
    children = []
    for i, command in enumerate(stage.commands):
        with (results / f"{stage.name}{f'-{i}' if i else ''}.log").open("wb") as log:
            children.append(
                subprocess.Popen(command, cwd=ROOT, env=env, stdout=log, stderr=subprocess.STDOUT)
            )
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
    parser.add_argument("--stages", help="only these stages, separated by commas")
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
            print(f"{stage.name}: skipped, {left:.0f} s left", flush=True)
            continue
        code, seconds = run(stage, args.work, results)
        done[stage.name] = {"code": code, "seconds": round(seconds, 1)}
        state_file.write_text(json.dumps(done, indent=1))
        print(f"{stage.name}: exit code {code} after {seconds:.0f} s", flush=True)
    print(json.dumps(done))


if __name__ == "__main__":
    main()
