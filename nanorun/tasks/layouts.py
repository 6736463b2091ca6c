"""Conversations in the layouts of common datasets. A file has one of them, which its first record shows:

    {"messages": [{"role": "user", "content": "Hi"}, ...]}      ours, OpenAI's and the hub's; or the list alone
    {"conversations": [{"from": "human", "value": "Hi"}, ...]}  ShareGPT's
    {"instruction": ..., "input": ..., "output": ...}           Alpaca's; the input follows after an empty line
    {"prompt": ..., "response": ...}                            pairs; also "prompt" and "completion", or "question"
                                                                and "answer"

The last two can have a "system" text. All are read from jsonl, json (an array), csv (a header with these names) and
parquet. Everything in a file is text and is encoded as such: none of it becomes a special token.
"""

from collections.abc import Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from nanorun.console import say
from nanorun.data.readers import read_records
from nanorun.errors import UserError
from nanorun.tasks.task import Conversation
from nanorun.text.chat import check_messages

# The fields that identify a layout, most specific first.
LAYOUTS: tuple[tuple[str, ...], ...] = (
    ("messages",),
    ("conversations",),
    ("instruction", "output"),
    ("prompt", "response"),
    ("prompt", "completion"),
    ("question", "answer"),
)
SUPPORTED = '"messages", "conversations" or ' + ", ".join(f'"{a}" and "{b}"' for a, b in LAYOUTS[2:])
_SHAREGPT_ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant"}


def read_conversation_file(path: Path) -> list[Conversation]:
    """The conversations of a file, without those in which nothing is answered."""
    conversations: list[Conversation] = []
    layout: tuple[str, ...] | None = None
    records = 0
    for place, record in read_records(path):
        records += 1
        try:
            record = _as_object(record)
            layout = layout or _find_layout(record)
            messages = _messages(record, layout)
            check_messages(messages)
        except UserError as error:
            raise UserError(f"{place[0].upper()}{place[1:]} is not a conversation: {error}") from error
        if any(message["role"] == "assistant" and message["content"] for message in messages):
            conversations.append({"messages": messages})
    if conversations and len(conversations) < records:
        say(
            f"in {path}: skipped {records - len(conversations):,} of {records:,} records, which have no answer"
        )
    return conversations


def holds_conversations(path: Path) -> bool:
    """Whether the first record of a file is a conversation in one of the layouts."""
    try:
        return any(_find_layout(_as_object(record)) for _, record in islice(read_records(path), 1))
    except UserError:
        return False


def _as_object(record: Any) -> Mapping[str, Any]:
    if isinstance(record, list):
        return {"messages": record}
    if not isinstance(record, Mapping):
        raise UserError(f"it is {record!r:.40}, not an object with {SUPPORTED}.")
    return record


def _find_layout(record: Mapping[str, Any]) -> tuple[str, ...]:
    for layout in LAYOUTS:
        if all(name in record for name in layout):
            return layout
    present = ", ".join(f'"{name}"' for name in list(record)[:20]) or "nothing"
    raise UserError(f"it has {present}, but not {SUPPORTED}.")


def _messages(record: Mapping[str, Any], layout: tuple[str, ...]) -> list[dict[str, Any]]:
    for name in layout:
        if name not in record:
            raise UserError(f'it has no "{name}", which the first record of the file has.')
    if len(layout) == 1:
        messages: list[dict[str, Any]] = record[layout[0]]
        is_sharegpt = layout == ("conversations",) and isinstance(messages, list)
        return [_from_sharegpt(message) for message in messages] if is_sharegpt else messages
    question, answer = (_text(record, name) for name in layout)
    extra = _text(record, "input") if layout[0] == "instruction" else ""
    messages = [
        {"role": "user", "content": f"{question}\n\n{extra}" if extra.strip() else question},
        {"role": "assistant", "content": answer if answer.strip() else ""},
    ]
    system = _text(record, "system")
    return [{"role": "system", "content": system}, *messages] if system.strip() else messages


def _from_sharegpt(message: Any) -> Any:
    if not isinstance(message, Mapping) or not isinstance(message.get("from"), str):
        return message
    role = message["from"]
    return {"role": _SHAREGPT_ROLES.get(role, role), "content": message.get("value")}


def _text(record: Mapping[str, Any], name: str) -> str:
    value = record.get(name)
    if value is not None and not isinstance(value, str):
        raise UserError(f'its "{name}" is {type(value).__name__}, not text.')
    return value or ""
