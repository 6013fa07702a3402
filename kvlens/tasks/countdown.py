"""A long answer that counts down before it names a number of the prompt: 374 tokens of SmolLM2-135M."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise, takewhile

from kvlens.tasks.generated import SEPARATOR
from kvlens.tasks.listed import Listed

FIRST = 99
"""number that the count begins with: 386 tokens of a tokenizer that has a token per digit"""
SHOWN = (7, 12)
"""numbers that the two examples count down from. SmolLM2 loops where a count passes 100"""
_END = re.compile(r"(?<!\d)2, 1(?!\d)(?P<line>[^\n]*)")
_ENTRY = re.compile(r"(\d+)(?:, )?")


class Countdown(Listed):
    """Numbers from 99 down to 1."""

    start, shown = FIRST, SHOWN
    new_tokens = 420

    def entries(self, start: int) -> list[str]:
        return list(map(str, range(start, 0, -1)))

    def wanted(self, start: int) -> str:
        return f"Count down from {start} to 1"

    def counted(self, output: str) -> int:
        """Return how many numbers an output counts down, each one below the number before it, until its first mistake
        or its end."""
        values = [int(part) for part in _numbers(output)]
        right = takewhile(lambda pair: pair[1] == pair[0] - 1 > 0, pairwise(values))
        return min(len(values), 1) + sum(1 for _ in right)

    def score(self, answer: str, output: str) -> float:
        end = _END.search(output)
        return float(end is not None and answer.strip() in end["line"] and self.counted(output) >= self.asked)


def count_down(start: int, end: int) -> str:
    """Return the count from `start` to `end`, which is not larger: '3, 2, 1'."""
    return SEPARATOR.join(map(str, range(start, end - 1, -1)))


def _numbers(output: str) -> Iterator[str]:
    """The numbers with which an output begins, until something else than a comma stands between two."""
    rest = output.lstrip(" ,")
    while part := _ENTRY.match(rest):
        yield part[1]
        rest = rest[part.end() :]


COUNTDOWN = Countdown("countdown", "count, then a fact", "one number, asked for behind a count from 99 down to 1")
AMONG = Countdown(
    "countdown_among", "count, then one of four facts", "one of four numbers, behind a count from 99 down to 1", 3
)
