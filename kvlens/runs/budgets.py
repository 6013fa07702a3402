"""The budget of a run: the usual share of full KV, or the least that the method can hold, where the request names none;
and the share of attended tokens for a method that keeps all KV on the device. Runs, races, studies, the API and the
form use these rules alike."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from kvlens import methods
from kvlens.budget import NO_LIMIT, WHOLE, Budget, BudgetInfeasible, in_words, percent_up
from kvlens.methods.advice import refusal
from kvlens.methods.fitting import Sizes
from kvlens.runs.preparing import choose_parameters
from kvlens.runs.request import DEFAULT_SHARE, RunRequest, default_preset

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


def with_room(request: RunRequest, sizes: Sizes) -> RunRequest:
    """Return the request with a budget that its method can hold by arithmetic. A request that names a budget, and one
    that the usual share may suffice for, stay as they are."""
    method = methods.get(request.method)
    if request.budget is not None or method.keeps_all:
        return request
    usual = replace(sizes, budget_bytes=Budget.parse(DEFAULT_SHARE).bytes(sizes.shape, _tokens(sizes)))
    preset = default_preset(request.method, request.model)
    refused = refusal(method, request.preset, preset, choose_parameters(request, usual), request.overrides, usual)
    return request if refused is None else wider(request, refused)


def wider(request: RunRequest, refused: BudgetInfeasible) -> RunRequest:
    """Return the request with the budget that a refusal names; without a limit where that budget is not larger than
    the one refused."""
    share = percent_up(max(refused.smallest, refused.likely or 0) / refused.full)
    larger = float(share) * refused.full > refused.budget
    return request.model_copy(update={"budget": share if larger and float(share) < 1 else WHOLE})


def resized(request: RunRequest, sizes: Sizes) -> Sizes:
    """Return the sizes under the request's budget."""
    budget = Budget.parse(request.budget) if request.budget else None
    return sizes if budget is None else replace(sizes, budget_bytes=budget.bytes(sizes.shape, _tokens(sizes)))


def room_made(request: RunRequest) -> str:
    """Return the sentence that names the budget of a request that was given room."""
    title, usual, budget = methods.get(request.method).title, in_words(DEFAULT_SHARE), in_words(request.budget)
    held = "The run has no limit" if budget == NO_LIMIT else f"The budget is {budget} of full KV"
    return f"{held}: {title} cannot hold this prompt in the usual {usual}."


def _tokens(sizes: Sizes) -> int:
    """Return the number of tokens of the prompt and the output together."""
    return sizes.prompt_tokens + 1 + sizes.max_new
