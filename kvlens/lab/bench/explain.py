"""How good the lens is: of answers a method lost, how many come back when what the attribution names is held exactly.

A trial is a prompt that full KV answers and the method does not. The run is stored beside its reference, as any run
that is compared with full KV, and the triples (layer, KV head, span) are taken in the order in which the stored run
shows them (kvlens.lens.attribution). Then the free run is repeated with the first 1, 5 and 20 held from step 0, with
five drawn at random from all triples, and with every span of the needle held for every head.

It is no study of kvlens.studies: what is held follows from the effects of the run before.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvlens import methods, tasks
from kvlens.budget import Budget, BudgetInfeasible
from kvlens.engine.engine import Engine, Options
from kvlens.lab.bench import kept as keeping
from kvlens.lab.bench.lostcase import Case, References
from kvlens.lab.bench.provenance import about, made_elsewhere, made_otherwise, origin
from kvlens.lab.bench.trialprompts import DEPTHS, Prompts, Trial
from kvlens.lab.bench.trials import arm, chosen, header
from kvlens.lab.bench.trials import infeasible as too_small
from kvlens.lab.results.explain_few import shortfalls
from kvlens.lab.results.explain_table import FULL_KV, SCOPES, SHOWN, TOPS, point_of, points, pooled, summarise
from kvlens.models.device import CPU, settle
from kvlens.models.find import DEMO

MAX_PROMPTS = 4
"""times the wanted trials: prompts that are tried before a point is given up"""
_NEEDED = ("method", "task", "budget", "length", "index", "origin", "lost")


@dataclass(frozen=True)
class ExplainRequest:
    """What to measure."""

    model: str = DEMO
    points: tuple[tuple[str, str, str], ...] = field(default_factory=points)
    length: int = 2048
    lost: int = 50
    """lost trials per point"""
    first_seed: int = 9_500_000
    prompts: int | None = None
    """tried per point at most; None: MAX_PROMPTS times `lost`"""
    device: str = CPU
    """auto (CUDA where there is one), cpu or cuda"""
    controls: int = 1
    """every so manieth prompt also gets the arms that are controls (kvlens.lab.bench.lostcase.Case.arms)"""

    def __post_init__(self) -> None:
        if self.length < 64 or self.lost < 1:
            raise ValueError("--length must be at least 64 and --lost at least 1.")
        if self.prompts is not None and self.prompts < 1:
            raise ValueError("--prompts must be at least 1.")
        if self.controls < 1:
            raise ValueError("--controls must be at least 1.")
        for method, task, budget in self.points:
            methods.get(method)
            tasks.get(task)
            if Budget.parse(budget).unit != "share":
                raise ValueError(f"a point needs a share of full KV (0.1 or 10%), not '{budget}'.")


@keeping.alone
def measure(
    request: ExplainRequest,
    path: Path,
    report: Callable[[dict[str, Any]], None],
    say: Callable[[str], None] = keeping.silent,
) -> dict[str, Any]:
    """Run what is not in `path` (one JSON line per prompt) yet -> the table with its provenance. say(line) where kept
    trials are run again.

    Raises ValueError for a file that does not hold trials of this benchmark.
    """
    import torch

    from kvlens.engine.models import load

    names = tuple(dict.fromkeys(point[0] for point in request.points))
    place = settle(request.device)
    elsewhere = () if place == CPU else (place,)
    origins = {name: origin(request.model, name, request.length, request.first_seed, *elsewhere) for name in names}
    results = keeping.read(path, _NEEDED, lambda row: (row["method"], row["task"], row["budget"]) in request.points)
    if line := made_otherwise(results, origins):
        say(line)
    rows = [row for row in results if row["origin"] == origins[row["method"]]]
    torch.set_num_threads(1)
    engine = Engine(load(request.model, place))
    prompts = Prompts(engine, request.first_seed, names)
    references = References(engine, prompts)
    visited = {(point_of(row), row["index"]) for row in rows}
    lost = Counter(point_of(row) for row in rows if row["lost"])
    for index in range(request.prompts or MAX_PROMPTS * request.lost):
        for point in request.points:
            if lost[point] >= request.lost or (point, index) in visited:
                continue
            method, task, budget = point
            trial = Trial(
                task, request.length, DEPTHS[index % len(DEPTHS)], request.first_seed + index, index, method, budget
            )
            controls = index % request.controls == 0
            row = explain_trial(engine, prompts, trial, references, controls) | {"origin": origins[method]}
            keeping.append(path, row)
            rows.append(row)
            lost[point] += row["lost"]
            report(row)
    return _table(request, names, rows)


def collect(request: ExplainRequest, paths: Sequence[Path]) -> dict[str, Any]:
    """Return the table of the trials in `paths`, whatever code or device made them, without running anything. A trial
    that several files have counts once.

    Raises ValueError for a file that does not hold trials of this benchmark."""
    trials: dict[tuple[Any, ...], dict[str, Any]] = {}
    for path in paths:
        for row in keeping.read(path, _NEEDED, lambda row: point_of(row) in request.points):
            trials.setdefault((point_of(row), row["index"]), row)
    rows = sorted(trials.values(), key=lambda row: (row["index"], request.points.index(point_of(row))))
    result = _table(request, tuple(dict.fromkeys(point[0] for point in request.points)), rows)
    result["about"] |= made_elsewhere(rows)
    return result


def _table(request: ExplainRequest, names: tuple[str, ...], rows: list[dict[str, Any]]) -> dict[str, Any]:
    about_all = about(names, request.model) | _describe(request)
    lines = list(summarise(rows, request.points))
    return {"about": about_all, "lines": lines, "pooled": pooled(rows), "few": shortfalls(rows)}


def _describe(request: ExplainRequest) -> dict[str, Any]:
    return {
        "model": request.model,
        "length": request.length,
        "tasks": sorted({task for _, task, _ in request.points}),
        "first_seed": request.first_seed,
        "wanted": request.lost,
        "scopes": {SHOWN: SCOPES[SHOWN]},
        "masses": FULL_KV,
        "tops": TOPS,
    }


def explain_trial(
    engine: Engine, prompts: Prompts, trial: Trial, references: References | None = None, controls: bool = True
) -> dict[str, Any]:
    """One prompt -> lost (full KV answers it, the method does not), and then one bool per arm; preset, `infeasible` and
    `refused` as in the tables, kind and source where the task draws kinds of answers. controls: see `Case.arms`."""
    row = header(trial, engine.loaded.name) | {"lost": False}
    request, prompt, method = prompts.asked(trial), prompts.prompt(trial), methods.get(trial.method)
    row |= {name: request.facts[name] for name in ("kind", "source") if name in request.facts}
    options = Options(max_new=tasks.get(trial.task).new_tokens)
    budget = Budget.parse(trial.budget) if row["rule"] == "resident bytes" else None
    try:
        results = chosen(engine, prompt, method, row, budget, options)
        row |= arm(results, row)
        reference = (references or References(engine, prompts)).find(trial, options)
        if reference is None:
            return row
        case = Case(engine, prompt, prompts.read(trial, method), request, trial, results, budget, options)
        if case.answers(()):
            return row
    except BudgetInfeasible as error:
        return row | too_small(error)
    except ValueError as error:
        return row | {"refused": str(error)}
    spans, ranking = case.shown(reference)
    if not ranking:
        return row | {"agreed": True}
    heads = engine.loaded.shape.layers * engine.loaded.shape.kv_heads
    return row | {"lost": True, "candidates": len(spans) * heads} | case.arms(spans, ranking, controls)
