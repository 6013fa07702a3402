"""From trials to the figures of a cell: counts, exact match with its interval, means. Plain Python; no torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from statistics import fmean
from typing import Any

from kvlens.statistics import wilson

MEANS = (
    "score",
    "coverage",
    "selection_recall",
    "attended_tokens",
    "resident_share",
    "read_share",
    "read_bytes_per_step",
    "h2d_bytes_per_step",
    "d2h_bytes_per_step",
)


def summary(members: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The trials of one cell -> n, infeasible, refused, rule, presets (name: trials), smallest_feasible (share, mean
    over the infeasible). unjudged, the trials that were run and have no score, is there where it is not 0. Where n > 0:
    exact with its 95 % Wilson interval (low, high), attended_share, failed_self_checks and the means of MEANS, None
    where no trial has the figure."""
    judged = [row for row in members if row.get("exact") is not None]
    infeasible = [row["infeasible"] for row in members if row.get("infeasible") is not None]
    line: dict[str, Any] = {
        "n": len(judged),
        "infeasible": len(infeasible),
        "rule": members[0]["rule"] if members else None,
        "presets": dict(Counter(row.get("preset") or "defaults" for row in members)),
        "smallest_feasible": fmean(infeasible) if infeasible else None,
    }
    ran = [row for row in members if row.get("infeasible") is None and row.get("refused") is None]
    if unjudged := sum(row.get("exact") is None for row in ran):
        line["unjudged"] = unjudged
    if judged:
        exact = fmean(row["exact"] for row in judged)
        line |= dict(zip(("exact", "low", "high"), (exact, *wilson(exact, len(judged))), strict=True))
        line["attended_share"] = fmean(row["attended_tokens"] / row["prompt_tokens"] for row in judged)
        line["failed_self_checks"] = sum(not row["passed"] for row in judged)
        for column in MEANS:
            recorded = [row[column] for row in judged if row.get(column) is not None]
            line[column] = fmean(recorded) if recorded else None
    return line


NOISE = " in "
"""between a method and the number format it is a control in"""


def arm_name(method: str, dtype: str) -> str:
    """What figures know an arm by: the method, or its control in another number format."""
    return f"{method}{NOISE}{dtype}" if dtype else method


def arm_titles(titles: dict[str, str], names: Iterable[str]) -> dict[str, str]:
    """`titles` of methods, with those of the controls among `names`."""
    parts = {name: name.partition(NOISE) for name in names if NOISE in name}
    controls = {
        name: f"{titles.get(total, total)} in {dtype} (noise floor)" for name, (total, _, dtype) in parts.items()
    }
    return titles | controls


def grouped(rows: Iterable[dict[str, Any]], texts: Sequence[str]) -> dict[tuple[Any, ...], list[dict[str, Any]]]:
    """Rows by the values of the columns `texts`, in the order of their first rows."""
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault(tuple(row[column] for column in texts), []).append(row)
    return groups
