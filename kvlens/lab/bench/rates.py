"""Rates of decisions that depend on meaning, read from recorded steps: misses, corrections, zooms, reuse. `kvlens bench
gpu` replays them.

The recalling methods are fed right answers token by token, so that all see the same steps. What is counted comes from
the memory's own counts in the record of a step; of the method, only which heads it corrected, which no byte shows where
nothing was missing. Step 0 is left out: nothing can be on the device by then.

It is no study of kvlens.studies: it counts decisions in the records of each step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, field_validator

from kvlens import methods
from kvlens.budget import Budget
from kvlens.engine.engine import Engine, Options
from kvlens.lab.bench.provenance import about, origin
from kvlens.lab.bench.trialprompts import Prompts
from kvlens.lab.bench.trials import chosen, settings
from kvlens.lab.results.names import TaskNames
from kvlens.methods import parts
from kvlens.models.find import DEMO, default_model
from kvlens.records import PrefillRecord, StepRecord
from kvlens.refusal import Refusal
from kvlens.studies.counts import Count, corrected, missed, reused

OF_METHODS = "kvlens.lab.bench.methods"
"""the package of the methods' own parts (kvlens.methods.parts)"""


@dataclass(frozen=True)
class Arm:
    """A method with the parameters whose rates are recorded; `rates`: of miss, correction, zoom, reuse."""

    method: str
    rates: tuple[str, ...]
    changes: Mapping[str, Any] = field(default_factory=dict)
    """what differs from the method's preset"""


def arms() -> dict[str, Arm]:
    """Name -> arm, of all methods: ARMS of their parts `rates`."""
    arms_by_name: dict[str, Arm] = {}
    for method in methods.registry().values():
        arms_by_name |= getattr(parts.part(method, "rates", OF_METHODS), "ARMS", {})
    return arms_by_name


NOTE = (
    "mean: of all steps together; p10, p90: percentiles over the steps' own shares; of all layers and KV "
    "heads; step 0 left out; right "
    "answers fed token by token"
)

LONG = {True: ("chain", "note", "list"), False: ("niah_multivalue", "list_items", "copy_text")}
"""whether the model is the toy -> tasks with long answers in its language"""


class RatesRequest(BaseModel):
    """What to run. Bad values are refused here, before a model is loaded."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())

    model: str = Field(default_factory=default_model)
    tasks: TaskNames = Field(default_factory=lambda given: LONG[given["model"] == DEMO], min_length=1)
    """those that have long answers"""
    length: int = Field(2048, ge=64)
    budget: str = "20%"
    prompts: int = Field(10, ge=1)
    """of each task"""
    first_seed: int = 6_600_000

    @field_validator("budget")
    @classmethod
    def _share(cls, value: str) -> str:
        if Budget.parse(value).unit != "share":
            raise ValueError(f"rates are recorded at a share of full KV (0.2 or 20%), not at '{value}'.")
        return value


class Watch:
    """A sink: per step after the first, how many of how many for each of the wanted rates."""

    def __init__(self, names: tuple[str, ...], preset: str | None = None) -> None:
        """preset: that the watched run was made with; None: the defaults."""
        self.preset = preset
        self.counts: dict[str, list[Count]] = {name: [] for name in names}
        self._coarse: set[int] = set()

    def prefill(self, record: PrefillRecord) -> None:
        self._coarse = {span.span for span in record.spans if span.state == "coarse"}

    def step(self, record: StepRecord) -> None:
        # born before this step's attention
        self._coarse |= {span.span for span in record.spans if span.state == "coarse"}
        if record.step:
            for name, counts in self.counts.items():
                counts.append(getattr(self, f"_{name}")(record))

    def _miss(self, record: StepRecord) -> Count:
        return missed(record)

    def _correction(self, record: StepRecord) -> Count:
        return corrected(record)

    def _zoom(self, record: StepRecord) -> Count:
        """Spans that (layer, KV head)s expanded, of all that they have as summaries."""
        return missed(record)[1], float(len(self._coarse) * record.kv["n_recalled"].size)

    def _reuse(self, record: StepRecord) -> Count:
        here, requested = reused(record)
        return float(here.sum()), float(requested.sum())


def figures(counts: list[Count]) -> dict[str, float]:
    """Share of all steps together, and the 10th and 90th percentile of the steps' own shares; steps at which there was
    nothing to count are left out. Raises ValueError where no step is left."""
    part, whole = np.array([count for count in counts if count[1] > 0]).reshape(-1, 2).T
    if not len(whole):
        raise Refusal(
            "there was no step to read a rate from: name tasks with answers of two tokens or more.", code="no_step"
        )
    low, high = np.percentile(part / whole, [10, 90])
    return {
        "mean": round(float(part.sum() / whole.sum()), 4),
        "p10": round(float(low), 4),
        "p90": round(float(high), 4),
    }


def measure(request: RatesRequest, report: Callable[[str], None]) -> dict[str, Any]:
    """Run all arms on all prompts -> rates with their provenance. Raises BudgetInfeasible where a method cannot keep to
    the budget."""
    import torch

    from kvlens.engine.models import load

    torch.set_num_threads(1)
    engine = Engine(load(request.model))
    prompts = Prompts(engine, request.first_seed)
    arms_by_name = arms()
    watches: dict[str, list[Watch]] = {arm: [] for arm in arms_by_name}
    for task in request.tasks:
        for index in range(request.prompts):
            for arm, watched in watches.items():
                watched.append(_feed(engine, prompts, request, task, index, arms_by_name[arm]))
        report(f"{task}: {request.prompts} prompts, {len(arms_by_name)} arms")
    names = tuple(dict.fromkeys(arm.method for arm in arms_by_name.values()))
    return {
        "about": about(names, request.model)
        | {
            "request": request.model_dump(mode="json"),
            "origins": {name: origin(request.model, name) for name in names},
            "note": NOTE,
        },
        "methods": {arm: _line(arms_by_name[arm], watched) for arm, watched in watches.items()},
    }


def _feed(engine: Engine, prompts: Prompts, request: RatesRequest, task: str, index: int, arm: Arm) -> Watch:
    prompt_text, prompt, read = prompts(task, request.length, index)
    answer = tuple(engine.loaded.tokenizer.encode(prompt_text.answer, add_special_tokens=False))
    method = methods.get(arm.method)
    limit = Budget.parse(request.budget)
    options = Options(forced=answer, coverage=False, oracle="off")
    asked_for = {"preset": settings(method, request.model, "")[0], "overrides": dict(arm.changes)}
    choice = chosen(engine, prompt, method, asked_for, limit, options)
    watch = Watch(arm.rates, choice.preset)
    engine.run(prompt, method, choice.params, limit, options, watch, read=read)
    return watch


def _line(arm: Arm, watched: list[Watch]) -> dict[str, Any]:
    counts = {name: [count for watch in watched for count in watch.counts[name]] for name in arm.rates}
    steps = len(next(iter(counts.values())))
    rates = {name: figures(counted) for name, counted in counts.items()}
    presets = dict(Counter(watch.preset or "defaults" for watch in watched))
    return {"changes": dict(arm.changes), "presets": presets, "prompts": len(watched), "steps": steps, "rates": rates}
