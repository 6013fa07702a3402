"""How many prompts a statement needs, by a calculation of power: before a run and for a statement that is not decided.

A comparison is planned for the smallest difference that counts, the figure's margin: *better* for a gain as large as
the margin, *as good* and *alike* for arms that are equal, *within* for a mean in the middle of the range. All
comparisons of a statement are to pass together with 80 % probability, at the level that Holm's correction requires of
the first claim of a paper."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvlens.lab.claims.family import tested_level
from kvlens.lab.results.power import MOST, POWER, pairs_needed, values_needed
from kvlens.methods.statements import FIGURES, Statement

DISCORDANT = 0.2
"""ours: share of pairs that only one arm answers, before any is measured"""
SPREADS = {"kl": 0.08, "coverage": 0.05, "reused_share": 0.05, "corrected_share": 0.05}
"""ours: standard deviation of the differences of a figure before any is measured, near the median of 18 and of 2 to 6
comparisons on smollm2"""
SPREAD = 0.05
"""the standard deviation of figures that SPREADS does not name"""
PASSAGES = 21
"""passages without common text that the text at hand has"""
FEWEST = 10
"""ours: fewer pairs decide nothing"""


@dataclass(frozen=True)
class Plan:
    """Prompts of one statement."""

    statement: Statement
    needs: int
    """pairs"""
    prompts: int
    """prompts of each task, or passages; fewer than needed where the text at hand has no more"""
    level: float
    """one-sided level of one claim"""

    @property
    def pairs(self) -> int:
        """Return the number of pairs that the prompts give."""
        return self.prompts * (1 if FIGURES[self.statement.figure].of_text else len(self.statement.tasks))

    @property
    def trials(self) -> int:
        """Return the number of trials of all arms."""
        return self.pairs * len(self.statement.arms)


def measured_spread(statement: Statement) -> float:
    """Return the spread that a plan assumes before the statement is measured."""
    return DISCORDANT if statement.figure == "exact" else SPREADS.get(statement.figure, SPREAD)


def pairs_for(statement: Statement, spread: float, level: float) -> int:
    """Return the number of pairs that one statement needs.

    spread: share of pairs that only one arm answers for exact match, else the standard deviation of the differences;
    level: one-sided."""
    margin, sides = FIGURES[statement.figure].margin, 2 if statement.verdict in ("alike", "within") else 1
    target = 1 - (1 - POWER) / (sides * max(1, len(statement.others)))
    if statement.bounds is not None:
        low, high = statement.bounds
        needed = values_needed((high - low) / 2, spread, level, target)
    elif statement.figure != "exact":
        needed = values_needed(margin, spread, level, target)
    elif statement.verdict == "better":
        needed = pairs_needed(0.0, margin, round(spread, 2), level, target)
    else:
        needed = pairs_needed(-margin, 0.0, round(spread, 2), level, target)
    return max(FEWEST, needed)


def plan(
    statements: Sequence[Statement], claims: int, prompts: int | None = None, passages: int | None = None
) -> list[Plan]:
    """Return the prompts of each statement of one paper.

    claims: number of the paper's claims that are tested; prompts: of each task, for all statements alike; None: as many
    as each needs; passages: of each statement about text; None: as many as prompts."""
    level, plans = tested_level(claims), []
    for statement in statements:
        needed, of_text = pairs_for(statement, measured_spread(statement), level), FIGURES[statement.figure].of_text
        given = passages if of_text and passages is not None else prompts
        if given is not None:
            per_task = given
        elif of_text:
            per_task = min(needed, PASSAGES)
        else:
            per_task = math.ceil(needed / len(statement.tasks))
        plans.append(Plan(statement, needed, per_task, level))
    return plans


def plan_lines(plans: Mapping[str, Sequence[Plan]], titles: Mapping[str, str]) -> list[str]:
    """Return the plan in words, a line per statement and one for the whole. plans, titles: by method."""
    lines = []
    for name, method_plans in plans.items():
        for row in method_plans:
            needed = f"{row.needs:,}" + (" or more" if row.needs >= MOST else "")
            short = "" if row.pairs >= row.needs else ": may stay undecided"
            lines.append(
                f"{titles.get(name, name)}, {row.statement.source}: needs n = {needed}, takes {row.pairs}{short}"
            )
    rows = [row for method_plans in plans.values() for row in method_plans]
    lines.append(
        f"{len(rows)} statements, at most {sum(row.trials for row in rows):,} trials; arms that statements share are "
        f"run once. Planned for 80 % power, one-sided level 2.5 % over the claims of a paper (Holm), "
        f"{DISCORDANT:.0%} of pairs answered by one arm only."
    )
    return lines
