"""The phrasings: how each kind of fact is stated and asked for.

Each relation ("home", "trade" ...) has one phrasing: sentences that state it and questions that ask for it, for
training and, different ones, for validation. A validation phrasing is close to those of training (it shares the name
and the key word, often whole parts), so a model that understood can follow it, and a model that memorized sentences
cannot copy it.

Each line of a phrasing has a kind and a template:

    said, said_val        states the fact
    asked, asked_val      asks for it
    again                 asks for it as a second question, with a pronoun, after "And" and the like
    both                  states it of two subjects that share the answer; the splits differ in which two
    listing, listing_val  states it of all subjects that share the answer

The slots of a template: `{s}` the subject, `{p}` its possessive (Odo's), `{a}` the answer, `{an}` the answer with its
article, `{t}` a second subject, `{list}` all subjects that share the answer, `{he}` and `{his}` pronouns. A statement
that begins with `{s}` or `{p}` can also begin with the pronoun.
"""

from nanorun.data.sample.rng import Split
from nanorun.data.sample.world import templates


def phrases(relation: str, kind: str, split: Split = "train") -> tuple[str, ...]:
    """The templates of a kind: said, asked, again, both or listing."""
    return PHRASINGS[relation].get(kind if split == "train" else f"{kind}_val", ())


PHRASINGS = {
    # Islands and villages
    "direction": templates("""
        said       {s} lies in the {a} of the Lantern Isles.
        said       {s} is the island in the {a}.
        said       To reach {s}, sailors steer for the {a} of the Quiet Sea.
        said       On every chart {s} is drawn in the {a}.
        said       In the {a} of the Quiet Sea lies {s}.
        said       {s} sits in the {a}, just where the charts say it should.
        said       Of the five islands, {s} is the one in the {a}.
        said_val   {s} is the island in the {a} of the Quiet Sea.
        said_val   In the {a} of the Lantern Isles lies {s}.
        asked      In which part of the Lantern Isles is {s}?
        asked      Where in the Quiet Sea is {s}?
        asked      Which part of the sea is {s} in?
        asked      Where on the chart is the island of {s}?
        asked      In which part of the sea do I find {s}?
        asked_val  In which part of the Quiet Sea is {s}?
        asked_val  Which part of the Lantern Isles is {s} in?
        again      in which part of the sea is it?
    """),
    "flag": templates("""
        said       {p} flag is {a}.
        said       The flag of {s} is {a}.
        said       {s} flies {an} flag.
        said       Boats from {s} carry {an} flag.
        said       When you see {an} flag, the boat comes from {s}.
        said       Over the harbours of {s} flies {an} flag.
        said       The sailors of {s} are fond of their {a} flag.
        said_val   {s} is fond of its {a} flag.
        said_val   The flag over the harbours of {s} is {a}.
        asked      What colour is the flag of {s}?
        asked      Which colour is {p} flag?
        asked      What flag do boats from {s} carry?
        asked      What colour of flag does {s} fly?
        asked      Which flag does {s} fly?
        asked      What does the flag of {s} look like?
        asked_val  What colour is the flag on boats from {s}?
        asked_val  Which colour is the flag of {s}?
        again      what colour is its flag?
    """),
    "weather": templates("""
        said       The island of {s} is known for its {a}.
        said       On {s} there is {a} nearly every day.
        said       {p} weather is mostly {a}.
        said       {s} gets more {a} than any other island.
        said       People on {s} talk about the {a} before they say good morning.
        said       Ask for a forecast on {s} and you will hear one word: {a}.
        said       The weather of {s} is {a} today, and {a} tomorrow.
        said_val   {p} weather is {a} nearly every day.
        said_val   The weather of {s} is mostly {a}.
        asked      What is the weather like on {s}?
        asked      What weather does {s} have?
        asked      What kind of weather is {s} known for?
        asked      What sort of weather will I meet on {s}?
        asked      How is the weather on {s}?
        asked      Which weather is {s} known for?
        asked_val  What kind of weather does {s} have?
        asked_val  What is the weather of {s}?
        again      what is its weather like?
    """),
    "island": templates("""
        said         {s} is a village on the island of {a}.
        said         {s} stands on the island of {a}.
        said         You will find {s} on the island of {a}.
        said         The ferry to {s} ties up on {a}.
        said         {s} belongs to the island of {a}.
        said         The village of {s} is on {a}.
        said         Anyone who wants to see {s} must sail to {a}.
        said_val     {s} is on the island of {a}.
        said_val     You will find the village of {s} on {a}.
        asked        On which island is {s}?
        asked        Which island is {s} on?
        asked        Where is the village of {s}?
        asked        To which island must I sail to see {s}?
        asked        Can you tell me which island {s} is on?
        asked        Which island does {s} belong to?
        asked_val    Which island is the village of {s} on?
        asked_val    On which island will I find {s}?
        again        on which island is it?
        both         {s} and {t} are both on the island of {a}.
        both         Both {s} and {t} stand on the island of {a}.
        listing      The villages of {a} are {list}.
        listing_val  On the island of {a} stand {list}.
    """),
    "landmark": templates("""
        said         {s} is known for its {a}.
        said         The pride of {s} is its {a}.
        said         At the heart of {s} there is {an}.
        said         Visitors come to {s} to see the {a}.
        said         {s} has {an} that every child can draw.
        said         Nobody leaves {s} without a look at the {a}.
        said         {p} landmark is {an}.
        said_val     {s} has {an} for a landmark.
        said_val     The landmark of {s} is its {a}.
        asked        What is the landmark of {s}?
        asked        Which landmark is {s} known for?
        asked        What landmark will I see in {s}?
        asked        What do visitors come to see in {s}?
        asked        What is {p} landmark?
        asked        What is there to see in {s}?
        asked_val    Which landmark will I see in {s}?
        asked_val    Which landmark do visitors come to see in {s}?
        again        what is its landmark?
        both         {s} and {t} both have {an}.
        both         {s} has {an}, and so has {t}.
        listing      The villages with {an} are {list}.
        listing_val  You can see {an} in {list}.
    """),
    "dish": templates("""
        said         {s} is famous for its {a}.
        said         The cooks of {s} are proud of their {a}.
        said         In {s} everybody knows how to make {a}.
        said         The dish of {s} is {a}.
        said         On market day all of {s} smells of {a}.
        said         A guest in {s} is always given {a}.
        said         No supper in {s} is complete without {a}.
        said         {p} dish is {a}, and there is always enough.
        said_val     {p} famous dish is {a}.
        said_val     The cooks of {s} know how to make {a}.
        asked        What dish is {s} famous for?
        asked        What is the dish of {s}?
        asked        What do the cooks of {s} make?
        asked        Which dish is a guest given in {s}?
        asked        What should I eat in {s}?
        asked        What is {p} dish?
        asked_val    Which dish is {s} famous for?
        asked_val    What is the famous dish of {s}?
        again        what dish is it famous for?
        both         {s} and {t} are both famous for {a}.
        both         Both {s} and {t} are proud of their {a}.
        listing      The villages famous for {a} are {list}.
        listing_val  You can smell {a} in {list}.
    """),
    "festival": templates("""
        said         {s} celebrates {a}.
        said         The festival of {s} is {a}.
        said         Every year the people of {s} look forward to {a}.
        said         On {a} all of {s} is out in the street.
        said         The great feast in {s} is {a}.
        said         In {s} they begin to plan {a} a year ahead.
        said         {p} festival is {a}, and nobody goes to bed early.
        said_val     {p} great festival is {a}.
        said_val     Every year the people of {s} celebrate {a}.
        asked        Which festival does {s} celebrate?
        asked        What is the festival of {s}?
        asked        What do the people of {s} celebrate?
        asked        What is the festival in {s} called?
        asked        What is the great feast in {s}?
        asked        What is {p} festival?
        asked_val    Which festival do the people of {s} celebrate?
        asked_val    What is the great festival of {s}?
        again        which festival does it celebrate?
        both         {s} and {t} both celebrate {a}.
        both         Both {s} and {t} look forward to {a}.
        listing      {a} is celebrated in {list}.
        listing_val  The villages that celebrate {a} are {list}.
    """),
    "doors": templates("""
        said         The doors of {s} are {a}.
        said         Every door in {s} is painted {a}.
        said         {s} is a village with {a} doors.
        said         In {s} people paint their doors {a}.
        said         All the houses of {s} have {a} doors.
        said         If the doors are {a}, you may well be in {s}.
        said         {p} doors are {a}, and freshly painted each spring.
        said_val     {p} doors are painted {a}.
        said_val     All the doors of {s} are {a}.
        asked        What colour are the doors of {s}?
        asked        Which colour are the doors in {s}?
        asked        What colour do people paint their doors in {s}?
        asked        In {s}, what colour are the doors?
        asked        What colour are {p} doors?
        asked        How are the doors painted in {s}?
        asked_val    What colour are the doors in {s}?
        asked_val    Which colour are the doors of {s}?
        again        what colour are its doors?
        both         {s} and {t} both have {a} doors.
        both         The doors are {a} in both {s} and {t}.
        listing      The villages with {a} doors are {list}.
        listing_val  People paint their doors {a} in {list}.
    """),
    # People and animals
    "home": templates("""
        said         {s} lives in {a}.
        said         {p} home is in {a}.
        said         {s} comes from {a}.
        said         You will find {s} in {a}.
        said         {s} has a small house in {a}.
        said         The people of {a} all know {s}.
        said         Letters for {s} are sent to {a}.
        said         {s} would not live anywhere but in {a}.
        said_val     {s} has a home in {a}.
        said_val     {p} small house is in {a}.
        asked        Where does {s} live?
        asked        In which village does {s} live?
        asked        Which village does {s} come from?
        asked        Where is {p} home?
        asked        Where will I find {s}?
        asked        Where should I send a letter for {s}?
        asked_val    Which village does {s} live in?
        asked_val    In which village is {p} home?
        again        where does {he} live?
        both         {s} and {t} both live in {a}.
        both         Both {s} and {t} have a house in {a}.
        listing      The people of {a} are {list}.
        listing_val  In {a} live {list}.
    """),
    "trade": templates("""
        said         {s} is {an}.
        said         {s} works as {an}.
        said         By trade {s} is {an}.
        said         {s} earns a living as {an}.
        said         If you need {an}, ask for {s}.
        said         {s} has been {an} for as long as anyone remembers.
        said         There is no {a} quite like {s}.
        said_val     {s} is {an} by trade.
        said_val     {s} has worked as {an} for as long as anyone remembers.
        asked        What is {p} trade?
        asked        What does {s} do for a living?
        asked        What work does {s} do?
        asked        What does {s} work as?
        asked        Which trade does {s} have?
        asked        How does {s} earn a living?
        asked_val    What trade does {s} have?
        asked_val    What is the trade of {s}?
        again        what is {his} trade?
        both         {s} is {an}, and so is {t}.
        both         Just like {s}, {t} works as {an}.
        listing      The {a}s of the Lantern Isles are {list}.
        listing_val  These people work as {a}s: {list}.
    """),
    "food": templates("""
        said         {p} favourite food is {a}.
        said         {s} likes {a} best of all.
        said         {s} would walk a mile for {a}.
        said         Nothing makes {s} happier than {a}.
        said         For supper {s} asks for {a}.
        said         {s} never says no to {a}.
        said         Give {s} some {a} and you have made a friend.
        said_val     {s} likes {a} best for supper.
        said_val     The favourite food of {s} is {a}.
        asked        What is {p} favourite food?
        asked        What does {s} like to eat?
        asked        What food does {s} like best?
        asked        What does {s} ask for at supper?
        asked        Which food makes {s} happy?
        asked        What should I cook for {s}?
        asked_val    Which food does {s} like best?
        asked_val    What is the favourite food of {s}?
        again        what is {his} favourite food?
        both         {s} and {t} both like {a} best.
        both         Both {s} and {t} would walk a mile for {a}.
        listing      Those who like {a} best are {list}.
        listing_val  The people who never say no to {a} are {list}.
    """),
    "scarf": templates("""
        said         {s} wears {an} scarf.
        said         {p} scarf is {a}.
        said         You can tell {s} from afar by the {a} scarf.
        said         In any weather {s} wears {an} scarf.
        said         {s} owns just one scarf, and it is {a}.
        said         The {a} scarf on the hook belongs to {s}.
        said         {s} is never seen without {an} scarf.
        said_val     {s} owns {an} scarf.
        said_val     {p} scarf is {a} in any weather.
        asked        What colour is {p} scarf?
        asked        What colour of scarf does {s} wear?
        asked        Which scarf does {s} wear?
        asked        What is the colour of {p} scarf?
        asked        Which colour of scarf does {s} wear?
        asked        Can you tell me the colour of {p} scarf?
        asked_val    Which colour is {p} scarf?
        asked_val    What colour is the scarf of {s}?
        again        what colour is {his} scarf?
        both         {s} and {t} both wear {an} scarf.
        both         Both {s} and {t} own {an} scarf.
        listing      The people with {an} scarf are {list}.
        listing_val  You can see {an} scarf on {list}.
    """),
    "companion": templates("""
        said       {s} keeps {a}.
        said       {p} companion is {a}.
        said       {s} shares a house with {a}.
        said       {s} is the keeper of {a}.
        said       Wherever {s} goes, {a} goes too.
        said       {s} and {a} are the best of friends.
        said       {s} says good night to {a} before anyone else.
        said_val   {s} and {a} share a house.
        said_val   The companion of {s} is {a}.
        asked      Which animal does {s} keep?
        asked      What is the name of {p} animal?
        asked      Who is {p} companion?
        asked      Which animal lives with {s}?
        asked      Who shares a house with {s}?
        asked      What is {p} animal called?
        asked_val  Which animal is {p} companion?
        asked_val  Which animal shares a house with {s}?
        again      which animal does {he} keep?
    """),
    "kind": templates("""
        said       {s} is {an}.
        said       {s} is {an} and proud of it.
        said       There is {an} called {s}.
        said       {s} the {a} is known all over the isles.
        said       Nobody ever met {an} like {s}.
        said       The {a} they call {s} is a friend to all.
        said       {s} was born {an} and has never complained.
        said_val   {s} was born {an} and is proud of it.
        said_val   All over the isles they know {s} the {a}.
        asked      What kind of animal is {s}?
        asked      What animal is {s}?
        asked      What sort of animal is {s}?
        asked      What kind of creature is {s}?
        asked      Which animal is {s}?
        asked      Can you tell me what animal {s} is?
        asked_val  Which kind of animal is {s}?
        asked_val  What sort of creature is {s}?
        again      what kind of animal is {he}?
        both       {s} is {an}, and {t} is one too.
        both       Just like {s}, {t} was born {an}.
    """),
    "keeper": templates("""
        said       {s} lives with {a}.
        said       {s} belongs to {a}.
        said       {p} keeper is {a}.
        said       {a} looks after {s}.
        said       Every morning {a} feeds {s}.
        said       {s} comes when {a} whistles.
        said       The keeper of {s} is {a}.
        said_val   {s} lives in the house of {a}.
        said_val   Every morning {a} whistles for {s}.
        asked      Who keeps {s}?
        asked      Who is {p} keeper?
        asked      Who looks after {s}?
        asked      Who does {s} live with?
        asked      Who does {s} belong to?
        asked      Whose animal is {s}?
        asked_val  Who is the keeper of {s}?
        asked_val  Who feeds and looks after {s}?
        again      who is {his} keeper?
    """),
    "colour": templates("""
        said         {s} is {a}.
        said         {p} colour is {a}.
        said         {s} is {a} all over.
        said         {s} is {a} from top to toe.
        said         By day or by night, {s} is {a}.
        said         Look for something {a}, and it may be {s}.
        said         The colour of {s} is {a}.
        said_val     {p} colour is {a} from top to toe.
        said_val     By day or by night, {s} is {a} all over.
        asked        What colour is {s}?
        asked        Which colour is {s}?
        asked        What is {p} colour?
        asked        What colour does {s} have?
        asked        Can you tell me what colour {s} is?
        asked_val    What is the colour of {s}?
        asked_val    Which colour does {s} have?
        again        what colour is {he}?
        both         {s} and {t} are both {a}.
        both         Both {s} and {t} are {a} all over.
        listing      The {a} animals are {list}.
        listing_val  These animals are {a}: {list}.
    """),
    "meal": templates("""
        said         {s} eats {a}.
        said         {s} likes to eat {a}.
        said         {p} favourite meal is {a}.
        said         For breakfast {s} has {a}.
        said         {s} will do anything for {a}.
        said         Bring {a} if you want to please {s}.
        said         Nobody can keep {s} away from {a}.
        said_val     {s} likes to eat {a} for breakfast.
        said_val     The favourite meal of {s} is {a}.
        asked        What does {s} eat?
        asked        What is {p} favourite meal?
        asked        What does {s} like to eat?
        asked        What should I bring to please {s}?
        asked        What does {s} have for breakfast?
        asked_val    What does {s} eat for breakfast?
        asked_val    What is the favourite meal of {s}?
        again        what does {he} eat?
        both         {s} and {t} both eat {a}.
        both         Both {s} and {t} like to eat {a}.
        listing      The animals that eat {a} are {list}.
        listing_val  These animals will do anything for {a}: {list}.
    """),
    "habit": templates("""
        said         {s} likes to {a}.
        said         {s} loves to {a}.
        said         {p} habit is to {a}.
        said         When nobody is looking, {s} starts to {a}.
        said         It is well known that {s} likes to {a}.
        said         Given an hour alone, {s} will {a}.
        said         You cannot teach {s} not to {a}.
        said_val     {p} well-known habit is to {a}.
        said_val     When nobody is looking, {s} likes to {a}.
        asked        What does {s} like to do?
        asked        What is {p} habit?
        asked        What does {s} love to do?
        asked        What does {s} do when nobody is looking?
        asked        What does {s} do all day?
        asked        What is {s} known for?
        asked_val    What is the habit of {s}?
        asked_val    What does {s} love to do when nobody is looking?
        again        what does {he} like to do?
        both         {s} and {t} both like to {a}.
        both         Both {s} and {t} love to {a}.
        listing      The animals that like to {a} are {list}.
        listing_val  These animals love to {a}: {list}.
    """),
}
