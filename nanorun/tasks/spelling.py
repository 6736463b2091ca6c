"""The spelling bee: spell a word, or count a letter in it, by hand and by Python.

A tokenizer hides letters, so a model has to learn the letters of its tokens. Every example is a function of its
index alone. One word in eight is held out for the test, so memorizing the training words does not help there.
"""

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from string import ascii_lowercase

from nanorun.data.sample.letters import COMMON
from nanorun.data.sample.questions import Question, is_correct
from nanorun.data.sample.rng import RandomStream, held_out
from nanorun.errors import UserError
from nanorun.tasks.gsm8k import final_number
from nanorun.tasks.task import Conversation, TaskFilesMissing, exchange, find_files, reply_text
from nanorun.text.chat import Part

WORD_FILES = ("words_alpha.txt", "words.txt")
SIZES = {"train": 80_000, "val": 256, "test": 256}
SPELL = (
    "How do you spell {w}?",
    "Spell the word {w}.",
    "Please spell {w}.",
    "Can you spell '{w}' for me?",
    "Spell {w} letter by letter.",
    "Which letters is {w} made of?",
    "how is {w} spelled",
    "What are the letters of the word {w}?",
)
COUNT = (
    "How many {x} are in {w}?",
    "How many times does {x} come in {w}?",
    "How many {x}s are there in the word {w}?",
    "Count the letter {x} in {w}.",
    "How often does the letter {x} appear in {w}?",
    "How many of the letter {x} are in '{w}'?",
    "count the {x} in {w}",
    "Tell me how many times the letter {x} is in the word {w}.",
)


class SpellingBee:
    """`where` is a file with one word per line, or a folder with one; without it, a few hundred common words."""

    name, baseline, letters = "spelling", 0.0, None

    def __init__(self, where: Path, split: str = "test") -> None:
        if split not in SIZES:
            raise UserError(f"The task spelling has no split '{split}': choose {' or '.join(SIZES)}.")
        words: Sequence[str] = COMMON
        with suppress(TaskFilesMissing):
            text = find_files(where, WORD_FILES, "spelling's word")[0].read_text(encoding="utf-8")
            words = [word for line in text.splitlines() if (word := line.strip().lower()).isalpha()]
        self._split = split
        self._words = [w for w in words if len(w) > 1 and held_out("bee", w) == (split != "train")]
        if not self._words:
            raise UserError("The spelling bee needs a file with more words, one per line.")

    def __len__(self) -> int:
        return SIZES[self._split]

    def __getitem__(self, index: int) -> Conversation:
        prompt, reply, _ = self._compose(index)
        return exchange(prompt, reply)

    def reward(self, index: int, reply: Sequence[Part]) -> float:
        prompt, _, answer = self._compose(index)
        if answer.isdigit():
            return float(final_number(reply_text(reply)) == int(answer))
        return float(is_correct(Question("spelling", prompt, answer, {}), reply_text(reply)))

    def _compose(self, index: int) -> tuple[str, list[Part], str]:
        """The question, a reference reply, and the answer."""
        if not 0 <= index < len(self):
            raise IndexError(index)
        rng = RandomStream("bee", self._split, index)
        word = rng.choice(self._words)
        spelled = "-".join(word)
        if rng.random() < 0.5:
            prompt = rng.choice(SPELL).format(w=word)
            return prompt, [{"type": "text", "text": f"The word {word} is spelled {spelled}."}], spelled
        # Mostly a letter of the word; sometimes one that it does not contain.
        letter = rng.choice(word if rng.random() < 0.85 else ascii_lowercase)
        prompt, count = rng.choice(COUNT).format(w=word, x=letter), str(word.count(letter))
        by_hand = f"Letter by letter: {count_aloud(word, letter)}."
        roll = rng.random()
        parts: list[Part] = []
        if roll < 0.7:
            parts.append({"type": "text", "text": by_hand + ("\nPython says " if roll < 0.4 else "")})
        if roll < 0.4 or roll >= 0.7:
            parts.append({"type": "python", "text": f"'{word}'.count('{letter}')"})
            parts.append({"type": "output", "text": count})
        return prompt, [*parts, {"type": "text", "text": f"\n#### {count}"}], count


def count_aloud(word: str, letter: str) -> str:
    """'l, e (1), t, t, e (2), r' for the e in letter."""
    seen, out = 0, []
    for each in word:
        seen += each == letter
        out.append(f"{each} ({seen})" if each == letter else each)
    return ", ".join(out)
