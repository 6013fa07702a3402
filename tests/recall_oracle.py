"""A recall zone of one KV head told in plain loops, against which the planned one is held."""

from __future__ import annotations

from dataclasses import dataclass

Wish = tuple[int, int]
"""(span, how many of its leading cells)"""


@dataclass(frozen=True)
class Told:
    """What one recall comes to: (span, first cell, cells) that have to come; spans of which nothing is left, the least
    recently wanted first; spans that do not fit; cells that stay."""

    misses: list[tuple[int, int, int]]
    gone: list[int]
    refused: list[int]
    reused: int


class LoopZone:
    """Room for `size` cells. `held`: cells of each span, the least recently wanted first."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.held: dict[int, int] = {}

    def _fit(self, wanted: list[Wish]) -> tuple[list[Wish], list[int]]:
        room, accepted, refused = self.size, [], []
        for span, count in wanted:
            if count <= room:
                room -= count
                accepted.append((span, count))
            else:
                refused.append(span)
        return accepted, refused

    def reusable(self, wanted: list[Wish]) -> int:
        return sum(min(count, self.held.get(span, 0)) for span, count in self._fit(wanted)[0])

    def plan(self, wanted: list[Wish], reuse_at_most: int | None = None) -> Told:
        """Highest priority first. `reuse_at_most` cells stay; those of lowest priority beyond it come again."""
        accepted, refused = self._fit(wanted)
        stay = {span: min(count, self.held.get(span, 0)) for span, count in accepted}
        excess = 0 if reuse_at_most is None else max(0, sum(stay.values()) - reuse_at_most)
        for span, _ in reversed(accepted):
            cut = min(excess, stay[span])
            stay[span] -= cut
            excess -= cut
        needed, gone = sum(count for _, count in accepted), []
        others = [span for span in self.held if span not in stay]
        for span in others:
            if needed + sum(self.held[s] for s in others if s not in gone) <= self.size:
                break
            gone.append(span)
        for span in gone:
            del self.held[span]
        for span, count in reversed(accepted):
            self.held.pop(span, None)
            self.held[span] = count
        misses = [(span, stay[span], count - stay[span]) for span, count in accepted if count > stay[span]]
        return Told(misses, gone, refused, sum(stay.values()))
