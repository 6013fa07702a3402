"""Intervals and tests for shares of few trials."""

from __future__ import annotations

import math


def wilson(share: float, n: int, z: float = 1.96) -> tuple[float, float]:
    """Wilson's score interval (95 % for z = 1.96) of a share found in n trials."""
    centre, half = share + z * z / (2 * n), z * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    return max(0.0, (centre - half) / (1 + z * z / n)), min(1.0, (centre + half) / (1 + z * z / n))


def sign_test(better: int, worse: int) -> float:
    """Two-sided p of so lopsided a split of the prompts on which two arms disagree."""
    n = better + worse
    tail = sum(math.comb(n, k) for k in range(min(better, worse) + 1)) / 2**n
    return min(1.0, 2 * tail)
