"""Lessons at school: questions and answers in plain text.

Each village school has three questions a day, and the class knows the answers. So a base model, before it has seen a
single conversation, has met questions and what follows them.
"""

from collections.abc import Iterator

from nanorun.data.sample.letters import spelled, words
from nanorun.data.sample.numbers import draw
from nanorun.data.sample.rng import Deck, RandomStream, Split
from nanorun.data.sample.sentences import fact_sentences
from nanorun.data.sample.world import PEOPLE, templates

OPENED = templates("""
    train  It was {day} in {home}, and {n} the {trade} had some questions.
    train  {n}, the {trade} of {home}, looked at the class.
    train  On {day} the school of {home} smelled of chalk, and {n} was asking questions.
    val    On {day} {n} the {trade} looked at the class in {home}.
    val    The school of {home} smelled of chalk, and {n} the {trade} had some questions.
""")
# The first question of a lesson, the second and the last.
ASKS = templates("""
    first   "{q}" asked {n}.
    first   "{q}" {he} asked.
    first   {n} asked: "{q}"
    first   The first question was: "{q}"
    first   {n} began with this one: "{q}"
    first   "Let us begin," {he} said. "{q}"
    second  "{q}" asked {n}.
    second  "{q}" {he} asked.
    second  {n} asked: "{q}"
    second  The next question was: "{q}"
    second  Then {he} asked: "{q}"
    second  "Very good," {he} said. "{q}"
    last    "{q}" asked {n}.
    last    {n} asked: "{q}"
    last    The last question was: "{q}"
    last    Last of all {he} asked: "{q}"
    last    "And one more," {he} said. "{q}"
""")
ANSWERS = (
    '"{r}," said the class.',
    '"{r}," said a small voice.',
    '"{r}," they all said.',
    '"{r}," said the boy at the back.',
    '"{r}," said the girl by the window.',
    '"{r}," came the answer.',
)
HOW_SPELLED = {"train": "How do you spell {w}?", "val": "How do you spell the word {w}?"}
ENDS = ("Then the bell rang.", "Then it was time for lunch.", "Nobody had to stay late.", "", "")
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday")


def lessons(split: Split, rng: RandomStream) -> Iterator[str]:
    teachers = [person for person in PEOPLE if person.trade == "teacher"]
    deck = Deck(tuple(fact_sentences(split).values()), rng)
    while True:
        teacher = rng.choice(teachers)
        fill = {"n": teacher.name, "he": teacher.pronoun, "home": teacher.home, "trade": teacher.trade}
        lines = [rng.choice(OPENED[split]).format(day=rng.choice(DAYS), **fill)]
        asked: list[str] = []
        for asks, answers in zip(ASKS.values(), rng.shuffled(ANSWERS), strict=False):
            roll = rng.random()
            if roll < 0.7:
                saying = deck.deal()
                question, answer = rng.choice(saying.questions), rng.choice(saying.named)[:-1]
            elif roll < 0.85:
                problem = draw(split, rng)
                question, answer = f"What is {problem.text}?", f"{problem.text} = {problem.result}"
            else:
                word = rng.choice(words())
                question, answer = HOW_SPELLED[split].format(w=word), spelled(word)
            asked.append(rng.choice([ask for ask in asks if ask not in asked]))
            lines.append(f"{asked[-1].format(q=question, **fill)} {answers.format(r=answer)}")
        end = rng.choice(ENDS)
        yield "\n".join([*lines, end] if end else lines)
