"""Intervals for shares of few trials."""

from __future__ import annotations

import math


def wilson(share: float, n: int, z: float = 1.96) -> tuple[float, float]:
    """Wilson's score interval (95 % for z = 1.96) of a share found in n trials."""
    centre, half = share + z * z / (2 * n), z * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    return max(0.0, (centre - half) / (1 + z * z / n)), min(1.0, (centre + half) / (1 + z * z / n))
