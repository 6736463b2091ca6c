"""The sample world keeps its promises: the same everywhere, true, learnable, and fair to validation.

Sentences are read back with patterns made from the templates and compared with the table of facts, sums are
worked out again, calls of the calculator are evaluated by a small evaluator of our own.
"""

import ast
import hashlib
import json
import os
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from itertools import islice, pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanorun.data.sample import documents, world
from nanorun.data.sample.entries import comparisons, entries, lists
from nanorun.data.sample.isles import ABOUT_ITSELF, askings, guides
from nanorun.data.sample.lessons import lessons
from nanorun.data.sample.letters import COMMON, UNSEEN, spelling, words
from nanorun.data.sample.numbers import in_words
from nanorun.data.sample.phrases import PHRASINGS
from nanorun.data.sample.questions import KINDS, Question, is_correct, questions
from nanorun.data.sample.rng import RandomStream, Split
from nanorun.data.sample.sentences import OPENERS
from nanorun.data.sample.stories import stories
from nanorun.data.sample.talk import ABOUT_ITS_WORK, GREETINGS, PARTINGS, conversations, stranger
from nanorun.data.sample.world import Animal, Person, an, capital

SPLITS: tuple[Split, ...] = ("train", "val")
PINS = {
    ("documents", "train"): "4949a8f74a230092fc3e7dbab3c0c81c3f4ba31e4406b9a26bea3b059b81dccf",
    ("documents", "val"): "caad24b1ed5f3155c1c3efb23ccc4b1b320dfd5ad62d88d030be59120c4fd31e",
    ("conversations", "train"): "100a57e6a8936de489a6f7a2f2984b3fb859fd01671ba8bc1680a01468653de2",
    ("conversations", "val"): "d0f02b270a04c10a67681db4d52830bdb78a7c583f66d60d281916b64f94a6f6",
    ("questions", "train"): "317fdaa3620d4b55e0eb7ba521d9dbaee9457ee185339627d8fa1bd545cebacb",
    ("questions", "val"): "0821dffb916da870f3d597d879f1c6e6376d8845d64c458eebb7735137bcba57",
}
ANSWERS = {(fact.subject, fact.relation): fact.answer for fact in world.FACTS}
NAMES = tuple(world.ENTITIES)
INSTEAD_OF_A_NAME = ("He", "She", "It", "His", "Her", "Its", "The village", "The island")
OPENER = re.compile("|".join(f"^{opener}" for opener in OPENERS))


def sentences(text: str) -> list[str]:
    """Sentences without the quotation marks around them."""
    return [piece.strip(' "“”') for piece in re.split(r'(?<=[.!?])["”]?\s+|\n+|(?<=[?]")\s', text) if piece]


def rendered(content: str | list[dict[str, str]]) -> str:
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


def stream(what: str, split: Any) -> Iterator[str]:
    if what == "documents":
        yield from documents(split, 120_000)
    elif what == "conversations":
        yield from (json.dumps(talk, ensure_ascii=False) for talk in conversations(split, 1_000))
    else:
        for q in questions(split, 2_000):
            yield json.dumps([q.kind, q.prompt, q.answer, q.conversation], ensure_ascii=False)


def first_100_kb(what: str, split: Any) -> bytes:
    return "\n\n".join(stream(what, split)).encode()[:100_000]


@pytest.fixture(scope="module")
def texts() -> dict[str, list[str]]:
    return {"train": list(documents("train", 3_000_000)), "val": list(documents("val", 500_000))}


@pytest.fixture(scope="module")
def talks() -> dict[str, list[dict[str, Any]]]:
    return {"train": list(conversations("train", 8_000)), "val": list(conversations("val", 3_000))}


def messages(talks: list[dict[str, Any]], role: str) -> list[str]:
    return [rendered(m["content"]) for talk in talks for m in talk["messages"] if m["role"] == role]


# The same everywhere


@pytest.mark.parametrize(("what", "split"), list(PINS))
def test_the_first_100_kb_of_each_stream_are_pinned(what: str, split: str) -> None:
    data = first_100_kb(what, split)
    assert len(data) == 100_000
    assert hashlib.sha256(data).hexdigest() == PINS[what, split]


def test_the_text_does_not_depend_on_the_hash_seed_of_python() -> None:
    program = (
        "import hashlib; from nanorun.data.sample import documents, world;"
        "print(hashlib.sha256(''.join(documents('train', 50_000)).encode()).hexdigest())"
    )
    found = set()
    for hash_seed in ("1", "2"):
        env = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": os.pathsep.join(sys.path)}
        done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, check=True)
        found.add(done.stdout)
    assert len(found) == 1


@settings(max_examples=25, deadline=None)
@given(
    split=st.sampled_from(SPLITS),
    seed=st.integers(0, 99),
    small=st.integers(1, 20_000),
    more=st.integers(0, 20_000),
)
def test_a_larger_size_begins_with_the_same_documents(split: Any, seed: int, small: int, more: int) -> None:
    short = list(documents(split, small, seed))
    long = list(documents(split, small + more, seed))
    assert long[: len(short)] == short
    sizes = [len(text.encode()) for text in short]
    assert sum(sizes) >= small > sum(sizes[:-1])
    assert all(text.strip() == text != "" for text in short)


def test_seeds_give_different_documents_about_the_same_world() -> None:
    assert list(documents("train", 5_000, seed=1)) != list(documents("train", 5_000, seed=2))
    assert [q.answer for q in questions("val", 50, seed=1)] != [
        q.answer for q in questions("val", 50, seed=2)
    ]


def test_more_conversations_and_questions_begin_with_the_same_ones() -> None:
    assert list(conversations("train", 50)) == list(conversations("train", 200))[:50]
    assert list(questions("val", 50)) == list(questions("val", 200))[:50]


@pytest.mark.parametrize("split", ["test", "", "Train"])
def test_an_unknown_split_is_refused(split: Any) -> None:
    for make in (lambda: documents(split, 10), lambda: conversations(split, 1), lambda: questions(split, 1)):
        with pytest.raises(ValueError, match="'train' and 'val'"):
            next(make())
    with pytest.raises(ValueError, match="kind"):
        next(questions("val", 1, kind="riddle"))  # type: ignore[arg-type]


def test_generation_reaches_three_megabytes_per_second() -> None:
    next(documents("train", 1))  # the tables are made once
    start = time.process_time()
    written = sum(len(text) for text in documents("train", 2_000_000, seed=5))
    assert written / (time.process_time() - start) > 3e6


def test_documents_fit_a_small_context(texts: dict[str, list[str]]) -> None:
    for split in SPLITS:
        sizes = sorted(len(text.encode()) for text in texts[split])
        assert sizes[-1] <= 700
        assert sizes[len(sizes) // 20] >= 100
        assert 200 <= sum(sizes) / len(sizes) <= 400


# The world


def test_the_world_is_complete_and_refers_only_to_itself() -> None:
    assert len(NAMES) == len(world.ISLANDS) + len(world.PLACES) + len(world.PEOPLE) + len(world.ANIMALS)
    assert 300 <= len(world.FACTS) <= 450
    assert len(ANSWERS) == len(world.FACTS)
    assert {place.island for place in world.PLACES} == {island.name for island in world.ISLANDS}
    assert {person.home for person in world.PEOPLE} == {place.name for place in world.PLACES}
    keepers = [animal.keeper for animal in world.ANIMALS]
    assert len(set(keepers)) == len(keepers)
    assert set(keepers) <= {person.name for person in world.PEOPLE}
    assert {fact.relation for fact in world.FACTS} == set(PHRASINGS)


def test_every_relation_has_enough_phrasings_and_keeps_some_for_validation() -> None:
    for relation, phrasing in PHRASINGS.items():
        assert len(set(phrasing["said"])) >= 6, relation
        assert len(set(phrasing["asked"])) >= 4, relation
        assert len(set(phrasing["said_val"])) >= 2, relation
        assert len(set(phrasing["asked_val"])) >= 2, relation
        assert not set(phrasing["said"]) & set(phrasing["said_val"]), relation
        assert not set(phrasing["asked"]) & set(phrasing["asked_val"]), relation
        assert all(
            "{s}" in question or "{p}" in question for question in phrasing["asked"] + phrasing["asked_val"]
        )


def fill(template: str, subject: str, answer: str) -> str:
    return capital(template.format_map({"s": subject, "p": f"{subject}'s", "a": answer, "an": an(answer)}))


def test_every_fact_is_taught_in_five_phrasings(texts: dict[str, list[str]]) -> None:
    """Sentences that name the subject, alone or inside a longer one; those with a pronoun come on top."""
    naming: dict[str, list[str]] = {name: [] for name in NAMES}
    for text in texts["train"]:
        for sentence in sentences(text):
            for name in set(re.findall(r"\w+", sentence)) & naming.keys():
                naming[name].append(sentence)
    for fact in world.FACTS:
        told = "\n".join(naming[fact.subject])
        ways = {
            fill(template, fact.subject, fact.answer)[:-1] for template in PHRASINGS[fact.relation]["said"]
        }
        assert sum(way in told for way in ways) >= 5, fact


# True


def patterns() -> dict[str, re.Pattern[str]]:
    """For each relation one pattern that finds its statements, whatever they say."""
    found = {}
    for relation, phrasing in PHRASINGS.items():
        subjects = "|".join({s for s, r in ANSWERS if r == relation} | set(INSTEAD_OF_A_NAME))
        answers = "|".join(
            re.escape(a) for a in sorted({a for (_, r), a in ANSWERS.items() if r == relation})
        )
        ways = []
        for i, template in enumerate(phrasing["said"] + phrasing["said_val"]):
            way = re.escape(template).replace(r"\{", "{").replace(r"\}", "}")
            for slot, pattern in (
                ("{s}", f"(?P<s{i}>{subjects})"),
                ("{p}", f"(?P<s{i}>{subjects})(?:'s)?"),
                ("{an}", f"an? (?P<a{i}>{answers})"),
                ("{a}", f"(?P<a{i}>{answers})"),
            ):
                way = way.replace(slot, pattern, 1).replace(slot, r"\w+")
            ways.append(way)
        found[relation] = re.compile("|".join(ways))
    return found


@pytest.mark.parametrize("split", SPLITS)
def test_statements_say_what_the_table_says(split: Any) -> None:
    found = patterns()
    stated = set()
    for text in islice(entries(split, RandomStream("test", split)), 1_500):
        subject = ""
        for sentence in sentences(text):
            for relation, pattern in found.items():
                match = pattern.fullmatch(capital(OPENER.sub("", sentence)))
                if match is None:
                    continue
                said = {key[0]: value for key, value in match.groupdict().items() if value}
                if said["s"] in INSTEAD_OF_A_NAME:
                    if (subject, relation) not in ANSWERS:
                        continue  # "He is a ..." fits a trade and a kind
                else:
                    subject = said["s"]
                assert ANSWERS[subject, relation] == said["a"], text
                stated.add((subject, relation))
    assert len(stated) > (0.95 if split == "train" else 0.5) * len(ANSWERS)


def test_the_check_of_statements_detects_a_false_one() -> None:
    match = patterns()["home"].fullmatch("Odo lives in Oddly.")
    assert match is not None
    assert ANSWERS["Odo", "home"] != "Oddly"


@pytest.mark.parametrize("split", SPLITS)
def test_comparisons_lists_and_stories_mention_only_what_belongs_to_their_cast(split: Any) -> None:
    """A dish, trade, landmark, festival, habit or colour in a text is one of somebody in it or near them."""
    values = {
        answer
        for (_, relation), answer in ANSWERS.items()
        if relation
        in ("dish", "trade", "landmark", "festival", "habit", "scarf", "colour", "doors", "weather")
    }
    value = re.compile(rf"\b({'|'.join(sorted(values, key=len, reverse=True))})\b")
    name = re.compile(rf"\b({'|'.join(NAMES)})\b")
    for write in (comparisons, stories):
        for text in islice(write(split, RandomStream("test", split)), 1_500):
            cast = set(name.findall(text))
            for _ in range(2):  # the hero's village, and its island
                cast |= {
                    a for (s, r), a in ANSWERS.items() if s in cast and r in ("home", "island", "companion")
                }
            allowed = {answer for (subject, _), answer in ANSWERS.items() if subject in cast}
            assert set(value.findall(text)) <= allowed, text
    for text in islice(lists(split, RandomStream("test", split)), 300):
        for sentence in sentences(text):
            shared = {
                ANSWERS[s, r] for s, r in ANSWERS if ANSWERS[s, r] in sentence and s in name.findall(sentence)
            }
            assert shared, sentence


def test_lists_are_complete() -> None:
    for text in islice(lists("train", RandomStream("test")), 300):
        for village, names in re.findall(r"The people of (\S+) are ([^.]+)\.", text):
            assert set(re.split(", | and ", names)) == {
                s for (s, r), a in ANSWERS.items() if (r, a) == ("home", village)
            }


def test_pronouns_agree_with_the_table(texts: dict[str, list[str]]) -> None:
    beings: list[Any] = [*world.PEOPLE, *world.ANIMALS]
    pronouns = {being.name: being.pronoun for being in beings}
    checked = 0
    for text in texts["train"] + texts["val"]:
        for name, things, said in re.findall(r"(\w+) has \d+ (\w+) and .*?How many \2 does (\w+) have", text):
            assert pronouns[name] == said, (text, things)
            checked += 1
    assert checked > 50


# Sums


OPERATIONS = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
    "/": lambda a, b: a / b,
}
WRITTEN = re.compile(r"(\d+) ([-+*/]) (\d+)(?: = (\d+))?")


def test_every_sum_is_right(texts: dict[str, list[str]], talks: dict[str, list[dict[str, Any]]]) -> None:
    for split in SPLITS:
        checked = 0
        for text in texts[split] + messages(talks[split], "assistant"):
            for a, sign, b, result in WRITTEN.findall(text):
                if result:
                    assert OPERATIONS[sign](int(a), int(b)) == int(result), text
                    checked += 1
        assert checked > 500


def test_sums_in_words_are_right(texts: dict[str, list[str]]) -> None:
    numbers = {in_words(n): n for n in range(1_000)}
    signs = {"plus": "+", "minus": "-", "times": "*", "divided by": "/"}
    checked = 0
    for text in texts["train"] + texts["val"]:
        for a, verb, b, c in re.findall(
            r"([A-Za-z-]+(?: hundred(?: and [a-z-]+)?)?) (plus|minus|times|divided by) ([a-z-]+) (?:is|makes) "
            r"([a-z-]+(?: hundred(?: and [a-z-]+)?)?)",
            text,
        ):
            assert OPERATIONS[signs[verb]](numbers[a.lower()], numbers[b]) == numbers[c], text
            checked += 1
    assert checked > 500


def test_number_words() -> None:
    assert [in_words(n) for n in (0, 12, 20, 42, 100, 306)] == [
        "zero",
        "twelve",
        "twenty",
        "forty-two",
        "one hundred",
        "three hundred and six",
    ]


def test_training_and_validation_problems_differ(
    texts: dict[str, list[str]], talks: dict[str, list[dict[str, Any]]]
) -> None:
    posed: dict[str, set[tuple[str, int, int]]] = {}
    for split in SPLITS:
        found = set()
        for text in texts[split] + messages(talks[split], "assistant"):
            for a, sign, b, _ in WRITTEN.findall(text):
                one, other = int(a), int(b)
                found.add((sign, min(one, other), max(one, other)) if sign in "+*" else (sign, one, other))
        posed[split] = found
    # What the assistant says of itself names 5 + 6, in both.
    assert posed["train"] & posed["val"] <= {("+", 5, 6)}
    assert ("+", 12, 30) not in posed["train"]
    assert len(posed["val"]) > 300


@pytest.mark.parametrize("split", SPLITS)
def test_long_numbers_are_asked_for_and_copied_whole(split: Any) -> None:
    for kind in ("large_sum", "long_result"):
        drawn = list(questions(split, 500, kind=kind))  # type: ignore[arg-type]
        assert len({q.prompt for q in drawn}) > 450
        for q in drawn:
            *_, call, output, told = q.conversation["messages"][1]["content"]
            a, b = map(int, re.findall(r"\d+", q.prompt))
            assert max(a, b) >= 100 if kind == "large_sum" else int(q.answer) >= 100 > max(a, b)
            assert re.findall(r"\d+", call["text"]) == [str(a), str(b)]
            assert output["text"] == q.answer == re.findall(r"\d+", told["text"])[-1]


def test_twelve_plus_thirty_is_asked_in_validation_only() -> None:
    asked = {q.prompt: q.answer for q in questions("val", 30_000, kind="sum")}
    assert asked["What is 12 + 30?"] == "42"
    assert not any(
        re.search(r"\b(12 \+ 30|30 \+ 12)\b", q.prompt) for q in questions("train", 30_000, kind="sum")
    )


# Letters


def test_every_spelling_is_right(texts: dict[str, list[str]], talks: dict[str, list[dict[str, Any]]]) -> None:
    checked = 0
    for split in SPLITS:
        turns = [" ".join(rendered(m["content"]) for m in talk["messages"]) for talk in talks[split]]
        for text in texts[split] + turns:
            for run in re.findall(r"\b\w(?:-\w)+\b", text):
                assert re.search(rf"\b{run.replace('-', '')}\b", text), text
                checked += 1
    assert checked > 2_000


def test_letters_are_counted_right(texts: dict[str, list[str]]) -> None:
    told = re.compile(
        r"(?:[Ii]n (\w+)(?:, that is \S+,)? the|(\w(?:-\w)+)\. (?:The answer is \d+, because t|T)he)"
        r" letter (\w) comes (once|\d+ times)"
    )
    answer = re.compile(r"[Tt]he answer is (\d+)[^\d.]* comes (once|\d+)")
    checked = 0
    for text in texts["train"] + texts["val"]:
        found = told.findall(text)
        assert len(found) == len(re.findall(r"\bletter \w comes\b", text)), text
        for word, run, letter, times in found:
            count = (word or run.replace("-", "")).count(letter)
            assert times == ("once" if count == 1 else f"{count} times"), text
            checked += 1
        for n, times in answer.findall(text):
            assert times == ("once" if n == "1" else n), text
        for word, letter, n in re.findall(r"'([\w-]+)'\.count\('(\w)'\) is (\d+)", text):
            assert word.count(letter) == int(n), text
    assert checked > 1_000


def test_echoes_repeat_what_was_called(texts: dict[str, list[str]]) -> None:
    echo = re.compile(
        r"calls ([^.,']+), and the watch [^:]+: ([^.]+)\.|'([^']+)\?' asks the ferry\. '([^']+)!'"
        r"|sends ([^.]+)\. The next harbour passes it on: ([^.]+)\."
    )
    found = [
        [part for part in match if part] for split in SPLITS for match in echo.findall(" ".join(texts[split]))
    ]
    assert len(found) > 500
    assert all(called == answered for called, answered in found)


def test_one_letter_is_also_counted_with_a_digit(texts: dict[str, list[str]]) -> None:
    everything = " ".join(texts["train"])
    assert "1 time " not in everything
    assert "1 time." not in everything
    assert len(re.findall(r"\.count\('\w'\) is 1\b", everything)) > 50
    assert len(re.findall(r"The answer is 1, because the letter \w comes once\.", everything)) > 50


def spelled_in(text: str) -> list[str]:
    return [run.replace("-", "") for run in re.findall(r"\b\w(?:-\w)+\b", text)]


def test_training_spells_every_word_that_validation_asks_for(
    texts: dict[str, list[str]], talks: dict[str, list[dict[str, Any]]]
) -> None:
    assert len(words()) >= 400
    assert set(words()) <= set(spelled_in(" ".join(texts["train"])))
    assert set(words()) <= set(spelled_in(" ".join(messages(talks["train"], "assistant"))))
    asked = {q.answer.replace("-", "") for q in questions("val", 5_000, kind="spelling")}
    assert asked == set(words())
    in_val = spelled_in(" ".join(messages(talks["val"], "assistant")))
    assert len(in_val) > 300
    assert set(in_val) <= set(words())


def test_validation_documents_spell_some_words_that_training_never_spells(
    texts: dict[str, list[str]], talks: dict[str, list[dict[str, Any]]]
) -> None:
    train = set(spelled_in(" ".join(texts["train"] + messages(talks["train"], "assistant"))))
    made_up = set(spelled_in(" ".join(texts["val"]))) - set(words())
    assert len(made_up) > 300
    assert not made_up & train


def test_training_never_has_the_unseen_words(
    texts: dict[str, list[str]], talks: dict[str, list[dict[str, Any]]]
) -> None:
    """Neither spelled nor in any other sentence, capital letters or not."""
    train = " ".join(
        texts["train"] + messages(talks["train"], "user") + messages(talks["train"], "assistant")
    )
    made_up = {q.answer.replace("-", "") for q in questions("train", 4_000, kind="new_word")}
    assert len(made_up) > 1_000
    assert not set(UNSEEN) & (set(re.findall(r"\w+", train.lower())) | made_up | set(spelled_in(train)))
    asked = [q.answer.replace("-", "") for q in questions("val", len(UNSEEN), kind="new_word")]
    assert sorted(asked) == sorted(UNSEEN)


def test_each_pair_of_words_occurs_in_one_split_only() -> None:
    together = {
        split: {
            tuple(sorted(pair))
            for text in islice(spelling(split, RandomStream("test", split)), 4_000)
            for pair in pairwise(spelled_in(text))
        }
        for split in SPLITS
    }
    assert len(together["val"]) > 5_000
    assert not together["train"] & together["val"]


def test_each_letter_of_a_word_is_counted_in_one_split_only() -> None:
    counted = {}
    for split in SPLITS:
        prompts = [q.prompt for q in questions(split, 10_000, kind="count")]
        tasks = [re.search(r"(?:letter |does |many |is |find )(\w)\b.* (\w+)[?.]", p) for p in prompts]
        assert all(tasks)
        counted[split] = {task.groups() for task in tasks if task}
    assert not counted["train"] & counted["val"]
    assert {word for _, word in counted["val"]} <= set(COMMON)
    assert len(counted["val"]) > 500


# The isles as a whole


@pytest.mark.parametrize("split", SPLITS)
def test_questions_about_the_isles_are_answered_from_the_tables(split: Any) -> None:
    told = {asked: topic for asked, topic in askings(split)}
    assert len(told) == len(askings(split)) >= 80
    for asked, topic in told.items():
        names = re.split(", | and ", topic.answer)
        assert all(name in reply for name in names for reply in topic.replies), asked
        for relation, pattern in (
            ("home", r"\b(?:lives?|people) (?:in|of)(?: the village of)? (\w+)[?.]"),
            ("island", r"illages.* (\w+)[?.]"),
            ("direction", r"island (?:lies )?(?:is )?in the (\w+)(?: called)?[?.]"),
        ):
            match = re.search(pattern, asked)
            if match and match[1] in {answer for (_, r), answer in ANSWERS.items() if r == relation}:
                assert set(names) == {s for (s, r), a in ANSWERS.items() if (r, a) == (relation, match[1])}
                break
    numbers = {"islands": "five", "villages": "twenty", "people": "forty", "animals": "twenty-five"}
    assert all(
        told[f"How many {what} are there?"].answer == n for what, n in numbers.items() if split == "train"
    )


def test_training_asks_about_the_isles_in_other_words_than_validation(
    talks: dict[str, list[dict[str, Any]]],
) -> None:
    asked = messages(talks["train"], "user")
    val = {question for question, _ in askings("val")}
    assert "What are the Lantern Isles?" in asked
    assert not val & set(asked)
    assert len({question for question, _ in askings("train")} & set(asked)) > 100


@pytest.mark.parametrize("split", SPLITS)
def test_guides_count_what_the_tables_hold(split: Any) -> None:
    counts = {"islands": 5, "villages": 20, "people": 40, "animals": 25}
    found = set()
    for text in islice(guides(split, RandomStream("test", split)), 200):
        for n, what in re.findall(r"\b([a-z-]+) (islands|villages|people|animals)\b", text.lower()):
            if n not in ("the", "five" if what == "animals" else ""):
                assert n == in_words(counts[what]), text
                found.add(what)
    assert found == set(counts)


# Validation is fair and unseen


def test_no_validation_sentence_about_the_world_occurs_in_training(texts: dict[str, list[str]]) -> None:
    """Every sentence that names someone or some place. Sentences that state no fact ("Then the bell rang.",
    steps of a sum) are shared on purpose, and so are headings, which are a bare name."""
    name = re.compile(rf"\b({'|'.join(NAMES)})\b")
    train = {sentence for text in texts["train"] for sentence in sentences(text)}
    val = {s for text in texts["val"] for s in sentences(text) if name.search(s) and s not in NAMES}
    asking = {s for s in val if re.fullmatch(rf"(asked )?({'|'.join(NAMES)}) (asked|said).*|asked \w+\.", s)}
    assert len(val) > 1_500
    assert not (val - asking) & train


def test_no_validation_question_occurs_in_training(talks: dict[str, list[dict[str, Any]]]) -> None:
    train = set(messages(talks["train"], "user")) | {q.prompt for q in questions("train", 30_000)}
    val = set(messages(talks["val"], "user")) | {q.prompt for q in questions("val", 10_000)}
    assert len(val) > 2_000
    assert not train & val


def test_every_validation_question_about_a_fact_is_in_the_table_and_names_its_subject() -> None:
    asked = set()
    for q in questions("val", 2 * len(ANSWERS), kind="fact"):
        subject = next(name for name in NAMES if re.search(rf"\b{name}\b", q.prompt))
        assert q.answer in {fact.answer for fact in world.FACTS_ABOUT[subject]}
        asked.add((subject, q.answer))
    assert len(asked) >= 0.99 * len({(s, a) for (s, _), a in ANSWERS.items()})


# Questions and the judge


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("kind", KINDS)
def test_the_reference_reply_is_graded_right_and_another_one_wrong(split: Any, kind: Any) -> None:
    drawn = list(questions(split, 400, kind=kind))
    assert {q.kind for q in drawn} == {kind}
    for q in drawn:
        asked, reply = q.conversation["messages"]
        assert asked == {"role": "user", "content": q.prompt}
        assert is_correct(q, rendered(reply["content"])), q
        assert is_correct(q, q.answer)
        assert not is_correct(q, "I do not know.")
        assert not is_correct(q, "")
    wrong = [
        (q, other)
        for q, other in pairwise(drawn)
        if q.answer not in other.answer and is_correct(q, f"It is {other.answer}.")
    ]
    assert not wrong


def test_all_kinds_are_mixed_by_default() -> None:
    assert {q.kind for q in questions("val", 100)} == set(KINDS)


def ask(kind: Any, prompt: str, answer: str) -> Question:
    return Question(kind, prompt, answer, {"messages": []})


@pytest.mark.parametrize(
    ("question", "reply", "right"),
    [
        (ask("fact", "Where does Odo live?", "Candlebay"), "odo lives in CANDLEBAY!", True),
        (ask("fact", "Where does Odo live?", "Candlebay"), "Odo lives in Candlebays.", False),
        (ask("fact", "What colour is Odo's scarf?", "red"), "Freddy hundred scarred", False),
        (ask("fact", "What is the dish of Oddly?", "plum cake"), "It is plum\n cake.", True),
        (ask("fact", "What is the dish of Oddly?", "plum cake"), "cake plum", False),
        (ask("fact", "Which village?", "Bréa"), "In Bre\u0301a.", True),
        (ask("fact", "Who keeps Biscuit?", "Odo"), "Biscuit is Odo's goat.", True),
        (ask("sum", "What is 6 + 6?", "12"), "120", False),
        (ask("sum", "What is 6 + 6?", "12"), "It is 12.", True),
        (ask("sum", "What is 6 + 6?", "12"), "12.5 or 1.12 or -12", False),
        (ask("sum", "What is 6 + 6?", "12"), "6+6=12", True),
        (ask("sum", "What is 30 - 18?", "12"), "30-18=12", True),
        (ask("sum", "What is 30 - 18?", "12"), "30-18 is -12", False),
        (ask("sum", "What is 600 + 634?", "1234"), "That makes 1,234.", True),
        (ask("sum", "What is 20 - 10?", "10"), "20 - 10 = 30.", False),
        (ask("sum", "What is 20 - 10?", "10"), "20 - 10 = 10.", True),
        (ask("sum", "What is 12 + 30?", "42"), "42 is what 12 + 30 makes.", True),
        (ask("count", "How many r in heron?", "1"), "The letter r comes 1 time in heron.", True),
        (ask("count", "How many r in heron?", "1"), "11 times", False),
        (ask("count", "How many r in heron?", "1"), "The letter r comes once in heron.", True),
        (ask("count", "How many r in berry?", "2"), "Twice.", True),
        (ask("count", "How many r in berry?", "2"), "The letter r comes once.", False),
        (ask("sum", "What is 3 - 2?", "1"), "Once I knew that.", False),
        (ask("world", "Who lives in Oddly?", "Bram and Nettie"), "Nettie and Bram live there.", True),
        (ask("world", "Who lives in Oddly?", "Bram and Nettie"), "Bram lives there.", False),
        (ask("spelling", "How do you spell heron?", "h-e-r-o-n"), "H-E-R-O-N", True),
        (ask("spelling", "How do you spell heron?", "h-e-r-o-n"), "heron is h, e, r, o, n.", True),
        (ask("spelling", "How do you spell heron?", "h-e-r-o-n"), "h e r o n", True),
        (ask("spelling", "How do you spell heron?", "h-e-r-o-n"), "s-h-e-r-o-n", False),
        (ask("spelling", "How do you spell heron?", "h-e-r-o-n"), "h-e-r-o-n-s", False),
        (ask("spelling", "How do you spell heron?", "h-e-r-o-n"), "heron", False),
    ],
)
def test_grading_is_strict_about_the_answer_and_lenient_about_the_rest(
    question: Question, reply: str, right: bool
) -> None:
    assert is_correct(question, reply) is right


@pytest.mark.parametrize(
    ("reply", "calls", "right"),
    [
        ("The answer is 2.", ["'l-i-l-y'.count('l')"], True),
        ("The answer is 2.", ["'lily'.count('l')"], True),
        ("The answer is 2.", ["'luly'.count('l')"], False),
        ("The answer is 2.", ["'l-u-l-y'.count('l')"], False),
        ("The answer is 1.", ["'l-i-l-y'.count('l')"], False),
        ("Letter by letter: L-i-l-y. The letter l comes 2 times.", [], True),
        ("Letter by letter: l-u-l-y. The letter l comes 2 times.", [], False),
        ("Twice.", [], True),
    ],
)
def test_a_count_in_a_misspelled_word_is_wrong(reply: str, calls: list[str], right: bool) -> None:
    question = Question("count", "How many l in lily?", "2", {"messages": []}, "lily")
    assert is_correct(question, reply, calls) is right


@given(a=st.integers(1, 99), b=st.integers(1, 99), said=st.integers(0, 9_999))
def test_a_number_is_right_only_if_it_is_the_number(a: int, b: int, said: int) -> None:
    question = ask("sum", f"What is {a} + {b}?", str(a + b))
    assert is_correct(question, f"{a} + {b} = {said}.") == (said == a + b)
    assert is_correct(question, f"The answer is {said}") == (said == a + b)


# Conversations


def evaluate(node: ast.AST) -> Any:
    """Arithmetic on whole numbers and methods of strings: all that a calculator needs to know."""
    if isinstance(node, ast.Expression):
        return evaluate(node.body)
    if isinstance(node, ast.Constant):
        assert isinstance(node.value, int | str)
        return node.value
    if isinstance(node, ast.BinOp):
        left, right = evaluate(node.left), evaluate(node.right)
        known = {ast.Add: "__add__", ast.Sub: "__sub__", ast.Mult: "__mul__", ast.FloorDiv: "__floordiv__"}
        return getattr(left, known[type(node.op)])(right)
    assert isinstance(node, ast.Call)
    assert isinstance(node.func, ast.Attribute)
    text = evaluate(node.func.value)
    assert isinstance(text, str)
    assert node.func.attr == "count"
    return text.count(*(evaluate(arg) for arg in node.args))


@pytest.mark.parametrize("split", SPLITS)
def test_tool_outputs_in_conversations_are_those_of_the_calculator(
    split: Any, talks: dict[str, list[dict[str, Any]]]
) -> None:
    kinds = set()
    for talk in talks[split]:
        for message in talk["messages"]:
            if isinstance(message["content"], str):
                continue
            parts = message["content"]
            assert message["role"] == "assistant"
            assert [part["type"] for part in parts][-3:] == ["python", "output", "text"]
            code, output, told = (part["text"] for part in parts[-3:])
            assert str(evaluate(ast.parse(code, mode="eval"))) == output
            assert re.search(rf"\b{output}\b", told)
            kinds.add(re.sub(r"'[^']*'|\w", "", code))
    assert {"+", "-", "*", "//", ".()"} <= kinds


@pytest.mark.parametrize("split", SPLITS)
def test_conversations_are_well_formed(split: Any, talks: dict[str, list[dict[str, Any]]]) -> None:
    turns = set()
    for talk in talks[split]:
        roles = [message["role"] for message in talk["messages"]]
        if roles[0] == "system":
            roles = roles[1:]
        assert roles == ["user", "assistant"] * (len(roles) // 2) != []
        turns.add(len(roles) // 2)
        for message in talk["messages"]:
            assert rendered(message["content"]).strip()
        assert len(json.dumps(talk)) < 2_000
    assert {1, 2, 3} <= turns
    assert any(talk["messages"][0]["role"] == "system" for talk in talks[split])


def test_the_assistant_says_who_it_is_and_what_it_does_not_know(
    talks: dict[str, list[dict[str, Any]]],
) -> None:
    said = messages(talks["val"], "assistant")
    assert any("nanorun model" in reply for reply in said)
    unheard = {name for reply in said for name in re.findall(r"never heard of (\w+)", reply)}
    assert len(unheard) > 20
    assert not unheard & set(NAMES)
    assert stranger("train", RandomStream(1)) not in NAMES


@pytest.mark.parametrize("split", SPLITS)
def test_a_greeting_gets_a_matching_reply(split: Any, talks: dict[str, list[dict[str, Any]]]) -> None:
    replies: dict[str, set[str]] = {}
    for talk in talks[split]:
        for asked, answered in pairwise(talk["messages"]):
            if asked["role"] == "user":
                replies.setdefault(asked["content"], set()).add(rendered(answered["content"]))
    fit = {
        r"how are you": r"\bI am (very )?well\b",
        r"^Good (morning|evening|day|afternoon)!$": r"^Good ",
        r"to meet you": r"to meet you, too",
        r"^(Hello|Hi|Hey)( there|, nanorun)?!$": r"^(Hello|Hi)\b",
        r"goodbye|see you": r"^Goodbye\b",
        r"^(Many t|T)han(ks|k you)( a lot| very much)?[!.]$": r"welcome|pleasure|Any time",
        r"^Are you\b": r"^No, ",
        r"your name": r"name|call me",
    }
    for greeting, reply in fit.items():
        found = [said for said in replies if re.search(greeting, said, re.IGNORECASE)]
        assert found, greeting
        for said in found:
            assert all(re.search(reply, answer) for answer in replies[said]), (said, replies[said])
            if greeting.startswith("^Good"):
                assert all(answer.startswith(said) for answer in replies[said])
    # "I am well" is for those who asked.
    assert all(
        "how are you" in said.lower() for said in replies if any("I am well" in r for r in replies[said])
    )


def test_each_polite_phrase_belongs_to_one_kind_and_one_split() -> None:
    kinds = (*GREETINGS, *PARTINGS, *ABOUT_ITSELF, *ABOUT_ITS_WORK)
    said = [phrase for kind in kinds for phrase in kind["train"] + kind["val"]]
    assert len(set(said)) == len(said)
    assert all(kind["train"] and kind["val"] and len(kind["replies"]) >= 2 for kind in kinds)


@pytest.mark.parametrize("split", SPLITS)
def test_conversations_seldom_repeat(split: Any) -> None:
    held = [talk["messages"] for talk in conversations(split, 4_000)]
    longer = [json.dumps(talk) for talk in held if sum(m["role"] == "user" for m in talk) > 1]
    assert len(longer) > 1_000
    assert len(set(longer)) == len(longer)
    again = [talk for talk, n in Counter(map(json.dumps, held)).items() for _ in range(n - 1)]
    small_talk = ("nanorun", "Ask me", "I can tell", "I will try", "not know", "Nobody in the Lantern Isles")
    asked = {question for question, _ in askings(split)}
    for talk in again:
        assert any(words in talk for words in small_talk) or json.loads(talk)[-2]["content"] in asked, talk
    assert len(again) < 0.08 * len(held)


# Good English


@pytest.mark.parametrize("split", SPLITS)
def test_prose_has_no_mistakes(split: Any) -> None:
    slips = re.compile(
        r"\ba [aeiou]\w|\ban (?!hour)[^aeiou]|\b(\w+) \1\b|  | [,.;:?!]|[.!?] [a-z]|\n[a-z]|^[a-z]|\.\.|,\.|[{}]"
    )
    for write in (entries, comparisons, lists, stories):
        for text in islice(write(split, RandomStream("prose", split)), 3_000):
            assert not slips.search(text), text


@pytest.mark.parametrize("split", SPLITS)
def test_a_lesson_begins_with_its_first_question_and_ends_with_its_last(split: Any) -> None:
    begun = set()
    for text in islice(lessons(split, RandomStream("test", split)), 1_000):
        first, second, third = re.findall(r'^.*\?".*$', text, re.MULTILINE)
        assert not re.search(
            r"next question|last question|Last of all|one more|Then s?he|Very good", first
        ), text
        assert not re.search(
            r"first question|last question|Last of all|one more|Let us begin|began with", second
        ), text
        assert not re.search(r"first question|next question|Let us begin|began with", third), text
        begun.add(re.sub(r'"[A-Z][^"]*\?".*', "", first))
    assert len(begun) >= 6


def unclear(text: str) -> list[tuple[str, str]]:
    """Pairs of sentences where the second begins with a pronoun that the first leaves in doubt."""
    aside = re.compile(f"{OPENER.pattern}|^It is well known that ")
    found = []
    subject = ""
    for before, sentence in pairwise(["", *(capital(aside.sub("", s)) for s in sentences(text))]):
        named = [name for name in re.findall(r"\w+", sentence) if name in NAMES]
        word = re.match(r"(He|She|It|His|Her|Its)\b", sentence)
        if word is None:
            subject = named[0] if named else subject
            continue
        names = [name for name in re.findall(r"\w+", before) if name in NAMES]
        if word[1] in ("It", "Its"):
            fine = re.match(rf"(It|The village|The island|{subject})(?!'s)\b(?! and)", before) is not None
        else:
            # The subject is named first, or was meant by a pronoun, and nobody else is in it.
            beings = [name for name in names if isinstance(world.ENTITIES[name], Person | Animal)]
            fine = (names[:1] == [subject] or re.match("(He|She|His|Her)\\b", before) is not None) and set(
                beings
            ) <= {subject}
        if not fine:
            found.append((before, sentence))
    return found


def test_the_check_of_pronouns_detects_an_ambiguous_one() -> None:
    assert unclear("The dish of Pennywell is onion soup. It has a wishing well that every child can draw.")
    assert unclear("Pennywell's dish is onion soup, and there is always enough. Its doors are red.")
    assert unclear("Odo keeps Biscuit. They say that he lives in Candlebay.")
    assert unclear("The people of Candlebay all know Odo. He is a baker.")
    assert not unclear("Pennywell is famous for its onion soup. It has a wishing well. Its doors are red.")
    assert not unclear("Odo's scarf is red. He lives in Candlebay. His favourite food is onion soup.")


@pytest.mark.parametrize("split", SPLITS)
def test_pronouns_are_unambiguous(split: Any, talks: dict[str, list[dict[str, Any]]]) -> None:
    told = [
        rendered(answered["content"])
        for talk in talks[split]
        for asked, answered in pairwise(talk["messages"])
        if re.search(r"(know about|[Tt]ell me (something )?about) (?!yourself)", rendered(asked["content"]))
    ]
    assert len(told) > 30
    pronouns = 0
    for text in [*told, *islice(entries(split, RandomStream("test", split)), 4_000)]:
        assert not unclear(text), text
        pronouns += len(re.findall(r"(?:\. |that )(?:He|She|It|His|Her|Its|he|she|it|his|her|its)\b", text))
    assert pronouns > 1_500


@pytest.mark.parametrize("split", SPLITS)
def test_a_second_question_uses_a_pronoun_only_where_unambiguous(
    split: Any, talks: dict[str, list[dict[str, Any]]]
) -> None:
    checked = 0
    for talk in talks[split]:
        for answered, asked in pairwise(talk["messages"]):
            if asked["role"] != "user" or not re.search(r" (he|she|it|his|her|its)\b", asked["content"]):
                continue
            if not re.match(r"And|Thank|Also|Good,|I see", asked["content"]):
                continue
            before = rendered(answered["content"])
            assert not re.match(r"\w+'s", before) or not re.search(r" its?\b", asked["content"]), talk
            names = [name for name in re.findall(r"\w+", before) if name in NAMES]
            beings = [name for name in names if isinstance(world.ENTITIES[name], Person | Animal)]
            assert len(set(beings)) <= 1, talk
            checked += 1
    assert checked > 100


@pytest.mark.parametrize("split", SPLITS)
def test_no_document_uses_an_opener_twice(split: Any, texts: dict[str, list[str]]) -> None:
    used = 0
    for text in texts[split]:
        openers = [match[0] for sentence in sentences(text) if (match := OPENER.match(sentence))]
        assert len(set(openers)) == len(openers), text
        used += len(openers)
    assert used > 500


def test_nothing_looks_like_a_special_token(
    texts: dict[str, list[str]], talks: dict[str, list[dict[str, Any]]]
) -> None:
    everything = "".join(texts["train"] + texts["val"]) + json.dumps(talks, ensure_ascii=False)
    assert not re.search(r"<\||\|>|<s>|</s>|\[INST\]", everything)
    unusual = set(everything) - set(map(chr, range(32, 127))) - {"\n"}
    assert unusual == {"é", "“", "”"}
