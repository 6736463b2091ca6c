"""The shape of a phrasing: how one kind of fact is said and asked.

Each relation ("home", "trade" ...) has one: sentences that state it and questions that ask for it, for
training and, other ones, for validation. A validation phrasing is near its training cousins (it shares the
name and the key word, often whole pieces), so a model that understood can follow it, and one that only
memorised sentences cannot copy it.

The slots of a template: `{s}` the subject, `{p}` its possessive (Odo's), `{a}` the answer, `{an}` the answer
with its article, `{t}` a second subject, `{list}` all subjects that share the answer, `{he}` and `{his}`
pronouns. A statement that begins with `{s}` or `{p}` can also begin with the pronoun.
"""

from dataclasses import dataclass

from nanorun.data.sample.chance import Split


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
