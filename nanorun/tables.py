"""Results as text: aligned columns, the same on a terminal and in a log."""

import re
from collections.abc import Sequence
from typing import Any

from nanorun.console import seconds, size


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Columns as wide as needed; numbers aligned right, words left."""
    cells = [[str(cell) for cell in row] for row in rows]
    widths = [max(len(row[i]) for row in [list(header), *cells]) for i in range(len(header))]
    right = [all(_is_number(row[i]) for row in cells) and bool(cells) for i in range(len(header))]

    def line(row: Sequence[str]) -> str:
        parts = [c.rjust(w) if r else c.ljust(w) for c, w, r in zip(row, widths, right, strict=True)]
        return "  ".join(parts).rstrip()

    return "\n".join([line(header), "  ".join("─" * w for w in widths), *map(line, cells)])


def _is_number(cell: str) -> bool:
    return re.fullmatch(r"-?[\d.,]*([kMGT%]| ?[kMGT]?B)?|–|\?", cell) is not None


def trained_tokenizer(result: dict[str, Any]) -> str:
    source = result["trained_on"]
    rate = source["bytes"] / max(source["seconds"], 1e-9)
    return (
        f"tokenizer '{result['name']}': {result['vocab_size']:,} tokens from {size(source['bytes'])} of text in "
        f"{seconds(source['seconds'])} ({size(rate)}/s), in {result['folder']}\n"
        f"next: nanorun tok eval --tokenizer {result['name']}"
    )


def tokenizers_table(result: dict[str, Any]) -> str:
    reports = result["tokenizers"]
    main = table(
        [
            "tokenizer",
            "vocabulary",
            "tokens",
            "bytes/token",
            "tokens/word",
            "MB/s per thread",
            "MB/s",
            "lossless",
        ],
        [
            [
                r["name"],
                f"{r['vocab_size']:,}",
                f"{r['tokens']:,}",
                f"{r['bytes_per_token']:.3f}",
                f"{r['fertility']:.3f}",
                f"{r['mb_per_s']:.1f}",
                f"{r['mb_per_s_all']:.1f} ({r['threads']} threads)",
                "yes" if r["roundtrip"] else "NO",
            ]
            for r in reports
        ],
    )
    kinds = list(reports[0]["kinds"])
    by_kind = table(
        ["bytes/token by kind", *kinds],
        [[r["name"], *(f"{r['kinds'][k]:.2f}" for k in kinds)] for r in reports],
    )
    texts = f"on {result['documents']:,} documents, {size(result['bytes'])} of '{result['data']}'"
    return f"{texts}\n\n{main}\n\n{by_kind}"


def run_summary(summary: dict[str, Any]) -> str:
    rows = [
        [
            "parameters",
            f"{summary['total_parameters']:,} ({summary['scaling_parameters']:,} in matrices and head)",
        ],
        ["trained on", f"{summary['tokens']:,} tokens in {summary['steps']:,} steps"],
        ["took", f"{seconds(summary['seconds'])}, {summary['tokens_per_s']:,.0f} tokens/s"],
        ["validation", f"{summary['val_bpb']:.4f} bits per byte (loss {summary['val_loss']:.4f})"],
        ["training loss", f"{summary['train_loss']:.4f}"],
    ]
    if summary["skipped_steps"]:
        rows.append(["skipped", f"{summary['skipped_steps']} steps"])
    if summary["mfu"]:
        rows.append(["MFU", f"{summary['mfu']:.1%}, {summary['peak_gib']:.1f} GiB peak memory"])
    if "parent" in summary:
        rows.insert(0, ["parent", summary["parent"]])
    for row in summary.get("planned", ()):
        if row["planned"] and row["happened"]:
            figures = (
                f"measured {row['happened']:.4g}, planned {row['planned']:.4g} (ratio {row['ratio']:.2f})"
            )
            rows.append([f"plan: {row['what']}", figures])
    shown = table(["run", summary["name"]], rows)
    if "samples" not in summary:
        return shown
    samples = [
        f"  {s['prompt']}│{' ' * s['text'][:1].isspace()}{' '.join(s['text'].split())}"
        for s in summary["samples"]
    ]
    return "\n".join([shown, "", "continuations after the bar:", *samples])


def _first_step(result: dict[str, Any]) -> str:
    if "first_step_s" in result:
        return f"{result['first_step_s']:.1f} s"
    warm = result["first_step_warm_s"]
    return f"{result['first_step_cold_s']:.1f} s cold" + (f", {warm:.1f} s warm" if warm is not None else "")


def _startup_breakdown(result: dict[str, Any]) -> list[list[str]]:
    parts = {
        "assemble": "model and data",
        "first_micro": "first micro-batch",
        "other_micros": "others",
        "update": "update",
    }
    kinds = {"start": "startup", "cold_start": "startup, cold", "warm_start": "startup, warm"}
    return [
        [name, ", ".join(f"{words} {result[kind][part]} s" for part, words in parts.items())]
        for kind, name in kinds.items()
        if result.get(kind)
    ]


def bench_infer(result: dict[str, Any]) -> str:
    kind = f"int8 weights, {result['dtype']}" if result["int8"] else result["dtype"]
    speculation = f", speculation by {result['speculate']}" if result["speculate"] else ""
    title = (
        f"d{result['depth']}, vocabulary {result['vocab_size']:,}, {kind}{speculation}: prompts of "
        f"{result['prompt']:,} tokens, {result['new']:,} new ones"
    )
    rows = [
        [
            f"{row['batch']:,}",
            f"{row['ttft_ms']:,.1f}",
            f"{row['ms_per_step']:,.3f}",
            f"{row['tokens_per_s']:,.0f}",
            f"{row['mbu']:.1%}" if row["mbu"] else "-",
            f"{row['peak_gib']:.1f}" if row["peak_gib"] else "-",
            f"{row['acceptance']:.1%}" if "acceptance" in row else "-",
        ]
        for row in result["rows"]
    ]
    columns = ["batch", "TTFT ms", "ms per step", "tokens/s", "MBU", "GiB", "acceptance"]
    bits = (
        f"\nbits per byte {result['bpb']:.4f}, with int8 {result['bpb_int8']:.4f}" if "bpb" in result else ""
    )
    return f"{title}\n\n{table(columns, rows)}{bits}"


def bench_train(result: dict[str, Any]) -> str:
    rows = [
        ["model", f"d{result['depth']}, vocabulary {result['vocab_size']:,}, context {result['context']:,}"],
        [
            "batch",
            f"{result['batch_tokens']:,} tokens per step, micro-batches of {result['device_batch']} rows",
        ],
        ["attention", ", ".join(result["attention"])],
        ["speed", f"{result['tokens_per_s']:,} tokens/s, {result['ms_per_step']:,} ms per step"],
        ["first step after", _first_step(result)],
        *_startup_breakdown(result),
        ["loss", f"first {result['first_loss']:.3f}, last {result['loss']:.3f}"],
    ]
    if result["mfu"]:
        rows.append(["MFU", f"{result['mfu']:.1%}"])
    if result["peak_gib"]:
        rows.append(["peak memory", f"{result['peak_gib']:.1f} GiB"])
    return table(["bench", "train"], rows)


def warmup_table(result: dict[str, Any]) -> str:
    rows = [
        ["model and data ready", f"{result['assembled_s']} s"],
        ["first step done", f"{result['first_step_s']} s"],
        ["second step", f"{result['second_step_s']} s"],
        ["first evaluation batch", f"{result['evaluation_s']} s"],
    ]
    return table([f"d{result['depth']}", f"torch {result['torch']}, {result['device']}"], rows)


def chat_table(result: dict[str, Any]) -> str:
    """ChatCORE by task, with 95% intervals; pass@k for several samples."""
    ks = list(next((row["pass"] for row in result["tasks"] if row["pass"]), {}))
    rows = [
        [
            row["task"],
            f"{row['n']:,}",
            _share(row["accuracy"]),
            f"{_share(row['low'])} to {_share(row['high'])}" if row["accuracy"] is not None else "–",
            _share(row["baseline"]),
            f"{row['centred']:.4f}" if row["centred"] is not None else "–",
            _share(row["cut"]),
            *(_share((row["pass"] or {}).get(k)) for k in ks[1:]),
        ]
        for row in result["tasks"]
    ]
    columns = [
        "task",
        "n",
        "accuracy",
        "95%",
        "guessing",
        "centred",
        "cut off",
        *(f"pass@{k}" for k in ks[1:]),
    ]
    shown = table(columns, rows)
    if result["chatcore"] is None:
        last = (
            f"no ChatCORE yet: run nanorun eval chat --judge {result['replies']} where a sandbox is available"
        )
    else:
        error = result["chatcore_high"] - result["chatcore"]
        last = f"ChatCORE {result['chatcore']:.4f} ± {error:.4f} ({result['model']}, step {result['step']})"
    return f"{shown}\n\n{last}\nthe answers are in {result['replies']}"


def _share(value: float | None) -> str:
    return "–" if value is None else f"{value:.1%}"


def rl_summary(summary: dict[str, Any]) -> str:
    passes = [key.removeprefix("val_") for key in summary if key.startswith("val_pass@")]
    before = summary["val_reward_before"]
    was = f" (before: {before:.3f})" if before is not None else ""
    held_out = ", ".join(f"{key} {summary[f'val_{key}']:.3f}" for key in passes)
    rows = [
        ["tasks", ", ".join(summary["tasks"])],
        ["parent", f"{summary['parent']}, step {summary['parent_step']}"],
        ["trained on", f"{summary['tokens']:,} sampled tokens in {summary['steps']:,} steps"],
        ["took", seconds(summary["seconds"])],
        [
            "speed",
            f"{summary['rollout_tokens_per_s']:,.0f} tokens/s sampled, "
            f"{summary['train_tokens_per_s']:,.0f} trained",
        ],
        ["reward", f"first {summary['first_reward']:.3f}, last {summary['last_reward']:.3f}"],
        ["held out", f"reward {summary['val_reward']:.3f}{was}, {held_out}"],
    ]
    if summary["skipped_steps"]:
        rows.append(["skipped", f"{summary['skipped_steps']} steps"])
    samples = [_example_reply(sample) for sample in summary["samples"][:5]]
    return "\n".join([table(["run", summary["name"]], rows), "", *samples])


def _example_reply(sample: dict[str, Any]) -> str:
    marks = {"text": "{}", "python": "«{}»", "output": "→ {} "}
    reply = "".join(marks[part["type"]].format(part["text"]) for part in sample["reply"])
    question = " ".join(sample["question"].split())
    return f"  {question:.100} │ {' '.join(reply.split()):.200}  ({sample['reward']:g})"


def core_table(result: dict[str, Any]) -> str:
    rows = [
        [
            task["name"],
            f"{task['shots']}",
            f"{task['examples']:,}",
            f"{task['accuracy']:.4f}",
            f"{task['standard_error']:.4f}",
            f"{task['baseline']:.3f}",
            f"{task['centred']:.4f}",
            f"{task['seconds']:.1f}",
        ]
        for task in result["tasks"].values()
    ]
    columns = ["task", "shots", "examples", "accuracy", "± one s.e.", "baseline", "centred", "seconds"]
    lines = [table(columns, rows), ""]
    if result["core"] is not None:
        gpt2 = ", ".join(f"{name} {value:.4f}" for name, value in result["gpt2"].items())
        error = f"± {result['core_standard_error']:.4f}"
        lines.append(f"CORE {result['core']:.4f} {error} ({result['model']}); GPT-2's: {gpt2}")
    speed = f"{result['examples']:,} examples in {seconds(result['seconds'])}"
    return "\n".join([*lines, f"{speed}, {result['examples_per_s']:,.0f} a second while scoring"])
