"""Every fact in all the ways it may be said and asked, as finished sentences.

The templates of phrases_places.py and phrases_beings.py are filled once from the table of facts; after that a
document is mostly a choice of sentences that are true by construction.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType

from nanorun.data.sample.chance import Split
from nanorun.data.sample.phrases_beings import BEINGS
from nanorun.data.sample.phrases_places import PLACES
from nanorun.data.sample.phrasing import Phrasing
from nanorun.data.sample.world import POSSESSIVE, Fact, an, capital, listed, pronoun, world


@dataclass(frozen=True, slots=True)
class Said:
    """One fact in all the ways a split may say it."""

    fact: Fact
    named: tuple[str, ...]  # sentences that name the subject
    openings: tuple[str, ...]  # those of them that begin with it
    short: tuple[str, ...]  # sentences for one who knows whom we speak of: with a pronoun where possible
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


def both(split: Split, one: Fact, other: Fact) -> str:
    """'Odo and Marnie both live in Candlebay.'; empty where the relation has no such sentence."""
    phrasing = phrasings()[one.relation]
    template = phrasing.both if split == "train" else phrasing.both_val
    fill = {"s": one.subject, "t": other.subject, "a": one.answer, "an": an(one.answer)}
    return capital(template.format_map(fill)) if template else ""


def _say(fact: Fact, split: Split) -> Said:
    phrasing = phrasings()[fact.relation]
    templates = phrasing.statements(split)
    he = pronoun(world().entities[fact.subject])
    fill = {"a": fact.answer, "an": an(fact.answer), "he": he, "his": POSSESSIVE[he]}
    name = {**fill, "s": fact.subject, "p": f"{fact.subject}'s"}
    short = {**name, "s": he, "p": POSSESSIVE[he]}
    begins = tuple(template.startswith(("{s} ", "{p} ")) for template in templates)
    named = tuple(template.format_map(name) for template in templates)
    pronominal = tuple(
        # Only the first slot becomes a pronoun: further on it could stand where "him" or "himself" belongs.
        capital(template[:3].format_map(short) + template[3:].format_map(name))
        for template, first in zip(templates, begins, strict=True)
        if first and not template.startswith("{s} the ")
    )
    return Said(
        fact=fact,
        named=tuple(capital(sentence) for sentence in named),
        openings=tuple(sentence for sentence, first in zip(named, begins, strict=True) if first),
        short=pronominal or named,
        questions=questions_about(fact.subject, fact.relation, split),
        again=phrasing.again.format_map(fill),
        names_another=fact.relation in ("companion", "keeper"),
    )
