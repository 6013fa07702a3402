"""The counterfactual: a stored run is repeated with a span held exactly for some heads, everything else as it was.

It says what became of the step of loss and of the answer, and can look for the fewest heads that bring the answer back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from kvlens import tasks
from kvlens.instruments import Loss
from kvlens.lens.asked import Asked, holds_for, numbers
from kvlens.lens.search import Found, Head, Measured, Search
from kvlens.lens.trials import Trials
from kvlens.memory.holds import Hold, held_bytes, held_tokens
from kvlens.meta import Counterfactual
from kvlens.meta import Search as SearchMeta
from kvlens.runs.repeat import Past, read_run, reload
from kvlens.runs.request import Report

if TYPE_CHECKING:
    from kvlens.engine.engine import Result
    from kvlens.runs.storing import Stored

ANSWER_STEPS = 32
"""steps of an answer whose divergence a search adds up, at most"""


def whatif(
    runs_dir: Path, uid: str, asked: Asked, report: Report, cancelled: Callable[[], bool] = lambda: False
) -> tuple[Stored, Counterfactual | None]:
    """Carry it out and store the held run -> (the run, what holding changed, which is also its meta's `whatif`; None
    where it was cancelled).

    The run is free or forced as the run it repeats. Raises ValueError or TraceError, one sentence, when it cannot be
    repeated.
    """
    from kvlens.runs.preparing import Pairing, plan
    from kvlens.runs.reference import obtain, reference_key
    from kvlens.runs.storing import store

    past = read_run(runs_dir, uid)
    heads = tuple(
        (layer, head)
        for layer in numbers(asked.layers, past.layers, "layers")
        for head in numbers(asked.kv_heads, past.kv_heads, "heads")
    )
    holds = holds_for(past, asked, heads)
    if asked.from_step >= past.steps:
        raise ValueError(f"--from-step {asked.from_step}: run {uid} has {past.steps} steps, counted from 0.")
    prepared = reload(past, report)
    reference = obtain(prepared, past.request, runs_dir, report, cancelled)
    planned = plan(past.request, prepared)
    trials = Trials(
        prepared.engine,
        prepared.prompt,
        planned.method,
        planned.params,
        planned.budget,
        planned.options,
        reference,
        past.request.hold,
        report,
    )
    question = Question.about(past, trials, report)
    found = question.search(past, asked, heads, report, cancelled) if asked.search else None
    if found is not None and found.heads:
        holds = holds_for(past, asked, found.heads)
    request = past.request.model_copy(
        update={"against": True, "forced_reference": past.forced, "hold": (*past.request.hold, *holds)}
    )
    pairing = Pairing(reference, reference.uid, reference_key(request, prepared), uid, request.hold)
    said: list[Counterfactual] = []

    def conclude(result: Result) -> Counterfactual:
        said.append(question.answered(result, holds, past.forced, None if found is None else _as_meta(found)))
        return said[0]

    planned = plan(request, prepared, reference.ids if past.forced else None)
    return store(prepared, request, planned, pairing, runs_dir, report, cancelled, conclude), said[0] if said else None


@dataclass
class Question:
    """What was lost, and how to see whether it is back."""

    trials: Trials
    step: int | None
    """the step of loss; None: every step agrees with full KV"""
    kl_before: float | None
    """nats, at the step of loss"""
    answer_before: str
    expected: str
    by_answer: bool
    """the answer is known and full KV gives it, so it decides; else full KV's token at the step of loss does"""
    was_right: bool
    """nothing to bring back"""
    _losses: dict[tuple[Hold, ...], list[Loss | None]] = field(default_factory=dict)

    @classmethod
    def about(cls, past: Past, trials: Trials, report: Report) -> Question:
        """From what the run recorded, as far as it did; the rest is run again, which is reported as `again`."""

        def again(repeat: Callable[[Sequence[Hold]], Result]) -> Result:
            trials.ready()
            report("again", 0, 1)
            return repeat(())

        source, reference = past.source, trials.reference
        decode = trials.engine.loaded.tokenizer.decode
        asked = len(trials.prompt.asked)
        full_text = decode(list(reference.ids[asked:]), skip_special_tokens=True)
        by_answer = source.answer is not None and tasks.is_right(source.task, source.answer, full_text)
        before = past.text if past.whole and not past.forced else again(trials.free).text
        lost = [(step, kl) for step, (agrees, kl) in sorted(past.losses.items()) if not agrees]
        if not lost and len(past.losses) < len(reference.ids) - asked:
            losses = again(trials.forced).losses
            lost = [(step, loss.kl) for step, loss in enumerate(losses) if loss is not None and not loss.agrees]
        step, kl = lost[0] if lost else (None, None)
        expected = source.answer if by_answer and source.answer is not None else full_text
        right = tasks.is_right(source.task, expected, before) if by_answer else step is None
        return cls(trials, step, kl, before, expected, by_answer, right)

    # ---- with holds
    def losses(self, holds: tuple[Hold, ...]) -> list[Loss | None]:
        """Per step on the reference's tokens, through the end of the answer."""
        if holds not in self._losses:
            self._losses[holds] = self.trials.forced(holds, self.answer_end).losses
        return self._losses[holds]

    def agrees(self, holds: tuple[Hold, ...]) -> bool:
        """Full KV's token is the likeliest at the step of loss."""
        assert self.step is not None
        loss = self.losses(holds)[self.step]
        return loss is not None and loss.agrees

    def restored(self, holds: tuple[Hold, ...]) -> bool:
        """The answer is back."""
        if not self.by_answer:
            return self.agrees(holds)
        return tasks.is_right(self.trials.prompt.source.task, self.expected, self.trials.free(holds).text)

    @property
    def answer_end(self) -> int:
        """The step after the answer: after the line on which the step of loss lies, at most ANSWER_STEPS later."""
        assert self.step is not None
        ids, decode = self.trials.reference.ids, self.trials.engine.loaded.tokenizer.decode
        last = min(len(ids), self.step + ANSWER_STEPS)
        if not self.by_answer:
            return self.step + 1
        return next((step + 1 for step in range(self.step, last) if "\n" in decode([ids[step]])), last)

    def search(
        self, past: Past, asked: Asked, candidates: Sequence[Head], report: Report, cancelled: Callable[[], bool]
    ) -> Found:
        """The fewest of `candidates` that bring the answer back, as greedy search finds them. What it makes small is
        the sum of KL(full || method) over the steps from the step of loss to the end of the answer."""
        if self.step is None or self.was_right:
            raise ValueError(
                f"run {past.uid} lost nothing that could be brought back: search a run whose answer or tokens differ."
            )

        self.trials.ready()
        report("search", 0, len(candidates))

        def held(heads: tuple[Head, ...]) -> tuple[Hold, ...]:
            if cancelled():
                raise ValueError("cancelled while searching; nothing was stored.")
            return holds_for(past, asked, heads)

        def measure(heads: tuple[Head, ...]) -> Measured:
            holds = held(heads)
            losses = self.losses(holds)[self.step :]
            return Measured(sum(loss.kl for loss in losses if loss is not None), self.agrees(holds))

        def told(tried: int) -> None:
            report("search", tried, max(tried, len(candidates)))

        return Search(measure, lambda heads: self.restored(held(heads)), told).run(candidates)

    def answered(
        self, result: Result, holds: tuple[Hold, ...], forced: bool, search: SearchMeta | None
    ) -> Counterfactual:
        """The summary of the stored run `result`, in which `holds` were kept."""
        shape = self.trials.engine.loaded.shape
        loss: Loss | None = None
        if self.step is not None:
            loss = result.losses[self.step] if self.step < len(result.losses) else None
            loss = loss or self.losses(holds)[self.step]
        text = self.trials.free(holds).text if forced else result.text
        back = (
            tasks.is_right(self.trials.prompt.source.task, self.expected, text)
            if self.by_answer
            else loss is not None and loss.agrees
        )
        return Counterfactual(
            step=self.step,
            kl_before=self.kl_before,
            kl_after=None if loss is None else loss.kl,
            answer_before=self.answer_before,
            answer_after=text,
            expected=self.expected,
            expected_from="task" if self.by_answer else "reference",
            restored=None if self.was_right else back,
            agrees_after=None if loss is None else loss.agrees,
            held_bytes=held_bytes(holds, shape),
            held_tokens=held_tokens(holds),
            search=search,
        )


def _as_meta(found: Found) -> SearchMeta:
    return SearchMeta(
        heads=found.heads,
        tried=found.tried,
        kl=found.kl,
        everywhere=found.everywhere,
        alone=tuple((layer, head, kl) for (layer, head), kl in found.alone),
    )
