"""One fact in a haystack that is not prose, or that is an identifier, for any tokenizer: RULER's niah_single_1 (noise),
niah_single_3 (identifiers), niah_multikey_2 and niah_multikey_3 (every sentence is a needle) in words of our own.

Which haystack, key and value go together is RULER's (github.com/hsiehjackson/RULER, scripts/synthetic.yaml and
scripts/data/synthetic/niah.py), and so are the five sentences of noise, which it repeats; what a fact says, the placing
at a wanted depth and that sentences stand behind one another instead of one a line are ours. Metric: RULER's
string_match_all.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from kvlens.tasks import texts, words
from kvlens.tasks.generated import Generated
from kvlens.tasks.layout import Content

NOISE = ("The grass is green.", "The sky is blue.", "The sun is yellow.", "Here we go.", "There and back again.")
PROSE, REPEATED, NEEDLES = "prose", "noise", "needles"
"""kinds of haystack"""
WORDS, NUMBER, IDENTIFIER_WORD = "pair", "number", "identifier"
"""kinds of keys and values"""
SHORTEST = 8
"""tokens of a fact at least"""
MOST = 4000
"""other facts of a haystack; they are begun again when they end"""


def shelf(kind: str, key: str) -> str:
    return f"The shelf mark of {'entry' if kind == IDENTIFIER_WORD else 'the'} {key}"


class Shelf(Generated):
    """'The shelf mark of the KEY is VALUE' at the wanted depth. key, value: kinds of words."""

    new_tokens = 64

    def __init__(self, name: str, title: str, summary: str, hay: str, key: str, value: str) -> None:
        self.name, self.title, self.summary = name, title, summary
        self._hay, self._key, self._value = hay, key, value

    def content(self, rng: random.Random, depth: float) -> tuple[Content, list[str]]:
        (key,), (value,) = (words.distinct(rng, 1, kind) for kind in (self._key, self._value))
        where = shelf(self._key, key)
        tail = f"\n\nQuestion: What is t{where[1:]}? Answer:"
        return Content([f"{where} is {value}."], [depth], tail=tail, opening=f"{where} is"), [value]

    def haystack(self, content: Content, length: int, rng: random.Random) -> Sequence[str]:
        if self._hay == PROSE:
            return texts.sentences()
        if self._hay == REPEATED:
            return NOISE
        count = min(MOST, length // SHORTEST + 2)
        request = content.asked[0]
        keys, values = (
            [word for word in words.distinct(rng, count, kind) if word not in request]
            for kind in (self._key, self._value)
        )
        return [f"{shelf(self._key, key)} is {value}." for key, value in zip(keys, values, strict=False)]


NOISY = Shelf("niah_noise", "needle in noise", "one number in five sentences that repeat", REPEATED, WORDS, NUMBER)
IDENTIFIER = Shelf(
    "niah_identifier", "identifier needle", "one identifier hidden in real prose", PROSE, WORDS, IDENTIFIER_WORD
)
AMONG = Shelf(
    "niah_needles", "needle among needles", "one fact of a text that is nothing but such facts", NEEDLES, WORDS, NUMBER
)
IDENTIFIERS = Shelf(
    "niah_needles_identifier",
    "identifiers among identifiers",
    "one pair of a text that is nothing but pairs of identifiers",
    NEEDLES,
    IDENTIFIER_WORD,
    IDENTIFIER_WORD,
)
