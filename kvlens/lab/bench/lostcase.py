"""One lost answer of `kvlens bench explain`: full KV's run of its prompt, the ranking that the stored run shows, and
whether the answer comes back by what is held."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from kvlens import methods, tasks
from kvlens.budget import Budget
from kvlens.engine.comparison import Reference
from kvlens.engine.engine import Engine, Options
from kvlens.engine.prefill import ReadPrompt
from kvlens.holds import Hold, Triple, holds_of
from kvlens.lab.bench.trialprompts import Prompts, Trial
from kvlens.lab.results.explain_table import RANDOM, SHOWN, TOPS
from kvlens.lens.attribution import attribute
from kvlens.lens.trials import Outcome, restores
from kvlens.methods.fitting import Chosen
from kvlens.rows import SpanRow
from kvlens.runs.preparing import Kept, Pairing, Plan, Prepared
from kvlens.runs.request import RunRequest
from kvlens.runs.storing import store
from kvlens.store.reader import TraceReader
from kvlens.tasks import TaskPrompt
from kvlens.text.prompts import Prompt

NO_LIMIT = "1.0"
"""budget of a method that keeps all tokens on the device"""
FEW = 5
"""triples whose hold is looked into where it restores nothing"""
KEPT = 20
"""triples of a ranking that a row keeps"""


class References:
    """Full KV's runs of prompts, each made once for all methods that follow on the prompt."""

    def __init__(self, engine: Engine, prompts: Prompts) -> None:
        self.engine, self.prompts = engine, prompts
        self._key: tuple[Any, ...] | None = None
        self._reference: Reference | None = None

    def find(self, trial: Trial, options: Options) -> Reference | None:
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


class Case:
    """One prompt under one method."""

    def __init__(
        self,
        engine: Engine,
        prompt: Prompt,
        read: ReadPrompt,
        request: TaskPrompt,
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
        return self.repeat(holds).restored

    def repeat(self, holds: Sequence[Hold]) -> Outcome:
        """Return the free run's output, and whether its answer is the expected one."""
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
        )

    def shown(self, reference: Reference) -> tuple[dict[int, SpanRow], list[Triple]]:
        """Return the spans that can be held, and the triples in the order in which the stored run's pages, reports and
        API show them: the free run is stored beside `reference`, as `kvlens run --against-full` stores it."""
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
        reading = Kept(self.read.last_queries.shape[2], self.read.received is not None, self.read)
        prepared = Prepared(self.engine, self.prompt, self.engine.loaded.fingerprint(), reading)
        with TemporaryDirectory() as folder:
            pairing = Pairing(reference, "reference")
            uid = store(prepared, request, plan, pairing, Path(folder), lambda *_: None, lambda: False).uid
            with TraceReader.open(Path(folder), uid) as reader:
                spans = {row.span: row for row in reader.span_rows() if row.kind != "window"}
                ranking = attribute(reader)[["layer", "kv_head", "span"]].astype(int)
        return spans, [triple for triple in ranking.itertuples(index=False, name=None) if triple[2] in spans]

    def arms(self, spans: dict[int, SpanRow], ranking: list[Triple], controls: bool = True) -> dict[str, Any]:
        """Return whether the answer comes back, by what is held, and why five may not do: the output with the first
        five held, how many of them are spans of the needle, and, where twenty restore what five do not, the fewest of
        the ranking that restore it. controls: also hold the first triple alone, RANDOM at random, and the needle."""
        needle = sorted(span for span, row in spans.items() if self._holds_needle(row))
        outcomes = {top: self.repeat(holds_of(ranking[:top], spans)) for top in TOPS if top > 1 or controls}
        row: dict[str, Any] = {f"{SHOWN}_top{top}": outcome.restored for top, outcome in outcomes.items()}
        if not outcomes[FEW].restored:
            row |= {"few_output": outcomes[FEW].text[:200], "answer": self.asked.answer}
        if outcomes[TOPS[-1]].restored and not outcomes[FEW].restored:
            row["fewest"] = self._count_fewest(spans, ranking)
        row |= {"in_needle": sum(span in needle for _, _, span in ranking[:FEW]), "needle_spans": len(needle)}
        return (
            row
            | {"ranking": [list(triple) for triple in ranking[:KEPT]]}
            | (self._controls(spans, needle) if controls else {})
        )

    def _controls(self, spans: dict[int, SpanRow], needle: list[int]) -> dict[str, bool]:
        """Return the same of triples drawn at random, and of the whole needle held for every head."""
        shape, draw = self.engine.loaded.shape, random.Random(f"explain/{self.trial.seed}")
        heads = [(layer, head) for layer in range(shape.layers) for head in range(shape.kv_heads)]
        everything = [(layer, head, span) for layer, head in heads for span in sorted(spans)]
        drawn = draw.sample(everything, min(RANDOM, len(everything)))
        whole = [(layer, head, span) for layer, head in heads for span in needle]
        return {
            f"random{RANDOM}": self.answers(holds_of(drawn, spans)),
            "everywhere": self.answers(holds_of(whole, spans)),
        }

    def _count_fewest(self, spans: dict[int, SpanRow], ranking: list[Triple]) -> int:
        """Return how many of the ranking's first triples restore the answer, by bisection between five and twenty."""
        low, high = FEW, min(TOPS[-1], len(ranking))
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if self.answers(holds_of(ranking[:middle], spans)) else (middle, high)
        return high

    def _holds_needle(self, row: SpanRow) -> bool:
        marked = [
            place
            for place, index in enumerate(self.prompt.offsets)
            if index is not None and any(index[0] < end and index[1] > start for start, end in self.asked.needle)
        ]
        return any(row.tok_start <= place < row.tok_end for place in marked)
