"""Variable tracking for any tokenizer: RULER's family vt (a chain of assignments, four hops, hidden in order) in words
of our own.

RULER's default hides one chain; here a second one, of another number, is hidden as well and not asked for. Metric:
RULER's string_match_all over the five names.
"""

from __future__ import annotations

import random
from itertools import pairwise

from kvlens.tasks import words
from kvlens.tasks.generated import Generated
from kvlens.tasks.layout import Content

HOPS = 4
HEAD = "Follow the assignments in this text, then answer the question about it.\n\n"


class Tracking(Generated):
    """VAR A = 12345 ... VAR B = VAR A: which hold the number? The first assignment stands at the wanted depth, the
    others behind it."""

    name, title = "variable_tracking", "variable tracking"
    summary = "which variables hold a number, through a chain of assignments"
    new_tokens = 60

    def content(self, rng: random.Random, depth: float) -> tuple[Content, list[str]]:
        names = words.distinct(rng, 2 * (HOPS + 1), "name")
        values = [str(rng.randrange(10_000, 100_000)) for _ in range(2)]
        while values[0] == values[1]:
            values[1] = str(rng.randrange(10_000, 100_000))
        request, counterpart = (
            _chain(names[index * (HOPS + 1) : (index + 1) * (HOPS + 1)], values[index]) for index in range(2)
        )
        shares = [depth, *sorted(depth + (1 - depth) * rng.random() for _ in range(HOPS))]
        tail = f"\n\nQuestion: Which variables hold the value {values[0]}? Name all {HOPS + 1}. Answer:"
        opening = f"The variables that hold the value {values[0]} are"
        return Content(request, shares, counterpart, HEAD, tail, opening), names[: HOPS + 1]


def _chain(names: list[str], value: str) -> list[str]:
    return [f"VAR {names[0]} = {value}.", *(f"VAR {new} = VAR {old}." for old, new in pairwise(names))]


TRACKING = Tracking()
