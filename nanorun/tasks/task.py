"""What a task is: numbered conversations, and, where answers can be right or wrong, a judge of replies.

    Examples   something to learn from: `len`, and `examples[i]`, a conversation as text/chat.py renders it,
               which ends with the assistant's good answer
    Task       examples with a judge: `reward(i, reply)` says how good a reply to question i is, from 0 to 1

A question is its conversation without the last message (`question`). A task with `letters` is multiple choice:
it is answered by the likeliest of its letters, without generating. Any object with these attributes is a task;
there is nothing to inherit from or to register with.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from nanorun.text.chat import Part

Conversation = Mapping[str, Any]  # {"messages": [{"role": ..., "content": text or parts}, ...]}


class Examples(Protocol):
    name: str

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Conversation: ...


class Task(Examples, Protocol):
    baseline: float  # the share of right answers that guessing gets
    letters: Sequence[str] | None  # of a multiple choice; None: the answer is generated

    def reward(self, index: int, reply: Sequence[Part]) -> float:
        """How good the parts of a reply (as `parse_reply` gives them) answer question `index`: 0 to 1."""
        ...


def question(conversation: Conversation) -> list[Mapping[str, Any]]:
    """The messages up to the last answer, which is left out."""
    messages: list[Mapping[str, Any]] = list(conversation["messages"])
    return messages[:-1] if messages and messages[-1]["role"] == "assistant" else messages


def said(reply: Sequence[Part]) -> str:
    """What a reply says, without its tool calls and their outputs."""
    return "".join(part["text"] for part in reply if part["type"] == "text")
