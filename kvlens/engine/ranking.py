"""The ranking of what a lost answer owes to what was not read: triples (layer, KV head, span) of a run that follows
full KV's tokens, most important first.

One measurement of effects (kvlens.engine.effect) ranks triples as if all of them were missing at once. The first ones
may stand for one another, or bring back the first tokens of an answer and not the last. So the ranking is made in
rounds: the first triples are held, the run follows full KV's tokens again, and the effects on what is still lost rank
the rest. The rounds are ours.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from kvlens.engine.effect import MOST_TRIPLES, effects
from kvlens.engine.options import Options
from kvlens.holds import Drop, Hold, Triple, holds_of, less
from kvlens.instruments import Effects
from kvlens.models.device import give_back_heap
from kvlens.records import PrefillRecord, StepRecord
from kvlens.rows import SpanRow

if TYPE_CHECKING:
    from kvlens.budget import Budget
    from kvlens.engine.comparison import Reference
    from kvlens.engine.engine import Engine
    from kvlens.engine.prefill import ReadPrompt
    from kvlens.methods.base import Method
    from kvlens.text.prompts import Prompt

ROUNDS = 3
"""measurements of effects, each with the triples of the rounds before held"""
PER_ROUND = 2
"""triples that a round holds for the next"""
TOKENS_PER_LISTED = 512
"""of the prompt: a query head's spans are listed one for each so many, and never fewer than in the run"""


@dataclass
class Records:
    """A sink that keeps a run's spans and steps in memory."""

    spans: list[SpanRow] = field(default_factory=list)
    steps: list[StepRecord] = field(default_factory=list)

    def prefill(self, record: PrefillRecord) -> None:
        self.spans += record.spans

    def step(self, record: StepRecord) -> None:
        self.spans += record.spans
        self.steps.append(record)

    @property
    def holdable(self) -> dict[int, SpanRow]:
        """The spans that can be held, by id: all but the window."""
        return {row.span: row for row in self.spans if row.kind != "window"}


@dataclass(frozen=True)
class Repeat:
    """A run that can be repeated along its reference's tokens, with the options of the free run."""

    engine: Engine
    prompt: Prompt
    method: type[Method]
    params: Any
    budget: Budget | None
    options: Options
    reference: Reference
    read: ReadPrompt
    """the prompt, read before; a method that reads it under attention of its own reads it again"""
    holds: tuple[Hold, ...] = ()
    """of the run"""
    drops: tuple[Drop, ...] = ()

    def follow(
        self, end: int | None = None, holds: Sequence[Hold] = (), cancelled: Callable[[], bool] = lambda: False
    ) -> Records:
        """Return the records of steps 0 to `end` on the reference's tokens, with full attention by span of every step
        and layer, and with `holds` beside the run's own. Raises Cancelled."""
        records = Records()
        options = replace(
            self.options.along(self.reference.ids[:end]),
            coverage=True,
            oracle="all",
            top_k=max(self.options.top_k, len(self.prompt.ids) // TOKENS_PER_LISTED),
        )
        self.engine.run(
            self.prompt,
            self.method,
            self.params,
            self.budget,
            options,
            records,
            cancelled=cancelled,
            read=self.read,
            against=self.reference,
            holds=(*self.holds, *holds),
            drops=less(self.drops, holds),
        )
        return records

    def rank(
        self,
        end: int | None = None,
        cancelled: Callable[[], bool] = lambda: False,
        check: Callable[[], None] = lambda: None,
        records: Records | None = None,
    ) -> Effects | None:
        """Return the ranking of what the lost steps before `end` owe to what was not read; each triple has its effect
        in the round that placed it. `records`: those of `follow(end)`, where they are at hand; `check` is called
        before every forward and may raise. None where no step was lost, or the context is too long for gradients.
        Raises Cancelled, and RuntimeError or MemoryError where there are no gradients or no room for them."""
        own_prompt = self.method.needs_with(self.params).own_prompt
        ranking: dict[Triple, float] = {}
        remaining: dict[Triple, float] = {}
        holds: list[Hold] = []
        whole: Effects | None = None
        for _ in range(1 if own_prompt else ROUNDS):
            give_back_heap()
            watched, records = records or self.follow(end, holds, cancelled), None
            give_back_heap()
            pairs = [(step.loss, step.oracle) for step in watched.steps]
            with self.engine.whole(self.prompt):
                latest = effects(self.engine.loaded, self.read, self.reference, pairs, watched.spans, end, check)
            if latest is None:
                break
            whole, spans = whole or latest, watched.holdable
            remaining = {triple: effect for triple, effect in triples(latest) if triple not in ranking}
            ranking |= {triple: remaining.pop(triple) for triple in list(_take_first(remaining, spans))}
            holds = holds_of([triple for triple in ranking if triple[2] in spans], spans)
        if whole is None:
            return None
        for triple, effect in (*remaining.items(), *triples(whole)):
            ranking.setdefault(triple, effect)
        return _effects(whole, dict(list(ranking.items())[:MOST_TRIPLES]))


def _take_first(ranking: Mapping[Triple, float], spans: Mapping[int, SpanRow]) -> Iterator[Triple]:
    """Give the beginning of a ranking that holds PER_ROUND triples which can be held."""
    count = 0
    for triple in ranking:
        if count == PER_ROUND:
            return
        count += triple[2] in spans
        yield triple


def triples(effects: Effects) -> list[tuple[Triple, float]]:
    """Return the triples in order, each with its effect in logits."""
    return list(zip(effects.order, effects.effect.tolist(), strict=True))


def choose_effects(effects: Effects, keep: Callable[[Triple], bool]) -> Effects:
    """Return the effects of the triples for which `keep` is true, in the same order."""
    return _effects(effects, {triple: effect for triple, effect in triples(effects) if keep(triple)})


def _effects(effects: Effects, ranking: Mapping[Triple, float]) -> Effects:
    ids = np.array(list(ranking), np.int32).reshape(-1, 3).T
    return replace(
        effects, layer=ids[0], kv_head=ids[1], span=ids[2], effect=np.array(list(ranking.values()), np.float32)
    )
