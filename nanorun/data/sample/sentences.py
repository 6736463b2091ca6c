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

from nanorun.data.sample.phrases import PHRASINGS
from nanorun.data.sample.rng import Split, belongs
from nanorun.data.sample.world import POSSESSIVE, Fact, Place, an, capital, listed, pronoun, world

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
    return MappingProxyType({fact: _say(fact, split) for fact in world().facts})


def questions_about(subject: str, relation: str, split: Split) -> tuple[str, ...]:
    """The questions of a relation, about anyone at all, known or not."""
    fill = {"s": subject, "p": f"{subject}'s"}
    return tuple(template.format_map(fill) for template in PHRASINGS[relation].questions(split))


def sharing(split: Split, relation: str) -> tuple[str, ...]:
    """A sentence for each answer of this relation that several subjects share, naming all of them."""
    phrasing = PHRASINGS[relation]
    template = phrasing.listing if split == "train" else phrasing.listing_val
    subjects: dict[str, list[str]] = {}
    for fact in world().facts:
        if fact.relation == relation:
            subjects.setdefault(fact.answer, []).append(fact.subject)
    return tuple(
        capital(template.format_map({"a": answer, "an": an(answer), "list": listed(names)}))
        for answer, names in subjects.items()
        if template and len(names) > 1
    )


def both(one: Fact, other: Fact) -> tuple[str, ...]:
    """'Odo and Marnie both live in Candlebay.' in two ways; none where the relation has no such sentence."""
    fill = {"s": one.subject, "t": other.subject, "a": one.answer, "an": an(one.answer)}
    return tuple(capital(template.format_map(fill)) for template in PHRASINGS[one.relation].both)


def _say(fact: Fact, split: Split) -> FactSentences:
    phrasing = PHRASINGS[fact.relation]
    he = pronoun(world().entities[fact.subject])
    noun = "village" if isinstance(world().entities[fact.subject], Place) else "island"
    fill = {"a": fact.answer, "an": an(fact.answer), "he": he, "his": POSSESSIVE[he]}
    name = {**fill, "s": fact.subject, "p": f"{fact.subject}'s"}

    def begun(template: str, subject: str, possessive: str) -> str:
        # Only the first slot changes: further on a pronoun could stand where "him" or "himself" belongs.
        first = {**name, "s": subject, "p": possessive}
        return template[:3].format_map(first) + template[3:].format_map(name)

    def short(template: str) -> str:
        return begun(template, he, POSSESSIVE[he])

    templates = phrasing.statements(split)
    leading = tuple(template for template in templates if template.startswith(("{s} ", "{p} ")))
    plain = tuple(template for template in leading if not template.startswith("{s} the "))
    nouns = tuple(template for template in plain if he == "it" and noun not in template)
    opened = tuple(
        (opener, template)
        for template in phrasing.said
        if template.startswith(("{s} ", "{p} ")) and not template.startswith("{s} the ")
        for opener in OPENERS
        if belongs(split, "said", opener, template, fact.answer)
    )
    # "It is true that it ..." would stumble.
    opened_it = tuple(pair for pair in opened if he != "it" or not pair[0].startswith("It "))
    ways = {
        "named": [(template, capital(template.format_map(name))) for template in templates],
        "short": [(template, capital(short(template))) for template in plain],
        "by_noun": [(template, begun(template, f"The {noun}", f"The {noun}'s")) for template in nouns],
        "opened": [(template, opener + template.format_map(name)) for opener, template in opened],
        "opened_short": [(template, opener + short(template)) for opener, template in opened_it],
    }
    sentences = {key: tuple(sentence for _, sentence in pairs) for key, pairs in ways.items()}
    return FactSentences(
        fact=fact,
        named=sentences["named"],
        openings=tuple(template.format_map(name) for template in leading),
        short=sentences["short"],
        by_noun=sentences["by_noun"],
        opened=tuple(map(Opened, (opener for opener, _ in opened), sentences["opened"])),
        opened_short=tuple(map(Opened, (opener for opener, _ in opened_it), sentences["opened_short"])),
        clear=frozenset(
            sentence
            for pairs in ways.values()
            for template, sentence in pairs
            if _leaves_no_doubt(template, fact)
        ),
        questions=questions_about(fact.subject, fact.relation, split),
        again=phrasing.again.format_map(fill),
    )


def _leaves_no_doubt(template: str, fact: Fact) -> bool:
    """Whether a pronoun in the next sentence can only mean the subject of this one.

    After "The dish of Oddly is plum cake." or "Oddly's dish is plum cake." an "it" would be the cake: a place
    has to be the grammatical subject. He and she are no cake, so there it is enough that the subject is the
    first that is named; but a keeper and an animal may both be "he".
    """
    if fact.relation in ("companion", "keeper"):
        return False
    if pronoun(world().entities[fact.subject]) == "it":
        return template.startswith("{s} ")
    return re.findall(r"{(s|p|a|an)}", template)[0] in ("s", "p")
