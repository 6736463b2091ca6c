"""The words that are spelled and counted: the names of the world, and a few hundred common words.

Training spells every one of them, so that validation can ask for each in other words. Which words stand
together in a document is the other difference between the splits, and which letter is counted in which word.
"""

from functools import cache
from string import ascii_lowercase

from nanorun.data.sample.chance import Split, belongs
from nanorun.data.sample.world import world

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


@cache
def words() -> tuple[str, ...]:
    """All the words that are spelled: the common ones and every name."""
    return COMMON + tuple(world().entities)


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
