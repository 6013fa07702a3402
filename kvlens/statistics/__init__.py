"""Intervals and tests for shares and means of few trials."""

from __future__ import annotations

import math
from collections.abc import Sequence

from kvlens.statistics.student import quantile, sample


def wilson(share: float, n: int, z: float = 1.96) -> tuple[float, float]:
    """Wilson's score interval (95 % for z = 1.96) of a share found in n trials."""
    centre, half = share + z * z / (2 * n), z * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    return max(0.0, (centre - half) / (1 + z * z / n)), min(1.0, (centre + half) / (1 + z * z / n))


def sign_test(better: int, worse: int) -> float:
    """Two-sided p of so lopsided a split of the prompts on which two arms disagree."""
    n = better + worse
    tail = sum(math.comb(n, k) for k in range(min(better, worse) + 1)) / 2**n
    return min(1.0, 2 * tail)


def binomial_above(count: int, n: int, share: float) -> float:
    """Return the exact one-sided p of `count` of n or more, if the true share is at most `share`."""
    if not 0 < share < 1:
        return float(count <= (n if share >= 1 else 0))
    whole, hit, miss = math.lgamma(n + 1), math.log(share), math.log1p(-share)
    exponents = (
        whole - math.lgamma(k + 1) - math.lgamma(n - k + 1) + k * hit + (n - k) * miss
        for k in range(max(0, count), n + 1)
    )
    return min(1.0, math.fsum(map(math.exp, exponents)))


def binomial_below(count: int, n: int, share: float) -> float:
    """Return the exact one-sided p of `count` of n or fewer, if the true share is at least `share`."""
    return binomial_above(n - count, n, 1 - share)


def mean_interval(values: Sequence[float], few: int = 2) -> tuple[float, float, float]:
    """Return (mean, low, high): Student's 95 % interval of the mean of figures that trials gave independently.

    Fewer than `few` values have no bounds: they are infinite."""
    drawn = sample(values)
    half = quantile(0.975, drawn.n - 1) * drawn.spread / math.sqrt(drawn.n) if drawn.n >= max(few, 2) else math.inf
    return drawn.mean, drawn.mean - half, drawn.mean + half


def of_mean(values: Sequence[float]) -> tuple[float, float] | None:
    """Return Student's 95 % interval of a mean; None for fewer than six values: they show little of their spread."""
    return mean_interval(values)[1:] if len(values) >= 6 else None
