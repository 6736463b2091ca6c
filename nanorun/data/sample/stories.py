"""Short stories in which everybody does what the almanac says of them.

A plot is a sequence of beats, and a beat a few ways to tell it. The slots are filled with facts about the hero, the
hero's village and island, the animal in the house and a friend on another island, so a story cannot contradict them.
A share of the pairs (plot, hero) is held out for validation. There, a beat that does not name the hero has tellings
of its own, unless it states no fact.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache

from nanorun.data.sample import world
from nanorun.data.sample.plots import PLOTS, Plot
from nanorun.data.sample.rng import Deck, RandomStream, Split, belongs
from nanorun.data.sample.world import OBJECT, POSSESSIVE, Animal, Person, an, capital

_ISLAND_OF = {place.name: place.island for place in world.PLACES}


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
    for person in world.PEOPLE:
        friends = tuple(
            other
            for other in world.PEOPLE
            if _ISLAND_OF[other.home] != _ISLAND_OF[person.home]
            and belongs(split, "friends", person.name, other.name)
        )
        for plot in PLOTS:
            if plot.with_animal and person.name not in world.COMPANIONS:
                continue
            if belongs(split, "story", plot.titles["train"], person.name) and friends:
                found.append(_Tale(plot, _slots(person), friends))
    return tuple(found)


def _slots(person: Person) -> dict[str, str]:
    """Every attribute of the hero, the village, the island and the animal; `a_NAME` is one with its article."""
    place, island = world.ENTITIES[person.home], world.ENTITIES[_ISLAND_OF[person.home]]
    slots: dict[str, str] = {**vars(island), **vars(place), **vars(person)}
    slots |= {"n": person.name, "Weather": capital(slots["weather"]), **_pronouns("", person)}
    animal = world.COMPANIONS.get(person.name)
    if animal is not None:
        slots |= {
            **vars(animal),
            "pet": animal.name,
            **_pronouns("p", animal),
            "Phe": capital(animal.pronoun),
        }
    return slots | {f"a_{name}": an(value) for name, value in slots.items()}


def _pronouns(prefix: str, who: Person | Animal) -> dict[str, str]:
    forms = {"he": who.pronoun, "his": POSSESSIVE[who.pronoun], "him": OBJECT[who.pronoun]}
    return {f"{prefix}{slot}": form for slot, form in forms.items()}


def _tell(tale: _Tale, split: Split, rng: RandomStream) -> str:
    friend = rng.choice(tale.friends)
    about_friend = {f"f{name}": value for name, value in vars(friend).items()}
    about_friend |= {"friend": friend.name, "fisland": _ISLAND_OF[friend.home], **_pronouns("f", friend)}
    story = " ".join(rng.choice(tellings) for tellings in tale.plot.beats[split])
    if rng.random() < 0.5:
        story = f"{tale.plot.titles[split]}\n{story}"
    return story.format_map({**tale.fill, **about_friend})
