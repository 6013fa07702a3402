"""Quality tables of the same prompts at different budgets, measured in several sittings, as one table; and the rows
of other presets that a result has beside its own."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from kvlens import methods
from kvlens.budget import Budget

SAME = ("model", "length", "question", "tasks", "prompts", "first_seed", "dtype")
"""of what was asked for, what tables that are one have in common, where it was recorded"""
ON = ("kvlens", "torch", "transformers", "machine", "depths", "new_tokens")
"""and of what they were measured on"""


def joined(results: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Results as kvlens.lab.bench.quality writes them -> as many or fewer: those that differ in their budgets alone,
    and have none in common, are one result. One of them may lack methods of the other."""
    return [one(members) for members in alike(results)]


def alike(results: Iterable[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Results that are one table, in the order of the first of each."""
    groups: list[tuple[str | None, list[dict[str, Any]]]] = []
    for result in results:
        known_values = _common(result)
        for common, members in groups:
            if known_values is not None and common == known_values and all(_fits(result, member) for member in members):
                members.append(result)
                break
        else:
            groups.append((known_values, [result]))
    return [members for _, members in groups]


def one(members: list[dict[str, Any]]) -> dict[str, Any]:
    """The result that alike ones come to. Its lines stand by method and rising budget, those without a budget once;
    `trials` and `planned` are sums; `sittings` says on which date which budgets were measured."""
    if len(members) == 1:
        return members[0]
    members = sorted(members, key=lambda result: (result["about"]["date"], _share(_budgets(result)[0])))
    start = members[0]["about"]
    lines: dict[tuple[str, ...], dict[str, Any]] = {}
    for line in (line for result in members for line in result["lines"]):
        lines.setdefault((line["method"], line.get("dtype", ""), line["budget"], line["task"]), line)
    arms, tasks = list(dict.fromkeys(known_values[:2] for known_values in lines)), start["request"]["tasks"]
    in_order = sorted(
        lines,
        key=lambda known_values: (arms.index(known_values[:2]), _share(known_values[2]), tasks.index(known_values[3])),
    )
    sittings: dict[str, list[str]] = {}
    for result in members:
        sittings.setdefault(result["about"]["date"], []).extend(_budgets(result))
    budgets = sorted({budget for sitting in sittings.values() for budget in sitting}, key=_share)
    remade = {name: date for result in members for name, date in (result["about"].get("remade") or {}).items()}
    widest = max(map(_methods, members), key=len)
    presets = {
        name: preset for result in reversed(members) for name, preset in (result["about"].get("presets") or {}).items()
    }
    product = {
        **({"presets": presets} if presets else {}),
        "request": start["request"] | {"budgets": budgets, **({"methods": widest} if widest else {})},
        **({"remade": remade} if remade else {}),
        "trials": sum(result["about"]["trials"] for result in members),
        "planned": sum(result["about"]["planned"] for result in members),
        "sittings": sittings,
    }
    variants = [line for result in members for line in result.get("variants", ())]
    variants.sort(key=lambda line: (line["method"], line["variant"], _share(line["budget"])))
    more = {"variants": variants} if variants else {}
    return {"about": start | product, "lines": [lines[known_values] for known_values in in_order]} | more


def with_variants(result: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the lines, with those of other presets (kvlens.lab.studies.preset_rows) behind their method's own."""
    lines = list(result["lines"])
    for line in reversed(result.get("variants", [])):
        places = [place for place, row in enumerate(lines) if row["method"] == line["method"] and "variant" not in row]
        lines.insert(max(places, default=len(lines) - 1) + 1, line)
    return lines


def variants_measured(result: dict[str, Any]) -> str:
    """Return where and when the rows of other presets were measured; '' if there are none."""
    sentences = dict.fromkeys(
        f" Rows {methods.get(line['method']).title} {line['variant']}: {line['about']['date']}, "
        f"{line['about']['machine']['processor']}, torch {line['about']['torch']}."
        for line in result.get("variants", [])
    )
    return "".join(sentences)


def _common(result: dict[str, Any]) -> str | None:
    """What tables that are one have in common; None of what is no table, which its reader says."""
    try:
        about, request = result["about"], result["about"]["request"]
        tasks = list(request["tasks"])
        needed = [_share(budget) for budget in (*request["budgets"], *(line["budget"] for line in result["lines"]))]
        needed += [line["method"] for line in result["lines"]]
        needed += _methods(result)
        needed += [about[name] for name in ("trials", "planned", "date")]
    except (KeyError, TypeError, ValueError):
        return None
    if not (tasks and request["budgets"] and all(line["task"] in tasks for line in result["lines"])):
        return None
    return repr([*(request.get(name) for name in SAME), *(about.get(name) for name in ON)])


def _fits(result: dict[str, Any], member: dict[str, Any]) -> bool:
    """Return whether two tables have no budget in common, and one has every method of the other."""
    names, member_names = (set(_methods(table)) for table in (result, member))
    budgets, member_budgets = ({_share(budget) for budget in _budgets(table)} for table in (result, member))
    nested = names == member_names or (names and member_names and (names <= member_names or member_names <= names))
    return bool(nested) and budgets.isdisjoint(member_budgets)


def _methods(result: dict[str, Any]) -> list[Any]:
    """Return the methods that were asked for; [] where the table does not record them."""
    return list(result["about"]["request"].get("methods") or ())


def _budgets(result: dict[str, Any]) -> list[str]:
    return list(result["about"]["request"]["budgets"])


def _share(budget: str) -> float:
    return Budget.parse(budget).amount if budget else 0.0
