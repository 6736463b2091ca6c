"""The plots of the stories (see stories.py): a title and numbered beats, each with a few tellings.

The tellings `N_val` are for validation, which also has those of training that name the hero or the animal: who has
which plot is held out. A beat without `N_val` states no fact, and both splits tell it alike.

Slots: `{n}` the hero, with `{he} {his} {him}`; `{pet}` the hero's animal, with `{phe} {phis} {phim}`; `{friend}`
who lives on another island, with `{fhe} {fhis}`; the rest are their attributes by name.
"""

from nanorun.data.sample.world import templates

Tellings = tuple[str, ...]


class Plot:
    def __init__(self, text: str) -> None:
        table = templates(text)
        beats = [key for key in table if key.isdigit()]
        self.titles = {"train": table["title"][0], "val": table["title_val"][0]}
        self.beats = {
            "train": [table[beat] for beat in beats],
            "val": [_validation(table[beat], table.get(f"{beat}_val", ())) for beat in beats],
        }
        self.with_animal = "{pet}" in text


def _validation(told: Tellings, val: Tellings) -> Tellings:
    named = tuple(telling for telling in told if "{n}" in telling or "{pet}" in telling)
    return val + named if val else told


PLOTS = tuple(
    Plot(text)
    for text in """
        title      {n} and the Lost Scarf
        title_val  The Lost Scarf of {n}
        1          One morning {n} the {trade} could not find {his} {scarf} scarf.
        1          {n} of {home} woke up and saw that {his} {scarf} scarf was gone.
        1          Everybody in {home} knows the {scarf} scarf of {n}, and one day it was gone.
        1_val      One morning {n} of {home} could not find {his} {scarf} scarf.
        1_val      {n} the {trade} woke up and saw that {his} {scarf} scarf was gone.
        2          Not under the bed, not behind the stove, not in the bread bin.
        2          First came the cupboard, then the cellar, then the cupboard again.
        2          The whole house was turned upside down, and then the right way up.
        3          Then {n} heard {pet} the {kind} in the garden.
        3          At last {he} thought of {pet}, {his} {colour} {kind}.
        3          Only {pet} the {kind} was quiet, and that was odd.
        3_val      Then {he} heard a noise from {pet}, {his} {colour} {kind}.
        3_val      Only then did {n} think of {pet} the {kind}.
        4          {pet} likes to {habit}, and for that, it seems, you need a scarf.
        4          Tired from trying to {habit}, {pet} lay fast asleep on the scarf.
        4          {pet} had tried to {habit}, as always, and had wrapped up warm to do it.
        4_val      {pet} likes to {habit}, and now lay fast asleep on the scarf.
        4_val      To {habit}, {pet} had thought, one had better wrap up warm.
        5          {n} laughed and made two cups of tea.
        5          {n} gave {phim} some {meal}, and got the scarf back.
        5          They shared the scarf for the rest of the winter.
        5_val      {n} laughed and gave {phim} some {meal}.

        title      {festival} in {home}
        title_val  How {home} Kept {festival}
        1          It was the morning of {festival}, and all of {home} was awake before the sun.
        1          In {home} nobody sleeps late on {festival}.
        1          {festival} had come to {home} at last.
        1_val      It was {festival}, and nobody in {home} slept late.
        1_val      The morning of {festival} had come to {home} at last.
        2          {n} the {trade} carried chairs to the {landmark}.
        2          {n}, who is {a_trade}, hung lanterns all around the {landmark}.
        2          By the {landmark} stood {n} the {trade} in {his} {scarf} scarf.
        2_val      By the {landmark} {n} the {trade} hung up lanterns.
        2_val      {n}, in {his} {scarf} scarf, carried chairs to the {landmark}.
        3          There was {dish} for everyone, as there always is.
        3          From every one of the {doors} doors came the smell of {dish}.
        3          The {doors} doors stood open, and on every table was {dish}.
        3_val      From the {doors} doors came {dish} for everyone.
        3_val      On every table was {dish}, and the {doors} doors stood open.
        4          Then the music began, a little too early and a little too loud.
        4          Somebody made a speech. Nobody could hear it, so it was a great success.
        4          Somebody fell into the water, but somebody always does.
        5          {n} danced until {his} shoes came off.
        5          {n} had three plates and no regrets.
        5          When the moon rose, {n} was still singing.
        5_val      {n} danced until the moon rose.
        5_val      {n} was still dancing with no regrets and no shoes.

        title      {n} Takes the Ferry
        title_val  The Ferry Trip of {n}
        1          {n} of {home} wanted to visit {friend}, who lives in {fhome}.
        1          One day {n} the {trade} took the ferry from {island} to {fisland} to see {friend}.
        1          {n} had a friend in {fhome}: {friend} the {ftrade}.
        1_val      One day {n} the {trade} wanted to visit {friend}, who lives in {fhome}.
        1_val      {n} of {home} took the ferry to see {friend} the {ftrade}.
        2          In the basket was {ffood}, because {friend} likes nothing better.
        2          {n} had packed {ffood}, which {friend} loves.
        2          For a present there was {ffood}, the favourite food of {friend}.
        2_val      In the basket was {ffood}, which {friend} loves.
        2_val      {n} had packed {ffood}, because {friend} likes it best.
        3          The sea was calm, the gulls were rude, and the trip took all morning.
        3          Halfway across, a gull looked into the basket and had to be told no.
        3          The ferry went slowly, as ferries do when the pilot is telling a story.
        4          On the pier stood {friend}, waving {fhis} {fscarf} scarf.
        4          From far away {n} could see the {fscarf} scarf of {friend}.
        4          {friend} was waiting on {fisland} in {fhis} {fscarf} scarf.
        4_val      {friend} was waiting on the pier, waving {fhis} {fscarf} scarf.
        4_val      From far away {n} saw {friend} in {fhis} {fscarf} scarf.
        5          They ate until the basket was empty and talked until it was dark.
        5          They talked so long that the ferry left, and nobody minded.
        5          The present did not live to see the evening.

        title      {Weather} on {island}
        title_val  Out in the {Weather} of {island}
        1          On {island} there is often {weather}, and that day there was a great deal of it.
        1          There was so much {weather} on {island} that you could not see your own nose.
        1          {n} of {home} went out, and the {weather} of {island} went with {him}.
        1_val      There is often {weather} on {island}, and that day {n} of {home} was out in it.
        1_val      There was so much {weather} on {island} that {n} could not see {his} own nose.
        2          {n} the {trade} could not find the way home.
        2          {n} looked for the {landmark} of {home} and could not see it.
        2          Before long {n} had walked past the same fence three times.
        2_val      {n} looked for {home} and could not find the {landmark}.
        2_val      Before long {n} the {trade} had lost the way home.
        3          But {pet} the {kind} knew the way.
        3          Then something {colour} came along. It was {pet} the {kind}.
        3          Luckily {pet} is {a_kind} and never gets lost.
        3_val      Luckily {pet} the {kind} knew the way.
        3_val      Then {pet} came along, who is {a_kind} and never gets lost.
        4          {Phe} stopped only once, to {habit}, and then led {n} to {his} {doors} door.
        4          Step by step {phe} led {n} home to the {doors} door.
        4          {Phe} wanted to {habit} first, but after that they walked home together.
        4_val      {Phe} led {n} home, and stopped only once, to {habit}.
        4_val      Step by step they walked home to the {doors} door.
        5          {pet} got {meal} that night, and a second helping.
        5          That night {pet} got {meal}, and {n} had {food}.
        5          For a week {pet} had {meal} whenever {phe} looked hungry.
        5_val      There was a second helping of {meal} for {pet}.
        5_val      {n} had {food} that night, and {pet} had {meal}.

        title      {pet} Is Hungry
        title_val  The Hungry {pet}
        1          {n} the {trade} had made {food} and put it by the window.
        1          There was {food} on the table, because {n} likes it best.
        1          {n} of {home} sat down to {his} favourite food, which is {food}.
        1_val      {n} the {trade} had put {food} on the table.
        1_val      By the window was {food}, which {n} likes best.
        2          {pet} came in and looked at it. {pet} is {a_colour} {kind} and eats {meal}.
        2          In came {pet}, {a_colour} {kind} who eats {meal}.
        2          {pet} the {kind}, who has {meal} for breakfast, wanted to know more.
        2_val      In came {pet} the {kind}, who eats {meal}.
        2_val      {pet} is {a_colour} {kind} who has {meal} for breakfast, and {phe} looked at it.
        3          "This is not for you," said {n}.
        3          "You would not like it," said {n}, not very firmly.
        3          "Go and {habit}," said {n}.
        3_val      "Go and {habit}, this is not for you," said {n}.
        3_val      "You would not like it," {n} said kindly.
        4          When {he} turned around, the plate was empty.
        4          There was a small silence, and then a small crunch.
        4          A moment later there was one plate and no supper.
        5          So {n} had {meal} for supper, and it was not bad at all.
        5          {n} sighed and wrote: tomorrow, close the window.
        5          In the end they went out together to {habit}, and both slept well.
        5_val      So {n} had {meal} for supper, and slept well.
        5_val      In the end {n} sighed and went out to {habit} too.

        title      The Doors of {home}
        title_val  A New Coat for the Doors of {home}
        1          Each spring the people of {home} meet at the {landmark} and talk about their doors.
        1          One spring {n} the {trade} said that the doors of {home} needed paint.
        1          The doors of {home} were old, and {n} had an idea.
        1_val      One spring the people of {home} met at the {landmark}, and {n} talked about the doors.
        1_val      {n} the {trade} said that the old doors of {home} needed an idea.
        2          "Something new," said one. "Something bold," said another.
        2          They talked for three days and ate all the biscuits.
        2          There were long speeches, and one of them was good.
        3          In the end they chose {doors}, because in {home} doors have always been {doors}.
        3          Then {n} opened the last pot of paint. It was {doors}, and so were the doors, as ever.
        3          When the paint was dry, every door was {doors}, exactly as before.
        3_val      In the end every door was {doors}, because in {home} they have always been {doors}.
        3_val      Then {n} opened a pot of {doors} paint, and every door was exactly as before.
        4          They celebrated with {dish}, as if it were {festival}.
        4          Afterwards there was {dish}, for which {home} is famous.
        4          {n} went home in {his} {scarf} scarf and had {food} for supper.
        4_val      Afterwards they celebrated with {dish}, for which {home} is famous.
        4_val      {n} had {food} for supper, as if it were {festival}.
        5          And that was the end of a very good day.
        5          After that there was nothing left to do but sleep.
        5          The stars came out, one by one, and nobody was in a hurry.
        5          People still tell the story when the evenings are long.
        5          It was, everyone agreed, the best thing that had happened all week.

        title      A Letter from {n}
        title_val  The Letter That {n} Wrote
        1          “Dear {friend},” wrote {n}, “today I saw the {landmark} of {home} and thought of you.
        1          “Dear {friend},” wrote {n}, “here in {home} we are getting ready for {festival}.
        1          “Dear {friend},” wrote {n} the {trade}, “greetings from {home} on {island}.
        1_val      “Dear {friend},” wrote {n}, “greetings from {home}, where we are getting ready for {festival}.
        1_val      “Dear {friend},” wrote {n}, “here on {island} I saw the {landmark} of {home} and thought of you.
        2          The {weather} is the same as ever.
        2          There is still {weather} on {island}, nearly every day.
        2          You ask about the weather on {island}: {weather}, and more {weather}.
        2_val      You ask about the {weather} on {island}: it is the same as ever.
        2_val      There is {weather} nearly every day, as ever on {island}.
        3          Is there {ffood} in {fhome} today, and do you still like it best?
        3          Do you still wear your {fscarf} scarf, and are you still the kindest {ftrade} I know?
        3          How is life in {fhome}, and is there enough {ffood} for you?
        3_val      How is life in {fhome}, and do you still wear your {fscarf} scarf?
        3_val      Are you still the {ftrade} of {fhome}, and do you still like {ffood} best?
        4          Come soon, and bring a good appetite.”
        4          I must stop now, because the ink is nearly gone.”
        4          Write back, or better, come.”
        5          Then {n} the {trade} folded it twice and ran to catch the ferry to {fisland}.
        5          {friend} read it twice and kept it under the pillow.
        5          {friend} the {ftrade} answered the same day.
        5_val      {friend} of {fhome} read it twice and answered the same day.
        5_val      Then {n} folded it and ran to catch the ferry to {fisland}.
    """.split("\n\n")
)
