"""Differences of two shares that were found on the same trials: score intervals, and an exact one-sided test.

A trial is *gained* if it is right under the first arm alone, and *lost* if it is right under the second arm alone. The
difference of the shares is (gained - lost) / trials.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from statistics import NormalDist

import numpy as np

from kvlens.statistics import wilson

Floats = np.ndarray[tuple[int, ...], np.dtype[np.float64]]
GRID = 128
"""discordant shares that the exact test tries, before it refines the worst of them"""
TIE = 1e-9
"""statistics that differ by less are equal"""


def score(gained: Floats, lost: Floats, n: int, difference: float) -> Floats:
    """Return Tango's statistic of each outcome against a true difference.

    The variance is that of the most likely shares whose difference is `difference` (Tango 1998, eq. 8 to 11). An
    outcome without variance has the statistic 0 if it equals the difference, else an infinite one."""
    excess = gained - lost - n * difference
    half = -gained - lost + (2 * n - gained + lost) * difference
    root = np.sqrt(np.maximum(0.0, half * half + 8 * n * lost * difference * (1 - difference)))
    lost_share = (root - half) / (4 * n)
    variance = n * (2 * lost_share + difference * (1 - difference))
    with np.errstate(divide="ignore", invalid="ignore"):
        value = excess / np.sqrt(np.maximum(0.0, variance))
    return np.where(np.abs(excess) < TIE, 0.0, value)


def tango(gained: int, lost: int, n: int, level: float = 0.95) -> tuple[float, float]:
    """Return Tango's score interval of the difference (Statistics in Medicine 17, 1998)."""
    z = NormalDist().inv_cdf((1 + level) / 2)
    counts = np.array([gained], float), np.array([lost], float)

    def statistic(difference: float) -> float:
        return float(score(*counts, n, difference)[0])

    middle = (gained - lost) / n
    low = _crossing(lambda difference: statistic(difference) <= z, -1.0, middle)
    return low, _crossing(lambda difference: statistic(difference) < -z, middle, 1.0)


def _crossing(is_reached: Callable[[float], bool], low: float, high: float) -> float:
    """Return the point between two ends from which on a condition holds, to 1e-10."""
    while high - low > 1e-10:
        middle = (low + high) / 2
        low, high = (low, middle) if is_reached(middle) else (middle, high)
    return (low + high) / 2


def newcombe(both: int, gained: int, lost: int, neither: int, level: float = 0.95) -> tuple[float, float]:
    """Return Newcombe's interval of the difference: Wilson intervals joined by the correlation of the arms.

    Source: Newcombe, Statistics in Medicine 17, 1998, 2635, method 10."""
    n, z = both + gained + lost + neither, NormalDist().inv_cdf((1 + level) / 2)
    shares = (both + gained) / n, (both + lost) / n
    margins = math.sqrt((both + gained) * (lost + neither) * (both + lost) * (gained + neither))
    product = float(both * neither - gained * lost)
    if product > 0:
        product = max(product - n / 2, 0.0)
    correlation = product / margins if margins else 0.0
    intervals = [wilson(share, n, z) for share in shares]

    def joined(low: float, high: float) -> float:
        return math.sqrt(max(0.0, low * low + high * high - 2 * correlation * low * high))

    difference = shares[0] - shares[1]
    return (
        difference - joined(shares[0] - intervals[0][0], intervals[1][1] - shares[1]),
        difference + joined(intervals[0][1] - shares[0], shares[1] - intervals[1][0]),
    )


def agresti_min(gained: int, lost: int, n: int) -> tuple[float, float]:
    """Return Wald's 95 % interval with half a trial added to each of the four outcomes (Agresti and Min 2005).

    kvlens judges nothing by this interval: its one-sided error exceeds the nominal one (docs/evidence/paired.md)."""
    more = n + 2
    mean = (gained - lost) / more
    half = 1.96 * math.sqrt(max(0.0, (gained + lost + 1) / more - mean**2) / more)
    return max(-1.0, mean - half), min(1.0, mean + half)


@lru_cache(maxsize=8)
def outcomes(n: int) -> tuple[Floats, Floats, Floats]:
    """Return every outcome of n trials: gained, lost, and the logarithm of the number of orders it comes in."""
    gained, lost = (part.astype(float) for part in np.triu_indices(n + 1))
    lost -= gained  # pairs (gained, gained + lost)
    logs = np.array([math.lgamma(count + 1) for count in range(n + 1)])
    agreed = n - gained - lost
    orders = logs[n] - logs[gained.astype(int)] - logs[lost.astype(int)] - logs[agreed.astype(int)]
    return gained, lost, orders


def probabilities(n: int, gained_share: float, lost_share: float) -> Floats:
    """Return the probability of every outcome of n trials, in the order of `outcomes`."""
    gained, lost, orders = outcomes(n)
    exponent = orders.copy()
    for count, share in (
        (gained, gained_share),
        (lost, lost_share),
        (n - gained - lost, 1 - gained_share - lost_share),
    ):
        exponent += count * math.log(share) if share > 0 else np.where(count > 0, -np.inf, 0.0)
    return np.exp(exponent)


def lost_shares(difference: float, count: int = GRID) -> Floats:
    """Return `count` lost shares that are possible with a true difference, from the smallest to the largest."""
    return np.linspace(max(0.0, -difference), (1 - difference) / 2, count)


def exceeds(gained: int, lost: int, n: int, difference: float) -> float:
    """Return the exact one-sided p of the outcome, if the true difference is at most `difference`.

    The p is the largest probability, over all discordant shares, of an outcome whose Tango statistic is at least as
    large (an unconditional test: Hsueh, Liu and Chen, Biometrics 57, 2001; Sidik, Statistics in Medicine 22, 2003).
    """
    if n == 0:
        return 1.0
    all_gained, all_lost, _ = outcomes(n)
    reached = score(np.array([gained], float), np.array([lost], float), n, difference)[0]
    as_large = score(all_gained, all_lost, n, difference) >= reached - TIE

    def largest(shares: Floats) -> tuple[float, int]:
        tails = [
            float(probabilities(n, max(0.0, share + difference), share)[as_large].sum()) for share in shares.tolist()
        ]
        best = int(np.argmax(tails))
        return tails[best], best

    shares = lost_shares(difference)
    tail, best = largest(shares)
    for _ in range(2):
        shares = np.linspace(shares[max(0, best - 1)], shares[min(len(shares) - 1, best + 1)], 17)
        finer, best = largest(shares)
        tail = max(tail, finer)
    return min(1.0, tail)


def falls_below(gained: int, lost: int, n: int, difference: float) -> float:
    """Return the exact one-sided p of the outcome, if the true difference is at least `difference`."""
    return exceeds(lost, gained, n, -difference)
