"""Needle tasks for any tokenizer: RULER's families niah_single, niah_multikey, niah_multiquery and niah_multivalue in
words of our own.

Families, counts (four queries, four values) and metric follow RULER (github.com/hsiehjackson/RULER,
scripts/synthetic.yaml and scripts/eval/synthetic/constants.py); sentences, word lists and the placing at a wanted depth
are ours.
"""

from __future__ import annotations

import random

from kvlens.tasks import words
from kvlens.tasks.generated import Generated
from kvlens.tasks.layout import Content

QUERIES = VALUES = 4
OTHERS = 8
"""facts of the same kind that are not asked, where a task has some"""


def fact(key: str, value: str) -> str:
    return f"The secret number of the {key} is {value}."


class Needle(Generated):
    """Facts 'the secret number of KEY is VALUE'; the first asked one stands at the wanted depth, the rest anywhere."""

    new_tokens = 64

    def __init__(self, name: str, title: str, summary: str, keys: int, values: int, others: int) -> None:
        self.name, self.title, self.summary = name, title, summary
        self.keys, self.values, self.others = keys, values, others

    def content(self, rng: random.Random, depth: float) -> tuple[Content, list[str]]:
        names = words.distinct(rng, self.keys + self.others)
        numbers = words.distinct(rng, self.keys * self.values + self.others, "number")
        asked = [fact(names[at // self.values], numbers[at]) for at in range(self.keys * self.values)]
        others = [fact(*pair) for pair in zip(names[self.keys :], numbers[len(asked) :], strict=True)]
        keys = " and of ".join(f"the {name}" for name in names[: self.keys])
        plural = "s" if len(asked) > 1 else ""
        tail = f"\nQuestion: What {'are' if plural else 'is'} the secret number{plural} of {keys}? Answer:"
        opening = f"The secret number{plural} of {keys} {'are' if plural else 'is'}"
        shares = [depth] + [None] * (len(asked) - 1)
        return Content(asked, shares, others, tail=tail, opening=opening), numbers[: len(asked)]


SINGLE = Needle("niah_single", "single needle", "one number hidden in filler, asked for at the end", 1, 1, 0)
MULTIKEY = Needle("niah_multikey", "multi-key needle", "one number among others of its kind", 1, 1, OTHERS)
MULTIQUERY = Needle(
    "niah_multiquery", "multi-query needle", "four numbers of four things, all asked for", QUERIES, 1, 0
)
MULTIVALUE = Needle("niah_multivalue", "multi-value needle", "four numbers of one thing, all asked for", 1, VALUES, 0)
