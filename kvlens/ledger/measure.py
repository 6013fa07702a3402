"""The loss ledger, measured: each set of causes is repaired in a run of its own, and the lead that comes back is split.

The run follows full KV's tokens, so every run has the same contexts. The lead is the logit of full KV's token minus
that of the run's token, added over the lost steps of the answer. A cause is repaired by holding its spans exactly for
their KV heads. What a repair brings depends on what else is repaired, so the lead is split by Shapley values over all
sets of causes (kvlens.ledger.account.split), which add up exactly to what all repairs together bring. The rest is what
they do not bring. Ours; no paper does it.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from kvlens.holds import Hold
from kvlens.ledger.account import Coalition, LossLedger, Share, split
from kvlens.ledger.classify import Causes, classify
from kvlens.ledger.story import Story
from kvlens.lens.method_reasons import MethodReasons
from kvlens.methods.base import Method
from kvlens.methods.parts import part

if TYPE_CHECKING:
    from kvlens.engine.engine import Result
    from kvlens.lens.trials import Trials


def _silent(count: int, total: int) -> None:
    """Report to nobody."""


class NothingLost(ValueError):
    """The run agrees with full KV at every step of the answer."""


def always_waits(method: type[Method], params: Any) -> bool:
    """Return whether, with these parameters, every selection of the method is read from the next step on."""
    reasons = MethodReasons(part(method, "reasons", "kvlens.lens.methods"))
    return bool(reasons.ask("waits", dataclasses.asdict(params)))


class Measure:
    """The measurement of one run's ledger. Each set of causes is run once."""

    def __init__(self, trials: Trials, end: int) -> None:
        """trials: repeats of the run; end: the step after the answer. Raises NothingLost if every step before `end`
        agrees with full KV."""
        self._start = time.perf_counter()
        self.trials, self.end = trials, end
        self.story = Story(trials.engine.loaded.shape)
        base = trials.followed(end, self.story)
        self.logits = base.logits
        """float32 [V] of every step of the run on full KV's tokens"""
        self.pairs = tuple(
            (step, int(trials.reference.logits[step].argmax()), loss.top_token)
            for step, loss in enumerate(base.losses)
            if loss is not None and not loss.agrees
        )
        if not self.pairs:
            raise NothingLost("the run agrees with full KV at every step of the answer: there is no lead to split.")
        waits = always_waits(trials.method, trials.params)
        self.causes: Causes = classify(self.story, len(trials.prompt.asked), waits)
        self._leads: dict[Coalition, float] = {frozenset(): self._lead(base)}
        self._agrees: dict[Coalition, bool] = {frozenset(): False}

    def holds(self, causes: Coalition) -> tuple[Hold, ...]:
        """Return what repairs the causes."""
        return self.causes.holds(causes)

    def lead(self, causes: Coalition) -> float:
        """Return the lead, in logits, with these causes repaired."""
        if causes not in self._leads:
            result = self.trials.followed(self.end, None, self.holds(causes))
            self._leads[causes] = self._lead(result)
            self._agrees[causes] = all(loss is None or loss.agrees for loss in result.losses)
        return self._leads[causes]

    def agrees(self, causes: Coalition) -> bool:
        """Return whether every step of the answer has full KV's token with these causes repaired."""
        self.lead(causes)
        return self._agrees[causes]

    def _lead(self, result: Result) -> float:
        return sum(float(result.logits[step][token] - result.logits[step][rival]) for step, token, rival in self.pairs)

    def account(
        self, restored: Callable[[tuple[Hold, ...]], bool] | None = None, report: Callable[[int, int], None] = _silent
    ) -> LossLedger:
        """Return the ledger.

        restored: whether the answer of a free run is back with something held; it is asked where a cause alone does not
        bring back full KV's token at every step of the answer. report(count, total): hears of the runs."""
        active = self.causes.active
        total = 2 ** len(active)

        def value(causes: Coalition) -> float:
            report(len(self._leads), total)
            return self.lead(causes)

        shapley = split(active, value)
        shares = []
        for cause in active:
            alone = frozenset((cause,))
            spans = self.causes.triples(cause)
            mass = self.causes.mass(cause)
            back = self.agrees(alone) or (None if restored is None else restored(self.holds(alone)))
            gain = self.lead(alone) - self.lead(frozenset())
            shares.append(Share(cause, shapley[cause], gain, len(spans), mass, spans[0] if mass > 0 else None, back))
        logits = self.trials.reference.logits
        full = sum(float(logits[step, token] - logits[step, rival]) for step, token, rival in self.pairs)
        rest = full - self.lead(frozenset(active))
        steps = tuple(step for step, _, _ in self.pairs)
        seconds = time.perf_counter() - self._start
        return LossLedger(steps, full, self.lead(frozenset()), tuple(shares), rest, total, seconds)
