"""What a run that left full KV owes to what it did not read, found when it has ended (kvlens.engine.effect)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvlens.instruments import Effects, Loss, Oracle
from kvlens.rows import PrefillRecord, SpanRow, StepRecord
from kvlens.runs.preparing import Plan, Prepared
from kvlens.runs.readings import Reading
from kvlens.shortage import shortage

if TYPE_CHECKING:
    from kvlens.engine.comparison import Reference


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

    def effects(self, prepared: Prepared, planned: Plan, reading: Reading | None) -> tuple[list[Effects], str | None]:
        """(effects at the step of loss, why there are none where something was lost). The prompt is read once more
        where no reading of it was kept."""
        from kvlens.engine.effect import effects, reach

        if self._step is None:
            return [], None
        if self._steps[self._step][1] is None:
            return [], "full attention was not recorded at the step of loss"
        if not reach(prepared.engine.loaded.shape, len(prepared.prompt.ids) + len(self._reference.ids)):
            return [], "the context is too long"
        steps = [self._steps.get(step, (None, None)) for step in range(self._step + 1)]
        try:
            read = (
                reading()
                if reading is not None
                else prepared.engine.read(prepared.prompt, planned.options.prefill_chunk)
            )
            return effects(prepared.engine.loaded, read, self._reference, steps, self._spans), None
        except (RuntimeError, MemoryError) as failure:
            if shortage(failure, "effect") is None:
                raise
            return [], "the machine has too little memory for it"
