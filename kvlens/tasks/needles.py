"""Facts hidden in real prose, for any tokenizer: RULER's families niah_single, niah_multikey, niah_multiquery and
niah_multivalue in words of our own, and a list of pairs in which one is looked up.

Families, counts (four queries, four values), the answer's prefix and the metric follow RULER (github.com/hsiehjackson/
RULER, scripts/synthetic.yaml and scripts/eval/synthetic/constants.py); sentences, names and the placing at a wanted
depth are ours. Looking up a pair is the key-value retrieval of Liu et al. (Lost in the Middle, section 3) with names
and rooms in place of random identifiers, and with prose around it.
"""

from __future__ import annotations

import random

from kvlens.tasks import words
from kvlens.tasks.base import Encode
from kvlens.tasks.generated import Generated
from kvlens.tasks.layout import Content, Ranges

QUERIES = VALUES = 4
OTHERS = 8
"""facts of the same kind that are not asked, where a task has some"""
PAIRS = 16
"""of the list in which one is looked up"""


def fact(key: str, value: str, flag: bool = False) -> str:
    """flag: of several."""
    return f"{'One of the' if flag else 'The'} library card number{'s' if flag else ''} of {key} is {value}."


class Needle(Generated):
    """Facts 'the library card number of KEY is VALUE'; the first asked one stands at the wanted depth, the rest
    anywhere."""

    new_tokens = 64

    def __init__(self, name: str, title: str, summary: str, keys: int, values: int, others: int) -> None:
        self.name, self.title, self.summary = name, title, summary
        self.keys, self.values, self.others = keys, values, others

    def content(self, rng: random.Random, depth: float) -> tuple[Content, list[str]]:
        names = words.people(rng, self.keys + self.others)
        numbers = words.distinct(rng, self.keys * self.values + self.others, "number")
        several = self.values > 1
        request = [
            fact(names[index // self.values], numbers[index], several) for index in range(self.keys * self.values)
        ]
        rest = [fact(*pair) for pair in zip(names[self.keys :], numbers[len(request) :], strict=True)]
        keys = listed(names[: self.keys])
        label = f"{'all the ' if several else 'the '}library card number{'s' if len(request) > 1 else ''} of {keys}"
        are = "are" if len(request) > 1 else "is"
        tail = f"\n\nQuestion: What {are} {label}? Answer:"
        opening = f"The {label.removeprefix('all ').removeprefix('the ')} {are}"
        shares = [depth] + [None] * (len(request) - 1)
        return Content(request, shares, rest, tail=tail, opening=opening), numbers[: len(request)]


class Lookup(Generated):
    """A list of pairs stands at the wanted depth, as one passage; the room of one person is asked for."""

    name, title = "kv_lookup", "key-value lookup"
    summary = f"one of {PAIRS} pairs of a list in the text"
    new_tokens = 32

    def content(self, rng: random.Random, depth: float) -> tuple[Content, list[str]]:
        names, rooms = words.people(rng, PAIRS), rng.sample(range(100, 1000), PAIRS)
        index = rng.randrange(PAIRS)
        pairs = " ".join(f"{entry(name, room)}" for name, room in zip(names, rooms, strict=True))
        tail = f"\n\nQuestion: In which room is {names[index]}? Answer:"
        sentence = f"The rooms of the participants are as follows. {pairs}"
        return Content([sentence], [depth], tail=tail, opening=f"{names[index]} is in room"), [str(rooms[index])]

    def lay(
        self, content: Content, length: int, rng: random.Random, encode: Encode, special: int
    ) -> tuple[str, Ranges]:
        text, ((start, end),) = super().lay(content, length, rng, encode, special)
        first_item = text.index(content.opening, start, end)
        return text, ((first_item, text.index(".", first_item) + 1),)


def entry(name: str, room: int) -> str:
    return f"{name} is in room {room}."


def listed(parts: list[str]) -> str:
    """'a', 'a and b', 'a, b and c'."""
    return " and ".join(part for part in (", ".join(parts[:-1]), parts[-1]) if part)


SINGLE = Needle("niah_single", "single needle", "one number hidden in real prose, asked for at the end", 1, 1, 0)
MULTIKEY = Needle("niah_multikey", "multi-key needle", "one number among eight others of its kind", 1, 1, OTHERS)
MULTIQUERY = Needle(
    "niah_multiquery", "multi-query needle", "four numbers of four people, all asked for", QUERIES, 1, 0
)
MULTIVALUE = Needle("niah_multivalue", "multi-value needle", "four numbers of one person, all asked for", 1, VALUES, 0)
LOOKUP = Lookup()
