"""McNemar's exact test of two arms on the same prompts: its power, and the prompts that it needs.

The test looks at the split prompts, which only one of the two arms answers right. Its p is `sign_test` of their counts
by arm. Probabilities are exact sums over binomials; above EXACT prompts a number of prompts is Connor's approximation.
"""

from __future__ import annotations

import math
from functools import lru_cache
from statistics import NormalDist

import numpy as np

from kvlens.statistics import binomial_above, sign_test
from kvlens.statistics.paired import Floats

ERROR, POWER = 0.05, 0.8
"""a difference is decided where p is below ERROR (two-sided); the wanted chance to decide a difference that is there"""
EXACT = 2048
"""prompts up to which `prompts_needed` is exact"""
LEAST_SPLITS = next(splits for splits in range(1, 99) if sign_test(splits, 0) < ERROR)
"""split prompts below which the test decides nothing"""


def decides(only_a: int, only_b: int) -> bool:
    """Return True if the test tells the arms apart, by the counts of prompts that only one of them answers right."""
    return sign_test(only_a, only_b) < ERROR


@lru_cache(maxsize=4)
def most_losses(most: int) -> tuple[int, ...]:
    """Return, for 0 to `most` split prompts, the most that an arm may lose for the test to decide for it; -1: none."""
    counts: list[int] = []
    losses, tail = -1, 0
    """`tail`: orders of the splits with at most `losses` losses"""
    for splits in range(most + 1):
        if splits and losses >= 0:
            tail = 2 * tail - math.comb(splits - 1, losses)
        following = tail + math.comb(splits, losses + 1)
        if 2 * following / 2**splits < ERROR:
            losses, tail = losses + 1, following
        counts.append(losses)
    return tuple(counts)


def power(n: int, only_a: float, only_b: float) -> float:
    """Return the probability that n prompts decide for the better arm.

    A alone is right on a true share `only_a` of all prompts, B alone on `only_b`."""
    more, fewer = max(only_a, only_b), min(only_a, only_b)
    if more <= 0:
        return 0.0
    return float(_binomial(n, more + fewer) @ _decided(n, fewer / (more + fewer)))


def prompts_needed(only_a: float, only_b: float) -> int:
    """Return the smallest number of prompts that decides for the better arm with a probability of POWER.

    A alone is right on a true share `only_a` of all prompts, B alone on `only_b`. Raises ValueError where the two do
    not differ."""
    if only_a == only_b:
        raise ValueError("two shares that are the same need no number of prompts to be told apart.")
    more, fewer = max(only_a, only_b), min(only_a, only_b)
    estimate = _connor(more, fewer)
    for most in (EXACT // 32, EXACT // 8, EXACT):
        if estimate > most:
            continue
        decided = _decided(most, fewer / (more + fewer))
        for n in range(LEAST_SPLITS, most + 1):
            if _binomial(n, more + fewer) @ decided[: n + 1] >= POWER:
                return n
    return max(estimate, EXACT + 1)


def detectable(n: int) -> float | None:
    """Return the smallest difference of two shares that n prompts decide with a probability of POWER, where only one of
    two arms is ever right alone, to a thousandth; None where n prompts decide nothing."""
    if n < LEAST_SPLITS:
        return None
    low, high = 0, 1000
    while high - low > 1:
        middle = (low + high) // 2
        enough = binomial_above(LEAST_SPLITS, n, middle / 1000) >= POWER
        low, high = (low, middle) if enough else (middle, high)
    return high / 1000


@lru_cache(maxsize=4)
def _logs(most: int) -> Floats:
    """Return the logarithms of the factorials of 0 to `most`."""
    return np.array([math.lgamma(count + 1) for count in range(most + 1)])


def _binomial(n: int, share: float, most: int | None = None) -> Floats:
    """Return the probabilities of 0 to `most` hits (None: n) of n."""
    hits = np.arange((n if most is None else most) + 1)
    if share >= 1:
        return (hits == n).astype(float)
    if share <= 0:
        return (hits == 0).astype(float)
    logs = _logs(1 << n.bit_length())
    orders = logs[n] - logs[hits] - logs[n - hits]
    return np.exp(orders + hits * math.log(share) + (n - hits) * math.log1p(-share))


@lru_cache(maxsize=8)
def _decided(most: int, lost_share: float) -> Floats:
    """Return, for 0 to `most` split prompts, the probability that the test decides for the arm that loses a share
    `lost_share` of them."""
    values = [
        float(_binomial(splits, lost_share, losses).sum()) if losses >= 0 else 0.0
        for splits, losses in enumerate(most_losses(most))
    ]
    return np.array(values)


def _connor(only_a: float, only_b: float) -> int:
    """Return the number of prompts by the normal approximation of McNemar's test (Connor, Biometrics 43, 1987)."""
    split, difference = only_a + only_b, abs(only_a - only_b)
    alpha, beta = NormalDist().inv_cdf(1 - ERROR / 2), NormalDist().inv_cdf(POWER)
    root = alpha * math.sqrt(split) + beta * math.sqrt(max(0.0, split - difference**2))
    return math.ceil((root / difference) ** 2)
