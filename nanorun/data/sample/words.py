"""The words that are spelled and counted: the names of the world, and a few hundred common words.

Every name, and every word that answers a question about the world, is spelled in training. Of the other
common words about one in eight is kept for validation. The world's stories seldom use those, so a tokenizer
cuts them into pieces, and the pieces occur in the words that training does spell.
"""

from functools import cache

from nanorun.data.sample.chance import Split, held_out
from nanorun.data.sample.world import world

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
def words(split: Split) -> tuple[str, ...]:
    """The words that this split may spell. `words("train")` and `words("val")` share none."""
    at_home = {word for fact in world().facts for word in fact.answer.split()}
    kept = tuple(word for word in COMMON if word not in at_home and held_out("word", word))
    if split == "val":
        return kept
    return tuple(word for word in COMMON if word not in kept) + tuple(world().entities)


@cache
def countable(split: Split) -> tuple[str, ...]:
    """The words whose letters are counted: common ones only, all in small letters."""
    return tuple(word for word in words(split) if word.islower())
