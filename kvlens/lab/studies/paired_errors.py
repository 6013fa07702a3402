"""One-sided errors of four rules for *as good*, by enumeration of every outcome of n pairs.

    python -m kvlens.lab.studies.paired_errors --write docs/evidence/paired.md

A rule finds a true loss of exactly the margin *as good* in error with a probability that depends on the share of
discordant pairs. The study prints the largest of these probabilities over 201 shares."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from datetime import date
from pathlib import Path

import numpy as np

from kvlens.lab.results.power import rejection
from kvlens.statistics.paired import Floats, agresti_min, lost_shares, newcombe, outcomes, probabilities, tango

MARGIN = 0.1
"""of exact match (kvlens.methods.statements.FIGURES)"""
NOMINAL = 0.025
SIZES = (10, 20, 30, 50, 100)
SHARES = 201
RULES: dict[str, Callable[[int], Floats]] = {}
"""rule -> for n pairs, True for every outcome that passes (order of `outcomes`)"""
TEXT = """# Errors of the rules for *as good*

Made by `python -m kvlens.lab.studies.paired_errors --write docs/evidence/paired.md`: exact, by enumeration, no model,
on {day}.

The true loss is {margin:.0%}, the margin of exact match. A rule should find it *as good* in at most {nominal:.1%} of
cases. The table shows the largest probability over {shares} shares of discordant pairs. Newcombe's interval depends on
the pairs that both arms answer; here they are half of the pairs that agree.

| rule | {heads} |
| --- | {lines} |
{rows}

kvlens judges by the exact test, and prints Tango's interval beside a gain. Until version 0.2.0 it judged by Agresti and
Min's interval.
"""


def _passing(lower_bound: Callable[[int, int, int], float]) -> Callable[[int], Floats]:
    def passes(n: int) -> Floats:
        gained, lost, _ = outcomes(n)
        counts = zip(gained.astype(int).tolist(), lost.astype(int).tolist(), strict=True)
        return np.array([lower_bound(more, fewer, n) > -MARGIN for more, fewer in counts])

    return passes


def _newcombe_low(gained: int, lost: int, n: int) -> float:
    agreed = n - gained - lost
    return newcombe(agreed - agreed // 2, gained, lost, agreed // 2)[0]


RULES["Agresti and Min's interval"] = _passing(lambda gained, lost, n: agresti_min(gained, lost, n)[0])
RULES["Newcombe's interval"] = _passing(_newcombe_low)
RULES["Tango's interval"] = _passing(lambda gained, lost, n: tango(gained, lost, n)[0])
RULES["exact test on Tango's statistic"] = lambda n: rejection(n, -MARGIN, NOMINAL)


def largest_error(rule: str, n: int) -> float:
    """Return the largest probability that a rule passes n pairs, if the true loss is the margin."""
    passes = RULES[rule](n)
    return max(
        float(probabilities(n, max(0.0, share - MARGIN), share)[passes].sum())
        for share in lost_shares(-MARGIN, SHARES).tolist()
    )


def page(day: str) -> str:
    """Return the page with all rules and sizes. day: on which they were computed, as ISO 8601."""
    rows = [f"| {rule} | " + " | ".join(f"{largest_error(rule, n):.1%}" for n in SIZES) + " |" for rule in RULES]
    heads, lines = " | ".join(f"n = {n}" for n in SIZES), " | ".join("---:" for _ in SIZES)
    return TEXT.format(
        day=day, margin=MARGIN, nominal=NOMINAL, shares=SHARES, heads=heads, lines=lines, rows="\n".join(rows)
    )


def main() -> None:
    """Write or print the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", type=Path, help="file to write")
    target = parser.parse_args().write
    text = page(date.today().isoformat())
    if target is None:
        print(text)
    else:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
