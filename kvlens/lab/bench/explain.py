"""How good the lens is: of answers a method lost, how many come back when what the attribution names is held exactly.

A trial is a prompt that full KV answers and the method does not. The method is forced along full KV's tokens once, with
full attention recorded; (layer, KV head, span) triples are ranked by effect (kvlens.engine.effect) and by regret
(kvlens.lens.attribution); then the free run is repeated with the first 1, 5 and 20 held from step 0, with as many drawn
at random from all triples, and with every span of the needle held for every head.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvlens import methods, tasks
from kvlens.engine.comparison import Reference
from kvlens.engine.effect import effects
from kvlens.engine.engine import Engine, Options
from kvlens.engine.prefill import ReadPrompt
from kvlens.lab.bench import kept as keeping
from kvlens.lab.bench.provenance import about, made_otherwise, origin
from kvlens.lab.bench.trials import DEPTHS, Prompts, Trial, arm, chosen, header
from kvlens.lab.bench.trials import infeasible as too_small
from kvlens.lab.results.explain_table import SCOPES, TOPS, points, summarise
from kvlens.lens.attribution import Triple, attribute_records, most_effect
from kvlens.lens.trials import Kept, holds_of, restores
from kvlens.memory.budget import Budget, BudgetInfeasible
from kvlens.memory.holds import Hold
from kvlens.models.find import DEMO
from kvlens.rows import SpanRow
from kvlens.tasks import Asked
from kvlens.text.prompts import Prompt

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

    def __post_init__(self) -> None:
        if self.length < 64 or self.lost < 1:
            raise ValueError("--length must be at least 64 and --lost at least 1.")
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
    origins = {name: origin(request.model, name, request.length, request.first_seed) for name in names}
    results = keeping.read(path, _NEEDED, lambda row: (row["method"], row["task"], row["budget"]) in request.points)
    if line := made_otherwise(results, origins):
        say(line)
    rows = [row for row in results if row["origin"] == origins[row["method"]]]
    torch.set_num_threads(1)
    engine = Engine(load(request.model))
    prompts = Prompts(engine, request.first_seed)
    for method, task, budget in request.points:
        own_rows = [row for row in rows if (row["method"], row["task"], row["budget"]) == (method, task, budget)]
        visited = {row["index"] for row in own_rows}
        for index in range(MAX_PROMPTS * request.lost):
            if sum(row["lost"] for row in own_rows) >= request.lost:
                break
            if index in visited:
                continue
            trial = Trial(
                task, request.length, DEPTHS[index % len(DEPTHS)], request.first_seed + index, index, method, budget
            )
            row = explain_trial(engine, prompts, trial) | {"origin": origins[method]}
            keeping.append(path, row)
            own_rows.append(row)
            rows.append(row)
            report(row)
    return {"about": about(names, request.model) | _said(request), "lines": list(summarise(rows, request.points))}


def _said(request: ExplainRequest) -> dict[str, Any]:
    return {
        "model": request.model,
        "length": request.length,
        "first_seed": request.first_seed,
        "wanted": request.lost,
        "scopes": SCOPES,
        "tops": TOPS,
    }


def explain_trial(engine: Engine, prompts: Prompts, trial: Trial) -> dict[str, Any]:
    """One prompt -> lost (full KV answers it, the method does not), and then one bool per arm; preset, `infeasible` and
    `refused` as in the tables."""
    row = header(trial, engine.loaded.name) | {"lost": False}
    request, prompt, method = prompts.asked(trial), prompts.prompt(trial), methods.get(trial.method)
    options = Options(max_new=tasks.get(trial.task).new_tokens)
    budget = Budget.parse(trial.budget) if row["rule"] == "resident bytes" else None
    try:
        results = chosen(engine, prompt, method, row, budget, options)
        row |= arm(results, row)
        case = Case(engine, prompt, prompts.read(trial, method), request, trial, results.params, budget, options)
        if case.answers(()):
            return row
    except BudgetInfeasible as error:
        return row | too_small(error)
    except ValueError as error:
        return row | {"refused": str(error)}
    reference = case.reference()
    if reference is None:
        return row
    spans, rankings = case.rankings(reference)
    if not rankings["step"]:
        return row | {"agreed": True}
    return (
        row
        | {"lost": True, "candidates": len(spans) * engine.loaded.shape.layers * engine.loaded.shape.kv_heads}
        | case.arms(spans, rankings)
    )


class Case:
    """One prompt under one method."""

    def __init__(
        self,
        engine: Engine,
        prompt: Prompt,
        read: ReadPrompt,
        request: Asked,
        trial: Trial,
        params: Any,
        budget: Budget | None,
        options: Options,
    ) -> None:
        self.engine, self.prompt, self.read, self.asked, self.trial = engine, prompt, read, request, trial
        self.method = methods.get(trial.method)
        self.params, self.budget, self.options = params, budget, options

    def answers(self, holds: Sequence[Hold]) -> bool:
        """The free run's answer is the expected one."""
        return restores(
            self.engine,
            self.prompt,
            self.read,
            self.method,
            self.params,
            self.budget,
            self.options,
            holds,
            self.asked.answer,
            self.trial.task,
        ).restored

    def reference(self) -> Reference | None:
        """Full KV's run; None when it does not answer either."""
        full = methods.get("full")
        result = self.engine.run(
            self.prompt,
            full,
            methods.make_parameters(full, None, {}),
            None,
            self.options,
            keep_logits=True,
            read=self.read,
        )
        if tasks.get(self.trial.task).grade(self.asked, result.text) < 1.0:
            return None
        import torch

        return Reference("", tuple(result.ids), torch.stack(result.logits))

    def rankings(self, reference: Reference) -> tuple[dict[int, SpanRow], dict[str, list[Triple]]]:
        """The spans that can be held, and the triples in the order of each scope."""
        sink = Kept()
        forced = Options(
            max_new=self.options.max_new,
            planned=self.options.max_new,
            forced=reference.ids,
            coverage=True,
            oracle="all",
        )
        self.engine.run(
            self.prompt, self.method, self.params, self.budget, forced, sink, read=self.read, against=reference
        )
        spans = {row.span: row for row in sink.spans if row.kind != "window"}
        records = [(step.loss, step.oracle) for step in sink.steps]
        loaded = self.engine.loaded
        orders = {
            "effect": most_effect(effects(loaded, self.read, reference, records, sink.spans, every_lost_step=True)),
            "step": attribute_records(records, loaded.shape.group, every_lost_step=False),
            "steps": attribute_records(records, loaded.shape.group, every_lost_step=True),
        }
        return spans, {scope: [triple for triple, _ in orders[scope] if triple[2] in spans] for scope in SCOPES}

    def arms(self, spans: dict[int, SpanRow], rankings: dict[str, list[Triple]]) -> dict[str, bool | None]:
        """Whether the answer comes back, by what is held; None where there is no ranking by effect."""
        shape, draw = self.engine.loaded.shape, random.Random(f"explain/{self.trial.seed}")
        heads = [(layer, head) for layer in range(shape.layers) for head in range(shape.kv_heads)]
        everything = [(layer, head, span) for layer, head in heads for span in sorted(spans)]
        needle = sorted(span for span, row in spans.items() if self._holds_needle(row))
        mapping: dict[str, bool | None] = {}
        for top in TOPS:
            for scope in SCOPES:
                ranking = rankings[scope][:top]
                mapping[f"{scope}_top{top}"] = self.answers(holds_of(ranking, spans)) if ranking else None
            mapping[f"random{top}"] = self.answers(holds_of(draw.sample(everything, min(top, len(everything))), spans))
        mapping["everywhere"] = self.answers(
            holds_of([(layer, head, span) for layer, head in heads for span in needle], spans)
        )
        return mapping

    def _holds_needle(self, row: SpanRow) -> bool:
        marked = [
            place
            for place, index in enumerate(self.prompt.offsets)
            if index is not None and any(index[0] < end and index[1] > start for start, end in self.asked.needle)
        ]
        return any(row.tok_start <= place < row.tok_end for place in marked)
