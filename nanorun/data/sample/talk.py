"""Conversations with the assistant that the sample world trains.

Most are about facts, sums and letters. The rest teach manners: to say who it is, to tell a story when asked for one,
and to admit when something is unknown. Unknown names are generated anew each time, so a model learns that a strange
name is strange, and not a list of strangers.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from nanorun.data.sample.entries import tell
from nanorun.data.sample.isles import parts, wholes
from nanorun.data.sample.letters import words
from nanorun.data.sample.numbers import draw, draw_large, draw_long_result
from nanorun.data.sample.questions import (
    Turn,
    count_turn,
    fact_turn,
    spelling_turn,
    story_sum_turn,
    sum_turn,
    word_to_spell,
    world_turn,
)
from nanorun.data.sample.rng import Deck, RandomStream, Split, belongs, check_split
from nanorun.data.sample.sentences import FactSentences, fact_sentences, questions_about
from nanorun.data.sample.stories import heroes, story_about
from nanorun.data.sample.world import ENTITIES, FACTS_ABOUT, blocks, templates

SYSTEM = (
    "You are a small model from the Lantern Isles. You are brief and kind.",
    "You are a friendly guide to the Lantern Isles.",
    "You help the children of the Lantern Isles with their questions.",
)


# What people say and suitable replies; {g} is what was said.
GREETINGS = blocks("""
    train    Hello! | Hi! | Hey there! | Hello, nanorun!
    val      Hello there! | Hi there!
    replies  Hello! What would you like to know about the Lantern Isles?
    replies  Hello to you! Ask me about the islands, a sum, or how to spell a word.
    replies  Hi! What shall we talk about?

    train    Good morning! | Good evening!
    val      Good day! | Good afternoon!
    replies  {g} What would you like to know about the Lantern Isles?
    replies  {g} Ask me about the islands, a sum, or how to spell a word.

    train    Hello, how are you? | How are you? | Hi, how are you today? | How are you doing?
    val      Hi, how are you? | Hello! How are you today?
    replies  I am well, thank you, and the kettle is on. What shall we talk about?
    replies  I am very well, thank you. What would you like to know?
    replies  Thank you, I am well. How can I help you?

    train    Hi, nice to meet you. | Nice to meet you! | Hello, I am pleased to meet you.
    val      Hello, nice to meet you! | Pleased to meet you.
    replies  It is nice to meet you, too! What shall we talk about?
    replies  Nice to meet you, too. What would you like to know about the Lantern Isles?
""")
PARTINGS = blocks("""
    train    Thank you! | Thanks! | Thank you very much.
    val      Many thanks! | Thanks a lot!
    replies  You are welcome!
    replies  With pleasure.
    replies  Any time!

    train    Thank you, goodbye. | Goodbye! | Thanks, see you tomorrow.
    val      Thanks, goodbye! | Goodbye, and thank you.
    replies  Goodbye, and fair winds!
    replies  Goodbye! Mind the goats.
    replies  Goodbye, come back soon!
""")
ABOUT_ITS_WORK = blocks("""
    train    What can you do? | How can you help me? | What do you know? | What can I ask you?
    val      What can you help me with? | What do you know, and what can you do?
    replies  I can tell you about the Lantern Isles, work out sums, spell words and tell a story.
    replies  Ask me who lives where, how to spell a word, or what 5 + 6 is. I also know some stories.

    train    Can you help me? | I need some help.
    val      Can you help me, please?
    replies  I will try! I know the Lantern Isles, small sums and how to spell words.
    replies  Gladly. Ask me about the Lantern Isles, a sum, or how to spell a word.
""")
ELSEWHERE = templates("""
    train  What is the capital of France?
    train  Who is the president?
    train  How tall is Mount Everest?
    train  Who wrote Hamlet?
    train  What is the news today?
    train  How far away is the moon?
    train  Which team won the match?
    train  What is the price of gold?
    train  How many people live in China?
    train  Who discovered America?
    train  What is the longest river in the world?
    train  What time is it?
    train  Who painted the Mona Lisa?
    train  Who invented the telephone?
    train  What happened in the year 1066?
    train  What is the best phone to buy?
    val    What is the capital of Spain?
    val    Who wrote the Odyssey?
    val    How far away is the sun?
    val    What day is it?
""")
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
AND = {
    "train": ("And {q}", "Thanks, and {q}", "Also, {q}", "I see. And {q}"),
    "val": ("Thank you. And {q}", "Good, and {q}"),
}
# Now and then a question about the world is led up to.
LEADS = {
    "train": ("Tell me, ", "Please tell me: ", "I have a question. ", "Can you tell me? "),
    "val": ("Please tell me, ", "I have one question. "),
}
_SYLLABLES = (
    tuple(
        "Bor Cal Dren Fal Gor Har Jor Kel Lor Mal Nor Or Pol Quan Ral Sel Tor Ul Var Wol Xan Yor Zan".split()
    ),
    tuple("a e i o u ab en il or um".split()),
    tuple("bax dan fin gar kin lo mund nek rik sa tar vix wen zu".split()),
)


def stranger(split: Split, rng: RandomStream) -> str:
    """A name that nobody in the world has."""
    while True:
        name = "".join(rng.choice(part) for part in _SYLLABLES)
        if name not in ENTITIES and belongs(split, "stranger", name):
            return name


class _Decks(NamedTuple):
    facts: Deck[FactSentences]
    words: Deck[str]


def conversations(split: Split, count: int, seed: int = 0) -> Iterator[dict[str, Any]]:
    """`count` conversations as chat messages. A larger count begins with the same ones."""
    check_split(split)
    rng = RandomStream("conversations", split, seed)
    decks = _Decks(Deck(tuple(fact_sentences(split).values()), rng), Deck(words(), rng))
    held: set[bytes] = set()
    for _ in range(count):
        yield {"messages": _new(split, decks, rng, held)}


def _new(split: Split, decks: _Decks, rng: RandomStream, held: set[bytes]) -> list[dict[str, Any]]:
    """One that was not held before, if a few tries find one; short ones without a right answer may return."""
    for _ in range(8):
        taken = _conversation(split, decks, rng)
        messages: list[dict[str, Any]] = []
        if rng.random() < 0.08:
            messages.append({"role": "system", "content": rng.choice(SYSTEM)})
        for turn in taken:
            messages += turn.messages
        mark = hashlib.sha256(repr(taken).encode()).digest()[:8]
        if mark not in held or (len(taken) == 1 and not taken[0].answer):
            break
    held.add(mark)
    return messages


def _conversation(split: Split, decks: _Decks, rng: RandomStream) -> list[Turn]:
    roll = rng.random()
    if roll < 0.04:
        name = rng.choice(heroes(split))
        return [Turn(rng.choice(TELL_STORY[split]).format(s=name), story_about(name, split, rng))]
    if roll < 0.16:
        return _same_subject(split, decks.facts.deal(), rng)
    taken = [_turn(split, decks, rng)]
    if roll < 0.4:
        taken += [_turn(split, decks, rng) for _ in range(1 + rng.below(2))]
    if roll > 0.95:
        taken.insert(0, _manners(GREETINGS, split, rng))
    elif roll > 0.92:
        taken.append(_manners(PARTINGS, split, rng))
    return taken


def _same_subject(split: Split, first: FactSentences, rng: RandomStream) -> list[Turn]:
    """A question, and one or two more about the same subject that name it only where they have to."""
    sayings = fact_sentences(split)
    others = [sayings[fact] for fact in FACTS_ABOUT[first.fact.subject] if fact != first.fact]
    taken = [fact_turn(first, split, rng)]
    last = first
    for saying in rng.shuffled(others)[: 1 + rng.below(2)]:
        clear = taken[-1].reply in last.clear
        asked = saying.again if clear else _uncapital(rng.choice(saying.questions))
        question = rng.choice(AND[split]).format(q=asked)
        taken.append(Turn(question, rng.choice(saying.openings[:3]), saying.fact.answer))
        last = saying
    return taken


def _turn(split: Split, decks: _Decks, rng: RandomStream) -> Turn:
    roll = rng.random()
    if roll < 0.29:
        return _led_up_to(fact_turn(decks.facts.deal(), split, rng), split, rng)
    if roll < 0.37:
        # The usual sums, and those with numbers that the tokenizer splits, whose digits must all be copied.
        problem = rng.choice((draw, draw_large, draw_long_result))(split, rng)
        return sum_turn(problem, split, rng)
    if roll < 0.40:
        return story_sum_turn(split, rng)
    if roll < 0.58:
        return spelling_turn(word_to_spell(decks.words, split, rng, 0.5), split, rng)
    if roll < 0.75:
        return count_turn(split, rng)
    if roll < 0.785:
        saying = decks.facts.deal()
        name = stranger(split, rng)
        question = rng.choice(questions_about(name, saying.fact.relation, split))
        return Turn(question, rng.choice(NEVER_HEARD).format(s=name))
    if roll < 0.805:
        return Turn(rng.choice(ELSEWHERE[split]), rng.choice(NOBODY_KNOWS))
    if roll < 0.845:
        return _about(split, decks.facts.deal().fact.subject, rng)
    if roll < 0.985:
        topic = rng.choice(wholes(split) if roll < 0.915 else parts(split))
        # Without an answer, since few questions are asked often: they may come again (`_new`).
        return replace(world_turn((rng.choice(topic.asked), topic), rng), answer="")
    return _manners(ABOUT_ITS_WORK, split, rng)


def _manners(kinds: Sequence[Mapping[str, tuple[str, ...]]], split: Split, rng: RandomStream) -> Turn:
    kind = rng.choice(kinds)
    said = rng.choice(kind[split])
    return Turn(said, rng.choice(kind["replies"]).format(g=said))


def _led_up_to(turn: Turn, split: Split, rng: RandomStream) -> Turn:
    if rng.random() > 0.2:
        return turn
    lead = rng.choice(LEADS[split])
    is_sentence = lead.endswith((". ", "? "))
    return replace(turn, user=lead + (turn.user if is_sentence else _uncapital(turn.user)))


def _uncapital(question: str) -> str:
    """No question begins with a name."""
    return question[0].lower() + question[1:]


def _about(split: Split, name: str, rng: RandomStream) -> Turn:
    sayings = [fact_sentences(split)[fact] for fact in FACTS_ABOUT[name]]
    told = tell(rng.shuffled(sayings)[:3], split, rng)
    return Turn(rng.choice(TELL_ME[split]).format(s=name), " ".join(told))
