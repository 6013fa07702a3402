"""The arms of a statement side by side: gains on the same prompts, their intervals and one-sided p values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from kvlens.lab.claims.plan import FEWEST
from kvlens.methods.statements import FIGURES, Figure, Statement
from kvlens.statistics import of_mean
from kvlens.statistics.paired import exceeds, falls_below, tango
from kvlens.statistics.student import sample

ANSWERED = 0.5
"""ours: where the other arm itself answers fewer of the prompts, hardly anything can be lost against it, and *as good*
and *alike* say nothing"""
Record = Mapping[str, Any]
"""an arm's figures as the result file holds them (`record`)"""


@dataclass(frozen=True)
class ArmPair:
    """The first arm against another on the prompts that both could be held to. Differences count as gains of the
    first, whatever the figure's sense."""

    gains: tuple[float, ...]
    counterpart: tuple[float, ...]
    """the other arm's figures"""
    is_exact: bool
    """the figures are right or wrong answers"""

    @property
    def n(self) -> int:
        return len(self.gains)

    @property
    def is_enough(self) -> bool:
        return self.n >= FEWEST

    @property
    def answered(self) -> float:
        """Return the mean of the other arm's figure."""
        return fmean(self.counterpart) if self.counterpart else 0.0

    @property
    def counts(self) -> tuple[int, int, int]:
        """Return the pairs gained, the pairs lost, and all pairs."""
        return sum(gain > 0 for gain in self.gains), sum(gain < 0 for gain in self.gains), self.n

    @property
    def bounds(self) -> tuple[float, float] | None:
        """Return the 95 % interval of the gain: Tango's of answers, else Student's; None for too few pairs."""
        if not self.gains:
            return None
        return tango(*self.counts) if self.is_exact else of_mean(self.gains)

    @property
    def spread(self) -> float:
        """Return the share of pairs that one arm alone answers, with one pair of two added; else the deviation."""
        gained, lost, n = self.counts
        return (gained + lost + 1) / (n + 2) if self.is_exact else sample(self.gains).spread

    def exceeds(self, least: float) -> float:
        """Return the one-sided p of the gains, if the true gain is at most `least`; 1 for too few pairs."""
        if not self.is_enough:
            return 1.0
        return exceeds(*self.counts, least) if self.is_exact else sample(self.gains).exceeds(least)

    def falls_below(self, most: float) -> float:
        """Return the one-sided p of the gains, if the true gain is at least `most`; 1 for too few pairs."""
        if not self.is_enough:
            return 1.0
        return falls_below(*self.counts, most) if self.is_exact else sample(self.gains).falls_below(most)


@dataclass(frozen=True)
class Compare:
    """A statement with the records of its arms, in the order of `Statement.arms`."""

    statement: Statement
    records: Sequence[Record]

    @property
    def figure(self) -> Figure:
        return FIGURES[self.statement.figure]

    @property
    def least(self) -> float:
        """Return the gain that has to be passed: 0, or minus the margin."""
        return 0.0 if self.statement.verdict == "better" else -self.figure.margin

    @property
    def both_sides(self) -> bool:
        return self.statement.verdict == "alike"

    def values(self, place: int = 0) -> list[float]:
        """Return the figures of the trials of one arm that could be held."""
        return [value for value in self.records[place]["values"] if value is not None]

    def pair(self, place: int) -> ArmPair:
        """Return the gains of the first arm over the arm at a place, prompt by prompt."""
        sign = 1 if self.figure.more_is_better else -1
        rows = zip(self.records[0]["values"], self.records[place]["values"], strict=True)
        pairs = [(value, counterpart) for value, counterpart in rows if value is not None and counterpart is not None]
        gains = tuple(sign * (value - counterpart) for value, counterpart in pairs)
        return ArmPair(gains, tuple(counterpart for _, counterpart in pairs), self.statement.figure == "exact")

    @property
    def pairs(self) -> list[ArmPair]:
        """Return the comparisons with each of the statement's other arms."""
        return [self.pair(place) for place in range(1, 1 + len(self.statement.others))]

    def too_few_answers(self, pair: ArmPair) -> bool:
        """Return whether so few of the other arm's answers are right that hardly any can be lost against it."""
        return self.statement.verdict != "better" and pair.is_exact and pair.answered < ANSWERED
