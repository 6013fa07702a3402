"""One trial of the quality table: a generated prompt, a method, a budget, and what came out of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvlens import methods
from kvlens.budget import Budget, BudgetInfeasible
from kvlens.demo.tasks import TaskPrompt, make_prompt, score
from kvlens.engine import Engine, Options
from kvlens.methods.base import Method
from kvlens.prefill import ReadPrompt
from kvlens.prompts import Prompt, PromptText, tokenize
from kvlens.rows import PrefillRecord, SelfCheck, StepRecord
from kvlens.runs import default_preset

NEW_TOKENS = {"needle": 12, "multikey": 12, "chain": 80, "note": 48, "list": 110}
"""tokens generated at most"""
DEPTHS = (0.1, 0.3, 0.5, 0.7, 0.9)


@dataclass(frozen=True)
class Trial:
    """What is run: prompt `index` of a task under a method. `budget` is a share of full KV, '' = no limit."""

    task: str
    length: int
    index: int
    method: str
    budget: str

    @property
    def key(self) -> str:
        return f"{self.task}/{self.length}/{self.index}/{self.method}/{self.budget}"


class Means:
    """A sink that keeps what the table needs of every step."""

    def __init__(self) -> None:
        self.coverage: list[float] = []
        self.attended: list[float] = []
        self.h2d: list[float] = []
        self.d2h: list[float] = []

    def begin(self, meta: dict[str, Any]) -> None:
        """Nothing to keep."""

    def prefill(self, record: PrefillRecord) -> None:
        """Nothing to keep: offloading the prompt is prefill's work."""

    def step(self, record: StepRecord) -> None:
        self.coverage.append(float(record.head["coverage"].mean()))
        self.attended.append(float(record.kv["attended_tokens"].mean()))
        self.h2d.append(float(record.kv["h2d_bytes"].sum()))
        self.d2h.append(float(record.kv["d2h_bytes"].sum()))

    def finish(self, status: str, error: str | None, checks: list[SelfCheck], extra: dict[str, Any]) -> None:
        """Nothing to keep."""


class Prompts:
    """Generated prompts in the model's own tokens, each read once for all methods that follow."""

    def __init__(self, engine: Engine, first_seed: int) -> None:
        self.engine, self.first_seed = engine, first_seed
        self._key: tuple[str, int, int] | None = None
        self._made: tuple[TaskPrompt, Prompt, ReadPrompt] | None = None

    def __call__(self, task: str, length: int, index: int) -> tuple[TaskPrompt, Prompt, ReadPrompt]:
        key = (task, length, index)
        if self._made is None or self._key != key:
            loaded = self.engine.loaded
            encode: Callable[[str], list[int]] = lambda text: loaded.tokenizer.encode(text, add_special_tokens=False)  # noqa: E731
            source = make_prompt(task, length, DEPTHS[index % len(DEPTHS)], self.first_seed + index, encode)
            prompt = tokenize(PromptText(source.text), loaded.tokenizer, loaded.max_positions, NEW_TOKENS[task])
            self._key, self._made = key, (source, prompt, self.engine.read(prompt))
        return self._made


def settings(method: type[Method], model: str, budget: str) -> tuple[str | None, dict[str, Any], str]:
    """(preset, overrides, rule) by which a method is held to a share of full KV. Methods that keep every token on the device are
    held to a share of attended tokens instead, where they have a parameter `keep` for it; FullKV is held to nothing."""
    preset = default_preset(method.name, model)
    if not budget:
        return preset, {}, "none"
    if not method.keeps_all:
        return preset, {}, "resident bytes"
    share = Budget.parse(budget).amount
    return preset, {"keep": share}, "attended tokens"


def carry_out(engine: Engine, prompts: Prompts, trial: Trial) -> dict[str, Any]:
    """Run it -> one row of figures; `infeasible` (the smallest feasible share) where the budget cannot be kept."""
    source, prompt, read = prompts(trial.task, trial.length, trial.index)
    method = methods.get(trial.method)
    preset, overrides, rule = settings(method, engine.loaded.name, trial.budget)
    params = methods.make_parameters(method, preset, overrides)
    limit = Budget.parse(trial.budget) if rule == "resident bytes" else None
    row: dict[str, Any] = {"key": trial.key, **vars(trial), "rule": rule, "preset": preset}
    sink, new = Means(), NEW_TOKENS[trial.task]
    try:
        result = engine.run(prompt, method, params, limit, Options(max_new=new, coverage=True), sink, read=read)
    except BudgetInfeasible as error:
        return row | {"infeasible": round(error.smallest / error.full, 4)}
    full = engine.loaded.shape.full_kv_bytes(len(prompt.ids) + new)
    right = score(trial.task, source.answer, result.text)
    return row | {
        "exact": float(right == 1.0), "score": right, "coverage": float(np.mean(sink.coverage)),
        "attended_tokens": float(np.mean(sink.attended)), "prompt_tokens": len(prompt.ids), "resident_share": result.peak_bytes / full,
        "h2d_bytes_per_step": float(np.mean(sink.h2d)), "d2h_bytes_per_step": float(np.mean(sink.d2h)), "steps": len(result.ids),
        "output": result.text[:200], "passed": all(check.passed for check in result.checks),
    }  # fmt: skip
