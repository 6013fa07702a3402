"""The rule for budgets of methods that keep all KV on the device: a share of full KV is the share of the tokens that
they attend. Runs, races, studies, the API and the form use it alike."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from kvlens import methods
from kvlens.budget import Budget
from kvlens.runs.request import RunRequest

SHARE, COUNT = "keep", "tokens"
"""parameters that say what such a method attends: a share of the tokens, and their number"""


def attended_share(method: str, budget: str | None, overrides: Mapping[str, Any]) -> float | None:
    """Return the share of the tokens that a budget lets a method attend; None where the rule is not for it: a method
    that has a memory budget, no parameter for the share, a budget in bytes or tokens, no limit, or parameters that say
    what is attended."""
    kind = methods.get(method)
    if not kind.keeps_all or budget is None or SHARE in overrides or COUNT in overrides:
        return None
    limit = Budget.parse(budget)
    if limit.unit != "share" or limit.amount >= 1:
        return None
    return limit.amount if any(field.name == SHARE for field in dataclasses.fields(kind.Parameters)) else None


def attending(request: RunRequest) -> RunRequest:
    """Return the request with its budget as the share of attended tokens, where the rule is for its method."""
    share = attended_share(request.method, request.budget, request.overrides)
    if share is None:
        return request
    return request.model_copy(update={"budget": None, "overrides": {**request.overrides, SHARE: share}})


def attending_sentence(method: str, share: float) -> str:
    """Return the sentence that says what a budget means for a method that keeps all KV."""
    return f"{methods.get(method).title} keeps all KV on the device and attends {share * 100:.3g} % of it."
