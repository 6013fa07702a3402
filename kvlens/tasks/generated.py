"""Generated tasks for any tokenizer: what they have in common, and the metric they share."""

from __future__ import annotations

import random
from abc import abstractmethod
from collections.abc import Sequence

from kvlens.tasks import texts
from kvlens.tasks.base import Encode, Task, TaskPrompt, check_place
from kvlens.tasks.layout import Content, compose

SEPARATOR = ", "
"""between the parts of an answer; no part contains it"""


class Generated(Task):
    """A task of its own facts in a real text. Every prompt has the wanted number of tokens of the tokenizer at hand or
    a few less, and ends with a sentence.

    The demo model was not trained on any of these.
    """

    metric = "share of the asked parts that the output contains, upper and lower case alike (RULER's string_match_all)"

    @abstractmethod
    def content(self, rng: random.Random, depth: float) -> tuple[Content, list[str]]:
        """What is hidden and asked, and the parts of the answer in order."""

    def make(
        self, length: int | None, depth: float | None, seed: int, encode: Encode, special: int = 1, index: int = 0
    ) -> TaskPrompt:
        tokens, place = check_place(self.name, length, depth if self.placed else 0.5)
        rng = random.Random(f"{self.name}/{seed}")
        content, answers = self.content(rng, place)
        text, needle = self.lay(content, tokens, rng, encode, special)
        at = place if self.placed else None
        expected = " " + SEPARATOR.join(answers)
        return TaskPrompt(
            text,
            expected,
            needle,
            self.name,
            tokens,
            at,
            seed,
            index,
            tuple(answers),
            opening=content.opening,
            question=len(text) - len(content.tail),
        )

    def lay(
        self, content: Content, length: int, rng: random.Random, encode: Encode, special: int
    ) -> tuple[str, tuple[tuple[int, int], ...]]:
        """The prompt's text and the ranges of the asked facts in it."""
        hay = self.haystack(content, length, rng)
        return compose(self.name, content, length, rng, encode, special, hay)

    def haystack(self, content: Content, length: int, rng: random.Random) -> Sequence[str]:
        """The sentences that stand around the facts, in their order; enough, or begun again, for `length` tokens."""
        return texts.sentences()

    def score(self, answer: str, output: str) -> float:
        return string_match_all(output, answer.strip().split(SEPARATOR))


def string_match_all(output: str, parts: Sequence[str]) -> float:
    """RULER: the share of `parts` that stand in the output, upper and lower case alike."""
    return sum(part.lower() in output.lower() for part in parts) / len(parts)
