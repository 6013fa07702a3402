"""Greedy search for the (layer, KV head, span) that take the fewest bytes and suffice. Pure: what a trial is, the
caller says.

The ranking is gone down in doubling steps until what is held suffices, then halved back to its shortest beginning that
does. Of that, parts are left out, the costliest first, as long as the rest suffices: halves, quarters, single ones. A
set from which no single one can be left out is not yet the smallest there is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvlens.holds import Triple


@dataclass(frozen=True)
class Attempt:
    """What holding a set came to."""

    triples: tuple[Triple, ...]
    held_bytes: int
    kl: float
    """nats, at the step of loss"""
    restored: bool


@dataclass(frozen=True)
class Fewest:
    """What the search came to."""

    best: Attempt | None
    """the set of fewest bytes that sufficed; None: none did"""
    tests: tuple[Attempt, ...]
    """all of them, in order"""
    ended: bool
    """nothing was left to try by this way of searching; False: as many as were allowed were tried"""


class _Enough(Exception):
    """As many were tried as were allowed."""


class FewestBytes:
    """One search. `test` costs a run or two; sets that were tried are not tried again."""

    def __init__(self, test: Callable[[tuple[Triple, ...]], Attempt], cost: Callable[[Triple], int], most: int) -> None:
        """cost: bytes of one triple; most: sets to try at most."""
        self._test, self._cost, self._most = test, cost, most
        self._tested: dict[frozenset[Triple], Attempt] = {}

    def run(self, ranking: Sequence[Triple]) -> Fewest:
        """`ranking`: the candidates, what was missed most first."""
        ended = True
        try:
            self._reduce(self._beginning(ranking))
        except _Enough:
            ended = False
        tests = tuple(self._tested.values())
        back = [test for test in tests if test.restored]
        return Fewest(min(back, key=lambda test: (test.held_bytes, len(test.triples)), default=None), tests, ended)

    def _beginning(self, ranking: Sequence[Triple]) -> tuple[Triple, ...]:
        """The shortest beginning of the ranking that suffices, if longer ones do as well; () where all of it does
        not."""
        short, long = 0, 1
        while not self._suffices(tuple(ranking[:long])):
            if long >= len(ranking):
                return ()
            short, long = long, min(2 * long, len(ranking))
        while long - short > 1:
            middle = (short + long) // 2
            if self._suffices(tuple(ranking[:middle])):
                long = middle
            else:
                short = middle
        return tuple(ranking[:long])

    def _reduce(self, triples: tuple[Triple, ...]) -> None:
        """Leave out what is not needed, in ever smaller parts."""
        size = len(triples) // 2
        while size:
            costliest = sorted(triples, key=lambda triple: (-self._cost(triple), triple))
            parts = [frozenset(costliest[start : start + size]) for start in range(0, len(costliest), size)]
            previous = triples
            for part in parts:
                fewer = tuple(triple for triple in triples if triple not in part)
                if fewer and self._suffices(fewer):
                    triples = fewer
            size = min(size, len(triples) // 2) if triples != previous else size // 2

    def _suffices(self, triples: tuple[Triple, ...]) -> bool:
        key = frozenset(triples)
        if key not in self._tested:
            if len(self._tested) >= self._most:
                raise _Enough
            self._tested[key] = self._test(triples)
        return self._tested[key].restored
