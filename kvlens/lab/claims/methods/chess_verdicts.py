"""Verdicts of CHESS's claims from intervals: what is not shown is undecided."""

from __future__ import annotations

from collections.abc import Sequence

from kvlens.lab.claims.methods.chess_runs import Interval
from kvlens.statistics import wilson

CHANCE = 0.5
"""mean rank of pages drawn by chance"""


def phases(steps: Sequence[Interval]) -> bool | None:
    """Whether answers get worse and then better again from budget to budget, by the change in nats of each step; None
    where no step is shown to make them worse and one may."""
    falls, rises = [i for i, s in enumerate(steps) if s[1] > 0], [i for i, s in enumerate(steps) if s[2] < 0]
    if falls:
        return bool(rises and falls[0] < rises[-1])
    return None if any(high > 0 for _, _, high in steps) else False


def about_every_ten(counts: Sequence[tuple[int, int]]) -> bool | None:
    """Whether (pages that fired, pages) are every 5th to 20th: of no arm surely not (Wilson, 95 %), and of all by their
    shares; None where only their intervals reach there."""
    often, rarely = 1 / 5, 1 / 20
    ends = [wilson(fired / pages, pages) for fired, pages in counts]
    if any(high < rarely or low > often for low, high in ends):
        return False
    return True if all(rarely <= fired / pages <= often for fired, pages in counts) else None


def found_worse(rank: Interval, kept: Sequence[tuple[float, float]], prompts: int) -> bool | None:
    """False where the asked pages rank no better than chance, or fewer are kept than by chance (share kept, by chance)
    beyond Wilson's 95 % interval; None where neither is shown."""
    fewer = any(wilson(share, prompts)[1] < chance for share, chance in kept)
    return False if rank[1] > CHANCE or fewer else None
