"""From the keywords of a call to a checked RunRequest."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypedDict, Unpack, cast

from kvlens import methods
from kvlens.api.errors import RequestError, unknown_name
from kvlens.api.keywordtypes import check_numbers, refused_type
from kvlens.api.prompts import PromptLike, prompt_of
from kvlens.methods.base import Method
from kvlens.methods.naming import installed
from kvlens.runs.request import RunRequest
from kvlens.text.carried import parse_turns
from kvlens.text.messages import Conversation

BudgetLike = str | float | None
"""a share (0.2, "20%"), tokens ("512tok") or bytes ("64MB"); None: the method's default"""


class Settings(TypedDict, total=False):
    """How tokens are chosen and what is recorded; what is left out has the default of `kvlens run`."""

    max_new: int
    """tokens to generate at most (64)"""
    seed: int
    """of sampling and of methods that draw (0)"""
    temperature: float
    """0 is greedy (0)"""
    top_p: float
    """share of probability that sampling draws from (1)"""
    stop: tuple[str, ...]
    """texts that end the output"""
    ignore_eos: bool
    """go on behind the end-of-text token (False)"""
    chat: str
    """"auto", "on" or "off": feed the prompt in the model's chat form ("auto")"""
    system: str
    """the chat form's system message"""
    chat_args: dict[str, Any]
    """what the chat template is given besides messages, such as {"enable_thinking": False} ({})"""
    turns: str
    """of chat messages with several turns, "carried": the first turn is read and placed, and the others are fed to its
    cache; "anew": the whole history is read and placed. Where it is given, `kvlens.run` runs user messages without a
    reply turn by turn; a race and a study take the messages as they are (as the messages are, anew)"""
    question: str
    """"in" or "after": place the question with its context, or feed it once the context is placed ("in")"""
    trace_level: str
    """"summary", "heads" or "spans": how much is recorded ("spans")"""
    coverage: bool
    """keep all keys, outside the budget, and record coverage (True)"""
    phases: bool
    """time the phases of every step, on a CPU (True)"""
    oracle: str
    """when full attention by span is recorded: "auto", "off", "all" or "every=4,layers=0-3+7" ("auto")"""
    threads: int
    """torch threads; 0: one for a small model, torch's choice otherwise (0)"""


def request_of(
    text: PromptLike,
    model: Mapping[str, str],
    *,
    method: str,
    preset: str | None,
    budget: BudgetLike,
    parameters: Mapping[str, Any],
    ask: str | None = None,
    answer: str | None = None,
    needle: str | None = None,
    segments: Mapping[str, str | tuple[int, int]] | None = None,
    **settings: Unpack[Settings],
) -> tuple[RunRequest, Conversation]:
    """Return the request and its prompt. Raises RequestError, BadPrompt or a ValueError of the core."""
    conversation = prompt_of(text, ask, answer, needle, segments)
    fields = request_fields(settings)
    if conversation.system is not None:
        if "system" in fields:
            raise RequestError("system_twice", "the messages begin with a system message: leave out system=.")
        fields["system"] = conversation.system
    values = {"method": method, "preset": preset, "budget": budget_text(budget), "overrides": dict(parameters)}
    return RunRequest(**model, **fields, **values, turns=conversation.turns), conversation


def request_fields(settings: Settings) -> dict[str, Any]:
    """Return the settings as fields of RunRequest. Raises Refusal `unknown_turns`."""
    fields: dict[str, Any] = dict(settings)
    if isinstance(fields.get("stop"), str):
        fields["stop"] = (fields["stop"],)
    if "turns" in fields:
        fields["carried"] = parse_turns(fields.pop("turns"))
    return fields


def budget_text(budget: BudgetLike) -> str | None:
    """Return the budget as `kvlens run --budget` takes it; a number is a share of full KV. Raises RequestError
    `bad_value` for what is neither a text nor a number."""
    if not isinstance(budget, str):
        check_numbers('a share (0.2 or "20%"), tokens ("512tok") or bytes ("64MB")', budget=budget)
    return None if budget is None else str(budget)


def one_budget(budget: BudgetLike, tokens: int | None, size: int | None) -> BudgetLike:
    """Return the budget that was given of the three ways to give it. Raises RequestError `budget_twice` for two,
    `bad_value` for tokens or bytes that are no number."""
    budgets = {"budget": budget, "budget_tokens": tokens, "budget_bytes": size}
    named = {name: value for name, value in budgets.items() if value is not None}
    if len(named) > 1:
        raise RequestError("budget_twice", f"{' and '.join(named)} each set the budget: pass one of them.", **named)
    check_numbers("a number above 0", budget_tokens=tokens, budget_bytes=size)
    if tokens is not None:
        return f"{tokens}tok"
    return f"{size}B" if size is not None else budget


def split_keywords(method: str, keywords: Mapping[str, Any], also: Iterable[str]) -> tuple[Settings, dict[str, Any]]:
    """Return the settings and the parameters of the method among a call's keywords. also: the call's other keywords,
    which a misspelt word may be close to. Raises RequestError `unknown_parameter` for any other word."""
    settings = {name: value for name, value in keywords.items() if name in Settings.__annotations__}
    parameters = {name: value for name, value in keywords.items() if name not in settings}
    return cast(Settings, settings), parameters_of(method, parameters, [*Settings.__annotations__, *also])


def parameters_of(method: str, keywords: Mapping[str, Any], also: Iterable[str] = ()) -> dict[str, Any]:
    """Return the keywords, all of which are parameters of the method. Raises RequestError `unknown_parameter`."""
    names = [field.name for field in dataclasses.fields(methods.get(method).Parameters)]
    for name in keywords:
        if name not in names:
            raise unknown_name("unknown_parameter", f"for {method} the keyword", name, [*names, *also])
    return dict(keywords)


def listed(items: Any) -> list[Any]:
    """Return what was passed as a list; one text, number or class is a list of one."""
    return [items] if isinstance(items, str | int | float | type) else list(items)


def method_name(method: str | type[Method]) -> str:
    """Return the name of a method; a class that is not installed is registered in this process first. Raises
    RequestError `bad_value` for what is neither a name nor a class, Refusal `no_method` for a class that is none."""
    if isinstance(method, str):
        return method
    if not isinstance(method, type):
        raise refused_type("method", method, "the name of a method or its class")
    name = getattr(method, "name", None)
    if isinstance(name, str) and installed(name) is method:
        return name
    methods.register(method)
    return method.name


def folder_of(runs: str | Path | None) -> Path:
    """Return the folder of runs: `runs`, else $KVLENS_RUNS, else ./runs."""
    from kvlens.runs.folder import runs_folder

    return runs_folder(runs)
