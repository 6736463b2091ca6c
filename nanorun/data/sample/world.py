"""The sample world as objects: islands, places, people, animals, and every fact about them.

`world().facts` is the truth that all documents are composed from and all questions are judged by. A fact is
three strings, `Fact("Odo", "home", "Candlebay")`; its relation is named after the field it comes from.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cache
from types import MappingProxyType
from typing import Literal

from nanorun.data.sample import tables

NAME = "the Lantern Isles"
Pronoun = Literal["it", "she", "he"]


@dataclass(frozen=True, slots=True)
class Fact:
    subject: str
    relation: str
    answer: str


@dataclass(frozen=True)
class Island:
    name: str
    direction: str
    flag: str
    weather: str


@dataclass(frozen=True)
class Place:
    name: str
    island: str
    landmark: str
    dish: str
    festival: str
    doors: str


@dataclass(frozen=True)
class Person:
    name: str
    pronoun: Pronoun
    home: str
    trade: str
    food: str
    scarf: str


@dataclass(frozen=True)
class Animal:
    name: str
    pronoun: Pronoun
    kind: str
    keeper: str
    colour: str
    meal: str
    habit: str


Entity = Island | Place | Person | Animal


@dataclass(frozen=True)
class World:
    islands: tuple[Island, ...]
    places: tuple[Place, ...]
    people: tuple[Person, ...]
    animals: tuple[Animal, ...]
    facts: tuple[Fact, ...]
    entities: Mapping[str, Entity]  # by name
    companions: Mapping[str, Animal]  # by the name of the keeper

    def about(self, name: str) -> tuple[Fact, ...]:
        return tuple(fact for fact in self.facts if fact.subject == name)


@cache
def world() -> World:
    islands = tuple(Island(*row) for row in tables.ISLANDS)
    places = tuple(Place(*row) for row in tables.PLACES)
    people = tuple(Person(*row) for row in tables.PEOPLE)  # type: ignore[arg-type]
    animals = tuple(Animal(*row) for row in tables.ANIMALS)  # type: ignore[arg-type]
    companions = {animal.keeper: animal for animal in animals}
    everything: tuple[Entity, ...] = (*islands, *places, *people, *animals)
    facts: list[Fact] = []
    for entity in everything:
        for field in fields(entity):
            if field.name not in ("name", "pronoun"):
                facts.append(Fact(entity.name, field.name, getattr(entity, field.name)))
        if entity.name in companions:
            facts.append(Fact(entity.name, "companion", companions[entity.name].name))
    by_name = {entity.name: entity for entity in everything}
    return World(
        islands,
        places,
        people,
        animals,
        tuple(facts),
        MappingProxyType(by_name),
        MappingProxyType(companions),
    )


def pronoun(entity: Entity) -> Pronoun:
    return entity.pronoun if isinstance(entity, Person | Animal) else "it"


POSSESSIVE: Mapping[Pronoun, str] = MappingProxyType({"it": "its", "she": "her", "he": "his"})
OBJECT: Mapping[Pronoun, str] = MappingProxyType({"it": "it", "she": "her", "he": "him"})


def an(words: str) -> str:
    """'owl' -> 'an owl'. The tables hold no word like 'hour' or 'unicorn' that breaks the simple rule."""
    return f"{'an' if words[0] in 'aeiou' else 'a'} {words}"


def listed(names: list[str] | tuple[str, ...]) -> str:
    """'Odo, Kit and Rosa'."""
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def capital(sentence: str) -> str:
    return sentence[0].upper() + sentence[1:]
