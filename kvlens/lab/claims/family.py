"""Verdicts on all claims of one paper together: Holm's correction of their p values."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from kvlens.lab.claims import Claim

LEVEL = 0.025
"""largest probability that any claim of a paper is found to hold in error; as large again for *does not hold*"""


def holm(values: Sequence[float], level: float = LEVEL) -> list[bool]:
    """Return which hypotheses are rejected, given one p value each.

    The probability of one or more wrong rejections is at most `level`, however the values depend on each other (Holm,
    Scandinavian Journal of Statistics 6, 1979)."""
    rejected = [False] * len(values)
    for rank, index in enumerate(sorted(range(len(values)), key=lambda index: values[index])):
        if values[index] > level / (len(values) - rank):
            break
        rejected[index] = True
    return rejected


def tested_level(claims: int) -> float:
    """Return the one-sided level that the first of so many claims has to reach."""
    return LEVEL / max(1, claims)


def decide(claims: Sequence[Claim]) -> list[Claim]:
    """Return the claims of one paper with their verdicts. A claim without a test keeps its verdict.

    Holm's correction is made twice, over the p values for the claims and over those against them."""
    tests = {index: claim.test for index, claim in enumerate(claims) if claim.test is not None}
    holding = dict(zip(tests, holm([test.p_holds for test in tests.values()]), strict=True))
    failing = dict(zip(tests, holm([test.p_fails for test in tests.values()]), strict=True))
    decided = list(claims)
    for index, test in tests.items():
        holds = False if failing[index] else True if holding[index] else None
        reason = {True: "", False: test.refuted, None: test.undecided}[holds]
        decided[index] = dataclasses.replace(claims[index], holds=holds, reason=reason)
    return decided
