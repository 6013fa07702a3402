"""What a run that left full KV owes to what it did not read, found when it has ended (kvlens.engine.effect)."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

from kvlens.instruments import Effects, Loss, Oracle
from kvlens.rows import PrefillRecord, SpanRow, StepRecord
from kvlens.runs.preparing import Plan, Prepared
from kvlens.runs.request import Report
from kvlens.shortage import shortage

if TYPE_CHECKING:
    from kvlens.engine.comparison import Reference
    from kvlens.engine.prefill import ReadPrompt


class Lost:
    """Keeps of a run's records what the effects at its step of loss are made of: its spans, and full attention at the
    steps within reach."""

    def __init__(self, reference: Reference) -> None:
        self._reference = reference
        self._spans: list[SpanRow] = []
        self._steps: dict[int, tuple[Loss | None, Oracle | None]] = {}
        self._step: int | None = None

    def prefill(self, record: PrefillRecord) -> None:
        self._spans += record.spans

    def step(self, record: StepRecord) -> None:
        from kvlens.engine.effect import MOST_STEPS

        self._spans += record.spans
        if self._step is not None:
            return
        self._steps[record.step] = record.loss, record.oracle
        self._steps.pop(record.step - MOST_STEPS, None)
        if record.loss is not None and not record.loss.agrees:
            self._step = record.step

    @property
    def any(self) -> bool:
        """The run left full KV."""
        return self._step is not None

    def effects(
        self,
        prepared: Prepared,
        planned: Plan,
        reading: Callable[[], ReadPrompt] | None,
        follow: Report,
        check: Callable[[], None],
    ) -> tuple[list[Effects], str | None]:
        """(effects at the step of loss, why there are none where something was lost). The prompt is read once more
        where no reading of it was kept, which `follow` hears of. What `check` or `follow` raises to stop, and whatever
        goes wrong, costs the effects and nothing else: the run has ended."""
        from kvlens.engine.effect import effects, reach
        from kvlens.engine.engine import Cancelled
        from kvlens.engine.whole_length import frequencies_vary

        if self._step is None:
            return [], None
        if self._steps[self._step][1] is None:
            return [], "full attention was not recorded at the step of loss"
        if not reach(prepared.engine.loaded.shape, len(prepared.prompt.ids) + len(self._reference.ids)):
            return [], "the context is too long"
        prompt, config = prepared.prompt, prepared.engine.loaded.model.config
        whole = len(prompt.ids) + len(prompt.asked)
        if frequencies_vary(config, whole, len(prompt.ids) + len(self._reference.ids)):
            return [], "the model's rotary frequencies change from step to step at this length"
        steps = [self._steps.get(step, (None, None)) for step in range(self._step + 1)]
        kept_tokens, chunk = None if prepared.kept is None else prepared.kept.read, planned.options.prefill_chunk
        try:
            if kept_tokens is None:
                kept_tokens = prepared.engine.read(prompt, chunk, progress=follow) if reading is None else reading()
            with prepared.engine.whole(prompt):
                results = effects(prepared.engine.loaded, kept_tokens, self._reference, steps, self._spans, check=check)
        except Cancelled:
            return [], "it was cancelled"
        except Exception as failure:
            short = shortage(failure)
            return [], str(short) if short is not None else f"it failed ({type(failure).__name__}: {failure})"
        if not all(math.isfinite(item.lead) for item in results):
            return [], "full KV gives one of the two tokens no probability at all"
        named = any(len(item.effect) for item in results)
        return results, None if named else "nothing that was not read speaks for full KV's token"
