"""The isles as a whole, and the assistant that knows them: what they are, how many there are, who is where.

The almanac (entries.py) tells of one island, village, person or animal at a time, and its questions name the one they
are about. A topic here is asked about the other way around or names nobody at all: "What are the Lantern Isles?",
"Which island lies in the north?", "Who are you?". Each topic has questions for training and others for validation,
and `said` and `said_val`, where it has them, tell it in a document (`guides`).
"""

from collections.abc import Iterator, Mapping
from functools import cache
from typing import NamedTuple

from nanorun.data.sample.numbers import in_words
from nanorun.data.sample.rng import Deck, RandomStream, Split
from nanorun.data.sample.world import ANIMALS, ISLANDS, PEOPLE, PLACES, blocks, capital, listed

_COUNTS = {"i": len(ISLANDS), "v": len(PLACES), "p": len(PEOPLE), "a": len(ANIMALS)}
_FILL = {
    **{key: in_words(n) for key, n in _COUNTS.items()},
    **{key.upper(): capital(in_words(n)) for key, n in _COUNTS.items()},
    "list": listed([island.name for island in ISLANDS]),
}

# An answer is what a right reply contains; of a list, every name.
ISLES = blocks("""
    train     What are the Lantern Isles? | Can you tell me what the Lantern Isles are?
    train     Tell me about the Lantern Isles. | What do you know about the Lantern Isles?
    train     Please tell me something about the Lantern Isles. | Have you heard of the Lantern Isles?
    val       What are the Lantern Isles, please? | What can you tell me about the Lantern Isles?
    val       Please tell me about the Lantern Isles.
    replies   The Lantern Isles are {i} islands in the Quiet Sea: {list}.
    replies   The Lantern Isles are {i} islands in the Quiet Sea, with {v} villages and {p} people.
    answer    {i} islands
    said      The Lantern Isles are {i} islands in the Quiet Sea.
    said      There are {i} islands in the Quiet Sea, and together they are the Lantern Isles.
    said_val  The Lantern Isles are {i} islands, and they lie in the Quiet Sea.

    train     Where are the Lantern Isles? | Where can I find the Lantern Isles?
    train     In which sea are the Lantern Isles? | Which sea are the Lantern Isles in?
    val       Where do I find the Lantern Isles? | In which sea do the Lantern Isles lie?
    replies   They lie in the Quiet Sea. | You will find them in the Quiet Sea.
    answer    Quiet Sea
    said      The Lantern Isles lie in the Quiet Sea. | In the Quiet Sea lie the Lantern Isles.
    said_val  The Lantern Isles are in the Quiet Sea.

    train     What is the Quiet Sea? | What do you know about the Quiet Sea? | Tell me about the Quiet Sea.
    val       What can you tell me about the Quiet Sea? | Can you tell me what the Quiet Sea is?
    replies   The Quiet Sea is the sea around the Lantern Isles.
    replies   The Quiet Sea is the sea of the Lantern Isles, and boats sail on it from island to island.
    answer    Lantern Isles
    said      The Quiet Sea is the sea around the Lantern Isles. | The sea around the isles is the Quiet Sea.
    said_val  The sea around the Lantern Isles is the Quiet Sea.

    train     Which islands are there? | What are the islands called? | Name the islands, please.
    train     Which islands belong to the Lantern Isles? | List the islands of the Lantern Isles.
    val       What are the names of the islands? | Which are the islands of the Lantern Isles?
    val       Name the islands of the Lantern Isles.
    replies   The islands are {list}.
    replies   There are {i} islands: {list}.
    answer    {list}
    said      The islands are {list}. | The islands of the Quiet Sea are {list}.
    said_val  The {i} islands are {list}.

    train     How many islands are there? | How many islands are in the Lantern Isles?
    train     How many islands are in the Quiet Sea? | Do you know how many islands there are?
    val       How many islands do the Lantern Isles have? | How many islands are there in the Quiet Sea?
    replies   There are {i} islands in the Lantern Isles.
    replies   The Lantern Isles have {i} islands.
    answer    {i}
    said      There are {i} islands. | The Lantern Isles have {i} islands.
    said_val  There are {i} islands in the Lantern Isles.

    train     How many villages are there? | How many villages are in the Lantern Isles?
    train     How many villages are on the islands? | Do you know how many villages there are?
    val       How many villages do the Lantern Isles have? | How many villages are there on the islands?
    replies   There are {v} villages in the Lantern Isles.
    replies   The Lantern Isles have {v} villages.
    answer    {v}
    said      There are {v} villages. | The Lantern Isles have {v} villages, and no two are alike.
    said_val  There are {v} villages in the Lantern Isles.

    train     How many people are there? | How many people are in the Lantern Isles?
    train     How many people live on the islands? | Do you know how many people there are?
    val       How many people live in the Lantern Isles? | How many people are there on the islands?
    replies   There are {p} people in the Lantern Isles.
    replies   The Lantern Isles have {p} people.
    answer    {p}
    said      There are {p} people. | {P} people live in the Lantern Isles.
    said_val  There are {p} people in the Lantern Isles.

    train     How many animals are there? | How many animals are in the Lantern Isles?
    train     How many animals live on the islands? | Do you know how many animals there are?
    val       How many animals live in the Lantern Isles? | How many animals are there on the islands?
    replies   There are {a} animals in the Lantern Isles.
    replies   The Lantern Isles have {a} animals.
    answer    {a}
    said      There are {a} animals with a name. | {A} animals live with the people of the isles.
    said_val  There are {a} animals in the Lantern Isles.
""")
ABOUT_ITSELF = blocks("""
    train    Who are you? | What are you? | Tell me about yourself. | Who am I talking to? | What exactly are you?
    val      Who are you, please? | What are you, exactly? | Can you tell me about yourself?
    replies  I am a small nanorun model. I grew up in the Lantern Isles, on stories, sums and spelling.
    replies  I am a nanorun model, a very small one. All I know I learned in the Lantern Isles.
    replies  I am a little nanorun model, and the Lantern Isles are my home.
    answer   nanorun

    train    What is your name? | Do you have a name? | What are you called? | Please tell me your name.
    val      What is your name, please? | Can you tell me your name?
    replies  I have no name of my own. I am a small nanorun model.
    replies  You can call me nanorun, because I am a nanorun model.
    answer   nanorun

    train    Are you a person? | Are you human? | Are you alive?
    val      Are you a real person? | Are you a human being?
    replies  No, I am a nanorun model, a very small one.
    replies  No, I am only a small nanorun model, but I like people.
    answer   nanorun

    train    Who made you? | Where do you come from? | How were you made?
    val      Where do you come from, and who made you? | Can you tell me who made you?
    replies  I am a nanorun model, so I was made with nanorun. I grew up on stories of the Lantern Isles.
    replies  I was made with nanorun and grew up in the Lantern Isles: I am a small nanorun model.
    answer   nanorun

    train    Where do you live? | Where is your home? | In which place do you live? | Where are you?
    val      Where do you live, please? | Can you tell me where you live?
    replies  I live in the Lantern Isles, {i} islands in the Quiet Sea.
    replies  My home is the Lantern Isles, {i} islands in the Quiet Sea.
    answer   Lantern Isles
""")
# {n} is an island, a village or a direction; {list} who or what is there.
_IN_DIRECTION, _ON_ISLAND, _IN_VILLAGE = blocks("""
    train    Which island lies in the {n}? | Which is the island in the {n}? | Name the island in the {n}.
    train    What is the island in the {n} called? | Which island is in the {n} of the Lantern Isles?
    val      Which island is in the {n}? | What is the name of the island in the {n}?
    replies  The island in the {n} is {list}.
    answer   {list}

    train    Which villages are on {n}? | Name the villages of {n}. | What are the villages of {n}?
    train    What villages are there on the island of {n}?
    val      Which villages are on the island of {n}? | Which are the villages of {n}?
    replies  The villages of {n} are {list}.
    answer   {list}

    train    Who lives in {n}? | Which people live in {n}? | Who are the people of {n}?
    train    Do you know who lives in {n}? | Which people live in the village of {n}?
    train    Tell me who lives in the village of {n}.
    val      Who lives in the village of {n}? | Can you tell me who lives in {n}?
    replies  The people of {n} are {list}.
    answer   {list}
""")


class Topic(NamedTuple):
    asked: tuple[str, ...]
    replies: tuple[str, ...]
    answer: str


def _topic(block: Mapping[str, tuple[str, ...]], split: Split, fill: Mapping[str, str]) -> Topic:
    asked, replies = (
        tuple(line.format_map(fill) for line in lines) for lines in (block[split], block["replies"])
    )
    return Topic(asked, replies, block["answer"][0].format_map(fill))


@cache
def wholes(split: Split) -> tuple[Topic, ...]:
    """The topics that name nobody: the isles and the assistant itself."""
    return tuple(_topic(block, split, _FILL) for block in (*ISLES, *ABOUT_ITSELF))


@cache
def parts(split: Split) -> tuple[Topic, ...]:
    """The topics that ask what is somewhere: an island, its villages, their people."""
    where = [(_IN_DIRECTION, island.direction, [island.name]) for island in ISLANDS]
    where += [
        (_ON_ISLAND, island.name, [place.name for place in PLACES if place.island == island.name])
        for island in ISLANDS
    ]
    where += [
        (_IN_VILLAGE, place.name, [person.name for person in PEOPLE if person.home == place.name])
        for place in PLACES
    ]
    return tuple(_topic(block, split, {"n": name, "list": listed(names)}) for block, name, names in where)


@cache
def askings(split: Split) -> tuple[tuple[str, Topic], ...]:
    """Every question of a split with its topic."""
    return tuple((asked, topic) for topic in wholes(split) + parts(split) for asked in topic.asked)


def guides(split: Split, rng: RandomStream) -> Iterator[str]:
    """Documents that tell a stranger of the isles as a whole."""
    kind = "said" if split == "train" else "said_val"
    deck = Deck(tuple(block[kind] for block in ISLES), rng)
    while True:
        told = dict.fromkeys(rng.choice(deck.deal()) for _ in range(4))
        yield " ".join(told).format_map(_FILL)
