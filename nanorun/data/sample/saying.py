"""Every fact in all the ways it may be said and asked, as finished sentences.

The templates of phrases_places.py and phrases_beings.py are filled once from the table of facts; after that a
document is mostly a choice of sentences that are true by construction.

Validation says a fact in a phrasing of its own, or in a phrasing of training after an opener ("They say that
Odo lives in Candlebay.") that this very sentence never has in training. So its sentences are all new, and yet
made of familiar parts: the loss on them falls as long as a model learns something.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType

from nanorun.data.sample.chance import Split, belongs
from nanorun.data.sample.phrases_beings import BEINGS
from nanorun.data.sample.phrases_places import PLACES
from nanorun.data.sample.phrasing import Phrasing
from nanorun.data.sample.world import POSSESSIVE, Fact, an, capital, listed, pronoun, world

# A hash decides for each opener, phrasing and answer which split has the combination.
OPENERS = (
    "They say that ",
    "As everyone knows, ",
    "It is true that ",
    "Of course ",
    "Ask anyone: ",
    "People will tell you that ",
    "It is no secret that ",
)


@dataclass(frozen=True, slots=True)
class Said:
    """One fact in all the ways a split may say it."""

    fact: Fact
    named: tuple[str, ...]  # sentences that name the subject
    openings: tuple[str, ...]  # those of them that begin with it
    short: tuple[str, ...]  # sentences for one who knows whom we speak of: with a pronoun where possible
    opened: tuple[str, ...]  # with an opener before the name
    opened_short: tuple[str, ...]  # with an opener before the pronoun
    questions: tuple[str, ...]
    again: str
    names_another: bool  # a pronoun after this sentence might be taken for somebody else


@cache
def phrasings() -> Mapping[str, Phrasing]:
    return MappingProxyType({**PLACES, **BEINGS})


@cache
def said(split: Split) -> Mapping[Fact, Said]:
    return MappingProxyType({fact: _say(fact, split) for fact in world().facts})


def questions_about(subject: str, relation: str, split: Split) -> tuple[str, ...]:
    """The questions of a relation, about anyone at all, known or not."""
    fill = {"s": subject, "p": f"{subject}'s"}
    return tuple(template.format_map(fill) for template in phrasings()[relation].questions(split))


def sharing(split: Split, relation: str) -> tuple[str, ...]:
    """A sentence for each answer of this relation that several subjects share, naming all of them."""
    phrasing = phrasings()[relation]
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
    return tuple(capital(template.format_map(fill)) for template in phrasings()[one.relation].both)


def _say(fact: Fact, split: Split) -> Said:
    phrasing = phrasings()[fact.relation]
    he = pronoun(world().entities[fact.subject])
    fill = {"a": fact.answer, "an": an(fact.answer), "he": he, "his": POSSESSIVE[he]}
    name = {**fill, "s": fact.subject, "p": f"{fact.subject}'s"}
    first = {**name, "s": he, "p": POSSESSIVE[he]}

    def short(template: str) -> str:
        # Only the first slot becomes a pronoun: further on it could stand where "him" or "himself" belongs.
        return template[:3].format_map(first) + template[3:].format_map(name)

    templates = phrasing.statements(split)
    leading = tuple(template for template in templates if template.startswith(("{s} ", "{p} ")))
    opened = tuple(
        (opener, template)
        for template in phrasing.said
        if template.startswith(("{s} ", "{p} ")) and not template.startswith("{s} the ")
        for opener in OPENERS
        if belongs(split, "said", opener, template, fact.answer)
    )
    return Said(
        fact=fact,
        named=tuple(capital(template.format_map(name)) for template in templates),
        openings=tuple(template.format_map(name) for template in leading),
        short=tuple(capital(short(template)) for template in leading if not template.startswith("{s} the ")),
        opened=tuple(opener + template.format_map(name) for opener, template in opened),
        opened_short=tuple(opener + short(template) for opener, template in opened),
        questions=questions_about(fact.subject, fact.relation, split),
        again=phrasing.again.format_map(fill),
        names_another=fact.relation in ("companion", "keeper"),
    )
