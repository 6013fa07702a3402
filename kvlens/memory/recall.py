"""The recall zone of the hot tier: which spans are there for each (layer, KV head), in which slots, and what has to go.

Host bookkeeping only: it decides, `Memory` moves.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Plan:
    """What one recall does for one (layer, KV head)."""

    hits: list[int]
    misses: list[tuple[int, list[int]]]
    """(span, slots it gets)"""
    evicted: list[tuple[int, list[int]]]
    """(span, slots it gives up)"""
    refused: list[int]
    """spans that do not fit the zone beside the ones of higher priority"""


class RecallZone:
    """Slots [first, first + size) of one (layer, KV head). Spans stay until their slots are needed, the least recently used go first."""

    def __init__(self, first: int, size: int) -> None:
        self.size = size
        self._free = list(range(first + size - 1, first - 1, -1))
        self._held: OrderedDict[int, list[int]] = OrderedDict()

    def holds(self, span: int) -> bool:
        return span in self._held

    def plan(self, wanted: Sequence[int], tokens: Callable[[int], int]) -> Plan:
        """Fit `wanted` (highest priority first) into the zone: greedy, skipping a span that does not fit and trying the next.

        Spans not wanted give way, the least recently used first. Applies the plan to this bookkeeping and returns it.
        """
        room, accepted, refused = self.size, [], []
        for span in wanted:
            need = tokens(span)
            if need <= room:
                room -= need
                accepted.append(span)
            else:
                refused.append(span)
        keep = set(accepted)
        hits = [span for span in accepted if span in self._held]
        missing = [span for span in accepted if span not in self._held]
        shortage = sum(tokens(span) for span in missing) - len(self._free)
        evicted = []
        for span in [s for s in self._held if s not in keep]:
            if shortage <= 0:
                break
            slots = self._held.pop(span)
            evicted.append((span, slots))
            self._free.extend(slots)
            shortage -= len(slots)
        misses = []
        for span in missing:
            slots = [self._free.pop() for _ in range(tokens(span))]
            self._held[span] = slots
            misses.append((span, slots))
        for span in reversed(accepted):
            self._held.move_to_end(span)
        return Plan(hits, misses, evicted, refused)
