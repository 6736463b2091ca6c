"""Questions with a short right answer, and a fair judge.

The judge reads a free reply. It looks for the answer as a whole word, in any case; a number must stand alone
(12 is not in 120, 1.2 or -12), and where the question itself names the answer (20 - 10), repeating the
question proves nothing, so there it must be the last number said. Where letters are counted, once is 1 and
twice is 2. A spelling may be separated by hyphens, commas or spaces, but may have no letter more or less.
"""

import re
import unicodedata
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from nanorun.data.sample.chance import Chance, Deck, Split, check_split
from nanorun.data.sample.saying import said
from nanorun.data.sample.turns import Turn, count_turn, fact_turn, spelling_turn, sum_turn
from nanorun.data.sample.words import words

Kind = Literal["fact", "sum", "spelling", "count"]
KINDS: tuple[Kind, ...] = ("fact", "sum", "spelling", "count")
_MIX: tuple[Kind, ...] = (
    "fact",
    "fact",
    "fact",
    "fact",
    "fact",
    "sum",
    "sum",
    "spelling",
    "spelling",
    "count",
)


@dataclass(frozen=True)
class Question:
    kind: Kind
    prompt: str  # what the user says
    answer: str  # what a right reply contains
    conversation: dict[str, Any]  # the prompt and a model reply, as `conversations` yields them


def questions(split: Split, count: int, seed: int = 0, kind: Kind | None = None) -> Iterator[Question]:
    """`count` questions of one kind, or of all; no fact and no word comes again before each has been asked."""
    check_split(split)
    if kind is not None and kind not in KINDS:
        raise ValueError(f"kind is {kind!r}: questions are of the kinds {', '.join(KINDS)}")
    chance = Chance("questions", split, seed, kind)
    facts = Deck(tuple(said(split).values()), chance)
    known = Deck(words(), chance)
    ask: dict[Kind, Callable[[], Turn]] = {
        "fact": lambda: fact_turn(facts.deal(), split, chance),
        "sum": lambda: sum_turn(split, chance),
        "spelling": lambda: spelling_turn(known, split, chance),
        "count": lambda: count_turn(split, chance),
    }
    for _ in range(count):
        drawn: Kind = chance.pick(_MIX) if kind is None else kind
        turn = ask[drawn]()
        messages = [{"role": "user", "content": turn.user}, {"role": "assistant", "content": turn.reply}]
        yield Question(drawn, turn.user, turn.answer, {"messages": messages})


def is_right(question: Question, reply: str) -> bool:
    said_text = _plain(reply)
    answer = _plain(question.answer)
    if question.kind == "spelling":
        return _letters(answer) in _spellings(said_text)
    if question.kind == "fact":
        return re.search(rf"(?<![\w-]){re.escape(answer)}(?![\w-])", said_text) is not None
    if question.kind == "count":
        said_text = re.sub(r"\b(once|twice)\b", lambda word: {"once": "1", "twice": "2"}[word[0]], said_text)
    numbers = _NUMBER.findall(said_text)
    if answer in _NUMBER.findall(_plain(question.prompt)):
        return numbers[-1:] == [answer]
    return answer in numbers


# A whole number that is no part of a longer one, of a decimal or of a word. A minus right before it belongs to
# it, unless a number stands before the minus.
_NUMBER = re.compile(r"(?<!\w)(?<!\d\.)(?:(?<!\d)(?<!\d )-)?\d+(?!\w|\.\d)")
_SEPARATORS = ("-", ", ", " ")


def _plain(text: str) -> str:
    text = unicodedata.normalize("NFC", text).casefold()
    text = re.sub(r"[\u2010-\u2015\u2212]", "-", text)
    text = re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", text)
    return " ".join(text.split())


def _letters(spelling: str) -> str:
    return spelling.replace("-", "")


def _spellings(text: str) -> set[str]:
    """Every row of single letters in the text, joined to the word it spells."""
    found = set()
    for separator in _SEPARATORS:
        single = re.escape(separator)
        for run in re.findall(rf"(?<![\w-])\w(?:{single}\w)+(?![\w-])", text):
            found.add(run.replace(separator, ""))
    return found
