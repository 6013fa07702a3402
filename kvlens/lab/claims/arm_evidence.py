"""What the arms of a paper's statement show for it and against it, without the verdict. Plain Python and NumPy; no
torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from kvlens.lab.claims import Claim, Test
from kvlens.lab.claims.arm_pairs import Compare, Record
from kvlens.lab.claims.armstudy import Rows, places
from kvlens.lab.claims.family import tested_level
from kvlens.lab.claims.plan import FEWEST, pairs_for
from kvlens.lab.claims.words import SHARES, Wording, arm_words
from kvlens.methods.statements import Arm, Statement
from kvlens.statistics.student import sample


def record(arm: Arm, words: str, rows: Sequence[dict[str, Any]], figure: str) -> dict[str, Any]:
    """Return an arm's numbers, plain JSON. rows: its trials, in the order of the places."""
    shares = {name: [row[name] for row in rows if row.get(name) is not None] for name in SHARES}
    return {
        "arm": words,
        "method": arm.method,
        "values": [row.get(figure) for row in rows],
        **{name: fmean(values) if values else None for name, values in shares.items()},
        "presets": sorted({row.get("preset") or "defaults" for row in rows}),
        "infeasible": [row["infeasible"] for row in rows if row.get("infeasible") is not None],
        "refused": list(dict.fromkeys(row["refused"] for row in rows if "refused" in row)),
        "failed_self_checks": sum(row.get("passed") is False for row in rows),
    }


def p_values(compare: Compare) -> tuple[float, float]:
    """Return the one-sided p of the figures if the statement were false, and if it were true.

    It holds if every comparison passes, so the largest p counts. It fails if one comparison does, so the smallest p
    counts, times the number of comparisons (Bonferroni)."""
    if compare.statement.bounds is not None:
        values, (low, high) = compare.values(), compare.statement.bounds
        if len(values) < FEWEST:
            return 1.0, 1.0
        mean = sample(values)
        outside = min(mean.falls_below(low), mean.exceeds(high))
        return max(mean.exceeds(low), mean.falls_below(high)), min(1.0, 2 * outside)
    pairs, margin = compare.pairs, compare.figure.margin
    holding = [1.0 if compare.too_few_answers(pair) else pair.exceeds(compare.least) for pair in pairs]
    failing = [pair.falls_below(compare.least) for pair in pairs]
    if compare.both_sides:
        holding += [pair.falls_below(margin) for pair in pairs]
        failing += [pair.exceeds(margin) for pair in pairs]
    return max(holding), min(1.0, len(failing) * min(failing))


def needs(compare: Compare, claims: int) -> int | None:
    """Return the number of pairs that the statement needs; None if more prompts do not decide it."""
    if compare.statement.bounds is not None:
        values = compare.values()
        spreads = [sample(values).spread] if values else []
    else:
        if any(not pair.n or compare.too_few_answers(pair) for pair in compare.pairs):
            return None
        spreads = [pair.spread for pair in compare.pairs]
    if not spreads:
        return None
    return max(pairs_for(compare.statement, spread, tested_level(claims)) for spread in spreads)


def weigh(
    statement: Statement, method: str, records: Sequence[Record], prompts: int, wording: Wording, claims: int
) -> Claim:
    """Return the claim that a statement's arms come to, without its verdict (`kvlens.lab.claims.family.decide`).

    records: of `Statement.arms`; prompts: of each task, or passages; claims: number of the paper's claims that are
    tested."""
    compare = Compare(statement, records)
    holding, failing = p_values(compare)
    pairs, needed = compare.pairs, needs(compare, claims)
    n = min((pair.n for pair in pairs), default=len(compare.values()))
    refuted, undecided = wording.reasons(compare, needed)
    return Claim(
        method,
        statement.source,
        statement.says,
        wording.describe_figures(compare, prompts),
        None,
        undecided,
        {
            "figure": statement.figure,
            "verdict": statement.verdict,
            "margin": compare.figure.margin if statement.verdict in ("as good", "alike") else None,
            "bounds": statement.bounds,
            "prompts": prompts,
            **({"text": list(statement.text)} if compare.figure.of_text else {}),
            "arms": [dict(row) for row in records],
            "gains": [
                {
                    "over": row["arm"],
                    "n": pair.n,
                    "gain": fmean(pair.gains) if pair.gains else None,
                    **dict(zip(("low", "high"), pair.bounds or (None, None), strict=True)),
                }
                for row, pair in zip(records[1:], pairs, strict=False)
            ],
        },
        Test(n, holding, failing, needed, refuted, undecided),
    )


def judge(
    statement: Statement, method: str, rows: Rows, prompts: int, titles: Mapping[str, str], model: str, claims: int
) -> Claim:
    """Return the claim of a statement from the trials of its arms, without its verdict. titles: of methods."""
    columns = {arm: [rows[arm, place] for place in places(statement, prompts)] for arm in dict.fromkeys(statement.arms)}
    records = [record(arm, arm_words(arm, titles), columns[arm], statement.figure) for arm in statement.arms]
    return weigh(statement, method, records, prompts, Wording(titles, model), claims)
