"""The Lantern Isles: the tables of facts, and the same facts as objects.

Five islands lie in the Quiet Sea, one in the middle and one in each direction. Each has four villages, each village
two of the forty people, and twenty-five of the people keep an animal. The tables below are the only place where
facts are written down. Everything else in this package phrases them, so a change to one row changes every document,
story, question and answer alike, and nothing contradicts anything else.

Values come from small sets shared between rows (eight scarf colours, ten dishes, twenty trades ...): a question has
a short answer, and a model has to learn who goes with what instead of a list of oddities.

`FACTS` is the ground truth of all documents and all questions. A fact is three strings,
`Fact("Odo", "home", "Candlebay")`; its relation is the name of the field it comes from.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Literal, Self

Pronoun = Literal["it", "she", "he"]


@dataclass(frozen=True, slots=True)
class Fact:
    subject: str
    relation: str
    answer: str


@dataclass(frozen=True)
class Entity:
    name: str

    @classmethod
    def rows(cls, table: str) -> tuple[Self, ...]:
        """One for each line of the table, which lists the values of the fields."""
        return tuple(cls(*line.strip().split(", ")) for line in table.strip().splitlines())


@dataclass(frozen=True)
class Island(Entity):
    direction: str
    flag: str
    weather: str


@dataclass(frozen=True)
class Place(Entity):
    island: str
    landmark: str
    dish: str
    festival: str
    doors: str


@dataclass(frozen=True)
class Person(Entity):
    pronoun: Pronoun
    home: str
    trade: str
    food: str
    scarf: str


@dataclass(frozen=True)
class Animal(Entity):
    pronoun: Pronoun
    kind: str
    keeper: str
    colour: str
    meal: str
    habit: str


# name, direction, flag, weather
ISLANDS = Island.rows("""
    Ember, middle, red, fog
    Hollin, north, white, snow
    Tansy, east, yellow, sunshine
    Mossop, south, green, rain
    Farrow, west, blue, wind
""")

# name, island, landmark, dish, festival, doors
PLACES = Place.rows("""
    Candlebay, Ember, lighthouse, fish pie, Lamp Night, blue
    Oddly, Ember, crooked tower, plum cake, Pillow Day, yellow
    Brambleford, Ember, stone bridge, apple pudding, Apple Day, green
    Pennywell, Ember, wishing well, onion soup, Song Night, red
    Frostwick, Hollin, bell tower, pepper stew, Lamp Night, red
    Skerry, Hollin, lighthouse, fish pie, Boat Day, white
    Mittens, Hollin, windmill, ginger toffee, Snow Day, orange
    Cragtop, Hollin, rope bridge, cheese toast, Snow Day, blue
    Honeydown, Tansy, round library, honey bread, Song Night, yellow
    Larkfield, Tansy, giant oak, lemon tart, Kite Day, green
    Saffron, Tansy, glass garden, pepper stew, Apple Day, orange
    Tumble, Tansy, crooked tower, plum cake, Pillow Day, white
    Dripley, Mossop, wishing well, onion soup, Boat Day, blue
    Fernhollow, Mossop, giant oak, apple pudding, Song Night, green
    Otterbank, Mossop, stone bridge, fish pie, Boat Day, red
    Mudge, Mossop, bell tower, ginger toffee, Pillow Day, orange
    Windle, Farrow, windmill, lemon tart, Kite Day, white
    Kitesend, Farrow, rope bridge, cheese toast, Kite Day, yellow
    Saltmarsh, Farrow, glass garden, honey bread, Lamp Night, red
    Bréa, Farrow, round library, plum cake, Apple Day, blue
""")

# name, she or he, home, trade, favourite food, scarf
PEOPLE = Person.rows("""
    Odo, he, Candlebay, baker, onion soup, red
    Marnie, she, Candlebay, lamplighter, lemon tart, yellow
    Bram, he, Oddly, clockmaker, plum cake, grey
    Nettie, she, Oddly, librarian, ginger toffee, purple
    Jasper, he, Brambleford, carpenter, apple pudding, green
    Wilma, she, Brambleford, gardener, honey bread, orange
    Hester, she, Pennywell, teacher, cheese toast, blue
    Gus, he, Pennywell, potter, pepper stew, white
    Lotta, she, Frostwick, weaver, ginger toffee, red
    Ferdy, he, Frostwick, cobbler, fish pie, orange
    Quill, he, Skerry, ferry pilot, cheese toast, white
    Zoé, she, Skerry, fisher, plum cake, green
    Milo, he, Mittens, shepherd, pepper stew, blue
    Ottie, she, Mittens, weaver, lemon tart, purple
    Rufus, he, Cragtop, doctor, onion soup, yellow
    Dora, she, Cragtop, shepherd, apple pudding, grey
    Basil, he, Honeydown, beekeeper, honey bread, yellow
    Ivy, she, Honeydown, librarian, fish pie, red
    Casper, he, Larkfield, gardener, lemon tart, white
    Greta, she, Larkfield, teacher, plum cake, green
    Juno, she, Saffron, painter, pepper stew, orange
    Kit, he, Saffron, baker, cheese toast, purple
    Mabel, she, Tumble, clockmaker, onion soup, blue
    Ned, he, Tumble, carpenter, ginger toffee, grey
    Opal, she, Dripley, umbrella maker, apple pudding, yellow
    Percy, he, Dripley, ferry pilot, lemon tart, red
    Linnet, she, Fernhollow, beekeeper, cheese toast, white
    Silas, he, Fernhollow, painter, fish pie, green
    Tilda, she, Otterbank, fisher, honey bread, blue
    Ugo, he, Otterbank, doctor, plum cake, purple
    Vera, she, Mudge, potter, onion soup, grey
    Wendel, he, Mudge, umbrella maker, ginger toffee, orange
    Yara, she, Windle, kite maker, apple pudding, red
    Abel, he, Windle, miller, pepper stew, yellow
    Betty, she, Kitesend, kite maker, fish pie, white
    Cosmo, he, Kitesend, map maker, honey bread, blue
    Edda, she, Saltmarsh, cobbler, lemon tart, grey
    Felix, he, Saltmarsh, lamplighter, onion soup, green
    Rosa, she, Bréa, map maker, cheese toast, orange
    Humbert, he, Bréa, miller, apple pudding, purple
""")

# name, she or he, kind, keeper, colour, meal, habit
ANIMALS = Animal.rows("""
    Biscuit, he, goat, Odo, white, bread crusts, steal hats
    Pudding, she, heron, Marnie, grey, fish, stand on one leg
    Button, he, hedgehog, Bram, brown, apples, sleep in boots
    Professor, he, owl, Nettie, brown, cheese, sit on books
    Turnip, he, donkey, Jasper, grey, carrots, sing at dawn
    Marble, she, tortoise, Wilma, green, clover, hide in teapots
    Duchess, she, hen, Hester, golden, seeds, march in circles
    Hiccup, he, frog, Gus, green, berries, sit on books
    Velvet, she, cat, Lotta, black, fish, chase buttons
    Domino, he, badger, Ferdy, black, apples, sleep in boots
    Captain, he, parrot, Quill, green, seeds, ring bells
    Bubbles, she, seal, Zoé, grey, fish, sing at dawn
    Moss, she, sheep, Milo, white, clover, count the stars
    Waffle, he, dog, Dora, golden, cheese, collect spoons
    Thimble, she, mouse, Rufus, brown, bread crusts, collect spoons
    Noodle, she, otter, Tilda, brown, berries, chase buttons
    Admiral, he, goose, Basil, white, carrots, march in circles
    Teapot, she, snail, Casper, golden, clover, count the stars
    Crumb, he, sparrow, Kit, brown, bread crusts, ring bells
    Pickle, he, pony, Mabel, black, carrots, steal hats
    Sneeze, she, rabbit, Linnet, white, berries, dance in the rain
    Trumpet, he, swan, Opal, white, seeds, dance in the rain
    Pebble, she, crab, Vera, orange, cheese, hide in teapots
    Ribbon, she, goat, Yara, black, apples, stand on one leg
    Muffin, she, cat, Rosa, orange, fish, steal hats
""")


ENTITIES: Mapping[str, Entity] = MappingProxyType(
    {entity.name: entity for entity in (*ISLANDS, *PLACES, *PEOPLE, *ANIMALS)}
)
COMPANIONS: Mapping[str, Animal] = MappingProxyType({animal.keeper: animal for animal in ANIMALS})


def _facts(entity: Entity) -> Iterator[Fact]:
    for field in fields(entity):
        if field.name not in ("name", "pronoun"):
            yield Fact(entity.name, field.name, getattr(entity, field.name))
    if entity.name in COMPANIONS:
        yield Fact(entity.name, "companion", COMPANIONS[entity.name].name)


FACTS_ABOUT: Mapping[str, tuple[Fact, ...]] = MappingProxyType(
    {name: tuple(_facts(entity)) for name, entity in ENTITIES.items()}
)
FACTS = tuple(fact for about in FACTS_ABOUT.values() for fact in about)


def pronoun(entity: Entity) -> Pronoun:
    return entity.pronoun if isinstance(entity, Person | Animal) else "it"


POSSESSIVE: Mapping[Pronoun, str] = MappingProxyType({"it": "its", "she": "her", "he": "his"})
OBJECT: Mapping[Pronoun, str] = MappingProxyType({"it": "it", "she": "her", "he": "him"})


def templates(text: str) -> dict[str, tuple[str, ...]]:
    """A table of templates by key: each line has a key and, after it, one template or several with ` | ` between."""
    table: dict[str, tuple[str, ...]] = {}
    for line in text.strip().splitlines():
        key, entry = line.split(maxsplit=1)
        table[key] = (*table.get(key, ()), *entry.split(" | "))
    return table


def blocks(text: str) -> tuple[dict[str, tuple[str, ...]], ...]:
    """A table of templates for each block of lines."""
    return tuple(map(templates, text.split("\n\n")))


def an(words: str) -> str:
    """'owl' -> 'an owl'. The tables hold no word like 'hour' or 'unicorn' that breaks the simple rule."""
    return f"{'an' if words[0] in 'aeiou' else 'a'} {words}"


def listed(names: list[str] | tuple[str, ...]) -> str:
    """'Odo, Kit and Rosa'."""
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def capital(sentence: str) -> str:
    return sentence[0].upper() + sentence[1:]
