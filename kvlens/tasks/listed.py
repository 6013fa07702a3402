"""Long answers: a prompt gives a number, and the answer writes a list before it names the number.

The list fills the cache with hundreds of generated tokens between the fact and its use, so a method that evicts while
it decodes can lose the fact. After the settings of R-KV and of other methods for reasoning; the form is ours. What
SmolLM2-135M made of the two tasks (countdown.py, months.py) and of other forms: docs/evidence/long-answers.md.
"""

from __future__ import annotations

import random
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from itertools import takewhile
from typing import Any

from kvlens.tasks import words
from kvlens.tasks.base import Encode, TaskPrompt
from kvlens.tasks.generated import SEPARATOR, Generated
from kvlens.tasks.layout import Content
from kvlens.tasks.needles import fact

BEGUN = 3
"""entries of the list that the answer is given to begin with"""


class Listed(Generated):
    """Facts 'the library card number of KEY is VALUE'; the answer writes a list, then names a value.

    start: what the list begins with; shown: what the lists of the examples begin with.
    """

    start: int
    shown: Sequence[int]
    metric = "whether the number stands behind the whole list, on the same line (ours)"

    def __init__(self, name: str, title: str, summary: str, distractors: int = 0) -> None:
        """distractors: facts of the same kind that are not asked for."""
        self.name, self.title, self.summary, self.distractors = name, title, summary, distractors

    @abstractmethod
    def entries(self, start: int) -> list[str]:
        """Return the list that begins with `start`."""

    @abstractmethod
    def wanted(self, start: int) -> str:
        """Return the sentence that asks for such a list, without its last stop."""

    @property
    def asked(self) -> int:
        """The number of entries that are left to the answer."""
        return len(self.entries(self.start)) - BEGUN

    def counted(self, output: str) -> int:
        """Return how many entries an output writes until its first mistake or its end."""
        rest = self.entries(self.start)[BEGUN:]
        written = output.lstrip(" ,").split(SEPARATOR.rstrip())[: len(rest)]
        pairs = zip(written, rest, strict=False)
        right = sum(1 for _ in takewhile(lambda pair: pair[0].strip() == pair[1], pairs))
        ends = right == len(rest) - 1 < len(written) and _begins(written[right].strip(), rest[right])
        return right + ends

    def content(self, rng: random.Random, depth: float) -> tuple[Content, list[str]]:
        several = len(self.shown) + 1 + self.distractors
        people, numbers = words.people(rng, several), words.distinct(rng, several, "number")
        facts = [fact(name, number) for name, number in zip(people, numbers, strict=True)]
        head = "".join(
            f"{text}{self._order(name, start)}{SEPARATOR.join(self.entries(start))}. {text}\n\n"
            for text, name, start in zip(facts, people, self.shown, strict=False)
        )
        place, opening = len(self.shown), self._begun()
        tail = f"{self._order(people[place], self.start)}{opening}"
        content = Content([facts[place]], [depth], facts[place + 1 :], head=head, tail=tail, opening=opening)
        return content, [numbers[place]]

    def make(
        self, length: int | None, depth: float | None, seed: int, encode: Encode, special: int = 1, index: int = 0
    ) -> TaskPrompt:
        prompt = super().make(length, depth, seed, encode, special, index)
        facts: dict[str, Any] = {"first": self.start}
        return replace(prompt, cue=self._begun(), facts=facts)

    def score(self, answer: str, output: str) -> float:
        end = self.entries(self.start)[-1]
        line = output.partition(end)[2].partition("\n")[0]
        return float(self.counted(output) == self.asked and answer.strip() in line)

    def _order(self, name: str, start: int) -> str:
        """What a prompt, or an example in it, asks for behind its facts."""
        return f" {self.wanted(start)}, then write the library card number of {name}.\n"

    def _begun(self) -> str:
        """The entries that the answer is given to begin with."""
        return f"{SEPARATOR.join(self.entries(self.start)[:BEGUN])},"


def _begins(text: str, entry: str) -> bool:
    """Say whether a text begins with an entry and ends it there: '1' does not begin '12'."""
    return text.startswith(entry) and not text[len(entry) : len(entry) + 1].isalnum()
