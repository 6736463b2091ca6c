"""Documents about numbers: sums in words, worked out step by step, and in daily life.

A hash of the numbers decides which problems are held out for validation (an addition and its mirror image go
together), with two exceptions: the tables up to ten are all taught in training, and 12 + 30 is always held out,
because the manual asks for it. The hold-out is about problems that are posed; the steps of a worked sum never write
another sum down.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from operator import add, floordiv, mul, sub

from nanorun.data.sample.rng import RandomStream, Split, held_out
from nanorun.data.sample.world import PEOPLE, capital

_ONES = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen "
    "seventeen eighteen nineteen"
).split()
_TENS = "_ _ twenty thirty forty fifty sixty seventy eighty ninety".split()
SIGNS = ("+", "-", "*", "/")
VERBS = {"+": "plus", "-": "minus", "*": "times", "/": "divided by"}
_COMPUTE: dict[str, Callable[[int, int], int]] = {"+": add, "-": sub, "*": mul, "/": floordiv}


@dataclass(frozen=True, slots=True)
class SumProblem:
    a: int
    sign: str
    b: int

    @property
    def result(self) -> int:
        return _COMPUTE[self.sign](self.a, self.b)

    @property
    def text(self) -> str:
        return f"{self.a} {self.sign} {self.b}"

    @property
    def spoken(self) -> str:
        return f"{self.a} {VERBS[self.sign]} {self.b}"

    @property
    def python(self) -> str:
        """For the calculator. Divisions here are exact, and // keeps them whole: 12, not 12.0."""
        return f"{self.a}{'//' if self.sign == '/' else self.sign}{self.b}"

    @property
    def for_validation(self) -> bool:
        if self.sign in "+*":
            small, large = min(self.a, self.b), max(self.a, self.b)
        elif self.sign == "-":
            small, large = self.b, self.a
        else:
            small, large = self.b, self.result
        if (self.sign, small, large) == ("+", 12, 30):
            return True
        return large > 10 and held_out("sum", self.sign, small, large)


@cache
def problems(split: Split, sign: str) -> tuple[SumProblem, ...]:
    if sign == "+":
        every = (SumProblem(a, "+", b) for a in range(1, 100) for b in range(1, 100))
    elif sign == "-":
        every = (SumProblem(a, "-", b) for a in range(2, 100) for b in range(1, a))
    elif sign == "*":
        every = (SumProblem(a, "*", b) for a in range(2, 21) for b in range(2, 21))
    else:
        every = (SumProblem(q * b, "/", b) for q in range(2, 21) for b in range(2, 13))
    return tuple(problem for problem in every if problem.for_validation == (split == "val"))


def draw(split: Split, rng: RandomStream) -> SumProblem:
    """A problem: half of them additions, a quarter subtractions."""
    roll = rng.random()
    sign = "+" if roll < 0.5 else "-" if roll < 0.75 else "*" if roll < 0.9 else "/"
    return rng.choice(problems(split, sign))


def draw_large(split: Split, rng: RandomStream) -> SumProblem:
    """An addition or a subtraction with a number of three digits."""
    while True:
        large, other = 100 + rng.below(900), 1 + rng.below(999 if rng.random() < 0.7 else 99)
        if rng.random() < 0.6:
            pair = (large, other) if rng.random() < 0.5 else (other, large)
            problem = SumProblem(pair[0], "+", pair[1])
        else:
            problem = SumProblem(max(large, other), "-", min(large, other))
        if problem.for_validation == (split == "val"):
            return problem


def draw_long_result(split: Split, rng: RandomStream) -> SumProblem:
    """Two numbers of at most two digits whose sum or product has three or four."""
    while True:
        sign = "+" if rng.random() < 0.5 else "*"
        problem = SumProblem(2 + rng.below(98), sign, 2 + rng.below(98))
        if problem.result > 99 and problem.for_validation == (split == "val"):
            return problem


def in_words(n: int) -> str:
    """0 to 999: 'forty-two', 'three hundred and six'."""
    if n < 20:
        return _ONES[n]
    if n < 100:
        return _TENS[n // 10] + (f"-{_ONES[n % 10]}" if n % 10 else "")
    return f"{_ONES[n // 100]} hundred" + (f" and {in_words(n % 100)}" if n % 100 else "")


IN_WORDS = (
    "{A} {verb} {b} is {c}. In numbers: {text} = {r}.",
    "{A} {verb} {b} makes {c}, and we write {text} = {r}.",
    "{text} = {r}, or in words: {a} {verb} {b} is {c}.",
    "Work out {text}. The answer is {r}, because {a} {verb} {b} is {c}.",
)
WORKED = (
    "What is {x} + {y}? The tens give {tens} and the ones give {ones}. Together that is {r}, so {x} + {y} = {r}.",
    "To add {x} and {y}, take the tens first: {tens}. The ones make {ones}. So {x} + {y} = {r}.",
    "Add {x} and {y}. Tens: {tens}. Ones: {ones}. All in all {x} + {y} = {r}.",
)
# Things that people of the isles have, find and give away.
THINGS = ("shells", "eggs", "apples", "buttons", "candles", "lemons", "stamps", "pebbles", "nuts", "spoons")
MORE = {
    "+": (
        "{n} has {x} {things} and finds {y} more on the beach.",
        "{n} has {x} {things} and is given {y} more by a friend.",
        "{n} puts {x} {things} and another {y} into a basket.",
    ),
    "-": (
        "{n} has {x} {things} and gives away {y}.",
        "{n} has {x} {things} and loses {y} in the wind.",
        "{n} brings {x} {things} to the market and sells {y}.",
    ),
    "*": ("{n} has {x} baskets with {y} {things} in each.", "{n} fills {x} boxes with {y} {things} each."),
    "/": ("{n} shares {x} {things} fairly among {y} friends.", "{n} packs {x} {things} into {y} equal bags."),
}
ASKED = {
    "+": "How many {things} does {he} have now?",
    "-": "How many {things} does {he} have left?",
    "*": "How many {things} is that?",
    "/": "How many {things} go to each?",
}
TOLD = {
    "+": "Now {he} has {r} {things}.",
    "-": "Now {he} has {r} {things} left.",
    "*": "That is {r} {things}.",
    "/": "Each gets {r} {things}.",
}


def word_problem(split: Split, rng: RandomStream) -> tuple[SumProblem, str, str]:
    """A problem, the question that tells it, and the sentence that answers it."""
    sign = rng.choice(SIGNS)
    problem = rng.choice(problems(split, sign))
    while min(problem.a, problem.b, problem.result) < 2:  # "1 shells" is no English
        problem = rng.choice(problems(split, sign))
    person = rng.choice(PEOPLE)
    fill = {
        "n": person.name,
        "he": person.pronoun,
        "things": rng.choice(THINGS),
        "x": problem.a,
        "y": problem.b,
        "r": problem.result,
    }
    question = f"{rng.choice(MORE[sign])} {ASKED[sign]}".format_map(fill)
    return problem, question, TOLD[sign].format_map(fill)


def sums(split: Split, rng: RandomStream) -> str:
    sentences = []
    for way in rng.shuffled(IN_WORDS)[: 2 + rng.below(3)]:
        problem = draw(split, rng)
        sentences.append(
            way.format(
                A=capital(in_words(problem.a)),
                a=in_words(problem.a),
                verb=VERBS[problem.sign],
                b=in_words(problem.b),
                c=in_words(problem.result),
                text=problem.text,
                r=problem.result,
            )
        )
    return " ".join(sentences)


def worked(split: Split, rng: RandomStream) -> str:
    sentences = []
    for work in rng.shuffled(WORKED)[:2]:
        problem = rng.choice(problems(split, "+"))
        while problem.a < 10 or problem.b < 10:
            problem = rng.choice(problems(split, "+"))
        tens = problem.a // 10 * 10 + problem.b // 10 * 10
        ones = problem.a % 10 + problem.b % 10
        sentences.append(work.format(x=problem.a, y=problem.b, tens=tens, ones=ones, r=problem.result))
    return " ".join(sentences)


def daily(split: Split, rng: RandomStream) -> str:
    sentences = []
    for _ in range(2):
        problem, question, told = word_problem(split, rng)
        sentences.append(f"{question} {problem.text} = {problem.result}. {told}")
    return "\n".join(sentences)
