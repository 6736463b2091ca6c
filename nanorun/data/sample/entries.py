"""The almanac: entries about one subject, comparisons of two, and lists of all that share something.

An entry often continues with a neighbour: from a keeper to the animal, from a village to an inhabitant. Which facts
occur together in an entry, which two subjects are compared and which lists follow each other is a combination; a
share of the combinations is held out for validation. Subjects are dealt from a shuffled deck, so every fact is told
about equally often.
"""

from collections.abc import Iterator, Sequence
from functools import cache
from itertools import combinations

from nanorun.data.sample.phrases import PHRASINGS
from nanorun.data.sample.rng import Deck, RandomStream, Split, belongs
from nanorun.data.sample.sentences import FactSentences, both, fact_sentences, sharing
from nanorun.data.sample.world import ANIMALS, ENTITIES, FACTS, FACTS_ABOUT, PEOPLE, PLACES, Entity

_LINKS = (", while ", ", and ", "; ")


@cache
def _entries(split: Split) -> tuple[tuple[tuple[FactSentences, ...], ...], ...]:
    """For each subject every choice of three or more of its facts that belongs to the split.

    An island has three facts and so one choice, which both splits tell in their own words.
    """
    sayings = fact_sentences(split)
    found = []
    for name in ENTITIES:
        facts = FACTS_ABOUT[name]
        choices = tuple(
            tuple(sayings[fact] for fact in chosen)
            for size in range(3, len(facts) + 1)
            for chosen in combinations(facts, size)
            if len(facts) == 3 or belongs(split, "entry", name, *(fact.relation for fact in chosen))
        )
        if choices:
            found.append(choices)
    return tuple(found)


@cache
def _pairs(split: Split) -> tuple[tuple[str, str], ...]:
    """Pairs of people, of villages and of animals."""
    groups: tuple[tuple[Entity, ...], ...] = (PEOPLE, PLACES, ANIMALS)
    return tuple(
        (one.name, other.name)
        for group in groups
        for one, other in combinations(group, 2)
        if belongs(split, "pair", one.name, other.name)
    )


@cache
def _lists(split: Split) -> tuple[tuple[str, str], ...]:
    every = [sentence for relation in PHRASINGS for sentence in sharing(split, relation)]
    names = [sentence for relation in PHRASINGS for sentence in sharing("train", relation)]
    return tuple(
        (every[i], every[j])
        for i, j in combinations(range(len(every)), 2)
        if belongs(split, "lists", names[i], names[j])
    )


@cache
def _neighbours(split: Split) -> dict[str, tuple[tuple[FactSentences, ...], ...]]:
    """For each subject those it is close to: a keeper's animal, a villager's village, and the other way."""
    sayings = fact_sentences(split)
    close: dict[str, list[str]] = {name: [] for name in ENTITIES}
    for fact in FACTS:
        if fact.relation in ("home", "island", "keeper"):
            close[fact.subject].append(fact.answer)
            close[fact.answer].append(fact.subject)
    return {
        name: tuple(
            tuple(sayings[fact] for fact in FACTS_ABOUT[other])
            for other in others
            if belongs(split, "neighbours", name, other)
        )
        for name, others in close.items()
    }


def tell(
    sayings: Sequence[FactSentences], split: Split, rng: RandomStream, used: set[str] | None = None
) -> list[str]:
    """The facts of one subject as sentences: the first one names it, later ones may say he, she or it.

    A pronoun stands only where the sentence before leaves no doubt whom it means, and no opener twice: `used`
    has those that the document had before.
    """
    sentences: list[str] = []
    used = set() if used is None else used
    openers = 0.15 if split == "train" else 0.7
    short = noun = False
    for saying in sayings:
        ways: Sequence[str] = saying.short if short else saying.named
        if sentences and not short and not noun and saying.by_noun and rng.random() < 0.5:
            ways = saying.by_noun
        elif rng.random() < openers:
            fresh = [
                way for way in (saying.opened_short if short else saying.opened) if way.opener not in used
            ]
            if fresh:
                opener, sentence = rng.choice(fresh)
                used.add(opener)
                ways = (sentence,)
        noun = ways is saying.by_noun
        sentences.append(rng.choice(ways))
        # "The village has a tower. It is a village with ..." would stumble.
        short = not noun and sentences[-1] in saying.clear and rng.random() < 0.6
    return sentences


def entries(split: Split, rng: RandomStream) -> Iterator[str]:
    deck = Deck(_entries(split), rng)
    neighbours = _neighbours(split)
    while True:
        sayings = rng.shuffled(rng.choice(deck.deal()))
        subject = sayings[0].fact.subject
        used: set[str] = set()
        sentences = tell(sayings, split, rng, used)
        near = neighbours[subject]
        if near and rng.random() < 0.7:
            told = rng.shuffled(rng.choice(near))[: 2 + rng.below(2)]
            sentences += tell(told, split, rng, used)
        heading = f"{subject}\n" if rng.random() < 0.25 else ""
        yield heading + " ".join(sentences)


def comparisons(split: Split, rng: RandomStream) -> Iterator[str]:
    """Each sentence is about two subjects, and which two go together is the difference between the splits."""
    deck = Deck(_pairs(split), rng)
    sayings = fact_sentences("train")
    about = {name: {fact.relation: fact for fact in FACTS_ABOUT[name]} for name in ENTITIES}
    while True:
        one, other = deck.deal()
        if rng.random() < 0.5:
            one, other = other, one
        shared = [relation for relation in about[one] if relation in about[other]]
        sentences = []
        for relation in rng.shuffled(shared)[:3]:
            first, second = about[one][relation], about[other][relation]
            together = both(first, second) if first.answer == second.answer else ()
            if together:
                sentences.append(rng.choice(together))
            else:
                start = rng.choice(sayings[first].named)[:-1]
                sentences.append(f"{start}{rng.choice(_LINKS)}{rng.choice(sayings[second].openings)}")
        yield " ".join(sentences)


def lists(split: Split, rng: RandomStream) -> Iterator[str]:
    deck = Deck(_lists(split), rng)
    while True:
        # Two pairs may share a list; said once is enough.
        yield " ".join(dict.fromkeys((*deck.deal(), *deck.deal())))
