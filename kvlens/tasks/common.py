"""Common words for any tokenizer: RULER's family cwe in words of our own.

RULER's counts: ten common words; below 4,096 tokens each appears 6 times and the others once, from there on 30 times
and 3 times. The list is as long as the prompt allows. Metric: RULER's string_match_all over the ten words. Words are
made up of syllables, so that no model knows them and there are enough of them for any length.
"""

from __future__ import annotations

import random
from bisect import bisect_right

from kvlens.tasks import words
from kvlens.tasks.base import Asked, Encode, check_place
from kvlens.tasks.generated import SEPARATOR, Generated
from kvlens.tasks.layout import Content, Ranges, lengthen

COMMON = 10
SHORT_REPEATS, LONG_REPEATS = (6, 1), (30, 3)
"""how often a common and how often any other word appears"""
LONG = 4096
"""tokens from which on words are repeated more often"""
HEAD, TAIL = "This is a numbered list of words", "\nQuestion: What are the 10 most common words of this list? Answer:"


class CommonWords(Generated):
    """A numbered list of words, ten of which appear more often than all others. They are everywhere, so depth means
    nothing."""

    name, title = "common_words", "common words"
    summary = "the ten most frequent words of a long list"
    new_tokens, placed = 120, False

    def content(self, rng: random.Random, depth: float) -> tuple[Content, list[str]]:
        return Content((), (), (), HEAD + "{pad}.\n", TAIL), words.distinct(rng, COMMON, "word")

    def make(
        self, length: int | None, depth: float | None, seed: int, encode: Encode, special: int = 1, index: int = 0
    ) -> Asked:
        tokens, _ = check_place(self.name, length, 0.5)
        rng = random.Random(f"{self.name}/{seed}")
        often, seldom = SHORT_REPEATS if tokens < LONG else LONG_REPEATS
        pool = words.distinct(rng, COMMON + tokens // seldom, "word")
        common, others = pool[:COMMON], pool[COMMON:]
        order = rng.randrange(2**32)

        def render(count: int, pad: str) -> tuple[str, Ranges]:
            listed = common * often + others[:count] * seldom
            random.Random(order).shuffle(listed)
            return f"{HEAD}{pad}.\n" + " ".join(f"{at}. {word}" for at, word in enumerate(listed, 1)) + TAIL, ()

        def size(text: str) -> int:
            return special + len(encode(text))

        least = size(render(0, "")[0])
        if tokens < least:
            raise ValueError(f"a {self.name} prompt needs at least {least} tokens with this tokenizer, not {tokens}")
        fits = bisect_right(range(1, len(others) + 1), tokens, key=lambda count: size(render(count, "")[0]))
        for count in range(fits, -1, -1):
            made = lengthen(lambda pad, count=count: render(count, pad), tokens, size, rng, encode)  # type: ignore[misc]
            if made is not None:
                break
        assert made is not None
        expected, opening = " " + SEPARATOR.join(common), "The 10 most common words of this list are"
        return Asked(made[0], expected, (), self.name, tokens, None, seed, index, tuple(common), opening=opening)


COMMON_WORDS = CommonWords()
