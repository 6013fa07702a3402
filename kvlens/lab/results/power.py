"""How many trials a one-sided test needs: pairs of right and wrong answers, and means of other figures."""

from __future__ import annotations

import math
from functools import lru_cache
from statistics import NormalDist

import numpy as np

from kvlens.statistics import binomial_above, binomial_below
from kvlens.statistics.paired import TIE, Floats, lost_shares, outcomes, probabilities, score
from kvlens.statistics.student import quantile

POWER = 0.8
"""probability with which a planned comparison is decided"""
EXACT = 150
"""pairs; a plan for more uses the normal approximation of the test"""
MOST = 1500
"""pairs; a plan that needs more returns this number"""


@lru_cache(maxsize=64)
def rejection(n: int, difference: float, level: float) -> Floats:
    """Return True for every outcome of n pairs (order of `outcomes`) whose exact p is at most the level.

    The test is `kvlens.statistics.paired.exceeds`, with the true difference at most `difference`."""
    gained, lost, _ = outcomes(n)
    statistics = score(gained, lost, n, difference)
    order = np.argsort(-statistics, kind="stable")
    ordered = statistics[order]
    worst = np.zeros(len(order))
    for share in lost_shares(difference).tolist():
        np.maximum(worst, probabilities(n, max(0.0, share + difference), share)[order].cumsum(), out=worst)
    is_last = np.append(ordered[1:] < ordered[:-1] - TIE, True)
    passing = np.flatnonzero(is_last & (worst <= level))
    rejected = np.zeros(len(order), bool)
    if len(passing):
        rejected[order[: passing[-1] + 1]] = True
    return rejected


def power(n: int, difference: float, truth: float, discordant: float, level: float) -> float:
    """Return the probability that n pairs show a difference above `difference`, by the exact test.

    truth: true difference of the shares; discordant: true share of the pairs that only one arm answers."""
    gained_share, lost_share = (discordant + truth) / 2, (discordant - truth) / 2
    return float(probabilities(n, gained_share, lost_share)[rejection(n, difference, level)].sum())


@lru_cache(maxsize=512)
def pairs_needed(difference: float, truth: float, discordant: float, level: float, target: float = POWER) -> int:
    """Return the number of pairs that shows a difference above `difference` with the wanted probability.

    truth: true difference, above `difference`; discordant: share of pairs that only one arm answers, raised to what the
    true difference requires; level: one-sided. Up to EXACT pairs by the exact test, above by its normal approximation.
    Returns MOST if more are needed."""
    discordant = min(1.0, max(discordant, abs(truth), 0.01))
    estimate = _approximate(difference, truth, discordant, level, target)
    if estimate > EXACT:
        return min(estimate, MOST)
    n = max(5, estimate * 3 // 4)
    while n < MOST and power(n, difference, truth, discordant, level) < target:
        n += 1
    return n


def _approximate(difference: float, truth: float, discordant: float, level: float, target: float) -> int:
    """Return the number of pairs by the normal approximation of Tango's statistic."""
    gained, lost, quantile_of = (discordant + truth) / 2, (discordant - truth) / 2, NormalDist().inv_cdf
    expected = float(score(np.array([gained]), np.array([lost]), 1, difference)[0])
    if expected == 0:
        return MOST
    distance = truth - difference
    spread, null_spread = math.sqrt(discordant - truth * truth), distance / expected
    return math.ceil(((quantile_of(1 - level) * null_spread + quantile_of(target) * spread) / distance) ** 2)


def values_needed(distance: float, spread: float, level: float, target: float = POWER) -> int:
    """Return the number of values whose mean is told from one at a distance, by Student's one-sided test.

    spread: standard deviation of the values. Returns MOST if more are needed."""
    n = 3
    while n < MOST and ((quantile(1 - level, n - 1) + quantile(target, n - 1)) * spread / distance) ** 2 > n:
        n += max(1, n // 50)
    return n


@lru_cache(maxsize=64)
def trials_between(low: float, high: float, share: float, level: float, target: float = POWER) -> int:
    """Return the number of trials that shows a share to lie between two bounds, by exact binomial tests of both.

    share: true share, between the bounds; level: one-sided, of each test. Returns MOST if more are needed."""
    n = 5
    while n < MOST and _within_power(n, low, high, share, level) < target:
        n += max(1, n // 25)
    return min(n, MOST)


def _within_power(n: int, low: float, high: float, share: float, level: float) -> float:
    """Return the probability that n trials pass both tests."""
    passing = [
        count
        for count in range(math.ceil(n * low), math.floor(n * high) + 1)
        if max(binomial_above(count, n, low), binomial_below(count, n, high)) <= level
    ]
    if not passing:
        return 0.0
    return binomial_above(passing[0], n, share) - binomial_above(passing[-1] + 1, n, share)
