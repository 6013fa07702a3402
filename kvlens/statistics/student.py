"""Student's distribution for whole degrees of freedom, and the one-sided test of a mean."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import fmean, stdev


def tail(t: float, freedom: int) -> float:
    """Return the probability that Student's t exceeds a value (Abramowitz and Stegun 26.7.3 and 26.7.4)."""
    if math.isinf(t):
        return 0.0 if t > 0 else 1.0
    angle = math.atan(abs(t) / math.sqrt(freedom))
    square, is_odd = math.cos(angle) ** 2, freedom % 2
    term = total = math.cos(angle) if is_odd else 1.0
    for power in range(3 if is_odd else 2, freedom - 1, 2):
        term *= square * (power - 1) / power
        total += term
    total = 0.0 if freedom == 1 else total * math.sin(angle)
    inside = 2 / math.pi * (angle + total) if is_odd else total
    upper = max(0.0, (1 - inside) / 2)
    return upper if t >= 0 else 1 - upper


@lru_cache(maxsize=4096)
def quantile(share: float, freedom: int) -> float:
    """Return the value that Student's t exceeds with probability 1 - share, to 1e-9."""
    if share < 0.5:
        return -quantile(1 - share, freedom)
    low, high = 0.0, 1.0
    while tail(high, freedom) > 1 - share:
        high *= 2
    while high - low > 1e-9:
        middle = (low + high) / 2
        low, high = (middle, high) if tail(middle, freedom) > 1 - share else (low, middle)
    return (low + high) / 2


@dataclass(frozen=True)
class Sample:
    """Figures that trials gave independently: their number, mean and standard deviation."""

    n: int
    mean: float
    spread: float

    def exceeds(self, bound: float) -> float:
        """Return the one-sided p of the mean, if the true mean is at most `bound`.

        Never below 2^-n, the least that a test by signs returns: a few values that agree do not show that all do."""
        if self.n < 2:
            return 1.0
        error, excess = self.spread / math.sqrt(self.n), self.mean - bound
        t = excess / error if error > 0 else math.copysign(math.inf, excess) if excess else 0.0
        return max(tail(t, self.n - 1), 2.0**-self.n)

    def falls_below(self, bound: float) -> float:
        """Return the one-sided p of the mean, if the true mean is at least `bound`."""
        return Sample(self.n, -self.mean, self.spread).exceeds(-bound)


def sample(values: Sequence[float]) -> Sample:
    """Return the number, mean and standard deviation of values; a single value has the deviation 0."""
    return Sample(len(values), fmean(values), stdev(values) if len(values) > 1 else 0.0)
