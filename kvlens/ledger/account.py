"""The loss ledger of one lost answer: how many logits of the lost lead each cause took. No torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from math import factorial
from typing import Any

from kvlens.holds import Triple
from kvlens.ledger.causes import CODES

Coalition = frozenset[str]
"""causes that are repaired together"""


@dataclass(frozen=True)
class Share:
    """What one cause took of the lost lead."""

    cause: str
    """one of kvlens.ledger.causes.CODES"""
    logits: float
    """Shapley value, signed: the mean, over all orders of repair, of what its repair adds to the lead"""
    alone: float
    """logits that the lead grows by when this cause alone is repaired"""
    spans: int
    """(layer, KV head, span) that lay under this cause"""
    missed: float
    """attention mass that these left unread, added over steps and query heads"""
    worst_triple: Triple | None
    """of these, the one with most unread mass; None if no mass was recorded"""
    restored: bool | None = None
    """the answer is back with this cause alone repaired; None: not tried"""


@dataclass(frozen=True)
class LossLedger:
    """The ledger of one lost answer. lost == sum of the shares' logits + rest, to rounding."""

    steps: tuple[int, ...]
    """lost steps of the answer, on full KV's tokens"""
    lead_full: float
    """logits of full KV's tokens above the method's, under full KV, added over `steps`"""
    lead_run: float
    """the same under the run"""
    shares: tuple[Share, ...]
    """of the causes that left anything unread, in the order of causes.CODES"""
    rest: float
    """logits that are still lost when every cause is repaired"""
    runs: int
    """forward runs on full KV's tokens; free runs that try a cause alone are not counted"""
    seconds: float

    @property
    def lost(self) -> float:
        """Logits of the lead that the run lost, over `steps`."""
        return self.lead_full - self.lead_run

    @property
    def largest(self) -> Share | None:
        """The cause that took most; None if no cause left anything unread."""
        return max(self.shares, key=lambda share: share.logits, default=None)

    def logits(self, cause: str) -> float:
        """Return what a cause, or `rest`, took; 0 if it took nothing."""
        if cause == "rest":
            return self.rest
        return next((share.logits for share in self.shares if share.cause == cause), 0.0)

    def to_json(self) -> dict[str, Any]:
        """Return the ledger as JSON can hold it."""
        return asdict(self)

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> LossLedger:
        """Return the ledger that `to_json` wrote. Raises KeyError, TypeError or ValueError for anything else."""
        shares = tuple(
            Share(**{**share, "worst_triple": None if share["worst_triple"] is None else tuple(share["worst_triple"])})
            for share in fields["shares"]
        )
        ledger = cls(**{**fields, "steps": tuple(fields["steps"]), "shares": shares})
        figures = [ledger.lead_full, ledger.lead_run, ledger.rest, ledger.seconds]
        figures += [figure for share in shares for figure in (share.logits, share.alone, share.missed)]
        if not all(type(figure) in (int, float) and math.isfinite(figure) for figure in figures):
            raise ValueError("a figure of the ledger is no number")
        parts = sum(share.logits for share in shares) + ledger.rest
        if abs(ledger.lost - parts) > 1e-3 * max(1.0, ledger.lost):
            raise ValueError("the ledger does not add up")
        if not {share.cause for share in shares} <= set(CODES):
            raise ValueError("the ledger names a cause that there is not")
        return ledger


def split(players: Sequence[str], value: Callable[[Coalition], float]) -> dict[str, float]:
    """Return each player's Shapley value (Shapley 1953): the mean, over all orders, of what it adds to those before it.
    The values add up to value(all) - value(none). `value` is asked once for each of 2^len(players) coalitions."""
    worths = {
        frozenset(members): value(frozenset(members))
        for size in range(len(players) + 1)
        for members in combinations(players, size)
    }
    count = len(players)
    return {
        player: sum(
            factorial(len(earlier))
            * factorial(count - len(earlier) - 1)
            / factorial(count)
            * (worths[earlier | {player}] - worth)
            for earlier, worth in worths.items()
            if player not in earlier
        )
        for player in players
    }
