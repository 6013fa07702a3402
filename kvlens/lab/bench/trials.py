"""One trial of a benchmark: a task's prompt, a method, a budget, and what came out of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from types import MappingProxyType
from typing import Any

from kvlens import methods, tasks
from kvlens.budget import Budget, BudgetInfeasible
from kvlens.engine.engine import Engine, Options
from kvlens.lab.bench.trialprompts import Prompts, Trial
from kvlens.methods import calibration
from kvlens.methods.base import Method
from kvlens.methods.fitting import Chosen, Sizes, choose, with_changes
from kvlens.runs.memory import SHARE, attended_share
from kvlens.runs.request import default_preset
from kvlens.studies.means import Means
from kvlens.tasks import TaskPrompt
from kvlens.text.prompts import Prompt

NEW_TOKENS = {name: task.new_tokens for name, task in tasks.registry().items()}
"""tokens generated at most"""


def settings(method: type[Method], model: str, budget: str) -> tuple[str | None, dict[str, Any], str]:
    """(preset, overrides, rule) by which a method is held to a share of full KV. Methods that keep every token on the
    device are held to a share of attended tokens instead, where they have a parameter `keep` for it, as in runs
    (kvlens.runs.memory). The others, FullKV among them, are held to nothing."""
    preset = default_preset(method.name, model)
    if not budget:
        return preset, {}, "none"
    if not method.keeps_all:
        return preset, {}, "resident bytes"
    share = attended_share(method.name, budget, {})
    return (preset, {}, "none") if share is None else (preset, {SHARE: share}, "attended tokens")


def header(trial: Trial, model: str) -> dict[str, Any]:
    """What a row says of a trial before it is run."""
    preset, overrides, rule = settings(methods.get(trial.method), model, trial.budget)
    return {**asdict(trial), "rule": rule, "preset": preset, "overrides": overrides}


def carry_out(
    engine: Engine,
    prompts: Prompts,
    trial: Trial,
    changes: Mapping[str, Any] = MappingProxyType({}),
    answer: int | None = None,
    preset: str | None = None,
) -> dict[str, Any]:
    """Run it -> one row of figures; `infeasible` (the smallest feasible share) where the budget cannot be kept,
    `refused` (a sentence) where the model cannot take the prompt or the method cannot be run on it. changes: parameters
    that are other than the trial's own. answer: tokens generated at most, with a budget for as many as the task's.
    preset: of the method, where it is not the usual one."""
    row = header(trial, engine.loaded.name) | ({} if preset is None else {"preset": preset})
    try:
        prompt_text, prompt = prompts.asked(trial), prompts.prompt(trial)
    except ValueError as error:
        return row | {"refused": str(error)}
    method = methods.get(trial.method)
    limit = Budget.parse(trial.budget) if row["rule"] == "resident bytes" else None
    drawn = tasks.get(trial.task).generation(trial.index)
    planned = drawn.new_tokens
    new = planned if answer is None else min(answer, planned)
    options = Options(new, drawn.seed, drawn.temperature, drawn.top_p, coverage=True, oracle="off", planned=planned)
    sink = Means()
    try:
        choice = with_changes(method, chosen(engine, prompt, method, row, limit, options), changes)
        row |= arm(choice, row)
        result = engine.run(prompt, method, choice.params, limit, options, sink, read=prompts.read(trial, method))
    except BudgetInfeasible as error:
        return row | infeasible(error)
    except ValueError as error:
        return row | {"refused": str(error)}
    row |= sink.figures() | outcome(prompt_text, result.text)
    asked_tokens = len(prompt.asked)
    full = engine.loaded.shape.full_kv_bytes(len(prompt.ids) + asked_tokens + planned)
    return row | {
        "prompt_tokens": len(prompt.ids) + asked_tokens,
        "resident_share": result.peak_bytes / full,
        "read_share": row["read_bytes_per_step"] / full,
        "moved_share": row["h2d_bytes_per_step"] / full,
        "cold_share": row["cold_bytes"] / full,
        "steps": len(result.ids) - asked_tokens,
        "passed": all(check.passed for check in result.checks),
        "uid": None,
    }


def chosen(
    engine: Engine, prompt: Prompt, method: type[Method], row: dict[str, Any], limit: Budget | None, options: Options
) -> Chosen:
    """The parameters of a trial: those of the row's preset, of the preset `fit` where these do not fit. Raises
    ValueError with one sentence where figures of the model are missing or not of it."""
    context = engine.context(prompt, limit, options)
    sizes = Sizes(context.shape, context.prompt_tokens, context.max_new, context.budget_bytes)
    choice = choose(method, None, row["preset"], row["overrides"], sizes)
    calibration.read_figures(method, choice.params, context.shape, context.model_name)
    return choice


def missing(model: str, names: tuple[str, ...]) -> list[str]:
    """One sentence per method that lacks figures of the model, with the command that makes them: its trials are
    refused, the others run."""
    sentences = []
    for name in names:
        method = methods.get(name)
        try:
            calibration.require(method, methods.make_parameters(method, default_preset(name, model), {}), model)
        except ValueError as error:
            sentences.append(f"{error} Its trials are refused; the other methods run.")
    return sentences


def arm(choice: Chosen, row: dict[str, Any]) -> dict[str, Any]:
    """What a row says of the parameters it was run with; what `fit` came to is among its overrides."""
    return {"preset": choice.preset, "overrides": {**choice.fitted, **row["overrides"]}}


def infeasible(error: BudgetInfeasible) -> dict[str, Any]:
    """The column of a trial whose budget cannot be kept: the smallest share of full KV that could be."""
    return {"infeasible": round(error.smallest / error.full, 4)}


def outcome(prompt: TaskPrompt, output: str) -> dict[str, Any]:
    """Score and texts of a trial; `exact` is a full score."""
    right = tasks.get(prompt.task).grade(prompt, output)
    return {"exact": float(right == 1.0), "score": right, "output": output[:200], "answer": prompt.answer[:200]}
