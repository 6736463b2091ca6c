"""Short stories in which everybody does what the almanac says of them.

A plot is a sequence of beats, and a beat a few ways to tell it. The slots are filled with facts about the hero, the
hero's village and island, the animal in the house and a friend on another island, so a story cannot contradict them.
A share of the pairs (plot, hero) is held out for validation. There, a beat that does not name the hero has tellings
of its own, unless it states no fact.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache

from nanorun.data.sample.plots import PLOTS, Plot
from nanorun.data.sample.rng import Deck, RandomStream, Split, belongs
from nanorun.data.sample.world import OBJECT, POSSESSIVE, Island, Person, Place, an, capital, world


@dataclass(frozen=True, slots=True)
class _Tale:
    plot: Plot
    fill: Mapping[str, str]
    friends: tuple[Person, ...]


def stories(split: Split, rng: RandomStream) -> Iterator[str]:
    deck = Deck(_tales(split), rng)
    while True:
        yield _tell(deck.deal(), split, rng)


def story_about(name: str, split: Split, rng: RandomStream) -> str:
    return _tell(rng.choice([tale for tale in _tales(split) if tale.fill["n"] == name]), split, rng)


@cache
def heroes(split: Split) -> tuple[str, ...]:
    """Those of whom this split has a story to tell."""
    return tuple(dict.fromkeys(tale.fill["n"] for tale in _tales(split)))


@cache
def _tales(split: Split) -> tuple[_Tale, ...]:
    found = []
    for person in world().people:
        friends = tuple(
            other
            for other in world().people
            if _island(other) != _island(person) and belongs(split, "friends", person.name, other.name)
        )
        for plot in PLOTS:
            if plot.with_animal and person.name not in world().companions:
                continue
            if belongs(split, "story", plot.title, person.name) and friends:
                found.append(_Tale(plot, _slots(person), friends))
    return tuple(found)


def _island(person: Person) -> str:
    place = world().entities[person.home]
    assert isinstance(place, Place)
    return place.island


def _slots(person: Person) -> dict[str, str]:
    place, island = world().entities[person.home], world().entities[_island(person)]
    assert isinstance(place, Place)
    assert isinstance(island, Island)
    slots = {
        "n": person.name,
        "he": person.pronoun,
        "his": POSSESSIVE[person.pronoun],
        "him": OBJECT[person.pronoun],
        "trade": person.trade,
        "a_trade": an(person.trade),
        "food": person.food,
        "scarf": person.scarf,
        "a_scarf": an(person.scarf),
        "home": place.name,
        "island": place.island,
        "weather": island.weather,
        "Weather": capital(island.weather),
        "landmark": place.landmark,
        "dish": place.dish,
        "festival": place.festival,
        "doors": place.doors,
    }
    animal = world().companions.get(person.name)
    if animal is not None:
        slots |= {
            "pet": animal.name,
            "kind": animal.kind,
            "a_kind": an(animal.kind),
            "colour": animal.colour,
            "a_colour": an(animal.colour),
            "meal": animal.meal,
            "habit": animal.habit,
            "phe": animal.pronoun,
            "Phe": capital(animal.pronoun),
            "phis": POSSESSIVE[animal.pronoun],
            "phim": OBJECT[animal.pronoun],
        }
    return slots


def _tell(tale: _Tale, split: Split, rng: RandomStream) -> str:
    friend = rng.choice(tale.friends)
    fill = {
        **tale.fill,
        "friend": friend.name,
        "fhome": friend.home,
        "fisland": _island(friend),
        "ftrade": friend.trade,
        "ffood": friend.food,
        "fscarf": friend.scarf,
        "fhe": friend.pronoun,
        "fhis": POSSESSIVE[friend.pronoun],
    }
    beats = " ".join(rng.choice(beat.tellings(split)) for beat in tale.plot.beats)
    if rng.random() < 0.5:
        title = tale.plot.title if split == "train" else tale.plot.title_val
        beats = f"{title}\n{beats}"
    return beats.format_map(fill)
