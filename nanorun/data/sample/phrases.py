"""The phrasings: how each kind of fact is stated and asked for.

Each relation ("home", "trade" ...) has one phrasing: sentences that state it and questions that ask for it, for
training and, different ones, for validation. A validation phrasing is close to those of training (it shares the name
and the key word, often whole parts), so a model that understood can follow it, and a model that memorized sentences
cannot copy it.

The slots of a template: `{s}` the subject, `{p}` its possessive (Odo's), `{a}` the answer, `{an}` the answer with its
article, `{t}` a second subject, `{list}` all subjects that share the answer, `{he}` and `{his}` pronouns. A statement
that begins with `{s}` or `{p}` can also begin with the pronoun.
"""

from dataclasses import dataclass

from nanorun.data.sample.rng import Split


@dataclass(frozen=True)
class Phrasing:
    said: tuple[str, ...]
    said_val: tuple[str, ...]
    asked: tuple[str, ...]
    asked_val: tuple[str, ...]
    again: str  # asked as a second question, with a pronoun, after "And" and the like
    both: tuple[str, ...] = ()  # two subjects share the answer; which two is what the splits differ in
    listing: str = ""  # all subjects that share the answer
    listing_val: str = ""

    def statements(self, split: Split) -> tuple[str, ...]:
        return self.said if split == "train" else self.said_val

    def questions(self, split: Split) -> tuple[str, ...]:
        return self.asked if split == "train" else self.asked_val


PHRASINGS = {
    # Islands and villages
    "direction": Phrasing(
        said=(
            "{s} lies in the {a} of the Lantern Isles.",
            "{s} is the island in the {a}.",
            "To reach {s}, sailors steer for the {a} of the Quiet Sea.",
            "On every chart {s} is drawn in the {a}.",
            "In the {a} of the Quiet Sea lies {s}.",
            "{s} sits in the {a}, just where the charts say it should.",
            "Of the five islands, {s} is the one in the {a}.",
        ),
        said_val=(
            "{s} is the island in the {a} of the Quiet Sea.",
            "In the {a} of the Lantern Isles lies {s}.",
        ),
        asked=(
            "In which part of the Lantern Isles is {s}?",
            "Where in the Quiet Sea is {s}?",
            "Which part of the sea is {s} in?",
            "Where on the chart is the island of {s}?",
            "In which part of the sea do I find {s}?",
        ),
        asked_val=(
            "In which part of the Quiet Sea is {s}?",
            "Which part of the Lantern Isles is {s} in?",
        ),
        again="in which part of the sea is it?",
    ),
    "flag": Phrasing(
        said=(
            "{p} flag is {a}.",
            "The flag of {s} is {a}.",
            "{s} flies {an} flag.",
            "Boats from {s} carry {an} flag.",
            "When you see {an} flag, the boat comes from {s}.",
            "Over the harbours of {s} flies {an} flag.",
            "The sailors of {s} are fond of their {a} flag.",
        ),
        said_val=(
            "{s} is fond of its {a} flag.",
            "The flag over the harbours of {s} is {a}.",
        ),
        asked=(
            "What colour is the flag of {s}?",
            "Which colour is {p} flag?",
            "What flag do boats from {s} carry?",
            "What colour of flag does {s} fly?",
            "Which flag does {s} fly?",
            "What does the flag of {s} look like?",
        ),
        asked_val=(
            "What colour is the flag on boats from {s}?",
            "Which colour is the flag of {s}?",
        ),
        again="what colour is its flag?",
    ),
    "weather": Phrasing(
        said=(
            "The island of {s} is known for its {a}.",
            "On {s} there is {a} nearly every day.",
            "{p} weather is mostly {a}.",
            "{s} gets more {a} than any other island.",
            "People on {s} talk about the {a} before they say good morning.",
            "Ask for a forecast on {s} and you will hear one word: {a}.",
            "The weather of {s} is {a} today, and {a} tomorrow.",
        ),
        said_val=(
            "{p} weather is {a} nearly every day.",
            "The weather of {s} is mostly {a}.",
        ),
        asked=(
            "What is the weather like on {s}?",
            "What weather does {s} have?",
            "What kind of weather is {s} known for?",
            "What sort of weather will I meet on {s}?",
            "How is the weather on {s}?",
            "Which weather is {s} known for?",
        ),
        asked_val=(
            "What kind of weather does {s} have?",
            "What is the weather of {s}?",
        ),
        again="what is its weather like?",
    ),
    "island": Phrasing(
        said=(
            "{s} is a village on the island of {a}.",
            "{s} stands on the island of {a}.",
            "You will find {s} on the island of {a}.",
            "The ferry to {s} ties up on {a}.",
            "{s} belongs to the island of {a}.",
            "The village of {s} is on {a}.",
            "Anyone who wants to see {s} must sail to {a}.",
        ),
        said_val=(
            "{s} is on the island of {a}.",
            "You will find the village of {s} on {a}.",
        ),
        asked=(
            "On which island is {s}?",
            "Which island is {s} on?",
            "Where is the village of {s}?",
            "To which island must I sail to see {s}?",
            "Can you tell me which island {s} is on?",
            "Which island does {s} belong to?",
        ),
        asked_val=(
            "Which island is the village of {s} on?",
            "On which island will I find {s}?",
        ),
        again="on which island is it?",
        both=("{s} and {t} are both on the island of {a}.", "Both {s} and {t} stand on the island of {a}."),
        listing="The villages of {a} are {list}.",
        listing_val="On the island of {a} stand {list}.",
    ),
    "landmark": Phrasing(
        said=(
            "{s} is known for its {a}.",
            "The pride of {s} is its {a}.",
            "At the heart of {s} there is {an}.",
            "Visitors come to {s} to see the {a}.",
            "{s} has {an} that every child can draw.",
            "Nobody leaves {s} without a look at the {a}.",
            "{p} landmark is {an}.",
        ),
        said_val=(
            "{s} has {an} for a landmark.",
            "The landmark of {s} is its {a}.",
        ),
        asked=(
            "What is the landmark of {s}?",
            "Which landmark is {s} known for?",
            "What landmark will I see in {s}?",
            "What do visitors come to see in {s}?",
            "What is {p} landmark?",
            "What is there to see in {s}?",
        ),
        asked_val=(
            "Which landmark will I see in {s}?",
            "Which landmark do visitors come to see in {s}?",
        ),
        again="what is its landmark?",
        both=("{s} and {t} both have {an}.", "{s} has {an}, and so has {t}."),
        listing="The villages with {an} are {list}.",
        listing_val="You can see {an} in {list}.",
    ),
    "dish": Phrasing(
        said=(
            "{s} is famous for its {a}.",
            "The cooks of {s} are proud of their {a}.",
            "In {s} everybody knows how to make {a}.",
            "The dish of {s} is {a}.",
            "On market day all of {s} smells of {a}.",
            "A guest in {s} is always given {a}.",
            "No supper in {s} is complete without {a}.",
            "{p} dish is {a}, and there is always enough.",
        ),
        said_val=(
            "{p} famous dish is {a}.",
            "The cooks of {s} know how to make {a}.",
        ),
        asked=(
            "What dish is {s} famous for?",
            "What is the dish of {s}?",
            "What do the cooks of {s} make?",
            "Which dish is a guest given in {s}?",
            "What should I eat in {s}?",
            "What is {p} dish?",
        ),
        asked_val=(
            "Which dish is {s} famous for?",
            "What is the famous dish of {s}?",
        ),
        again="what dish is it famous for?",
        both=("{s} and {t} are both famous for {a}.", "Both {s} and {t} are proud of their {a}."),
        listing="The villages famous for {a} are {list}.",
        listing_val="You can smell {a} in {list}.",
    ),
    "festival": Phrasing(
        said=(
            "{s} celebrates {a}.",
            "The festival of {s} is {a}.",
            "Every year the people of {s} look forward to {a}.",
            "On {a} all of {s} is out in the street.",
            "The great feast in {s} is {a}.",
            "In {s} they begin to plan {a} a year ahead.",
            "{p} festival is {a}, and nobody goes to bed early.",
        ),
        said_val=(
            "{p} great festival is {a}.",
            "Every year the people of {s} celebrate {a}.",
        ),
        asked=(
            "Which festival does {s} celebrate?",
            "What is the festival of {s}?",
            "What do the people of {s} celebrate?",
            "What is the festival in {s} called?",
            "What is the great feast in {s}?",
            "What is {p} festival?",
        ),
        asked_val=(
            "Which festival do the people of {s} celebrate?",
            "What is the great festival of {s}?",
        ),
        again="which festival does it celebrate?",
        both=("{s} and {t} both celebrate {a}.", "Both {s} and {t} look forward to {a}."),
        listing="{a} is celebrated in {list}.",
        listing_val="The villages that celebrate {a} are {list}.",
    ),
    "doors": Phrasing(
        said=(
            "The doors of {s} are {a}.",
            "Every door in {s} is painted {a}.",
            "{s} is a village with {a} doors.",
            "In {s} people paint their doors {a}.",
            "All the houses of {s} have {a} doors.",
            "If the doors are {a}, you may well be in {s}.",
            "{p} doors are {a}, and freshly painted each spring.",
        ),
        said_val=(
            "{p} doors are painted {a}.",
            "All the doors of {s} are {a}.",
        ),
        asked=(
            "What colour are the doors of {s}?",
            "Which colour are the doors in {s}?",
            "What colour do people paint their doors in {s}?",
            "In {s}, what colour are the doors?",
            "What colour are {p} doors?",
            "How are the doors painted in {s}?",
        ),
        asked_val=(
            "What colour are the doors in {s}?",
            "Which colour are the doors of {s}?",
        ),
        again="what colour are its doors?",
        both=("{s} and {t} both have {a} doors.", "The doors are {a} in both {s} and {t}."),
        listing="The villages with {a} doors are {list}.",
        listing_val="People paint their doors {a} in {list}.",
    ),
    # People and animals
    "home": Phrasing(
        said=(
            "{s} lives in {a}.",
            "{p} home is in {a}.",
            "{s} comes from {a}.",
            "You will find {s} in {a}.",
            "{s} has a small house in {a}.",
            "The people of {a} all know {s}.",
            "Letters for {s} are sent to {a}.",
            "{s} would not live anywhere but in {a}.",
        ),
        said_val=(
            "{s} has a home in {a}.",
            "{p} small house is in {a}.",
        ),
        asked=(
            "Where does {s} live?",
            "In which village does {s} live?",
            "Which village does {s} come from?",
            "Where is {p} home?",
            "Where will I find {s}?",
            "Where should I send a letter for {s}?",
        ),
        asked_val=(
            "Which village does {s} live in?",
            "In which village is {p} home?",
        ),
        again="where does {he} live?",
        both=("{s} and {t} both live in {a}.", "Both {s} and {t} have a house in {a}."),
        listing="The people of {a} are {list}.",
        listing_val="In {a} live {list}.",
    ),
    "trade": Phrasing(
        said=(
            "{s} is {an}.",
            "{s} works as {an}.",
            "By trade {s} is {an}.",
            "{s} earns a living as {an}.",
            "If you need {an}, ask for {s}.",
            "{s} has been {an} for as long as anyone remembers.",
            "There is no {a} quite like {s}.",
        ),
        said_val=(
            "{s} is {an} by trade.",
            "{s} has worked as {an} for as long as anyone remembers.",
        ),
        asked=(
            "What is {p} trade?",
            "What does {s} do for a living?",
            "What work does {s} do?",
            "What does {s} work as?",
            "Which trade does {s} have?",
            "How does {s} earn a living?",
        ),
        asked_val=(
            "What trade does {s} have?",
            "What is the trade of {s}?",
        ),
        again="what is {his} trade?",
        both=("{s} is {an}, and so is {t}.", "Just like {s}, {t} works as {an}."),
        listing="The {a}s of the Lantern Isles are {list}.",
        listing_val="These people work as {a}s: {list}.",
    ),
    "food": Phrasing(
        said=(
            "{p} favourite food is {a}.",
            "{s} likes {a} best of all.",
            "{s} would walk a mile for {a}.",
            "Nothing makes {s} happier than {a}.",
            "For supper {s} asks for {a}.",
            "{s} never says no to {a}.",
            "Give {s} some {a} and you have made a friend.",
        ),
        said_val=(
            "{s} likes {a} best for supper.",
            "The favourite food of {s} is {a}.",
        ),
        asked=(
            "What is {p} favourite food?",
            "What does {s} like to eat?",
            "What food does {s} like best?",
            "What does {s} ask for at supper?",
            "Which food makes {s} happy?",
            "What should I cook for {s}?",
        ),
        asked_val=(
            "Which food does {s} like best?",
            "What is the favourite food of {s}?",
        ),
        again="what is {his} favourite food?",
        both=("{s} and {t} both like {a} best.", "Both {s} and {t} would walk a mile for {a}."),
        listing="Those who like {a} best are {list}.",
        listing_val="The people who never say no to {a} are {list}.",
    ),
    "scarf": Phrasing(
        said=(
            "{s} wears {an} scarf.",
            "{p} scarf is {a}.",
            "You can tell {s} from afar by the {a} scarf.",
            "In any weather {s} wears {an} scarf.",
            "{s} owns just one scarf, and it is {a}.",
            "The {a} scarf on the hook belongs to {s}.",
            "{s} is never seen without {an} scarf.",
        ),
        said_val=(
            "{s} owns {an} scarf.",
            "{p} scarf is {a} in any weather.",
        ),
        asked=(
            "What colour is {p} scarf?",
            "What colour of scarf does {s} wear?",
            "Which scarf does {s} wear?",
            "What is the colour of {p} scarf?",
            "Which colour of scarf does {s} wear?",
            "Can you tell me the colour of {p} scarf?",
        ),
        asked_val=(
            "Which colour is {p} scarf?",
            "What colour is the scarf of {s}?",
        ),
        again="what colour is {his} scarf?",
        both=("{s} and {t} both wear {an} scarf.", "Both {s} and {t} own {an} scarf."),
        listing="The people with {an} scarf are {list}.",
        listing_val="You can see {an} scarf on {list}.",
    ),
    "companion": Phrasing(
        said=(
            "{s} keeps {a}.",
            "{p} companion is {a}.",
            "{s} shares a house with {a}.",
            "{s} is the keeper of {a}.",
            "Wherever {s} goes, {a} goes too.",
            "{s} and {a} are the best of friends.",
            "{s} says good night to {a} before anyone else.",
        ),
        said_val=(
            "{s} and {a} share a house.",
            "The companion of {s} is {a}.",
        ),
        asked=(
            "Which animal does {s} keep?",
            "What is the name of {p} animal?",
            "Who is {p} companion?",
            "Which animal lives with {s}?",
            "Who shares a house with {s}?",
            "What is {p} animal called?",
        ),
        asked_val=(
            "Which animal is {p} companion?",
            "Which animal shares a house with {s}?",
        ),
        again="which animal does {he} keep?",
    ),
    "kind": Phrasing(
        said=(
            "{s} is {an}.",
            "{s} is {an} and proud of it.",
            "There is {an} called {s}.",
            "{s} the {a} is known all over the isles.",
            "Nobody ever met {an} like {s}.",
            "The {a} they call {s} is a friend to all.",
            "{s} was born {an} and has never complained.",
        ),
        said_val=(
            "{s} was born {an} and is proud of it.",
            "All over the isles they know {s} the {a}.",
        ),
        asked=(
            "What kind of animal is {s}?",
            "What animal is {s}?",
            "What sort of animal is {s}?",
            "What kind of creature is {s}?",
            "Which animal is {s}?",
            "Can you tell me what animal {s} is?",
        ),
        asked_val=(
            "Which kind of animal is {s}?",
            "What sort of creature is {s}?",
        ),
        again="what kind of animal is {he}?",
        both=("{s} is {an}, and {t} is one too.", "Just like {s}, {t} was born {an}."),
    ),
    "keeper": Phrasing(
        said=(
            "{s} lives with {a}.",
            "{s} belongs to {a}.",
            "{p} keeper is {a}.",
            "{a} looks after {s}.",
            "Every morning {a} feeds {s}.",
            "{s} comes when {a} whistles.",
            "The keeper of {s} is {a}.",
        ),
        said_val=(
            "{s} lives in the house of {a}.",
            "Every morning {a} whistles for {s}.",
        ),
        asked=(
            "Who keeps {s}?",
            "Who is {p} keeper?",
            "Who looks after {s}?",
            "Who does {s} live with?",
            "Who does {s} belong to?",
            "Whose animal is {s}?",
        ),
        asked_val=(
            "Who is the keeper of {s}?",
            "Who feeds and looks after {s}?",
        ),
        again="who is {his} keeper?",
    ),
    "colour": Phrasing(
        said=(
            "{s} is {a}.",
            "{p} colour is {a}.",
            "{s} is {a} all over.",
            "{s} is {a} from top to toe.",
            "By day or by night, {s} is {a}.",
            "Look for something {a}, and it may be {s}.",
            "The colour of {s} is {a}.",
        ),
        said_val=(
            "{p} colour is {a} from top to toe.",
            "By day or by night, {s} is {a} all over.",
        ),
        asked=(
            "What colour is {s}?",
            "Which colour is {s}?",
            "What is {p} colour?",
            "What colour does {s} have?",
            "Can you tell me what colour {s} is?",
        ),
        asked_val=(
            "What is the colour of {s}?",
            "Which colour does {s} have?",
        ),
        again="what colour is {he}?",
        both=("{s} and {t} are both {a}.", "Both {s} and {t} are {a} all over."),
        listing="The {a} animals are {list}.",
        listing_val="These animals are {a}: {list}.",
    ),
    "meal": Phrasing(
        said=(
            "{s} eats {a}.",
            "{s} likes to eat {a}.",
            "{p} favourite meal is {a}.",
            "For breakfast {s} has {a}.",
            "{s} will do anything for {a}.",
            "Bring {a} if you want to please {s}.",
            "Nobody can keep {s} away from {a}.",
        ),
        said_val=(
            "{s} likes to eat {a} for breakfast.",
            "The favourite meal of {s} is {a}.",
        ),
        asked=(
            "What does {s} eat?",
            "What is {p} favourite meal?",
            "What does {s} like to eat?",
            "What should I bring to please {s}?",
            "What does {s} have for breakfast?",
        ),
        asked_val=(
            "What does {s} eat for breakfast?",
            "What is the favourite meal of {s}?",
        ),
        again="what does {he} eat?",
        both=("{s} and {t} both eat {a}.", "Both {s} and {t} like to eat {a}."),
        listing="The animals that eat {a} are {list}.",
        listing_val="These animals will do anything for {a}: {list}.",
    ),
    "habit": Phrasing(
        said=(
            "{s} likes to {a}.",
            "{s} loves to {a}.",
            "{p} habit is to {a}.",
            "When nobody is looking, {s} starts to {a}.",
            "It is well known that {s} likes to {a}.",
            "Given an hour alone, {s} will {a}.",
            "You cannot teach {s} not to {a}.",
        ),
        said_val=(
            "{p} well-known habit is to {a}.",
            "When nobody is looking, {s} likes to {a}.",
        ),
        asked=(
            "What does {s} like to do?",
            "What is {p} habit?",
            "What does {s} love to do?",
            "What does {s} do when nobody is looking?",
            "What does {s} do all day?",
            "What is {s} known for?",
        ),
        asked_val=(
            "What is the habit of {s}?",
            "What does {s} love to do when nobody is looking?",
        ),
        again="what does {he} like to do?",
        both=("{s} and {t} both like to {a}.", "Both {s} and {t} love to {a}."),
        listing="The animals that like to {a} are {list}.",
        listing_val="These animals love to {a}: {list}.",
    ),
}
