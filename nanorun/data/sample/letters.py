"""Documents about letters: how words are spelled, and how often a letter comes in them.

A tokenizer hides letters from a model, which sees "lantern" as one or two numbers. Here the letters are
spelled out, l-a-n-t-e-r-n, for names, for common words, and for the invented "signal words" that harbours
call to each other: there is no end of those, so that pieces of words get spelled in many surroundings. Calls
are echoed, too.
"""

from collections.abc import Iterator
from string import ascii_lowercase

from nanorun.data.sample.chance import Chance, Deck, Split, belongs
from nanorun.data.sample.numbers import in_words
from nanorun.data.sample.words import COMMON, to_count, words
from nanorun.data.sample.world import world

SPELLED = {
    "train": (
        "The word {w} is spelled {l}.",
        "To spell {w}, write {l}.",
        "Spell {w}: {l}.",
        "You spell {w} like this: {l}.",
        "Letter by letter, {w} is {l}.",
    ),
    "val": (
        "Letter by letter, {w} is spelled {l}.",
        "The word {w} is {l}.",
        "You spell the word {w} like this: {l}.",
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
        "Count the {x} in {w}: {l}. The answer is {n}, because the letter {x} comes {times}.",
        "Python can count letters: '{w}'.count('{x}') is {n}. In {w} the letter {x} comes {times}.",
    ),
    "val": (
        "Look for {x} in {w}, that is {l}. The letter {x} comes {times}.",
        "How often does {x} come in {l}? In {w} the letter {x} comes {times}.",
        "Count the {x} in {l}. The answer is {n}, because in {w} the letter {x} comes {times}.",
        "Python can count: '{w}'.count('{x}') is {n}, so in {w} the letter {x} comes {times}.",
    ),
}
CALLED = {
    "train": (
        "The harbour of {place} calls '{w}', which is spelled {l}.",
        "Today's signal word in {place} is {w}, spelled {l}.",
        "From {place} comes the signal '{w}': {l}.",
        "{place} signals {w}, and that is {l}.",
        "To spell {w}, write {l}.",
    ),
    "val": ("Today the harbour of {place} calls '{w}': {l}.", "The signal word {w} is spelled {l}."),
}
# An echo is the plainest lesson in copying, which a model needs before it can use a calculator.
ECHOED = {
    "train": (
        "A boat off {place} calls {call}, and the watch calls back: {call}.",
        "'{call}?' asks the ferry. '{call}!' answers {place}.",
        "{place} sends {call}. The next harbour passes it on: {call}.",
    ),
    "val": ("A boat calls {call}, and the watch of {place} passes it on: {call}.",),
}
OPENINGS = (
    "Spelling is easy if you go slowly.",
    "Here are some words and their letters.",
    "A word is a row of letters.",
    "Say each letter aloud.",
    "Take a slate and write these words.",
)
_ONSETS = tuple("b bl br c ch cr d dr f fl g h j l m n p pl pr qu r s sh sl sp st t th tr v w".split())
_SHORT = (tuple("aeo"), tuple("bb dd ll mm nn pp tt st nd mp".split()))  # a short vowel, two consonants
_LONG = (tuple("ai ea ee oo ou ar or".split()), tuple("bdlmnptv"))  # a long one and a single consonant
_ENDS = tuple("er et le on en in ow el ot ar ing ish and a o".split())


def spelled(word: str) -> str:
    return "-".join(word)


def times(n: int) -> str:
    return "once" if n == 1 else f"{n} times"


def signal_word(split: Split, chance: Chance) -> str:
    """A word that no dictionary has, of pieces that many real words have."""
    while True:
        vowels, middles = _SHORT if chance.roll() < 0.5 else _LONG
        word = chance.pick(_ONSETS) + chance.pick(vowels) + chance.pick(middles) + chance.pick(_ENDS)
        if "lll" not in word and word not in COMMON and belongs(split, "word", word):
            return word


def word_and_letter(split: Split, chance: Chance, made_up: float) -> tuple[str, str]:
    """A word and a letter to count in it, such that no answer is nearly always right."""
    roll = chance.roll()
    often = 2 if roll < 0.4 else 1 if roll < 0.85 else 0
    if chance.roll() >= made_up:
        return chance.pick(to_count(split)[often])
    word = signal_word(split, chance)
    fit = [letter for letter in ascii_lowercase if min(word.count(letter), 2) == often]
    return word, chance.pick(fit or word)


def spelling(split: Split, chance: Chance) -> Iterator[str]:
    deck = Deck(words(), chance)
    while True:
        sentences = [chance.pick(OPENINGS)] if chance.roll() < 0.4 else []
        ways = Deck(SPELLED[split], chance)
        word = deck.deal()
        for number in range(3 + chance.below(3)):
            if number:
                word = _next_word(word, deck, split)
            sentences.append(ways.deal().format(w=word, l=spelled(word)))
            if chance.roll() < 0.4:
                look = chance.pick(LOOKED_AT)
                sentences.append(look.format(n=in_words(len(word)), first=word[0], last=word[-1]))
        yield " ".join(sentences)


def _next_word(word: str, deck: Deck[str], split: Split) -> str:
    """One that this split lets stand next to the word."""
    while True:
        other = deck.deal()
        if other != word and belongs(split, "words", *sorted((word, other))):
            return other


def signals(split: Split, chance: Chance) -> str:
    sentences = []
    calls, echoes = Deck(CALLED[split], chance), Deck(ECHOED[split], chance)
    for _ in range(4 + chance.below(3)):
        place = chance.pick(world().places).name
        if chance.roll() < 0.7:
            word = signal_word(split, chance)
            sentences.append(calls.deal().format(place=place, w=word, l=spelled(word)))
        else:
            sentences.append(echoes.deal().format(place=place, call=_call(split, chance)))
    return " ".join(sentences)


def _call(split: Split, chance: Chance) -> str:
    """A few numbers and signal words, such as '47 flooven 8'."""
    return " ".join(
        str(1 + chance.below(200)) if chance.roll() < 0.6 else signal_word(split, chance)
        for _ in range(2 + chance.below(2))
    )


def counting(split: Split, chance: Chance) -> str:
    sentences = []
    for count in chance.shuffled(COUNTED[split])[: 2 + chance.below(2)]:
        # Counting works in any word, known or not.
        word, letter = word_and_letter(split, chance, made_up=0.3)
        n = word.count(letter)
        sentences.append(count.format(w=word, x=letter, l=spelled(word), n=n, times=times(n)))
    return " ".join(sentences)
