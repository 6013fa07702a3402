"""The runs behind FreeKV's claims: every arm is fed the same tokens on the same prompts, so that all see the same
steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvlens import tasks
from kvlens.engine.engine import Engine, Options
from kvlens.engine.prefill import ReadPrompt
from kvlens.lab.bench.rates import corrected
from kvlens.lab.bench.trials import Prompts, chosen
from kvlens.lab.claims.methods.freekv_cases import Case
from kvlens.memory.budget import Budget
from kvlens.methods import get, make_parameters
from kvlens.methods.freekv.params import POOLINGS
from kvlens.rows import PrefillRecord, StepRecord
from kvlens.runs.request import default_preset
from kvlens.tasks import Asked
from kvlens.text.prompts import Prompt

BUDGET = "20%"
COMPARED = (0.0, 0.9, 1.0)
"""thresholds that Table 7's claim compares: no correction, the paper's for long answers, no speculation"""


@dataclass
class Seen:
    """One answer fed to one arm. A sink."""

    right: float = 0.0
    """share of its tokens that were the most likely ones; 1: greedy decoding gives this answer"""
    task: str = ""
    answers: bool = True
    """what was fed is the right answer"""
    settings: str = ""
    """the preset and its sizes, in words"""
    qcos: list[np.ndarray] = field(default_factory=list)
    """per step after the first [L, Hq]"""
    corrected: list[float] = field(default_factory=list)
    blocking: float = 0.0
    moved: float = 0.0
    """bytes to the device after the first step, of them blocking"""

    def prefill(self, record: PrefillRecord) -> None:
        """Nothing to keep."""

    def step(self, record: StepRecord) -> None:
        if record.step == 0:
            return
        self.qcos.append(record.head["qcos"])
        self.moved += float(record.kv["h2d_bytes"].sum())
        self.blocking += float(record.kv["blocking_bytes"].sum())
        if "corrected" in record.head:
            waited, heads = corrected(record)
            self.corrected.append(waited / heads)


@dataclass(frozen=True)
class Arm:
    """FreeKV with what differs from its preset."""

    changes: Mapping[str, Any]
    pooling: bool = False
    """run on the tasks alone on which poolings are compared"""
    budget: str = BUDGET


FULL = "full"


def at(tau: float, budget: str = BUDGET) -> str:
    """Name of the arm that is corrected below `tau`."""
    return f"tau={tau:g}, {budget}"


def arms(case: Case) -> dict[str, Arm]:
    """Name -> arm. Poolings are compared without speculation, beside `at(1)`."""
    found = {at(tau): Arm({"tau": tau}) for tau in case.taus}
    if case.wider:
        found |= {at(tau, case.wider): Arm({"tau": tau}, budget=case.wider) for tau in COMPARED}
    return found | {pooling: Arm({"pooling": pooling, "tau": 1.0}, pooling=True) for pooling in POOLINGS[1:]}


Found = dict[str, dict[tuple[str, int], Seen]]
"""arm -> (task, index of the prompt) -> what was seen"""


def measure(engine: Engine, case: Case, prompts: int, report: Callable[[str], None]) -> Found:
    """All arms, and FullKV, on `prompts` prompts of each task."""
    asked = arms(case)
    seen: Found = {name: {} for name in (FULL, *asked)}
    made = Prompts(engine, case.first_seed)
    for task in case.tasks:
        taking = {name: arm for name, arm in asked.items() if task in case.pooled or not arm.pooling}
        for index in range(prompts):
            source, prompt, read = made(task, case.length, index)
            tokens, answers = to_feed(engine, case, source, prompt, read)
            # divided as in a free run, so that what is right here is what decoding by itself would say
            options = Options(forced=tokens, planned=tasks.get(task).new_tokens if case.own_words else None)
            for name in (FULL, *taking):
                trial = _feed(engine, prompt, read, options, taking.get(name))
                trial.task, trial.answers = task, answers
                seen[name][task, index] = trial
        report(f"freekv: {task}, {prompts} prompts, {len(taking) + 1} arms")
    return seen


def to_feed(
    engine: Engine, case: Case, source: Asked, prompt: Prompt, read: ReadPrompt
) -> tuple[tuple[int, ...], bool]:
    """What every arm reads on a prompt -> (tokens, whether they are the right answer)."""
    tokenizer = engine.loaded.tokenizer
    if not case.own_words:
        return tuple(tokenizer.encode(source.answer, add_special_tokens=False)), True
    full, task = get(FULL), tasks.get(source.task)
    options = Options(max_new=case.own_words)
    said = engine.run(prompt, full, make_parameters(full, None, {}), None, options, read=read).ids
    for count in range(1, len(said) + 1):
        if task.grade(source, tokenizer.decode(said[:count], skip_special_tokens=True)) == 1:
            return tuple(said[:count]), True
    return tuple(said), False


def _feed(engine: Engine, prompt: Prompt, read: ReadPrompt, options: Options, arm: Arm | None) -> Seen:
    """arm None: FullKV."""
    tokens, trial = options.forced or (), Seen()
    if arm is None:
        method, limit = get(FULL), None
        params = make_parameters(method, None, {})
    else:
        method, limit = get("freekv"), Budget.parse(arm.budget)
        usual = default_preset(method.name, engine.loaded.name)
        found = chosen(engine, prompt, method, {"preset": usual, "overrides": arm.changes}, limit, options)
        params = found.params
        trial.settings = f"preset {found.preset}, pages of {params.page} tokens, dense layers {params.dense_layers}"
    result = engine.run(prompt, method, params, limit, options, trial, keep_logits=True, read=read)
    trial.right = float(
        np.mean([int(logits.argmax()) == token for logits, token in zip(result.logits, tokens, strict=True)])
    )
    return trial
