"""Questions with a short correct answer, the turns that ask them, and a fair judge.

A turn is a question and its reply. A reply is a string, or a list of parts when the assistant uses the calculator:
text, the Python expression, its output (which the engine fills in when a model runs), and text again. Expressions are
arithmetic on integers or `'word'.count('x')`, nothing else.

The judge reads a free reply. It looks for the answer as a whole word, in any case. A number must stand alone (12 is
not in 120, 1.2 or -12). Where the question itself contains the answer (20 - 10), repeating the question proves
nothing, so the answer must be the last number. Where letters are counted, once is 1 and twice is 2, and a word that
the reply spells or calls the calculator with must be the right one: a misspelling with the right count is luck. The
letters of a spelling may be separated by hyphens, commas or spaces, and none may be missing or added.
"""

import re
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from nanorun.data.sample import numbers
from nanorun.data.sample.isles import Topic, askings
from nanorun.data.sample.letters import UNSEEN, signal_word, spelled, times, word_and_letter, words
from nanorun.data.sample.numbers import SumProblem
from nanorun.data.sample.rng import Deck, RandomStream, Split, check_split
from nanorun.data.sample.sentences import FactSentences, fact_sentences
from nanorun.data.sample.world import templates

Content = str | list[dict[str, str]]


@dataclass(frozen=True)
class Turn:
    user: str
    reply: Content
    answer: str = ""  # what a right reply must contain; empty where there is no such thing
    word: str = ""  # whose letters are counted

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
# Without the word itself: to copy it is one more chance of a mistake.
_SPELLED = ("It is spelled {l}.", "You spell it like this: {l}.", "{l}")
_LEADS = ("Let me work that out: ", "Let me calculate: ", "I will use Python: ", "")


def fact_turn(saying: FactSentences, split: Split, rng: RandomStream) -> Turn:
    # A reply begins with what was asked about: the shorter sentences, which a small model learns first.
    return Turn(rng.choice(saying.questions), rng.choice(saying.openings[:3]), saying.fact.answer)


def sum_turn(problem: SumProblem, split: Split, rng: RandomStream) -> Turn:
    question = rng.choice(SUM_ASKED[split]).format(t=problem.text, s=problem.spoken)
    answer = str(problem.result)
    return Turn(question, _calculated(problem.python, answer, f" {problem.text} = {answer}.", rng), answer)


def story_sum_turn(split: Split, rng: RandomStream) -> Turn:
    problem, question, told = numbers.word_problem(split, rng)
    answer = str(problem.result)
    return Turn(question, _calculated(problem.python, answer, f" {told}", rng), answer)


def spelling_turn(word: str, split: Split, rng: RandomStream) -> Turn:
    question = rng.choice(SPELL_ASKED[split]).format(w=word)
    reply = rng.choice(_SPELLED).format(l=spelled(word))
    return Turn(question, reply, spelled(word))


def word_to_spell(known: Deck[str], split: Split, rng: RandomStream, made_up: float) -> str:
    """A known word or, in training, a made-up one now and then, which shows that any word can be spelled."""
    return signal_word(split, rng) if split == "train" and rng.random() < made_up else known.deal()


def count_turn(split: Split, rng: RandomStream) -> Turn:
    word, letter = word_and_letter(split, rng, made_up=0.3 if split == "train" else 0)
    answer = str(word.count(letter))
    question = rng.choice(COUNT_ASKED[split]).format(x=letter, w=word)
    comes = f"the letter {letter} comes {times(word.count(letter))}"
    # The calculator gets the letters one by one: after a quotation mark a word has other tokens than in the
    # question, so that copying it is no easier than spelling it.
    told = f" The answer is {answer}: {comes}."
    call = f"'{spelled(word)}'.count('{letter}')"
    return Turn(question, _calculated(call, answer, told, rng), answer, word)


def world_turn(asking: tuple[str, Topic], rng: RandomStream) -> Turn:
    question, topic = asking
    return Turn(question, rng.choice(topic.replies), topic.answer)


def _calculated(expression: str, output: str, told: str, rng: RandomStream) -> Content:
    lead = rng.choice(_LEADS)
    parts = [("text", lead), ("python", expression), ("output", output), ("text", told)]
    return [{"type": kind, "text": text} for kind, text in parts if text]


Kind = Literal["fact", "sum", "spelling", "count", "large_sum", "long_result", "new_word", "world"]
_MIX: tuple[Kind, ...] = (
    *("fact",) * 5,
    *("sum", "spelling") * 2,
    *("count", "large_sum", "long_result", "new_word", "world"),
)
KINDS: tuple[Kind, ...] = tuple(dict.fromkeys(_MIX))


@dataclass(frozen=True)
class Question:
    kind: Kind
    prompt: str  # what the user says
    answer: str  # what a right reply contains
    conversation: dict[str, Any]  # the prompt and a model reply, as `conversations` yields them
    word: str = ""  # whose letters are counted


def questions(split: Split, count: int, seed: int = 0, kind: Kind | None = None) -> Iterator[Question]:
    """`count` questions of one kind, or of all; no fact and no word comes again before each has been asked."""
    check_split(split)
    if kind is not None and kind not in KINDS:
        raise ValueError(f"kind is {kind!r}: questions are of the kinds {', '.join(KINDS)}")
    rng = RandomStream("questions", split, seed, kind)
    facts = Deck(tuple(fact_sentences(split).values()), rng)
    known, unseen, world = Deck(words(), rng), Deck(UNSEEN, rng), Deck(askings(split), rng)
    ask: dict[Kind, Callable[[], Turn]] = {
        "fact": lambda: fact_turn(facts.deal(), split, rng),
        "sum": lambda: sum_turn(numbers.draw(split, rng), split, rng),
        "spelling": lambda: spelling_turn(word_to_spell(known, split, rng, 0.4), split, rng),
        "count": lambda: count_turn(split, rng),
        "large_sum": lambda: sum_turn(numbers.draw_large(split, rng), split, rng),
        "long_result": lambda: sum_turn(numbers.draw_long_result(split, rng), split, rng),
        "new_word": lambda: spelling_turn(word_to_spell(unseen, split, rng, 1.0), split, rng),
        "world": lambda: world_turn(world.deal(), rng),
    }
    for _ in range(count):
        drawn: Kind = rng.choice(_MIX) if kind is None else kind
        turn = ask[drawn]()
        yield Question(drawn, turn.user, turn.answer, {"messages": turn.messages}, turn.word)


def is_correct(question: Question, reply: str, calls: Sequence[str] = ()) -> bool:
    """Judges the text of a reply and, where letters are counted, the expressions of its calls."""
    said_text = _plain(reply)
    answer = _plain(question.answer)
    if question.kind in ("spelling", "new_word"):
        return answer.replace("-", "") in _spellings(said_text)
    if question.kind in ("fact", "world"):
        parts = re.split(", | and ", answer) if question.kind == "world" else [answer]
        return all(re.search(rf"(?<![\w-]){re.escape(part)}(?![\w-])", said_text) for part in parts)
    if question.kind == "count":
        counted = {word.replace("-", "") for call in calls for word in _COUNTED.findall(_plain(call))}
        if question.word and not counted | _spellings(said_text) <= {_plain(question.word)}:
            return False
        said_text = re.sub(r"\b(once|twice)\b", lambda word: {"once": "1", "twice": "2"}[word[0]], said_text)
    found = _NUMBER.findall(said_text)
    if answer in _NUMBER.findall(_plain(question.prompt)):
        return found[-1:] == [answer]
    return answer in found


_COUNTED = re.compile(r"'([^']*)'\s*\.\s*count")  # the word in a call
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
