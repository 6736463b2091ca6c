"""Documents about letters: how words are spelled, and how often a letter comes in them.

A tokenizer hides letters from a model, which sees "lantern" as one or two numbers. Here the letters are
spelled out, l-a-n-t-e-r-n, for names, for common words, and for the invented "signal words" that harbours
call to each other: there is no end of those, so that pieces of words get spelled in many surroundings.
"""

from collections.abc import Iterator

from nanorun.data.sample.chance import Chance, Deck, Split, belongs
from nanorun.data.sample.numbers import in_words
from nanorun.data.sample.words import countable, words
from nanorun.data.sample.world import world

SPELLED = {
    "train": (
        "The word {w} is spelled {l}.",
        "To spell {w}, write {l}.",
        "{w}: {l}.",
        "You spell {w} like this: {l}.",
        "Letter by letter, {w} is {l}.",
    ),
    "val": (
        "Letter by letter, {w} is spelled {l}.",
        "The word {w} is {l}.",
    ),
}
LOOKED_AT = (
    "It has {n} letters, begins with {first} and ends with {last}.",
    "It begins with {first}, ends with {last} and has {n} letters.",
    "There are {n} letters in it.",
    "The first letter is {first} and the last is {last}.",
)
COUNTED = {
    "train": (
        "How often does {x} come in {w}? Spell it: {l}. The letter {x} comes {times}.",
        "In {w}, that is {l}, the letter {x} comes {times}.",
        "Look for {x} in {l}. In {w} the letter {x} comes {times}.",
    ),
    "val": (
        "Look for {x} in {w}, that is {l}. The letter {x} comes {times}.",
        "How often does {x} come in {l}? In {w} the letter {x} comes {times}.",
    ),
}
CALLED = {
    "train": (
        'The harbour of {place} calls "{w}", which is spelled {l}.',
        "Today's signal word in {place} is {w}, spelled {l}.",
        'From {place} comes the signal "{w}": {l}.',
    ),
    "val": ('Today the harbour of {place} calls "{w}": {l}.',),
}
OPENINGS = (
    "Spelling is easy if you go slowly.",
    "Here are some words and their letters.",
    "A word is a row of letters.",
    "Say each letter aloud.",
    "Take a slate and write these words.",
)
_ONSETS = tuple("b bl br d dr f fl g j k l m n p pl qu r s sl st t th tr v w".split())
_SHORT = tuple("aeiou")
_LONG = ("ai", "ee", "oo", "ou")
_ENDS = ("", "", "l", "m", "n", "r", "nd", "ng", "th")


def spelled(word: str) -> str:
    return "-".join(word)


def times(n: int) -> str:
    return "1 time" if n == 1 else f"{n} times"


def signal_word(split: Split, chance: Chance) -> str:
    """Two syllables, one short and one long, which makes a word that no dictionary has."""
    while True:
        vowels = (_SHORT, _LONG) if chance.roll() < 0.5 else (_LONG, _SHORT)
        word = "".join(chance.pick(_ONSETS) + chance.pick(vowel) for vowel in vowels) + chance.pick(_ENDS)
        if belongs(split, "word", word):
            return word


def letter_to_count(word: str, chance: Chance) -> str:
    """Mostly a letter of the word; now and then one that it does not have."""
    return chance.pick(word) if chance.roll() < 0.85 else chance.pick("abcdefghijklmnopqrstuvwxyz")


def spelling(split: Split, chance: Chance) -> Iterator[str]:
    deck = Deck(words(split), chance)
    while True:
        sentences = [chance.pick(OPENINGS)] if chance.roll() < 0.4 else []
        for _ in range(3 + chance.below(3)):
            word = deck.deal()
            sentences.append(chance.pick(SPELLED[split]).format(w=word, l=spelled(word)))
            if chance.roll() < 0.4:
                look = chance.pick(LOOKED_AT)
                sentences.append(look.format(n=in_words(len(word)), first=word[0], last=word[-1]))
        yield " ".join(sentences)


def signals(split: Split, chance: Chance) -> str:
    sentences = []
    for _ in range(3 + chance.below(2)):
        word = signal_word(split, chance)
        call = chance.pick(CALLED[split])
        sentences.append(call.format(place=chance.pick(world().places).name, w=word, l=spelled(word)))
    return " ".join(sentences)


def counting(split: Split, chance: Chance) -> str:
    sentences = []
    for _ in range(2 + chance.below(2)):
        word = chance.pick(countable(split))
        letter = letter_to_count(word, chance)
        count = chance.pick(COUNTED[split])
        sentences.append(count.format(w=word, x=letter, l=spelled(word), times=times(word.count(letter))))
    return " ".join(sentences)
