"""Every fact in all the ways it can be stated and asked for, as finished sentences.

The templates of phrases.py are filled once from the table of facts. After that a document is mostly a choice of
sentences that are true by construction.

Validation states a fact with a phrasing of its own, or with a phrasing of training after an opener ("They say that
Odo lives in Candlebay.") that this sentence never has in training. So its sentences are all new, and yet made of
familiar parts: the loss on them falls as long as a model learns something.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import NamedTuple

from nanorun.data.sample.phrases import phrases
from nanorun.data.sample.rng import Split, belongs
from nanorun.data.sample.world import ENTITIES, FACTS, POSSESSIVE, Fact, Place, an, capital, listed, pronoun

# A hash decides for each opener, phrasing and answer which split has the combination.
OPENERS = (
    "They say that ",
    "As everyone knows, ",
    "It is true that ",
    "Of course ",
    "Ask anyone: ",
    "People will tell you that ",
    "It is no secret that ",
    "You may have heard that ",
    "Every child can tell you that ",
    "Here is something worth knowing: ",
)


class Opened(NamedTuple):
    opener: str
    sentence: str  # opener and all


@dataclass(frozen=True, slots=True)
class FactSentences:
    """One fact in all the ways a split may say it."""

    fact: Fact
    named: tuple[str, ...]  # sentences that name the subject
    openings: tuple[str, ...]  # those of them that begin with it
    short: tuple[str, ...]  # sentences for one who knows whom we speak of: with a pronoun
    by_noun: tuple[str, ...]  # the same with "the village" or "the island"; none about people and animals
    opened: tuple[Opened, ...]  # with an opener before the name
    opened_short: tuple[Opened, ...]  # with an opener before the pronoun
    clear: frozenset[str]  # those of all these sentences after which a pronoun can only mean the subject
    questions: tuple[str, ...]
    again: str  # a question with a pronoun


@cache
def fact_sentences(split: Split) -> Mapping[Fact, FactSentences]:
    return MappingProxyType({fact: _say(fact, split) for fact in FACTS})


def questions_about(subject: str, relation: str, split: Split) -> tuple[str, ...]:
    """The questions of a relation, about anyone at all, known or not."""
    fill = {"s": subject, "p": f"{subject}'s"}
    return tuple(template.format_map(fill) for template in phrases(relation, "asked", split))


def sharing(split: Split, relation: str) -> tuple[str, ...]:
    """A sentence for each answer of this relation that several subjects share, naming all of them."""
    subjects: dict[str, list[str]] = {}
    for fact in FACTS:
        if fact.relation == relation:
            subjects.setdefault(fact.answer, []).append(fact.subject)
    return tuple(
        capital(template.format_map({"a": answer, "an": an(answer), "list": listed(names)}))
        for template in phrases(relation, "listing", split)
        for answer, names in subjects.items()
        if len(names) > 1
    )


def both(one: Fact, other: Fact) -> tuple[str, ...]:
    """'Odo and Marnie both live in Candlebay.' in two ways; none where the relation has no such sentence."""
    fill = {"s": one.subject, "t": other.subject, "a": one.answer, "an": an(one.answer)}
    return tuple(capital(template.format_map(fill)) for template in phrases(one.relation, "both"))


def _say(fact: Fact, split: Split) -> FactSentences:
    he = pronoun(ENTITIES[fact.subject])
    noun = "village" if isinstance(ENTITIES[fact.subject], Place) else "island"
    fill = {"a": fact.answer, "an": an(fact.answer), "he": he, "his": POSSESSIVE[he]}
    name = {**fill, "s": fact.subject, "p": f"{fact.subject}'s"}
    clear = set()

    def say(template: str, subject: str, possessive: str, opener: str = "") -> str:
        # Only the first slot changes: further on a pronoun could stand where "him" or "himself" belongs.
        first = {**name, "s": subject, "p": possessive}
        sentence = capital(opener + template[:3].format_map(first) + template[3:].format_map(name))
        if _leaves_no_doubt(template, fact):
            clear.add(sentence)
        return sentence

    def by_name(template: str, opener: str = "") -> str:
        return say(template, fact.subject, f"{fact.subject}'s", opener)

    def short(template: str, opener: str = "") -> str:
        return say(template, he, POSSESSIVE[he], opener)

    said = phrases(fact.relation, "said", split)
    leading = [template for template in said if template.startswith(("{s} ", "{p} "))]
    plain = [template for template in leading if _allows_pronoun(template)]
    nouns = [template for template in plain if he == "it" and noun not in template]
    opened = [
        (opener, template)
        for template in phrases(fact.relation, "said")
        if _allows_pronoun(template)
        for opener in OPENERS
        if belongs(split, "said", opener, template, fact.answer)
    ]
    return FactSentences(
        fact=fact,
        named=tuple(by_name(template) for template in said),
        openings=tuple(template.format_map(name) for template in leading),
        short=tuple(short(template) for template in plain),
        by_noun=tuple(say(template, f"The {noun}", f"The {noun}'s") for template in nouns),
        opened=tuple(Opened(opener, by_name(template, opener)) for opener, template in opened),
        opened_short=tuple(
            Opened(opener, short(template, opener))
            for opener, template in opened
            if he != "it" or not opener.startswith("It ")  # "It is true that it ..." would stumble
        ),
        clear=frozenset(clear),
        questions=questions_about(fact.subject, fact.relation, split),
        again=phrases(fact.relation, "again")[0].format_map(fill),
    )


def _allows_pronoun(template: str) -> bool:
    """Whether the template begins with the subject, and not as in "Biscuit the goat"."""
    return template.startswith(("{s} ", "{p} ")) and not template.startswith("{s} the ")


def _leaves_no_doubt(template: str, fact: Fact) -> bool:
    """Whether a pronoun in the next sentence can only mean the subject of this one.

    After "The dish of Oddly is plum cake." or "Oddly's dish is plum cake." an "it" would be the cake: a place
    has to be the grammatical subject. He and she are no cake, so there it is enough that the subject is the
    first that is named; but a keeper and an animal may both be "he".
    """
    if fact.relation in ("companion", "keeper"):
        return False
    if pronoun(ENTITIES[fact.subject]) == "it":
        return template.startswith("{s} ")
    return re.findall(r"{(s|p|a|an)}", template)[0] in ("s", "p")
