"""What is said of a budget that a method cannot be held to, and what would work instead."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from kvlens.budget import BudgetInfeasible, percent_up, raised_to
from kvlens.methods.fitting import Chosen, Sizes, choose
from kvlens.methods.parameters import FIT

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvlens.methods.base import Method


def smallest_budget(
    method: type[Method], preset: str | None, usual: str | None, overrides: Mapping[str, Any], sizes: Sizes
) -> int | None:
    """The smallest budget in thousandths of full KV, in bytes, that a run of these parameters can be held to by
    arithmetic; None: not even full KV."""
    low, high = 0, 1000

    def held(thousandths: int) -> bool:
        limit = sizes.full_kv_bytes * thousandths // 1000
        limited = dataclasses.replace(sizes, budget_bytes=limit)
        return choose(method, preset, usual, overrides, limited).floor <= limit

    if not held(high):
        return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if held(middle) else (middle, high)
    return sizes.full_kv_bytes * high // 1000


def refusal(
    method: type[Method],
    preset: str | None,
    usual: str | None,
    choice: Chosen,
    overrides: Mapping[str, Any],
    sizes: Sizes,
) -> BudgetInfeasible:
    """Return the refusal of a run that no text of its length makes possible (`Sizes.may_hold`), before anything is
    loaded. preset: as it was asked for; usual: the one that is taken where none was."""
    needed = choice.floor if method.floor_is_exact else sizes.least(method, choice.params)
    return advised(method, preset, usual, overrides, sizes, needed)


def advised(
    method: type[Method], preset: str | None, usual: str | None, overrides: Mapping[str, Any], sizes: Sizes, needed: int
) -> BudgetInfeasible:
    """The refusal of a budget that is smaller than `needed`, with what would work: another budget, the preset `fit`, or
    no budget for a method that saves no memory."""
    limit, full = sizes.budget_bytes or 0, sizes.full_kv_bytes
    if method.keeps_all:
        instead = "it keeps all KV on the device and saves reading: leave out --budget"
        if any(field.name == "keep" for field in dataclasses.fields(method.Parameters)):
            instead += f", and --set keep={limit / full:.3g} lets it attend that share"
        return BudgetInfeasible(method.name, limit, needed, full, instead)
    named = preset not in (None, FIT)
    enough = smallest_budget(method, FIT if named else preset, usual, overrides, sizes)
    if named:
        return _of_named(method, sizes, needed, enough)
    if enough is None or enough <= limit or percent_up(enough / full) == percent_up(needed / full):
        return BudgetInfeasible(method.name, limit, needed, full)  # within the budget by estimate: this text takes more
    if enough < needed or method.floor_is_exact:
        return BudgetInfeasible(method.name, limit, enough, full)  # under what `fit` comes to at that budget
    instead = f"{raised_to(enough / full)} or change the method's parameters"
    return BudgetInfeasible(
        method.name, limit, needed, full, instead, {"budget": percent_up(enough / full)}, likely=enough
    )


def _of_named(method: type[Method], sizes: Sizes, needed: int, fit: int | None) -> BudgetInfeasible:
    """Of a preset that was asked for; fit: the smallest budget of the preset `fit`."""
    limit, full = sizes.budget_bytes or 0, sizes.full_kv_bytes
    raised, fits = raised_to(needed / full), {"preset": FIT}
    if fit is None:
        return BudgetInfeasible(method.name, limit, needed, full)
    if fit <= limit:
        return BudgetInfeasible(method.name, limit, needed, full, f"run with --preset {FIT}, or {raised}", fits)
    if fit < needed:
        remedy, would_do = f"{raised_to(fit / full)} with --preset {FIT}", {"budget": percent_up(fit / full)} | fits
        return BudgetInfeasible(method.name, limit, needed, full, remedy, would_do)
    return BudgetInfeasible(method.name, limit, needed, full, raised, {"budget": percent_up(needed / full)})
