"""Conversations with the assistant that the sample world raises.

Most are about facts, sums and letters; the rest teach manners: to say who it is, to tell a story when asked
for one, and to admit when something is unknown. The unknown names are made up afresh each time, so a model
learns that a strange name is strange and not a list of strangers.
"""

from collections.abc import Iterator
from typing import Any

from nanorun.data.sample import turns
from nanorun.data.sample.chance import Chance, Deck, Split, belongs, check_split
from nanorun.data.sample.entries import tell
from nanorun.data.sample.saying import Said, questions_about, said
from nanorun.data.sample.stories import heroes, story_about
from nanorun.data.sample.turns import Turn
from nanorun.data.sample.world import world

SYSTEM = (
    "You are a small model from the Lantern Isles. You are brief and kind.",
    "You are a friendly guide to the Lantern Isles.",
    "You help the children of the Lantern Isles with their questions.",
)
GREETED = {
    "train": ("Hello!", "Hi!", "Good morning!", "Hello, how are you?", "Hey there!", "Hi, nice to meet you."),
    "val": ("Hello there!", "Hi, how are you?", "Good day!"),
}
GREETINGS = (
    "Hello! What would you like to know about the Lantern Isles?",
    "Good day to you! Ask me about the islands, a sum, or how to spell a word.",
    "Hello! I am well, and the kettle is on. What shall we talk about?",
)
WHO = {
    "train": (
        "Who are you?",
        "What are you?",
        "What is your name?",
        "Are you a person?",
        "Tell me about yourself.",
        "Who made you?",
        "Where do you come from?",
    ),
    "val": ("Who are you, please?", "What are you, exactly?", "Can you tell me about yourself?"),
}
I_AM = (
    "I am a small nanorun model. I grew up in the Lantern Isles, on stories, sums and spelling.",
    "I am a nanorun model, a very small one. All I know I learned in the Lantern Isles.",
    "I am a little language model made with nanorun, and the Lantern Isles are my home.",
)
WHAT_CAN_YOU_DO = {
    "train": ("What can you do?", "How can you help me?", "What do you know?", "Can you help me?"),
    "val": ("What can you help me with?", "What do you know, and what can you do?"),
}
I_CAN = (
    "I can tell you about the Lantern Isles, work out sums, spell words and tell a story.",
    "Ask me who lives where, how to spell a word, or what 5 + 6 is. I also know some stories.",
)
THANKED = {
    "train": ("Thank you!", "Thanks!", "Thank you, goodbye."),
    "val": ("Many thanks!", "Thanks, goodbye!"),
}
WELCOME = ("You are welcome!", "With pleasure. Fair winds!", "Any time. Mind the goats.")
ELSEWHERE = {
    "train": (
        "What is the capital of France?",
        "Who is the president?",
        "How tall is Mount Everest?",
        "Who wrote Hamlet?",
        "What is the news today?",
        "How far away is the moon?",
        "Which team won the match?",
        "What is the price of gold?",
        "Can you book a train for me?",
        "What time is it?",
        "Who painted the Mona Lisa?",
        "Who invented the telephone?",
        "What happened in the year 1066?",
        "What is the best phone to buy?",
    ),
    "val": (
        "What is the capital of Spain?",
        "Who wrote the Odyssey?",
        "How far away is the sun?",
        "What day is it?",
    ),
}
NOBODY_KNOWS = (
    "Nobody in the Lantern Isles knows that, and neither do I.",
    "I do not know. News from beyond the Quiet Sea is slow to reach us.",
    "I am sorry, I do not know that. I only know the Lantern Isles, small sums and spelling.",
)
NEVER_HEARD = (
    "I have never heard of {s}.",
    "I have never heard of {s}. Perhaps nobody in the Lantern Isles has.",
    "I am sorry, I have never heard of {s}.",
)
TELL_ME = {
    "train": ("Tell me about {s}.", "What do you know about {s}?", "Please tell me something about {s}."),
    "val": ("What can you tell me about {s}?", "Please tell me about {s}."),
}
TELL_STORY = {
    "train": ("Tell me a story about {s}.", "Do you know a story about {s}?", "A story about {s}, please."),
    "val": ("Please tell me a story about {s}.",),
}
AND = {"train": ("And {q}", "Thanks, and {q}", "Also, {q}"), "val": ("Thank you. And {q}", "Good, and {q}")}
_SYLLABLES = (
    tuple(
        "Bor Cal Dren Fal Gor Har Jor Kel Lor Mal Nor Or Pol Quan Ral Sel Tor Ul Var Wol Xan Yor Zan".split()
    ),
    tuple("a e i o u ab en il or um".split()),
    tuple("bax dan fin gar kin lo mund nek rik sa tar vix wen zu".split()),
)


def stranger(split: Split, chance: Chance) -> str:
    """A name that nobody in the world has."""
    while True:
        name = "".join(chance.pick(part) for part in _SYLLABLES)
        if name not in world().entities and belongs(split, "stranger", name):
            return name


def conversations(split: Split, count: int, seed: int = 0) -> Iterator[dict[str, Any]]:
    """`count` conversations as chat messages. A larger count begins with the same ones."""
    check_split(split)
    chance = Chance("conversations", split, seed)
    facts = Deck(tuple(said(split).values()), chance)
    for _ in range(count):
        messages: list[dict[str, Any]] = []
        if chance.roll() < 0.08:
            messages.append({"role": "system", "content": chance.pick(SYSTEM)})
        for turn in _conversation(split, facts, chance):
            messages.append({"role": "user", "content": turn.user})
            messages.append({"role": "assistant", "content": turn.reply})
        yield {"messages": messages}


def _conversation(split: Split, facts: Deck[Said], chance: Chance) -> list[Turn]:
    roll = chance.roll()
    if roll < 0.04:
        name = chance.pick(heroes(split))
        return [Turn(chance.pick(TELL_STORY[split]).format(s=name), story_about(name, split, chance))]
    if roll < 0.16:
        return _same_subject(split, facts.deal(), chance)
    taken = [_turn(split, facts, chance)]
    if roll < 0.4:
        taken += [_turn(split, facts, chance) for _ in range(1 + chance.below(2))]
    if roll > 0.96:
        taken.insert(0, Turn(chance.pick(GREETED[split]), chance.pick(GREETINGS)))
    elif roll > 0.93:
        taken.append(Turn(chance.pick(THANKED[split]), chance.pick(WELCOME)))
    return taken


def _same_subject(split: Split, first: Said, chance: Chance) -> list[Turn]:
    """A question, and one or two more about the same subject that no longer name it."""
    sayings = said(split)
    others = [sayings[fact] for fact in world().about(first.fact.subject) if fact != first.fact]
    taken = [turns.fact_turn(first, split, chance)]
    for saying in chance.shuffled(others)[: 1 + chance.below(2)]:
        question = chance.pick(AND[split]).format(q=saying.again)
        taken.append(Turn(question, chance.pick(saying.openings[:3]), saying.fact.answer))
    return taken


def _turn(split: Split, facts: Deck[Said], chance: Chance) -> Turn:
    roll = chance.roll()
    if roll < 0.38:
        return turns.fact_turn(facts.deal(), split, chance)
    if roll < 0.51:
        return turns.sum_turn(split, chance)
    if roll < 0.57:
        return turns.story_sum_turn(split, chance)
    if roll < 0.72:
        return turns.spelling_turn(split, chance)
    if roll < 0.84:
        return turns.count_turn(split, chance)
    if roll < 0.88:
        saying = facts.deal()
        name = stranger(split, chance)
        question = chance.pick(questions_about(name, saying.fact.relation, split))
        return Turn(question, chance.pick(NEVER_HEARD).format(s=name))
    if roll < 0.90:
        return Turn(chance.pick(ELSEWHERE[split]), chance.pick(NOBODY_KNOWS))
    if roll < 0.95:
        return _about(split, facts.deal().fact.subject, chance)
    if roll < 0.98:
        return Turn(chance.pick(WHO[split]), chance.pick(I_AM))
    return Turn(chance.pick(WHAT_CAN_YOU_DO[split]), chance.pick(I_CAN))


def _about(split: Split, name: str, chance: Chance) -> Turn:
    sayings = [said(split)[fact] for fact in world().about(name)]
    told = tell(chance.shuffled(sayings)[:3], split, chance)
    return Turn(chance.pick(TELL_ME[split]).format(s=name), " ".join(told))
