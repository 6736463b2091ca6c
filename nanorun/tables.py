"""Results as text: aligned columns, the same on a terminal and in a log.

A table of records is a mapping from each column's header to a format string of the record's fields, such as
{"tokens": "{tokens:,}"}; a field that is missing or None shows as –.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any

from nanorun.console import command, seconds, size

Record = Mapping[str, Any]


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Columns as wide as needed; numbers aligned right, words left."""
    cells = [[str(cell) for cell in row] for row in rows]
    widths = [max(len(row[i]) for row in [list(header), *cells]) for i in range(len(header))]
    right = [all(_is_number(row[i]) for row in cells) and bool(cells) for i in range(len(header))]

    def line(row: Sequence[str]) -> str:
        parts = [c.rjust(w) if r else c.ljust(w) for c, w, r in zip(row, widths, right, strict=True)]
        return "  ".join(parts).rstrip()

    return "\n".join([line(header), "  ".join("─" * w for w in widths), *map(line, cells)])


def table_of(records: Iterable[Record], columns: Mapping[str, str]) -> str:
    """One row per record."""
    return table(list(columns), [[_filled(text, record) for text in columns.values()] for record in records])


def fields_of(record: Record, header: Sequence[str], fields: Mapping[str, str]) -> str:
    """One row per field of a record; fields without a value are left out."""
    rows = [(name, _filled(text, record)) for name, text in fields.items()]
    return table(header, [row for row in rows if row[1] != "–"])


def _filled(text: str, record: Record) -> str:
    try:
        return text.format_map(record)
    except (KeyError, TypeError, ValueError, OverflowError):  # such as None or text in a numeric format
        return "–"


def _is_number(cell: str) -> bool:
    return re.fullmatch(r"-?[\d.,]*([kMGT%]| ?[kMGT]?B)?|–|\?", cell) is not None


def trained_tokenizer(result: Record) -> str:
    source = result["trained_on"]
    rate = source["bytes"] / max(source["seconds"], 1e-9)
    return (
        f"tokenizer '{result['name']}': {result['vocab_size']:,} tokens from {size(source['bytes'])} of text in "
        f"{seconds(source['seconds'])} ({size(rate)}/s), in {result['folder']}\n"
        f"next: {command('tok eval')} --tokenizer {result['name']}"
    )


def tokenizers_table(result: Record) -> str:
    reports = [
        {**report, "lossless": "yes" if report["roundtrip"] else "NO"} for report in result["tokenizers"]
    ]
    main = table_of(
        reports,
        {
            "tokenizer": "{name}",
            "vocabulary": "{vocab_size:,}",
            "tokens": "{tokens:,}",
            "bytes/token": "{bytes_per_token:.3f}",
            "tokens/word": "{fertility:.3f}",
            "MB/s per thread": "{mb_per_s:.1f}",
            "MB/s": "{mb_per_s_all:.1f} ({threads} threads)",
            "lossless": "{lossless}",
        },
    )
    kinds = {kind: f"{{kinds[{kind}]:.2f}}" for kind in reports[0]["kinds"]}
    by_kind = table_of(reports, {"bytes/token by kind": "{name}", **kinds})
    texts = f"on {result['documents']:,} documents, {size(result['bytes'])} of '{result['data']}'"
    return f"{texts}\n\n{main}\n\n{by_kind}"


def run_summary(summary: Record) -> str:
    planned = [row for row in summary.get("planned", ()) if row["planned"] and row["happened"]]
    shown = fields_of(
        {
            **summary,
            "took": seconds(summary.get("seconds", 0)),
            "skipped": summary.get("skipped_steps") or None,
        },
        ["run", summary.get("name", "?")],
        {
            "parent": "{parent}",
            "parameters": "{total_parameters:,} ({scaling_parameters:,} in matrices and head)",
            "trained on": "{tokens:,} tokens in {steps:,} steps",
            "took": "{took}, {tokens_per_s:,.0f} tokens/s",
            "validation": "{val_bpb:.4f} bits per byte (loss {val_loss:.4f})",
            "training loss": "{train_loss:.4f}",
            "skipped": "{skipped:d} steps",
            "MFU": "{mfu:.1%}, {peak_gib:.1f} GiB peak memory",
            **{
                f"plan: {row['what']}": _filled(
                    "measured {happened:.4g}, planned {planned:.4g} (ratio {ratio:.2f})", row
                )
                for row in planned
            },
        },
    )
    if "samples" not in summary:
        return shown
    samples = [
        f"  {s['prompt']}│{' ' * s['text'][:1].isspace()}{' '.join(s['text'].split())}"
        for s in summary["samples"]
        if "prompt" in s and "text" in s
    ]
    return "\n".join([shown, "", "continuations after the bar:", *samples])


def quoted(names: Iterable[str]) -> str:
    return ", ".join(f"'{name}'" for name in names)


def runs_table(records: Sequence[Record]) -> str:
    """The run that `nanorun chat` takes is marked; what is wrong with a damaged one follows."""
    if not records:
        return f"nothing is trained here yet: {command('train base')}, or {command('speedrun')}"
    shown = table_of(
        [{**_run_fields(record), "mark": "*" if record["is_default"] else ""} for record in records],
        {
            "": "{mark}",
            "run": "{name}",
            "stage": "{stage}",
            "steps": "{progress}",
            "scores": "{scores}",
            "on disk": "{size}",
            "trained": "{when}",
            "came from": "{came_from}",
        },
    )
    notes = [f"'{record['name']}' is damaged: {record['error']}" for record in records if record["error"]]
    notes += [record["warning"] for record in records if record["warning"] and not record["error"]]
    for record in records:
        if record["is_default"]:
            kind = "a base model: it continues text" if record["stage"] == "base" else "a chat model"
            notes.append(
                f"* {command('chat')} takes '{record['name']}', {kind}; --model NAME chooses another"
            )
    return "\n".join([shown, "", *notes])


def run_page(record: Record) -> str:
    config, summary = record["config"], record["summary"]
    more = {
        "config": config,
        "lineage": " → ".join(record["lineage"]),
        "children": ", ".join(record["children"]),
        "mixture": config.get("mixture", {}).get("name"),
        "tasks": ", ".join(config.get("rl", {}).get("tasks", ())),
        "took": seconds(summary["seconds"]) if "seconds" in summary else None,
        "batch_tokens": config["train"].get("batch_tokens") if "rl" not in config else None,
    }
    exam = [row for row in record["exam"] if None not in (row["accuracy"], row["low"], row["high"])]
    shown = fields_of(
        {key: value for key, value in {**_run_fields(record), **more}.items() if value not in (None, "")},
        ["run", record["name"]],
        {
            "damaged": "{error}",
            "summary": "{warning}",
            "stage": "{stage}",
            "lineage": "{lineage}",
            "parent of": "{children}",
            "in use by": "{in_use_by}",
            "model": "depth {config[model][depth]}, width {config[model][dim]}, context {config[model][context]:,}, "
            "{parameters:,} parameters",
            "text": "{config[data]}, tokenizer {config[tokenizer]} ({config[model][vocab_size]:,} tokens)",
            "mixture": "{mixture}",
            "tasks": "{tasks}",
            "steps": "{progress}",
            "batch": "{batch_tokens:,} tokens",
            "seed": "{config[train][seed]}",
            "trained": "{when}",
            "took": "{took}",
            "scores": "{scores}",
            **{row["task"]: f"{row['accuracy']:.1%} ({row['low']:.0%} to {row['high']:.0%})" for row in exam},
            "on disk": "{size}",
        },
    )
    commands = [f"{purpose + ':':<12}{text}" for purpose, text in record["commands"].items()]
    return "\n".join([shown, "", *record["files"], "", *commands])


def _run_fields(record: Record) -> dict[str, Any]:
    """The fields of a run's record, those that people read in words."""
    scores: dict[str, float] = record["scores"]
    before = "{val_reward_before:.2f} → " if "val_reward_before" in scores else ""
    texts = {
        "val_bpb": "{val_bpb:.3f} bits per byte",
        "chatcore": "ChatCORE {chatcore:.3f}",
        "val_reward": f"reward {before}{{val_reward:.2f}}",
    }
    done, planned = record["steps"], record["planned_steps"]
    trained = datetime.fromisoformat(record["trained"]).astimezone()  # the user's time zone
    return {
        **record,
        "stage": "damaged" if record["error"] else record["stage"],
        "progress": f"{done:,}" if record["finished"] else f"{done:,} of {planned:,}",
        "scores": ", ".join(texts[name].format_map(scores) for name in texts if name in scores) or "–",
        "size": size(record["bytes"]),
        "when": "now" if record["in_use_by"] else f"{trained:%Y-%m-%d %H:%M}",
        "came_from": " → ".join(record["lineage"][:-1]) or "–",
    }


def bench_infer(result: Record) -> str:
    kind = f"int8 weights, {result['dtype']}" if result["int8"] else result["dtype"]
    speculation = f", speculation by {result['speculate']}" if result["speculate"] else ""
    title = (
        f"d{result['depth']}, vocabulary {result['vocab_size']:,}, {kind}{speculation}: prompts of "
        f"{result['prompt']:,} tokens, {result['new']:,} new ones"
    )
    rows = table_of(
        result["rows"],
        {
            "batch": "{batch:,}",
            "TTFT ms": "{ttft_ms:,.1f}",
            "ms per step": "{ms_per_step:,.3f}",
            "tokens/s": "{tokens_per_s:,.0f}",
            "MBU": "{mbu:.1%}",
            "GiB": "{peak_gib:.1f}",
            "acceptance": "{acceptance:.1%}",
        },
    )
    bits = "bits per byte {bpb:.4f}, with int8 {bpb_int8:.4f}".format_map(result) if "bpb" in result else ""
    return "\n".join([title, "", rows, *([bits] if bits else [])])


def bench_train(result: Record) -> str:
    parts = {
        "assemble": "model and data",
        "first_micro": "first micro-batch",
        "other_micros": "others",
        "update": "update",
    }
    starts = {"start": "startup", "cold_start": "startup, cold", "warm_start": "startup, warm"}
    startup = {
        name: ", ".join(f"{words} {result[start][part]} s" for part, words in parts.items())
        for start, name in starts.items()
        if result.get(start)
    }
    return fields_of(
        {**result, "backends": ", ".join(result["attention"])},
        ["bench", "train"],
        {
            "model": "d{depth}, vocabulary {vocab_size:,}, context {context:,}",
            "batch": "{batch_tokens:,} tokens per step, micro-batches of {device_batch} rows",
            "attention": "{backends}",
            "speed": "{tokens_per_s:,} tokens/s, {ms_per_step:,} ms per step",
            "first step after": "{first_step_s:.1f} s",
            "first step, cold": "{first_step_cold_s:.1f} s",
            "first step, warm": "{first_step_warm_s:.1f} s",
            **startup,
            "loss": "first {first_loss:.3f}, last {loss:.3f}",
            "MFU": "{mfu:.1%}",
            "peak memory": "{peak_gib:.1f} GiB",
        },
    )


def warmup_table(result: Record) -> str:
    return fields_of(
        result,
        [f"d{result['depth']}", f"torch {result['torch']}, {result['device']}"],
        {
            "model and data ready": "{assembled_s} s",
            "first step done": "{first_step_s} s",
            "second step": "{second_step_s} s",
            "first evaluation batch": "{evaluation_s} s",
        },
    )


def chat_table(result: Record) -> str:
    """ChatCORE by task, with 95% intervals; pass@k for several samples."""
    ks = list(next((row["pass"] for row in result["tasks"] if row["pass"]), {}))
    shown = table_of(
        [row | {f"pass@{k}": value for k, value in (row["pass"] or {}).items()} for row in result["tasks"]],
        {
            "task": "{task}",
            "n": "{n:,}",
            "accuracy": "{accuracy:.1%}",
            "95%": "{low:.1%} to {high:.1%}",
            "guessing": "{baseline:.1%}",
            "centred": "{centred:.4f}",
            "cut off": "{cut:.1%}",
            **{f"pass@{k}": f"{{pass@{k}:.1%}}" for k in ks[1:]},
        },
    )
    if result["chatcore"] is None:
        judge = command(f"eval chat --judge {result['replies']}")
        last = f"no ChatCORE yet: run {judge} where a sandbox is available"
    else:
        error = result["chatcore_high"] - result["chatcore"]
        last = f"ChatCORE {result['chatcore']:.4f} ± {error:.4f} ({result['model']}, step {result['step']})"
    return f"{shown}\n\n{last}\nthe answers are in {result['replies']}"


def rl_summary(summary: Record) -> str:
    before = _filled(" (before: {val_reward_before:.3f})", summary).removeprefix("–")
    held_out = [key.removeprefix("val_") for key in summary if key.startswith("val_pass@")]
    shown = fields_of(
        {
            **summary,
            "task_names": ", ".join(summary.get("tasks", ())),
            "took": seconds(summary.get("seconds", 0)),
            "before": before,
            "passes": ", ".join(f"{key} {_filled(f'{{val_{key}:.3f}}', summary)}" for key in held_out),
            "skipped": summary.get("skipped_steps") or None,
        },
        ["run", summary.get("name", "?")],
        {
            "tasks": "{task_names}",
            "parent": "{parent}, step {parent_step}",
            "trained on": "{tokens:,} sampled tokens in {steps:,} steps",
            "took": "{took}",
            "speed": "{rollout_tokens_per_s:,.0f} tokens/s sampled, {train_tokens_per_s:,.0f} trained",
            "reward": "first {first_reward:.3f}, last {last_reward:.3f}",
            "held out": "reward {val_reward:.3f}{before}, {passes}",
            "skipped": "{skipped:d} steps",
        },
    )
    return "\n".join([shown, "", *(_example_reply(sample) for sample in summary.get("samples", ())[:5])])


def _example_reply(sample: Record) -> str:
    marks = {"text": "{}", "python": "«{}»", "output": "→ {} "}
    reply = "".join(marks.get(part["type"], "{}").format(part["text"]) for part in sample.get("reply", ()))
    question = " ".join(sample.get("question", "").split())
    return f"  {question:.100} │ {' '.join(reply.split()):.200}  ({_filled('{reward:g}', sample)})"


def core_table(result: Record) -> str:
    lines = [
        table_of(
            result["tasks"].values(),
            {
                "task": "{name}",
                "shots": "{shots}",
                "examples": "{examples:,}",
                "accuracy": "{accuracy:.4f}",
                "± one s.e.": "{standard_error:.4f}",
                "baseline": "{baseline:.3f}",
                "centred": "{centred:.4f}",
                "seconds": "{seconds:.1f}",
            },
        ),
        "",
    ]
    if result["core"] is not None:
        gpt2 = ", ".join(f"{name} {value:.4f}" for name, value in result["gpt2"].items())
        error = f"± {result['core_standard_error']:.4f}"
        lines.append(f"CORE {result['core']:.4f} {error} ({result['model']}); GPT-2's: {gpt2}")
    speed = f"{result['examples']:,} examples in {seconds(result['seconds'])}"
    return "\n".join([*lines, f"{speed}, {result['examples_per_s']:,.0f} a second while scoring"])
