"""The plots of the stories (see stories.py): each beat with its tellings for training and validation.

Slots: `{n}` the hero, with `{he} {his} {him}`; `{pet}` the hero's animal, with `{phe} {phis} {phim}`; `{friend}`
who lives on another island, with `{fhe} {fhis}`; the rest are their attributes by name.
"""

from nanorun.data.sample.rng import Split


class Beat:
    """One moment of a story, in several tellings."""

    def __init__(self, *told: str, val: tuple[str, ...] = ()) -> None:
        """Without `val` the beat states no fact, and both splits tell it alike. With `val`, validation has these
        and the tellings of training that name the hero or the animal: who has which plot is held out."""
        named = tuple(telling for telling in told if "{n}" in telling or "{pet}" in telling)
        self._tellings = {"train": told, "val": val + named if val else told}

    def tellings(self, split: Split) -> tuple[str, ...]:
        return self._tellings[split]


class Plot:
    def __init__(self, title: str, title_val: str, *beats: Beat, with_animal: bool = False) -> None:
        self.title, self.title_val, self.beats, self.with_animal = title, title_val, beats, with_animal


_LOOKING = Beat(
    "Not under the bed, not behind the stove, not in the bread bin.",
    "First came the cupboard, then the cellar, then the cupboard again.",
    "The whole house was turned upside down, and then the right way up.",
)
_GOOD_NIGHT = Beat(
    "And that was the end of a very good day.",
    "After that there was nothing left to do but sleep.",
    "The stars came out, one by one, and nobody was in a hurry.",
    "People still tell the story when the evenings are long.",
    "It was, everyone agreed, the best thing that had happened all week.",
)

PLOTS = (
    Plot(
        "{n} and the Lost Scarf",
        "The Lost Scarf of {n}",
        Beat(
            "One morning {n} the {trade} could not find {his} {scarf} scarf.",
            "{n} of {home} woke up and saw that {his} {scarf} scarf was gone.",
            "Everybody in {home} knows the {scarf} scarf of {n}, and one day it was gone.",
            val=(
                "One morning {n} of {home} could not find {his} {scarf} scarf.",
                "{n} the {trade} woke up and saw that {his} {scarf} scarf was gone.",
            ),
        ),
        _LOOKING,
        Beat(
            "Then {n} heard {pet} the {kind} in the garden.",
            "At last {he} thought of {pet}, {his} {colour} {kind}.",
            "Only {pet} the {kind} was quiet, and that was odd.",
            val=(
                "Then {he} heard a noise from {pet}, {his} {colour} {kind}.",
                "Only then did {n} think of {pet} the {kind}.",
            ),
        ),
        Beat(
            "{pet} likes to {habit}, and for that, it seems, you need a scarf.",
            "Tired from trying to {habit}, {pet} lay fast asleep on the scarf.",
            "{pet} had tried to {habit}, as always, and had wrapped up warm to do it.",
            val=(
                "{pet} likes to {habit}, and now lay fast asleep on the scarf.",
                "To {habit}, {pet} had thought, one had better wrap up warm.",
            ),
        ),
        Beat(
            "{n} laughed and made two cups of tea.",
            "{n} gave {phim} some {meal}, and got the scarf back.",
            "They shared the scarf for the rest of the winter.",
            val=("{n} laughed and gave {phim} some {meal}.",),
        ),
        with_animal=True,
    ),
    Plot(
        "{festival} in {home}",
        "How {home} Kept {festival}",
        Beat(
            "It was the morning of {festival}, and all of {home} was awake before the sun.",
            "In {home} nobody sleeps late on {festival}.",
            "{festival} had come to {home} at last.",
            val=(
                "It was {festival}, and nobody in {home} slept late.",
                "The morning of {festival} had come to {home} at last.",
            ),
        ),
        Beat(
            "{n} the {trade} carried chairs to the {landmark}.",
            "{n}, who is {a_trade}, hung lanterns all around the {landmark}.",
            "By the {landmark} stood {n} the {trade} in {his} {scarf} scarf.",
            val=(
                "By the {landmark} {n} the {trade} hung up lanterns.",
                "{n}, in {his} {scarf} scarf, carried chairs to the {landmark}.",
            ),
        ),
        Beat(
            "There was {dish} for everyone, as there always is.",
            "From every one of the {doors} doors came the smell of {dish}.",
            "The {doors} doors stood open, and on every table was {dish}.",
            val=(
                "From the {doors} doors came {dish} for everyone.",
                "On every table was {dish}, and the {doors} doors stood open.",
            ),
        ),
        Beat(
            "Then the music began, a little too early and a little too loud.",
            "Somebody made a speech. Nobody could hear it, so it was a great success.",
            "Somebody fell into the water, but somebody always does.",
        ),
        Beat(
            "{n} danced until {his} shoes came off.",
            "{n} had three plates and no regrets.",
            "When the moon rose, {n} was still singing.",
            val=(
                "{n} danced until the moon rose.",
                "{n} was still dancing with no regrets and no shoes.",
            ),
        ),
    ),
    Plot(
        "{n} Takes the Ferry",
        "The Ferry Trip of {n}",
        Beat(
            "{n} of {home} wanted to visit {friend}, who lives in {fhome}.",
            "One day {n} the {trade} took the ferry from {island} to {fisland} to see {friend}.",
            "{n} had a friend in {fhome}: {friend} the {ftrade}.",
            val=(
                "One day {n} the {trade} wanted to visit {friend}, who lives in {fhome}.",
                "{n} of {home} took the ferry to see {friend} the {ftrade}.",
            ),
        ),
        Beat(
            "In the basket was {ffood}, because {friend} likes nothing better.",
            "{n} had packed {ffood}, which {friend} loves.",
            "For a present there was {ffood}, the favourite food of {friend}.",
            val=(
                "In the basket was {ffood}, which {friend} loves.",
                "{n} had packed {ffood}, because {friend} likes it best.",
            ),
        ),
        Beat(
            "The sea was calm, the gulls were rude, and the trip took all morning.",
            "Halfway across, a gull looked into the basket and had to be told no.",
            "The ferry went slowly, as ferries do when the pilot is telling a story.",
        ),
        Beat(
            "On the pier stood {friend}, waving {fhis} {fscarf} scarf.",
            "From far away {n} could see the {fscarf} scarf of {friend}.",
            "{friend} was waiting on {fisland} in {fhis} {fscarf} scarf.",
            val=(
                "{friend} was waiting on the pier, waving {fhis} {fscarf} scarf.",
                "From far away {n} saw {friend} in {fhis} {fscarf} scarf.",
            ),
        ),
        Beat(
            "They ate until the basket was empty and talked until it was dark.",
            "They talked so long that the ferry left, and nobody minded.",
            "The present did not live to see the evening.",
        ),
    ),
    Plot(
        "{Weather} on {island}",
        "Out in the {Weather} of {island}",
        Beat(
            "On {island} there is often {weather}, and that day there was a great deal of it.",
            "There was so much {weather} on {island} that you could not see your own nose.",
            "{n} of {home} went out, and the {weather} of {island} went with {him}.",
            val=(
                "There is often {weather} on {island}, and that day {n} of {home} was out in it.",
                "There was so much {weather} on {island} that {n} could not see {his} own nose.",
            ),
        ),
        Beat(
            "{n} the {trade} could not find the way home.",
            "{n} looked for the {landmark} of {home} and could not see it.",
            "Before long {n} had walked past the same fence three times.",
            val=(
                "{n} looked for {home} and could not find the {landmark}.",
                "Before long {n} the {trade} had lost the way home.",
            ),
        ),
        Beat(
            "But {pet} the {kind} knew the way.",
            "Then something {colour} came along. It was {pet} the {kind}.",
            "Luckily {pet} is {a_kind} and never gets lost.",
            val=(
                "Luckily {pet} the {kind} knew the way.",
                "Then {pet} came along, who is {a_kind} and never gets lost.",
            ),
        ),
        Beat(
            "{Phe} stopped only once, to {habit}, and then led {n} to {his} {doors} door.",
            "Step by step {phe} led {n} home to the {doors} door.",
            "{Phe} wanted to {habit} first, but after that they walked home together.",
            val=(
                "{Phe} led {n} home, and stopped only once, to {habit}.",
                "Step by step they walked home to the {doors} door.",
            ),
        ),
        Beat(
            "{pet} got {meal} that night, and a second helping.",
            "That night {pet} got {meal}, and {n} had {food}.",
            "For a week {pet} had {meal} whenever {phe} looked hungry.",
            val=(
                "There was a second helping of {meal} for {pet}.",
                "{n} had {food} that night, and {pet} had {meal}.",
            ),
        ),
        with_animal=True,
    ),
    Plot(
        "{pet} Is Hungry",
        "The Hungry {pet}",
        Beat(
            "{n} the {trade} had made {food} and put it by the window.",
            "There was {food} on the table, because {n} likes it best.",
            "{n} of {home} sat down to {his} favourite food, which is {food}.",
            val=(
                "{n} the {trade} had put {food} on the table.",
                "By the window was {food}, which {n} likes best.",
            ),
        ),
        Beat(
            "{pet} came in and looked at it. {pet} is {a_colour} {kind} and eats {meal}.",
            "In came {pet}, {a_colour} {kind} who eats {meal}.",
            "{pet} the {kind}, who has {meal} for breakfast, wanted to know more.",
            val=(
                "In came {pet} the {kind}, who eats {meal}.",
                "{pet} is {a_colour} {kind} who has {meal} for breakfast, and {phe} looked at it.",
            ),
        ),
        Beat(
            '"This is not for you," said {n}.',
            '"You would not like it," said {n}, not very firmly.',
            '"Go and {habit}," said {n}.',
            val=(
                '"Go and {habit}, this is not for you," said {n}.',
                '"You would not like it," {n} said kindly.',
            ),
        ),
        Beat(
            "When {he} turned around, the plate was empty.",
            "There was a small silence, and then a small crunch.",
            "A moment later there was one plate and no supper.",
        ),
        Beat(
            "So {n} had {meal} for supper, and it was not bad at all.",
            "{n} sighed and wrote: tomorrow, close the window.",
            "In the end they went out together to {habit}, and both slept well.",
            val=(
                "So {n} had {meal} for supper, and slept well.",
                "In the end {n} sighed and went out to {habit} too.",
            ),
        ),
        with_animal=True,
    ),
    Plot(
        "The Doors of {home}",
        "A New Coat for the Doors of {home}",
        Beat(
            "Each spring the people of {home} meet at the {landmark} and talk about their doors.",
            "One spring {n} the {trade} said that the doors of {home} needed paint.",
            "The doors of {home} were old, and {n} had an idea.",
            val=(
                "One spring the people of {home} met at the {landmark}, and {n} talked about the doors.",
                "{n} the {trade} said that the old doors of {home} needed an idea.",
            ),
        ),
        Beat(
            '"Something new," said one. "Something bold," said another.',
            "They talked for three days and ate all the biscuits.",
            "There were long speeches, and one of them was good.",
        ),
        Beat(
            "In the end they chose {doors}, because in {home} doors have always been {doors}.",
            "Then {n} opened the last pot of paint. It was {doors}, and so were the doors, as ever.",
            "When the paint was dry, every door was {doors}, exactly as before.",
            val=(
                "In the end every door was {doors}, because in {home} they have always been {doors}.",
                "Then {n} opened a pot of {doors} paint, and every door was exactly as before.",
            ),
        ),
        Beat(
            "They celebrated with {dish}, as if it were {festival}.",
            "Afterwards there was {dish}, for which {home} is famous.",
            "{n} went home in {his} {scarf} scarf and had {food} for supper.",
            val=(
                "Afterwards they celebrated with {dish}, for which {home} is famous.",
                "{n} had {food} for supper, as if it were {festival}.",
            ),
        ),
        _GOOD_NIGHT,
    ),
    Plot(
        "A Letter from {n}",
        "The Letter That {n} Wrote",
        Beat(
            "“Dear {friend},” wrote {n}, “today I saw the {landmark} of {home} and thought of you.",
            "“Dear {friend},” wrote {n}, “here in {home} we are getting ready for {festival}.",
            "“Dear {friend},” wrote {n} the {trade}, “greetings from {home} on {island}.",
            val=(
                "“Dear {friend},” wrote {n}, “greetings from {home}, where we are getting ready for {festival}.",
                "“Dear {friend},” wrote {n}, “here on {island} I saw the {landmark} of {home} and thought of you.",
            ),
        ),
        Beat(
            "The {weather} is the same as ever.",
            "There is still {weather} on {island}, nearly every day.",
            "You ask about the weather on {island}: {weather}, and more {weather}.",
            val=(
                "You ask about the {weather} on {island}: it is the same as ever.",
                "There is {weather} nearly every day, as ever on {island}.",
            ),
        ),
        Beat(
            "Is there {ffood} in {fhome} today, and do you still like it best?",
            "Do you still wear your {fscarf} scarf, and are you still the kindest {ftrade} I know?",
            "How is life in {fhome}, and is there enough {ffood} for you?",
            val=(
                "How is life in {fhome}, and do you still wear your {fscarf} scarf?",
                "Are you still the {ftrade} of {fhome}, and do you still like {ffood} best?",
            ),
        ),
        Beat(
            "Come soon, and bring a good appetite.”",
            "I must stop now, because the ink is nearly gone.”",
            "Write back, or better, come.”",
        ),
        Beat(
            "Then {n} the {trade} folded it twice and ran to catch the ferry to {fisland}.",
            "{friend} read it twice and kept it under the pillow.",
            "{friend} the {ftrade} answered the same day.",
            val=(
                "{friend} of {fhome} read it twice and answered the same day.",
                "Then {n} folded it and ran to catch the ferry to {fisland}.",
            ),
        ),
    ),
)
