"""Conversations from a file: {"messages": [{"role": ..., "content": ...}, ...]} a line, or a parquet of such rows.

Instruction data of the hub (SmolTalk and its kin) has this form, and so may a person's own: who the assistant
is, how it speaks, what it knows. There is no right answer to judge by, so this is something to learn from only.
"""

from pathlib import Path

from nanorun.data.readers import file_kind, read_records
from nanorun.errors import UserError
from nanorun.tasks.files import NotHere, find
from nanorun.tasks.task import Conversation
from nanorun.text.chat import check_messages


class ChatFile:
    """A file, or all readable files below a folder whose names fit `pattern`, in the order of their names."""

    def __init__(self, where: Path, pattern: str = "*", name: str | None = None) -> None:
        self.name = name or where.name.split(".")[0]
        if not where.exists():
            raise NotHere(f"There is no file {where}: check the name and the current folder.")
        files = find(where, [f"{pattern}.*"], f"conversations ('{pattern}'):")
        readable = [path for path in files if file_kind(path)[0] in ("jsonl", "parquet")]
        if not readable:
            raise UserError(f'{files[0]} must be .jsonl or .parquet with "messages": convert it.')
        self._conversations: list[Conversation] = []
        for path in readable:
            for place, record in read_records(path):
                try:
                    if not isinstance(record, dict) or "messages" not in record:
                        raise UserError('it has no "messages".')
                    check_messages(record["messages"])
                except UserError as error:
                    raise UserError(f"{place[0].upper()}{place[1:]} is no conversation: {error}") from error
                self._conversations.append({"messages": record["messages"]})
        if not self._conversations:
            raise UserError(f"{where} holds no conversations.")

    def __len__(self) -> int:
        return len(self._conversations)

    def __getitem__(self, index: int) -> Conversation:
        return self._conversations[index]
