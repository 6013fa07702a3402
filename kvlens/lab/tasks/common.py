"""Common words for any tokenizer: RULER's family cwe in words of our own.

RULER's counts: ten common words; below 4,096 tokens each appears 6 times and the others once, from there on 30 times
and 3 times. The list is as long as the prompt allows. Metric: RULER's string_match_all over the ten words. Words are
made up of syllables, so that no model knows them and there are enough of them for any length.
"""

from __future__ import annotations

import random
from bisect import bisect_right

from kvlens.refusal import Refusal
from kvlens.tasks import words
from kvlens.tasks.base import Encode, TaskPrompt, check_place
from kvlens.tasks.generated import SEPARATOR, Generated
from kvlens.tasks.layout import Content

COMMON = 10
SHORT_REPEATS, LONG_REPEATS = (6, 1), (30, 3)
"""how often a common and how often any other word appears"""
LONG = 4096
"""tokens from which on words are repeated more often"""
HEAD = "This is a numbered list of words. Read it, then answer the question about it.\n\n"
TAIL = "\n\nQuestion: What are the 10 most common words of this list? Answer:"


class CommonWords(Generated):
    """A numbered list of words, ten of which appear more often than all others. They are everywhere, so depth means
    nothing."""

    name, title = "common_words", "common words"
    summary = "the ten most frequent words of a long list"
    new_tokens, placed = 120, False

    def content(self, rng: random.Random, depth: float) -> tuple[Content, list[str]]:
        return Content((), (), (), HEAD, TAIL), words.distinct(rng, COMMON, "word")

    def make(
        self, length: int | None, depth: float | None, seed: int, encode: Encode, special: int = 1, index: int = 0
    ) -> TaskPrompt:
        tokens, _ = check_place(self.name, length, 0.5)
        rng = random.Random(f"{self.name}/{seed}")
        often, seldom = SHORT_REPEATS if tokens < LONG else LONG_REPEATS
        pool = words.distinct(rng, COMMON + tokens // seldom, "word")
        common, rest = pool[:COMMON], pool[COMMON:]
        order = rng.randrange(2**32)

        def render(count: int) -> str:
            listed = common * often + rest[:count] * seldom
            random.Random(order).shuffle(listed)
            return HEAD + " ".join(f"{position}. {word}" for position, word in enumerate(listed, 1)) + TAIL

        def size(count: int) -> int:
            return special + len(encode(render(count)))

        least = size(0)
        if tokens < least:
            raise Refusal(
                f"a {self.name} prompt needs at least {least} tokens with this tokenizer, not {tokens}",
                code="too_short",
                needed=least,
                tokens=tokens,
            )
        count = bisect_right(range(1, len(rest) + 1), tokens, key=size)
        while size(count) > tokens:  # another shuffle can be a token longer than the one before it
            count -= 1
        text, expected = render(count), " " + SEPARATOR.join(common)
        opening, behind = "The 10 most common words of this list are", len(text) - len(TAIL)
        return TaskPrompt(
            text, expected, (), self.name, tokens, None, seed, index, tuple(common), opening=opening, question=behind
        )


COMMON_WORDS = CommonWords()
