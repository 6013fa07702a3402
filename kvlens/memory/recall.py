"""The recall zone of the hot tier: which spans are there for each (layer, KV head), in which slots, and what has to go.

Host bookkeeping only: it decides, `Memory` moves. Of a span the zone may hold the leading tokens only.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

Wish = tuple[int, int]
"""(span, how many of its leading tokens)"""


@dataclass(frozen=True)
class Fetch:
    """Tokens [first, first + len(slots)) of a span go into `slots`."""

    span: int
    first: int
    slots: list[int]


@dataclass(frozen=True)
class Plan:
    """What one recall does for one (layer, KV head)."""

    hits: list[int]
    """spans all of whose wanted tokens stay where they are"""
    misses: list[Fetch]
    given_up: list[tuple[int, list[int]]]
    """(span, its slots that are free now)"""
    gone: list[int]
    """spans of which nothing is left in the zone"""
    refused: list[int]
    """spans that do not fit the zone beside the ones of higher priority"""
    reused: int
    """tokens"""

    @property
    def fetched(self) -> int:
        """Tokens to be moved."""
        return sum(len(fetch.slots) for fetch in self.misses)


class RecallZone:
    """Slots [first, first + size) of one (layer, KV head). Spans stay until their slots are needed, the least recently
    used go first."""

    def __init__(self, first: int, size: int) -> None:
        self.size = size
        self._free = list(range(first + size - 1, first - 1, -1))
        self._held: OrderedDict[int, list[int]] = OrderedDict()

    def holds(self, span: int) -> bool:
        return span in self._held

    def _fit(self, wanted: Sequence[Wish]) -> tuple[list[Wish], list[int]]:
        """(accepted, refused): greedy in the given order, skipping what does not fit and trying the next."""
        room, accepted, refused = self.size, [], []
        for span, count in wanted:
            if count <= room:
                room -= count
                accepted.append((span, count))
            else:
                refused.append(span)
        return accepted, refused

    def reusable(self, wanted: Sequence[Wish]) -> int:
        """Wanted tokens that are here already."""
        return sum(min(count, len(self._held.get(span, ()))) for span, count in self._fit(wanted)[0])

    def plan(self, wanted: Sequence[Wish], reuse_at_most: int | None = None) -> Plan:
        """Fit `wanted` (highest priority first) into the zone. Spans not wanted give way, the least recently used
        first; of a span held with more tokens than wanted the rest is given up. `reuse_at_most` tokens stay, those of
        lowest priority beyond it are given up and fetched again. Applies the plan to this bookkeeping and returns it.
        """
        accepted, refused = self._fit(wanted)
        stay = {span: min(count, len(self._held.get(span, ()))) for span, count in accepted}
        excess = 0 if reuse_at_most is None else max(0, sum(stay.values()) - reuse_at_most)
        for span, _ in reversed(accepted):
            cut = min(excess, stay[span])
            stay[span] -= cut
            excess -= cut
        given_up = []
        for span, _ in accepted:
            if span in self._held and len(self._held[span]) > stay[span]:
                given_up.append((span, self._held[span][stay[span] :]))
                self._free.extend(reversed(given_up[-1][1]))
                self._held[span] = self._held[span][: stay[span]]
        shortage = sum(count - stay[span] for span, count in accepted) - len(self._free)
        gone = []
        for span in [s for s in self._held if s not in stay]:
            if shortage <= 0:
                break
            slots = self._held.pop(span)
            given_up.append((span, slots))
            gone.append(span)
            self._free.extend(slots)
            shortage -= len(slots)
        hits, misses = [], []
        for span, count in accepted:
            missing = count - stay[span]
            if not missing:
                hits.append(span)
                continue
            slots = [self._free.pop() for _ in range(missing)]
            misses.append(Fetch(span, stay[span], slots))
            self._held.setdefault(span, []).extend(slots)
        for span, _ in reversed(accepted):
            self._held.move_to_end(span)
        return Plan(hits, misses, given_up, gone, refused, sum(stay.values()))
