"""One question and its answer: the turns that conversations and quizzes are made of.

A reply is a string, or a list of parts when the assistant uses the calculator: text, then the Python
expression, then what it gave (the engine fills that in when a model runs), then text again. Expressions are
arithmetic on whole numbers or `'word'.count('x')`, nothing else.
"""

from dataclasses import dataclass

from nanorun.data.sample import numbers
from nanorun.data.sample.chance import Chance, Deck, Split
from nanorun.data.sample.letters import signal_word, spelled, times, word_and_letter
from nanorun.data.sample.saying import Said
from nanorun.data.sample.world import capital

Content = str | list[dict[str, str]]


@dataclass(frozen=True)
class Turn:
    user: str
    reply: Content
    answer: str = ""  # what a right reply must contain; empty where there is no such thing


SUM_ASKED = {
    "train": (
        "What is {t}?",
        "What is {t}?",
        "How much is {s}?",
        "Please work out {t}.",
        "Can you calculate {t}?",
        "What do you get for {s}?",
        "{t} = ?",
    ),
    "val": ("What is {t}?", "How much is {t}?", "Can you work out {s}?", "What do you get for {t}?"),
}
SPELL_ASKED = {
    "train": (
        "How do you spell {w}?",
        "Please spell {w}.",
        "Can you spell {w} for me?",
        "What letters are in {w}?",
        "Spell the word {w}.",
        "How is {w} spelled?",
        "Which letters make the word {w}?",
        "Spell {w} letter by letter.",
    ),
    "val": (
        "How do you spell the word {w}?",
        "Can you spell {w}?",
        "Please spell the word {w}.",
        "How is the word {w} spelled?",
    ),
}
COUNT_ASKED = {
    "train": (
        "How many times does {x} come in {w}?",
        "How often does the letter {x} come in {w}?",
        "Count the letter {x} in {w}.",
        "How many {x} are in the word {w}?",
        "How many times is the letter {x} in {w}?",
        "How often is {x} in {w}?",
        "How many times will you find {x} in {w}?",
    ),
    "val": (
        "How many times does the letter {x} come in {w}?",
        "How often is the letter {x} in the word {w}?",
        "Count the letter {x} in the word {w}.",
    ),
}
_SPELLED = ("The word {w} is spelled {l}.", "You spell {w} like this: {l}.", "{l}")
_LEADS = ("Let me work that out: ", "Let me calculate: ", "I will use Python: ", "")


def fact_turn(saying: Said, split: Split, chance: Chance) -> Turn:
    # A reply begins with what was asked about: the shorter sentences, which a small model learns first.
    return Turn(chance.pick(saying.questions), chance.pick(saying.openings[:3]), saying.fact.answer)


def sum_turn(split: Split, chance: Chance) -> Turn:
    problem = numbers.draw(split, chance)
    question = chance.pick(SUM_ASKED[split]).format(t=problem.text, s=problem.spoken)
    told = f" {problem.text} = {problem.result}."
    if problem.a <= 10 and problem.b <= 10 and chance.roll() < 0.5:
        return Turn(question, told[1:], str(problem.result))
    return Turn(question, _calculated(problem.python, str(problem.result), told, chance), str(problem.result))


def story_sum_turn(split: Split, chance: Chance) -> Turn:
    problem, question, told = numbers.word_problem(split, chance)
    answer = str(problem.result)
    return Turn(question, _calculated(problem.python, answer, f" {told}", chance), answer)


def spelling_turn(known: Deck[str], split: Split, chance: Chance) -> Turn:
    # A made-up word now and then shows that any word can be spelled; validation asks for those it can expect.
    made_up = split == "train" and chance.roll() < 0.2
    word = signal_word(split, chance) if made_up else known.deal()
    question = chance.pick(SPELL_ASKED[split]).format(w=word)
    reply = chance.pick(_SPELLED).format(w=word, l=spelled(word))
    return Turn(question, reply, spelled(word))


def count_turn(split: Split, chance: Chance) -> Turn:
    word, letter = word_and_letter(split, chance, made_up=0.2 if split == "train" else 0)
    answer = str(word.count(letter))
    question = chance.pick(COUNT_ASKED[split]).format(x=letter, w=word)
    comes = f"the letter {letter} comes {times(word.count(letter))}"
    if chance.roll() < 0.3:
        reply = f"Letter by letter: {spelled(word)}. {capital(comes)}, so the answer is {answer}."
        return Turn(question, reply, answer)
    told = f" The answer is {answer}: {comes} in {word}."
    return Turn(question, _calculated(f"'{word}'.count('{letter}')", answer, told, chance), answer)


def _calculated(expression: str, output: str, told: str, chance: Chance) -> Content:
    lead = chance.pick(_LEADS)
    parts = [("text", lead), ("python", expression), ("output", output), ("text", told)]
    return [{"type": kind, "text": text} for kind, text in parts if text]
