"""Lessons at school: questions and answers in the middle of plain text.

Each village school has three questions a day, and the class knows the answers. So a base model, before it
has seen a single conversation, has met questions and what may follow them.
"""

from collections.abc import Iterator

from nanorun.data.sample.chance import Chance, Deck, Split
from nanorun.data.sample.letters import spelled
from nanorun.data.sample.numbers import draw
from nanorun.data.sample.saying import said
from nanorun.data.sample.words import words
from nanorun.data.sample.world import world

OPENED = {
    "train": (
        "It was {day} in {home}, and {n} the {trade} had some questions.",
        "{n}, the {trade} of {home}, looked at the class.",
        "On {day} the school of {home} smelled of chalk, and {n} was asking questions.",
    ),
    "val": (
        "On {day} {n} the {trade} looked at the class in {home}.",
        "The school of {home} smelled of chalk, and {n} the {trade} had some questions.",
    ),
}
ASKS = ('"{q}" asked {n}.', '"{q}" {he} asked.', '{n} asked: "{q}"', 'The next question was: "{q}"')
ANSWERS = (
    '"{r}," said the class.',
    '"{r}," said a small voice.',
    '"{r}," they all said.',
    '"{r}," said the boy at the back.',
)
ENDS = ("Then the bell rang.", "And so on until noon.", "Nobody had to stay late.", "", "")
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday")


def lessons(split: Split, chance: Chance) -> Iterator[str]:
    teachers = [person for person in world().people if person.trade == "teacher"]
    deck = Deck(tuple(said(split).values()), chance)
    while True:
        teacher = chance.pick(teachers)
        fill = {"n": teacher.name, "he": teacher.pronoun, "home": teacher.home, "trade": teacher.trade}
        lines = [chance.pick(OPENED[split]).format(day=chance.pick(DAYS), **fill)]
        for _ in range(3):
            roll = chance.roll()
            if roll < 0.7:
                saying = deck.deal()
                question, answer = chance.pick(saying.questions), chance.pick(saying.named)[:-1]
            elif roll < 0.85:
                problem = draw(split, chance)
                question, answer = f"What is {problem.text}?", f"{problem.text} = {problem.result}"
            else:
                word = chance.pick(words(split))
                question, answer = f"How do you spell {word}?", spelled(word)
            ask = chance.pick(ASKS).format(q=question, **fill)
            lines.append(f"{ask} {chance.pick(ANSWERS).format(r=answer)}")
        end = chance.pick(ENDS)
        yield "\n".join([*lines, end] if end else lines)
