"""Measurements as Markdown tables, which the benchmark scripts print and the README and the docs contain.

    python benchmarks/tables.py            regenerate the tables in README.md and docs/*.md from benchmarks/results/
    python benchmarks/tables.py --check    exit 1 if one of them differs from its result file

A page names a result file between two comments, and the lines in between are generated:

    <!-- table: loader-cpu.json -->
    <!-- end of table -->

`<!-- table: loader-cpu.json brief -->` shows only the rows that matter most; several files of one kind make one
table.
"""

import json
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PLACE = re.compile(
    r"(<!-- table: ([\w.-]+\.json(?: [\w.-]+\.json)*)( brief)? -->\n).*?(<!-- end of table -->)", re.DOTALL
)


def markdown(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A table that is readable as plain text too; columns of numbers are right-aligned."""
    cells = [[str(cell) for cell in row] for row in rows]
    right = [all(re.match(r"[\d.,]+", row[i]) for row in cells) for i in range(len(header))]
    widths = [max(3, *(len(row[i]) for row in [list(header), *cells])) for i in range(len(header))]

    def line(row: Sequence[str]) -> str:
        parts = [c.rjust(w) if r else c.ljust(w) for c, w, r in zip(row, widths, right, strict=True)]
        return f"| {' | '.join(parts)} |"

    rule = "|".join("-" * (w + 1) + ":" if r else "-" * (w + 2) for w, r in zip(widths, right, strict=True))
    return "\n".join([line(header), f"|{rule}|", *map(line, cells)])


def loader(result: dict[str, Any]) -> str:
    speed = markdown(
        ["source", "packing", "context", "M tokens/s"],
        [
            [s["source"], s["packing"], s["context"], f"{s['tokens_per_s'] / 1e6:.1f}"]
            for s in result["speed"]
        ],
    )
    packing = markdown(
        ["packing", "context", "cut tails", "tokens lost", "pieces/document", "ms to pack 1 M tokens"],
        [
            [
                p["packing"],
                p["context"],
                "reused" if p["reuse_tails"] else "dropped",
                f"{p['lost_percent']:.2f}%",
                f"{p['pieces_per_document']:.2f}",
                f"{1e3 * p['plan_s_per_million_tokens']:.2f}",
            ]
            for p in result["packing"]
        ],
    )
    return f"{speed}\n\n{packing}\n\n{footer(result)}"


def tokenizer_trainers(result: dict[str, Any]) -> str:
    rows = markdown(
        ["trainer", "MB of text", "vocabulary", "seconds", "MB/s", "held-out bytes/token"],
        [
            [
                f"{row['trainer']} {row['version']}",
                result["train_mb"],
                f"{row['vocab_size']:,}",
                f"{row['seconds']:.2f}",
                f"{row['mb_per_s']:.1f}",
                f"{row['held_out_bytes_per_token']:.4f}",
            ]
            for row in result["rows"]
        ],
    )
    shared = f"{result['tokens_in_common']:.1%} of the tokens are in both vocabularies."
    return f"{rows}\n\n{shared} {footer(result)}"


def tokenizers(result: dict[str, Any]) -> str:
    rows = markdown(
        ["tokenizer", "vocabulary", "bytes/token", "tokens/word", "MB/s on one thread", "MB/s on all"],
        [
            [
                t["name"],
                f"{t['vocab_size']:,}",
                f"{t['bytes_per_token']:.3f}",
                f"{t['fertility']:.3f}",
                f"{t['mb_per_s']:.1f}",
                f"{t['mb_per_s_all']:.1f} ({t['threads']})",
            ]
            for t in result["tokenizers"]
        ],
    )
    return f"{rows}\n\n{footer(result)}"


def train(*results: dict[str, Any]) -> str:
    def whole(seconds: float | None) -> str:
        return "–" if seconds is None else f"{seconds:.0f}"  # a quick measurement has no cold start

    rows = markdown(
        ["model", "commit", "tokens/s", "MFU", "peak GiB", "s to the first step, cold", "warm"],
        [
            [
                f"d{result['depth']}, {result['batch_tokens']:,} tokens/step, {result['device_batch']} rows at once",
                result["commit"][:7],
                f"{result['tokens_per_s']:,}",
                f"{result['mfu']:.1%}",
                f"{result['peak_gib']:.1f}",
                whole(result.get("first_step_cold_s")),
                whole(result.get("first_step_warm_s")),
            ]
            for result in results
        ],
    )
    return f"{rows}\n\n{footer(*results)}"


def levers(result: dict[str, Any]) -> str:
    rows = [*result["rows"], *result.get("depths", [])]
    best = result["rows"][0]["tokens_per_s"] if result["rows"] else 1
    table = markdown(
        ["variant", "tokens/s", "relative to all on", "MFU", "peak GiB", "loss after the last step"],
        [
            [
                row["name"],
                f"{row['tokens_per_s']:,}",
                f"{row['tokens_per_s'] / best:.1%}" if row in result["rows"] else "–",
                f"{row['mfu']:.1%}" if row.get("mfu") else "–",
                f"{row['peak_gib']:.1f}",
                f"{row['loss']:.3f}",
            ]
            for row in rows
        ],
    )
    failed = "".join(f"\n\nFailed: {name} ({why})." for name, why in result["failed"].items())
    return f"{table}{failed}\n\n{footer(result)}"


def budget(result: dict[str, Any]) -> str:
    """Nanoseconds per token by part; a dash where nothing was measured."""
    variants = result["variants"]
    names = list(variants)
    columns = [(name, kind) for name in names for kind in ("predicted", "measured")]
    parts = variants[names[0]]["parts"]

    def value(part: str, name: str, kind: str) -> float | None:
        return variants[name]["parts"][part][kind]

    def shown(number: float | None) -> str:
        return "–" if number is None else f"{number:,.0f}"

    rows = [[part, *(shown(value(part, *column)) for column in columns)] for part in parts]
    sums: list[float | None] = []
    for column in columns:
        known = [v for part in parts if (v := value(part, *column)) is not None]
        sums.append(sum(known) if known else None)
    rows.append(["sum, ns/token", *map(shown, sums)])
    rows.append(["tokens/s", *(shown(1e9 / total if total else None) for total in sums)])
    table = markdown([f"d{result['depth']}", *(f"{name}, {kind}" for name, kind in columns)], rows)
    if not any(value(part, name, "measured") for part in parts for name in names):
        how = f"from an H200's rates, by `{shown_command(result)}`; not measured yet"
        return f"{table}\n\nEstimated {result['date']} {how}."
    return f"{table}\n\n{footer(result)}"


def same_loss(result: dict[str, Any]) -> str:
    finals = result["final"]
    table = markdown(
        ["seed", "plain bf16", "all optimizations", "difference"],
        [
            [
                seed,
                f"{finals['bf16'][str(seed)]:.4f}",
                f"{finals['fast'][str(seed)]:.4f}",
                f"{finals['fast'][str(seed)] - finals['bf16'][str(seed)]:+.4f}",
            ]
            for seed in result["seeds"]
        ],
    )
    error = result["standard_error"]
    mean = f"Mean difference {result['mean_difference']:+.4f}" + (
        f" ± {error:.4f}" if error is not None else ""
    )
    earlier = f" The bf16 runs were made at {result['bf16_of']}." if "bf16_of" in result else ""
    return f"{table}\n\n{mean} nats/token after {result['tokens']:,} tokens.{earlier} {footer(result)}"


def core_speed(result: dict[str, Any]) -> str:
    rows = markdown(
        ["CORE", "seconds", "examples/s", "speedup", "M tokens read", "padding"],
        [
            [
                row["way"],
                f"{row['seconds']:,.1f}",
                f"{row['examples_per_s']:,.1f}",
                f"{row['times_faster']:.1f}",
                f"{row['tokens'] / 1e6:,.2f}",
                "–" if row["padding"] is None else f"{row['padding']:.1%}",
            ]
            for row in result["rows"]
        ],
    )
    about = f"{result['model']}, {result['dtype']}, vocabulary {result['vocab_size']:,}"
    about += f": {result['examples']:,} examples"
    if result["slow_examples"] < result["examples"]:
        about += f" (one at a time: extrapolated from {result['slow_examples']:,})"
    same = f"{result['other_verdicts']} verdicts differ between the first method and the last."
    return f"{rows}\n\n{about}. {same} {footer(result)}"


def core(result: dict[str, Any]) -> str:
    rows = [
        [
            task["name"],
            task["shots"],
            f"{task['examples']:,}",
            f"{100 * task['accuracy']:.1f} ± {100 * task['standard_error']:.1f}",
            f"{task['centred']:.3f}",
            f"{task['seconds']:.1f}",
        ]
        for task in result["tasks"].values()
    ]
    total = f"**{result['core']:.4f} ± {result['core_standard_error']:.4f}**"
    rows.append(["**CORE**", "", f"{result['examples']:,}", "", total, f"{result['seconds']:.1f}"])
    table = markdown(["task", "shots", "examples", "accuracy, %", "centered", "seconds"], rows)
    speed = (
        f"While scoring: {result['examples_per_s']:,.0f} examples/s, {result['tokens_per_s']:,.0f} tokens/s."
    )
    return "\n\n".join([table, f"{speed} {footer(result)}"])


def infer(*results: dict[str, Any]) -> str:
    """All figures of one way of decoding, or the throughput of several side by side."""
    if len(results) == 1:
        (result,) = results
        rows = markdown(
            ["batch", "ms to the first tokens", "ms/step", "tokens/s", "MBU", "GiB"],
            [
                [
                    row["batch"],
                    f"{row['ttft_ms']:.1f}",
                    f"{row['ms_per_step']:.3f}",
                    f"{row['tokens_per_s']:,.0f}",
                    "–" if row["mbu"] is None else f"{row['mbu']:.0%}",
                    f"{row['peak_gib']:.1f}",
                ]
                for row in result["rows"]
            ],
        )
        about = f"d{result['depth']}, {result['dtype']}"
        about += f", prompts of {result['prompt']:,} tokens, {result['new']} new tokens"
        return f"{rows}\n\n{about}. {footer(result)}"
    ways = [_way(result) for result in results]
    rows = markdown(
        ["batch", *(f"tokens/s, {way}" for way in ways)],
        [
            [row["batch"], *(_throughput_and_acceptance(result["rows"][i]) for result in results)]
            for i, row in enumerate(results[0]["rows"])
        ],
    )
    bits = next((result for result in results if "bpb_int8" in result), None)
    lost = f" int8 changes bits per byte from {bits['bpb']:.5f} to {bits['bpb_int8']:.5f}." if bits else ""
    return f"{rows}\n\nThe trained {results[0]['model']}.{lost} {footer(*results)}"


def _way(result: dict[str, Any]) -> str:
    way = "int8" if result["int8"] else result["dtype"]
    return f"{way}, {result['speculate']}" if result["speculate"] else way


def _throughput_and_acceptance(row: dict[str, Any]) -> str:
    acceptance = f" ({row['acceptance']:.0%} of drafts accepted)" if "acceptance" in row else ""
    return f"{row['tokens_per_s']:,.0f}{acceptance}"


def base_run(result: dict[str, Any]) -> str:
    rows = markdown(
        ["steps", "tokens", "minutes", "tokens/s", "MFU", "GiB", "validation, bits per byte"],
        [
            [
                result["steps"],
                f"{result['tokens']:,}",
                f"{result['seconds'] / 60:.1f}",
                f"{result['tokens_per_s']:,.0f}",
                f"{result['mfu']:.1%}",
                f"{result['peak_gib']:.1f}",
                f"{result['val_bpb']:.4f}",
            ]
        ],
    )
    said = [f"> **{s['prompt']}**{_quoted(s['text'])}" for s in result.get("samples", [])]
    return "\n\n".join([rows, footer(result), *said])


def rl_run(result: dict[str, Any]) -> str:
    before = result["before"]
    names = ["val_reward", *(f"val_reward_{task}" for task in result["tasks"])]
    names += [name for name in before if name.startswith("val_pass@") and name != "val_pass@1"]
    rows = markdown(
        ["held-out problems", "before", f"after {result['steps']} steps"],
        [
            [name.removeprefix("val_").replace("_", ", "), f"{before[name]:.3f}", f"{result[name]:.3f}"]
            for name in names
        ],
    )
    spent = (
        f"{result['tokens']:,} tokens of replies, {result['seconds'] / 60:.1f} minutes, "
        f"{result['peak_gib']:.1f} GiB; {result['eval_problems']} problems, "
        f"{result['samples_each']} samples of each."
    )
    return "\n\n".join([rows, f"{spent} {footer(result)}"])


def _quoted(text: str) -> str:
    return text.replace("*", "\\*").replace("<", "&lt;").replace("\n", "\n> ")


def chat(*results: dict[str, Any]) -> str:
    """One column per model."""
    tasks = [task["task"] for task in results[0]["tasks"]]

    def percent(accuracy: float, low: float, high: float) -> str:
        return f"{100 * accuracy:.1f} ({100 * low:.1f} to {100 * high:.1f})"

    by_name = [{task["task"]: task for task in result["tasks"]} for result in results]
    rows = [
        [
            f"{task}, of {by_name[0][task]['n']}",
            *(percent(t[task]["accuracy"], t[task]["low"], t[task]["high"]) for t in by_name),
        ]
        for task in tasks
    ]
    rows.append(
        ["**ChatCORE**", *(percent(r["chatcore"], r["chatcore_low"], r["chatcore_high"]) for r in results)]
    )
    table = markdown(["accuracy, % (95% interval)", *(result["model"] for result in results)], rows)
    return f"{table}\n\n{footer(*results)}"


def speedrun(result: dict[str, Any]) -> str:
    def accuracy(row: dict[str, Any]) -> str:
        return f"{row['accuracy']:.1%} ({row['low']:.0%} to {row['high']:.0%})"

    before, after = (exam["tasks"] for exam in result["exams"].values())
    pairs = zip(before, after, strict=True)
    rows = markdown(
        ["task", "questions", "accuracy after SFT (95%)", "accuracy after RL (95%)"],
        [[one["task"], one["n"], accuracy(one), accuracy(other)] for one, other in pairs],
    )
    rl = result["rl"]
    rewards = [
        f"{task} {rl['before'][f'val_reward_{task}']:.2f} → {rl[f'val_reward_{task}']:.2f}"
        for task in rl["tasks"]
    ]
    reward = (
        f"Mean reward of sampled replies to held-out questions, before and after RL: {', '.join(rewards)}."
    )
    return f"{rows}\n\n{reward} Base model: {result['base']['val_bpb']:.3f} bits per byte. {footer(result)}"


def serve(result: dict[str, Any]) -> str:
    rows = markdown(
        ["clients", "engine alone, tokens/s", "server, tokens/s", "server/engine"],
        [
            [row["clients"], f"{row['engine']:,.0f}", f"{row['server']:,.0f}", f"{row['share']:.0%}"]
            for row in result["rows"]
        ],
    )
    minute = result["abuse"]
    if minute is None:
        return f"{rows}\n\nThe model: {result['model']}. {footer(result)}"
    seen = ", ".join(f"{count:,} × {what}" for what, count in minute["outcomes"].items() if what != "tokens")
    start, end = minute["memory_mib"]
    outcome = (
        f"{minute['seconds']:.0f} seconds of abuse by {minute['clients']} clients and others: {seen}. "
        f"Slots leaked: {minute['slots_left_busy']:.0f}. Memory after a quarter of the time {start:,.0f} MiB, at the "
        f"end {end:,.0f} MiB. The slowest response of /health took {1e3 * minute['health_worst_s']:,.0f} ms."
    )
    return f"{rows}\n\n{outcome}\n\nThe model: {result['model']}. {footer(result)}"


def small_text(result: dict[str, Any]) -> str:
    def shape(depth: int, dim: int, vocab: int, context: int) -> str:
        return f"{depth} × {dim}, {vocab:,}, {context}"

    rows = []
    for row in result["rows"]:
        bpb, dial, best = row["val_bpb"], row["dial"], row["best"]
        rows.append(
            [
                f"{row['megabytes']:g}",
                f"{row['minutes']:g}",
                shape(dial["depth"], dial["dim"], dial["vocab"], dial["context"]),
                f"{bpb['dial']:.4f}",
                shape(best["shape"][0], best["shape"][1], best["vocab"], best["context"]),
                row["searched"],
                f"{bpb['search']:.4f}",
                f"{bpb['dial'] / bpb['search']:.3f}",
                f"{bpb['depth']:.4f}",
            ]
        )
    header = ["MB", "minutes", "default", "bits per byte", "best searched", "of", "bits per byte", "ratio"]
    return f"{markdown([*header, 'before'], rows)}\n\n{footer(result)}"


def abuse(result: dict[str, Any]) -> str:
    health, memory, outcomes = result["health"], result["server_mib"], result["outcomes"]
    rows = [
        [name, f"{1e3 * health[key]:,.0f} ms"]
        for name, key in (
            ("/health, median", "p50_s"),
            ("/health, p99", "p99_s"),
            ("/health, p99.9", "p99.9_s"),
            ("/health, slowest", "max_s"),
        )
    ]
    rows.append(["/health, polls", f"{health['polls']:,}"])
    for word in ("served", "failed"):
        count = sum(value for name, value in outcomes.items() if name.startswith(word))
        rows.append([f"honest answers {word}", f"{count:,}"])
    for name, key in (
        ("at the start", "start"),
        ("after a quarter", "quarter"),
        ("at the end", "end"),
        ("most", "max"),
    ):
        rows.append([f"memory of the server, {name}", f"{memory[key]:,.0f} MiB"])
    rows.append(["log", f"{result['log_bytes'] / 1e3:,.1f} kB"])
    table = markdown([f"{result['minutes']:g} minutes of abuse", ""], rows)
    seen = ", ".join(f"{count:,} × {what}" for what, count in result["abuse"].items())
    return f"{table}\n\nThe abuse: {seen}. The model: {result['model']}. {footer(result)}"


def shown_command(result: dict[str, Any]) -> str:
    """The recorded command as a reader types it today.

    A file keeps the command as it was typed at its commit, when the scripts were in bench/. Where the result was
    saved is not part of the measurement and may name a folder of a machine that is gone.
    """
    command = re.sub(r" --save \S+", "", result["command"])
    return re.sub(r"(?<![\w/])bench/", "benchmarks/", command)


def footer(*results: dict[str, Any]) -> str:
    """When, where, at which commit and by which command it was measured."""
    first = results[0]
    where = f"{first['device']}, {first['cores']} cores, torch {first['torch']}"
    if len({result["commit"] for result in results}) == 1:
        commands = "; ".join(f"`{shown_command(result)}`" for result in results)
        return f"Measured {first['date']} on {where}, at {first['commit']}, by {commands}."
    each = "; ".join(f"at {result['commit']} by `{shown_command(result)}`" for result in results)
    return f"Measured {first['date']} on {where}, {each}."


TABLES: dict[str, Callable[..., str]] = {
    "abuse": abuse,
    "base run": base_run,
    "budget": budget,
    "chat": chat,
    "core": core,
    "core speed": core_speed,
    "infer": infer,
    "levers": levers,
    "loader": loader,
    "rl run": rl_run,
    "same loss": same_loss,
    "serve": serve,
    "sft run": base_run,
    "small-text": small_text,
    "speedrun": speedrun,
    "tokenizer trainers": tokenizer_trainers,
    "tokenizers": tokenizers,
    "train": train,
}


def shortened(result: dict[str, Any]) -> dict[str, Any]:
    if result["what"] == "loader":
        chosen = {key: [row for row in result[key] if row["context"] == 2048] for key in ("speed", "packing")}
        return {**result, **chosen}
    return result


def fill_tables(page: str) -> str:
    def table(match: re.Match[str]) -> str:
        texts = [(RESULTS / name).read_text(encoding="utf-8") for name in match[2].split()]
        results = [shortened(json.loads(text)) if match[3] else json.loads(text) for text in texts]
        return f"{match[1]}{TABLES[results[0]['what']](*results)}\n{match[4]}"

    return PLACE.sub(table, page)


def main() -> None:
    stale = []
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        page = path.read_text(encoding="utf-8")
        if fill_tables(page) != page:
            stale.append(path)
            if "--check" not in sys.argv:
                path.write_text(fill_tables(page), encoding="utf-8")
    for path in stale:
        print(f"{path.relative_to(ROOT)}: {'stale' if '--check' in sys.argv else 'regenerated'}")
    sys.exit(1 if stale and "--check" in sys.argv else 0)


if __name__ == "__main__":
    main()
