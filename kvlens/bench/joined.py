"""Quality tables of the same prompts at different budgets, measured in several sittings, as one table."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from kvlens.memory.budget import Budget

SAME = ("model", "length", "question", "tasks", "prompts", "first_seed", "dtype", "methods")
"""of what was asked for, what tables that are one have in common, where it was recorded"""
ON = ("kvlens", "torch", "transformers", "machine", "depths", "new_tokens")
"""and of what they were measured on"""


def joined(results: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Results as kvlens.bench.quality writes them -> as many or fewer: those that differ in their budgets alone are one
    result."""
    return [one(members) for members in alike(results)]


def alike(results: Iterable[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Results that are one table, in the order of the first of each."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for number, result in enumerate(results):
        groups.setdefault(_common(result) or str(number), []).append(result)
    return list(groups.values())


def one(members: list[dict[str, Any]]) -> dict[str, Any]:
    """The result that alike ones come to. Its lines stand by method and rising budget, those without a budget once;
    `trials` and `planned` are sums; `sittings` says on which date which budgets were measured."""
    if len(members) == 1:
        return members[0]
    members = sorted(members, key=lambda result: (result["about"]["date"], _share(_budgets(result)[0])))
    first = members[0]["about"]
    lines: dict[tuple[str, ...], dict[str, Any]] = {}
    for line in (line for result in members for line in result["lines"]):
        lines.setdefault((line["method"], line.get("dtype", ""), line["budget"], line["task"]), line)
    arms, tasks = list(dict.fromkeys(known[:2] for known in lines)), first["request"]["tasks"]
    in_order = sorted(lines, key=lambda known: (arms.index(known[:2]), _share(known[2]), tasks.index(known[3])))
    sittings: dict[str, list[str]] = {}
    for result in members:
        sittings.setdefault(result["about"]["date"], []).extend(_budgets(result))
    budgets = sorted({budget for said in sittings.values() for budget in said}, key=_share)
    made = {
        "request": first["request"] | {"budgets": budgets},
        "trials": sum(result["about"]["trials"] for result in members),
        "planned": sum(result["about"]["planned"] for result in members),
        "sittings": sittings,
    }
    return {"about": first | made, "lines": [lines[known] for known in in_order]}


def _common(result: dict[str, Any]) -> str | None:
    """What tables that are one have in common; None of what is no table, which its reader says."""
    try:
        about, asked = result["about"], result["about"]["request"]
        needed = [_share(budget) for budget in (*asked["budgets"], *(line["budget"] for line in result["lines"]))]
        needed += [line[name] for line in result["lines"] for name in ("method", "task")]
        needed += [about[name] for name in ("trials", "planned", "date")]
    except (KeyError, TypeError, ValueError):
        return None
    return repr([*(asked.get(name) for name in SAME), *(about.get(name) for name in ON)])


def _budgets(result: dict[str, Any]) -> list[str]:
    return list(result["about"]["request"]["budgets"])


def _share(budget: str) -> float:
    return Budget.parse(budget).amount if budget else 0.0
