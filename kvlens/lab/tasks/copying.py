"""Gathering and copying, for any tokenizer: the entries of a scattered list in order, and one passage word for word.
Ours, after the demo model's tasks `list` and `note`."""

from __future__ import annotations

import random

from kvlens.tasks import words
from kvlens.tasks.generated import SEPARATOR, Generated
from kvlens.tasks.layout import Content

ENTRIES = 8
ORDINALS = "first second third fourth fifth sixth seventh eighth".split()  # noqa: SIM905
PASSAGE = 24
"""words"""


class Items(Generated):
    """Entries of a list, scattered; the first stands at the wanted depth, the rest anywhere. All are asked for, in
    order."""

    name, title = "list_items", "list"
    summary = "eight scattered entries of a list, all asked for in order"
    metric = "share of the entries that the output names, each behind the one before it (ours)"
    new_tokens = 120

    def content(self, rng: random.Random, depth: float) -> tuple[Content, list[str]]:
        entries = words.distinct(rng, ENTRIES)
        request = [
            f"The {ordinal} entry of the list is {entry}." for ordinal, entry in zip(ORDINALS, entries, strict=True)
        ]
        tail = f"\n\nQuestion: Name all {ENTRIES} entries of the list in order. Answer:"
        return Content(
            request, [depth] + [None] * (ENTRIES - 1), (), tail=tail, opening="The entries of the list in order are"
        ), entries

    def score(self, answer: str, output: str) -> float:
        target, results, position = answer.strip().split(SEPARATOR), 0, 0
        for entry in target:
            place = output.lower().find(entry.lower(), position)
            if place >= 0:
                results, position = results + 1, place + len(entry)
        return results / len(target)


class Copy(Generated):
    """A passage of made-up order at the wanted depth, asked for by its number; two others are not asked for."""

    name, title = "copy_text", "copy"
    summary = "one passage of 24 words, to be repeated word for word"
    metric = "share of the passage's words that the output repeats before its first mistake (ours)"
    new_tokens = 96

    def content(self, rng: random.Random, depth: float) -> tuple[Content, list[str]]:
        numbers = rng.sample(range(100, 1000), 3)
        texts = [" ".join(rng.choice(words.NOUNS) for _ in range(PASSAGE)) for _ in numbers]
        sentences = [f"Passage {number} reads: {text}." for number, text in zip(numbers, texts, strict=True)]
        tail = f"\n\nQuestion: What does passage {numbers[0]} read? Answer:"
        return Content(sentences[:1], [depth], sentences[1:], tail=tail, opening=f"Passage {numbers[0]} reads:"), [
            texts[0]
        ]

    def score(self, answer: str, output: str) -> float:
        target, source = answer.split(), output.replace(".", " ").split()
        right = next(
            (index for index, (a, b) in enumerate(zip(target, source, strict=False)) if a != b),
            min(len(target), len(source)),
        )
        return right / len(target)


ITEMS, COPY = Items(), Copy()
