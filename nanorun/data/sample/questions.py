"""Questions with a short correct answer, the turns that ask them, and a fair judge.

A turn is a question and its reply. A reply is a string, or a list of parts when the assistant uses the calculator:
text, the Python expression, its output (which the engine fills in when a model runs), and text again. Expressions are
arithmetic on integers or `'word'.count('x')`, nothing else.

The judge reads a free reply. It looks for the answer as a whole word, in any case. A number must stand alone (12 is
not in 120, 1.2 or -12). Where the question itself contains the answer (20 - 10), repeating the question proves
nothing, so the answer must be the last number. Where letters are counted, once is 1 and twice is 2. The letters of a
spelling may be separated by hyphens, commas or spaces, and none may be missing or added.
"""

import re
import unicodedata
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from nanorun.data.sample import numbers
from nanorun.data.sample.letters import signal_word, spelled, times, word_and_letter, words
from nanorun.data.sample.rng import Deck, RandomStream, Split, check_split
from nanorun.data.sample.sentences import FactSentences, fact_sentences
from nanorun.data.sample.world import capital, templates

Content = str | list[dict[str, str]]


@dataclass(frozen=True)
class Turn:
    user: str
    reply: Content
    answer: str = ""  # what a right reply must contain; empty where there is no such thing

    @property
    def messages(self) -> list[dict[str, Any]]:
        return [{"role": "user", "content": self.user}, {"role": "assistant", "content": self.reply}]


SUM_ASKED = templates("""
    train  What is {t}?
    train  What is {t}?
    train  How much is {s}?
    train  Please work out {t}.
    train  Can you calculate {t}?
    train  What do you get for {s}?
    train  {t} = ?
    val    What is {t}?
    val    How much is {t}?
    val    Can you work out {s}?
    val    What do you get for {t}?
""")
SPELL_ASKED = templates("""
    train  How do you spell {w}?
    train  Please spell {w}.
    train  Can you spell {w} for me?
    train  What letters are in {w}?
    train  Spell the word {w}.
    train  How is {w} spelled?
    train  Which letters make the word {w}?
    train  Spell {w} letter by letter.
    val    How do you spell the word {w}?
    val    Can you spell {w}?
    val    Please spell the word {w}.
    val    How is the word {w} spelled?
""")
COUNT_ASKED = templates("""
    train  How many times does {x} come in {w}?
    train  How often does the letter {x} come in {w}?
    train  Count the letter {x} in {w}.
    train  How many {x} are in the word {w}?
    train  How many times is the letter {x} in {w}?
    train  How often is {x} in {w}?
    train  How many times will you find {x} in {w}?
    val    How many times does the letter {x} come in {w}?
    val    How often is the letter {x} in the word {w}?
    val    Count the letter {x} in the word {w}.
""")
_SPELLED = ("The word {w} is spelled {l}.", "You spell {w} like this: {l}.", "{l}")
_LEADS = ("Let me work that out: ", "Let me calculate: ", "I will use Python: ", "")


def fact_turn(saying: FactSentences, split: Split, rng: RandomStream) -> Turn:
    # A reply begins with what was asked about: the shorter sentences, which a small model learns first.
    return Turn(rng.choice(saying.questions), rng.choice(saying.openings[:3]), saying.fact.answer)


def sum_turn(split: Split, rng: RandomStream) -> Turn:
    problem = numbers.draw(split, rng)
    question = rng.choice(SUM_ASKED[split]).format(t=problem.text, s=problem.spoken)
    told = f" {problem.text} = {problem.result}."
    if problem.a <= 10 and problem.b <= 10 and rng.random() < 0.5:
        return Turn(question, told[1:], str(problem.result))
    return Turn(question, _calculated(problem.python, str(problem.result), told, rng), str(problem.result))


def story_sum_turn(split: Split, rng: RandomStream) -> Turn:
    problem, question, told = numbers.word_problem(split, rng)
    answer = str(problem.result)
    return Turn(question, _calculated(problem.python, answer, f" {told}", rng), answer)


def spelling_turn(known: Deck[str], split: Split, rng: RandomStream) -> Turn:
    # A made-up word now and then shows that any word can be spelled; validation asks for those it can expect.
    made_up = split == "train" and rng.random() < 0.2
    word = signal_word(split, rng) if made_up else known.deal()
    question = rng.choice(SPELL_ASKED[split]).format(w=word)
    reply = rng.choice(_SPELLED).format(w=word, l=spelled(word))
    return Turn(question, reply, spelled(word))


def count_turn(split: Split, rng: RandomStream) -> Turn:
    word, letter = word_and_letter(split, rng, made_up=0.2 if split == "train" else 0)
    answer = str(word.count(letter))
    question = rng.choice(COUNT_ASKED[split]).format(x=letter, w=word)
    comes = f"the letter {letter} comes {times(word.count(letter))}"
    if rng.random() < 0.3:
        reply = f"Letter by letter: {spelled(word)}. {capital(comes)}, so the answer is {answer}."
        return Turn(question, reply, answer)
    told = f" The answer is {answer}: {comes} in {word}."
    return Turn(question, _calculated(f"'{word}'.count('{letter}')", answer, told, rng), answer)


def _calculated(expression: str, output: str, told: str, rng: RandomStream) -> Content:
    lead = rng.choice(_LEADS)
    parts = [("text", lead), ("python", expression), ("output", output), ("text", told)]
    return [{"type": kind, "text": text} for kind, text in parts if text]


Kind = Literal["fact", "sum", "spelling", "count"]
KINDS: tuple[Kind, ...] = ("fact", "sum", "spelling", "count")
_MIX: tuple[Kind, ...] = (*("fact",) * 5, *("sum",) * 2, *("spelling",) * 2, "count")


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
    rng = RandomStream("questions", split, seed, kind)
    facts = Deck(tuple(fact_sentences(split).values()), rng)
    known = Deck(words(), rng)
    ask: dict[Kind, Callable[[], Turn]] = {
        "fact": lambda: fact_turn(facts.deal(), split, rng),
        "sum": lambda: sum_turn(split, rng),
        "spelling": lambda: spelling_turn(known, split, rng),
        "count": lambda: count_turn(split, rng),
    }
    for _ in range(count):
        drawn: Kind = rng.choice(_MIX) if kind is None else kind
        turn = ask[drawn]()
        yield Question(drawn, turn.user, turn.answer, {"messages": turn.messages})


def is_correct(question: Question, reply: str) -> bool:
    said_text = _plain(reply)
    answer = _plain(question.answer)
    if question.kind == "spelling":
        return answer.replace("-", "") in _spellings(said_text)
    if question.kind == "fact":
        return re.search(rf"(?<![\w-]){re.escape(answer)}(?![\w-])", said_text) is not None
    if question.kind == "count":
        said_text = re.sub(r"\b(once|twice)\b", lambda word: {"once": "1", "twice": "2"}[word[0]], said_text)
    found = _NUMBER.findall(said_text)
    if answer in _NUMBER.findall(_plain(question.prompt)):
        return found[-1:] == [answer]
    return answer in found


# A whole number that is no part of a longer one, of a decimal or of a word. A minus right before it belongs to
# it, unless a number stands before the minus.
_NUMBER = re.compile(r"(?<!\w)(?<!\d\.)(?:(?<!\d)(?<!\d )-)?\d+(?!\w|\.\d)")


def _plain(text: str) -> str:
    text = unicodedata.normalize("NFC", text).casefold()
    text = re.sub(r"[\u2010-\u2015\u2212]", "-", text)
    text = re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", text)
    return " ".join(text.split())


def _spellings(text: str) -> set[str]:
    """Every row of single letters in the text, joined to the word it spells."""
    found = set()
    for separator in ("-", ", ", " "):
        single = re.escape(separator)
        for run in re.findall(rf"(?<![\w-])\w(?:{single}\w)+(?![\w-])", text):
            found.add(run.replace(separator, ""))
    return found
