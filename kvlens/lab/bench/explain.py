"""How good the lens is: of answers a method lost, how many come back when what the attribution names is held exactly.

A trial is a prompt that full KV answers and the method does not. The run is stored beside its reference, as any run
that is compared with full KV, and the triples (layer, KV head, span) are taken in the order in which the stored run
shows them (kvlens.lens.attribution). Then the free run is repeated with the first 1, 5 and 20 held from step 0, with
five drawn at random from all triples, and with every span of the needle held for every head.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from kvlens import methods, tasks
from kvlens.engine.comparison import Reference
from kvlens.engine.engine import Engine, Options
from kvlens.engine.prefill import ReadPrompt
from kvlens.engine.ranking import Triple, holds_of
from kvlens.lab.bench import kept as keeping
from kvlens.lab.bench.provenance import about, made_otherwise, origin
from kvlens.lab.bench.trials import DEPTHS, Prompts, Trial, arm, chosen, header
from kvlens.lab.bench.trials import infeasible as too_small
from kvlens.lab.results.explain_table import RANDOM, SCOPES, SHOWN, TOPS, point_of, points, pooled, summarise
from kvlens.lens.attribution import attribute
from kvlens.lens.trials import restores
from kvlens.memory.budget import Budget, BudgetInfeasible
from kvlens.memory.holds import Hold
from kvlens.methods.fitting import Chosen
from kvlens.models.find import DEMO
from kvlens.rows import SpanRow
from kvlens.runs.preparing import Kept, Pairing, Plan, Prepared
from kvlens.runs.request import RunRequest
from kvlens.runs.storing import store
from kvlens.store.reader import TraceReader
from kvlens.tasks import Asked
from kvlens.text.prompts import Prompt

NO_LIMIT = "1.0"
"""budget of a method that keeps all tokens on the device"""
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

    def __post_init__(self) -> None:
        if self.length < 64 or self.lost < 1:
            raise ValueError("--length must be at least 64 and --lost at least 1.")
        if self.prompts is not None and self.prompts < 1:
            raise ValueError("--prompts must be at least 1.")
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
            row = explain_trial(engine, prompts, trial, references) | {"origin": origins[method]}
            keeping.append(path, row)
            rows.append(row)
            lost[point] += row["lost"]
            report(row)
    about_all = about(names, request.model) | _said(request)
    return {"about": about_all, "lines": list(summarise(rows, request.points)), "pooled": pooled(rows)}


def _said(request: ExplainRequest) -> dict[str, Any]:
    return {
        "model": request.model,
        "length": request.length,
        "first_seed": request.first_seed,
        "wanted": request.lost,
        "scopes": {SHOWN: SCOPES[SHOWN]},
        "tops": TOPS,
    }


class References:
    """Full KV's runs of prompts, each made once for all methods that follow on the prompt."""

    def __init__(self, engine: Engine, prompts: Prompts) -> None:
        self.engine, self.prompts = engine, prompts
        self._key: tuple[Any, ...] | None = None
        self._reference: Reference | None = None

    def of(self, trial: Trial, options: Options) -> Reference | None:
        """Return full KV's run of the trial's prompt, None if full KV does not give the answer."""
        if self._key != (trial.prompt, options):
            self._reference, self._key = self._run(trial, options), (trial.prompt, options)
        return self._reference

    def _run(self, trial: Trial, options: Options) -> Reference | None:
        import torch

        full = methods.get("full")
        result = self.engine.run(
            self.prompts.prompt(trial),
            full,
            methods.make_parameters(full, None, {}),
            None,
            options,
            keep_logits=True,
            read=self.prompts.read(trial),
        )
        if tasks.get(trial.task).grade(self.prompts.asked(trial), result.text) < 1.0:
            return None
        return Reference("", tuple(result.ids), torch.stack(result.logits))


def explain_trial(
    engine: Engine, prompts: Prompts, trial: Trial, references: References | None = None
) -> dict[str, Any]:
    """One prompt -> lost (full KV answers it, the method does not), and then one bool per arm; preset, `infeasible` and
    `refused` as in the tables, kind and source where the task draws kinds of answers."""
    row = header(trial, engine.loaded.name) | {"lost": False}
    request, prompt, method = prompts.asked(trial), prompts.prompt(trial), methods.get(trial.method)
    row |= {name: request.facts[name] for name in ("kind", "source") if name in request.facts}
    options = Options(max_new=tasks.get(trial.task).new_tokens)
    budget = Budget.parse(trial.budget) if row["rule"] == "resident bytes" else None
    try:
        results = chosen(engine, prompt, method, row, budget, options)
        row |= arm(results, row)
        reference = (references or References(engine, prompts)).of(trial, options)
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
    return row | {"lost": True, "candidates": len(spans) * heads} | case.arms(spans, ranking)


class Case:
    """One prompt under one method."""

    def __init__(
        self,
        engine: Engine,
        prompt: Prompt,
        read: ReadPrompt,
        request: Asked,
        trial: Trial,
        choice: Chosen,
        budget: Budget | None,
        options: Options,
    ) -> None:
        self.engine, self.prompt, self.read, self.asked, self.trial = engine, prompt, read, request, trial
        self.method, self.choice = methods.get(trial.method), choice
        self.params, self.budget, self.options = choice.params, budget, options

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

    def shown(self, reference: Reference) -> tuple[dict[int, SpanRow], list[Triple]]:
        """Return the spans that can be held, and the triples in the order in which the stored run's pages, reports and
        API show them: the free run is stored beside `reference`, as `kvlens run --against-full` stores it."""
        from kvlens.runs.fingerprint import fingerprint

        choice, budget = replace(self.choice, params=self.params), self.budget or Budget.parse(NO_LIMIT)
        options = replace(self.options, coverage=True, oracle="auto")
        plan = Plan(self.method, choice, budget, options)
        request = RunRequest(
            model=self.engine.loaded.name,
            method=self.trial.method,
            budget=self.trial.budget if self.budget else NO_LIMIT,
            max_new=options.max_new,
            against=True,
        )
        kept = Kept(self.read.last_queries.shape[2], self.read.received is not None, self.read)
        prepared = Prepared(self.engine, self.prompt, fingerprint(self.engine.loaded), kept)
        with TemporaryDirectory() as folder:
            pairing = Pairing(reference, "reference")
            uid = store(prepared, request, plan, pairing, Path(folder), lambda *_: None, lambda: False).uid
            with TraceReader.open(Path(folder), uid) as reader:
                spans = {row.span: row for row in reader.span_rows() if row.kind != "window"}
                ranking = attribute(reader)[["layer", "kv_head", "span"]].astype(int)
        return spans, [triple for triple in ranking.itertuples(index=False, name=None) if triple[2] in spans]

    def arms(self, spans: dict[int, SpanRow], ranking: list[Triple]) -> dict[str, bool]:
        """Return whether the answer comes back, by what is held."""
        shape, draw = self.engine.loaded.shape, random.Random(f"explain/{self.trial.seed}")
        heads = [(layer, head) for layer in range(shape.layers) for head in range(shape.kv_heads)]
        everything = [(layer, head, span) for layer, head in heads for span in sorted(spans)]
        needle = sorted(span for span, row in spans.items() if self._holds_needle(row))
        mapping = {f"{SHOWN}_top{top}": self.answers(holds_of(ranking[:top], spans)) for top in TOPS}
        drawn = draw.sample(everything, min(RANDOM, len(everything)))
        mapping[f"random{RANDOM}"] = self.answers(holds_of(drawn, spans))
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
