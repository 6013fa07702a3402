"""What a run that left full KV owes to what it did not read, found when the run has ended: the run follows full KV's
tokens in memory, and the effects on all lost steps of the answer rank what was missed (kvlens.engine.ranking)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import TYPE_CHECKING

from kvlens.instruments import Effects
from kvlens.records import PrefillRecord, StepRecord
from kvlens.rows import SpanRow
from kvlens.runs.answerend import answer_end, gives_answer
from kvlens.runs.preparing import Pairing, Plan, Prepared
from kvlens.runs.readings import QUERIES
from kvlens.runs.request import Report
from kvlens.shortage import shortage

UNRECORDED = "full attention was not recorded at the step of loss"
TOO_LONG = "the context is too long"
"""reasons why a run has no effects, as its meta holds them"""

if TYPE_CHECKING:
    from kvlens.engine.comparison import Reference
    from kvlens.engine.prefill import ReadPrompt


class Lost:
    """Keeps of a run's records where it left full KV, and the spans that it had by then."""

    def __init__(self, reference: Reference) -> None:
        self._reference = reference
        self._spans: set[SpanRow] = set()
        self._step: int | None = None
        self._last = -1
        """the run's newest step"""
        self._recorded = False

    def prefill(self, record: PrefillRecord) -> None:
        self._spans |= set(record.spans)

    def step(self, record: StepRecord) -> None:
        self._last = record.step
        if self._step is not None:
            return
        self._spans |= set(record.spans)
        if record.loss is not None and not record.loss.agrees:
            self._step, self._recorded = record.step, record.oracle is not None

    @property
    def any(self) -> bool:
        """The run left full KV."""
        return self._step is not None

    def effects(
        self,
        prepared: Prepared,
        planned: Plan,
        pairing: Pairing,
        reading: Callable[[], ReadPrompt] | None,
        follow: Report,
        check: Callable[[], None],
    ) -> tuple[Effects | None, str | None]:
        """Return (effects on the lost steps of the answer, why there are none where something was lost). The prompt is
        read once more where no reading of it was kept, which `follow` hears of. What `check` or `follow` raises to
        stop, and whatever goes wrong, costs the effects and nothing else: the run has ended."""
        from kvlens.engine.effect import reach
        from kvlens.engine.engine import Cancelled
        from kvlens.engine.rotary import frequencies_vary

        if self._step is None:
            return None, None
        if not self._recorded:
            return None, UNRECORDED
        prompt, loaded, reference = prepared.prompt, prepared.engine.loaded, self._reference
        tokens, whole = len(prompt.ids) + len(reference.ids), len(prompt.ids) + len(prompt.asked)
        if not reach(loaded.shape, tokens):
            return None, TOO_LONG
        if frequencies_vary(loaded.model.config, whole, tokens):
            return None, "the model's rotary frequencies change from step to step at this length"
        try:
            result = self._ranked(prepared, planned, pairing, reading, follow, check)
        except Cancelled:
            return None, "it was cancelled"
        except Exception as failure:
            short = shortage(failure)
            return None, str(short) if short is not None else f"it failed ({type(failure).__name__}: {failure})"
        if result is not None and not math.isfinite(result.lead):
            return None, "full KV gives one of the two tokens no probability at all"
        if result is None or not len(result.effect):
            return None, "no unread span raises full KV's token"
        if result.step > self._last:  # a repeat that rounds otherwise may be lost later
            return None, "its repeat on full KV's tokens agreed longer than the run has steps"
        return result, None

    def _ranked(
        self,
        prepared: Prepared,
        planned: Plan,
        pairing: Pairing,
        reading: Callable[[], ReadPrompt] | None,
        follow: Report,
        check: Callable[[], None],
    ) -> Effects | None:
        from kvlens.engine.effect import POINTS
        from kvlens.engine.ranking import ROUNDS, Repeat, choose_effects

        assert self._step is not None
        engine, prompt, needs = prepared.engine, prepared.prompt, planned.method.needs
        read = None if prepared.kept is None else prepared.kept.read
        if read is None or not read.serves(planned.method):
            queries, chunk = max(QUERIES, needs.queries), planned.options.prefill_chunk
            read = engine.read(prompt, chunk, queries, needs.received, follow) if reading is None else reading()

        def stop() -> bool:
            check()
            return False

        total = POINTS * (1 if planned.method.needs_with(planned.params).own_prompt else ROUNDS)
        numbers = itertools.count()

        def count_point() -> None:
            follow("effect", next(numbers), total)

        repeat = Repeat(
            engine,
            prompt,
            planned.method,
            planned.params,
            planned.budget,
            planned.options,
            self._reference,
            read,
            tuple(pairing.holds),
            tuple(pairing.drops),
        )
        has_answer = gives_answer(engine.loaded, prompt, self._reference)
        end = answer_end(engine.loaded, prompt, self._reference, self._step, has_answer)
        result = repeat.rank(end, stop, count_point)
        if result is None:
            return None
        ids = {row.span for row in self._spans}
        return choose_effects(result, lambda triple: triple[2] in ids)
