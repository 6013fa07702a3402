"""Long answers: a prompt gives a number, and the answer counts down before it names the number.

The count fills the cache with hundreds of generated tokens between the fact and its use, so a method that evicts while
it decodes can lose the fact. After the settings of R-KV and of other methods for reasoning; the form is ours. What
SmolLM2-135M made of it and of other forms: docs/evidence/long-answers.md.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise, takewhile

from kvlens.tasks import words
from kvlens.tasks.base import Encode, TaskPrompt
from kvlens.tasks.generated import Generated
from kvlens.tasks.layout import Content
from kvlens.tasks.needles import fact

FIRST = 99
"""number that the count begins with: 386 tokens of a tokenizer that has a token per digit"""
SHOWN, BEGUN = (7, 12), 3
"""numbers that the two examples count down from, and numbers of the count that the answer is given to begin with.
SmolLM2 loops where a count passes 100"""
_END = re.compile(r"(?<!\d)2, 1(?!\d)(?P<line>[^\n]*)")
_ENTRY = re.compile(r"(\d+)(?:, )?")


class Countdown(Generated):
    """Facts 'the library card number of KEY is VALUE'; the answer counts down from FIRST to 1, then names a value."""

    metric = "the number stands behind the whole count, on the same line (ours)"
    new_tokens = 420

    def __init__(self, name: str, title: str, summary: str, distractors: int) -> None:
        """distractors: facts of the same kind that are not asked for."""
        self.name, self.title, self.summary, self.distractors = name, title, summary, distractors

    def content(self, rng: random.Random, depth: float) -> tuple[Content, list[str]]:
        several = len(SHOWN) + 1 + self.distractors
        people, numbers = words.people(rng, several), words.distinct(rng, several, "number")
        facts = [fact(name, number) for name, number in zip(people, numbers, strict=True)]
        head = "".join(
            f"{text}{_order(name, start)}{count_down(start, 1)}. {text}\n\n"
            for text, name, start in zip(facts, people, SHOWN, strict=False)
        )
        target, distractors, number = facts[len(SHOWN)], facts[len(SHOWN) + 1 :], numbers[len(SHOWN)]
        tail = f"{_order(people[len(SHOWN)], FIRST)}{_begun()}"
        return Content([target], [depth], distractors, head=head, tail=tail, opening=_begun()), [number]

    def make(
        self, length: int | None, depth: float | None, seed: int, encode: Encode, special: int = 1, index: int = 0
    ) -> TaskPrompt:
        prompt = super().make(length, depth, seed, encode, special, index)
        return replace(prompt, cue=_begun(), facts={"first": FIRST})

    def score(self, answer: str, output: str) -> float:
        end = _END.search(output)
        return float(end is not None and answer.strip() in end["line"] and counted(output) >= FIRST - BEGUN)


def _order(name: str, start: int) -> str:
    """What a prompt, or an example in it, asks for behind its facts."""
    return f" Count down from {start} to 1, then write the library card number of {name}.\n"


def _begun() -> str:
    """The numbers that the answer is given to begin with."""
    return f"{count_down(FIRST, FIRST - BEGUN + 1)},"


def count_down(start: int, end: int) -> str:
    """Return the count from `start` to `end`, which is not larger: '3, 2, 1'."""
    return ", ".join(map(str, range(start, end - 1, -1)))


def counted(output: str) -> int:
    """Return how many numbers an output counts down, each one below the number before it, until its first mistake or
    its end."""
    values = [int(part) for part in _numbers(output)]
    right = takewhile(lambda pair: pair[1] == pair[0] - 1 > 0, pairwise(values))
    return min(len(values), 1) + sum(1 for _ in right)


def _numbers(output: str) -> Iterator[str]:
    """The numbers with which an output begins, until something else than a comma stands between two."""
    rest = output.lstrip(" ,")
    while part := _ENTRY.match(rest):
        yield part[1]
        rest = rest[part.end() :]


COUNTDOWN = Countdown("countdown", "count, then a fact", "one number, asked for behind a count from 99 down to 1", 0)
AMONG = Countdown(
    "countdown_among", "count, then one of four facts", "one of four numbers, behind a count from 99 down to 1", 3
)
