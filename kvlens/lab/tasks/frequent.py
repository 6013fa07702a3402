"""Frequent words for any tokenizer: RULER's family fwe in words of our own.

RULER's distribution (github.com/hsiehjackson/RULER, scripts/data/synthetic/freq_words_extraction.py): of n drawn words,
the one of rank k appears floor(n k^-alpha / zeta(alpha)) times, alpha = 2; the first rank is noise ('...'), the three
behind it are asked; coded words of six letters, a vocabulary of a fiftieth of the length. Here every prompt has words
and an order of its own (RULER draws the order once), and n is the largest that the length allows. Metric: RULER's
string_match_all over the three words.
"""

from __future__ import annotations

import math
import random
from bisect import bisect_right

from kvlens.refusal import Refusal
from kvlens.tasks import words
from kvlens.tasks.base import Encode, TaskPrompt, check_place
from kvlens.tasks.generated import SEPARATOR, Generated
from kvlens.tasks.layout import Content

ASKED = 3
ALPHA, ZETA = 2.0, math.pi**2 / 6
"""the exponent, and Riemann's zeta of it"""
PER_WORD = 50
"""tokens of the prompt per word of the vocabulary"""
DOTS = "..."
HEAD = "This is a text in code words. Read it, then answer the question about it; the dots mean nothing.\n\n"
TAIL = "\n\nQuestion: Which 3 code words appear most often in this text? Answer:"


class FrequentWords(Generated):
    """A text of coded words, the three most frequent of which are asked for. They are everywhere, so depth means
    nothing."""

    name, title = "frequent_words", "frequent words"
    summary = "the three most frequent code words of a long text"
    new_tokens, placed = 50, False

    def content(self, rng: random.Random, depth: float) -> tuple[Content, list[str]]:
        return Content((), (), (), HEAD, TAIL), words.distinct(rng, ASKED, "coded")

    def make(
        self, length: int | None, depth: float | None, seed: int, encode: Encode, special: int = 1, index: int = 0
    ) -> TaskPrompt:
        tokens, _ = check_place(self.name, length, 0.5)
        rng = random.Random(f"{self.name}/{seed}")
        vocabulary = [DOTS, *words.distinct(rng, max(ASKED + 1, tokens // PER_WORD), "coded")]
        order = rng.randrange(2**32)

        def render(drawn: int) -> str:
            listed = [
                word
                for word, count in zip(vocabulary, counts(drawn, len(vocabulary)), strict=True)
                for _ in range(count)
            ]
            random.Random(order).shuffle(listed)
            return HEAD + " ".join(listed) + TAIL

        def size(drawn: int) -> int:
            return special + len(encode(render(drawn)))

        least = size(FEWEST)
        if tokens < least:
            raise Refusal(
                f"a {self.name} prompt needs at least {least} tokens with this tokenizer, not {tokens}",
                code="too_short",
                needed=least,
                tokens=tokens,
            )
        # The first rank alone is three fifths of the drawn words, each of at least a token.
        drawn = FEWEST + bisect_right(range(FEWEST + 1, 2 * tokens), tokens, key=size)
        while size(drawn) > tokens:  # another shuffle can be a token longer than the one before it
            drawn -= 1
        text, request = render(drawn), tuple(vocabulary[1 : ASKED + 1])
        opening, behind = "The 3 code words that appear most often are", len(text) - len(TAIL)
        expected = " " + SEPARATOR.join(request)
        return TaskPrompt(
            text, expected, (), self.name, tokens, None, seed, index, request, opening=opening, question=behind
        )


def counts(drawn: int, ranks: int) -> list[int]:
    """How often the word of each rank appears when `drawn` words are drawn."""
    return [int(drawn * rank**-ALPHA / ZETA) for rank in range(1, ranks + 1)]


def _fewest() -> int:
    """The fewest drawn words from which on the asked ranks appear more often than all behind them."""
    drawn = 1
    for tried in range(1, 1000):
        *_, last, next_ = counts(tried, ASKED + 2)
        if last <= next_:
            drawn = tried + 1
    return drawn


FEWEST = _fewest()
FREQUENT_WORDS = FrequentWords()
