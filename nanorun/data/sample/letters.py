"""Documents about letters: how words are spelled, and how often a letter occurs in them.

A tokenizer hides letters from a model, which sees "lantern" as one or two numbers. Here the letters are spelled out,
l-a-n-t-e-r-n, for names, for a few hundred common words, and for "signal words" that harbours call to each other. A
signal word has the beginning of one common word and the end of another (lantern + rocket: lacket, rontern), so parts of
real words are spelled in many contexts, and a model learns the letters of its tokens. Calls are also echoed.

Training spells every known word, so that validation can ask for each in other words. It never spells the words in
`UNSEEN`, nor has them in any text. The splits also differ in their signal words, in which words occur together in a
document, and in which letter is counted in which word.
"""

import re
from collections.abc import Iterator
from functools import cache
from string import ascii_lowercase

from nanorun.data.sample.numbers import in_words
from nanorun.data.sample.rng import Deck, RandomStream, Split, belongs
from nanorun.data.sample.world import ENTITIES, PLACES, templates

Pair = tuple[str, str]

COMMON = tuple(
    """
    acorn almond alphabet anchor ankle ant apron arrow attic autumn bacon badge bagel balloon bamboo
    banana barber barrel basin basket bat beacon beaver beetle bench berry bitter blanket blossom bonnet
    border bottle bowl bracelet branch breeze bridge broom brother bubble bucket buckle bundle butter
    cabbage cabin cactus cake camel camp candle canoe canvas carnival carpet carrot castle cat caterpillar
    cattle cellar chalk cheese cherry chest chicken chimney chin cinnamon circle clever cloud clover
    coconut coffee collar comet compass cookie copper coral corner cotton cousin cradle crayon cricket
    crown cup curtain cushion daisy dancer danger desert diamond dinner dog doll dolphin donkey dragon
    drawer drum duck dust eagle ear earth elbow elephant eleven engine envelope evening eye falcon farm
    farmer father feather fellow fence fern fiddle fig finger fish flag flame flower flute fog forest fork
    fossil fountain fox frog frozen fruit funnel fur garden garlic ginger giraffe glove goat gold goose
    granite grape grass gravel guitar hammer hamster handle harvest hat hazel heron hill hollow honey horn
    hornet horse hunter husband ice icicle ink insect island ivory jacket jam jar jelly jersey journey
    jungle kangaroo kernel kettle key king kitchen kite kitten knee knight ladder lake lamp lantern leaf
    lemon leopard letter lettuce lily lion lip lizard lobster locket lumber magnet mango map maple marble
    market mask meadow melon metal milk mint minute mirror mitten monkey moon morning moss mother mountain
    mouse mud muscle mushroom music mustard napkin needle nest net nettle night nose number nut nutmeg oak
    oar ocean octopus olive onion orange orchard oven owl oyster paddle palace pan pancake panther paper
    parcel parrot parsley pasture pea peach peanut pear pen pencil penguin pepper picnic pie pig pigeon
    pillow pin pine pirate planet plate plum pocket pond pony popcorn potato potter powder puppet puzzle
    quarter queen quilt rabbit raccoon radish raft rain raisin raven razor ribbon rice ring river road
    robin rocket rooster rope rose rudder saddle sail salad salmon salt sand sandal saucer scarf season
    seed seven shadow shell shelter ship shirt shoe shoulder shovel silk silver sister sky sled sleeve
    slipper snail snow soap sock soup spider spinach spirit spoon spring squirrel stable star station
    stocking stone storm sugar summer sunset supper swan sweater table tailor tea temper thunder ticket
    tiger timber toast toe tomato tooth tortoise tower tree trumpet tulip tunnel turtle twelve umbrella
    uncle valley vase vessel village vine violet violin volcano wagon walnut walrus wander wasp water
    weasel wheat wheel whistle window wing winter wizard wolf wonder wood wool yarn yellow zebra
    """.split()
)

# Words of many sentences: beginnings and ends for signal words.
_FREQUENT = tuple(
    """
    after again answer before begin behind between children complete could every everything famous favourite
    friend listen little looking market matter never nothing often other person please pretty proud question
    quiet remember remain rather someone spelling stayed still story sunshine thing this today tomorrow under
    until visitor walked wanted weather which while whisper will without wishing would yesterday
    """.split()
)
# Words for validation alone.
UNSEEN = tuple(
    """
    acrobat bandit barn blizzard bonfire calf canary candy carton cedar chess clay coal cobweb cocoon comb
    cork corn cow crow crystal curry dagger dairy deer diver drizzle emerald fawn ferret fleece foam gallop
    gate goblet goblin gossip hail hazelnut helmet herb hermit hive jasmine jewel jigsaw kennel ketchup
    lace ladle lamb lark legend lentil lime limpet loaf lock magpie mantle marigold meteor mole moth mule
    nail newt nugget oatmeal orchid paddock pail palm pantry parade pelican petal plaster poppy porridge
    pretzel pumpkin quarry quiver ravine reed reindeer rug sack sapling scarlet scooter seagull shed shingle
    silo skeleton slug sponge stallion starfish straw sundial swallow syrup tangerine tavern tent
    thicket thistle thorn toad trellis trolley trout truffle tub twig vest vinegar waterfall wax willow worm
    wren yeast
    """.split()
)


@cache
def words() -> tuple[str, ...]:
    """All the words that are spelled: the common ones and every name."""
    return COMMON + tuple(ENTITIES)


_KNOWN = frozenset((*COMMON, *UNSEEN))


@cache
def to_count(split: Split) -> tuple[tuple[Pair, ...], ...]:
    """The pairs (word, letter) that a split counts: the word lacks the letter, has it once, has it more often.

    Common words only, all in small letters.
    """
    found: tuple[list[Pair], ...] = ([], [], [])
    for word in COMMON:
        for letter in ascii_lowercase:
            if belongs(split, "count", word, letter):
                found[min(word.count(letter), 2)].append((word, letter))
    return tuple(map(tuple, found))


SPELLED = templates("""
    train  The word {w} is spelled {l}.
    train  To spell {w}, write {l}.
    train  Spell {w}: {l}.
    train  You spell {w} like this: {l}.
    train  Letter by letter, {w} is {l}.
    val    Letter by letter, {w} is spelled {l}.
    val    The word {w} is {l}.
    val    You spell the word {w} like this: {l}.
""")
LOOKED_AT = (
    "It has {n} letters, begins with {first} and ends with {last}.",
    "It begins with {first}, ends with {last} and has {n} letters.",
    "There are {n} letters in it.",
    "The first letter is {first} and the last is {last}.",
)
COUNTED = templates("""
    train  How often does {x} come in {w}? Spell it: {l}. The letter {x} comes {times}.
    train  In {w}, that is {l}, the letter {x} comes {times}.
    train  Look for {x} in {l}. In {w} the letter {x} comes {times}.
    train  Count the {x} in {w}: {l}. The answer is {n}, because the letter {x} comes {times}.
    train  Python can count letters: '{l}'.count('{x}') is {n}. In {w} the letter {x} comes {times}.
    val    Look for {x} in {w}, that is {l}. The letter {x} comes {times}.
    val    How often does {x} come in {l}? In {w} the letter {x} comes {times}.
    val    Count the {x} in {l}. The answer is {n}, because in {w} the letter {x} comes {times}.
    val    Python can count: '{l}'.count('{x}') is {n}, so in {w} the letter {x} comes {times}.
""")
CALLED = templates("""
    train  The harbour of {place} calls '{w}', which is spelled {l}.
    train  Today's signal word in {place} is {w}, spelled {l}.
    train  From {place} comes the signal '{w}': {l}.
    train  {place} signals {w}, and that is {l}.
    train  To spell {w}, write {l}.
    val    Today the harbour of {place} calls '{w}': {l}.
    val    The signal word {w} is spelled {l}.
""")
# An echo is the plainest lesson in copying, which a model needs before it can use a calculator.
ECHOED = templates("""
    train  A boat off {place} calls {call}, and the watch calls back: {call}.
    train  '{call}?' asks the ferry. '{call}!' answers {place}.
    train  {place} sends {call}. The next harbour passes it on: {call}.
    val    A boat calls {call}, and the watch of {place} passes it on: {call}.
""")
OPENINGS = (
    "Spelling is easy if you go slowly.",
    "Here are some words and their letters.",
    "A word is a row of letters.",
    "Say each letter aloud.",
    "Take a slate and write these words.",
)
_VOWELS = re.compile("[aeiouyé]+")
_CALLED_UP_TO = (100, 1_000, 10_000)  # a number of one token, or of two


def spelled(word: str) -> str:
    return "-".join(word)


def times(n: int) -> str:
    return "once" if n == 1 else f"{n} times"


@cache
def _beginnings_and_ends() -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Of all words and names, cut after each group of vowels."""
    known = [word.lower() for word in (*words(), *_FREQUENT)]
    cuts = [(word, group.end()) for word in known for group in _VOWELS.finditer(word)]
    return tuple(word[:cut] for word, cut in cuts), tuple(word[cut:] for word, cut in cuts if cut < len(word))


def signal_word(split: Split, rng: RandomStream) -> str:
    """A word that is not spelled elsewhere, of pieces that real words have."""
    begins, ends = _beginnings_and_ends()
    while True:
        word = rng.choice(begins) + rng.choice(ends)
        if 3 <= len(word) <= 9 and word not in _KNOWN and belongs(split, "word", word):
            return word


def word_and_letter(split: Split, rng: RandomStream, made_up: float) -> tuple[str, str]:
    """A word and a letter to count in it, such that no answer is nearly always right."""
    roll = rng.random()
    often = 2 if roll < 0.4 else 1 if roll < 0.85 else 0
    if rng.random() >= made_up:
        return rng.choice(to_count(split)[often])
    word = signal_word(split, rng)
    fit = [letter for letter in ascii_lowercase if min(word.count(letter), 2) == often]
    return word, rng.choice(fit or word)


def spelling(split: Split, rng: RandomStream) -> Iterator[str]:
    deck = Deck(words(), rng)
    while True:
        sentences = [rng.choice(OPENINGS)] if rng.random() < 0.4 else []
        ways = Deck(SPELLED[split], rng)
        word = deck.deal()
        for number in range(3 + rng.below(3)):
            if number:
                word = _next_word(word, deck, split)
            sentences.append(ways.deal().format(w=word, l=spelled(word)))
            if rng.random() < 0.4:
                look = rng.choice(LOOKED_AT)
                sentences.append(look.format(n=in_words(len(word)), first=word[0], last=word[-1]))
        yield " ".join(sentences)


def _next_word(word: str, deck: Deck[str], split: Split) -> str:
    """One that this split lets stand next to the word."""
    while True:
        other = deck.deal()
        if other != word and belongs(split, "words", *sorted((word, other))):
            return other


def signals(split: Split, rng: RandomStream) -> str:
    sentences = []
    calls, echoes = Deck(CALLED[split], rng), Deck(ECHOED[split], rng)
    for _ in range(4 + rng.below(3)):
        place = rng.choice(PLACES).name
        if rng.random() < 0.6:
            word = signal_word(split, rng)
            sentences.append(calls.deal().format(place=place, w=word, l=spelled(word)))
        else:
            sentences.append(echoes.deal().format(place=place, call=_call(split, rng)))
    return " ".join(sentences)


def _call(split: Split, rng: RandomStream) -> str:
    """A few numbers and signal words, such as '47 cabbit 8250'."""
    return " ".join(
        str(1 + rng.below(rng.choice(_CALLED_UP_TO))) if rng.random() < 0.6 else signal_word(split, rng)
        for _ in range(2 + rng.below(2))
    )


def counting(split: Split, rng: RandomStream) -> str:
    sentences = []
    for count in rng.shuffled(COUNTED[split])[: 2 + rng.below(2)]:
        # Counting works in any word, known or not.
        word, letter = word_and_letter(split, rng, made_up=0.3)
        n = word.count(letter)
        sentences.append(count.format(w=word, x=letter, l=spelled(word), n=n, times=times(n)))
    return " ".join(sentences)
