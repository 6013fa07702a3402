"""The budget of a run that names none: the usual share of full KV, or the least that the method can hold."""

from __future__ import annotations

from dataclasses import replace

from kvlens import methods
from kvlens.budget import NO_LIMIT, WHOLE, Budget, BudgetInfeasible, in_words, percent_up
from kvlens.methods.advice import refusal
from kvlens.methods.fitting import Sizes
from kvlens.runs.preparing import choose_parameters
from kvlens.runs.request import DEFAULT_SHARE, RunRequest, default_preset


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
